"""Which tiles a cluster computes, in which order, and of which k. All roles of a CTA walk alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from jax_bwgemm.kernels.gemm import Sizes
from jax_bwgemm.kernels.scheduler import Piece, TileOrder, num_pieces, tile_coordinates
from jax_bwgemm.kernels.stream_k import StreamParams, stream_of
from jax_bwgemm.tile import Tile


@dataclasses.dataclass(frozen=True)
class Walk:
    """The work of one cluster, in its order: items `first`, `first + step`, ... below `num_items`. An item is a tile,
    or in a `stream` a piece of one.

    Of each tile's k tiles this CTA multiplies `k_count` from `k_first` on. (x, y, z): its place in the cluster.
    """

    tile: Tile
    order: TileOrder
    num_items: Uint32
    first: Uint32
    step: Uint32
    k_first: Int32
    k_count: Int32
    x: Int32
    y: Int32
    z: Int32
    stream: Any = None  # a Stream, or None

    def item_of(self, idx: Uint32) -> Piece:
        if self.stream is None:
            return Piece(idx, self.k_first, self.k_count, Boolean(True), Int32(0))
        return self.stream.item_of(idx, self.k_count)

    def tile_of(self, idx: Uint32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of this CTA's tile, in units of cta_m, mma_n and 1."""
        tile_m, tile_n, l_idx = tile_coordinates(idx, self.order, cutlass.min)
        m_idx = Int32(tile_m) * self.tile.cluster_m + self.x
        return m_idx, Int32(tile_n) * self.tile.cluster_n + self.y, Int32(l_idx)


def walk_of(tile: Tile, sizes: Sizes, stream_params: StreamParams | None) -> Walk:
    x, y, block_z = cute.arch.block_idx()
    rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    tiles_m, tiles_n = Uint32((sizes.m + (rows - 1)) // rows), Uint32((sizes.n + (cols - 1)) // cols)
    raster = sizes.raster_group, sizes.raster_along_n, sizes.raster_order
    order = TileOrder(tiles_m, tiles_n, *map(Uint32, raster))
    num_tiles = tiles_m * tiles_n * Uint32(sizes.batch)
    k_tiles = (sizes.k + (tile.k_tile - 1)) // tile.k_tile
    first, step = Uint32(block_z), Uint32(cute.arch.grid_dim()[2])
    if tile.stream_k:
        assert stream_params is not None  # the launcher passes them
        stream = stream_of(num_tiles, step, first, k_tiles, stream_params)
        num_items = stream.base + Uint32(num_pieces(stream.share, k_tiles)) * step
        return Walk(tile, order, num_items, first, step, Int32(0), k_tiles, x, y, Int32(0), stream)
    if tile.cluster_k == 1:
        return Walk(tile, order, num_tiles, first, step, Int32(0), k_tiles, x, y, Int32(0))
    z = block_z % tile.cluster_k
    part = (k_tiles + (tile.cluster_k - 1)) // tile.cluster_k
    k_first = cutlass.min(z * part, k_tiles)
    k_count = cutlass.min(part, k_tiles - k_first)
    return Walk(tile, order, num_tiles, first // tile.cluster_k, step // tile.cluster_k, k_first, k_count, x, y, z)
