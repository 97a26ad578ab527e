"""Which tiles a cluster computes, in which order, and of which k. All roles of a CTA walk alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, Uint64, cute

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import scheduler
from jax_bwgemm.kernels.params import Order, Params, StreamParams
from jax_bwgemm.kernels.scheduler import (
    Arithmetic,
    Divisor,
    Piece,
    Share,
    TileOrder,
    num_pieces,
    piece_of,
    share_of,
    tile_coordinates,
    triangle_coordinates,
)


def high(x: Uint32, y: Uint32) -> Uint32:
    """The upper half of a product."""
    return Uint32((Uint64(x) * Uint64(y)) >> 32)


ON_DEVICE = Arithmetic(cutlass.min, cutlass.select_, high)


Place = tuple[Int32, Int32, Int32, Int32, Int32]  # (m, n, l) of a tile, and of its k tiles the first and how many


@dataclasses.dataclass(frozen=True)
class Stream:
    """A cluster's items: `base`, `base + step`, ... are the pieces of its share, what comes before are whole tiles."""

    share: Share
    base: Uint32
    params: StreamParams

    @cute.jit
    def item_of(self, idx: Uint32, k_tiles: Int32) -> Piece:
        tile_idx, k_first, k_count = idx, Int32(0), k_tiles
        is_end, parts = Boolean(True), Int32(0)
        if idx >= self.base:
            i = self.share.stream.grid.of(idx - self.base, ON_DEVICE)
            piece = piece_of(self.share, i, ON_DEVICE)
            tile_idx, k_first, k_count = Uint32(piece.tile_idx), Int32(piece.k_first), Int32(piece.k_count)
            is_end, parts = Boolean(piece.is_end), Int32(piece.parts)
        return Piece(tile_idx, k_first, k_count, is_end, parts)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The work of one cluster, in its order: items `first`, `first + step`, ... below `num_items`. An item is a tile,
    or in a `stream` a piece of one.

    Of each tile's k tiles this CTA multiplies `k_count` from `k_first` on; those of the next matrix of the batch begin
    `k_step` behind. (x, y, z): its place in the cluster.
    """

    tile: Tile
    order: TileOrder
    num_items: Uint32
    first: Uint32
    step: Uint32
    k_first: Int32
    k_count: Int32
    k_step: Int32
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
            tile_m, tile_n, l_idx = tile_coordinates(idx, self.order, ON_DEVICE)
        m_idx = Int32(tile_m) * self.tile.cluster_m + self.x
        return m_idx, Int32(tile_n) * self.tile.cluster_n + self.y, Int32(l_idx)

    def place_of(self, idx: Uint32) -> Place:
        """What a load needs of item `idx`, of which there may be none."""
        item = self.item_of(idx)
        m_idx, n_idx, l_idx = self.tile_of(item.tile_idx)
        return m_idx, n_idx, l_idx, item.k_first, item.k_count


def part_of(k_tiles: Int32, z: Int32, tile: Tile) -> tuple[Int32, Int32]:
    """(first, count) of the k tiles that the `z`-th CTA of a split multiplies; count is 0 where none is left."""
    each = Int32(Uint32(k_tiles + (tile.cluster_k - 1)) // tile.cluster_k)
    first = cutlass.min(z * each, k_tiles)
    return first, cutlass.min(each, k_tiles - first)


def divisor_of(params: Any, name: str) -> Divisor:
    return Divisor(*(getattr(params, name + end) for end in ("", "_multiplier", "_shift")))


def order_of(own: Order) -> TileOrder:
    matrix, group, rows, last_rows = (divisor_of(own, name) for name in ("matrix", "group", "rows", "last_rows"))
    return TileOrder(matrix, group, rows, last_rows, own.last_group, own.across, own.raster_along_n, own.raster_order)


def triangle_order_of(own: Order) -> TileOrder:
    """Of a symmetric product, whose order is one of signed integers: a part of a `TileOrder` says it."""
    none = Divisor(None, None, None)
    rows = Divisor(Int32(own.rows), None, None)
    return TileOrder(none, none, rows, none, None, Int32(own.across), None, Int32(own.raster_order))


def stream_of(params: StreamParams, k_tiles: Uint32, cluster: Uint32) -> Stream:
    own = params.shares
    stream = scheduler.Stream(
        k_tiles=Divisor(k_tiles, own.k_tiles_multiplier, own.k_tiles_shift),
        grid=divisor_of(own, "clusters"),
        first_tile=own.stream_first,
        end=own.stream_end,
        clusters=own.stream_clusters,
        long=divisor_of(own, "stream_long"),
        short=divisor_of(own, "stream_short"),
        longer=own.stream_longer,
    )
    whole = stream.first_tile + (stream.grid.by - 1) - cluster  # of this cluster's whole tiles, `grid` apart
    base = cluster + stream.grid.of(whole, ON_DEVICE) * stream.grid.by
    return Stream(share_of(stream, cluster, ON_DEVICE), base, params)


def walk_of(tile: Tile, params: Params) -> Walk:
    x, y, block_z = cute.arch.block_idx()
    assert params.order is not None  # the launcher passes it
    num_tiles, k_tiles, k_step = params.order.tiles, Int32(params.order.k_tiles), params.sizes.k_step
    order = triangle_order_of(params.order) if tile.symmetric else order_of(params.order)
    first, step = Uint32(block_z), Uint32(cute.arch.grid_dim()[2])
    if tile.stream_k:
        assert params.stream is not None
        stream = stream_of(params.stream, params.order.k_tiles, first)
        num_items = stream.base + num_pieces(stream.share, ON_DEVICE) * step
        return Walk(tile, order, num_items, first, step, Int32(0), k_tiles, k_step, x, y, Int32(0), stream)
    if tile.cluster_k == 1:
        return Walk(tile, order, num_tiles, first, step, Int32(0), k_tiles, k_step, x, y, Int32(0))
    z = Int32(first % tile.cluster_k)
    k_first, k_count = part_of(k_tiles, z, tile)
    first, step = first // tile.cluster_k, step // tile.cluster_k
    return Walk(tile, order, num_tiles, first, step, k_first, k_count, k_step, x, y, z)
