"""Static persistent order: which output tile a cluster computes in its i-th turn, or which piece of one (stream-K).

Plain arithmetic, so that the same lines run in a kernel (on Uint32) and in a test (on int). What is the same for all
clusters of a launch, and what they divide by, the launcher works out (`ffi/tile_walk`): a `TileOrder` and a `Stream`. A
division by a number that only the launch knows takes a kernel some 20 instructions, each of which waits for the one
before; by a `Divisor` it takes three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Arithmetic(NamedTuple):
    """What has no operator that kernels and tests share. `high`: the upper 32 bits of a product."""

    minimum: Callable[[Any, Any], Any]
    select: Callable[[Any, Any, Any], Any]
    high: Callable[[Any, Any], Any]


PLAIN = Arithmetic(min, lambda is_first, first, second: first if is_first else second, lambda x, y: x * y >> 32)


class Divisor(NamedTuple):
    """Divides what is below 2^31, without a division; `by` is at least 1."""

    by: Any
    multiplier: Any
    shift: Any

    def of(self, x: Any, on: Arithmetic = PLAIN) -> Any:
        """x // by"""
        return on.high(x + x, self.multiplier) >> self.shift


def divisor(by: int) -> Divisor:
    """The multiplier is rounded up, by so little that no quotient changes: `ffi/tile_walk` has the source."""
    shift = (by - 1).bit_length()
    return Divisor(by, -(-(1 << 31 + shift) // by), shift)


class TileOrder(NamedTuple):
    """Cluster tiles and how they are walked.

    In groups of `rows` rows, rows first: a wave of clusters then covers a block of the output that is as tall as it is
    wide, and its operands fit in L2. The last group, `last_group`, has `last_rows`. `matrix` divides by the tiles of
    one matrix of the batch, `group` by those of a whole group; `across` is how many a row has. `along_n` 1 swaps rows
    and columns. `is_snake` 1 walks every second group backwards, so that it begins beside the last tiles of the group
    before. Refused: Hilbert curves, of blocks of 4 to 16 or generalised to any grid. Their waves are less square; of
    seven large products, an LRU cache of 25 or 50 MB never missed less than under the best snake (counted).
    """

    matrix: Divisor
    group: Divisor
    rows: Divisor
    last_rows: Divisor
    last_group: Any
    across: Any
    along_n: Any
    is_snake: Any


class Stream(NamedTuple):
    """The last tiles of a launch, from `first_tile` on, as `end` k tiles behind one another: `k_tiles` each.

    The first `clusters` of `grid` clusters share them: the first `longer` shares have `long` k tiles, the others one
    less; `short` divides by that, or by 1 if they have none.
    """

    k_tiles: Divisor
    grid: Divisor
    first_tile: Any
    end: Any
    clusters: Any
    long: Divisor
    short: Divisor
    longer: Any


class Share(NamedTuple):
    """Of a stream, the k tiles from `begin` to `end`: what `cluster` multiplies."""

    stream: Stream
    cluster: Any
    begin: Any
    end: Any


class Piece(NamedTuple):
    """k tiles `k_first` to `k_first + k_count` of a tile, whose end it has if `is_end`; the `parts` clusters before
    this one have what comes before. A whole tile is an end without parts."""

    tile_idx: Any
    k_first: Any
    k_count: Any
    is_end: Any
    parts: Any


def tile_order(tiles_m: int, tiles_n: int, raster_group: int, along_n: int, is_snake: int = 0) -> TileOrder:
    grouped, across = (tiles_n, tiles_m) if along_n else (tiles_m, tiles_n)
    rows = min(raster_group, grouped)
    last_group = (grouped - 1) // rows
    sizes = grouped * across, rows * across, rows, grouped - last_group * rows
    matrix, group, whole, last = map(divisor, sizes)
    return TileOrder(matrix, group, whole, last, last_group, across, along_n, is_snake)


def tile_coordinates(idx: Any, order: TileOrder, on: Arithmetic = PLAIN) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx`, in cluster tiles."""
    batch = order.matrix.of(idx, on)
    rest = idx - batch * order.matrix.by
    group = order.group.of(rest, on)
    rest = rest - group * order.group.by
    is_whole = group < order.last_group
    rows = Divisor(*(on.select(is_whole, *pair) for pair in zip(order.rows, order.last_rows, strict=True)))
    across = rows.of(rest, on)
    along = group * order.rows.by + rest - across * rows.by
    across = across + order.is_snake * (group % 2) * (order.across - 1 - 2 * across)
    tile_m = along + order.along_n * (across - along)
    tile_n = across + order.along_n * (along - across)
    return tile_m, tile_n, batch


def triangle(side: Any) -> Any:
    """Tiles on and under the diagonal of a square; no intermediate result is larger."""
    return (side // 2 * 2 + 1) * ((side + 1) // 2)


def triangle_side(count: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
    """The largest square whose `triangle` is at most `count`, an int32: bit by bit, since a square root rounds."""
    side, tiles = count * 0, count * 0
    for bit in reversed(range(16)):
        more = side * (1 << bit) + triangle(1 << bit)
        fits = 1 - minimum(-minimum(count - tiles - more, 0), 1)
        side, tiles = side + fits * (1 << bit), tiles + fits * more
    return side


def triangle_coordinates(idx: Any, order: TileOrder, minimum: Callable[[Any, Any], Any] = min) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx` among the tiles on and under the diagonals, all signed integers.

    In groups of rows, too: rows first up to the diagonal's first tile of the group, then row by row what is left of it,
    a triangle. In a snake every second group is walked backwards.
    """
    side, raster_group, is_snake = order.across, order.rows.by, order.is_snake
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


def share_of(stream: Stream, cluster: Any, on: Arithmetic = PLAIN) -> Share:
    """`cluster`'s; empty for those behind the ones that share."""
    return Share(stream, cluster, _share_begin(stream, cluster, on), _share_begin(stream, cluster + 1, on))


def _share_begin(stream: Stream, cluster: Any, on: Arithmetic) -> Any:
    cluster = on.minimum(cluster, stream.clusters)
    return cluster * stream.long.by - (cluster - on.minimum(cluster, stream.longer))


def num_pieces(share: Share, on: Arithmetic = PLAIN) -> Any:
    """Tiles that a share has a part of."""
    k_tiles, has_any = share.stream.k_tiles, on.minimum(share.end, 1)
    return k_tiles.of(share.end - has_any, on) + has_any - k_tiles.of(share.begin, on)


def piece_of(share: Share, i: Any, on: Arithmetic = PLAIN) -> Piece:
    """The `i`-th piece of a share, the last one in the order of k first."""
    k_tiles = share.stream.k_tiles
    tile = k_tiles.of(share.end - 1, on) - i
    start = tile * k_tiles.by
    k_first = share.begin - on.minimum(share.begin, start)
    k_end = on.minimum(share.end - start, k_tiles.by)
    parts = on.minimum(k_first, 1) * (share.cluster - cluster_of(share.stream, start, on))
    return Piece(share.stream.first_tile + tile, k_first, k_end - k_first, k_end == k_tiles.by, parts)


def cluster_of(stream: Stream, at: Any, on: Arithmetic = PLAIN) -> Any:
    """Whose share the k tile `at` of the stream belongs to."""
    among_longer = on.minimum(at, stream.longer * stream.long.by)
    return stream.long.of(among_longer, on) + stream.short.of(at - among_longer, on)
