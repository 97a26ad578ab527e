"""Who shares what in a cluster: the masks and arrivals that the package computes, and those that a kernel shows.

Bit r of a mask stands for the CTA of rank r = x + y * cluster_m.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from _common import Rung, emulate, operands

from jax_bwgemm.emulator import Observer
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import masks, pipelines


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Of one CTA: whom its loads of A and B reach, whom its commits, how many commits empty one of its stages."""

    a_mask: int
    b_mask: int
    commit_mask: int
    arrivals: int

    def __str__(self) -> str:
        each = (self.a_mask, self.b_mask, self.commit_mask)
        return "A {:#06x}, B {:#06x}, commit {:#06x}".format(*each) + f", {self.arrivals} arrivals empty a stage"


def computed(tile: Tile, rank: int = 0) -> Sharing:
    """A commit tells all with whom the CTA, or either CTA of its pair, shares a load."""
    x, y = rank % tile.cluster_m, rank // tile.cluster_m
    first = x - x % tile.cta_group
    commit = 0
    for half in range(first, first + tile.cta_group):
        commit |= masks.a_mask(tile, half) | masks.b_mask(tile, half, y)
    arrivals = pipelines.blackwell_empty_arrivals(tile)
    return Sharing(masks.a_mask(tile, x), masks.b_mask(tile, x, y), commit, arrivals)


class _Watch(Observer):
    """Destinations of each load and commit instruction of one CTA, and the arrivals that its barriers count."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cluster: Any = None
        self.reached: dict[tuple[str, int], int] = collections.defaultdict(int)
        self.arrivals: collections.Counter[int] = collections.Counter()

    def step(self, warp: Any) -> None:
        self.cluster = warp.cta.cluster
        barriers = self.cluster.ctas[self.rank].barriers
        if len(barriers) > self.arrivals.total():
            self.arrivals = collections.Counter(barrier.count for barrier in barriers.values())

    def issued(self, op: Any, now: int) -> None:
        if op.where.cta == self.rank and op.kind in ("load", "commit"):
            reached = sum(1 << cta.rank for cta in self.cluster.ctas if cta.ops >> op.bit & 1)
            self.reached[f"{op.kind} {op.label}".strip(), op.where.line] |= reached


def seen(rung: Rung, rank: int = 0) -> Sharing:
    """In an emulated launch of one cluster, four steps of k. For an even `rank`, whose barriers the loads signal."""
    tile, watch = rung.tile, _Watch(rank)
    shape = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n, 4 * tile.k_tile
    emulate(rung, *operands("integers", shape), observer=watch)

    def widest(kind: str) -> int:
        return max((mask for (name, _), mask in watch.reached.items() if name == kind), key=int.bit_count, default=0)

    counts = [count for count, number in watch.arrivals.items() if number == rung.num_stages and count > 1]
    return Sharing(widest("load a"), widest("load b"), widest("commit"), counts[0] if counts else 1)
