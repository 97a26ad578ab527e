"""The fastest of a product's kernels once more: in every order of tiles, beside XLA, and as a benchmark runs them.

`candidates` launches a kernel several times in a row, which tells many apart in little time. Alone behind a rest,
kernels that are within a few per cent of each other may come in another order (seen on an H200). And some have a time
for each place in memory that their operands have, so they are given several, by several processes if there are any, and
what counts is the mean: nobody chooses that place (docs/architecture.md, "Measured times").
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jax_bwgemm.bench import timing
from jax_bwgemm.bench.candidates import Clock, Forms, Timed, num_copies, operands, program
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import cluster_tiles
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner.order import GROUPS
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.decision import Decision

NEAR, MOST = 1.06, 4  # times the least time, and kernels: what is timed again
PLACES = 3  # in memory: each kernel's time is the mean of those that it has with operands there
WORTH = 0.99  # of its time in the planner's order: a kernel has another one only for that
XLA = Decision()  # no kernel of ours


@dataclasses.dataclass(frozen=True)
class Finals:
    """The fastest kernels of a product, each in every order of tiles. `entrants`: positions in `timed`, and in which
    order; XLA, if it computes the same, comes behind them. `runs_us`: what each process found, of all of them."""

    timed: Timed
    entrants: tuple[tuple[int, Decision], ...]
    runs_us: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, timed: Timed) -> Finals:
        """Before anything ran."""
        wholes_us = timed.wholes_us
        nearest = sorted(range(len(wholes_us)), key=wholes_us.__getitem__)[:MOST]
        near = [i for i in nearest if wholes_us[i] <= NEAR * min(wholes_us)]
        return cls(timed, tuple((i, own) for i in near for own in in_orders(timed.decisions[i])))

    def run(self, arch: Arch, rounds: int, clock: Clock | None = None) -> Finals:
        """Once more, by this process."""
        problem = self.timed.problem
        asked = [own for _, own in self.entrants] + [XLA] * is_xlas(problem)
        found_us = tuple((clock or alone)(problem, asked, arch, rounds))
        return dataclasses.replace(self, runs_us=(*self.runs_us, found_us))

    @property
    def refined(self) -> Timed:
        """By the means of what all processes found: the times of the entrants, each in its best order, and of XLA;
        and those of the other kernels in proportion to the fastest's."""
        timed = self.timed
        means_us = list(map(statistics.fmean, zip(*self.runs_us, strict=True)))
        xla_us = means_us.pop() if len(means_us) > len(self.entrants) else None
        found = list(zip(self.entrants, means_us, strict=True))
        times_us, decisions = list(timed.times_us), list(timed.decisions)
        near = list(dict.fromkeys(i for i, _ in self.entrants))
        for i in near:
            (first_us, _), *others = [(us, own) for (j, own), us in found if j == i]
            times_us[i] = first_us
            if others and (best := min(others, key=lambda other: other[0]))[0] < WORTH * first_us:
                times_us[i], decisions[i] = best
        longer = times_us[near[0]] / timed.times_us[near[0]]
        times_us = [us if i in near else longer * us for i, us in enumerate(times_us)]
        return dataclasses.replace(timed, decisions=tuple(decisions), times_us=tuple(times_us), xla_us=xla_us)


def is_xlas(problem: Problem) -> bool:
    """Whether XLA computes the same, and nothing behind it: not bitwise symmetric results, and of 8-bit operands, and
    of two dtypes, what it may widen first."""
    is_plain = problem.epilogue.is_identity and not problem.symmetric and problem.c_major == "n"
    return is_plain and problem.a_dtype == problem.b_dtype and DTYPE_BYTES[problem.a_dtype] > 1


def in_orders(decision: Decision) -> list[Decision]:
    """In the planner's order of tiles, which is the first, and in others; a direct tile has one."""
    assert decision.plan is not None and decision.plan.tile is not None  # a kernel at hand was planned
    plans = [decision.plan] if decision.plan.tile.direct else orders(decision.plan).values()
    return [dataclasses.replace(decision, plan=plan) for plan in plans]


def alone(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
    """Microseconds of each by CUPTI: a call has one launch a copy of the operands, and a rest behind it."""
    ffi.register(artifacts.launch_dirs())
    copies = num_copies(problem, arch.l2_bytes)
    places = [operands(problem, copies) for _ in range(PLACES)]
    programs = [xlas(problem, copies) if own == XLA else program(problem, [own], copies, 1) for own in decisions]
    lowered = [jax.jit(own).lower(*places[0]) for own in programs]
    turn = timing.turn() if XLA in decisions else contextlib.nullcontext()  # which times kernels of its own
    with turn, concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda own: own.compile(), lowered))
    found_us = []
    for values in places:
        measures = {str(i): timing.kernel_clock(own, copies, *values) for i, own in enumerate(compiled)}
        found_us.append(timing.of_the_fastest(measures, max(1, rounds // PLACES)))
    return [statistics.fmean(own_us[str(i)] for own_us in found_us) for i in range(len(decisions))]


def xlas(problem: Problem, copies: int) -> Callable[..., list[jax.Array]]:
    """A function of `operands` that multiplies each copy as XLA does, of operands without padding."""
    dtype = jnp.dtype(problem.out_dtype)

    def matrix(x: jax.Array, flips: bool) -> jax.Array:
        x = x[0] if problem.batch == 1 else x
        return x.swapaxes(-1, -2) if flips else x

    def multiply_all(a: Sequence[Forms], b: Sequence[Forms], rest: Sequence[jax.Array]) -> list[jax.Array]:
        flips = problem.a_major == "m", problem.b_major == "k"
        pairs = zip(a[:copies], b[:copies], strict=True)
        return [
            jnp.matmul(matrix(x[-1], flips[0]), matrix(y[-1], flips[1]), preferred_element_type=dtype) for x, y in pairs
        ]

    return multiply_all


def orders(plan: Plan) -> dict[str, Plan]:
    """The plan in every order of tiles, by name, its own first; those of more tiles than a side has are no others than
    that of all."""
    assert plan.tile is not None
    sides = cluster_tiles(plan.tile, plan.problem)
    own = plan.raster_group, plan.raster_along_n
    others = [(group, along_n) for along_n in (0, 1) for group in GROUPS if group <= sides[along_n]]
    return {
        order_name(*x): dataclasses.replace(plan, raster_group=x[0], raster_along_n=x[1])
        for x in dict.fromkeys((own, *others))
    }


def order_name(group: int, along_n: int) -> str:
    return f"{group} along {'mn'[along_n]}"
