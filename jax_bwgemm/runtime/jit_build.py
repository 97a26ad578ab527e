"""Compile on demand: a kernel that no artifact directory has is built into the user's cache directory.

The compiler runs in a process of its own, which ends with this one, and is never imported here. Knows no JAX and no
CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jax_bwgemm import _files, _processes
from jax_bwgemm._files import FileError
from jax_bwgemm._version import __version__
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime.artifacts import COMPILER, CUBIN, PTX, Entry, add_dir, find_in, or_variable

TIMEOUT_S = 600.0
COMMAND = "python -m jax_bwgemm build"
REMEDY = f"pip install {COMPILER} to have missing kernels compiled"
NOT_SHIPPED = f"it is none of those that `{COMMAND}` builds"
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
    """The entry in `directory`, if its files are what was built; else why not."""
    cubin, ptx = (find_in(directory, variant, suffix) for suffix in (CUBIN, PTX))
    return ptx if isinstance(ptx, str) else cubin


def why_not_here() -> str | None:
    """None where there is a compiler."""
    return None if importlib.util.find_spec("cutlass") else f"compiling it requires CuTeDSL, got none; {REMEDY}"


def remedy(wanted: Sequence[Variant]) -> str:
    """What brings one of several kernels, where none is to be compiled on demand: the build, if one is of those that
    ship; else a compiler or, where there is one, leave to use it."""
    if first_shipped(wanted):
        return f"run `{COMMAND}`{or_variable()}"
    allow = '`compile_missing="never"` keeps it from being compiled: ask for `compile_missing="auto"`'
    return f"{NOT_SHIPPED}; {REMEDY if why_not_here() else allow}"


def first_shipped(wanted: Sequence[Variant]) -> Variant | None:
    """Of several kernels the first that the build makes."""
    from jax_bwgemm.kernels.aot.catalog import catalogue  # imports no compiler

    ships = set(catalogue(sorted({variant.target for variant in wanted})))
    return next((variant for variant in wanted if variant in ships), None)


def cache_dir(variant: Variant) -> Path | str:
    """Where kernels from the variant's sources and this compiler are cached: a directory that is made for the user
    alone; a sentence where there can be none, or is no compiler."""
    if reason := why_not_here():
        return reason
    from jax_bwgemm.kernels.aot.sources import source_sha256  # imports no compiler

    try:
        directory = _files.cache_path(f"{__version__}-{source_sha256(variant)[:16]}")
        _files.make_own(directory)
    except (ModuleNotFoundError, FileError) as error:
        return str(error)
    return directory


def build_in_a_process(variant: Variant, directory: Path) -> str | None:
    """Runs this module as a program that finds what this process finds; None, or why it failed."""
    arguments = [json.dumps(variant.to_json()), str(directory), str(os.getpid())]
    try:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        return _processes.run([sys.executable or "python3", "-P", "-m", __name__, *arguments], environment, TIMEOUT_S)
    except OSError as error:
        return str(error)


def main(variant_json: str, directory: str, parent: str) -> int:
    """Builds one variant, for the process `parent`; a second process that wants it finds it built."""
    _processes.end_with_parent(int(parent))
    from jax_bwgemm.kernels.aot.make import build as build_all

    variant = Variant.from_json(json.loads(variant_json))
    report = build_all([variant], Path(directory), jobs=0)
    for failure in report.failures:
        print(failure.reason.replace("\n", " "), file=sys.stderr)
    return len(report.failures)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
