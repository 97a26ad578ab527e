"""What the planner prefers."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import B200, BEST_H200, FP8, H200, INT8, LARGE, PAIR, PROBLEM, TF32, changed

from jax_bwgemm.facts.arch import ARCHS, Arch, by_name, detect
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.shipped import NARROW_TILES, SWAPPED_TILES
from jax_bwgemm.facts.tile import FEW, Tile, k_tile
from jax_bwgemm.planner.candidates import SWAPPED_ROWS, candidates
from jax_bwgemm.planner.choice import SURE_CLUSTER_CTAS
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.measured import Record, Time, key
from jax_bwgemm.planner.order import L2_HINTS, rounds
from jax_bwgemm.planner.plan import plan


def batched(batch, *sizes):
    return Problem(*sizes, batch, a_batch=batch, b_batch=batch)


PROBLEMS = {
    "sq16384": Problem(16384, 16384, 16384),
    "sq8192": LARGE,
    "sq4096": PROBLEM,
    "sq2048": Problem(2048, 2048, 2048),
    "sq1024": Problem(1024, 1024, 1024),
    "short_k": Problem(8192, 8192, 512),
    "mla_down": Problem(4096, 2112, 7168),
    "logits": Problem(4096, 128256, 4096),
    "gemv": Problem(1, 6144, 4096),
    "decode8": Problem(8, 28672, 4096),
    "decode16": Problem(16, 14336, 4096),
    "decode32": Problem(32, 1024, 7168),
    "decode64_up": Problem(64, 28672, 4096),
    "decode64_down": Problem(64, 4096, 14336),
    "decode128": Problem(128, 28672, 8192),
    "m256": Problem(256, 6144, 4096),
    "m512": Problem(512, 4096, 14336),
    "wgrad_deep": Problem(1024, 1024, 65536),
    "s5000": Problem(5000, 5000, 5000),
    "odd_vocab": Problem(8192, 50257, 768),
    "unaligned": Problem(4095, 4097, 4093),
    "odd": Problem(4095, 4090, 4088),
    "bias_relu": Problem(4096, 8192, 1024, epilogue=chain(1.0, True, "relu")),
    "decode16_bias": Problem(16, 14336, 4096, epilogue=chain(1.0, True)),
    "mlp_up": Problem(8192, 14336, 4096),
    "mlp_down": Problem(8192, 4096, 14336),
    "qkv": Problem(4096, 6144, 4096),
    "gated": Problem(8192, 28672, 4096),
    "wgrad_f32": Problem(4096, 14336, 8192, a_major="m", out_dtype="float32"),
    "batch8": batched(8, 1024, 1024, 1024),
    "batch128": batched(128, 512, 512, 128),
    "tf32": changed(**TF32),
    "tf32_wgrad": changed(a_major="m", b_major="k", **TF32),
    "tf32_bias": changed(epilogue=chain(1.0, True), **TF32),
    "fp8": dataclasses.replace(LARGE, **FP8),
    "int8": dataclasses.replace(LARGE, **INT8),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("arch", (H200, B200), ids=lambda a: a.name)
def test_plan_is_legal_above_the_roofline_and_repeatable(name, arch):
    problem = PROBLEMS[name]
    chosen = plan(problem, arch)
    assert chosen == plan(problem, arch)
    assert chosen.tile is not None
    for candidate in chosen.candidates:
        assert candidate.problem == (problem.transposed if candidate.swapped else problem)
        assert candidate.tile.k_tile == k_tile(problem.a_dtype)
        reason = why_not(candidate.tile, candidate.problem, arch)
        assert (candidate.cost is None) == (reason is not None)
        if candidate.cost:
            assert candidate.cost.us >= roofline_us(problem, arch)
            assert 0 < candidate.cost.utilisation <= 1
    assert {chosen.a_l2, chosen.b_l2} <= set(L2_HINTS)
    assert chosen.problem == (problem.transposed if chosen.swapped else problem)


def test_large_squares_take_the_widest_reuse():
    assert plan(PROBLEM, H200, is_calibrated=False).tile == BEST_H200
    assert plan(LARGE, B200, among=candidates(LARGE, B200, {"blackwell": (Tile(128, 256), PAIR)})).tile == PAIR


@pytest.mark.parametrize("arch", (H200, B200), ids=lambda a: a.name)
def test_small_products_spread_over_the_sms(arch):
    small = plan(Problem(512, 512, 512), arch).tile
    assert small.mma_m * small.mma_n < 256 * 128 * small.cta_group


def test_only_few_rows_are_swapped():
    at_most = {m for m in (1, 8, FEW, FEW + 1, 128) if _offers_swapped(Problem(m, 4096, 4096))}
    assert at_most == {1, 8, FEW}
    assert _offers_swapped(Problem(8, 4096, 4096, epilogue=chain(1.0, True)))
    assert not _offers_swapped(Problem(8, 4097, 4096))
    assert _offers_swapped(Problem(8, 4097, 4096, b_major="k")), "threads store its rows"
    assert _offers_swapped(Problem(8, 4096, 4096, epilogue=chain(2.0, False, "relu")))


def test_few_columns_have_narrow_tiles_of_their_own():
    """As a LoRA's down-projection, of any rows and majors, and with a bias; what is read swapped has them swapped."""
    for arch, tile in ((H200, Tile(64, 16)), (B200, Tile(128, 16))):
        has = {n for n in (1, 16, FEW, FEW + 1) if _offers(Problem(8192, n, 4096), arch, tile)}
        assert has == {1, 16, FEW}
        biased = Problem(8192, 16, 4096, a_major="m", b_major="k", epilogue=chain(1.0, True))
        assert _offers(biased, arch, tile)
        names = [(c.tile, c.swapped) for c in candidates(Problem(8, 16, 4096), arch)]
        assert len(names) == len(set(names))
    fp8 = Problem(8192, 16, 4096, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn", b_major="n")
    assert not _offers(fp8, H200, Tile(64, 16, k_tile=128)) and {c.swapped for c in candidates(fp8, H200)} == {True}
    chosen = plan(Problem(8192, 16, 4096), H200).tile
    assert chosen is not None and chosen.mma_n < 64


def _offers(problem, arch, tile):
    return any(c.tile == tile and not c.swapped for c in candidates(problem, arch))


def _offers_swapped(problem):
    return any(c.swapped for c in candidates(problem, B200))


def test_swapped_plan_is_the_transposed_problem_for_the_kernel():
    problem = Problem(8, 28672, 4096)
    chosen = plan(problem, B200)
    assert chosen.swapped and (chosen.problem.m, chosen.problem.n) == (28672, 8)
    assert chosen.variant.c_major == "m" and (chosen.variant.a_major, chosen.variant.b_major) == ("m", "k")
    assert chosen.chosen.swapped and chosen.chosen.tile == chosen.tile


def test_swapped_falls_back_to_what_is_built():
    among = candidates(Problem(8, 28672, 4096), B200)
    missing = lambda variant: "no cubin" if variant.c_major == "m" else None  # noqa: E731
    chosen = plan(Problem(8, 28672, 4096), B200, missing=missing, among=among)
    assert chosen.tile is not None and not chosen.swapped
    assert any(c.swapped and c.reason == "no cubin" for c in chosen.candidates)


def test_large_clusters_win_no_ties():
    wide = dataclasses.replace(PAIR, cluster_m=4, cluster_n=2)
    among = candidates(LARGE, B200, {"blackwell": (PAIR, wide)})
    costs = {c.tile: c.cost for c in plan(LARGE, B200, among=among).candidates}
    assert costs[wide].l2_bytes < costs[PAIR].l2_bytes and costs[wide].us < 1.05 * costs[PAIR].us
    assert plan(LARGE, B200, among=among).tile == PAIR


def test_split_k_wins_where_few_tiles_meet_a_deep_k():
    deep, few = PROBLEMS["wgrad_deep"], Problem(512, 512, 65536)
    whole = [candidate for candidate in candidates(few, H200) if not candidate.tile.stream_k]
    assert plan(few, H200, among=whole).tile.cluster_k > 1
    assert plan(deep, H200).stream.clusters > plan(deep, H200).stream.tiles, "a stream divides k as well"
    assert plan(Problem(128, 512, 16384), B200).tile.cluster_k > 1
    assert plan(LARGE, B200).tile.cluster_k == plan(LARGE, H200).tile.cluster_k == 1


def test_users_tile():
    tile = Tile(128, 128)
    chosen = plan(Problem(8, 4096, 4096), H200, tile)
    assert chosen.tile == tile and not chosen.swapped
    assert [c.tile for c in chosen.candidates] == [tile]


def test_users_illegal_tile():
    with pytest.raises(
        ValueError, match=r"`tile` 256x256x64_cta2_cluster2x1 cannot compute .* on h200: `cta_group` requires 1"
    ):
        plan(PROBLEM, H200, PAIR)


def test_next_legal_candidate_with_a_cubin():
    chosen = plan(PROBLEM, H200, missing=lambda v: "no cubin" if v.tile == BEST_H200 else None)
    assert chosen.tile not in (None, BEST_H200)
    assert next(c for c in chosen.candidates if c.tile == BEST_H200).reason == "no cubin"


def test_of_tiles_that_read_as_much_the_wider_one_wins_where_power_counts():
    """192x192 in a pair reads 96 + 192 rows for as many FLOPs as 128x256 in one 128 + 128; that of a short product has
    its prediction alone."""
    problem, wide, square = Problem(12288, 12288, 12288), Tile(128, 256, cluster_m=2), Tile(192, 192, cluster_n=2)
    h100 = by_name("h100")  # by its prediction, the square one is sooner there
    among = [c for c in candidates(problem, h100) if c.tile in (wide, square) and not c.swapped]
    found = plan(problem, h100, among=among)
    costs = {c.tile: c.cost for c in found.candidates if c.cost}
    assert costs[wide].l2_bytes == costs[square].l2_bytes and costs[square].us < costs[wide].us
    assert found.tile == wide
    assert plan(problem, H200).tile in (wide, Tile(128, 256), Tile(128, 256, stream_k=True))


def test_ties_go_to_the_tile_that_reads_less():
    among = [c for c in candidates(LARGE, H200, swapped={}) if not c.tile.stream_k]
    among = [c for c in among if c.tile.cluster_ctas <= SURE_CLUSTER_CTAS]
    chosen = plan(LARGE, H200, among=among, is_calibrated=False)
    assert chosen.tile == BEST_H200
    costs = {c.tile: c.cost for c in chosen.candidates if c.cost}
    tied = [cost for cost in costs.values() if cost.us <= 1.03 * min(c.us for c in costs.values())]
    assert costs[BEST_H200].l2_bytes == min(cost.l2_bytes for cost in tied)


def test_no_candidate():
    assert plan(PROBLEM, H200, missing=lambda v: "no cubin").reason == "no cubin"
    neither = changed(a_major="m", **TF32)
    assert plan(neither, H200).reason.startswith("sm_90a requires a k-major b for float32")
    assert plan(neither, H200).variant is None


@pytest.mark.parametrize("majors, swapped", [("kn", {True}), ("mk", {False}), ("kk", {False}), ("mn", {False})])
def test_hopper_computes_an_n_major_tf32_product_as_its_transpose(majors, swapped):
    problem = changed(a_major=majors[0], b_major=majors[1], **TF32)
    assert {c.swapped for c in candidates(problem, H200)} == swapped
    assert (plan(problem, H200).tile is None) == (majors == "mn")
    few_rows = dataclasses.replace(problem, m=8)
    assert {c.swapped for c in candidates(few_rows, H200)} == swapped | {True}
    assert {c.swapped for c in candidates(problem, B200)} == {False}


def test_detect():
    assert detect("NVIDIA H200", "9.0", 132) == H200
    assert detect("NVIDIA H100 80GB HBM3", "9.0", 114) == dataclasses.replace(ARCHS["h100"], num_sms=114)
    assert detect("NVIDIA GB200", "10.0").name == "b200"
    assert detect("NVIDIA B300 SXM6 AC", "10.3").name == "b300"
    assert detect("NVIDIA B900", "10.7", 160) == dataclasses.replace(ARCHS["b300"], num_sms=160)  # a family's kernels
    for other in ("10.1", "11.0"):  # Jetson Thor, before and since CUDA 13: not of sm_100f's family
        legal = "a device requires compute capability 9.0, 10.0, 10.3"
        assert detect("NVIDIA Jetson", other) == f"{legal}, got {other} (NVIDIA Jetson)"
    assert detect("NVIDIA H900", "9.3").startswith("a device requires compute capability")  # sm_90a is no family's
    assert detect("NVIDIA A100", "8.0") == "a device requires compute capability 9.0, 10.0, 10.3, got 8.0 (NVIDIA A100)"
    assert by_name("b200") is B200


def test_a_familys_device_that_nobody_lists_has_no_integers():
    """B200's are of sm_100a, which runs on 10.0 alone."""
    later = detect("NVIDIA B900", "10.2")
    assert isinstance(later, Arch) and (later.name, later.targets) == ("b200", ("sm_100f",))
    assert plan(Problem(1024, 1024, 1024), later).variant == plan(Problem(1024, 1024, 1024), B200).variant
    integers = Problem(1024, 1024, 1024, 1, "int8", "int8", "int32", "k", "k")
    assert plan(integers, B200).variant.target == "sm_100a"
    assert plan(integers, later).reason == "sm_100f has no tensor core instruction for int8"


def test_only_short_kernels_start_early():
    assert plan(Problem(1024, 1024, 1024), H200).pdl
    assert not plan(Problem(4096, 4096, 4096), H200).pdl


@pytest.mark.parametrize(
    ("us", "num"), [(3.0, 1), (80.0, 1), (159.9, 1), (160.0, 2), (173.0, 2), (240.0, 3), (400.0, 4), (5000.0, 4)]
)
def test_rounds_of_a_kernel(us: float, num: int):
    """80 us each at least, up to four; one of clusters that share tiles, and where each tile is a CTA anyhow."""
    assert rounds(Tile(128, 256, cluster_m=2), us) == num
    assert rounds(Tile(128, 256, cluster_m=2, stream_k=True), us) == 1
    assert rounds(Tile(64, 64, direct=True), us) == 1


def test_a_kernel_beside_others_is_launched_in_rounds():
    problem = Problem(4096, 4096, 4096)
    alone, shared = plan(problem, H200), plan(problem, H200, shares_device=True)
    assert alone.rounds == 1 and shared.rounds == 2 and shared.tile == alone.tile
    short = Problem(1024, 1024, 1024)
    assert plan(short, H200, shares_device=True) == plan(short, H200)


@pytest.mark.parametrize("slower", [1.02, 1.04])
def test_clusters_that_share_tiles_give_way_to_what_takes_hardly_longer(slower: float):
    """Their time and another's, measured: for 3 % they are left."""
    problem = Problem(4096, 4096, 8192)
    tiles = [(Tile(128, 256, cluster_m=2, stream_k=True), 340.0), (Tile(128, 256, cluster_m=2), 340.0 * slower)]
    record = Record(key(problem), "", tuple(Time(str(tile), False, us, "") for tile, us in tiles))
    assert plan(problem, H200, record=record).tile == tiles[0][0]
    found = plan(problem, H200, record=record, shares_device=True)
    assert (found.tile, found.rounds) == ((tiles[1][0], 4) if slower < 1.03 else (tiles[0][0], 1))


def test_rows_that_are_columns_of_the_transposed_product():
    """From few rows on they have tiles of their own, up to SWAPPED_ROWS; a result that TMA cannot store, of an n-major
    b, is never transposed."""
    for m, tiles in (
        (64, NARROW_TILES["hopper"]),
        (65, SWAPPED_TILES["hopper"]),
        (SWAPPED_ROWS, SWAPPED_TILES["hopper"]),
        (SWAPPED_ROWS + 1, ()),
    ):
        found = candidates(Problem(m, 4096, 4096), H200)
        assert [c.tile for c in found if c.swapped] == list(tiles)
        assert all((c.problem.m, c.problem.n) == (4096, m) for c in found if c.swapped)
    assert not any(c.swapped for c in candidates(Problem(200, 4097, 4096), H200))
    assert any(c.swapped for c in candidates(Problem(200, 4097, 4096, b_major="k"), H200))
    assert not any(c.swapped for c in candidates(Problem(200, 4096, 4096), B200))
    chosen = plan(Problem(200, 4096, 4096), H200)
    assert chosen.swapped and (chosen.problem.m, chosen.problem.n, chosen.problem.c_major) == (4096, 200, "m")
