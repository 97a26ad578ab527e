"""What a launch says of a walk by the names of its leaves, by `kernels/scheduler`'s own arithmetic on ints."""

from __future__ import annotations

from jax_bwgemm.facts.geometry import cluster_tiles, num_tiles
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import INT32_MAX, Tile
from jax_bwgemm.kernels.scheduler import Divisor, Stream, divisor, tile_order


def stream(num_tiles: int, k_tiles: int, grid: int, tiles: int, clusters: int) -> Stream:
    """`tiles` of the `num_tiles` that `grid` clusters compute, the last ones, or as many as there are and int32 can
    count the k tiles of; shared by `clusters`, or as many as there are."""
    tiles = min(tiles, num_tiles, INT32_MAX // k_tiles)
    clusters = min(clusters, grid)
    each, longer = divmod(tiles * k_tiles, clusters)
    shares = divisor(each + 1), divisor(max(each, 1)), longer
    return Stream(divisor(k_tiles), divisor(grid), num_tiles - tiles, tiles * k_tiles, clusters, *shares)


def walk_leaves(
    tile: Tile, problem: Problem, raster_group: int, raster_along_n: int, clusters: int, shared: tuple[int, int]
) -> dict[str, int]:
    """All of a launch, by their sources. `shared`: how many tiles, the last ones, how many of `clusters` share."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    k_tiles, batch = -(-problem.k // tile.k_tile), problem.batch
    count = num_tiles(tile, problem)
    leaves = order_leaves((tiles_m, tiles_n, batch), k_tiles, raster_group, raster_along_n)
    leaves |= {"triangle": count, f"k_step/{tile.k_tile}": 0}
    leaves |= share_leaves(count, k_tiles, clusters, *shared)
    return {f"walk:{name}": value for name, value in leaves.items()}


def order_leaves(tiles: tuple[int, int, int], k_tiles: int, raster_group: int, raster_along_n: int) -> dict[str, int]:
    """`tiles`: along m, along n, and of the batch."""
    tiles_m, tiles_n, batch = tiles
    order = tile_order(tiles_m, tiles_n, raster_group, raster_along_n)
    return {
        "tiles": tiles_m * tiles_n * batch,
        "k_tiles": k_tiles,
        **_parts("matrix", order.matrix),
        **_parts("group", order.group),
        **_parts("rows", order.rows),
        **_parts("last_rows", order.last_rows),
        "last_group": order.last_group,
        "across": order.across,
    }


def share_leaves(count: int, k_tiles: int, grid: int, stream_tiles: int, stream_clusters: int) -> dict[str, int]:
    made = stream(count, k_tiles, grid, stream_tiles, stream_clusters)
    _, multiplier, shift = divisor(k_tiles)
    return {
        "k_tiles_multiplier": multiplier,
        "k_tiles_shift": shift,
        **_parts("clusters", made.grid),
        "stream_first": made.first_tile,
        "stream_end": made.end,
        "stream_clusters": made.clusters,
        **_parts("stream_long", made.long),
        **_parts("stream_short", made.short),
        "stream_longer": made.longer,
    }


def _parts(name: str, value: Divisor) -> dict[str, int]:
    return {name: value.by, f"{name}_multiplier": value.multiplier, f"{name}_shift": value.shift}
