"""One result of several, each measured by a process of its own.

XLA chooses its kernels anew in each, by times that vary, so that a small product's time is known only by several.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jax_bwgemm import _processes
from jax_bwgemm.bench import run
from jax_bwgemm.bench.report import Result, Row, Times, load, save

VARYING = "date"  # of what a result says of its machine


def merge(results: Sequence[Result]) -> Result:
    """All rows, in the order in which they first come; of those that several have, medians of their times.

    ValueError for results of other machines, commits or methods, or where one product ran other kernels of ours.
    """
    first = results[0]
    for other in results[1:]:
        for name, one, another in _differing(first, other):
            raise ValueError(
                f"`--merge` requires results of one machine, commit and method, got {name} {one}, {another}"
            )
    rows: dict[str, list[Row]] = {}
    for row in (row for result in results for row in result.rows):
        rows.setdefault(row.shape, []).append(row)
    merged = tuple(map(_merged, rows.values()))
    skipped = {shape: why for result in results for shape, why in result.skipped.items() if shape not in rows}
    loads = {(x.shape, x.product): x for result in results for x in result.sustained}
    return dataclasses.replace(first, rows=merged, skipped=skipped, sustained=tuple(loads.values()))


def read(paths: Sequence[Path]) -> Result:
    return merge([load(path) for path in paths])


def measure(settings: run.Settings, num_processes: int, path_of: Callable[[Result], Path]) -> Result:
    """Of so many processes, one after the other. Each keeps its rows in a file of its own beside `path_of` the result,
    which an interrupt leaves."""
    parts = []
    for idx in range(num_processes):
        print(f"process {idx + 1} of {num_processes}", flush=True)
        path_of_part = functools.partial(_path_of_part, path_of, idx)
        keep = functools.partial(_keep, path_of_part)
        # A pool of one, for each process: nothing of XLA's choices is left for the next.
        with ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _processes.end_with_parent, (os.getpid(),)
        ) as executor:
            parts.append(executor.submit(run.measure, settings, keep).result())
    for idx, part in enumerate(parts):
        _path_of_part(path_of, idx, part).unlink()
    return merge(parts)


def _keep(path_of: Callable[[Result], Path], result: Result) -> None:
    save(result, path_of(result))


def _path_of_part(path_of: Callable[[Result], Path], idx: int, result: Result) -> Path:
    path = path_of(result)
    return path.with_name(f"{path.stem}.{idx + 1}{path.suffix}")


def _differing(one: Result, other: Result) -> list[tuple[str, object, object]]:
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in ("arch", "method", "pause")}
    names = (one.machine.keys() | other.machine.keys()) - {VARYING}
    pairs |= {name: (one.machine.get(name), other.machine.get(name)) for name in sorted(names)}
    return [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def _merged(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    first = rows[0]
    for row in rows[1:]:
        if row.variant != first.variant:
            raise ValueError(
                f"`--merge` requires the same kernels for {row.shape}, got {first.variant or 'none'} and "
                f"{row.variant or 'none'}: with a table of measured times they differ"
            )
    names = [name for name in first.peers if all(name in row.peers for row in rows)]
    return dataclasses.replace(
        first,
        rounds=sum(row.rounds for row in rows),
        ours=_median([row.ours for row in rows]),
        peers={name: _median([row.peers[name] for row in rows]) for name in names},
        unavailable={name: why for row in rows for name, why in row.unavailable.items()},
        temperature_c=max(row.temperature_c for row in rows),
        processes=sum(row.processes for row in rows),
    )


def _median(times: Sequence[Times]) -> Times:
    """What ran is that of the process whose time is nearest to the median; the error the largest."""
    us = statistics.median(x.us for x in times)
    nearest = min(times, key=lambda x: abs(x.us - us))
    low, high = statistics.median(x.low for x in times), statistics.median(x.high for x in times)
    return dataclasses.replace(nearest, us=us, low=low, high=high, error=max(x.error for x in times))
