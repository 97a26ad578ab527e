"""Static persistent order: which output tile a cluster computes in its i-th turn, or which piece of one (stream-K).

Plain arithmetic on `+ - * // % minimum`, so that the same lines run in a kernel (on Uint32) and in a test (on int).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Minimum = Callable[[Any, Any], Any]


class TileOrder(NamedTuple):
    """Cluster tiles of one matrix of the batch along m and n, and how they are walked.

    In groups of `raster_group` rows, rows first: a wave of clusters then covers a block of the output that is as tall
    as it is wide, and its operands fit in L2. `raster_along_n` 1 swaps rows and columns. `raster_order` 1 is a snake:
    every second group is walked backwards, so that it begins beside the last tiles of the group before. Refused:
    Hilbert curves, of blocks of 4 to 16 or generalised to any grid. Their waves are less square; of seven large
    products, an LRU cache of 25 or 50 MB never missed less than under the best snake (counted).
    """

    tiles_m: Any
    tiles_n: Any
    raster_group: Any
    raster_along_n: Any
    raster_order: Any = 0


class Share(NamedTuple):
    """Of the stream, whose first tile is `first_tile`, the k tiles from `begin` to `end`: what `cluster` multiplies.

    Of all shares, the first `longer` have `each` + 1 k tiles, the others `each`.
    """

    first_tile: Any
    cluster: Any
    begin: Any
    end: Any
    each: Any
    longer: Any


class Piece(NamedTuple):
    """k tiles `k_first` to `k_first + k_count` of a tile, whose end it has if `is_end`; the `parts` clusters before
    this one have what comes before. A whole tile is an end without parts."""

    tile_idx: Any
    k_first: Any
    k_count: Any
    is_end: Any
    parts: Any


def tile_coordinates(idx: Any, order: TileOrder, minimum: Minimum = min) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx`, in cluster tiles."""
    tiles_m, tiles_n, raster_group, along_n, is_snake = order
    tiles = tiles_m * tiles_n
    batch = idx // tiles
    rest = idx - batch * tiles
    grouped = tiles_m + along_n * (tiles_n - tiles_m)
    other = tiles_n + along_n * (tiles_m - tiles_n)
    group_tiles = raster_group * other
    group = rest // group_tiles
    rest = rest - group * group_tiles
    first = group * raster_group
    size = minimum(raster_group, grouped - first)
    across = rest // size
    along = first + rest - across * size
    across = across + is_snake * (group % 2) * (other - 1 - 2 * across)
    tile_m = along + along_n * (across - along)
    tile_n = across + along_n * (along - across)
    return tile_m, tile_n, batch


def triangle(side: Any) -> Any:
    """Tiles on and under the diagonal of a square; no intermediate result is larger."""
    return (side // 2 * 2 + 1) * ((side + 1) // 2)


def triangle_side(count: Any, minimum: Minimum = min) -> Any:
    """The largest square whose `triangle` is at most `count`, an int32: bit by bit, since a square root rounds."""
    side, tiles = count * 0, count * 0
    for bit in reversed(range(16)):
        more = side * (1 << bit) + triangle(1 << bit)
        fits = 1 - minimum(-minimum(count - tiles - more, 0), 1)
        side, tiles = side + fits * (1 << bit), tiles + fits * more
    return side


def triangle_coordinates(idx: Any, order: TileOrder, minimum: Minimum = min) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx` among the tiles on and under the diagonals, all signed integers.

    In groups of `raster_group` rows, too: rows first up to the diagonal's first tile of the group, then row by row what
    is left of it, a triangle. In a snake every second group is walked backwards.
    """
    side, raster_group, is_snake = order.tiles_m, order.raster_group, order.raster_order
    batch = idx // triangle(side)
    rest = idx - batch * triangle(side)
    group = triangle_side(rest, minimum) // raster_group
    first = group * raster_group
    size = minimum(raster_group, side - first)
    block = (first + 1) * size
    rest = rest - triangle(first)
    rest = rest + is_snake * (group % 2) * (block + triangle(size - 1) - 1 - 2 * rest)
    across = rest // size
    beyond = -minimum(block - rest, 0)  # of the block, which has its last tile at block - 1
    row = triangle_side(beyond, minimum)
    is_beyond = minimum(-minimum(block - 1 - rest, 0), 1)
    tile_m = first + rest - across * size + is_beyond * (row + 1 - rest + across * size)
    tile_n = across + is_beyond * (first + 1 + beyond - triangle(row) - across)
    return tile_m, tile_n, batch


def share_of(num_tiles: Any, tiles: Any, clusters: Any, cluster: Any, k_tiles: Any, minimum: Minimum = min) -> Share:
    """`cluster`'s of the last `tiles` of `num_tiles`, which the first `clusters` share."""
    total = tiles * k_tiles
    each = total // clusters
    longer = total - each * clusters
    begin = minimum(cluster * each + minimum(cluster, longer), total)
    end = minimum(begin + each + minimum(-minimum(cluster - longer, 0), 1), total)
    return Share(num_tiles - tiles, cluster, begin, end, each, longer)


def num_pieces(share: Share, k_tiles: Any) -> Any:
    """Tiles that a share has a part of."""
    return (share.end + (k_tiles - 1)) // k_tiles - share.begin // k_tiles


def piece_of(share: Share, i: Any, k_tiles: Any, minimum: Minimum = min) -> Piece:
    """The `i`-th piece of a share, the last one in the order of k first."""
    tile = (share.end - 1) // k_tiles - i
    start = tile * k_tiles
    k_first = -minimum(start - share.begin, 0)
    k_end = minimum(share.end - start, k_tiles)
    parts = minimum(k_first, 1) * (share.cluster - cluster_of(share, start, minimum))
    return Piece(share.first_tile + tile, k_first, k_end - k_first, k_end == k_tiles, parts)


def cluster_of(share: Share, at: Any, minimum: Minimum = min) -> Any:
    """Whose share the k tile `at` of the stream belongs to."""
    longer_end = share.longer * (share.each + 1)
    behind = -minimum(longer_end - at, 0)
    return minimum(at // (share.each + 1), share.longer) + behind // -minimum(-share.each, -1)
