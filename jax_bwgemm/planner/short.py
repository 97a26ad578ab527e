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
AHEAD = 0.95  # times our time: what XLA is expected to take less than, for its own choice is the less sure one


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of products that XLA computes alike: microseconds to start, and of a term, times the waves of its tiles to a
    power; and of memory traffic, in times of what the device could move."""

    start_us: float
    term_us: float
    waves: float
    memory: float


# Fitted to what XLA takes by its default flags, which are what a product that is left to it gets, of 361 random products
# of an H100 and an H200 (results/random): half of each kind is within 7 to 16 %, nine tenths within 41 %. XLA chooses
# anew for each shape. One vector by hand, to seven.
EVEN_KIND = Kind(1.34, 0.0099, 0.64, 1.19)
TORN_KIND = Kind(1.38, 0.0025, 0.81, 2.05)
LONGER_KIND = Kind(1.8, 0.0041, 0.63, 2.41)
SHORT_KIND = Kind(1.56, 0.0093, 0.47, 2.22)
UNEVEN_KIND = Kind(3.43, 0.0042, 1.05, 1.83)
THIN_KIND = Kind(1.29, 0.0025, 0.39, 2.86)
VECTOR_KIND = Kind(1.2, 0.0, 1.0, 2.0)


def xla_us(problem: Problem, arch: Arch) -> float | None:
    """What XLA is expected to take on the device, with its launch; None for products of which that is not known."""
    kind = _kind(problem)
    if kind is None:
        return None
    waves = math.ceil(math.ceil(problem.m / TILE) * math.ceil(problem.n / TILE) / arch.num_sms)
    moved_us = problem.min_bytes / (arch.memory_tb_per_s * 1e6)
    us: float = kind.start_us + kind.term_us * problem.k * waves**kind.waves + kind.memory * moved_us
    return arch.constants.launch_us + us


def _kind(problem: Problem) -> Kind | None:
    if not any(padding(problem, operand) for operand in "ab"):
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


def why_xla(problem: Problem, us: float, arch: Arch) -> str | None:
    """One sentence if XLA is expected to be done before a kernel of ours, which is predicted to take `us`."""
    if problem.batch > 1 or not problem.epilogue.is_identity:
        return None
    xla = xla_us(problem, arch)
    if xla is None or xla >= AHEAD * us:
        return None
    return (
        f"XLA is expected to take {xla:.1f} us for {problem.m} x {problem.n} sums of {problem.k} products, our kernel "
        f"{us:.1f}: pass `tile=` for a kernel nevertheless"
    )
