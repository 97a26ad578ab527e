"""The runs of `emulate`: inputs and schedules of a seed, errors against float64, what is shown. Parses no argument."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_bwgemm.bench.accuracy import evaluate
from jax_bwgemm.cli.drawing import progress_bar, show_table
from jax_bwgemm.emulator import Counters, Schedule, Timeline, Trace
from jax_bwgemm.facts.epilogue import Input
from jax_bwgemm.facts.geometry import cluster_tiles
from jax_bwgemm.facts.problem import FP8_DTYPES, INT8_DTYPES, Problem
from jax_bwgemm.runtime.emulated import Kernel

# Relative Frobenius error: half a unit in the last place of the result; float32 sums of a tensor core truncate.
BOUNDS = {
    "bfloat16": 2.0**-9,
    "float16": 2.0**-12,
    "float32": 2.0**-14,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int32": 0.0,
}
TF32_BOUND = 2.0**-11  # half a unit in the last place of an operand


@dataclasses.dataclass(frozen=True)
class Result:
    """One run: its relative error against float64 and what it took."""

    schedule: str
    error: float
    bound: float
    seconds: float
    counters: Counters

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound  # False for NaN


def inputs(problem: Problem, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Operands as stored, and the result in float64, as stored."""
    p, rng = problem, np.random.default_rng(seed)
    a = _random(rng, (p.batch, p.m, p.k), p.a_dtype)
    b = _random(rng, (p.batch, p.k, p.n), p.b_dtype)
    extras = [_random(rng, extra.shape, extra.dtype) for extra in p.extras]
    read = zip(p.epilogue.operands, extras, strict=True)
    known = {x.role: _upright(x, value.astype(np.float64), p) for x, value in read}
    known |= {role: np.asarray(value, np.float64) for role, value in p.epilogue.scalars}
    known["acc"] = a.astype(np.float64) @ b.astype(np.float64)
    stored = [a if p.a_major == "k" else a.swapaxes(1, 2), b if p.b_major == "n" else b.swapaxes(1, 2)]
    want = evaluate(p.epilogue.out, known)
    if p.out_dtype in FP8_DTYPES:
        largest = float(ml_dtypes.finfo(p.out_dtype).max)
        want = np.clip(want, -largest, largest)
    return [*stored, *extras], want if p.c_major == "n" else want.swapaxes(1, 2)


def _upright(x: Input, value: np.ndarray, problem: Problem) -> np.ndarray:
    """What an epilogue reads, as it meets (l, m, n)."""
    if x.place == "mn":
        return value if problem.c_major == "n" else value.swapaxes(1, 2)
    return value[:, None] if x.place == "m" else value


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal, or all the integers there are."""
    if dtype in INT8_DTYPES:
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)


def bound(problem: Problem) -> float:
    """Of the relative error: the result's rounding, or that of operands to TF32."""
    return max(BOUNDS[problem.out_dtype], TF32_BOUND if problem.a_dtype == "float32" else 0.0)


def schedules(name: str | None, seed: int) -> list[Schedule]:
    """The one called `name`, or all; "random" is the last."""
    return [schedule for schedule in Schedule.standard(seed) if name in (None, schedule.name)]


def trace(kernel: Kernel, schedule: Schedule, cta: int, warp: int) -> None:
    """Prints what one warp executes, in a run of its own on the inputs of seed 0."""
    operands, _ = inputs(kernel.problem, 0)
    kernel.run(*operands, schedule=schedule, observer=Trace(cta, warp, print))


def timeline(kernel: Kernel, schedule: Schedule, path: Path) -> None:
    """Writes the timeline of a run of its own on the inputs of seed 0; up to the fault, if there is one."""
    operands, _ = inputs(kernel.problem, 0)
    observer = Timeline()
    try:
        kernel.run(*operands, schedule=schedule, observer=observer)
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        observer.write(path)
        print(f"timeline of schedule {schedule.name}: {path}, for https://ui.perfetto.dev")


def results(kernel: Kernel, name: str | None, num_seeds: int) -> Iterator[Result]:
    """Every schedule, or the one called `name`, of every seed."""
    runs = [(seed, schedule) for seed in range(num_seeds) for schedule in schedules(name, seed)]
    problem, last_seed = kernel.problem, -1
    with progress_bar("runs") as progress:
        for i, (seed, schedule) in enumerate(runs):
            progress(i, len(runs))
            if seed != last_seed:
                (operands, want), last_seed = inputs(problem, seed), seed
            start = time.perf_counter()
            out, counters = kernel.run(*operands, schedule=schedule)
            seconds = time.perf_counter() - start
            error = float(np.linalg.norm(out.astype(np.float64) - want) / (np.linalg.norm(want) or 1.0))
            yield Result(schedule.name, error, bound(problem), seconds, counters)
        progress(len(runs), len(runs))


def show(found: list[Result]) -> None:
    """One table of errors, a row a schedule, and one of counts."""
    rows = []
    for name in dict.fromkeys(result.schedule for result in found):
        own = [result for result in found if result.schedule == name]
        worst = max(own, key=lambda result: (np.isnan(result.error), result.error))
        verdict = "ok" if worst.is_right else "WRONG"
        rows.append((name, len(own), f"{worst.error:.2e}", f"{worst.bound:.2e}", verdict, f"{worst.seconds:.2f} s"))
    show_table("against float64", ("schedule", "runs", "relative error", "bound", "", "a run"), rows)
    _show_counts(found[-1].counters)


def _show_counts(counters: Counters) -> None:
    rows = [
        ("warp instructions", f"{counters.instructions:,}"),
        ("MMAs", f"{counters.mmas:,}"),
        ("barrier waits", f"{counters.barrier_waits:,}"),
    ]
    loads, stores = counters.tma_load_bytes, counters.tma_store_bytes
    for operand, verb, by_cta in (("a", "loads", loads), ("b", "loads", loads), ("c", "stores", stores)):
        per_cta = [size for (name, _), size in by_cta.items() if name == operand] or [0]
        rows.append((f"bytes of {operand} that TMA {verb} per CTA", _range(min(per_cta), max(per_cta))))
    show_table("one launch", ("", "count"), rows)


def show_counts(kernel: Kernel, counters: Counters) -> None:
    """What a CTA takes, from the least to the most, and on average what a CTA takes for one tile of the output.

    An MMA of a pair counts for the CTA that issues it; where a cluster divides k, each of its CTAs counts.
    """
    tile, num_ctas = kernel.entry.variant.tile, int(np.prod(kernel.plan.grid))
    tiles_m, tiles_n = cluster_tiles(tile, kernel.problem)
    shares = tiles_m * tiles_n * kernel.problem.batch * tile.cluster_ctas
    rows = []
    for name, by_cta in _counts(counters).items():
        each = [by_cta[cta] for cta in range(num_ctas)]
        rows.append((name, _range(min(each), max(each)), f"{sum(each) / shares:,.1f}".removesuffix(".0")))
    title = f"{shares} tiles of {tile.cta_m}x{tile.mma_n} (times parts of k) on {num_ctas} CTAs"
    show_table(title, ("", "a CTA", "a tile and CTA"), rows)


def _counts(counters: Counters) -> dict[str, collections.Counter[int]]:
    """By CTA."""
    by_operand = {
        "bytes of {} that TMA loads": (counters.tma_load_bytes, "ab"),
        "bytes of {} that arrive": (counters.tma_delivered_bytes, "ab"),
        "bytes of {} that TMA stores": (counters.tma_store_bytes, "c"),
    }
    rows = {
        text.format(operand): collections.Counter({cta: size for (name, cta), size in found.items() if name == operand})
        for text, (found, operands) in by_operand.items()
        for operand in operands
    }
    return rows | {
        "bytes from other CTAs' shared memory": counters.dsmem_load_bytes,
        "bytes to other CTAs' shared memory": counters.dsmem_store_bytes,
        "MMA instructions": counters.mma_instructions,
        "barrier waits": counters.waits,
    }


def _range(least: int, most: int) -> str:
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
