"""Which tiles a cluster computes, in which order, and of which k. All roles of a CTA walk alike."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from jax_bwgemm.facts.tile import INT32_MAX, Tile
from jax_bwgemm.kernels.params import Sizes, StreamParams
from jax_bwgemm.kernels.scheduler import (
    Piece,
    Share,
    TileOrder,
    num_pieces,
    piece_of,
    share_of,
    tile_coordinates,
    triangle,
    triangle_coordinates,
)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A cluster's items: `base`, `base + step`, ... are the pieces of its share, what comes before are whole tiles."""

    share: Share
    base: Uint32
    step: Uint32
    params: StreamParams

    @cute.jit
    def item_of(self, idx: Uint32, k_tiles: Int32) -> Piece:
        tile_idx, k_first, k_count = Int32(idx), Int32(0), k_tiles
        is_end, parts = Boolean(True), Int32(0)
        if idx >= self.base:
            i = Int32((idx - self.base) // self.step)
            tile_idx, k_first, k_count, is_end, parts = piece_of(self.share, i, k_tiles, cutlass.min)
        return Piece(Uint32(tile_idx), k_first, k_count, is_end, parts)


def stream_of(num_tiles: Uint32, clusters: Uint32, cluster: Uint32, k_tiles: Int32, params: StreamParams) -> Stream:
    """No more tiles than there are or int32 can count the k tiles of, no more shares than there are clusters."""
    tiles = cutlass.min(cutlass.min(params.tiles, Int32(num_tiles)), INT32_MAX // k_tiles)
    sharing = cutlass.min(params.clusters, Int32(clusters))
    share = share_of(Int32(num_tiles), tiles, sharing, Int32(cluster), k_tiles, cutlass.min)
    whole = Uint32(share.first_tile) + (clusters - 1) - cluster  # of this cluster's whole tiles, `clusters` apart
    return Stream(share, cluster + whole // clusters * clusters, clusters, params)


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
    stream: Stream | None = None

    def item_of(self, idx: Uint32) -> Piece:
        if self.stream is None:
            return Piece(idx, self.k_first, self.k_count, Boolean(True), Int32(0))
        return self.stream.item_of(idx, self.k_count)

    def tile_of(self, idx: Uint32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of this CTA's tile, in units of cta_m, out_n and 1."""
        if self.tile.symmetric:
            tile_m, tile_n, l_idx = triangle_coordinates(Int32(idx), self.order, cutlass.min)
        else:
            tile_m, tile_n, l_idx = tile_coordinates(idx, self.order, cutlass.min)
        m_idx = Int32(tile_m) * self.tile.cluster_m + self.x
        return m_idx, Int32(tile_n) * self.tile.cluster_n + self.y, Int32(l_idx)


def part_of(k_tiles: Int32, z: Int32, tile: Tile) -> tuple[Int32, Int32]:
    """(first, count) of the k tiles that the `z`-th CTA of a split multiplies; count is 0 where none is left."""
    each = (k_tiles + (tile.cluster_k - 1)) // tile.cluster_k
    first = cutlass.min(z * each, k_tiles)
    return first, cutlass.min(each, k_tiles - first)


def walk_of(tile: Tile, sizes: Sizes, stream_params: StreamParams | None) -> Walk:
    x, y, block_z = cute.arch.block_idx()
    rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.out_n
    tiles_m, tiles_n = Uint32((sizes.m + (rows - 1)) // rows), Uint32((sizes.n + (cols - 1)) // cols)
    raster = sizes.raster_group, sizes.raster_along_n, sizes.raster_order
    order = TileOrder(tiles_m, tiles_n, *map(Uint32, raster))
    num_tiles = tiles_m * tiles_n * Uint32(sizes.batch)
    if tile.symmetric:
        order = TileOrder(Int32(tiles_m), Int32(tiles_n), *raster)
        num_tiles = Uint32(triangle(Int32(tiles_m)) * sizes.batch)
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
    k_first, k_count = part_of(k_tiles, z, tile)
    return Walk(tile, order, num_tiles, first // tile.cluster_k, step // tile.cluster_k, k_first, k_count, x, y, z)
