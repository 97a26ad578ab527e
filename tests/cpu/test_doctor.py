"""`doctor`: whatever a machine lacks is a line with a remedy, and what this machine does not need is no problem."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_machine
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts

from jax_bwgemm.cli import doctor, doctor_checks, doctor_gpus, doctor_trials
from jax_bwgemm.cli.doctor_checks import Finding
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner import measured
from jax_bwgemm.runtime import artifacts, ffi, packs
from jax_bwgemm.runtime.config import Config

ROOT = Path(__file__).parents[2]
HOPPER, BLACKWELL = (Variant(t, *["bfloat16"] * 3, "k", "n", Tile(128, 128)) for t in ("sm_90a", "sm_100f"))
H200 = ARCHS["h200"]
OR_VARIABLE = ", or correct or unset JAX_BWGEMM_ARTIFACTS"
needs_driver = pytest.mark.skipif(fake_machine.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture
def driver(tmp_path: Path, fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A fresh stand-in, which `doctor` asks."""
    path = shutil.copy(fake_driver, tmp_path / "libcuda.so.1")
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", str(path))
    return ctypes.CDLL(path)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kernels").mkdir()
    for name in [name for name in os.environ if name.startswith("JAX_BWGEMM_")]:  # those of these tests, too
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_BWGEMM_COMPILE_MISSING", "never")
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "kernels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_fake_artifacts(tmp_path / "kernels", [fake_entry(HOPPER), fake_entry(BLACKWELL)])
    return tmp_path / "kernels"


def states(findings) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


def test_on_a_machine_with_nothing(tmp_path: Path) -> None:
    nowhere = {"JAX_BWGEMM_ARTIFACTS": str(tmp_path), "JAX_BWGEMM_LIBRARY": str(tmp_path / "none.so")}
    environment = os.environ | nowhere | {"JAX_BWGEMM_LIBCUDA": str(tmp_path / "none.so.1")}
    command = [sys.executable, "-m", "jax_bwgemm", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert "[problem] library: jax_bwgemm requires libjax_bwgemm_ffi.so" in done.stdout
    assert f"[warning] kernels: no cubins: {tmp_path}/manifest.json cannot be read" in done.stdout
    assert "run `python -m jax_bwgemm build`" in done.stdout
    assert "[warning] driver: none" in done.stdout and "correct or unset JAX_BWGEMM_LIBCUDA" in done.stdout
    assert "correct or unset JAX_BWGEMM_LIBRARY" in done.stdout and "unset JAX_BWGEMM_ARTIFACTS" in done.stdout
    assert f"JAX_BWGEMM_LIBRARY requires a path that exists, got {tmp_path}/none.so; JAX_BWGEMM_LIBCUDA" in done.stdout
    rest = "`explain` and `emulate` work once this is mended: library, kernels"
    assert done.stdout.splitlines()[-1] == f"[warning] runs: XLA's own dot, for want of a GPU; {rest}"
    done = subprocess.run([*command, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["ok"] is False and said["findings"][0]["what"] == "python"


@pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
def test_without_a_gpu_nothing_is_a_problem(kernels, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "libno.so")
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and {key for finding in said["findings"] for key in finding} == {
        "what",
        "state",
        "text",
        "remedy",
    }
    assert states(SimpleNamespace(**finding) for finding in said["findings"]) == {
        "python": "ok", "jax": "ok", "settings": "ok", "library": "ok", "kernels": "ok", "cache": "ok",
        "driver": "warning", "runs": "warning",
    }  # fmt: skip


def test_settings_that_name_places_and_none_of_ours(kernels, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "libno.so")  # which the loader looks for
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path))
    found, _ = doctor_checks.settings()
    assert found.state == "ok" and f"JAX_BWGEMM_TABLES={tmp_path}, JAX_BWGEMM_LIBCUDA=libno.so" in found.text
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", f"{kernels}{os.pathsep}{tmp_path / 'none'}")
    monkeypatch.setenv("JAX_BWGEMM_TABELS", "x")
    found, asked = doctor_checks.settings()
    assert found.state == "warning" and found.remedy == "correct or unset it" and asked is not None
    assert found.text.endswith(
        f"; JAX_BWGEMM_ARTIFACTS requires a path that exists, got {tmp_path / 'none'}; "
        "JAX_BWGEMM_TABELS is no variable of this package"
    )


@pytest.mark.parametrize("name", ["DEVICE", "ON_FALLBACK", "EMULATE", "COMPILE_MISSING"])
def test_settings_that_every_product_would_refuse(name, kernels, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "libno.so")
    monkeypatch.setenv(f"JAX_BWGEMM_{name}", "nonsense")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (said,) = (line for line in lines if "settings:" in line)
    assert said.startswith("[problem] settings: ") and f"got 'nonsense', from JAX_BWGEMM_{name}; set or unset" in said
    assert lines[-1] == "[problem] runs: nothing, until this is mended: settings"


@pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
def test_what_the_emulator_runs(kernels, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "libno.so")
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_90a")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "settings: JAX_BWGEMM_EMULATE=sm_90a, JAX_BWGEMM_COMPILE_MISSING=never" in text
    assert text.endswith("[  ok   ] runs: our kernels for sm_90a in the emulator, planned as h200\n")
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_100a")
    assert main(["doctor"]) == 1
    assert "kernels: this machine requires kernels for sm_100a, got none" in capsys.readouterr().out


def test_what_a_device_that_is_set_runs() -> None:
    assert "planned as h100" in doctor.verdict([H200], Config(device="h100"), []).text
    found = doctor.verdict([H200], Config(device="b200"), [])
    assert found.state == "problem" and "requires sm_90a; unset JAX_BWGEMM_DEVICE" in str(found)


@needs_driver
def test_gpus_by_their_properties(driver) -> None:
    findings, archs = doctor_gpus.examine()
    assert [finding.state for finding in findings] == ["ok"] * 3
    assert findings[0].text == "CUDA 13.0"
    size = "NVIDIA H200, compute capability 9.0, 132 SMs, 141 GiB"
    assert [finding.text for finding in findings[1:]] == [f"{i}: {size}, planned as h200" for i in (0, 1)]
    assert [arch.name for arch in archs] == ["h200", "h200"]
    driver.fake_set(b"sms", 114)
    assert [arch.num_sms for arch in doctor_gpus.examine()[1]] == [114, 114]
    driver.fake_set(b"major", 8)
    findings, archs = doctor_gpus.examine()
    assert archs == [] and findings[1].state == "warning"
    assert "XLA's own dot, because a device requires compute capability 9.0, 10.0, 10.3, got 8.0" in findings[1].text
    driver.fake_set(b"gpus", 0)
    findings, archs = doctor_gpus.examine()
    assert states(findings) == {"driver": "ok", "gpu": "warning"} and archs == []
    driver.fake_fail(b"cuInit", 100)  # CUDA_ERROR_NO_DEVICE
    assert states(doctor_gpus.examine()[0]) == {"driver": "ok", "gpu": "warning"}


@needs_driver
@pytest.mark.parametrize(
    ("capability", "version", "sentence"),
    [
        ((9, 0), 11080, "the kernels for sm_90a require a driver of CUDA 12.0, got CUDA 11.8"),
        ((9, 0), 12000, None),
        ((10, 0), 12060, "the kernels for sm_100f require a driver of CUDA 12.9, got CUDA 12.6"),
        ((10, 3), 12080, "the kernels for sm_100f require a driver of CUDA 12.9, got CUDA 12.8"),
        ((10, 3), 13000, None),
    ],
)
def test_a_driver_that_is_too_old_for_the_cubins(capability, version, sentence, driver) -> None:
    driver.fake_set(b"major", capability[0])
    driver.fake_set(b"minor", capability[1])
    driver.fake_set(b"version", version)
    finding = doctor_gpus.examine()[0][0]
    assert (finding.state, finding.remedy) == (("problem", "update the driver") if sentence else ("ok", None))
    assert sentence is None or finding.text == sentence


@needs_driver
@pytest.mark.parametrize("function", ["cuDriverGetVersion", "cuInit", "cuDeviceGetCount", "cuDeviceGetName"])
def test_a_driver_that_fails(function, driver) -> None:
    driver.fake_fail(function.encode(), 999)
    (finding,), archs = doctor_gpus.examine()
    assert finding.state == "problem" and f"{function} requires 0, got error 999" in finding.text and archs == []
    assert finding.remedy


@needs_driver
def test_a_machine_is_examined_as_a_whole(kernels, driver, monkeypatch) -> None:
    said = [Finding("product bfloat16", "ok", "right"), Finding("command buffer", "warning", "not captured")]
    monkeypatch.setattr(doctor_gpus, "trials", lambda: iter(said))
    monkeypatch.setattr(doctor_checks, "library", lambda: Finding("library", "ok", "loads"))
    monkeypatch.setattr(doctor_checks, "jax", lambda has_gpu: Finding("jax", "ok", str(has_gpu)))
    findings = list(doctor.examine())
    assert findings[-1].text == "our kernels for sm_90a, planned as h200" and said[0] in findings
    assert findings[1].text == "True"
    said.append(Finding("product int8", "problem", "wrong"))
    assert list(doctor.examine())[-1].text.endswith("until this is mended: product int8")
    monkeypatch.setattr(doctor_gpus, "trials", lambda: pytest.fail("what is broken is not tried"))
    (kernels / f"{HOPPER.name}.cubin").write_bytes(b"damaged")
    assert list(doctor.examine())[-1].state == "problem"


def test_kernels_of_this_machine(kernels: Path) -> None:
    (fine,) = doctor_checks.kernels({"sm_90a"})
    assert fine.state == "ok" and fine.text.startswith("1 kernels for sm_100f, 1 kernels for sm_90a in ")
    assert fine.text.endswith(f"{kernels}, as files, hashes right")
    missing = list(doctor_checks.kernels({"sm_100a"}))
    assert missing[1] == Finding(
        "kernels", "problem", "this machine requires kernels for sm_100a, got none", packs.REMEDY + OR_VARIABLE
    )
    (kernels / f"{BLACKWELL.name}.cubin").write_bytes(b"damaged")
    (damaged,) = doctor_checks.kernels({"sm_90a"})
    assert (
        damaged.state == "warning"
        and "requires sha256" in damaged.text
        and damaged.remedy == artifacts.REMEDY + OR_VARIABLE
    )
    for targets in ({"sm_100f"}, set()):
        assert [finding.state for finding in doctor_checks.kernels(targets)] == ["problem"]
    (kernels / f"{HOPPER.name}.cubin").unlink()
    (both,) = doctor_checks.kernels({"sm_90a"})
    assert both.state == "problem" and HOPPER.name in both.text and both.text.endswith("(1 more like it)")


def test_packs_of_this_machine(kernels, tmp_path, monkeypatch) -> None:
    """The PTX of the fake kernels is none, which a pack of cubins does not mind."""
    out = tmp_path / "packs"
    out.mkdir()
    for kernel in (HOPPER, BLACKWELL):
        for name, content in (("cubin", kernel.name.encode()), ("ptx", b"")):
            packs.write(out, f"{kernel.target}.{name}", {kernel.name: content})
        artifacts.write_manifest(out, [fake_entry(kernel)], "", f"{kernel.target}.json")
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(out))
    (fine,) = doctor_checks.kernels({"sm_90a"})
    assert fine.text == f"1 kernels for sm_90a, 1 kernels for sm_100f in {out}, packed, hashes right"
    (out / "sm_100f.cubin.xz").write_bytes(b"damaged")
    (other,) = doctor_checks.kernels({"sm_90a"})
    assert (other.state, other.remedy) == ("warning", packs.REMEDY + OR_VARIABLE)
    (out / "sm_100f.json").unlink()  # a part of an installation that this machine does not need
    assert [finding.state for finding in doctor_checks.kernels({"sm_90a"})] == ["ok"]
    (out / "sm_90a.ptx.xz").unlink()
    assert [finding.state for finding in doctor_checks.kernels({"sm_90a"})] == ["problem"]


def test_the_cache(kernels) -> None:
    root = kernels.parent / "cache" / "jax_bwgemm"
    (none,) = doctor_checks.caches()
    assert none.state == "ok" and none.text == f"none yet; it would be {root}"
    (root / "tables").mkdir(parents=True)
    root.chmod(0o700)
    (fine,) = doctor_checks.caches()
    assert (fine.state, fine.text) == ("ok", f"{root} is this user's alone")
    (root / "tables").chmod(0o777)
    (theirs,) = doctor_checks.caches()
    assert theirs.state == "warning" and "that nobody else can write to, got one of user" in theirs.text
    assert "remove it, or set XDG_CACHE_HOME" in theirs.text


def test_times_of_other_kernels_are_said(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each table of the devices of this machine, by the cubins of its times."""
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path / "own"))
    assert list(doctor_checks.times([H200])) == list(doctor_checks.times([])) == []
    cubin = fake_entry(HOPPER).cubin_sha256[: measured.CUBIN_DIGITS]

    def save(path: Path, *cubins: str) -> None:
        found = [
            measured.Record(
                measured.key(Problem(64 * i, 64, 64)), measured.now(), (measured.Time(str(HOPPER.tile), False, 2.0, x),)
            )
            for i, x in enumerate(cubins, 1)
        ]
        measured.save(measured.Table("h200", {}, {record.problem: record for record in found}), path)

    save(measured.user_path("h200"), cubin)
    save(measured.shipped_path("h200"), cubin, "0" * measured.CUBIN_DIGITS)
    fine, other = doctor_checks.times([H200, H200])
    assert (fine.state, other.state) == ("ok", "warning")
    assert fine.text == f"1 products in {measured.user_path('h200')}, timed with these kernels"
    assert other.text.startswith("1 of 2 products in ") and "bench --tune" in (other.remedy or "")
    measured.user_path("h200").write_text("{")
    assert next(doctor_checks.times([H200])).text.startswith("a table of times requires what this version writes")
    for kernel in (HOPPER, BLACKWELL):
        (kernels / f"{kernel.name}.cubin").unlink()
    (kernels / "manifest.json").write_text("{")  # which `kernels` says
    assert list(doctor_checks.times([H200]))[1].text.startswith("2 of 2 products")


@pytest.mark.parametrize(
    ("versions", "has_gpu", "state", "text"),
    [
        ({"jax": "0.9.2", "jaxlib": "0.9.2"}, False, "ok", "jax 0.9.2"),
        ({"jax": "0.9.1", "jaxlib": "0.9.1"}, False, "problem", "requires jax 0.9.2 or newer"),
        ({}, False, "problem", "requires jax 0.9.2 or newer"),
        ({"jax": "0.10.0", "jaxlib": "0.10.0"}, True, "warning", "a GPU requires JAX's CUDA plugin, got none"),
        ({"jax": "0.10.0", "jaxlib": "0.10.0", "jax-cuda12-plugin": "0.10.0"}, True, "ok", "jax-cuda12-plugin 0.10.0"),
        ({"jax": "0.10.0", "jaxlib": "0.10.0", "jax-cuda13-plugin": "0.9.2"}, True, "warning", "requires jaxlib's"),
        ({"jax": "1.0.0.dev20270101", "jaxlib": "1.0.0.dev20270101"}, False, "ok", "jax 1.0.0.dev20270101"),
    ],
)
def test_versions_of_jax(versions, has_gpu, state, text, monkeypatch) -> None:
    monkeypatch.setattr(doctor_checks, "_version", versions.get)
    finding = doctor_checks.jax(has_gpu)
    assert finding.state == state and text in finding.text and (finding.remedy is None) == (state == "ok")


@pytest.mark.parametrize(
    ("code", "rest"), [(0, []), (3, ["exit status 3: last words"]), (-11, ["signal 11: last words"])]
)
def test_what_products_say_is_passed_on(code, rest) -> None:
    def run(command, **options):
        assert (
            command[-1] == "jax_bwgemm.cli.doctor_trials" and options["env"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        )
        lines = [json.dumps(dataclasses.asdict(Finding("product int8", "ok", "right"))), "noise"]
        return subprocess.CompletedProcess(command, code, "\n".join(lines), "first\nlast words\n")

    first, *more = doctor_gpus.trials(run)
    assert first == Finding("product int8", "ok", "right")
    assert [(x.state, x.text.rpartition("got ")[2]) for x in more] == [("problem", text) for text in rest]


def test_products_that_hang() -> None:
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    (late,) = doctor_gpus.trials(hang)
    assert late.state == "problem" and "took more than 300 s" in late.text


def test_the_program_of_products_runs_without_a_gpu() -> None:
    """In a process of its own, as on a machine whose JAX has no CUDA."""
    (finding,) = doctor_gpus.trials()
    assert finding.state == "problem" and finding.text.startswith("JAX requires a CUDA backend, got ")


def test_products_without_kernels_are_right_and_xlas(no_artifacts, monkeypatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "h200")
    findings = list(doctor_trials.products())
    assert [finding.what.partition(" ")[2] for finding in findings] == list(doctor_trials.RESULTS)
    assert {finding.state for finding in findings} == {"warning"}
    assert all("right, but XLA's, because" in finding.text for finding in findings)


def test_a_product_that_is_wrong_is_a_problem(no_artifacts, monkeypatch) -> None:
    monkeypatch.setattr(
        doctor_trials.jax_bwgemm, "matmul", lambda a, b, **_: (a.astype(float) @ b.astype(float)).at[3, 5].add(1)
    )
    findings = list(doctor_trials.products())
    assert {finding.state for finding in findings} == {"problem"}
    assert "256x384x256 requires the exact sums, got 1 others of 98304, by XLA" in findings[0].text

    def broken(*operands, **options):
        raise RuntimeError("INTERNAL: first\nsecond")

    monkeypatch.setattr(doctor_trials.jax_bwgemm, "matmul", broken)
    assert next(doctor_trials.products()).text == "RuntimeError: INTERNAL: first"


@pytest.mark.parametrize(("counts", "state"), [([1, 1, 0, 0], "ok"), ([1, 1, 1, 1], "warning")])
def test_captured_or_not(counts, state, no_artifacts, monkeypatch, quiet) -> None:
    runs = iter([x for i, count in enumerate(counts) for x in (sum(counts[:i]), sum(counts[:i]) + count)])
    monkeypatch.setattr(doctor_trials.ffi, "execute_count", lambda: next(runs))
    monkeypatch.setattr(doctor_trials.jax, "jit", lambda f, compiler_options: f)  # an option of XLA's for GPUs
    finding = doctor_trials.capture()
    assert finding.state == state and str(counts) in finding.text
