"""The ahead-of-time build: catalogue -> cubins, PTX and one manifest. Incremental, parallel in processes.

Never imports the compiler (the workers do) and draws nothing: the command line shows what `build` reports. Of a
directory it touches what its manifest lists, and what it is asked to build.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path

from jax_bwgemm import _files, _processes
from jax_bwgemm.kernels.aot import sources, worker
from jax_bwgemm.kernels.aot.worker import Failure, Kernel, Result
from jax_bwgemm.runtime.artifacts import (
    CUBIN,
    PTX,
    Entry,
    Manifest,
    ManifestError,
    RepackEntry,
    is_whole,
    listed,
    write_manifest,
)

LOCK_NAME = ".lock"
BATCH = 16  # kernels that one start of the disassembler serves; more would make the progress bar jump
SAVED_SECONDS = 60.0  # of work that a build loses, at most, if it is killed


@dataclasses.dataclass(frozen=True)
class Report:
    """What one build did. `num_kept` were up to date."""

    entries: tuple[Entry | RepackEntry, ...]
    failures: tuple[Failure, ...]
    num_built: int
    num_kept: int


def select(variants: Iterable[Kernel], pattern: str | None) -> list[Kernel]:
    """Those whose name matches the glob; ValueError if there are none."""
    chosen = [variant for variant in variants if pattern is None or fnmatch.fnmatch(variant.name, pattern)]
    if not chosen:
        raise ValueError(f"`--only` requires a glob that some variant's name matches, got {pattern!r}")
    return chosen


def build(
    variants: Sequence[Kernel],
    out: Path,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
    on_wait: Callable[[], None] = lambda: None,
    whole: Collection[str] = (),
) -> Report:
    """Brings `out` up to date for `variants`, after any other build there, for which `on_wait` is called.

    `jobs`: processes, one a CPU by default; 0 compiles in this one. The manifest lists current kernels only, also after
    an interrupt, and of a build that is killed those of SAVED_SECONDS before. `whole`: targets of which `variants` are
    all; what else `out` has of them goes. OSError where `out` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _files.locked(out / LOCK_NAME, on_wait):
        return _build(variants, out, _num_cpus() if jobs is None else jobs, progress, whole)


def _build(
    variants: Sequence[Kernel], out: Path, jobs: int, progress: Callable[[int, int], None], whole: Collection[str]
) -> Report:
    digests = {variant.name: sources.source_sha256(variant) for variant in variants}
    before = listed(out)
    own = before | digests.keys()
    current = {
        name: entry
        for name, entry in up_to_date(out).items()
        if name in digests or _kernel_of(entry).target not in whole
    }
    stale = [variant for variant in variants if variant.name not in current]
    built: dict[str, Entry | RepackEntry] = {}
    failures: list[Failure] = []
    saved = time.monotonic()
    try:
        with contextlib.closing(_run(_batches(stale, max(1, jobs)), out, digests, jobs)) as batches:
            for results in batches:
                built |= {result.name: result for result in results if not isinstance(result, Failure)}
                failures += [result for result in results if isinstance(result, Failure)]
                progress(len(built) + len(failures), len(stale))
                if time.monotonic() - saved > SAVED_SECONDS:
                    write_manifest(out, tuple((current | built).values()), sources.dsl_version())
                    saved = time.monotonic()
    finally:
        entries = tuple((current | built).values())
        if stale or current.keys() != before:
            write_manifest(out, entries, sources.dsl_version())
            _remove_stale(out, own, {entry.name for entry in entries})
    return Report(entries, tuple(failures), len(built), len(variants) - len(stale))


def up_to_date(out: Path) -> dict[str, Entry | RepackEntry]:
    """The entries of `out` that were built from these sources and whose files are whole."""
    try:
        entries = Manifest.load(out).kernels
    except ManifestError:
        return {}
    return {name: entry for name, entry in entries.items() if _is_current(entry) and is_whole(out, entry)}


def _remove_stale(out: Path, own: set[str], kept: set[str]) -> None:
    """Deletes the files of kernels that were this build's `own` and are not `kept`, and what an interrupted write of
    one left. Nobody else builds here: the directory is locked."""
    files = {f"{name}.{suffix}" for name in own for suffix in (CUBIN, PTX)}
    stale = files - {f"{name}.{suffix}" for name in kept for suffix in (CUBIN, PTX)}
    for path in out.iterdir():
        if path.name in stale or _files.is_scratch_of(path.name, files):
            path.unlink()


def _is_current(entry: Entry | RepackEntry) -> bool:
    return entry.source_sha256 == sources.source_sha256(_kernel_of(entry))


def _kernel_of(entry: Entry | RepackEntry) -> Kernel:
    return entry.variant if isinstance(entry, Entry) else entry.repack


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _batches(variants: Sequence[Kernel], jobs: int) -> list[list[Kernel]]:
    """Batches of one target, small enough that every process gets one."""
    size = max(1, min(BATCH, -(-len(variants) // jobs)))
    by_target: dict[str, list[Kernel]] = {}
    for variant in variants:
        by_target.setdefault(variant.target, []).append(variant)
    return [own[i : i + size] for own in by_target.values() for i in range(0, len(own), size)]


def _run(
    batches: list[list[Kernel]], out: Path, digests: dict[str, str], jobs: int
) -> Generator[list[Result], None, None]:
    if not batches:
        return
    if jobs == 0:
        for batch in batches:
            yield _results(functools.partial(worker.build_batch, batch, out, digests), batch)
        return
    spawn = multiprocessing.get_context("spawn")  # never threads: the compiler's context belongs to a thread
    with concurrent.futures.ProcessPoolExecutor(
        min(jobs, len(batches)), spawn, _processes.end_with_parent, (os.getpid(),)
    ) as pool:
        try:
            with _processes.uninterrupted():
                futures = {
                    pool.submit(worker.build_batch, batch, out, {v.name: digests[v.name] for v in batch}): batch
                    for batch in batches
                }
            for future in concurrent.futures.as_completed(futures):
                yield _results(future.result, futures[future])
        except BaseException:  # nobody waits for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _results(result: Callable[[], list[Result]], batch: list[Kernel]) -> list[Result]:
    try:
        return result()
    except Exception as error:  # the process died, or a tool is missing: every variant of the batch is named
        return [Failure(variant.name, f"{type(error).__name__}: {error}") for variant in batch]
