"""How the consumer warpgroups of a Hopper CTA divide its tiles and their boxes; `sm90` says what they do in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from jax_bwgemm.facts.resources import warpgroup_slabs
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.walk import Walk

WARPGROUP_THREADS = 128
STORE_BARRIER = 1  # named barriers: STORE_BARRIER + w, the threads of consumer warpgroup w; 0 is the CTA's,
TURN_BARRIER = 3  # in a ping-pong, of two, TURN_BARRIER + w: the other warpgroup arrives, w waits for its turn,
PARTS_BARRIER = 5  # and all consumers, once their accumulators are complete


@dataclasses.dataclass(frozen=True)
class Deal:
    tile: Tile
    boxes: Boxes

    @property
    def warpgroups(self) -> int:
        return self.tile.num_consumer_warpgroups

    @property
    def threads(self) -> int:
        """Of all consumers."""
        return self.warpgroups * WARPGROUP_THREADS

    @property
    def side_by_side(self) -> int:
        """Warpgroups that multiply one tile."""
        return 1 if self.tile.pingpong else self.warpgroups

    @property
    def boxes_n(self) -> int:
        """Boxes of a warpgroup and tile that lie side by side."""
        return self.tile.out_n // self.boxes.cols

    @property
    def num_boxes(self) -> int:
        """Of a warpgroup and tile."""
        return warpgroup_slabs(self.tile) * self.boxes_n

    def box_at(self, at: Any, box: Any) -> Any:
        """(m, n, l) in boxes of a warpgroup's `box`-th box; `at` has its first. Slabs lie side by side in turns."""
        return at[0] + box // self.boxes_n * self.side_by_side, at[1] + box % self.boxes_n, at[2]


@dataclasses.dataclass(frozen=True)
class Hand:
    """What a warpgroup is dealt of a walk."""

    deal: Deal
    walk: Walk
    group_idx: Int32

    def items(self) -> tuple[Uint32, Uint32]:
        """The first one, and the step to the next."""
        if self.deal.tile.pingpong:
            return self.walk.first + Uint32(self.group_idx) * self.walk.step, 2 * self.walk.step
        return self.walk.first, self.walk.step

    @cute.jit
    def end_from(self, idx: Uint32) -> Uint32:
        """The first item from `idx` on that ends a tile: of a cluster's pieces of a stream, only the first may not."""
        if cutlass.const_expr(self.deal.tile.stream_k):  # noqa: SIM102 (a compile-time condition stands alone)
            if not self.walk.item_of(idx).is_end:
                idx += self.walk.step
        return idx

    def first_box(self, tile_idx: Uint32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) in boxes of the warpgroup's first box of a tile; the shuffles keep it where it is called."""
        deal = self.deal
        m_idx, n_idx, l_idx = (cute.arch.make_warp_uniform(i) for i in self.walk.tile_of(tile_idx))
        slabs = deal.tile.cta_m // deal.boxes.rows
        return m_idx * slabs + self.group_idx % deal.side_by_side, n_idx * deal.boxes_n, l_idx

    @cute.jit
    def take_turn(self, idx: Uint32) -> None:
        """In a ping-pong: waits until the other warpgroup has issued its wgmmas."""
        if cutlass.const_expr(self.deal.tile.pingpong):  # noqa: SIM102
            if idx != self.walk.first:
                cute.arch.barrier(barrier_id=TURN_BARRIER + self.group_idx, number_of_threads=self.deal.threads)

    @cute.jit
    def pass_turn(self, idx: Uint32) -> None:
        """To a tile that exists."""
        if cutlass.const_expr(self.deal.tile.pingpong):  # noqa: SIM102
            if idx + self.walk.step < self.walk.num_items:
                other = TURN_BARRIER + 1 - self.group_idx
                cute.arch.barrier_arrive(barrier_id=other, number_of_threads=self.deal.threads)
