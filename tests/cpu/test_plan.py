"""The legality rule, one case a clause; what the planner prefers; what `explain` says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jax_bwgemm
from jax_bwgemm.arch import ARCHS, by_name, detect
from jax_bwgemm.cost import cost, fill_cycles, mma_cycles, num_waves
from jax_bwgemm.plan import candidates, plan, raster
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import SHIPPED_TILES, Tile, why_not, why_not_tile

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PROBLEM = Problem(4096, 4096, 4096)
BEST_H200 = Tile(128, 256, cluster_m=2)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)


def changed(**changes):
    return dataclasses.replace(PROBLEM, **changes)


@pytest.mark.parametrize(
    "tile, problem, arch, sentence",
    [
        (BEST_H200, PROBLEM, H200, None),
        (PAIR, PROBLEM, B200, None),
        (Tile(128, 256, k_tile=32), PROBLEM, H200, "`k_tile` requires 64 elements (128 bytes), got 32"),
        (Tile(128, 256, cluster_m=3), PROBLEM, H200, "a cluster requires powers of two and at most 8 CTAs, got 3x1"),
        (
            Tile(128, 256, cluster_m=4, cluster_n=4),
            PROBLEM,
            H200,
            "a cluster requires powers of two and at most 8 CTAs, got 4x4",
        ),
        (PAIR, PROBLEM, H200, "`cta_group` requires 1 on sm_90a (CTA pairs came with Blackwell), got 2"),
        (Tile(96, 256), PROBLEM, H200, "`mma_m` requires 64, 128 or 256 on sm_90a, got 96"),
        (Tile(128, 96), PROBLEM, H200, "`mma_n` requires a multiple of 64 in 64..256 on sm_90a, got 96"),
        (Tile(256, 256), PROBLEM, H200, "an accumulator requires at most 128 registers a thread, got 256 for 256x256"),
        (Tile(128, 256, cta_group=3), PROBLEM, B200, "`cta_group` requires 1 or 2, got 3"),
        (Tile(256, 256), PROBLEM, B200, "`mma_m` requires 128 for cta_group 1, got 256"),
        (Tile(128, 256, cta_group=2, cluster_m=2), PROBLEM, B200, "`mma_m` requires 256 for cta_group 2, got 128"),
        (Tile(128, 512), PROBLEM, B200, "`mma_n` requires a multiple of 64 in 64..256 for cta_group 1, got 512"),
        (
            Tile(256, 192, cta_group=2, cluster_m=2),
            PROBLEM,
            B200,
            "`mma_n` requires a multiple of 128 in 128..256 for cta_group 2, got 192",
        ),
        (Tile(256, 256, cta_group=2), PROBLEM, B200, "`cluster_m` requires a multiple of cta_group 2, got 1"),
        (
            BEST_H200,
            changed(a_dtype="float32"),
            H200,
            "operands require bfloat16 or float16, both the same, got float32 and bfloat16",
        ),
        (
            BEST_H200,
            changed(b_dtype="float16"),
            H200,
            "operands require bfloat16 or float16, both the same, got bfloat16 and float16",
        ),
        (BEST_H200, changed(out_dtype="int8"), H200, "the result requires bfloat16, float16 or float32, got int8"),
        (BEST_H200, changed(a_major="n"), H200, "majors require a in ('k', 'm') and b in ('n', 'k'), got 'n' and 'n'"),
        (BEST_H200, changed(m=0), H200, "`m` requires 1..2147483647, got 0"),
        (BEST_H200, changed(k=2**31), H200, "`k` requires 1..2147483647, got 2147483648"),
        (
            BEST_H200,
            changed(k=4095),
            H200,
            "TMA requires a row pitch that is a multiple of 16 bytes, got 8190 bytes for a",
        ),
        (
            BEST_H200,
            changed(a_major="m", m=4095),
            H200,
            "TMA requires a row pitch that is a multiple of 16 bytes, got 8190 bytes for a",
        ),
        (
            BEST_H200,
            changed(n=4100),
            H200,
            "TMA requires a row pitch that is a multiple of 16 bytes, got 8200 bytes for b",
        ),
        (
            BEST_H200,
            changed(n=4100, b_major="k"),
            H200,
            "TMA requires a row pitch that is a multiple of 16 bytes, got 8200 bytes for the result",
        ),
        (BEST_H200, changed(n=4100, b_major="k", out_dtype="float32"), H200, None),
    ],
)
def test_why_not(tile, problem, arch, sentence):
    assert why_not(tile, problem, arch) == sentence


def test_pipeline_needs_three_stages():
    small = dataclasses.replace(H200, smem_bytes=96 * 1024)
    assert (
        why_not_tile(BEST_H200, "bfloat16", small)
        == "a pipeline requires 3 stages in 98304 bytes of shared memory, got 1"
    )


def test_tmem_is_limited():
    small = dataclasses.replace(B200, tmem_cols=256)
    assert why_not_tile(PAIR, "bfloat16", small) == "accumulators require at most 256 TMEM columns, got 512"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_every_shipped_tile_is_legal(arch):
    for tile in candidates(arch.target):
        assert why_not(tile, PROBLEM, arch) is None
        assert Tile.from_str(str(tile)) == tile


def test_shipped_tiles_are_distinct():
    for tiles in SHIPPED_TILES.values():
        assert len(set(tiles)) == len(tiles)


def test_large_squares_take_the_widest_reuse():
    assert plan(PROBLEM, H200).tile == BEST_H200
    assert plan(PROBLEM, B200).tile == PAIR


@pytest.mark.parametrize("arch", (H200, B200), ids=lambda a: a.name)
def test_small_products_spread_over_the_sms(arch):
    small = plan(Problem(512, 512, 512), arch).tile
    assert small.mma_m * small.mma_n < 256 * 128 * small.cta_group


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_cost_grows_with_every_size(arch):
    for tile in candidates(arch.target):
        base = cost(tile, PROBLEM, arch)
        assert 0 < base.utilisation <= 1
        for bigger in (changed(m=8192), changed(n=8192), changed(k=8192), changed(batch=2, a_batch=2, b_batch=2)):
            assert cost(tile, bigger, arch).us > base.us
        slower = dataclasses.replace(arch, clock_ghz=arch.clock_ghz / 2, memory_tb_per_s=arch.memory_tb_per_s / 2)
        assert cost(tile, PROBLEM, slower).us > base.us
        assert num_waves(tile, changed(m=8192), arch) >= num_waves(tile, PROBLEM, arch)


def test_cost_facts():
    assert mma_cycles(Tile(128, 256), 2, H200) == 1024  # 2*128*256*64 FLOP at 4096 a clock
    assert mma_cycles(PAIR, 2, B200) == 512
    assert fill_cycles(BEST_H200, 2, H200) * H200.l2_read_bytes_per_clk / 1024 == pytest.approx(32)  # B/clk
    assert fill_cycles(Tile(128, 256), 2, H200) * H200.l2_read_bytes_per_clk / 1024 == pytest.approx(48)
    assert fill_cycles(PAIR, 2, B200) * B200.l2_read_bytes_per_clk / 512 == pytest.approx(64)


def test_memory_bound():
    assert cost(BEST_H200, Problem(8192, 8192, 64), H200).bound == "memory"


def test_users_tile():
    tile = Tile(128, 128)
    chosen = plan(PROBLEM, H200, tile)
    assert chosen.tile == tile
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


def test_ties_go_to_the_tile_that_reads_less():
    """128x192 is predicted to be 1.5 % faster at this size, for 21 waves of 3/4 against 16."""
    problem = Problem(8192, 8192, 8192)
    chosen = plan(problem, H200)
    assert chosen.tile == BEST_H200
    costs = {c.tile: c.cost for c in chosen.candidates}
    tied = [cost for cost in costs.values() if cost.us <= 1.03 * min(c.us for c in costs.values())]
    assert costs[BEST_H200].l2_bytes == min(cost.l2_bytes for cost in tied)


def test_no_candidate():
    assert plan(PROBLEM, H200, missing=lambda v: "no cubin").reason == "no cubin"
    assert plan(changed(n=4095), H200).reason.startswith("TMA requires a row pitch")
    assert plan(changed(n=4095), H200).variant is None


@pytest.mark.parametrize("m, n", [(64, 65536), (65536, 64), (8192, 8192), (1, 8), (300, 300)])
def test_raster(m, n):
    problem = Problem(m, n, 512)
    for tile in candidates("sm_90a"):
        group, along_n = raster(tile, problem, H200)
        tiles = -(-n // (tile.cluster_n * tile.mma_n)) if along_n else -(-m // (tile.cluster_m * tile.cta_m))
        assert along_n == (n > m)
        assert 1 <= group <= tiles


def test_detect():
    assert detect("NVIDIA H200", "9.0", 132) == H200
    assert detect("NVIDIA H100 80GB HBM3", "9.0", 114) == dataclasses.replace(ARCHS["h100"], num_sms=114)
    assert detect("NVIDIA GB200", "10.0").name == "b200"
    assert detect("NVIDIA B300 SXM6 AC", "10.3").name == "b300"
    assert detect("NVIDIA A100", "8.0") == "a device requires compute capability 9.0, 10.0, 10.3, got 8.0 (NVIDIA A100)"
    assert by_name("b200") is B200


X = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def test_explain_hopper(artifacts_dir):
    text = str(jax_bwgemm.explain(X, X, device="h200"))
    assert "4096x4096x4096 bfloat16*bfloat16->bfloat16" in text
    assert "-> 128x256x64_cta1_cluster2x1" in text
    assert "runs sm_90a_bf16_bf16_bf16_kn_128x256x64_cta1_cluster2x1_identity, whose cubin is present" in text
    assert "1-CTA; pairs came with Blackwell" in text
    assert all(str(tile) in text for tile in SHIPPED_TILES["hopper"])


def test_explain_blackwell(artifacts_dir):
    text = str(jax_bwgemm.explain(X, X, device="b200", out_dtype=jnp.float32))
    assert "runs sm_100a_bf16_bf16_f32_kn_256x256x64_cta2_cluster2x1_identity" in text
    assert "2-CTA; each CTA of a pair loads half of B (16 KiB a stage)" in text


def test_explain_one_cta(artifacts_dir):
    text = str(jax_bwgemm.explain(X, X, device="b200", tile="128x256x64_cta1_cluster1x1"))
    assert "the only candidate" in text
    assert "1-CTA; no pair is predicted to be faster here" in text


def test_explain_unaligned(artifacts_dir):
    text = str(jax_bwgemm.explain(X, jax.ShapeDtypeStruct((4096, 4095), jnp.bfloat16), device="h200"))
    assert "runs XLA's dot_general, because TMA requires a row pitch" in text


def test_explain_without_cubins(no_artifacts):
    explained = jax_bwgemm.explain(X, X, device="h200")
    assert explained.variant is None
    assert "runs XLA's dot_general, because no cubins" in str(explained)
    assert "128x256x64_cta1_cluster2x1" in str(explained)


def test_explain_a_missing_cubin(artifacts_dir, monkeypatch):
    from jax_bwgemm import artifacts

    find, gone = artifacts.find, (BEST_H200, Tile(256, 128, cluster_n=2))  # two tiles that are predicted alike
    monkeypatch.setattr(artifacts, "find", lambda v: "no cubin" if v.tile in gone else find(v))
    text = str(jax_bwgemm.explain(X, X, device="h200"))
    assert "cubin not available" in text
    assert "the best whose cubin is available; 128x256x64_cta1_cluster2x1 would be" in text


def test_explain_other_reasons(artifacts_dir):
    f32 = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert "operands require bfloat16 or float16" in str(jax_bwgemm.explain(f32, f32, device="h200"))
    assert "no CUDA device here; to plan for one, pass `device=`" in str(jax_bwgemm.explain(X, X))
    empty = jax.ShapeDtypeStruct((4096, 0), jnp.bfloat16)
    assert "there is nothing to multiply" in str(jax_bwgemm.explain(X, empty, device="h200"))
    with pytest.raises(ValueError, match="requires the last dimension"):
        jax_bwgemm.explain(X, jax.ShapeDtypeStruct((8, 8), jnp.bfloat16))


def test_explain_takes_arrays_and_tracers(artifacts_dir):
    seen = []
    a, bias = jnp.ones((8, 64), jnp.bfloat16), jnp.ones(128, jnp.bfloat16)
    b = jnp.ones((64, 128), jnp.bfloat16)

    def call(a, b):
        return seen.append(str(jax_bwgemm.explain(a, b, bias=bias, activation="relu", alpha=2.0, device="h200")))

    call(a, b)
    jax.make_jaxpr(call)(a, b)
    assert seen[0] == seen[1]
    assert "scale_bias_relu" in seen[0]


def test_explain_batch_and_vector(artifacts_dir):
    stack = jax.ShapeDtypeStruct((3, 64, 128), jnp.bfloat16)
    shared = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    assert jax_bwgemm.explain(stack, shared, device="h200").problem == Problem(192, 256, 128)
    vector = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    assert jax_bwgemm.explain(stack, vector, device="h200").problem == Problem(1, 192, 128, b_major="k")
