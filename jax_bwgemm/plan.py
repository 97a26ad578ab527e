"""The only chooser: candidates -> `why_not` -> measured times, else cost -> one `Plan`. Knows no JAX, CUDA or file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.cost import (
    NO_STREAM,
    RETAINED,
    Cost,
    Stream,
    best_stream,
    cluster_tiles,
    concurrent_clusters,
    cost,
)
from jax_bwgemm.legality import is_read_swapped, needs_promotion, why_not
from jax_bwgemm.measured import Record
from jax_bwgemm.padding import why_not_padded
from jax_bwgemm.problem import DTYPE_BYTES, Problem
from jax_bwgemm.tile import FEW, NARROW_TILES, SHIPPED_TILES, Tile, acc_stages, is_tma_storable, k_tile
from jax_bwgemm.variant import Variant, variant_for

TIE = 1.03  # closer predictions than this say nothing: the model's own error is larger
NOISE = 1.003  # so close, the model decides; tunings repeat within some 1 %, among which either choice will do
SURE_CLUSTER_CTAS = 2  # SMs come in pairs (TPCs); a larger cluster leaves some of a GPC empty
PDL_MAX_US = 10.0  # 50 products of 1024^3 in a chain: 8 % faster on an H200; of 2048^3, 3 to 5 % slower
L2_HINTS = ("normal", "evict_first", "evict_last")
RASTER_ORDERS = ("groups", "snake")

TileLists = Mapping[str, tuple[Tile, ...]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tile for a problem (or for its transpose, if `swapped`) with its predicted cost, if it is legal, its measured
    time, if there is one, and the reason why it cannot be launched, if it cannot."""

    tile: Tile
    problem: Problem
    swapped: bool = False
    cost: Cost | None = None
    reason: str | None = None
    measured_us: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run. `tile` is None if XLA must take over, and `reason` then says why.

    `problem` is what the kernel sees: if `swapped`, the transpose of what was asked, with b as its first operand.
    `raster_group` counts the cluster tiles that a group of the tile order spans: rows if `raster_along_n` is 0, walked
    row first, else columns, walked column first. `raster_order`, of `RASTER_ORDERS`: every group from the same side, or
    every second one backwards. `a_l2` and `b_l2`, of `L2_HINTS`, are for the kernel's operands. `stream`: which tiles
    the clusters share, if the tile has `stream_k`.
    With `pdl` the kernel may start before the one before it ends (programmatic dependent launch). `candidates` are in
    the planner's order of preference. `record` holds the measured times that the choice follows, if it does.
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
    pdl: bool = False
    stream: Stream = NO_STREAM
    record: Record | None = None

    @property
    def source(self) -> str:
        """What the choice follows: "measured" times or the cost "model"."""
        return "measured" if self.record else "model"

    @property
    def variant(self) -> Variant | None:
        return None if self.tile is None else variant_for(self.problem, self.tile, self.arch.target)

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that will run."""
        return next((c for c in self.candidates if (c.tile, c.swapped) == (self.tile, self.swapped)), None)


def candidates(
    problem: Problem, arch: Arch, shipped: TileLists = SHIPPED_TILES, narrow: TileLists = NARROW_TILES
) -> tuple[Candidate, ...]:
    """The tiles that ship, for the problem's dtype, or for its transpose where only that can be read; and narrow ones
    for its few columns, or for its transpose, if that is `is_swappable`."""
    kind, swaps = family(arch.target), is_read_swapped(problem, arch)
    tiles = (tile for tile in shipped[kind] if tile.promoted == needs_promotion(problem, arch))
    pairs = [(tile, swaps) for tile in tiles]
    if problem.n <= FEW and not swaps:
        pairs += [(tile, False) for tile in narrow[kind] if tile not in shipped[kind]]
    if is_swappable(problem):
        pairs += [(tile, True) for tile in narrow[kind]]
    return tuple(
        Candidate(
            dataclasses.replace(tile, k_tile=k_tile(problem.a_dtype)), problem.transposed if flips else problem, flips
        )
        for tile, flips in pairs
    )


def is_swappable(problem: Problem) -> bool:
    """Whether C^T = B^T A^T is worth a look, with the few rows as an MMA's columns. An n-major b whose result TMA
    cannot store has to be padded or transposed anyhow."""
    return problem.m <= FEW and (is_tma_storable(problem) or problem.b_major == "k")


def plan(
    problem: Problem,
    arch: Arch,
    tile: Tile | None = None,
    missing: Callable[[Variant], str | None] = lambda variant: None,
    among: Iterable[Candidate] | None = None,
    record: Record | None = None,
) -> Plan:
    """Chooses the fastest legal tile whose cubin is there, or the user's, which is never swapped.

    That is the tile of the least measured time (of several within `NOISE`, the one predicted to be the fastest); where
    none was measured, of the least predicted one. Among tiles that
    are predicted to tie, it is the one that reads least from the L2 cache: large products are limited by power, and
    moving data costs power. A cluster of more than two CTAs wins no tie against a smaller one: on top of CTA pairs,
    multicast gained nothing in the published figures.

    Args:
      problem: sizes of at least 1.
      arch: the device to plan for.
      tile: the only candidate, if given; ValueError if it is not legal. None: XLA may be the better choice
        (`why_not_padded`).
      missing: why a variant's cubin cannot be had, or None.
      among: what to choose from; `candidates` if None.
      record: measured times of the problem's kernels, if there are any; without effect on the user's tile.
    """
    if tile is not None and (reason := why_not(tile, problem, arch)):
        raise ValueError(f"`tile` {tile} cannot compute {problem} on {arch.name}: {reason}")
    if tile is not None:
        among = (Candidate(tile, problem),)
    elif among is None:
        among = candidates(problem, arch)
    times = {(time.tile, time.swapped): time.us for time in record.times} if record and tile is None else {}
    judged = tuple(sorted((_judge(candidate, arch, missing, times) for candidate in among), key=_preference))
    unpadded = None if tile else why_not_padded(problem)
    if reason := judged[0].reason or unpadded:
        return Plan(problem, arch, judged, reason=reason)
    is_measured = judged[0].measured_us is not None
    best = _fastest(judged) if is_measured else _best(judged, arch)
    seen = best.problem
    group, along_n = raster(best.tile, seen, arch)
    a_l2, b_l2 = l2_hints(best.tile, seen, arch)
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
        raster_order=raster_order(arch),
        swapped=best.swapped,
        a_l2=a_l2,
        b_l2=b_l2,
        pdl=pdl,
        stream=stream,
        record=source,
    )


def raster(tile: Tile, problem: Problem, arch: Arch) -> tuple[int, int]:
    """(raster_group, raster_along_n): the order of tiles under which the concurrent ones share most of the L2 cache.

    A wave of W cluster tiles over g tile rows reads g tile rows of A and W/g tile columns of B: least where both are
    equally many bytes. Groups of rows read A once, and B once each, unless it stays in `RETAINED` of the cache; groups
    of columns the other way round. Where both read as much, the groups span the longer side. On an H200, rows were
    faster than columns for 4096x128256x4096 and 8192x14336x4096, and columns than rows for 8192x50264x768.
    """
    longer = int(problem.n > problem.m)
    choices = {along_n: _group(tile, problem, arch, along_n) for along_n in (longer, 1 - longer)}
    along_n = min(choices, key=lambda along_n: _bytes_read(tile, problem, arch, along_n, choices[along_n]))
    return choices[along_n], along_n


def raster_order(arch: Arch) -> str:
    """On an H200, a snake was as fast as groups, or a little faster, for each of five large products; of Blackwell
    nothing is measured."""
    return "snake" if family(arch.target) == "hopper" else "groups"


def _group(tile: Tile, problem: Problem, arch: Arch, along_n: int) -> int:
    rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    ratio = rows / cols if along_n else cols / rows
    ideal = 2 ** round(math.log2(math.sqrt(concurrent_clusters(tile, arch) * ratio)))
    return max(1, min(ideal, cluster_tiles(tile, problem)[along_n]))


def _bytes_read(tile: Tile, problem: Problem, arch: Arch, along_n: int, group: int) -> int:
    """From device memory, of both operands."""
    grouped, other = operand_bytes(problem)[:: -1 if along_n else 1]
    groups = -(-cluster_tiles(tile, problem)[along_n] // group)
    return grouped + other * (1 if other <= RETAINED * arch.l2_bytes else groups)


def l2_hints(tile: Tile, problem: Problem, arch: Arch) -> tuple[str, str]:
    """(a_l2, b_l2): what to keep in the L2 cache, and what to let go first.

    Where all of it fits, the cache's own order is right: whoever reads the result, or the operands again, finds them.
    Else an operand that no second tile reads is let go first, so that it does not push out what others read again;
    and so is one larger than the cache that concurrent tiles do not share, for it will be gone before it is read
    again. An operand that is read again and fits (in `RETAINED` of the cache) is kept last beside such a stream.
    Two operands that are both shared by concurrent tiles need no hint: the tile order keeps what they share. None on
    Hopper: on an H200 no pair of hints gained 1 % on four large products, and two pairs lost 2 to 4 %.
    """
    if family(arch.target) == "hopper" or problem.min_bytes <= RETAINED * arch.l2_bytes:
        return "normal", "normal"
    streams = _is_stream("a", tile, problem, arch), _is_stream("b", tile, problem, arch)
    sizes = operand_bytes(problem)
    a, b = (_hint(*facts, arch) for facts in zip(sizes, streams, streams[::-1], strict=True))
    return a, b


def operand_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of a and of b, all their matrices."""
    a = problem.a_batch * problem.m * problem.k * DTYPE_BYTES[problem.a_dtype]
    return a, problem.b_batch * problem.k * problem.n * DTYPE_BYTES[problem.b_dtype]


def _hint(size: int, is_stream: bool, is_other_stream: bool, arch: Arch) -> str:
    if is_stream:
        return "evict_first"
    return "evict_last" if is_other_stream and size <= RETAINED * arch.l2_bytes else "normal"


def _is_stream(operand: str, tile: Tile, problem: Problem, arch: Arch) -> bool:
    """Whether one tile reads each part of it, or several whose reads lie too far apart."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    is_a = operand == "a"
    own_batch = (problem.a_batch if is_a else problem.b_batch) > 1
    reads = (tiles_n if is_a else tiles_m) * (1 if own_batch else problem.batch)
    if reads == 1:
        return True
    group, along_n = raster(tile, problem, arch)
    across = -(-concurrent_clusters(tile, arch) // group)
    sharing = min(reads, (group if along_n else across) if is_a else (across if along_n else group))
    return sharing == 1 and operand_bytes(problem)[0 if is_a else 1] > arch.l2_bytes


def _judge(
    candidate: Candidate,
    arch: Arch,
    missing: Callable[[Variant], str | None],
    times: Mapping[tuple[str, bool], float],
) -> Candidate:
    tile, problem = candidate.tile, candidate.problem
    if reason := why_not(tile, problem, arch):
        return dataclasses.replace(candidate, reason=reason)
    reason, us = missing(variant_for(problem, tile, arch.target)), times.get((str(tile), candidate.swapped))
    return dataclasses.replace(candidate, cost=cost(tile, problem, arch), reason=reason, measured_us=us)


def _fastest(judged: tuple[Candidate, ...]) -> Candidate:
    """Of measured candidates, the fastest first: among those that tie with it, what the model prefers."""
    least = judged[0].measured_us or 0.0
    tied = [c for c in judged if c.reason is None and c.measured_us and c.measured_us <= NOISE * least]
    return min(tied, key=lambda candidate: candidate.cost.us if candidate.cost else math.inf)


def _best(judged: tuple[Candidate, ...], arch: Arch) -> Candidate:
    """Of candidates in order of preference, the first of which can be launched."""
    costs = [(c.cost, c) for c in judged if c.cost and c.reason is None]
    placed = [(cost, c) for cost, c in costs if c.tile.cluster_ctas <= SURE_CLUSTER_CTAS]
    if placed and placed[0][0].us <= TIE * costs[0][0].us:
        costs = placed
    tied = [(_shows_epilogue(c, arch), cost.l2_bytes, c) for cost, c in costs if cost.us <= TIE * costs[0][0].us]
    return min(tied, key=lambda entry: entry[:2])[-1]


def _shows_epilogue(candidate: Candidate, arch: Arch) -> bool:
    """A single accumulator in TMEM: nothing hides its epilogue, and no measurement of ours says how long that is."""
    return family(arch.target) == "blackwell" and acc_stages(candidate.tile) == 1


def _preference(candidate: Candidate) -> tuple[bool, bool, bool, float]:
    """Launchable before legal before illegal, and measured before not; then the time. Ties keep the order in which
    tiles ship."""
    us = candidate.measured_us
    predicted_us = candidate.cost.us if candidate.cost else 0.0
    return candidate.reason is not None, candidate.cost is None, us is None, predicted_us if us is None else us
