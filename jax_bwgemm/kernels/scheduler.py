"""Static persistent tile order: which output tile a cluster computes in its i-th turn.

Plain arithmetic on `+ - * // minimum`, so that the same lines run in a kernel (on Uint32) and in a test (on int).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tile_coordinates(
    idx: Any,
    tiles_m: Any,
    tiles_n: Any,
    raster_group: Any,
    raster_along_n: Any,
    minimum: Callable[[Any, Any], Any] = min,
) -> tuple[Any, Any, Any]:
    """(tile m, tile n, batch) of linear index `idx`, in cluster tiles.

    Tiles are walked in groups of `raster_group` rows, rows first: a wave of clusters then covers a block of the output
    that is as tall as it is wide, and its operands fit in L2. `raster_along_n` 1 swaps rows and columns.
    """
    tiles = tiles_m * tiles_n
    batch = idx // tiles
    rest = idx - batch * tiles
    grouped = tiles_m + raster_along_n * (tiles_n - tiles_m)
    other = tiles_n + raster_along_n * (tiles_m - tiles_n)
    group_tiles = raster_group * other
    group = rest // group_tiles
    rest = rest - group * group_tiles
    first = group * raster_group
    size = minimum(raster_group, grouped - first)
    across = rest // size
    along = first + rest - across * size
    tile_m = along + raster_along_n * (across - along)
    tile_n = across + raster_along_n * (along - across)
    return tile_m, tile_n, batch
