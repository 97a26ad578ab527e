"""How the consumer warpgroups of a Hopper CTA divide its tiles and their boxes; `sm90` says what they do in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Int32, Uint32, cute

from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.walk import Walk
from jax_bwgemm.tile import Tile, warpgroup_slabs

WARPGROUP_THREADS = 128


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
        return self.tile.mma_n // self.boxes.cols

    @property
    def num_boxes(self) -> int:
        """Of a warpgroup and tile."""
        return warpgroup_slabs(self.tile) * self.boxes_n

    def own_items(self, walk: Walk, group_idx: Int32) -> tuple[Uint32, Uint32]:
        """The first item that a warpgroup multiplies, and the step to its next."""
        if self.tile.pingpong:
            return walk.first + Uint32(group_idx) * walk.step, 2 * walk.step
        return walk.first, walk.step

    def first_box(self, walk: Walk, tile_idx: Uint32, group_idx: Int32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) in boxes of a warpgroup's first box of a tile; the shuffles keep it where it is called."""
        m_idx, n_idx, l_idx = (cute.arch.make_warp_uniform(i) for i in walk.tile_of(tile_idx))
        slabs = self.tile.cta_m // self.boxes.rows
        return m_idx * slabs + group_idx % self.side_by_side, n_idx * self.boxes_n, l_idx

    def box_at(self, at: Any, box: Any) -> Any:
        """(m, n, l) in boxes of a warpgroup's `box`-th box; `at` has its first. Slabs lie side by side in turns."""
        return at[0] + box // self.boxes_n * self.side_by_side, at[1] + box % self.boxes_n, at[2]
