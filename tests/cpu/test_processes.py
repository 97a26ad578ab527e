"""Processes of our own: the compile worker, and a build, as they are killed, time out or lose who started them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import jit_build
from jax_bwgemm.runtime.artifacts import Manifest, verify

ROOT = Path(__file__).parents[2]
VARIANT = Variant("sm_90a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(128, 128))
PATIENCE_S = 60.0
needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTeDSL")


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status[0] != "Z"  # nobody may be there to wait for an orphan


def until(condition: Callable[[], object]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_S
        time.sleep(0.05)


def session_of(pid: int) -> list[int]:
    """Living processes of the session that `pid` leads."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            status = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(status[3]) == pid and status[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], list[int]]]:
    """Has the compile worker be a shell script; returns what reads the ids that it wrote to `$OUT`."""

    def make(script: str) -> Callable[[], list[int]]:
        program, out = tmp_path / "python", tmp_path / "ids"
        program.write_text(f"#!/bin/sh\nOUT={out}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return lambda: [int(word) for word in out.read_text().split()] if out.exists() else []

    return make


def test_the_end_of_a_killed_worker_is_seen_at_once(worker, tmp_path):
    """Though a process that it started lives on, with all that it had open."""
    ids = worker("sleep 30 & echo $! > $OUT; kill -9 $$")
    start = time.monotonic()
    assert jit_build.build_in_a_process(VARIANT, tmp_path) == "it was ended by signal 9"
    assert time.monotonic() - start < 15
    os.kill(*ids(), signal.SIGKILL)


def test_after_a_timeout_nothing_is_left(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(jit_build, "TIMEOUT_S", 1.0)
    ids = worker("sleep 30 & echo $$ $! > $OUT; wait")
    start = time.monotonic()
    assert jit_build.build_in_a_process(VARIANT, tmp_path) == "it took more than 1 s"
    assert time.monotonic() - start < 15
    assert len(ids()) == 2
    until(lambda: not any(map(is_running, ids())))


def test_an_exception_leaves_nothing(worker, tmp_path):
    """Such as Ctrl-C, which a terminal does not send to another session."""
    ids = worker("sleep 30 & echo $$ $! > $OUT; wait")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            jit_build.build_in_a_process(VARIANT, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(ids()) == 2
    until(lambda: not any(map(is_running, ids())))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo 'it spills' >&2; exit 1", "it spills"),
        ("exit 3", "exit status 3"),
        (r"head -c 1000000 /dev/zero | tr '\0' x >&2; printf '\n\377last\n' >&2; exit 1", "\ufffdlast"),
        ("echo loud; exit 0", None),
    ],
)  # fmt: skip
def test_what_a_worker_said_last(worker, tmp_path, script, reason):
    worker(script)
    assert jit_build.build_in_a_process(VARIANT, tmp_path) == reason


def has_open(pid, path):
    """A file may be closed while they are looked at."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd) == path:
                return True
    return False


def test_a_worker_ends_with_its_caller(tmp_path):
    """The caller is killed while its worker waits for the lock of the directory."""
    code = (
        "import json, sys; from pathlib import Path; from jax_bwgemm.runtime import jit_build; "
        "from jax_bwgemm.facts.variant import Variant; "
        f"jit_build.build_in_a_process(Variant.from_json(json.loads(sys.argv[1])), Path({str(tmp_path)!r}))"
    )
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", code, json.dumps(VARIANT.to_json())]
        caller = subprocess.Popen(command, cwd=ROOT)
        try:
            children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children")
            until(lambda: children.read_text().split())
            (pid,) = map(int, children.read_text().split())
            until(lambda: has_open(pid, lock.name))
        finally:
            caller.kill()
            caller.wait()
        until(lambda: not is_running(pid))


def test_a_worker_whose_caller_is_gone_does_nothing(tmp_path):
    command = [sys.executable, "-m", "jax_bwgemm.runtime.jit_build", json.dumps(VARIANT.to_json()), str(tmp_path), "1"]
    assert subprocess.run(command, cwd=ROOT).returncode == 1
    assert list(tmp_path.iterdir()) == []


@needs_dsl
@pytest.mark.parametrize(
    "end", [signal.SIGTERM, *(pytest.param(x, marks=pytest.mark.long) for x in (signal.SIGINT, signal.SIGKILL))]
)
def test_a_build_that_is_ended_ends_all_of_it(tmp_path, end):
    """And leaves a manifest of what is done, if it may."""
    only = "sm_90a_bf16_bf16_bf16_knn_*_identity"
    command = [sys.executable, "-m", "jax_bwgemm", "build", "--only", only, "--jobs", "1", "--out", str(tmp_path)]
    settings = {"cwd": ROOT, "start_new_session": True}
    with (
        (tmp_path.parent / f"{tmp_path.name}.stderr").open("w+b") as said,
        subprocess.Popen(command, stderr=said, **settings) as build,
    ):
        until(lambda: len(session_of(build.pid)) > 1)
        time.sleep(2.0)  # it compiles
        if end == signal.SIGINT:
            os.killpg(build.pid, end)  # as a terminal's Ctrl-C
        else:
            build.send_signal(end)
        code = build.wait(PATIENCE_S)
        said.seek(0)
        if end != signal.SIGKILL:
            assert said.read() == (b"jax_bwgemm build: interrupted\n" if end == signal.SIGINT else b"")
    until(lambda: not session_of(build.pid))
    if end == signal.SIGKILL:
        assert not (tmp_path / "manifest.json").exists()
        return
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[end]
    names = set(Manifest.load(tmp_path).entries)
    assert verify(tmp_path) == []
    assert {path.name.partition(".")[0] for path in tmp_path.glob("sm_*")} == names
