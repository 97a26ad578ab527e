"""The StableHLO of residuals, and of epilogues that have no kernel."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts
from jax.sharding import PartitionSpec as P
from lowered import W, X, calls, hlo, majors, matmul, on_b200, operand_barriers, recipe, struct, swapping

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts, decision
from tests.cases import fused

BIAS, RESIDUAL = struct(1024), struct(512, 1024)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_residual_operand(artifacts_dir, batch):
    x, w, r = (struct(*batch, *y.shape) for y in (X, W, RESIDUAL))
    text = hlo(lambda a, b, r: on_b200(a, b, residual=r), x, w, r)
    (call,) = calls(text)
    num = batch[0] if batch else 1
    assert call["variant"].endswith("_residual") and call["target"] == "sm_100f"
    out = f"tensor<{num}x512x1024xbf16>"
    assert call["types"] == f"(tensor<{num}x512x256xbf16>, tensor<{num}x256x1024xbf16>, {out}) -> {out}"
    entry = artifacts.Manifest.load(artifacts_dir).find(call["variant"])
    assert recipe(call) == entry.recipe and [buffer.role for buffer in entry.recipe.buffers] == [
        "a",
        "b",
        "residual",
        "out",
    ]
    assert [str(leaf) for leaf in recipe(call).params[2:4]] == ["tma:2@256+128", "tma:3@384+128"]
    residual, result = recipe(call).tensor_maps[2:]
    assert dataclasses.replace(residual, buffer=3) == result
    assert call["num_threads"] == "224 : i32"
    assert "stablehlo.add" not in text


@pytest.mark.parametrize("tile", ["128x256x64_cta1_cluster2x1", "128x128x64_cta1_cluster2x1_pingpong"])
def test_hopper_adds_a_residual(artifacts_dir, tile):
    (call,) = calls(hlo(lambda a, b, r: matmul(a, b, residual=r, tile=tile), X, W, RESIDUAL))
    assert call["variant"] == f"sm_90a_bf16_bf16_bf16_knn_{tile}_residual"
    assert call["types"].count("tensor<1x512x1024xbf16>") == 2  # the residual and the result


def test_bias_stands_before_the_residual(artifacts_dir):
    def f(a, b, c, r):
        return on_b200(a, b, bias=c, residual=r, alpha=0.5, activation="relu")

    (call,) = calls(hlo(f, X, W, BIAS, RESIDUAL))
    assert call["variant"].endswith("_scale_bias_relu_residual") and call["alpha"] == "5.000000e-01 : f32"
    assert "tensor<1024xbf16>, tensor<1x512x1024xbf16>) -> tensor<1x512x1024xbf16>" in call["types"]


def test_swapped_operands_and_a_residual(artifacts_dir, monkeypatch):
    """Its bytes are the result's, under both names."""
    monkeypatch.setattr(decision, "plan", swapping)
    r = struct(16, 1024)
    text = hlo(lambda a, b, r: on_b200(a, b, residual=r), struct(16, 256), W, r)
    (call,) = calls(text)
    assert "_mkm_" in call["variant"] and call["variant"].endswith("_residual") and call["c_major"] == "m"
    out = "tensor<1x16x1024xbf16>"
    assert call["types"] == f"(tensor<1x256x1024xbf16>, tensor<1x16x256xbf16>, {out}) -> {out}"
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("start, num_barriers", [(0, 0), (8, 0), (3, 2)])
def test_unaligned_slices_of_bias_and_residual_are_copied(artifacts_dir, start, num_barriers):
    def f(x, w, p):
        bias, residual = p[start : start + 64], p[start + 64 :][: 512 * 64].reshape(512, 64)
        return on_b200(x, w, bias=bias, residual=residual, alpha=0.5, activation="relu")

    text = hlo(f, X, struct(256, 64), struct(513 * 64 + 8))
    assert operand_barriers(text) == num_barriers and len(calls(text)) == 1


def test_gradients_with_a_residual(artifacts_dir):
    """Without an activation the kernel adds it; with one the mask is needed, and the sum is XLA's."""

    def pullback(activation, a, b, c, r, ct):
        f = functools.partial(on_b200, activation=activation)
        primal, back = jax.vjp(lambda a, b, c, r: f(a, b, bias=c, residual=r, alpha=0.5), a, b, c, r)
        return primal, back(ct)

    for activation, forward in (("relu", "_bf16_bf16_f32_knn_"), (None, "_bf16_bf16_f32_knn_")):
        text = hlo(functools.partial(pullback, activation), X, W, BIAS, RESIDUAL, RESIDUAL)
        assert majors(text) == ["kn", "mn", "kk"] and "dot_general" not in text
        assert forward in calls(text)[0]["variant"]
    assert calls(text)[0]["variant"].endswith("_identity")  # no kernel has scale_bias_residual


@pytest.mark.parametrize("residual", [(), (RESIDUAL,)], ids=["alone", "residual"])
def test_gradients_of_a_gate(artifacts_dir, residual):
    """A kernel returns what goes into it, in the result's dtype; the gate, its slope and the residual are XLA's."""

    def pullback(a, b, ct, *r):
        f = functools.partial(matmul, activation="silu", residual=r[0] if r else None)
        primal, back = jax.vjp(f, a, b)
        return primal, back(ct)

    text = hlo(pullback, X, W, RESIDUAL, *residual)
    assert majors(text) == ["kn", "mn", "kk"] and "dot_general" not in text
    variants = [call["variant"] for call in calls(text)]
    assert all(name.startswith("sm_90a_bf16_bf16_bf16_") and name.endswith("_identity") for name in variants)


def test_a_gate_in_a_kernel(tmp_path, monkeypatch):
    """Behind a bias, with an operand as for any other."""
    tile = Tile(128, 128)
    entry = fake_entry(Variant("sm_90a", *("bfloat16",) * 3, "k", "n", tile, fused("bias_gelu")))
    write_fake_artifacts(tmp_path, [entry])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    (call,) = calls(hlo(lambda a, b, c: matmul(a, b, bias=c, activation="gelu"), X, W, BIAS))
    assert call["variant"] == entry.name and "tensor<1024xbf16>) -> tensor<1x512x1024xbf16>" in call["types"]


WITHOUT_KERNEL = [
    ("h200", dict(activation="gelu"), (), "sm_90a_bf16_bf16_f32_"),
    ("b200", dict(activation="silu"), (), "sm_100f_bf16_bf16_f32_"),
    ("h200", dict(activation="relu"), (), "sm_90a_bf16_bf16_f32_"),
    ("h200", dict(alpha=0.5, out_dtype="float8_e4m3fn"), (), "sm_90a_bf16_bf16_f32_"),
    ("h200", dict(activation="relu"), (RESIDUAL,), "sm_90a_bf16_bf16_f32_"),
    ("h200", dict(tile="128x128x64_cta1_cluster1x1x4"), (RESIDUAL,), "sm_90a_bf16_bf16_f32_"),  # a split along k
    ("b200", dict(activation="relu"), (RESIDUAL,), "sm_100f_bf16_bf16_f32_"),
]


@pytest.mark.parametrize("device, steps, residual, kernel", WITHOUT_KERNEL, ids=str)
def test_an_epilogue_without_a_kernel_is_xlas(artifacts_dir, device, steps, residual, kernel):
    """The product is a kernel's, in float32, and rounded once; that is no fallback."""

    def f(a, b, *residual):
        return jax_bwgemm.matmul(a, b, device=device, residual=residual[0] if residual else None, **steps)

    for policy in ("warn", "error"):
        with warnings.catch_warnings(), jax_bwgemm.config(on_fallback=policy):
            warnings.simplefilter("error")
            text = hlo(f, X, W, *residual)
    (call,) = calls(text)
    assert call["variant"].startswith(kernel) and call["variant"].endswith("_identity")
    assert call["types"].endswith("tensor<1x512x1024xf32>") and "alpha" not in call
    out = steps.get("out_dtype", "bf16").replace("float8_e4m3fn", "f8E4M3FN")
    assert re.findall(r"stablehlo.convert .*\(tensor<\S+xf32>\) -> tensor<\S+x(\w+)>", text) == [out]
    assert "dot_general" not in text and "stablehlo.transpose" not in text


def test_an_epilogue_without_a_kernel_and_its_unaligned_operands(artifacts_dir):
    """Transposes, padding, batches and threads that store are the product's, as without an epilogue."""
    text = hlo(lambda a, b, r: on_b200(a, b.mT, residual=r), struct(3, 96, 30), struct(3, 99, 30), struct(3, 96, 99))
    (call,) = calls(text)
    assert call["variant"].endswith("_identity_threads") and call["b_major"] == "k"
    assert call["types"] == "(tensor<3x96x32xbf16>, tensor<3x99x32xbf16>) -> tensor<3x96x99xf32>"
    assert "stablehlo.add" in text and "dot_general" not in text


def test_an_epilogue_without_a_kernel_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x")}
    f = jax.shard_map(lambda a, b, c: matmul(a, b, bias=c, residual=a), mesh=mesh, **specs)
    (call,) = calls(hlo(f, struct(64, 32), struct(32, 32), struct(32)))
    rows, weights = "tensor<1x16x32xbf16>", "tensor<1x32x32xbf16>"  # of 16 rows, the transposed product's
    assert call["types"] in [f"({a}, {b}) -> tensor<1x16x32xf32>" for a, b in ((rows, weights), (weights, rows))]


def test_a_function_of_a_mapped_bias(artifacts_dir):
    """No kernel has a vector for each matrix: of what goes into the function, which a gradient keeps, either."""

    def f(x, w, b):
        return jax.jvp(lambda x: matmul(x, w, bias=b, activation="gelu"), (x,), (x,))

    found = calls(hlo(jax.vmap(f), struct(4, 512, 256), struct(4, 256, 1024), struct(4, 1024)))
    assert sorted(call["variant"].split("_")[4] for call in found) == ["bf16", "f32"]
    assert all(call["variant"].endswith("_identity") for call in found)


def test_neither_fused_nor_alone(artifacts_dir):
    """There is no float16 product in float32 here; the reason is the one for the whole."""
    x, w = struct(512, 256, dtype="float16"), struct(256, 1024, dtype="float16")
    with pytest.raises(
        jax_bwgemm.FallbackError, match=r"float16 .* relu: no cubin sm_90a_f16_f16_f16_knn_\S+_relu(_threads)? in "
    ):
        hlo(lambda a, b: matmul(a, b, activation="relu"), x, w)
    why = r"residual: no cubin sm_90a_f16_f16_f16_knn_\S+_residual in "
    with pytest.warns(jax_bwgemm.FallbackWarning, match=why) as caught:
        text = hlo(lambda a, b: matmul(a, b, residual=jnp.ones((512, 1024)), on_fallback="warn"), x, w)
    assert not calls(text) and len(caught) == 1


def test_users_tile_for_the_product_alone(artifacts_dir):
    """Legal for the product, not for its epilogue: a split along k."""
    tile = "128x128x64_cta1_cluster1x1x4"
    (call,) = calls(hlo(lambda a, b, r: matmul(a, b, residual=r, tile=tile), X, W, RESIDUAL))
    assert tile in call["variant"] and "_f32_" in call["variant"]
    with pytest.raises(ValueError, match="cannot compute .* residual on h200: `cta_group` requires 1"):
        hlo(lambda a, b, r: matmul(a, b, residual=r, tile=Tile(256, 256, cta_group=2, cluster_m=2)), X, W, RESIDUAL)
