"""How commands end early: one line and an exit code, whoever reads, wherever they write, whenever they are stopped."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_bwgemm.bench import candidates, machine
from jax_bwgemm.cli import bench, build, doctor, emulate, explain
from jax_bwgemm.cli.main import COMMANDS, main
from jax_bwgemm.cli.outputs import check_directory, check_file
from jax_bwgemm.runtime import ffi

PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]
RESULT = ROOT / "jax_bwgemm" / "bench" / "results" / "h200.json"
PRINTING = {  # commands that need nothing
    "help": "--help",
    "version": "--version",
    "help of a command": "bench --help",
    "explain": "explain 4096 4096 4096",
    "explain json": "explain 4096 4096 4096 --json",
    "doctor": "doctor",
    "doctor json": "doctor --json",
    "bench": f"bench --render {RESULT}",
}


def command(text: str) -> list[str]:
    return [sys.executable, "-m", "jax_bwgemm", *text.split()]


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which `doctor` has little to hash."""
    return os.environ | {"JAX_BWGEMM_ARTIFACTS": str(tmp_path), "JAX_BWGEMM_LIBCUDA": "libno.so"}


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("text", PRINTING.values(), ids=PRINTING)
def test_a_reader_that_leaves_is_no_error_message(text: str, buffered: bool, bare: dict[str, str]) -> None:
    given = command(text) if buffered else [sys.executable, "-u", *command(text)[1:]]
    with subprocess.Popen(given, cwd=ROOT, env=bare, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 1


@pytest.mark.parametrize("text", PRINTING.values(), ids=PRINTING)
def test_a_full_disk_is_one_line(text: str, bare: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(text), cwd=ROOT, env=bare, stdout=full, stderr=subprocess.PIPE, text=True)
    who = "jax_bwgemm" if text.startswith("--") else f"jax_bwgemm {text.split()[0]}"
    assert done.stderr == f"{who}: [Errno 28] No space left on device\n" and done.returncode == 2


def test_stderr_may_be_closed_too() -> None:
    given = ["sh", "-c", 'exec "$0" "$@" >/dev/full 2>&-', *command("explain 4096 4096 4096")]
    assert subprocess.run(given, cwd=ROOT).returncode == 2


def test_stdout_may_be_closed_from_the_start() -> None:
    given = ["sh", "-c", 'exec "$0" "$@" >&-', *command("explain 4096 4096 4096")]
    done = subprocess.run(given, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", ["bench --shapes 128x128x128", "bench --soak 1", "bench --tune"])
def test_what_needs_a_gpu_says_so_at_once(text: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Not that one may be planned for, which would not help."""
    monkeypatch.setattr(candidates, "target_arch", lambda _: f"no CUDA device here; to plan for one, {text}")
    assert main([*text.split(), "--json", str(tmp_path / "x.json")]) == 2
    who = " ".join(text.split()[:2]) if "--shapes" not in text else "bench"
    sentence = f"jax_bwgemm bench: `{who}` requires a Hopper or Blackwell GPU, got none: no CUDA device here\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        print("so far")
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(COMMANDS[name], "run", run)
    assert main([name, *(["1", "1", "1"] if name == "explain" else [])]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("so far\n", f"jax_bwgemm {name}: interrupted\n")


@pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
def test_ctrl_c_of_a_terminal() -> None:
    """To the whole group, in the middle of an emulation."""
    given = [sys.executable, "-u", *command("emulate --shape 2048x2048x2048 --arch sm_90a")[1:]]
    options = {"start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(given, cwd=ROOT, **options) as done:
        assert done.stdout is not None and done.stderr is not None
        if not done.stdout.readline():
            pytest.skip(f"needs kernels: {done.stderr.read().decode()}")
        os.killpg(done.pid, signal.SIGINT)
        assert done.stderr.read() == b"jax_bwgemm emulate: interrupted\n"
    assert done.returncode in (130, -signal.SIGINT)  # the latter if it was in an import; a shell calls both 130


def test_ctrl_c_in_a_callback_of_the_garbage_collector(monkeypatch, capsys) -> None:
    """Python swallows what is raised there."""

    def callback(phase: str, info: object) -> None:
        if phase == "start":
            gc.callbacks.remove(callback)
            signal.raise_signal(signal.SIGINT)

    def run(args: object) -> int:
        gc.callbacks.append(callback)
        gc.collect()
        time.sleep(PATIENCE_S)
        return 0

    monkeypatch.setattr(doctor, "run", run)
    hook = sys.unraisablehook
    assert main(["doctor"]) == 130 and sys.unraisablehook is hook
    assert capsys.readouterr().err == "jax_bwgemm doctor: interrupted\n"


WRITING = (
    "build --only sm_90a_pad_8bit --packs {}",
    "bench --json {}",
    "bench --plots {}",
    "bench --tune --table {}",
    "bench --regret 5 --json {}",
    "bench --models --json {}",
    f"bench --render {RESULT} --plots {{}}",
    "emulate --timeline {}",
    "explain 4096 4096 4096 --plot {}.png",
)


@pytest.mark.parametrize("place", ["/dev/null/here", "/proc/here"])
@pytest.mark.parametrize("text", WRITING)
def test_what_cannot_be_written_is_said_before_the_work(text, place, monkeypatch, capsys) -> None:
    works = [(bench, "_measure"), (bench, "_render"), (emulate, "_kernel"), (explain, "_product"), (build, "_targets")]
    for module, name in works:
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("worked"))
    monkeypatch.setattr(machine, "RESULTS", Path("/proc/results"))
    assert main(text.format(place).split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and place in error


def test_results_that_have_no_place(monkeypatch, capsys) -> None:
    """As of an installation that nobody can write to."""
    monkeypatch.setattr(machine, "RESULTS", Path("/proc/results"))
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "`bench` requires a place for its results, got" in error and error.endswith(": pass --json OUT\n")


def test_trying_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    check_file(tmp_path / "old")
    check_file(tmp_path / "new" / "file")
    check_directory(tmp_path / "new" / "deep")
    assert (tmp_path / "old").read_text() == "old" and list(tmp_path.iterdir()) == [tmp_path / "old"]
    (tmp_path / "own").mkdir()
    check_directory(tmp_path / "own")
    check_file(tmp_path / "own" / "new" / "file")
    assert list((tmp_path / "own").iterdir()) == []
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written: Is a directory"):
        check_file(tmp_path)
    with pytest.raises(OSError, match="cannot be written: (File exists|Not a directory)"):
        check_directory(tmp_path / "old")


def test_a_merge_that_is_refused_makes_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--merge", str(tmp_path / "none.json"), "--json", str(tmp_path / "x" / "y.json")]) == 2
    assert "a result file requires" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_help_of_every_command(capsys) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0 and COMMANDS[name].HELP[:20] in capsys.readouterr().out
    assert doctor.HELP
