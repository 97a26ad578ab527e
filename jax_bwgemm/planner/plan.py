"""The only chooser: candidates -> `why_not` -> measured times, else cost -> one `Plan`. Knows no JAX, CUDA or file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.padding import why_not_padded
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import Symbols, sized, why_not_all
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.calibration import Calibration
from jax_bwgemm.planner.candidates import Candidate, candidates, candidates_for_all, why_not_invariant
from jax_bwgemm.planner.choice import best_predicted, expected_us, fastest_measured, giving_way, preference
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.direct import launch_stages
from jax_bwgemm.planner.measured import Record, Time
from jax_bwgemm.planner.order import l2_hints, raster, result_hint, rounds
from jax_bwgemm.planner.streams import NO_STREAM, Stream, best_stream, idle

PDL_MAX_US = 10.0  # 50 products of 1024^3 in a chain: 8 % faster on an H200; of 2048^3, 3 to 5 % slower


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run. `tile` is None if XLA must take over, and `reason` then says why.

    `problem` is what the kernel sees: if `swapped`, the transpose of what was asked, with b as its first operand.
    `raster_group` counts the cluster tiles that a group of the tile order spans: rows if `raster_along_n` is 0, walked
    row first, else columns, walked column first. `raster_order`, of `order.RASTER_ORDERS`: every group from the same
    side, or every second one backwards. `a_l2`, `b_l2` and `c_l2`, of `order.L2_HINTS`, are for the kernel's operands
    and results. `stream`: which tiles the clusters share, if the tile has `stream_k`. `stages`: those that a direct
    tile's launch has room for; 0: all that its kernel has. `rounds`: as many as `order.rounds` says, if the device is
    shared with other kernels, else 1. With `pdl` the kernel may start before the one before it ends (programmatic
    dependent launch). `candidates` are in the planner's order of preference. `record` holds the measured times that the
    choice follows, if it does.
    """

    problem: Problem
    arch: Arch
    candidates: tuple[Candidate, ...]
    tile: Tile | None = None
    reason: str | None = None
    raster_group: int = 1
    raster_along_n: int = 0
    raster_order: str = "groups"
    swapped: bool = False
    a_l2: str = "normal"
    b_l2: str = "normal"
    c_l2: str = "normal"
    pdl: bool = False
    stream: Stream = NO_STREAM
    stages: int = 0
    rounds: int = 1
    record: Record | None = None

    @property
    def source(self) -> str:
        """What the choice follows: "measured" times or the cost "model"."""
        return "measured" if self.record else "model"

    @property
    def variant(self) -> Variant | None:
        if self.tile is None:
            return None
        return variant_for(self.problem, self.tile, self.arch.target_of(self.problem.a_dtype))

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that will run."""
        return next((c for c in self.candidates if (c.tile, c.swapped) == (self.tile, self.swapped)), None)


def plan(
    problem: Problem,
    arch: Arch,
    tile: Tile | None = None,
    missing: Callable[[Variant], str | None] = lambda variant: None,
    among: Iterable[Candidate] | None = None,
    record: Record | None = None,
    batch_invariant: bool = False,
    symbols: Symbols | None = None,
    is_calibrated: bool = True,
    shares_device: bool = False,
) -> Plan:
    """Chooses the fastest legal tile whose cubin is there, or the user's, which is never swapped.

    That is the tile of the least measured time (of several within `NOISE`, the one predicted to be the fastest); where
    none was measured, of the least predicted one, corrected by what was measured of kernels alike (`calibration`).
    Of a long product, or without such a correction, it is among tiles that are predicted to tie the one that reads
    least from the L2 cache: large products are limited by power, and moving data costs power. A cluster of more than
    two CTAs wins no tie against a smaller one: on top of CTA pairs, multicast gained nothing in the published figures.

    Args:
      problem: sizes of at least 1.
      arch: the device to plan for.
      tile: the only candidate, if given; ValueError if it is not legal. None: XLA may be the better choice
        (`why_not_padded`).
      missing: why a variant's cubin cannot be had, or None. Of a product in parts of k, what is missing is not priced:
        that is one of several looks at a product, and none that a kernel would be compiled for.
      among: what to choose from; `candidates` if None.
      record: measured times of the problem's kernels, if there are any; without effect on the user's tile.
      batch_invariant: a row's bits must not depend on how many rows there are (`why_not_invariant`); ValueError for a
        tile of the user's with which they do.
      symbols: what the sizes of the problem stand for, if they do: a tile must compute all of these, and is judged by
        the one of `symbols.samples` at which it loses most.
      is_calibrated: False for the cost model alone, as for whoever fits it.
      shares_device: other kernels want SMs meanwhile, as those of collectives do over a mesh.
    """
    given = None if tile is None else Candidate(tile, problem)
    if given and (reason := _why_not(given, arch, batch_invariant, symbols)):
        raise ValueError(f"`tile` {tile} cannot compute {_as_given(problem, symbols)} on {arch.name}: {reason}")
    if given:
        among = (given,)
    elif among is None:
        among = candidates_for_all(problem, arch, symbols) if symbols else candidates(problem, arch)
    times = {(time.tile, time.swapped): time for time in record.times} if record and tile is None else {}
    found = [_judge(candidate, arch, missing, times, batch_invariant, symbols) for candidate in among]
    found = found if symbols else _without_idle(found, arch)
    known = calibration.of(arch) if is_calibrated and not symbols else None
    found = _over_range(found, arch, symbols) if symbols else _corrected(found, arch, known)
    judged = tuple(sorted(found, key=preference))
    unpadded = None if tile or batch_invariant else why_not_padded(problem)
    if reason := judged[0].reason:
        return Plan(problem, arch, judged, reason=reason)
    is_measured = judged[0].measured_us is not None
    best = fastest_measured(judged) if is_measured else best_predicted(judged, arch, known)
    best = giving_way(best, judged) if shares_device else best
    if unpadded and not best.tile.direct:  # which takes operands as they lie
        return Plan(problem, arch, judged, reason=unpadded)
    planned = _planned(best, arch, symbols, shares_device)
    return dataclasses.replace(planned, candidates=judged, record=record if is_measured else None)


def _planned(best: Candidate, arch: Arch, symbols: Symbols | None, shares_device: bool) -> Plan:
    """How the chosen tile is launched."""
    seen = best.problem
    largest = (
        sized(seen, _symbols_of(best, symbols).samples[-1]) if symbols else seen
    )  # where the order of tiles counts
    group, along_n = best.order or raster(best.tile, largest, arch)
    a_l2, b_l2 = l2_hints(best.tile, largest, arch)
    stream = best_stream(best.tile, seen, arch)
    return Plan(
        seen,
        arch,
        (),
        best.tile,
        raster_group=group,
        raster_along_n=along_n,
        raster_order=arch.family.raster_order,
        swapped=best.swapped,
        a_l2=a_l2,
        b_l2=b_l2,
        c_l2=result_hint(best.tile, largest, arch),
        pdl=best.cost is not None and best.cost.us <= PDL_MAX_US and stream == NO_STREAM,
        stream=stream,
        stages=launch_stages(best.tile, seen, arch, not (symbols and symbols.k)),
        rounds=rounds(best.tile, expected_us(best)) if shares_device else 1,
    )


def _judge(
    candidate: Candidate,
    arch: Arch,
    missing: Callable[[Variant], str | None],
    times: Mapping[tuple[str, bool], Time],
    batch_invariant: bool,
    symbols: Symbols | None,
) -> Candidate:
    tile, problem = candidate.tile, candidate.problem
    if reason := _why_not(candidate, arch, batch_invariant, symbols):
        return dataclasses.replace(candidate, reason=reason)
    variant = variant_for(problem, tile, arch.target_of(problem.a_dtype))
    reason, time = missing(variant), times.get((str(tile), candidate.swapped))
    if problem.whole_k and reason:
        return dataclasses.replace(candidate, reason=reason)
    us, order = (time.us, time.order) if time else (None, None)
    return dataclasses.replace(candidate, cost=cost(tile, problem, arch), reason=reason, measured_us=us, order=order)


def _without_idle(judged: Sequence[Candidate], arch: Arch) -> list[Candidate]:
    """Without stream-K kernels that would divide nothing and were not measured, where the kernel that cannot is at
    hand."""
    at_hand = {(c.tile, c.swapped) for c in judged if c.reason is None}
    reason = "it would divide no tile between clusters, and the kernel that cannot is faster then"
    return [
        dataclasses.replace(c, reason=reason)
        if c.reason is None and c.measured_us is None and (idle(c.tile, c.problem, arch), c.swapped) in at_hand
        else c
        for c in judged
    ]


def _as_given(problem: Problem, symbols: Symbols | None) -> Problem:
    """To be shown: with the symbols, and not what stands for them."""
    texts: Any = tuple((name, symbol.text) for name, symbol in symbols.named()) if symbols else ()
    return sized(problem, texts)


def _why_not(candidate: Candidate, arch: Arch, batch_invariant: bool, symbols: Symbols | None) -> str | None:
    tile, problem = candidate.tile, candidate.problem
    return (
        why_not(tile, problem, arch)
        or (why_not_invariant(candidate) if batch_invariant else None)
        or (why_not_all(tile, problem, _symbols_of(candidate, symbols)) if symbols else None)
    )


def _symbols_of(candidate: Candidate, symbols: Symbols) -> Symbols:
    return symbols.transposed if candidate.swapped else symbols


def _corrected(judged: list[Candidate], arch: Arch, known: Calibration | None) -> list[Candidate]:
    """By what was measured of kernels alike, those that are legal."""
    legal = [(i, (c.tile, c.problem, c.cost)) for i, c in enumerate(judged) if c.cost]
    if known is None or not legal:
        return judged
    at_hand = [c.cost.us for c in judged if c.cost and c.reason is None]
    costs = known.corrected([x for _, x in legal], arch, min(at_hand or [c.us for _, (*_, c) in legal]))
    found = dict(zip((i for i, _ in legal), costs, strict=True))
    return [dataclasses.replace(c, cost=found.get(i)) for i, c in enumerate(judged)]


def _over_range(judged: Sequence[Candidate], arch: Arch, symbols: Symbols) -> list[Candidate]:
    """With a time for all sizes: what the best tiles of each take on average, times the most by which this tile is
    slower than one of these. XLA, which chooses for each size anew, is so at none."""
    legal = [(i, c) for i, c in enumerate(judged) if c.cost]
    all_us = [
        [cost(c.tile, sized(c.problem, sizes), arch).us for sizes in _symbols_of(c, symbols).samples] for _, c in legal
    ]
    best = [min(of_size) for of_size in zip(*all_us, strict=True)]
    found = list(judged)
    for (i, c), us in zip(legal, all_us, strict=True):
        slower = max(x / least for x, least in zip(us, best, strict=True))
        assert c.cost is not None  # it is legal
        found[i] = dataclasses.replace(c, cost=dataclasses.replace(c.cost, us=slower * geometric_mean(best)))
    return found
