"""The order of tiles of the ladder's kernels: groups of rows, rows first. The package's own kernels get the divisions
from their launcher (`jax_bwgemm/kernels/scheduler.py`); here a kernel divides for itself."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Uint32


class TileOrder(NamedTuple):
    """Of `tiles_m` by `tiles_n` tiles, in groups of `rows`."""

    tiles_m: Uint32
    tiles_n: Uint32
    rows: Uint32

    def of(self, idx: Uint32) -> tuple[Uint32, Uint32]:
        """(tile m, tile n) of the `idx`-th."""
        group_tiles = self.rows * self.tiles_n
        group = idx // group_tiles
        first, rest = group * self.rows, idx - group * group_tiles
        rows = cutlass.min(self.rows, self.tiles_m - first)
        tile_n = rest // rows
        return first + rest - tile_n * rows, tile_n
