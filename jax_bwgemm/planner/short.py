"""Products that are little more than their start and one pass over memory, which XLA may be done with sooner.

Of short sums XLA's kernels start as fast as ours, and of operands whose rows TMA cannot step over they read a few terms
as fast. So their time is predicted, too, by what is fitted to products that XLA computed, and compared with that of our
kernel.
"""

from __future__ import annotations

import dataclasses
import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import ends_within_sectors, padding
from jax_bwgemm.facts.problem import Problem

TILE = 64  # rows and columns of a kernel of XLA's; on all SMs at a time
SHORT = 128  # terms of a sum
SHORTEST = 64  # for more, XLA's default flags choose other kernels than its best ones do
UNEVEN = 1000  # and of operands that have rows off 16 bytes: beyond, XLA pads them, too
THIN, THIN_TERMS = 5, 3200  # rows or columns that XLA multiplies as vectors while it reads the other operand; with more
# terms it is the slower one
VECTOR_BYTES = 2e7  # of a matrix times a vector: larger ones XLA's default flags may give to a slower kernel
ROW = 1.07  # times what is predicted of our kernels, which were timed several launches in a row (bench/candidates): so
# long they took behind others, as XLA's were timed (results/random/h200-88211.json)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of products that XLA computes alike: microseconds to start, and of a term, times the waves, or the part of one,
    that its tiles are, of the `least` at least, to a power; and of memory, in times of what the device could move."""

    start_us: float
    term_us: float
    waves: float
    memory: float
    least: float = 0.0


# Fitted to what XLA takes by its default flags, which are what a product that is left to it gets, of 419 random ones of
# an H100 and an H200, of which results/random has 395: half of each kind is within 4 to 17 %, nine tenths within 24 to
# 58 %. Of 47 and 58 that came later (h200-90127.json and h100-30241.json there), half are within 14 and 15 %, nine
# tenths within 50 and 53 %. XLA chooses anew for each shape. With two samples more of an H100 half of the 83 uneven
# ones are within 20 %, and of the 14 vectors within 14; constants fitted to all of them are hardly nearer to them. With
# 42 more of an H200 (h200-350113.json) nine tenths of those of up to 128 terms are within 58 %, for which others would
# be hardly nearer, and of the vectors, with one that XLA took three times as long as expected for, within 53 %.
EVEN_KIND = Kind(1.34, 0.0166, 0.67, 1.07)
TORN_KIND = Kind(1.42, 0.0059, 0.84, 1.77)
LONGER_KIND = Kind(1.84, 0.016, 0.57, 1.15)
SHORT_KIND = Kind(1.81, 0.0122, 0.41, 1.9)
UNEVEN_KIND = Kind(2.76, 0.0057, 0.98, 1.92, least=1.0)
THIN_KIND = Kind(1.36, 0.0029, 0.0, 2.45, least=1.0)
VECTOR_KIND = Kind(1.57, 0.0059, 1.39, 1.15)
# A matrix whose rows are k, times a vector, is a reduction of XLA's. An H100 takes 3.0 us of 1x366x4088:nt, and by the
# best of our kernels 5.3 (results/vectors, `bench --shapes`).
ROWS_KIND = Kind(2.1, 0.0, 0.0, 1.16)


def xla_us(problem: Problem, arch: Arch) -> float | None:
    """What XLA is expected to take on the device, with its launch; None for products of which that is not known."""
    kind = _kind(problem)
    if kind is None:
        return None
    waves = math.ceil(problem.m / TILE) * math.ceil(problem.n / TILE) / arch.num_sms
    moved_us = problem.min_bytes / (arch.memory_tb_per_s * 1e6)
    us: float = kind.start_us + kind.term_us * problem.k * max(kind.least, waves) ** kind.waves + kind.memory * moved_us
    return arch.constants.launch_us + us


def _kind(problem: Problem) -> Kind | None:
    if not any(padding(problem, operand) for operand in "ab"):
        if _is_rows_by_vector(problem):
            return ROWS_KIND
        if problem.k > SHORT:
            return None
        if problem.k > SHORTEST:
            return LONGER_KIND
        return TORN_KIND if ends_within_sectors(problem) else EVEN_KIND
    if min(problem.m, problem.n) <= THIN:
        kind = VECTOR_KIND if min(problem.m, problem.n) == 1 else THIN_KIND
        return kind if problem.k <= THIN_TERMS else None
    if problem.k <= SHORT:
        return SHORT_KIND
    return UNEVEN_KIND if problem.k <= UNEVEN else None


def _is_rows_by_vector(problem: Problem) -> bool:
    rows = problem.b_major == "k" if problem.m == 1 else problem.n == 1 and problem.a_major == "k"
    return rows and problem.min_bytes <= VECTOR_BYTES


def why_xla(problem: Problem, us: float, arch: Arch) -> str | None:
    """One sentence if XLA is expected to be done before a kernel of ours, which is predicted to take `us`."""
    if problem.batch > 1 or not problem.epilogue.is_identity:
        return None
    xla, launch_us = xla_us(problem, arch), arch.constants.launch_us
    us = launch_us + ROW * (us - launch_us)
    if xla is None or xla >= us:
        return None
    return (
        f"XLA is expected to take {xla:.1f} us for {problem.m} x {problem.n} sums of {problem.k} products, our kernel "
        f"{us:.1f}: pass `tile=` for a kernel nevertheless"
    )
