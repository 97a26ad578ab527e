"""`doctor`: what is installed, what is built, what the machine has, and so what would run. Starts no GPU context.

Nothing here may fail for want of a driver, a GPU, a library or a cubin: saying so is the job. A finding is
(what, state, text) with the state "ok", "note" (works, but not by our kernels) or "bad" (broken).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable

from jax_bwgemm._version import __version__
from jax_bwgemm.facts.arch import Arch, detect
from jax_bwgemm.runtime import artifacts

HELP = "check versions, library, cubins, driver and GPUs, and say what would run"
MIN_DRIVER = (12, 0)  # cuLibraryLoadData and cuLaunchKernelEx
Finding = tuple[str, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it takes none


def run(args: argparse.Namespace) -> int:
    findings = list(examine())
    for what, state, text in findings:
        print(f"[{state:^4}] {what}: {text}")
    return 1 if any(state == "bad" for _, state, _ in findings) else 0


def examine() -> Iterable[Finding]:
    """All findings; what would run comes last."""
    yield "python", "ok", f"{platform.python_version()} at {sys.executable}"
    yield "packages", "ok", packages()
    library, cubins = library_status(), artifact_status()
    yield library
    yield from cubins
    driver = driver_status()
    yield driver
    gpus = list_gpus()
    yield "gpus", "ok" if gpus else "note", "; ".join(map(" ".join, gpus)) or "none seen by nvidia-smi"
    yield verdict(gpus, [library, *cubins, driver])


def packages() -> str:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax", "nvidia-cutlass-dsl")
    return ", ".join([f"jax_bwgemm {__version__}", *(f"{name} {_version(name)}" for name in names)])


def library_status() -> Finding:
    from jax_bwgemm.runtime import ffi

    reason = ffi.status()
    return (
        ("library", "ok", f"loads; XLA FFI API 0.{ffi.api_minor()}") if reason is None else ("library", "bad", reason)
    )


def artifact_status() -> list[Finding]:
    """One finding per artifact directory; every cubin is hashed."""
    findings = []
    for directory in artifacts.artifact_dirs():
        try:
            wrong = artifacts.verify(directory)
            entries = artifacts.Manifest.load(directory).entries.values()
            counts = ", ".join(_counts(entry.variant.target for entry in entries)) or "no cubins"
            state, text = ("bad", "; ".join(wrong)) if wrong else ("ok", f"{counts} in {directory}, hashes right")
        except artifacts.ManifestError as error:
            state, text = "bad", str(error)
        findings.append(("cubins", state, text))
    return findings


def driver_status(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Finding:
    """cuDriverGetVersion needs neither cuInit nor a context."""
    try:
        driver = load("libcuda.so.1")
    except OSError as error:
        return "driver", "note", f"none: {error}"
    version = ctypes.c_int()
    if code := driver.cuDriverGetVersion(ctypes.byref(version)):
        return "driver", "bad", f"cuDriverGetVersion requires 0, got {code}"
    major, minor = version.value // 1000, version.value % 1000 // 10
    if (major, minor) < MIN_DRIVER:
        return "driver", "bad", f"requires CUDA {MIN_DRIVER[0]}.{MIN_DRIVER[1]}, got {major}.{minor}: update the driver"
    return "driver", "ok", f"CUDA {major}.{minor}"


def list_gpus() -> list[tuple[str, str]]:
    """(name, compute capability) of each GPU, by nvidia-smi."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [(name.strip(), capability.strip()) for name, _, capability in rows if name]


def verdict(gpus: list[tuple[str, str]], conditions: list[Finding]) -> Finding:
    """What computes a product on the first GPU."""
    if not gpus:
        return "runs", "note", "XLA's own dot, because there is no GPU here; `explain` and `emulate` work for any"
    arch = detect(*gpus[0])
    if not isinstance(arch, Arch):
        return "runs", "note", f"XLA's own dot, because {arch}"
    if wrong := [what for what, state, _ in conditions if state != "ok"]:
        return "runs", "bad", f"XLA's own dot, until this is mended: {', '.join(wrong)}"
    return "runs", "ok", f"our kernels for {arch.target}, planned as {arch.name}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _counts(targets: Iterable[str]) -> list[str]:
    seen = list(targets)
    return [f"{seen.count(target)} for {target}" for target in dict.fromkeys(seen)]
