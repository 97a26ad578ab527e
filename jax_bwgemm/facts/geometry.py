"""How a problem falls into tiles on a device: tiles, waves, steps along k, and the bytes that they read. Counts only:
what anything takes is `cycles`' and `cost`'s."""

from __future__ import annotations

import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def cluster_tiles(tile: Tile, problem: Problem) -> tuple[int, int]:
    """Cluster tiles along m and n of one matrix of the batch."""
    return ceil_div(problem.m, tile.cluster_m * tile.cta_m), ceil_div(problem.n, tile.cluster_n * tile.out_n)


def num_tiles(tile: Tile, problem: Problem) -> int:
    """Cluster tiles, those of all matrices of the batch: of a symmetric tile, those on and under the diagonal."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    return (tiles_m * (tiles_m + 1) // 2 if tile.symmetric else tiles_m * tiles_n) * problem.batch


def k_steps(tile: Tile, problem: Problem) -> int:
    """Stages that one CTA goes through for a tile."""
    return ceil_div(ceil_div(problem.k, tile.k_tile), tile.cluster_k)


def concurrent_clusters(tile: Tile, arch: Arch) -> int:
    """Those of four CTAs and more leave SMs idle, where a GPC has SMs for no more of them: of 132, 120 are at work."""
    return arch.max_clusters(tile.cluster_ctas)


def num_waves(tile: Tile, problem: Problem, arch: Arch) -> int:
    """Rounds of cluster tiles, one CTA a SM."""
    return ceil_div(num_tiles(tile, problem), concurrent_clusters(tile, arch))


def wave_shape(tile: Tile, problem: Problem, arch: Arch, is_grouped: bool = True) -> tuple[float, float]:
    """Cluster tiles along m and n that run at the same time: a square in bytes if they are grouped, else rows."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    wave = concurrent_clusters(tile, arch)
    ideal = math.sqrt(wave * tile.cluster_n * tile.out_n / (tile.cluster_m * tile.cta_m))
    rows = max(1.0, min(tiles_m, ideal if is_grouped else wave / tiles_n))
    return rows, max(1.0, min(tiles_n, wave / rows))


def readers(tile: Tile, problem: Problem, arch: Arch) -> tuple[float, float]:
    """Clusters that read the same box of a, and of b, at the same time."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    rows, cols = wave_shape(tile, problem, arch)
    wave = concurrent_clusters(tile, arch)
    return min(tiles_n, wave / rows), min(tiles_m, wave / cols)


def inside(tile: Tile, problem: Problem) -> tuple[float, float]:
    """The share of all tiles' rows, and of their columns, that are rows and columns of the problem."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    return (
        problem.m / (tiles_m * tile.cluster_m * tile.cta_m),
        problem.n / (tiles_n * tile.cluster_n * tile.out_n),
    )


def fill_parts(tile: Tile, in_bytes: int) -> tuple[float, float]:
    """Bytes of a and b that one k step of one CTA reads from L2: a multicast operand counts once for the CTAs that
    share it."""
    a_rows = tile.cta_m / tile.cluster_n
    b_rows = tile.load_n / (tile.cluster_m / tile.cta_group)
    return a_rows * tile.k_tile * in_bytes, b_rows * tile.k_tile * in_bytes


def fill_bytes(tile: Tile, in_bytes: int) -> float:
    return sum(fill_parts(tile, in_bytes))


def l2_bytes(tile: Tile, problem: Problem) -> float:
    """What all CTAs read from L2."""
    steps = num_tiles(tile, problem) * tile.cluster_ctas * k_steps(tile, problem)
    return steps * fill_bytes(tile, DTYPE_BYTES[problem.a_dtype])


def multiplied_flops(tile: Tile, problem: Problem) -> float:
    """Of the problem's elements that its tiles compute: all, or those on and under the diagonal tiles."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    share = num_tiles(tile, problem) / (tiles_m * tiles_n * problem.batch)
    return 2.0 * problem.batch * problem.m * problem.n * problem.k * problem.num_bs * share


def operand_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of a and of every b, all their matrices."""
    a = problem.a_batch * problem.m * problem.k * DTYPE_BYTES[problem.a_dtype]
    return a, problem.num_bs * problem.b_batch * problem.k * problem.n * DTYPE_BYTES[problem.b_dtype]


def result_bytes(problem: Problem) -> int:
    """Of all matrices that the kernel writes."""
    out = problem.batch * problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    return out * len(problem.epilogue.results)
