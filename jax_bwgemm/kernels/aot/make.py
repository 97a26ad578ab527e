"""The ahead-of-time build: catalogue -> cubins, PTX and one manifest. Incremental, parallel in processes.

Never imports the compiler (the workers do) and draws nothing: the command line shows what `build` reports.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jax_bwgemm.kernels.aot import sources, worker
from jax_bwgemm.kernels.aot.worker import Failure, Kernel, Result
from jax_bwgemm.runtime.artifacts import Entry, Manifest, ManifestError, RepackEntry, write_manifest

BATCH = 16  # kernels that one start of the disassembler serves; more would make the progress bar jump


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
) -> Report:
    """Brings `out` up to date for `variants`. The manifest lists current kernels only, also after an interrupt."""
    out.mkdir(parents=True, exist_ok=True)
    digests = {variant.name: sources.source_sha256(variant) for variant in variants}
    current = up_to_date(out)
    stale = [variant for variant in variants if variant.name not in current]
    built: dict[str, Entry | RepackEntry] = {}
    failures: list[Failure] = []
    try:
        for results in _run(_batches(stale, jobs or _num_cpus()), out, digests, jobs or _num_cpus()):
            built |= {result.name: result for result in results if not isinstance(result, Failure)}
            failures += [result for result in results if isinstance(result, Failure)]
            progress(len(built) + len(failures), len(stale))
    finally:
        entries = tuple((current | built).values())
        if stale or not current:
            write_manifest(out, entries, sources.dsl_version())
            remove_strangers(out, {entry.name for entry in entries})
    return Report(entries, tuple(failures), len(built), len(variants) - len(stale))


def up_to_date(out: Path) -> dict[str, Entry | RepackEntry]:
    """The entries of `out` that were built from these sources and whose files are whole."""
    try:
        entries = Manifest.load(out).kernels
    except ManifestError:
        return {}
    return {name: entry for name, entry in entries.items() if _is_current(entry) and _is_whole(out, entry)}


def remove_strangers(out: Path, names: set[str]) -> None:
    """Deletes the files of variants that the manifest does not list, and what an interrupted write left."""
    wanted = {f"{name}.{suffix}" for name in names for suffix in ("cubin", "ptx.gz")}
    for path in out.glob("sm_*"):
        if path.name not in wanted:
            path.unlink()


def _is_current(entry: Entry | RepackEntry) -> bool:
    return entry.source_sha256 == sources.source_sha256(entry.variant if isinstance(entry, Entry) else entry.repack)


def _is_whole(out: Path, entry: Entry | RepackEntry) -> bool:
    cubin = out / f"{entry.name}.cubin"
    if not cubin.exists() or not (out / f"{entry.name}.ptx.gz").exists():
        return False
    return hashlib.sha256(cubin.read_bytes()).hexdigest() == entry.cubin_sha256


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _batches(variants: Sequence[Kernel], jobs: int) -> list[list[Kernel]]:
    """Batches of one target, small enough that every process gets one."""
    size = max(1, min(BATCH, -(-len(variants) // jobs)))
    by_target: dict[str, list[Kernel]] = {}
    for variant in variants:
        by_target.setdefault(variant.target, []).append(variant)
    return [own[i : i + size] for own in by_target.values() for i in range(0, len(own), size)]


def _run(batches: list[list[Kernel]], out: Path, digests: dict[str, str], jobs: int) -> Iterable[list[Result]]:
    if not batches:
        return
    spawn = multiprocessing.get_context("spawn")  # never threads: the compiler's context belongs to a thread
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(batches)), mp_context=spawn) as pool:
        futures = {
            pool.submit(worker.build_batch, batch, out, {v.name: digests[v.name] for v in batch}): batch
            for batch in batches
        }
        try:
            for future in concurrent.futures.as_completed(futures):
                yield _results(future, futures[future])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _results(future: concurrent.futures.Future[list[Result]], batch: list[Kernel]) -> list[Result]:
    try:
        return future.result()
    except Exception as error:  # the process died, or a tool is missing: every variant of the batch is named
        return [Failure(variant.name, f"{type(error).__name__}: {error}") for variant in batch]
