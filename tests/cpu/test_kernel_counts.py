"""Masks, arrival counts, bytes, stages and TMEM columns against values derived by hand.

The 4x4 clusters are those of NVIDIA's CuTe tutorials for Blackwell (multicast masks of CTA 0 and CTA 11).
"""

from __future__ import annotations

import pytest

from jax_bwgemm.facts import resources
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import masks, pipelines

B200, H200 = ARCHS["b200"], ARCHS["h200"]
PAIR_128 = Tile(128, 128, cta_group=2, cluster_m=2)
DUAL = Tile(256, 256, cta_group=2, cluster_m=2, num_accs=2)
SPLIT = Tile(128, 128, cluster_k=4)
SOLO_4X4 = Tile(128, 256, cta_group=1, cluster_m=4, cluster_n=4)
PAIR_4X4 = Tile(256, 256, cta_group=2, cluster_m=4, cluster_n=4)


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
        (Tile(128, 256, cluster_m=4), 2, 0b0100, 0b1111),
        (Tile(128, 256, cluster_m=2, cluster_n=2), 1, 0b1010, 0b0011),
        (Tile(128, 256, cluster_m=2, cluster_n=2), 2, 0b0101, 0b1100),
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
    assert pipelines.hopper_empty_arrivals(Tile(192, 96)) == 12  # three warpgroups of four warps
    assert pipelines.hopper_empty_arrivals(Tile(192, 96, cluster_m=2)) == 24
    assert pipelines.hopper_empty_arrivals(Tile(256, 192)) == 8
    assert pipelines.hopper_empty_arrivals(Tile(128, 256, cluster_m=4)) == 32  # eight warps of each of four CTAs
    assert pipelines.hopper_empty_arrivals(Tile(128, 256, cluster_m=2, cluster_n=2)) == 24  # not the one across
    assert pipelines.acc_empty_arrivals(Tile(128, 256)) == 4
    assert pipelines.acc_empty_arrivals(Tile(256, 256, cta_group=2, cluster_m=2)) == 8
    assert pipelines.blackwell_empty_arrivals(SPLIT) == 1  # the other parts of k have stages of their own
    assert pipelines.split_arrivals(SPLIT, 4) == 16  # four warps of four CTAs
    assert pipelines.split_arrivals(Tile(192, 32, cluster_k=2), 12) == 24
    assert pipelines.split_arrivals(Tile(256, 128, cta_group=2, cluster_m=2, cluster_k=4), 4) == 16  # no peer's warps


def test_stores_in_flight() -> None:
    # Of 4 buffers, one is being written, and one the slowest warp still fills. Of 2 wide ones, one is about to be.
    assert [pipelines.stores_in_flight(buffers) for buffers in (4, 2)] == [2, 0]
    assert [pipelines.wide_stores_in_flight(buffers, 2) for buffers in (4, 2)] == [1, 0]


@pytest.mark.parametrize(
    "tile, out_dtype, c_major, moves, boxes",
    [
        (Tile(128, 256), "bfloat16", "n", Moves(), 2),  # rows of 128 bytes
        (Tile(128, 64), "float32", "n", Moves(), 2),
        (Tile(128, 256), "float8_e4m3fn", "n", Moves(), 2),
        (Tile(128, 64), "float8_e4m3fn", "n", Moves(), 1),  # which has one box of 64 bytes
        (Tile(128, 32), "bfloat16", "n", Moves(), 1),
        (Tile(128, 96), "bfloat16", "n", Moves(), 1),  # three boxes
        (Tile(128, 80), "bfloat16", "n", Moves(), 1),  # boxes of 32 bytes
        (Tile(128, 256, gated=True), "bfloat16", "n", Moves(), 2),
        (Tile(128, 128), "bfloat16", "n", Moves(0, 1, 1), 2),  # beside a reduction
        (Tile(128, 256), "bfloat16", "m", Moves(), 1),  # whose rows are 128 bytes already
        (Tile(128, 256), "bfloat16", "n", Moves(1), 1),  # a residual comes box by box
        (Tile(128, 256), "bfloat16", "n", Moves(0, 2), 1),  # boxes of two results leave in turns
        (Tile(128, 256, symmetric=True), "bfloat16", "n", Moves(), 1),
        (Tile(64, 64, cluster_k=4), "bfloat16", "n", Moves(), 1),  # whose CTAs share boxes out
    ],
)
def test_boxes_of_a_store(tile: Tile, out_dtype: str, c_major: str, moves: Moves, boxes: int) -> None:
    assert resources.boxes_a_store(tile, out_dtype, c_major, "sm_90a", moves=moves) == boxes
    assert resources.boxes_a_store(tile, out_dtype, c_major, "sm_90a", "threads", moves) == 1
    assert resources.boxes_a_store(tile, out_dtype, c_major, "sm_100f", moves=moves) == 1


def test_a_residuals_counts() -> None:
    """On Blackwell for all store groups; on Hopper for each warpgroup: 64 rows of 64 bytes, and four warps."""
    assert pipelines.residual_empty_arrivals() == pipelines.residual_summed_arrivals() == 4
    assert pipelines.residual_full_bytes(Tile(128, 256), "bfloat16", "sm_100f", Moves(1)) == 128 * 64
    assert pipelines.residual_full_bytes(PAIR_128, "float32", "sm_100f", Moves(1)) == 2 * 64 * 64
    assert pipelines.residual_full_bytes(Tile(128, 256), "bfloat16", "sm_90a", Moves(1)) == 64 * 64
    assert pipelines.residual_full_bytes(Tile(128, 128, pingpong=True), "float32", "sm_90a", Moves(1)) == 64 * 64
    assert pipelines.residual_full_bytes(Tile(128, 16), "bfloat16", "sm_90a", Moves(1)) == 64 * 32
    assert pipelines.residual_full_bytes(Tile(128, 256), "bfloat16", "sm_90a", Moves(2, 2)) == 2 * 64 * 64


def test_buffers_of_several_matrices_and_results() -> None:
    """Hopper: a place has a buffer for each, 8 of 4 KiB for a warpgroup in all. Blackwell: matrices have their own."""
    tile = Tile(128, 256)
    assert [Moves(*x).planes for x in ((0, 1), (0, 3), (1, 1), (1, 2), (2, 2), (2, 3))] == [1, 1, 1, 2, 2, 3]
    assert resources.store_buffers(tile, "bfloat16", "sm_90a", Moves(2, 2)) == 4  # of 8 boxes, half a tile ahead
    assert resources.store_buffers(tile, "bfloat16", "sm_90a", Moves(2, 3)) == 2
    assert resources.store_buffers(tile, "bfloat16", "sm_90a", Moves(0, 3)) == 4
    assert resources.epilogue_bytes(tile, "bfloat16", "sm_90a", Moves(2, 2)) == 2 * 4 * 2 * 4096
    assert resources.epilogue_bytes(tile, "bfloat16", "sm_90a", Moves(0, 3)) == 2 * 4 * 4096
    assert resources.epilogue_bytes(tile, "bfloat16", "sm_100f", Moves(2, 2)) == 3 * 4 * 128 * 64
    assert (
        resources.num_stages(tile, "bfloat16", "bfloat16", H200, Moves(2, 2)) == 3
    )  # (227 KiB - 1 KiB - 64 KiB) / 48 KiB
    assert not resources.defers_store(tile, "bfloat16", "tma", "sm_90a", moves=Moves(0, 2))


def test_a_gated_tile_has_half_of_its_columns_in_the_result() -> None:
    tile = Tile(128, 256, cluster_m=2, gated=True)
    assert (tile.out_n, tile.num_bs, tile.load_n) == (128, 2, 256)
    assert resources.load_box(tile, "b", "k", "bfloat16") == (64, 64)  # 128 columns of each, by two CTAs
    assert resources.load_box(tile, "b", "n", "bfloat16") == (64, 32)
    assert resources.stage_bytes(tile, "bfloat16") == resources.stage_bytes(Tile(128, 256), "bfloat16")
    assert resources.store_boxes(tile, "bfloat16") == 4 and resources.store_boxes(Tile(128, 256), "bfloat16") == 8
    assert resources.workspace_bytes(Tile(128, 256, stream_k=True, gated=True), 3) == 4096 + 3 * 128 * 256 * 4
    pair = Tile(256, 256, cta_group=2, cluster_m=2, gated=True)
    assert resources.load_box(pair, "b", "k", "bfloat16") == (64, 128)  # all of one b: the other CTA has the other
    assert resources.acc_cols(pair) == 256 and resources.acc_stages(pair) == 2
    assert Tile.from_str(str(tile)) == tile and str(tile) == "128x256x64_cta1_cluster2x1_gated"
    assert [pipelines.residual_stores_in_flight(buffers) for buffers in (1, 2, 3, 8)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("tile", "out", "boxes", "buffers", "stages"),
    [
        (Tile(128, 256), "bfloat16", 8, 8, 3),  # 64x256 in boxes of 64x32; 3 * 48 KiB beside 64 KiB
        (Tile(128, 256), "float32", 16, 8, 3),  # in boxes of 64x16
        (Tile(256, 128), "bfloat16", 8, 8, 3),  # two slabs
        (Tile(128, 128), "bfloat16", 4, 4, 6),
        (Tile(128, 128, pingpong=True), "bfloat16", 8, 8, 5),  # both slabs are a warpgroup's
        (Tile(64, 128), "bfloat16", 4, 4, 8),
        (Tile(128, 192), "float32", 12, 6, 4),  # half of them: 8 do not divide 12
        (Tile(128, 96), "bfloat16", 3, 3, 7),
        (Tile(192, 128), "bfloat16", 4, 4, 4),  # 4 * 40 KiB beside three warpgroups' 4 boxes of 4 KiB each
        (Tile(128, 16), "bfloat16", 1, 1, 12),
    ],
    ids=str,
)
def test_buffers_that_a_residual_and_then_the_result_are_in(
    tile: Tile, out: str, boxes: int, buffers: int, stages: int
) -> None:
    assert resources.store_boxes(tile, out) == boxes
    assert resources.store_buffers(tile, out, "sm_90a", moves=Moves(1)) == buffers
    assert resources.num_stages(tile, "bfloat16", out, H200, moves=Moves(1)) == stages
    box_bytes = resources.store_box_bytes(tile, out, "sm_90a")
    assert resources.epilogue_bytes(tile, out, "sm_90a", moves=Moves(1)) == buffers * box_bytes
    assert resources.store_buffers(tile, out, "sm_100f", Moves(1)) == 4
    assert not resources.defers_store(tile, out, "tma", "sm_90a", moves=Moves(1))


@pytest.mark.parametrize(
    ("tile", "buffers", "stages"),
    [
        (Tile(128, 256), 4, 4),  # of 48 KiB: 226 KiB less 32, or 16, hold four
        (Tile(128, 192), 2, 5),  # of 40 KiB: beside 32 KiB four, beside 16 five
        (Tile(192, 128), 2, 5),  # the same beside 48 KiB and 24
        (Tile(192, 192), 2, 4),  # of 48 KiB: three beside 48 KiB, four beside 24
        (Tile(192, 96), 2, 5),  # of 36 KiB
        (Tile(128, 160), 4, 5),  # of 36 KiB, beside 32 or 16
        (Tile(128, 96), 4, 6),  # seven beside 16 KiB, but six are enough
        (Tile(64, 128), 4, 8),
        (Tile(128, 192, pingpong=True), 4, 4),  # twelve boxes of a warpgroup, which leave at once
    ],
    ids=str,
)
def test_few_stages_take_room_from_store_buffers(tile: Tile, buffers: int, stages: int) -> None:
    for out in ("bfloat16", "float32"):
        assert resources.store_buffers(tile, out, "sm_90a") == buffers
        assert resources.num_stages(tile, "bfloat16", out, H200) == stages
        assert resources.store_buffers(tile, out, "sm_90a", Moves(results=2)) == 4
        assert resources.store_buffers(tile, out, "sm_100f") == 4


def test_full_bytes() -> None:
    assert pipelines.full_bytes(Tile(128, 256), "bfloat16") == 48 * 1024
    assert pipelines.full_bytes(Tile(256, 256, cta_group=2, cluster_m=2), "bfloat16") == 4 * 16384  # both CTAs' A and B
    assert pipelines.full_bytes(Tile(64, 128), "float16") == 24 * 1024
    assert pipelines.full_bytes(DUAL, "bfloat16") == 2 * (32768 + 16384)  # twice A, B once
    assert (
        pipelines.full_bytes(Tile(128, 256, 128), "int8") == 48 * 1024
    )  # a stage is 128 bytes of k, whatever the dtype


@pytest.mark.parametrize(
    "tile, arch, stages, smem_bytes",
    [
        (Tile(128, 256), H200, 4, 1024 + 4 * 49152 + 32768),
        (Tile(256, 128), H200, 4, 1024 + 4 * 49152 + 32768),
        (Tile(256, 192), H200, 3, 1024 + 3 * 57344 + 32768),
        (Tile(192, 128), H200, 5, 1024 + 5 * 40960 + 24576),  # three warpgroups' store buffers, two of each
        (Tile(192, 192), H200, 4, 1024 + 4 * 49152 + 24576),
        (Tile(192, 176), H200, 4, 1024 + 4 * 47104 + 24576),  # 352 bytes of columns: boxes of 32
        (Tile(128, 128), H200, 6, 1024 + 6 * 32768 + 32768),
        (Tile(64, 128), H200, 8, 1024 + 8 * 24576 + 16384),
        (Tile(64, 256, pingpong=True), H200, 4, 1024 + 4 * 40960 + 32768),  # two warpgroups' store buffers, one's A
        (Tile(128, 256), B200, 4, 1024 + 4 * 49152 + 32768),
        (Tile(64, 128), B200, 8, 1024 + 8 * 24576 + 16384),
        (Tile(256, 256, cta_group=2, cluster_m=2), B200, 6, 1024 + 6 * 32768 + 32768),
        (Tile(256, 128, cta_group=2, cluster_m=2), B200, 8, 1024 + 8 * 24576 + 32768),
        (PAIR_128, B200, 12, 1024 + 12 * 16384 + 32768),  # two groups of 64-row boxes
        (DUAL, B200, 4, 1024 + 4 * 49152 + 32768),
        (Tile(128, 16), B200, 11, 1024 + 11 * 18432 + 16384),  # boxes of 32 bytes
    ],
    ids=str,
)
def test_stages_and_shared_memory(tile: Tile, arch: Arch, stages: int, smem_bytes: int) -> None:
    assert resources.num_stages(tile, "bfloat16", "bfloat16", arch) == stages
    assert resources.smem_bytes(tile, "bfloat16", "bfloat16", arch) == smem_bytes <= 232448


def test_tmem_columns() -> None:
    assert resources.tmem_cols(Tile(128, 256)) == 512
    assert resources.tmem_cols(Tile(128, 192)) == 512  # 2 * 192 = 384, rounded up to a power of two
    assert resources.tmem_cols(Tile(128, 128)) == 256
    assert resources.tmem_cols(Tile(256, 256, cta_group=2, cluster_m=2)) == 512
    assert resources.tmem_cols(PAIR_128) == 128  # 64 columns an accumulator: the other 64 lie in lanes 64..127
    assert resources.tmem_cols(Tile(64, 128)) == 256
    assert resources.tmem_cols(Tile(128, 16)) == 32
    assert (resources.tmem_cols(DUAL), resources.acc_stages(DUAL)) == (
        512,
        1,
    )  # two MMA tiles of 256 columns, no second turn
    assert resources.acc_stages(Tile(256, 128, cta_group=2, cluster_m=2, num_accs=2)) == 2


@pytest.mark.parametrize(
    "tile, target, groups, rows, cols",
    [
        (Tile(128, 256), "sm_100f", 1, 128, 32),
        (Tile(64, 256), "sm_100f", 1, 64, 32),
        (PAIR_128, "sm_100f", 2, 64, 32),
        (Tile(128, 32, cta_group=2, cluster_m=2), "sm_100f", 2, 64, 16),  # halves of 16 columns
        (Tile(128, 256), "sm_90a", 2, 64, 32),
        (Tile(64, 256), "sm_90a", 1, 64, 32),
        (Tile(128, 144), "sm_90a", 2, 64, 16),
        (Tile(192, 192), "sm_90a", 3, 64, 32),
        (Tile(256, 192), "sm_90a", 2, 64, 32),
    ],
    ids=str,
)
def test_store_boxes(tile: Tile, target: str, groups: int, rows: int, cols: int) -> None:
    assert resources.store_groups(tile, target) == groups
    assert resources.store_rows(tile, target) == rows
    assert resources.warp_rows(tile, target) == (32 if (target, rows * groups) == ("sm_100f", 128) else 16)
    assert resources.store_cols(tile, "bfloat16", target) == cols
    assert resources.store_box(tile, "bfloat16", "n", target, "threads") == (cols, rows)
    wide = 2 * cols if target == "sm_90a" and cols == 32 else cols
    assert resources.store_box(tile, "bfloat16", "n", target) == (wide, rows)
    assert resources.store_box(tile, "bfloat16", "m", target) == (64, cols)  # 128 bytes of rows
    assert resources.store_cols(tile, "float32", target) == 16


@pytest.mark.parametrize(
    "tile, target, out_dtype, box",
    [
        (Tile(128, 256), "sm_90a", "bfloat16", (8, 256)),  # 4 KiB a warp
        (Tile(128, 128, pingpong=True), "sm_90a", "bfloat16", (16, 128)),
        (Tile(128, 256), "sm_90a", "float32", (8, 128)),  # 512 bytes
        (Tile(128, 256), "sm_90a", "float8_e4m3fn", (16, 256)),
        (Tile(128, 192), "sm_90a", "bfloat16", (16, 64)),  # 128 bytes, the power of two in 384
        (Tile(128, 16), "sm_90a", "bfloat16", (16, 16)),
        (Tile(128, 128, cluster_k=4), "sm_90a", "bfloat16", (16, 16)),  # a store box
        (Tile(128, 256), "sm_100f", "bfloat16", (16, 128)),  # 128 accumulators a thread
        (Tile(64, 256), "sm_100f", "bfloat16", (8, 256)),
        (PAIR_128, "sm_100f", "bfloat16", (16, 64)),  # half of the columns
        (Tile(128, 64, cluster_k=4), "sm_100f", "float32", (16, 16)),
    ],
    ids=str,
)
def test_segments_of_rows(tile: Tile, target: str, out_dtype: str, box: tuple[int, int]) -> None:
    assert resources.segments(tile, out_dtype, target) == box


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
        (DUAL, "a", "k", (64, 128)),  # one box for each MMA tile
        (Tile(128, 32), "b", "n", (32, 64)),  # a swizzle span of 64 bytes
        (Tile(128, 144), "b", "n", (16, 64)),
        (Tile(192, 96, cluster_n=2), "a", "m", (64, 32)),
        (Tile(192, 96, cluster_n=2), "a", "k", (64, 96)),
        (Tile(64, 96, cluster_m=4), "b", "k", (64, 24)),
        (Tile(64, 80, cluster_m=4), "b", "k", (64, 40)),  # by two of the four: 20 rows are no whole swizzle atoms
        (Tile(64, 112, cluster_m=8), "b", "k", (64, 56)),
        (Tile(64, 80, cluster_m=4), "b", "n", (16, 16)),
    ],
)
def test_load_boxes(tile: Tile, operand: str, major: str, box: tuple[int, int]) -> None:
    assert resources.load_box(tile, operand, major, "bfloat16") == box


def test_some_load_for_all() -> None:
    """As many as whole swizzle atoms of 8 rows are dealt to alike."""
    rows = {96: 4, 80: 2, 112: 2, 48: 2, 16: 2}
    assert {n: resources.loading_ctas(Tile(64, n, cluster_m=4), "b", "k") for n in rows} == rows
    assert resources.loading_ctas(Tile(64, 112, cluster_m=8), "b", "k") == 2
    assert resources.loading_ctas(Tile(64, 80, cluster_m=4), "b", "n") == 4  # each has 16 of 64 k
    assert resources.loading_ctas(Tile(64, 80), "b", "k") == 1
    tile, problem = Tile(128, 48, cluster_m=4), Problem(512, 512, 512, b_major="k")
    assert why_not(tile, problem, ARCHS["h200"]) is None
    sentence = "operand b requires a multiple of 8 rows for each of the 4 CTAs that share it on sm_100f, got 48"
    assert sentence in str(why_not(tile, problem, ARCHS["b200"]))
    of_a = "operand a requires a multiple of 8 rows for each CTA that loads a part of it, got 4"
    assert of_a in str(why_not(Tile(64, 64, cluster_n=16), problem, ARCHS["h200"]))


def test_load_boxes_of_other_dtypes() -> None:
    assert resources.load_box(Tile(128, 256, 128), "b", "n", "int8") == (128, 128)
    assert resources.load_box(Tile(128, 256, 32), "b", "n", "float32") == (32, 32)
    assert resources.load_box(Tile(192, 96, 128), "a", "m", "int8") == (64, 128)  # 192 is no multiple of 128
    assert resources.swizzle_atom_bytes("float32", "n", "sm_100f") == 32
    others = [("float32", "m", "sm_90a")]
    others += [(*x, "sm_100f") for x in (("float32", "k"), ("bfloat16", "n"), ("int8", "m"))]
    assert {resources.swizzle_atom_bytes(*x) for x in others} == {16}


def test_only_hoppers_m_major_tf32_and_bytes_come_from_registers() -> None:
    assert all(resources.reads_a_from_registers(x, "m", "sm_90a") for x in ("float32", "float8_e4m3fn", "uint8"))
    others = (("float32", "k", "sm_90a"), ("float32", "m", "sm_100f"), ("bfloat16", "m", "sm_90a"))
    assert not any(resources.reads_a_from_registers(*x) for x in others)


@pytest.mark.parametrize("tile", [Tile(128, 256), DUAL, SPLIT, Tile(64, 256, pingpong=True)], ids=str)
def test_a_tile_is_its_text(tile: Tile) -> None:
    assert Tile.from_str(str(tile)) == tile


@pytest.mark.parametrize(
    ("tile", "out", "store", "target", "defers"),
    [
        (Tile(128, 256), "bfloat16", "tma", "sm_90a", True),  # registers: 128 sums, 64 of two results each
        (Tile(128, 256), "float32", "tma", "sm_90a", False),  # 128 and 128
        (Tile(128, 256), "float8_e4m3fn", "tma", "sm_90a", True),  # 128 and 32
        (Tile(128, 192), "float32", "tma", "sm_90a", True),  # 96 and 96
        (Tile(128, 208), "float32", "tma", "sm_90a", False),  # 104 and 104
        (Tile(256, 128), "bfloat16", "tma", "sm_90a", True),
        (Tile(64, 256), "bfloat16", "tma", "sm_90a", True),
        (Tile(64, 256), "int32", "tma", "sm_90a", False),
        (Tile(192, 144), "bfloat16", "tma", "sm_90a", True),  # 72 and 36 of a third warpgroup's fewer registers
        (Tile(192, 160), "bfloat16", "tma", "sm_90a", False),  # 80 and 40
        (Tile(192, 96), "float32", "tma", "sm_90a", True),
        (Tile(256, 192), "bfloat16", "tma", "sm_90a", False),  # 192 and 96
        (Tile(128, 256, stream_k=True), "bfloat16", "tma", "sm_90a", True),
        (Tile(128, 128), "bfloat16", "threads", "sm_90a", False),
        (Tile(128, 128, pingpong=True), "bfloat16", "tma", "sm_90a", False),
        (Tile(128, 128, cluster_k=2), "bfloat16", "tma", "sm_90a", False),
        (Tile(128, 128), "bfloat16", "tma", "sm_100f", False),
    ],
)
def test_who_defers_its_store(tile: Tile, out: str, store: str, target: str, defers: bool) -> None:
    assert resources.defers_store(tile, out, store, target) == defers


@pytest.mark.parametrize(
    ("tile", "out", "defers"),
    [
        (Tile(128, 256), "bfloat16", True),  # 128 sums, 64 of two results each; a slab's 16 of A find room
        (Tile(256, 128), "bfloat16", False),  # and 16 of another slab
        (Tile(256, 128), "float8_e4m3fn", True),  # 128, 32 and 16
        (Tile(256, 64), "float32", True),  # 64, 64 and 16
        (Tile(128, 128, promoted=True), "float32", True),
    ],
)
def test_who_defers_its_store_with_an_a_in_registers(tile: Tile, out: str, defers: bool) -> None:
    assert resources.defers_store(tile, out, "tma", "sm_90a", a_in_registers=True) == defers
