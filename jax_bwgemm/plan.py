"""The only chooser: candidates -> `why_not` -> cost -> one `Plan`. Knows no JAX and no CUDA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.cost import Cost, cluster_tiles, cost
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import SHIPPED_TILES, Tile, why_not
from jax_bwgemm.variant import Variant, variant_for

TIE = 1.03  # closer predictions than this say nothing: the model's own error is larger


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tile with its predicted cost, if it is legal, and the reason why it cannot be launched, if it cannot."""

    tile: Tile
    cost: Cost | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run. `tile` is None if XLA must take over, and `reason` then says why.

    `raster_group` counts the cluster tiles that a group of the tile order spans: rows if `raster_along_n` is 0, walked
    row first, else columns, walked column first. `candidates` are in the planner's order of preference.
    """

    problem: Problem
    arch: Arch
    candidates: tuple[Candidate, ...]
    tile: Tile | None = None
    reason: str | None = None
    raster_group: int = 1
    raster_along_n: int = 0

    @property
    def variant(self) -> Variant | None:
        return None if self.tile is None else variant_for(self.problem, self.tile, self.arch.target)


def candidates(target: str) -> tuple[Tile, ...]:
    """The tiles that ship for a target."""
    return SHIPPED_TILES[family(target)]


def plan(
    problem: Problem,
    arch: Arch,
    tile: Tile | None = None,
    missing: Callable[[Variant], str | None] = lambda variant: None,
) -> Plan:
    """Chooses the cheapest legal tile whose cubin is there, or the user's.

    Among tiles that are predicted to tie, it is the one that reads least from the L2 cache: large products are limited
    by power, and moving data costs power.

    Args:
      problem: sizes of at least 1.
      arch: the device to plan for.
      tile: the only candidate, if given; ValueError if it is not legal.
      missing: why a variant's cubin cannot be had, or None.
    """
    if tile is not None and (reason := why_not(tile, problem, arch)):
        raise ValueError(f"`tile` {tile} cannot compute {problem} on {arch.name}: {reason}")
    tiles = candidates(arch.target) if tile is None else (tile,)
    judged = sorted((_judge(t, problem, arch, missing) for t in tiles), key=_preference)
    if judged[0].reason is not None:
        return Plan(problem, arch, tuple(judged), reason=judged[0].reason)
    best = _best(judged)
    group, along_n = raster(best, problem, arch)
    return Plan(problem, arch, tuple(judged), best, raster_group=group, raster_along_n=along_n)


def raster(tile: Tile, problem: Problem, arch: Arch) -> tuple[int, int]:
    """(raster_group, raster_along_n): the order of tiles under which the concurrent ones share most of the L2 cache.

    A wave of W cluster tiles over g tile rows reads g tile rows of A and W/g tile columns of B: least where both are
    equally many bytes. The groups run along the longer side, so that the smaller operand is the one read again.
    """
    rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    wave = max(1, arch.num_sms // (tile.cluster_m * tile.cluster_n))
    along_n = int(problem.n > problem.m)
    ratio = cols / rows if not along_n else rows / cols
    ideal = 2 ** round(math.log2(math.sqrt(wave * ratio)))
    return max(1, min(ideal, cluster_tiles(tile, problem)[along_n])), along_n


def _judge(tile: Tile, problem: Problem, arch: Arch, missing: Callable[[Variant], str | None]) -> Candidate:
    if reason := why_not(tile, problem, arch):
        return Candidate(tile, reason=reason)
    reason = missing(variant_for(problem, tile, arch.target))
    return Candidate(tile, cost(tile, problem, arch), reason)


def _best(judged: list[Candidate]) -> Tile:
    """Of candidates in order of preference, the first of which can be launched."""
    costs = {c.tile: c.cost for c in judged if c.cost and c.reason is None}
    fastest = min(cost.us for cost in costs.values())
    tied = [tile for tile, cost in costs.items() if cost.us <= TIE * fastest]
    return min(tied, key=lambda tile: costs[tile].l2_bytes)


def _preference(candidate: Candidate) -> tuple[bool, bool, float]:
    """Launchable before legal before illegal; then the predicted time. Ties keep the order in which tiles ship."""
    return candidate.reason is not None, candidate.cost is None, candidate.cost.us if candidate.cost else 0.0
