"""Tiles that give up a part of TMA: direct ones, and those whose warps store rows that TMA could."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.padding import ends_within_sectors, store_of
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.resources import (
    direct_ctas,
    direct_smem_bytes,
    direct_stage_bytes,
    direct_stages,
    num_stages,
    smem_bytes,
    store_box,
)
from jax_bwgemm.facts.symbols import Symbol, Symbols
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.planner.candidates import candidates, is_small
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.cycles import store_rate
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime.launch import request
from tests.cpu.fake_artifacts import fake_entry

H200, B200 = by_name("h200"), by_name("b200")
SMALL = Tile(64, 64, direct=True)
ROWS = Tile(128, 256, cluster_m=2, by_rows=True)


@pytest.mark.parametrize(
    ("tile", "size"),
    [
        (Tile(64, 16, direct=True), 8192 + 2048 + 16 * (64 + 64)),  # b n-major: a line for each k
        (SMALL, 2 * 8192 + 16 * (64 + 64)),
        (Tile(128, 64, direct=True), 16384 + 8192 + 16 * (128 + 64)),
        (Tile(64, 80, direct=True), 8192 + 10240 + 16 * (64 + 5 * 64)),  # of 80 columns five lines of 16
        (Tile(192, 32, direct=True), 24576 + 4096 + 16 * (192 + 64)),
    ],
    ids=str,
)
def test_a_stage_is_whole_swizzle_atoms(tile: Tile, size: int) -> None:
    """The tile's operands, and 16 bytes for each line."""
    assert direct_stage_bytes(tile, "bfloat16") == size and size % 1024 == 0


@pytest.mark.parametrize(
    ("tile", "stages", "size"),
    [
        (SMALL, 8, 8 * 18432),
        (Tile(128, 128, direct=True), 6, 6 * 36864),
        (Tile(64, 16, cluster_k=8, direct=True), 4, 4 * 12288 + 1024),  # four CTAs of an SM, with barriers
        (Tile(64, 64, cluster_k=4, direct=True), 3, 3 * 18432 + 1024),
    ],
    ids=str,
)
def test_stages_of_a_kernel(tile: Tile, stages: int, size: int) -> None:
    assert num_stages(tile, "bfloat16", "bfloat16", H200) == stages
    assert smem_bytes(tile, "bfloat16", "bfloat16", H200) == size
    assert tile.cluster_k == 1 or 4 * (size + 1024) <= 233472  # of an SM; the system has 1 KiB of each CTA


@pytest.mark.parametrize(
    ("tile", "c_major", "ctas"),
    [
        (Tile(64, 16, direct=True), "n", 4),  # 128 threads with 128 registers each
        (SMALL, "n", 4),
        (SMALL, "m", 3),  # 168
        (Tile(64, 64, cluster_k=4, direct=True), "m", 4),
        (Tile(64, 128, direct=True), "n", 3),
        (Tile(64, 256, direct=True), "n", 2),  # 255
        (Tile(128, 128, direct=True), "n", 2),  # 256 threads with 128
        (Tile(192, 32, direct=True), "m", 1),
        (Tile(256, 16, direct=True), "m", 2),  # two warpgroups, of two slabs each
    ],
    ids=str,
)
def test_ctas_that_share_the_registers_of_an_sm(tile: Tile, c_major: str, ctas: int) -> None:
    assert direct_ctas(tile, c_major) == ctas
    assert ctas * tile.num_consumer_warpgroups <= 4


@pytest.mark.parametrize(
    ("problem", "is_worth"),
    [
        (Problem(9776, 6832, 8), True),  # of any size, if sums are short
        (Problem(9776, 6832, 128), True),
        (Problem(9776, 6832, 136), False),
        (Problem(9776, 6832, 8, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn"), False),
    ],
    ids=str,
)
def test_short_sums_are_worth_a_look(problem: Problem, is_worth: bool) -> None:
    assert is_small(problem, H200) == is_worth


@pytest.mark.parametrize(
    ("k", "stages"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 4), (256, 4), (257, 8), (4096, 8), (None, 8)]
)
def test_a_launch_has_room_for_the_stages_of_its_sum(k: int | None, stages: int) -> None:
    """Powers of two, so that a kernel is loaded for few sizes; all where CTAs divide k."""
    assert direct_stages(SMALL, k, 8) == stages
    assert direct_stages(dataclasses.replace(SMALL, cluster_k=4), k, 3) == 3


def test_what_is_stored_has_room() -> None:
    """Eight warps with 16 rows of 64 float32 each, of a launch of one stage."""
    tile = Tile(128, 64, direct=True)
    sizes = [direct_smem_bytes(tile, "bfloat16", out, "sm_90a", 1) for out in ("bfloat16", "float32")]
    assert sizes == [27 * 1024, 32 * 1024]


@pytest.mark.parametrize(("k", "stages"), [(40, 1), (100, 2), (2000, 8)])
def test_what_a_launch_says(k: int, stages: int) -> None:
    found = plan(Problem(100, 90, k), H200, SMALL)
    made = request(found, fake_entry(found.variant))
    assert found.stages == stages
    assert made.attributes["smem_bytes"] == stages * direct_stage_bytes(SMALL, "bfloat16")


def test_a_launch_that_divides_k() -> None:
    """Has all stages, and barriers behind them."""
    tile = Tile(64, 16, cluster_k=8, direct=True)
    found = plan(Problem(100, 9, 70), H200, tile)
    entry = fake_entry(found.variant)
    attributes = request(found, entry).attributes
    assert attributes["smem_bytes"] == entry.smem_bytes == 4 * 12288 + 1024
    assert (attributes["tile_grid"], attributes["cluster_k"]) == (2, 8)


@pytest.mark.parametrize(
    ("problem", "arch", "plain", "swapped"),
    [
        (Problem(4786, 8, 5967), H200, True, False),
        (Problem(16, 50257, 768), H200, True, True),
        (Problem(16, 50256, 768), H200, False, False),  # TMA steps over all rows
        (Problem(300, 50257, 768), H200, False, False),  # more than one pass over the larger operand
        (Problem(16, 333, 77, a_dtype="float32", b_dtype="float32"), H200, False, False),
        (Problem(16, 50257, 768), B200, False, False),
    ],
)
def test_where_direct_tiles_are_considered(problem: Problem, arch, plain: bool, swapped: bool) -> None:
    found = {own.swapped for own in candidates(problem, arch) if own.tile.direct}
    assert found == {flips for flips, is_there in ((False, plain), (True, swapped)) if is_there}


def test_a_sum_of_any_length_has_all_stages() -> None:
    found = plan(Problem(100, 90, 40), H200, SMALL, symbols=Symbols(k=Symbol("k", 8, 64, 8)))
    assert found.stages == 8
    assert plan(Problem(100, 90, 40), H200, SMALL, symbols=Symbols(m=Symbol("m", 1, 640))).stages == 1


def test_other_tiles_have_what_their_kernels_have() -> None:
    found = plan(Problem(1000, 1000, 40), H200, Tile(128, 128))
    entry = fake_entry(found.variant)
    assert found.stages == 0 and request(found, entry).attributes["smem_bytes"] == entry.smem_bytes


def test_several_ctas_of_a_short_sum_share_an_sm() -> None:
    """400 tiles on 132 SMs: of 64 terms four at a time, of 400 one after the other."""
    short, long = (cost(SMALL, Problem(1280, 1280, k), H200).us for k in (64, 400))
    one = cost(SMALL, Problem(640, 640, 64), H200).us
    assert short < 1.5 * one < long


@pytest.mark.parametrize(
    ("n", "out", "ends"),
    [(16, "bfloat16", False), (24, "bfloat16", True), (24, "float32", False), (20, "float32", True)],
)
def test_sectors_have_32_bytes(n: int, out: str, ends: bool) -> None:
    assert ends_within_sectors(Problem(8, n, 8, out_dtype=out)) == ends
    assert ends_within_sectors(Problem(8, n, 8, out_dtype=out).transposed) == ends


def test_who_stores() -> None:
    plain, odd = Problem(512, 520, 64), Problem(512, 521, 64)
    assert [store_of(Tile(128, 128), p) for p in (plain, odd)] == ["tma", "threads"]
    assert {store_of(tile, p) for tile in (SMALL, ROWS) for p in (plain, odd)} == {"threads"}


def test_a_tile_by_rows_has_the_kernel_of_rows_that_tma_cannot_step_over() -> None:
    assert str(ROWS) == "128x256x64_cta1_cluster2x1_rows" and Tile.from_str(str(ROWS)) == ROWS
    by_rows = variant_for(Problem(512, 520, 64), ROWS, "sm_90a")
    assert by_rows == variant_for(Problem(512, 521, 64), dataclasses.replace(ROWS, by_rows=False), "sm_90a")
    assert by_rows.store == "threads"


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (Problem(512, 520, 64).transposed, ROWS),
        (Problem(512, 520, 64, epilogue=chain("identity", has_residual=True)), ROWS),
        (Problem(512, 520, 64), dataclasses.replace(SMALL, by_rows=True)),
    ],
)
def test_rows_are_those_of_one_result_alone(problem: Problem, tile: Tile) -> None:
    assert (why_not(tile, problem, H200) or "").startswith("`by_rows` requires rows of one n-major result")
    assert why_not(ROWS, Problem(512, 520, 64), H200) is None


@pytest.mark.parametrize(
    ("problem", "arch", "is_considered"),
    [
        (Problem(512, 520, 64), H200, True),
        (Problem(512, 528, 64), H200, False),  # whole sectors
        (Problem(512, 521, 64), H200, False),  # every tile stores so
        (Problem(512, 520, 64, epilogue=chain("relu")), H200, False),  # no such kernel ships
        (Problem(512, 520, 64), B200, False),  # not measured
    ],
)
def test_where_rows_are_considered(problem: Problem, arch, is_considered: bool) -> None:
    assert any(own.tile.by_rows for own in candidates(problem, arch)) == is_considered


def test_what_tma_writes_in_part_costs_more() -> None:
    """Rows of two boxes, 128 bytes, count as 148, and those of one, 64 bytes, as 84."""
    whole, torn = Problem(4096, 528, 64), Problem(4096, 520, 64)
    for tile, row in ((Tile(128, 256, cluster_m=2), 128), (Tile(128, 96), 64)):
        stored = store_box(tile, "bfloat16", "n", "sm_90a")[0]
        assert 2 * stored == row
        assert store_rate(tile, whole, H200) == pytest.approx(store_rate(tile, torn, H200) * (row + 20) / row)
