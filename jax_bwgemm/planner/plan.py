"""The only chooser: candidates -> `why_not` -> measured times, else cost -> one `Plan`. Knows no JAX, CUDA or file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.legality import is_read_swapped, needs_promotion, why_not
from jax_bwgemm.facts.padding import ends_within_sectors, is_tma_storable, padding, why_not_padded
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.resources import acc_stages
from jax_bwgemm.facts.shipped import (
    DIRECT_TILES,
    NARROW_TILES,
    ROW_TILES,
    SHIPPED_TILES,
    SWAPPED_DIRECT_TILES,
    SWAPPED_TILES,
    THIN_TILES,
)
from jax_bwgemm.facts.symbols import Symbols, sized, why_not_all
from jax_bwgemm.facts.tile import FEW, Tile, k_tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.calibration import Calibration, is_covered
from jax_bwgemm.planner.cost import Cost, cost
from jax_bwgemm.planner.direct import launch_stages
from jax_bwgemm.planner.measured import Record, Time
from jax_bwgemm.planner.one_pass import is_plain_half, thin_tiles
from jax_bwgemm.planner.order import ROUND_US, l2_hints, raster, result_hint, rounds
from jax_bwgemm.planner.streams import NO_STREAM, Stream, best_stream, idle

TIE = 1.03  # closer predictions than this say nothing: the model's own error is larger
CORRECTED_TIE = 1.01  # where predictions are corrected: 128x256 alone, of 4096^3 and 8192^3, is predicted to take 2 %
# less than in pairs, and takes 0.5 to 1 % less (H200)
POWER_US = 100.0  # from which on a tie is broken where predictions are corrected, too: bursts, which they are of, end
GIVES_WAY = 1.03  # times the best: what leaves SMs to other kernels may take so long where there are some
NOISE = 1.003  # so close, the model decides; tunings repeat within some 1 %, among which either choice will do
SURE_CLUSTER_CTAS = 2  # SMs come in pairs (TPCs); a larger cluster leaves some of a GPC empty
PDL_MAX_US = 10.0  # 50 products of 1024^3 in a chain: 8 % faster on an H200; of 2048^3, 3 to 5 % slower

DIRECT_FLOPS, DIRECT_BYTES = 2e9, 16e6  # of a product, assumed: some 10 us of our other kernels
DIRECT_TERMS = 128  # of a sum, assumed: its loads are a small part of what it stores
SWAPPED_ROWS, SWAPPED_ROWS_OF_FEW = 4096, 512  # at most so many rows were tried as columns of the transposed product
# (H200); the second where an epilogue, or operands of other than 2 bytes, have few such kernels

TileLists = Mapping[str, tuple[Tile, ...]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tile for a problem (or for its transpose, if `swapped`) with its predicted cost, if it is legal, its measured
    time, if there is one, and the `order` (raster_group, raster_along_n) of that, if it is not `raster`'s, and the
    reason why it cannot be launched, if it cannot. `for_few_rows`: it is none for more rows."""

    tile: Tile
    problem: Problem
    swapped: bool = False
    cost: Cost | None = None
    reason: str | None = None
    measured_us: float | None = None
    order: tuple[int, int] | None = None
    for_few_rows: bool = False


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


def candidates(
    problem: Problem,
    arch: Arch,
    shipped: TileLists = SHIPPED_TILES,
    narrow: TileLists = NARROW_TILES,
    swapped: TileLists = SWAPPED_TILES,
    direct: TileLists = DIRECT_TILES,
    swapped_direct: TileLists = SWAPPED_DIRECT_TILES,
    rows: TileLists = ROW_TILES,
    thin: TileLists = THIN_TILES,
) -> tuple[Candidate, ...]:
    """The tiles that ship, for the problem's dtype, or for its transpose where only that can be read; narrow ones for
    its few columns; if it `is_swappable`, for its transpose, narrow ones for few rows and others for more; direct ones,
    if it `is_small` or `is_raw`, with few rows for its transpose, too; and of a result that TMA would write in parts of
    sectors, those that store `by_rows`; and thin ones for one pass over a large matrix (`thin_tiles`)."""
    family, swaps = arch.family.name, is_read_swapped(problem, arch)
    asked = needs_promotion(problem, arch), problem.epilogue.is_gated
    fitting = (x for x in shipped[family] if (x.promoted, x.gated) == asked and x.symmetric <= problem.symmetric)
    tiles = [(tile, swaps and not tile.symmetric) for tile in fitting]
    if problem.n <= FEW and not swaps:
        tiles += [(tile, False) for tile in narrow[family] if tile not in shipped[family]]
    found = [_candidate(problem, tile, flips) for tile, flips in tiles]
    if is_swappable(problem):
        found += [_candidate(problem, tile, True, True) for tile in (narrow if problem.m <= FEW else swapped)[family]]
    if is_small(problem, arch) or is_raw(problem, arch):
        own = [(tile, False) for tile in direct[family]]
        own += [(tile, True) for tile in swapped_direct[family]] if problem.m <= FEW else []
        for tile, flips in own:
            if tile.cluster_k == 1 or problem.k > tile.cluster_k * tile.k_tile:  # else some have nothing to multiply
                found.append(_candidate(problem, tile, flips, flips))
    for flips, seen in ((False, problem), (True, problem.transposed)) if is_plain_half(problem) else ():
        found += [_candidate(problem, tile, flips, flips) for tile in thin_tiles(seen, thin.get(family, ()))]
    if _is_worth_rows(problem):
        found += [_candidate(problem, tile, False) for tile in rows.get(family, ())]
    return tuple(found)


def _candidates_for_all(problem: Problem, arch: Arch, symbols: Symbols) -> tuple[Candidate, ...]:
    """Those of all sizes that stand for the range. No stream-K: which tiles it shares is best for one size alone."""
    found: dict[tuple[Tile, bool], Candidate] = {}
    for sizes in symbols.samples:
        for candidate in candidates(sized(problem, sizes), arch):
            own = dataclasses.replace(candidate, problem=problem.transposed if candidate.swapped else problem)
            found.setdefault((own.tile, own.swapped), own)
    return tuple(candidate for candidate in found.values() if not candidate.tile.stream_k)


def _candidate(problem: Problem, tile: Tile, flips: bool, for_few_rows: bool = False) -> Candidate:
    own = dataclasses.replace(tile, k_tile=k_tile(problem.a_dtype))
    return Candidate(own, problem.transposed if flips else problem, flips, for_few_rows=for_few_rows)


def is_swappable(problem: Problem) -> bool:
    """Whether C^T = B^T A^T is worth a look, with the rows as an MMA's columns. An n-major b whose result TMA cannot
    store has to be padded or transposed anyhow."""
    has_many = problem.epilogue.is_identity and DTYPE_BYTES[problem.a_dtype] == 2
    return (
        problem.m <= (SWAPPED_ROWS if has_many else SWAPPED_ROWS_OF_FEW)
        and not problem.epilogue.is_gated
        and (is_tma_storable(problem) or problem.b_major == "k")
    )


def is_small(problem: Problem, arch: Arch) -> bool:
    """Whether direct tiles, which read rows of any pitch, are worth a look: more work hides the latencies they save,
    but of short sums, which are little but their store."""
    halves = DTYPE_BYTES[problem.a_dtype] == 2 and not problem.epilogue.is_gated
    is_little = problem.flops <= DIRECT_FLOPS and problem.min_bytes <= DIRECT_BYTES
    return halves and (is_little or problem.k <= DIRECT_TERMS) and "direct" not in arch.family.lacks


def is_raw(problem: Problem, arch: Arch) -> bool:
    """Whether direct tiles, which read rows of any pitch, spare a product that is little but one pass over its larger
    operand two more, which would pad that."""
    halves = DTYPE_BYTES[problem.a_dtype] == 2 and not problem.epilogue.is_gated
    is_thin = min(problem.m, problem.n) <= FEW and (padding(problem, "a") > 0 or padding(problem, "b") > 0)
    return halves and is_thin and "direct" not in arch.family.lacks


def _is_worth_rows(problem: Problem) -> bool:
    is_torn = problem.c_major == "n" and is_tma_storable(problem) and ends_within_sectors(problem)
    return is_torn and DTYPE_BYTES[problem.a_dtype] == 2 and problem.epilogue.is_identity


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
        raise ValueError(f"`tile` {tile} cannot compute {problem} on {arch.name}: {reason}")
    if given:
        among = (given,)
    elif among is None:
        among = _candidates_for_all(problem, arch, symbols) if symbols else candidates(problem, arch)
    times = {(time.tile, time.swapped): time for time in record.times} if record and tile is None else {}
    found = [_judge(candidate, arch, missing, times, batch_invariant, symbols) for candidate in among]
    found = found if symbols else _without_idle(found, arch)
    known = calibration.of(arch) if is_calibrated and not symbols else None
    found = _over_range(found, arch, symbols) if symbols else _corrected(found, arch, known)
    judged = tuple(sorted(found, key=_preference))
    unpadded = None if tile or batch_invariant else why_not_padded(problem)
    if reason := judged[0].reason:
        return Plan(problem, arch, judged, reason=reason)
    is_measured = judged[0].measured_us is not None
    best = _fastest(judged) if is_measured else _best(judged, arch, known)
    best = _giving_way(best, judged) if shares_device else best
    if unpadded and not best.tile.direct:  # which takes operands as they lie
        return Plan(problem, arch, judged, reason=unpadded)
    seen = best.problem
    largest = (
        sized(seen, _symbols_of(best, symbols).samples[-1]) if symbols else seen
    )  # where the order of tiles counts
    group, along_n = best.order or raster(best.tile, largest, arch)
    a_l2, b_l2 = l2_hints(best.tile, largest, arch)
    stream = best_stream(best.tile, seen, arch)
    pdl = best.cost is not None and best.cost.us <= PDL_MAX_US and stream == NO_STREAM
    source = record if is_measured else None
    return Plan(
        seen,
        arch,
        judged,
        best.tile,
        raster_group=group,
        raster_along_n=along_n,
        raster_order=arch.family.raster_order,
        swapped=best.swapped,
        a_l2=a_l2,
        b_l2=b_l2,
        c_l2=result_hint(best.tile, largest, arch),
        pdl=pdl,
        stream=stream,
        stages=launch_stages(best.tile, seen, arch, not (symbols and symbols.k)),
        rounds=rounds(best.tile, _expected_us(best)) if shares_device else 1,
        record=source,
    )


def why_not_invariant(candidate: Candidate) -> str | None:
    """One sentence if a row that is computed by it does not have the bits that it has among any number of rows.

    Every tile adds an element's products in the order of k, one MMA of 32 bytes after the other, but where CTAs divide
    k: how many do, and where, follows from the number of rows. What is transposed for few rows, and a direct tile, has
    other kernels, whose epilogues may be compiled to other instructions, or be missing.
    """
    if candidate.tile.cluster_k > 1 or candidate.tile.stream_k:
        return 'it divides k, and `deterministic="batch"` has one order of summation'
    if candidate.for_few_rows or candidate.tile.direct:
        return 'it is for few rows or small products, and `deterministic="batch"` has one list of tiles'
    return None


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


def _fastest(judged: tuple[Candidate, ...]) -> Candidate:
    """Of measured candidates, the fastest first: among those that tie with it, what the model prefers."""
    least = _whole_us(judged[0])
    tied = [c for c in judged if c.reason is None and c.measured_us and _whole_us(c) <= NOISE * least]
    return min(tied, key=lambda candidate: candidate.cost.us if candidate.cost else math.inf)


def _whole_us(candidate: Candidate) -> float:
    """Measured, and what is predicted of padding its operands, which not every tile wants."""
    return (candidate.measured_us or 0.0) + (candidate.cost.padding_us if candidate.cost else 0.0)


def _best(judged: tuple[Candidate, ...], arch: Arch, known: Calibration | None) -> Candidate:
    """Of candidates in order of preference, the first of which can be launched."""
    costs = [(c.cost, c) for c in judged if c.cost and c.reason is None]
    is_corrected = known is not None and is_covered(costs[0][1].tile, costs[0][1].problem)
    if is_corrected and costs[0][0].us < POWER_US:
        return costs[0][1]  # what was measured of kernels alike says more than any rule for ties
    tie = CORRECTED_TIE if is_corrected else TIE
    placed = [(cost, c) for cost, c in costs if c.tile.cluster_ctas <= SURE_CLUSTER_CTAS]
    if placed and placed[0][0].us <= tie * costs[0][0].us:
        costs = placed
    if costs[0][1].tile.direct:  # too small for power to count
        return costs[0][1]
    tied = [(cost, c) for cost, c in costs if cost.us <= tie * costs[0][0].us]
    return min(tied, key=lambda own: (_shows_epilogue(own[1], arch), own[0].l2_bytes, _reads(own[1], is_corrected)))[1]


def _reads(candidate: Candidate, is_measured: bool) -> int:
    """The less, the fewer bytes MMAs read from shared memory for as many from the L2 cache: wide ones. 12288^3 took
    longer than XLA's on an H200 by 192x192, which is predicted to be 0.5 % faster than 128x256 (docs/results.md). Of
    other families nothing is measured."""
    return -candidate.tile.mma_n if is_measured else 0


def _giving_way(best: Candidate, judged: tuple[Candidate, ...]) -> Candidate:
    """In place of a long kernel whose clusters must all be there at once, one that can be launched in rounds, if that
    takes hardly longer."""
    if not best.tile.stream_k or _expected_us(best) < 2 * ROUND_US:
        return best
    is_measured = best.measured_us is not None
    able = [
        c for c in judged if c.reason is None and not c.tile.stream_k and is_measured == (c.measured_us is not None)
    ]
    other = min(able, key=_expected_us, default=best)
    return other if _expected_us(other) <= GIVES_WAY * _expected_us(best) else best


def _expected_us(candidate: Candidate) -> float:
    """Measured, else predicted; infinite where neither."""
    if candidate.measured_us:
        return _whole_us(candidate)
    return candidate.cost.us if candidate.cost else math.inf


def _shows_epilogue(candidate: Candidate, arch: Arch) -> bool:
    """A single accumulator in TMEM: nothing hides its epilogue, and no measurement of ours says how long that is."""
    return arch.family.sums_in_tmem and acc_stages(candidate.tile, arch.tmem_cols) == 1


def _preference(candidate: Candidate) -> tuple[bool, bool, bool, float]:
    """Launchable before legal before illegal, and measured before not; then the time. Ties keep the order in which
    tiles ship."""
    us, c = candidate.measured_us, candidate.cost
    predicted_us = c.us if c else 0.0
    return candidate.reason is not None, c is None, us is None, predicted_us if us is None else _whole_us(candidate)
