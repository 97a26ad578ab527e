"""What `explain` says: the candidates, the choice with its numbers, or why XLA takes over."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jax_bwgemm
from jax_bwgemm.explain import Explanation
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import decision
from jax_bwgemm.runtime.config import forget_reported

H200, B200 = ARCHS["h200"], ARCHS["b200"]
BEST_H200 = Tile(128, 256, cluster_m=2)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
X = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
LARGE = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)


def explained(problem, arch, tiles, narrow=()):
    """The text for a choice from given lists, whatever ships."""
    lists = [{"hopper": found, "blackwell": found} for found in (tiles, narrow, ())]
    chosen = plan(problem, arch, among=candidates(problem, arch, *lists))
    return str(Explanation(problem, chosen, chosen.variant.name))


def line(text, what):
    """The line of the choice that begins with `what`, or None."""
    return next((line for line in text.splitlines() if line.startswith(f"  {what}:")), None)


def test_hopper(artifacts_dir):
    text = str(jax_bwgemm.explain(X, X, device="h200"))
    assert "4096x4096x4096 bfloat16*bfloat16->bfloat16" in text
    assert "-> 128x256x64_cta1_cluster1x1 " in text
    assert "runs sm_90a_bf16_bf16_bf16_knn_128x256x64_cta1_cluster1x1_identity, whose cubin is present" in text
    assert "1-CTA; pairs came with Blackwell" in text
    assert all(
        (str(tile) in text) != (tile.promoted or tile.gated or tile.symmetric) for tile in SHIPPED_TILES["hopper"]
    )


def test_pairs_are_explained_by_their_numbers():
    text = explained(Problem(8192, 8192, 8192), B200, (PAIR, Tile(128, 256)))
    pairs = line(text, "pairs")
    assert "2-CTA; each CTA of a pair loads half of B (16 KiB a stage)" in pairs
    assert "256x256x64_cta2_cluster2x1 needs 64 B/clk a CTA beside MMAs of 128 cycles" in pairs
    assert "128x256x64_cta1_cluster1x1 needs 96 B/clk a CTA beside MMAs of 128 cycles" in pairs


def test_one_cta_is_explained_by_its_numbers():
    text = explained(Problem(128, 28672, 8192), B200, (PAIR, Tile(128, 256)))
    assert "1-CTA; no pair is predicted to be faster here: 128x256" in line(text, "pairs")
    assert "; 256x256x64_cta2_cluster2x1 needs 64 B/clk" in line(text, "pairs")


def test_the_order_of_tiles():
    chosen = plan(Problem(8192, 8192, 8192), H200, tile=BEST_H200)
    groups, snake = (
        line(str(Explanation(chosen.problem, dataclasses.replace(chosen, raster_order=order), "kernel")), "order")
        for order in ("groups", "snake")
    )
    assert "groups of 8 rows of cluster tiles" in groups and "backwards" not in groups
    assert snake == f"{groups}; every second group backwards"


def test_users_tile(artifacts_dir):
    text = str(jax_bwgemm.explain(LARGE, LARGE, device="b200", tile="128x256x64_cta1_cluster1x1"))
    assert "the only candidate" in line(text, "tile")
    assert "1-CTA; no pair is predicted to be faster here" in line(text, "pairs")


def test_swap_split_and_hints_in_the_callers_terms():
    text = explained(Problem(8, 28672, 4096), B200, (Tile(128, 128),), (Tile(128, 16, cluster_k=2),))
    assert "-> 128x16x64_cta1_cluster1x1x2 swapped" in text
    assert "C^T = B^T A^T: 8 rows of C as columns fill 50 % of the tiles' width; as rows, 12 %" in line(text, "swap")
    assert "2 CTAs of a cluster divide k" in line(text, "split")
    hints = line(text, "L2")
    assert "a normal, b evict_first (a stream, most of all bytes)" in hints


def test_a_result_that_does_not_fit_is_said():
    text = explained(Problem(8192, 8192, 512), H200, (BEST_H200,))
    assert line(text, "L2").endswith("a normal, b normal, the result evict_first (it does not fit)")


def test_what_does_not_apply_is_not_said():
    text = explained(Problem(8192, 8192, 8192), H200, (BEST_H200, Tile(128, 128)))
    assert [line(text, what) for what in ("swap", "split", "stream", "pad")] == [None] * 4
    assert "a normal, b normal" in line(text, "L2")
    assert "TMA, box after box" in line(text, "store")


def test_large_clusters_lose_ties_and_it_says_so():
    wide = dataclasses.replace(PAIR, cluster_m=4, cluster_n=2)
    problem = Problem(8192, 14336, 4096)
    text = explained(problem, B200, (PAIR, wide))
    assert "-> 256x256x64_cta2_cluster2x1" in text
    assert "as fast as 256x256x64_cta2_cluster4x2 within the model's error, whose clusters may" in line(text, "tile")


def test_a_stream_k_is_explained_by_its_numbers():
    """20 * 20 tiles of 256x256 on 66 clusters leave 4; two CTAs a cluster, 128x256 float32 each, and the flags."""
    tile = dataclasses.replace(BEST_H200, stream_k=True)
    text = line(explained(Problem(5000, 5000, 5000), H200, (tile,)), "stream")
    assert "the last 70 of 400 cluster tiles are divided along k between 66 of 66 clusters" in text
    assert "which meet in 17.3 MB of workspace, in the order of k" in text
    whole = line(explained(Problem(4096, 4096, 4096), H200, (tile,)), "stream")
    assert whole == "  stream: none of the 256 cluster tiles is divided along k: no parts are predicted to gain"


def test_unaligned_operands_and_result():
    text = explained(Problem(4095, 4097, 4093), H200, (BEST_H200,))
    assert "a by 3 elements a row and b by 63 elements a row, predicted as 34.1 us" in line(text, "pad")
    assert "by threads, mostly 16 bytes at a time" in line(text, "store") and "these have 8194" in line(text, "store")
    assert line(explained(Problem(4096, 4096, 4095, b_major="k"), H200, (BEST_H200,)), "pad") is not None
    swapped = explained(Problem(8, 4096, 4095), B200, (PAIR,), (Tile(128, 16),))
    assert "a by 1 elements a row, predicted" in line(swapped, "pad")


def test_without_cubins(no_artifacts):
    explanation = jax_bwgemm.explain(X, X, device="h200")
    assert explanation.variant is None
    assert "runs XLA's dot_general, because no cubins" in str(explanation)
    assert "128x256x64_cta1_cluster2x1" in str(explanation)


def test_a_missing_cubin(artifacts_dir, monkeypatch):
    missing = decision._missing

    def without(*seen):
        return lambda v: "no cubin" if v.tile.cta_m * v.tile.mma_n == 128 * 256 else missing(*seen)(v)

    monkeypatch.setattr(decision, "_missing", without)
    text = str(jax_bwgemm.explain(X, X, device="h200"))
    assert "cubin not available" in text
    best = re.search(r"(\S+) +[\d.]+ us .* cubin not available", text)  # the first of them
    assert best and f"the best whose cubin is available; {best[1]} would be" in text


def test_an_epilogue_without_a_kernel_is_xlas(artifacts_dir):
    """The candidates are the product's alone, and the reason is the epilogue's."""
    odd = jax.ShapeDtypeStruct((4096, 4095), jnp.bfloat16)
    explanation = jax_bwgemm.explain(X, odd, device="h200", residual=odd, on_fallback="error")
    assert explanation.problem.epilogue.kind == "residual"
    assert "_bf16_bf16_f32_knn_" in explanation.variant and explanation.variant.endswith("_identity_threads")
    why = "the epilogue, residual of a float32 product: a matrix that is read requires rows that TMA can step over"
    assert why in line(str(explanation), "XLA")
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)  # of which a pass over the result is a small part
    missing = str(jax_bwgemm.explain(large, large, device="h200", activation="relu"))
    assert re.search(r"relu of a float32 product: no cubin sm_90a_bf16_bf16_bf16_knn_\S+_relu ", line(missing, "XLA"))
    for device, target in (("b200", "sm_100f"), ("h200", "sm_90a")):
        fused = str(jax_bwgemm.explain(X, X, device=device, residual=X))
        assert line(fused, "XLA") is None and re.search(rf"runs {target}_bf16_bf16_bf16_knn_\S+_residual, whose", fused)
    with pytest.raises(ValueError, match="cannot compute .* residual on h200: `cta_group` requires 1"):
        jax_bwgemm.explain(X, X, device="h200", residual=X, tile=PAIR)
    f16 = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    neither = str(jax_bwgemm.explain(f16, f16, device="h200", activation="relu"))
    assert "runs XLA's dot_general, because no cubin sm_90a_f16_f16_f16_" in neither


def test_other_reasons(artifacts_dir):
    f32, int32 = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in (jnp.float32, jnp.int32))
    fp8 = jax.ShapeDtypeStruct((72, 72), jnp.float8_e4m3fn)
    assert "sm_90a requires a k-major b for float8_e4m3fn" in str(jax_bwgemm.explain(fp8, fp8, device="h200"))
    assert "operands require two of float8_e4m3fn" in str(jax_bwgemm.explain(int32, int32, device="h200"))
    exact = str(jax_bwgemm.explain(f32, f32, device="b200", precision="highest"))
    assert "runs XLA's dot_general, because" in exact and "precision" in exact
    assert "no CUDA device here; to plan for one, pass `device=`" in str(jax_bwgemm.explain(X, X))
    empty = jax.ShapeDtypeStruct((4096, 0), jnp.bfloat16)
    assert "there is nothing to multiply" in str(jax_bwgemm.explain(X, empty, device="h200"))
    with pytest.raises(ValueError, match="requires the last dimension"):
        jax_bwgemm.explain(X, jax.ShapeDtypeStruct((8, 8), jnp.bfloat16))


def test_takes_arrays_and_tracers(artifacts_dir):
    seen = []
    a, bias = jnp.ones((8, 64), jnp.bfloat16), jnp.ones(128, jnp.bfloat16)
    b = jnp.ones((64, 128), jnp.bfloat16)

    def call(a, b):
        return seen.append(str(jax_bwgemm.explain(a, b, bias=bias, activation="relu", alpha=2.0, device="h200")))

    call(a, b)
    jax.make_jaxpr(call)(a, b)
    assert seen[0] == seen[1]
    assert "scale_bias_relu" in seen[0]


def test_batch_and_vector(artifacts_dir):
    stack = jax.ShapeDtypeStruct((3, 64, 128), jnp.bfloat16)
    shared = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    assert jax_bwgemm.explain(stack, shared, device="h200").problem == Problem(192, 256, 128)
    vector = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    assert jax_bwgemm.explain(stack, vector, device="h200").problem == Problem(1, 192, 128, b_major="k")


def test_products_of_a_block_have_the_users_line(artifacts_dir):
    """In the function of a `custom_jvp`, JAX knows no caller; differentiated or not, and in a warning, too."""
    square = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def mlp(x, w):
        return jax_bwgemm.mlp(x, w, w)

    def gated(x, w):
        return jax_bwgemm.gated_mlp(x, w, w, w)

    for f, num in ((mlp, 2), (gated, 2)):
        where = f"test_explain.py:{f.__code__.co_firstlineno + 1}"
        for g in (f, jax.jit(f), jax.grad(lambda *x, f=f: f(*x).astype(jnp.float32).sum())):
            products = jax_bwgemm.explain(g, square, square, device="h200").products
            assert len(products) >= num and {product.where for product in products} == {where}
        forget_reported()  # that all products here are XLA's, it says of the first alone
        with pytest.warns(jax_bwgemm.FallbackWarning) as found:
            jax.jit(f).lower(square, square)
        assert {(x.filename, x.lineno) for x in found} == {(__file__, f.__code__.co_firstlineno + 1)}


def test_one_array_is_no_product():
    with pytest.raises(
        TypeError, match="`explain` requires two arrays, or a function and its arguments, got one array$"
    ):
        jax_bwgemm.explain(jnp.ones((4, 4)))
