"""Masks, arrival counts, bytes, stages and TMEM columns against values derived by hand.

The 4x4 clusters are those of NVIDIA's CuTe tutorials for Blackwell (multicast masks of CTA 0 and CTA 11).
"""

from __future__ import annotations

import pytest

from jax_bwgemm import tile as tiles
from jax_bwgemm.arch import ARCHS
from jax_bwgemm.kernels import masks, pipelines
from jax_bwgemm.tile import SHIPPED_TILES, Tile

SOLO_4X4 = Tile(128, 256, cta_group=1, cluster_m=4, cluster_n=4)
PAIR_4X4 = Tile(256, 256, cta_group=2, cluster_m=4, cluster_n=4)
SMEM_BYTES = ARCHS["b200"].smem_bytes


@pytest.mark.parametrize(
    "tile, rank, a_mask, b_mask",
    [
        (SOLO_4X4, 0, 0x1111, 0x000F),
        (SOLO_4X4, 11, 0x8888, 0x0F00),
        (PAIR_4X4, 0, 0x1111, 0x0005),
        (PAIR_4X4, 1, 0x2222, 0x000A),  # the odd half of a pair: same row of B tiles, other half of B
        (PAIR_4X4, 11, 0x8888, 0x0A00),
        (Tile(128, 256, cluster_m=2), 1, 0b10, 0b11),
        (Tile(128, 256, cluster_n=2), 1, 0b11, 0b10),
        (Tile(256, 256, cta_group=2, cluster_m=2), 1, 0b10, 0b10),
    ],
)
def test_multicast_masks(tile: Tile, rank: int, a_mask: int, b_mask: int) -> None:
    x, y = rank % tile.cluster_m, rank // tile.cluster_m
    assert masks.a_mask(tile, x) == a_mask
    assert masks.b_mask(tile, x, y) == b_mask


@pytest.mark.parametrize(
    "tile", [SOLO_4X4, PAIR_4X4, *(tile for family in SHIPPED_TILES.values() for tile in family)], ids=str
)
def test_a_mask_names_exactly_the_ctas_that_load_the_same_part(tile: Tile) -> None:
    ctas = [(x, y) for y in range(tile.cluster_n) for x in range(tile.cluster_m)]
    for x, y in ctas:
        same_a = sum(1 << (x2 + y2 * tile.cluster_m) for x2, y2 in ctas if x2 == x)
        same_b = sum(1 << (x2 + y2 * tile.cluster_m) for x2, y2 in ctas if y2 == y and (x2 - x) % tile.cta_group == 0)
        assert masks.a_mask(tile, x) == same_a
        assert masks.b_mask(tile, x, y) == same_b


def test_arrival_counts() -> None:
    assert pipelines.blackwell_empty_arrivals(SOLO_4X4) == 4 + 4 - 1
    assert pipelines.blackwell_empty_arrivals(PAIR_4X4) == 2 + 4 - 1
    assert pipelines.blackwell_empty_arrivals(Tile(256, 256, cta_group=2, cluster_m=2)) == 1
    assert pipelines.hopper_empty_arrivals(Tile(128, 256)) == 8  # two warpgroups of four warps
    assert pipelines.hopper_empty_arrivals(Tile(128, 256, cluster_m=2)) == 16
    assert pipelines.hopper_empty_arrivals(Tile(64, 128)) == 4
    assert pipelines.acc_empty_arrivals(Tile(128, 256)) == 4
    assert pipelines.acc_empty_arrivals(Tile(256, 256, cta_group=2, cluster_m=2)) == 8


def test_stores_in_flight() -> None:
    assert pipelines.stores_in_flight() == 2  # of 4 buffers: one being written, one that the slowest warp still fills


def test_full_bytes() -> None:
    assert pipelines.full_bytes(Tile(128, 256), 2) == 48 * 1024
    assert pipelines.full_bytes(Tile(256, 256, cta_group=2, cluster_m=2), 2) == 4 * 16384  # A and B of both CTAs
    assert pipelines.full_bytes(Tile(64, 128), 2) == 24 * 1024


@pytest.mark.parametrize(
    "tile, stages, smem_bytes",
    [
        (Tile(128, 256), 4, 1024 + 4 * 49152 + 32768),
        (Tile(256, 128), 4, 1024 + 4 * 49152 + 32768),
        (Tile(128, 128), 6, 1024 + 6 * 32768 + 32768),
        (Tile(64, 128), 8, 1024 + 8 * 24576 + 16384),
        (Tile(256, 256, cta_group=2, cluster_m=2), 6, 1024 + 6 * 32768 + 32768),
        (Tile(256, 128, cta_group=2, cluster_m=2), 8, 1024 + 8 * 24576 + 32768),
    ],
    ids=str,
)
def test_stages_and_shared_memory(tile: Tile, stages: int, smem_bytes: int) -> None:
    assert tiles.num_stages(tile, 2, SMEM_BYTES) == stages
    assert tiles.smem_bytes(tile, 2, SMEM_BYTES) == smem_bytes <= 232448


def test_tmem_columns() -> None:
    assert tiles.tmem_cols(Tile(128, 256)) == 512
    assert tiles.tmem_cols(Tile(128, 192)) == 512  # 2 * 192 = 384, rounded up to a power of two
    assert tiles.tmem_cols(Tile(128, 128)) == 256
    assert tiles.tmem_cols(Tile(256, 256, cta_group=2, cluster_m=2)) == 512


@pytest.mark.parametrize(
    "tile, operand, major, box",
    [
        (Tile(128, 256), "b", "k", (64, 256)),
        (Tile(128, 256, cluster_m=2), "b", "k", (64, 128)),
        (Tile(128, 256, cluster_m=2), "b", "n", (64, 32)),
        (Tile(128, 256, cluster_m=2), "a", "k", (64, 128)),
        (Tile(128, 256, cluster_n=2), "a", "m", (64, 32)),
        (Tile(256, 256, cta_group=2, cluster_m=2), "b", "k", (64, 128)),
        (PAIR_4X4, "b", "k", (64, 64)),
        (PAIR_4X4, "a", "k", (64, 32)),
    ],
)
def test_load_boxes(tile: Tile, operand: str, major: str, box: tuple[int, int]) -> None:
    assert tiles.load_box(tile, operand, major, 2) == box
