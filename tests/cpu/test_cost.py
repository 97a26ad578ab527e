"""The cost model: facts it must reproduce, and what must follow from each part of it."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.geometry import fill_bytes, inside, k_steps, num_waves, readers
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.cost import Schedule, cost, memory_bytes, peak_tflops, roofline_us, shipped_schedule
from jax_bwgemm.planner.cycles import (
    box_cycles,
    epilogue_cycles,
    exchange_cycles,
    fill_cycles,
    fill_rate,
    gate_cycles,
    load_latency,
    load_rows,
    loaded_clock,
    mma_cycles,
    mma_interval,
)

H200, B200 = ARCHS["h200"], ARCHS["b200"]
L2_READ = H200.constants.l2_read_bytes_per_clk
PROBLEM = Problem(4096, 4096, 4096)
LARGE = Problem(8192, 8192, 8192)
HOPPER = Tile(128, 256, cluster_m=2)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
PINGPONG = Tile(128, 128, cluster_m=2, pingpong=True)
WIDE = Tile(128, 256)


def changed(problem=PROBLEM, **changes):
    return dataclasses.replace(problem, **changes)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_cost_grows_with_every_size(arch):
    for tile in (candidate.tile for candidate in candidates(PROBLEM, arch)):
        base = cost(tile, PROBLEM, arch)
        assert 0 < base.utilisation <= 1
        for bigger in (changed(m=8192), changed(n=8192), changed(k=8192), changed(batch=2, a_batch=2, b_batch=2)):
            assert cost(tile, bigger, arch).us > base.us
        slower = dataclasses.replace(arch, clock_ghz=arch.clock_ghz / 2, memory_tb_per_s=arch.memory_tb_per_s / 2)
        assert cost(tile, PROBLEM, slower).us > base.us
        assert num_waves(tile, changed(m=8192), arch) >= num_waves(tile, PROBLEM, arch)


def test_hopper_facts():
    assert mma_cycles(HOPPER, 2, H200) == 1024  # 2*128*256*64 FLOP at 4096 a clock
    assert fill_rate(HOPPER, 2, H200) == pytest.approx(32)
    assert fill_rate(WIDE, 2, H200) == pytest.approx(48)
    assert fill_cycles(WIDE, Problem(8192, 8192, 8192), H200) == pytest.approx(48 * 1024 / L2_READ)
    alone = Problem(128, 256, 8192)  # one CTA, which cannot take what all of them get together
    rows = (128 + 4 * 64) * H200.constants.row_cycles  # of A, and of 4 boxes of B
    read = 48 * 1024 / H200.constants.l2_alone_bytes_per_clk
    assert fill_cycles(WIDE, alone, H200) == pytest.approx(max(rows, read))
    torn = Problem(8192, 8192, 8200)  # rows of a start 16 bytes further each; rows of b do not
    parts = 16 * 1024 * H200.constants.torn_lines + 32 * 1024
    assert fill_cycles(WIDE, torn, H200) == pytest.approx(parts / L2_READ)
    assert mma_interval(Tile(64, 64), H200) == 32  # the knee: below, shared memory bounds a wgmma
    assert mma_interval(Tile(64, 32), H200) == 24 > 32 / 2
    assert mma_interval(Tile(128, 256), H200) == 2 * mma_interval(Tile(64, 256), H200)


def test_rows_of_loads() -> None:
    """One of A for each of 64 rows of 128 bytes, also of those that do not exist; one of an n-major B for each k and
    each swizzle span of columns; a multicast divides them; one that is read and starts off a line counts for more."""
    few = Problem(4096, 8, 4096)
    assert load_rows(Tile(64, 64), few, "a", 1.5) == 64 and load_rows(Tile(64, 64), few, "b", 1.5) == 64 * 1.5
    assert load_rows(Tile(128, 96), LARGE, "b", 1.5) == 3 * 64  # spans of 64 bytes
    assert load_rows(Tile(128, 96), dataclasses.replace(LARGE, b_major="k"), "b", 1.5) == 96
    assert load_rows(Tile(128, 96, cluster_m=2), LARGE, "b", 1.5) == 3 * 64 / 2
    assert load_rows(Tile(64, 80, cluster_m=4), dataclasses.replace(LARGE, b_major="k"), "b", 1.5) == 40  # by two
    assert load_rows(Tile(64, 64), Problem(8, 4096, 4104), "a", 1.5) == 56 + 8 * 1.5
    wide, c = Tile(64, 64), H200.constants
    rows = c.row_cycles * (64 + 64 * c.torn_lines)
    assert fill_cycles(wide, Problem(64, 8, 4096), H200) == pytest.approx(rows)
    assert fill_cycles(Tile(128, 256), Problem(64, 8, 4096), B200) < 600  # none is known there


def test_boxes_of_a_store() -> None:
    """Of 64x32 in 16 bits, of 64x16 where 32 columns do not divide the tile's; in a split every CTA stores some."""
    one = H200.constants.box_cycles
    assert box_cycles(Tile(128, 128), LARGE, H200) == 4 * one and box_cycles(Tile(128, 80), LARGE, H200) == 5 * one
    assert box_cycles(Tile(256, 64), LARGE, H200) == 4 * one  # two slabs a warpgroup
    assert box_cycles(Tile(128, 128, cluster_k=4), LARGE, H200) == 2 * one
    assert box_cycles(Tile(128, 128), LARGE, B200) == 0


@pytest.mark.parametrize("in_dtype, in_bytes, k", [("bfloat16", 2, 64), ("float32", 4, 32), ("float8_e4m3fn", 1, 128)])
def test_full_rate_is_the_archs_rate_for_every_dtype(in_dtype, in_bytes, k):
    """An interval covers 32 bytes of k whatever they hold: FLOP a clock then follow the record."""
    for arch, tile in (
        (B200, dataclasses.replace(PAIR, k_tile=k)),
        (B200, Tile(128, 256, k)),
        (H200, Tile(128, 256, k)),
    ):
        flops = 2 * tile.mma_m // tile.cta_group * tile.mma_n * k
        assert flops / mma_cycles(tile, in_bytes, arch) == arch.flops_per_clk(in_dtype)


def test_narrow_and_half_height_mmas_are_below_the_full_rate():
    for tile in (Tile(64, 256), Tile(128, 64), dataclasses.replace(PAIR, mma_n=32)):
        flops = 2 * tile.mma_m // tile.cta_group * tile.mma_n * 64
        assert flops / mma_cycles(tile, 2, B200) < B200.bf16_flops_per_clk


def test_two_accumulators_load_b_once_for_two_mmas():
    doubled = dataclasses.replace(PAIR, num_accs=2)
    assert mma_cycles(doubled, 2, B200) == 2 * mma_cycles(PAIR, 2, B200)
    assert fill_bytes(doubled, 2) == 1.5 * fill_bytes(PAIR, 2)
    assert cost(doubled, LARGE, B200).l2_bytes == pytest.approx(0.75 * cost(PAIR, LARGE, B200).l2_bytes)


def test_multicast_counts_a_shared_load_once():
    assert fill_bytes(dataclasses.replace(PAIR, cluster_m=4), 2) == 0.75 * fill_bytes(PAIR, 2)
    assert fill_bytes(dataclasses.replace(PAIR, cluster_m=4, cluster_n=4), 2) == 0.375 * fill_bytes(PAIR, 2)
    assert fill_bytes(HOPPER, 2) == pytest.approx(32 / 48 * fill_bytes(WIDE, 2))


@pytest.mark.parametrize("sizes", [{"cluster_m": 4}, {"cluster_m": 2, "cluster_n": 2}])
def test_clusters_of_four_leave_sms_idle(sizes):
    """An H200 holds 30 of them, 120 CTAs, and these share what all 132 SMs would get out of the L2 cache. What a CTA
    loads: with B from four, 128 + 256 / 4 rows, else half of both."""
    four = dataclasses.replace(WIDE, **sizes)
    tile_rows, tile_cols = four.cluster_m * 128, four.cluster_n * 256
    assert num_waves(four, Problem(30 * tile_rows, tile_cols, 4096), H200) == 1
    assert num_waves(four, Problem(31 * tile_rows, tile_cols, 4096), H200) == 2
    rows = 192
    assert fill_cycles(four, LARGE, H200) == pytest.approx(rows * 128 / (L2_READ * 132 / 120))
    fewer = dataclasses.replace(H200, num_sms=114)  # than those of the device that was asked how many clusters it holds
    assert [fewer.max_clusters(ctas) for ctas in (1, 2, 4)] == [114, 57, 28]
    assert B200.max_clusters(4) == 148 // 4


def test_latency_is_the_published_line():
    assert load_latency(Tile(128, 256), 2, B200) == pytest.approx(900 + 1800 * (32768 - 512) / (65536 - 512))
    assert load_latency(PAIR, 2, B200) < load_latency(Tile(128, 256), 2, B200)


def test_too_few_stages_show_the_latency():
    base = shipped_schedule(WIDE, LARGE, B200)
    times = [cost(WIDE, LARGE, B200, dataclasses.replace(base, stages=stages)) for stages in (1, 2, 3, 4, 8)]
    assert [c.us for c in times] == sorted((c.us for c in times), reverse=True)
    assert times[0].us > 2 * times[-1].us
    assert (times[0].bound, times[-1].bound) == ("latency", "tensor cores")


@pytest.mark.parametrize(
    "worse",
    [
        {"acc_stages": 1},
        {"has_load_warp": False},
        {"is_grouped": False},
        {"acc_stages": 1, "loads_run_ahead": False},
        {"acc_stages": 1, "loads_run_ahead": False, "is_persistent": False},
    ],
)
def test_each_step_of_the_schedule_is_worth_something(worse):
    base = shipped_schedule(PAIR, LARGE, B200)
    assert cost(PAIR, LARGE, B200, dataclasses.replace(base, **worse)).us > cost(PAIR, LARGE, B200, base).us


def test_shipped_schedule():
    assert shipped_schedule(PAIR, LARGE, B200) == Schedule(6, 2)
    assert shipped_schedule(dataclasses.replace(PAIR, num_accs=2), LARGE, B200).acc_stages == 1
    assert shipped_schedule(HOPPER, changed(n=4095), H200).store == "threads"


def test_epilogue_shows_unless_something_runs_beside_it():
    """k of one step: the epilogue is all there is. A pingpong hides half of what a cooperative tile shows."""
    short = Problem(8192, 8192, 1024)
    cooperative, pingpong = Tile(128, 128), Tile(128, 128, pingpong=True)
    assert cost(pingpong, short, H200).us < cost(cooperative, short, H200).us
    assert cost(pingpong, Problem(128, 128, 1024), H200).us >= cost(cooperative, Problem(128, 128, 1024), H200).us


def test_a_residual_is_another_result_to_move():
    """A Hopper tile whose store buffers hold all of it shows no more than the rounding; what is behind it, a load."""
    added = chain(has_residual=True)
    assert changed(LARGE, epilogue=added).min_bytes == LARGE.min_bytes + 2 * LARGE.m * LARGE.n
    for tile, arch in ((HOPPER, H200), (PAIR, B200)):
        assert cost(tile, changed(LARGE, epilogue=added), arch).us > cost(tile, LARGE, arch).us
    for out, leaves_later in (("bfloat16", True), ("float32", False)):
        schedule = shipped_schedule(HOPPER, changed(LARGE, out_dtype=out, epilogue=added), H200)
        assert (schedule.stages, schedule.defers_store) == (3, leaves_later)


def test_a_gate_shows_where_tensor_cores_wait_for_it():
    """One or two special functions for each of 32768 values, at 16 a clock; a ping-pong and TMEM hide most of them."""
    gate = chain(activation="gelu")
    bf16, f16 = (changed(out_dtype=dtype, epilogue=gate) for dtype in ("bfloat16", "float16"))
    assert gate_cycles(HOPPER, changed(epilogue=chain(activation="relu")), H200) == 0
    assert (gate_cycles(HOPPER, bf16, H200), gate_cycles(HOPPER, f16, H200)) == (2048, 4096)
    assert gate_cycles(Tile(128, 128, cluster_k=4), bf16, H200) == 256
    short = changed(Problem(8192, 8192, 1024), out_dtype="float16")
    shown = [
        cost(tile, changed(short, epilogue=gate), arch).us - cost(tile, short, arch).us
        for tile, arch in ((HOPPER, H200), (PINGPONG, H200), (PAIR, B200))
    ]
    assert shown[0] > 5 * max(shown[1:]) and min(shown) > 0


def test_split_k_divides_the_steps_and_pays_for_the_exchange():
    split = Tile(128, 128, cluster_k=4)
    assert k_steps(split, Problem(128, 128, 64 * 10)) == 3  # ceil(10 / 4)
    assert exchange_cycles(Tile(128, 128), B200) == 0 < exchange_cycles(Tile(128, 128, cluster_k=2), B200)
    assert exchange_cycles(split, B200) > exchange_cycles(Tile(128, 128, cluster_k=2), B200)
    assert epilogue_cycles(split, 2, B200) == epilogue_cycles(Tile(128, 128), 2, B200) / 4
    assert epilogue_cycles(split, 2, B200, "threads") == epilogue_cycles(Tile(128, 128), 2, B200, "threads") / 4
    deep = Problem(512, 512, 16384)
    assert cost(split, deep, B200).us < cost(Tile(128, 128), deep, B200).us
    assert cost(split, LARGE, B200).us > cost(Tile(128, 128), LARGE, B200).us
    assert num_waves(split, Problem(128 * 37, 128, 4096), B200) == 1
    assert num_waves(split, Problem(128 * 38, 128, 4096), B200) == 2


def test_padding_is_a_pass_over_the_operand():
    aligned, odd = cost(HOPPER, PROBLEM, H200), cost(HOPPER, changed(k=4095), H200)  # a is k-major, b is not
    assert aligned.padding_us == 0
    assert odd.padding_us == pytest.approx(1.4 + 2 * 4096 * (4095 + 4096) / 4.3e6)
    assert cost(HOPPER, changed(k=4095, n=4095), H200).padding_us == pytest.approx(2 * odd.padding_us, rel=1e-3)
    assert cost(HOPPER, changed(k=4095, a_major="m"), H200).padding_us == 0


def test_stores_by_threads_cost_more():
    """Where the tensor cores do not hide them; out of 16-byte steps, by one element."""
    tile = Tile(128, 256)
    with_tma, by_threads = (cost(tile, Problem(4096, n, 64, b_major="k"), H200) for n in (4096, 4095))
    assert by_threads.us > with_tma.us and by_threads.padding_us == 0


def test_clock_under_load():
    assert loaded_clock(WIDE, B200, 0.8) == pytest.approx(1.90 - 0.61 * 0.8)
    assert loaded_clock(PAIR, B200, 0.8) == pytest.approx(1.96 - 0.61 * 0.8)
    assert loaded_clock(HOPPER, H200, 0.5) == H200.clock_ghz
    assert loaded_clock(HOPPER, H200, 0.9) == pytest.approx(2.75 - 1.17 * 0.9)
    busy, idle = cost(PAIR, LARGE, B200), cost(PAIR, Problem(256, 256, 256), B200)
    assert 1.3 < busy.clock_ghz < 1.6 < idle.clock_ghz <= B200.clock_ghz


def test_clock_is_a_fixed_point():
    c = cost(PAIR, LARGE, B200)
    busy = LARGE.flops / ((c.us - 2.4) * 1e3 * c.clock_ghz * B200.num_sms * B200.bf16_flops_per_clk)
    assert c.clock_ghz == pytest.approx(loaded_clock(PAIR, B200, busy), rel=1e-3)


def test_memory():
    assert cost(Tile(64, 256), Problem(64, 28672, 4096), H200).bound == "memory"
    assert memory_bytes(HOPPER, Problem(1024, 1024, 1024), H200) == Problem(1024, 1024, 1024).min_bytes
    grouped, row_by_row = (memory_bytes(PAIR, LARGE, B200, is_grouped) for is_grouped in (True, False))
    assert LARGE.min_bytes < grouped < row_by_row
    shared = Problem(8192, 256, 8192, 4, b_batch=4)  # a is read for each of the 4, and does not stay
    assert memory_bytes(PAIR, shared, B200) == shared.min_bytes + 3 * 2 * 8192 * 8192
    own = dataclasses.replace(shared, a_batch=4)
    assert memory_bytes(PAIR, own, B200) == own.min_bytes


def test_roofline():
    assert roofline_us(LARGE, H200) == pytest.approx(1027.07, rel=1e-4)
    assert roofline_us(Problem(8, 28672, 4096), H200) == pytest.approx(Problem(8, 28672, 4096).min_bytes / 4.3e6)
    fp8 = changed(LARGE, a_dtype="float8_e4m3fn", b_dtype="float8_e5m2")
    assert peak_tflops(fp8, B200) == 2 * peak_tflops(LARGE, B200)


def test_one_byte_operands_take_half_the_time():
    deep = changed(LARGE, k=8 * LARGE.k)  # so that the epilogue, which is the same, does not count
    fp8 = changed(deep, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn", b_major="k")
    tile = dataclasses.replace(HOPPER, k_tile=128)
    assert cost(tile, fp8, H200).us == pytest.approx(cost(HOPPER, deep, H200).us / 2, rel=0.03)


def test_an_edge_is_not_read_and_a_line_is_waited_for():
    """8 columns of a tile of 64 are read, of 128 rows all. 10,632 rows are 84 tiles, all of which want the same box of
    B at once: the L2 cache serves one after the other. With a pair that shares it, 42 do."""
    few = Problem(10632, 8, 640, b_major="k")
    tile, pair = Tile(128, 64), Tile(128, 64, cluster_m=2)
    assert inside(tile, few) == (pytest.approx(10632 / (84 * 128)), 8 / 64)
    assert readers(tile, few, H200) == (1, 84) and readers(pair, few, H200) == (1, 42)
    line, row = H200.constants.line_cycles, H200.constants.row_cycles
    assert fill_cycles(tile, few, H200) == pytest.approx(max(84 * line, (128 + 64) * row, _read(tile, few)))
    assert fill_cycles(pair, few, H200) == pytest.approx(max(42 * line, (128 + 32) * row, _read(pair, few)))
    assert fill_cycles(tile, few, H200) > fill_cycles(pair, few, H200)


def _read(tile, problem):
    """Bytes of the parts that are inside, at the rate that each of 84 CTAs has."""
    rows, cols = inside(tile, problem)
    rate = min(H200.constants.l2_alone_bytes_per_clk, L2_READ * 132 / 84)
    return (rows * 128 + cols * 64 / tile.cluster_m) * 128 / rate
