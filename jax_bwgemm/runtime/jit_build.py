"""Compile on demand: a kernel that no artifact directory has is built into the user's cache directory.

The compiler runs in a process of its own and is never imported here. Knows no JAX and no CUDA.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from jax_bwgemm._version import __version__
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime.artifacts import Entry, Manifest, ManifestError, add_dir

TIMEOUT_S = 600.0
COMMAND = "python -m jax_bwgemm build"
REMEDY = "pip install 'jax_bwgemm[build]' to have missing kernels compiled"
Builder = Callable[[Variant, Path], str | None]

_lock = threading.Lock()
_results: dict[Variant, Entry | str] = {}  # what was asked for, for the life of the process; refusals too


def build(variant: Variant, builder: Builder | None = None) -> Entry | str:
    """The entry of `variant`, from the cache directory or compiled into it; else one sentence why not, remembered.

    With the first entry, the cache becomes one of the artifact directories.
    """
    with _lock:
        if variant not in _results:
            directory = cache_dir(variant)
            _results[variant] = directory if isinstance(directory, str) else _build(variant, directory, builder)
        return _results[variant]


def _build(variant: Variant, directory: Path, builder: Builder | None) -> Entry | str:
    found = _find(variant, directory)
    if isinstance(found, str):
        if reason := (builder or build_in_a_process)(variant, directory):
            return f"compiling {variant.name} failed: {reason}"
        found = _find(variant, directory)
    if isinstance(found, Entry):
        add_dir(directory)
    return found


def _find(variant: Variant, directory: Path) -> Entry | str:
    """The entry in `directory`, if its cubin is what was built; else why not."""
    try:
        entry = Manifest.load(directory).entries.get(variant.name)
    except ManifestError as error:
        return str(error)
    path = directory / f"{variant.name}.cubin"
    if entry is None or not path.exists():
        return f"no cubin {variant.name} in {directory}"
    is_whole = hashlib.sha256(path.read_bytes()).hexdigest() == entry.cubin_sha256
    return entry if is_whole else f"{path} is not what was built"


def why_not_here() -> str | None:
    """None where there is a compiler."""
    return None if importlib.util.find_spec("cutlass") else f"compiling it requires CuTeDSL, got none; {REMEDY}"


def remedy(variant: Variant) -> str:
    """What brings a missing kernel: the build, if it is one of those that ship; else compiling on demand."""
    from jax_bwgemm.kernels.aot.catalog import catalogue  # imports no compiler

    ships = variant in catalogue([variant.target])
    return f"run `{COMMAND}`" if ships else f"it is none of those that `{COMMAND}` builds; {REMEDY}"


def cache_dir(variant: Variant) -> Path | str:
    """Where kernels from the variant's sources and this compiler are cached; a sentence where there is no compiler."""
    if reason := why_not_here():
        return reason
    from jax_bwgemm.kernels.aot.sources import source_sha256  # imports no compiler

    try:
        key = f"{__version__}-{source_sha256(variant)[:16]}"
    except ModuleNotFoundError as error:
        return str(error)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_bwgemm" / key


def build_in_a_process(variant: Variant, directory: Path) -> str | None:
    """Runs this module as a program that finds what this process finds; None, or why it failed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", __name__, json.dumps(variant.to_json()), str(directory)]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else None


def main(variant_json: str, directory: str) -> int:
    """Builds one variant; processes that share the directory take turns, and the second finds it built."""
    from jax_bwgemm.kernels.aot.make import build as build_all

    fields = json.loads(variant_json)
    variant = Variant.from_json(fields)
    with _locked(Path(directory)):
        report = build_all([variant], Path(directory), jobs=1)
    for failure in report.failures:
        print(failure.reason.replace("\n", " "), file=sys.stderr)
    return len(report.failures)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
