"""The command of every rung: what changed, against which rung, and what came of it, in the emulator or on a GPU."""

from __future__ import annotations

import argparse
import math
import time

import _gpu
import _sharing
import numpy as np
from _common import BOUND, Rung, emulate, operands, relative_error, rung_of

from jax_bwgemm.emulator import Counters, EmulatorError, Schedule
from jax_bwgemm.facts.arch import family_of

EMULATED, UNEVEN, ON_GPU = (512, 1024, 256), (328, 776, 200), (8192, 8192, 8192)  # m, n, k
SIZE_STEP = 8  # 16 bytes: what TMA can step over, and what a thread stores at once
REPEATS, SAMPLE_ROWS = 20, 64


def main(rung: Rung) -> None:
    """Exits with an error if a product is wrong or the emulator finds a broken rule."""
    args = _arguments(rung)
    before = rung_of(rung.before) if rung.before else None
    _introduce(rung, before)
    given = [size for size in (args.m, args.n, args.k) if size]
    rungs = [each for each in (before, rung) if each]
    gpu = None if args.emulate else _gpu.on_this_gpu(rung)
    if gpu:
        for each in rungs:
            _on_gpu(_gpu.on_this_gpu(each) or each, _shape(given, ON_GPU))
        return
    print(f"no {rung.arch} GPU is used: in the emulator, every rule of the PTX ISA that it knows checked\n")
    if _shows_sharing(rung):
        for rank in _shown(rung)[: 3 - rung.tile.cta_group]:  # the odd CTA of a pair commits nothing
            print(f"CTA {rank} as the running kernel shows it: {_sharing.seen(rung, rank)}")
        print()
    even = _shape(given, EMULATED)
    _show_counts(even, {each: _checked(each, even) for each in rungs})
    if not given:
        _checked(rung, UNEVEN)


def _arguments(rung: Rung) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{rung.name}: {rung.changes}")
    for name in "mnk":
        parser.add_argument(f"--{name}", type=int, help=f"a multiple of {SIZE_STEP} (give all three or none)")
    parser.add_argument("--emulate", action="store_true", help="in the emulator, even where there is a GPU")
    args = parser.parse_args()
    sizes = [args.m, args.n, args.k]
    if sizes != [None] * 3 and not all(size and size > 0 and size % SIZE_STEP == 0 for size in sizes):
        parser.error(f"`--m --n --k` require three positive multiples of {SIZE_STEP}, got {sizes}")
    return args


def _shape(given: list[int], default: tuple[int, int, int]) -> tuple[int, int, int]:
    return (given[0], given[1], given[2]) if given else default


def _introduce(rung: Rung, before: Rung | None) -> None:
    print(f"{rung.name}" + (f", against {before.name}" if before else ""))
    for change in rung.changes.splitlines():
        print(f"  - {change}")
    print(f"  tile {rung.tile}, {rung.num_stages} stages, {rung.num_threads} threads, {rung.smem_bytes} bytes of smem")
    if _shows_sharing(rung):
        for rank in _shown(rung):
            print(f"  CTA {rank} shares: {_sharing.computed(rung.tile, rank)}")
    print()


def _shown(rung: Rung) -> list[int]:
    """The first CTA, and in a cluster of 4x4 the one at (3, 2), whose masks are those of other rows and columns."""
    return [0, 11] if rung.tile.cluster_ctas == 16 else [0]


def _shows_sharing(rung: Rung) -> bool:
    """Masks of commits are Blackwell's."""
    return rung.tile.cluster_ctas > rung.tile.cta_group and family_of(rung.arch).name == "blackwell"


def _checked(rung: Rung, shape: tuple[int, int, int]) -> Counters:
    """Runs integers and normal inputs under one schedule each; the counters of the first."""
    found = []
    for kind, schedule in (("integers", Schedule.standard()[0]), ("normal", Schedule.standard()[-1])):
        a, b = operands(kind, shape)
        start = time.perf_counter()
        try:
            c, counters = emulate(rung, a, b, schedule)
        except EmulatorError as error:
            raise SystemExit(f"{rung.name}: the emulator stopped the kernel: {error}") from error
        _report(rung, kind, shape, relative_error(c, a, b), f"schedule {schedule.name}, {_seconds(start)}")
        found.append(counters)
    return found[0]


def _seconds(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def _report(rung: Rung, kind: str, shape: tuple[int, int, int], error: float, how: str) -> None:
    size = "x".join(map(str, shape))
    print(f"{rung.name:24} {size}, {kind:8}: relative error {error:.1e} against float64 ({how})")
    if not error <= BOUND:
        raise SystemExit(f"{rung.name}: the relative error requires at most {BOUND:.1e}, got {error:.1e}")


def counts(rung: Rung, shape: tuple[int, int, int], counters: Counters) -> dict[str, int]:
    """Of one launch; bytes for each CTA and tile, counted where the load is issued: what comes out of the L2 cache."""
    tiles = math.prod(rung.cta_tiles(*shape[:2]))

    def each(operand: str) -> int:
        return sum(size for (name, _), size in counters.tma_load_bytes.items() if name == operand) // tiles

    return {
        "bytes of A": each("a"),
        "bytes of B": each("b"),
        "MMA instructions": counters.mmas,
        "barrier waits": counters.barrier_waits,
    }


def _show_counts(shape: tuple[int, int, int], counters: dict[Rung, Counters]) -> None:
    columns = {rung.name: counts(rung, shape, each) for rung, each in counters.items()}
    print(f"\n{'counted':18}" + "".join(f"{name:>25}" for name in columns))
    for what in next(iter(columns.values())):
        print(f"{what:18}" + "".join(f"{column[what]:>25,}" for column in columns.values()))
    print("(bytes for each CTA and tile; instructions and waits of the launch; schedule eager)\n")


def _on_gpu(rung: Rung, shape: tuple[int, int, int]) -> None:
    """Integers, as published benchmarks have them, and random numbers, which take more power and so more time."""
    rows = np.random.default_rng(1).permutation(shape[0])[:SAMPLE_ROWS]
    for kind in ("integers", "normal"):
        a, b = operands(kind, shape)
        c, us = _gpu.run(rung, a, b, REPEATS)
        tflops = 2 * shape[0] * shape[1] * shape[2] / us * 1e-6
        _report(rung, kind, shape, relative_error(c[rows], a[rows], b), f"{us:.1f} us, {tflops:.0f} TFLOP/s")
