"""Static persistent tile order: which output tile a cluster computes in its i-th turn.

Plain arithmetic on `+ - * // minimum`, so that the same lines run in a kernel (on Uint32) and in a test (on int).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class TileOrder(NamedTuple):
    """Cluster tiles of one matrix of the batch along m and n, and how they are walked.

    In groups of `raster_group` rows, rows first: a wave of clusters then covers a block of the output that is as tall
    as it is wide, and its operands fit in L2. `raster_along_n` 1 swaps rows and columns.
    """

    tiles_m: Any
    tiles_n: Any
    raster_group: Any
    raster_along_n: Any


def tile_coordinates(idx: Any, order: TileOrder, minimum: Callable[[Any, Any], Any] = min) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx`, in cluster tiles."""
    tiles_m, tiles_n, raster_group, along_n = order
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
    tile_m = along + along_n * (across - along)
    tile_n = across + along_n * (along - across)
    return tile_m, tile_n, batch
