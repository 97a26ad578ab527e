"""Orders of tiles and what the L2 cache is asked, by hand and by measured times."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import B200, H200, LARGE, PAIR

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.geometry import concurrent_clusters
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.scheduler import tile_coordinates, tile_order
from jax_bwgemm.planner.order import l2_hints, raster, result_hint, walked
from jax_bwgemm.planner.plan import candidates, plan


def batched(batch, *sizes):
    return Problem(*sizes, batch, a_batch=batch, b_batch=batch)


@pytest.mark.parametrize("m, n", [(64, 65536), (65536, 64), (8192, 8192), (1, 8), (300, 300)])
@pytest.mark.parametrize("arch", (H200, B200), ids=lambda a: a.name)
def test_raster(m, n, arch):
    problem = Problem(m, n, 512)
    for candidate in candidates(problem, arch):
        tile, seen = candidate.tile, candidate.problem
        group, along_n = raster(tile, seen, arch)
        rows = -(-seen.m // (tile.cluster_m * tile.num_accs * tile.mma_m // tile.cta_group))
        tiles = -(-seen.n // (tile.cluster_n * tile.mma_n)) if along_n else rows
        if arch is B200 or seen.m * seen.n > 1e6:
            assert along_n == (seen.n > seen.m)  # k is short: both operands stay in the cache
        assert 1 <= group <= tiles


def test_raster_squares_what_runs_at_once():
    """The nearest power of two to the rows of a square wave: of 18 clusters of 512x512, sqrt(18); and so on."""
    assert raster(dataclasses.replace(PAIR, cluster_m=4, cluster_n=2), LARGE, B200) == (4, 0)
    assert raster(PAIR, LARGE, B200) == (8, 0)  # sqrt(74)
    assert raster(dataclasses.replace(PAIR, num_accs=2), LARGE, B200) == (8, 0)  # sqrt(74 / 2): 512x256 each
    assert raster(Tile(128, 128, cluster_k=4), LARGE, B200) == (8, 0)  # sqrt(37) of 128x128
    assert raster(Tile(128, 128), LARGE, B200) == (16, 0)  # sqrt(148)
    tall = dataclasses.replace(PAIR, cluster_m=8)  # 1024x256: sqrt(18 / 4)
    assert raster(tall, LARGE, B200) == (2, 0)
    assert raster(tall, Problem(8192, 16384, 1024), B200) == (8, 1)  # in columns: sqrt(18 * 4)
    assert raster(dataclasses.replace(tall, num_accs=2), LARGE, B200) == (2, 0)  # 2048x256: sqrt(18 / 8)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(8192, 8192, 64), (1, 0)),  # 134 MB are written, 2 read
        (Problem(8192, 8192, 64, c_major="m"), (1, 1)),
        (Problem(8192, 8192, 128), (1, 0)),
        (Problem(8192, 8192, 136), (2, 0)),  # MMAs take longer than the store
        (Problem(8192, 1032, 64), (2, 0)),  # 17 MB stay in the L2 cache
    ],
    ids=str,
)
def test_what_is_little_but_a_large_result_is_written_along_it(problem, expected):
    assert raster(Tile(128, 128, cluster_m=2), problem, H200) == expected


@pytest.mark.parametrize(
    ("problem", "tile", "expected"),
    [
        (Problem(11008, 192, 4096), Tile(256, 64), (1, 0)),  # 129 tiles, of which three have the same 256 rows of a
        (Problem(192, 11008, 4096), Tile(64, 256), (1, 1)),  # of b
        (Problem(2112, 896, 7776), Tile(128, 128), (4, 1)),  # 17x7: 16 tiles of a GPC are 4x4
        (Problem(4784, 48, 568), Tile(128, 32, cluster_m=4, pingpong=True), (8, 0)),  # the same rows 8 clusters apart
        (Problem(1024, 64, 8192), Tile(128, 32, cluster_k=4), (8, 0)),
        (Problem(8192, 8192, 512), Tile(128, 256), (2, 0)),  # 16 waves: b stays in the L2 cache
        (Problem(8192, 8192, 8192), Tile(128, 256), (16, 0)),  # 134 MB do not
        (Problem(1280, 1280, 1280), Tile(64, 224, cluster_m=4, cluster_n=2), (4, 0)),  # eight CTAs: of any GPC
    ],
    ids=str,
)
def test_tiles_of_a_gpc_share_what_they_read(problem, tile, expected):
    assert raster(tile, problem, H200) == expected


@pytest.mark.parametrize("batch", [{}, dict(batch=3, a_batch=3)], ids=str)
@pytest.mark.parametrize(("group", "along_n"), [(1, 0), (4, 0), (3, 1), (8, 1)])
@pytest.mark.parametrize("arch", [H200, B200], ids=lambda arch: arch.name)
def test_tiles_are_counted_as_kernels_walk(arch, group, along_n, batch):
    problem, tile = Problem(1100, 900, 64, **batch), Tile(128, 128, cluster_m=2)
    rows, cols = 5, 8
    order = tile_order(rows, cols, group, along_n)._replace(is_snake=int(arch is H200))
    m, n = walked(tile, problem, arch, group, along_n)
    expected = [tile_coordinates(i, order) for i in range(len(m))]
    own = bool(batch)
    assert len(m) == min(rows * cols * problem.batch, 2 * concurrent_clusters(tile, arch))
    assert list(zip(m, n, strict=True)) == [(m + rows * matrix * own, n) for m, n, matrix in expected]


def test_nobody_knows_who_should_run_side_by_side_on_blackwell():
    assert raster(Tile(128, 64), Problem(11008, 192, 4096), H200) == (1, 0)
    assert raster(Tile(128, 64), Problem(11008, 192, 4096), B200) == (8, 0)


@pytest.mark.parametrize(
    "m, n, k, along_n",
    [
        (4096, 128256, 4096, 0),  # MB: a 34, b 1051; in 2 groups of rows 34 + 2 * 1051, in 63 of columns 1051 + 63 * 34
        (8192, 14336, 4096, 0),  # a 67, b 117; 67 + 4 * 117 = 537, 117 + 7 * 67 = 587
        (8192, 50264, 768, 1),  # a, 13 MB, stays in the cache: 13 + 77
        (14336, 8192, 4096, 1),  # 117 + 7 * 67 rows, 67 + 4 * 117 columns
    ],
)
def test_groups_run_where_they_read_least(m, n, k, along_n):
    assert raster(Tile(128, 256, cluster_m=2), Problem(m, n, k), H200)[1] == along_n


def test_a_snake_on_hopper():
    """Measured on an H200 only."""
    assert plan(LARGE, H200).raster_order == "snake"
    assert plan(LARGE, B200).raster_order == "groups"


@pytest.mark.parametrize(
    "problem, tile, hints",
    [
        (Problem(128, 28672, 8192), Tile(128, 256), ("normal", "evict_first")),  # weights are read once
        (Problem(28672, 128, 8192), Tile(128, 128), ("evict_first", "normal")),
        (LARGE, PAIR, ("normal", "normal")),  # as many bytes of each
        (Problem(16, 2048, 4096), Tile(128, 128), ("normal", "normal")),  # 17 MB stay in the L2 cache
        (Problem(11549, 1, 6291), Tile(120, 8, direct=True), ("normal", "normal")),  # threads load
        (Problem(65536, 512, 512), Tile(128, 128), ("normal", "normal")),  # the result is as large
        (Problem(128, 1024, 4096, 64, b_batch=64), Tile(128, 128), ("normal", "evict_first")),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [H200, B200], ids=lambda arch: arch.name)
def test_a_stream_is_let_go_first(problem, tile, hints, arch):
    assert l2_hints(tile, problem, arch) == hints


@pytest.mark.parametrize(
    ("problem", "tile", "arch", "hint"),
    [
        (Problem(8192, 8192, 512), Tile(128, 256), H200, "evict_first"),  # 134 MB
        (Problem(8192, 3584, 512), Tile(128, 256), H200, "normal"),  # 59 MB
        (Problem(8192, 3584, 512), Tile(128, 256), ARCHS["h100"], "evict_first"),  # whose cache is smaller
        (Problem(8192, 2048, 512, out_dtype="float32"), Tile(128, 256), H200, "evict_first"),
        (batched(128, 2048, 2048, 128), Tile(128, 256), H200, "evict_first"),
        (Problem(8192, 8192, 512), Tile(128, 256), B200, "normal"),  # not measured
        (Problem(8192, 8192, 64), Tile(64, 256, direct=True), H200, "evict_first"),
        (Problem(8192, 8191, 64), Tile(64, 256, direct=True), H200, "normal"),  # tiles share 16 bytes of a row
        (Problem(8192, 8191, 64), Tile(128, 256), H200, "evict_first"),
        (Problem(8191, 8192, 64, c_major="m"), Tile(64, 256, direct=True), H200, "normal"),
    ],
)
def test_a_result_that_does_not_fit_is_let_go(problem, tile, arch, hint):
    assert result_hint(tile, problem, arch) == hint
