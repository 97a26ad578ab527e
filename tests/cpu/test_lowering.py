"""The StableHLO that a CPU host emits for CUDA: attributes, majors, padding, no transposes."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from fake_artifacts import fake_entry
from lowered import (
    BF16,
    CUDA,
    W,
    X,
    asked_majors,
    calls,
    hlo,
    majors,
    matmul,
    operand_barriers,
    recipe,
    struct,
    swapping,
    swizzles,
)

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import decision


def test_attributes(artifacts_dir):
    (call,) = calls(hlo(lambda a, b: matmul(a, b, tile="128x256x64_cta1_cluster2x1", out_dtype=jnp.float32), X, W))
    variant = Variant("sm_90a", "bfloat16", "bfloat16", "float32", "k", "n", Tile(128, 256, cluster_m=2))
    entry = fake_entry(variant)
    want = {
        "variant": variant.name,
        "entry": "kernel_symbol",
        "target": "sm_90a",
        "cubin_sha256": entry.cubin_sha256,
        "cta_m": "128 : i32",
        "mma_n": "256 : i32",
        "out_n": "256 : i32",
        "cluster_m": "2 : i32",
        "cluster_n": "1 : i32",
        "cluster_k": "1 : i32",
        "num_threads": f"{entry.num_threads} : i32",
        "smem_bytes": f"{entry.smem_bytes} : i32",
        "raster_group": "1 : i32",
        "raster_along_n": "1 : i32",
        "raster_order": "1 : i32",
        "a_l2": "normal",
        "b_l2": "normal",
        "c_l2": "normal",
        "stream_tiles": "0 : i32",
        "stream_clusters": "1 : i32",
        "tile_grid": "0 : i32",
        "rounds": "1 : i32",
        "parts": "1 : i32",
        "pdl": "1 : i32",
        "buffers": "a:bfloat16[l?,m,k+]%16 b:bfloat16[l?,k,n+]%16 -> out:float32[l,m,n]%16",
        "tensor_maps": "0:bf16[64,128,1]/128/16 1:bf16[64,32,1]/128/16 2:f32[32,64,1]/128/16",
        "params": " ".join(map(str, entry.recipe.params)),
    }
    assert {name: call.get(name) for name in want} == want
    config = re.search(r"mhlo.backend_config = \{(.*?)\}", hlo(matmul, X, W))
    assert set(re.findall(r"(\w+) = ", config[1])) == set(want)
    assert call["types"] == "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>) -> tensor<1x512x1024xf32>"


def test_a_stream_k_has_a_second_result(artifacts_dir):
    """2 x 4 tiles of 256x256 and 66 clusters of two CTAs, all of which share 8 * 128 k tiles."""
    tile = "128x256x64_cta1_cluster2x1_streamk"
    x, w = struct(512, 8192), struct(8192, 1024)
    text = hlo(lambda a, b: matmul(a, b, tile=tile), x, w)
    (call,) = calls(text)
    result = "tensor<1x512x1024xbf16>"
    assert call["types"].endswith(f" -> ({result}, tensor<{4096 + 66 * 2 * 128 * 256 * 4}xui8>)")
    assert (call["stream_tiles"], call["pdl"]) == ("8 : i32", "0 : i32")
    assert 8 < int(call["stream_clusters"].split()[0]) <= 66
    entry = fake_entry(Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile.from_str(tile)))
    assert recipe(call) == entry.recipe
    assert [str(buffer) for buffer in recipe(call).results] == ["out:bfloat16[l,m,n]%16", "workspace:uint8[bytes]%16"]
    assert text.count("ui8") == 1 and re.search(r"-> \(tensor<512x1024xbf16>", text)
    short = calls(hlo(lambda a, b: matmul(a, b, tile=tile), X, W))[0]
    assert (short["stream_tiles"], short["pdl"]) == ("0 : i32", "1 : i32")


def test_a_weight_gradient_may_share_tiles(artifacts_dir):
    x, w = struct(135168, 1024), struct(1024, 1024)  # 32 waves of tiles of 128x256 for the gradient of x, and no rest
    text = hlo(lambda x, w, ct: jax.vjp(matmul, x, w)[1](ct), x, w, x)
    of_x, of_w = sorted(calls(text), key=lambda call: call["a_major"])
    assert (of_x["a_major"], of_x["types"].count("ui8")) == ("k", 0)
    assert (of_w["a_major"], of_w["types"].count("ui8"), of_w["stream_tiles"]) == ("m", 1, "16 : i32")


def test_epilogue_and_bias_operand(artifacts_dir):
    bias = jax.ShapeDtypeStruct((1024,), BF16)

    def f(a, b, c):
        return matmul(a, b, bias=c, alpha=0.5, activation="relu")

    (call,) = calls(hlo(f, X, W, bias))
    assert call["variant"].endswith("scale_bias_relu")
    assert call["alpha"] == "5.000000e-01 : f32"
    assert "tensor<1024xbf16>) -> " in call["types"]


def test_pairs_on_blackwell(artifacts_dir):
    big = jax.ShapeDtypeStruct((4096, 4096), BF16)
    (call,) = calls(hlo(lambda a, b: jax_bwgemm.matmul(a, b, device="b200", on_fallback="error"), big, big))
    assert "_cta2_" in call["variant"]
    assert (call["target"], call["cta_m"]) == ("sm_100f", "128 : i32")


def test_device_from_environment_and_block(artifacts_dir, monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")

    def f(a, b):
        return jax_bwgemm.matmul(a, b)

    assert calls(hlo(f, X, W))[0]["target"] == "sm_100f"
    with jax_bwgemm.config(device="h200"):  # the same function: the block is part of the key of jit's caches
        assert calls(hlo(f, X, W))[0]["target"] == "sm_90a"
    assert calls(hlo(f, X, W))[0]["target"] == "sm_100f"


def test_users_tile(artifacts_dir):
    for tile in ("128x128x64_cta1_cluster1x1", Tile(128, 128)):
        assert "128x128x64" in calls(hlo(lambda a, b, t=tile: matmul(a, b, tile=t), X, W))[0]["variant"]
    with pytest.raises(ValueError, match="cannot compute .* on h200: `cta_group` requires 1"):
        hlo(lambda a, b: matmul(a, b, tile=Tile(256, 256, cta_group=2, cluster_m=2)), X, W)


@pytest.mark.parametrize("a_major", "km")
@pytest.mark.parametrize("b_major", "nk")
@pytest.mark.parametrize("batch", [(), (3,)])
def test_gradients_move_no_operand(artifacts_dir, a_major, b_major, batch):
    """Forward and both gradients are our calls on the arrays as they are stored."""
    x = jax.ShapeDtypeStruct((*batch, *((64, 128) if a_major == "k" else (128, 64))), BF16)
    w = jax.ShapeDtypeStruct((*batch, *((128, 256) if b_major == "n" else (256, 128))), BF16)
    k_x, k_w, num = (1 if a_major == "k" else 0), (0 if b_major == "n" else 1), len(batch)
    dims = (((num + k_x,), (num + k_w,)), (tuple(range(num)),) * 2)

    def f(x, w):
        return jax_bwgemm.dot_general(x, w, dims, **CUDA)

    def pullback(x, w, ct):
        return jax.vjp(f, x, w)[1](ct)

    text = hlo(pullback, x, w, jax.ShapeDtypeStruct((*batch, 64, 256), BF16))
    d_a = {"k": "k", "m": "km"[b_major == "k"]}[a_major] + {"k": "nk"[b_major == "n"], "m": "k"}[a_major]
    d_b = {"n": "km"[a_major == "k"], "k": "m"}[b_major] + {"n": "n", "k": "kn"[a_major == "k"]}[b_major]
    assert sorted(asked_majors(text)) == sorted([d_a, d_b])
    assert "stablehlo.transpose" not in text
    assert "dot_general" not in text


def test_dense_layer_gradient(artifacts_dir):
    """A stack of rows against one weight: three two-dimensional products, the sum over the batch inside the last."""
    x = jax.ShapeDtypeStruct((4, 64, 128), BF16)

    def loss(x, w):
        return matmul(x, w).astype(jnp.float32).sum()

    text = hlo(jax.value_and_grad(loss, (0, 1)), x, jax.ShapeDtypeStruct((128, 256), BF16))
    types = [re.sub(r"\((\S+), tensor<\d+xui8>\)$", r"\1", call["types"]) for call in calls(text)]  # no workspace
    assert types == [
        "(tensor<1x256x128xbf16>, tensor<1x128x256xbf16>) -> tensor<1x256x256xbf16>",
        "(tensor<1x256x128xbf16>, tensor<1x256x256xbf16>) -> tensor<1x128x256xbf16>",
        "(tensor<1x256x256xbf16>, tensor<1x128x256xbf16>) -> tensor<1x256x128xbf16>",
    ]
    assert majors(text) == ["kn", "mn", "kk"]
    assert "stablehlo.transpose" not in text


def test_fused_gradient(artifacts_dir):
    def loss(x, w, c):
        return matmul(x, w, bias=c, activation="relu").astype(jnp.float32).sum()

    text = hlo(jax.grad(loss, (0, 1, 2)), X, W, jax.ShapeDtypeStruct((1024,), BF16))
    assert majors(text) == ["kn", "mn", "kk"]
    assert "stablehlo.transpose" not in text


def test_vmap_is_one_product(artifacts_dir):
    stack = jax.ShapeDtypeStruct((5, 512, 256), BF16)
    text = hlo(jax.vmap(matmul, (0, None)), stack, W)
    assert [call["types"] for call in calls(text)] == [
        "(tensor<1x2560x256xbf16>, tensor<1x256x1024xbf16>) -> tensor<1x2560x1024xbf16>"
    ]
    shared = hlo(jax.vmap(matmul, (None, 0)), X, jax.ShapeDtypeStruct((5, 256, 1024), BF16))
    assert "(tensor<1x512x256xbf16>, tensor<5x256x1024xbf16>) -> tensor<5x512x1024xbf16>" in shared
    assert "stablehlo.transpose" not in text + shared


@pytest.mark.parametrize(
    "f, want",
    [
        (lambda x, w: matmul(x, w.T), "kk"),
        (lambda x, w: matmul(x.T, w), "mn"),
        (lambda x, w: matmul(x.mT, w.mT), "mk"),
        (lambda x, w: matmul(x, jnp.swapaxes(w, 0, 1)[None])[0], "kk"),
    ],
)
def test_operands_that_are_transposes_are_taken_from_before(artifacts_dir, f, want):
    x = jax.ShapeDtypeStruct((512, 256) if want[0] == "k" else (256, 512), BF16)
    w = jax.ShapeDtypeStruct((1024, 256) if want[1] == "k" else (256, 1024), BF16)
    text = hlo(f, x, w)
    assert majors(text) == [want]
    (call,) = calls(text)
    assert "tensor<1x1024x256xbf16>" in call["types"] if want[1] == "k" else "tensor<1x256x1024xbf16>" in call["types"]


def test_batched_transpose_is_taken_from_before(artifacts_dir):
    x, w = jax.ShapeDtypeStruct((3, 64, 128), BF16), jax.ShapeDtypeStruct((3, 256, 128), BF16)
    assert majors(hlo(lambda x, w: matmul(x, w.mT), x, w)) == ["kk"]

    def moved(x, w):
        return matmul(x, jnp.transpose(w, (1, 2, 0)))  # a batch that moves is no change of major

    assert asked_majors(hlo(moved, x, jax.ShapeDtypeStruct((256, 3, 128), BF16))) == ["kn"]


@pytest.mark.parametrize(
    "x, w, want, types",
    [
        ((512, 256), (256, 1024), "kn", "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>)"),
        ((512, 250), (250, 1024), "kn", "(tensor<1x512x256xbf16>, tensor<1x250x1024xbf16>)"),
        ((512, 256), (256, 1001), "kn", "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>)"),
        ((512, 256), (256, 330), "kn", "(tensor<1x512x256xbf16>, tensor<1x256x336xbf16>)"),  # a line were a sixth more
        ((65, 250), (250, 65), "kn", "(tensor<1x65x256xbf16>, tensor<1x250x72xbf16>)"),
    ],
)
def test_rows_that_tma_cannot_step_over_are_padded(artifacts_dir, x, w, want, types):
    """The contiguous dimension only, and only where it must be; the result keeps its shape."""
    text = hlo(matmul, struct(*x), struct(*w))
    (call,) = calls(text)
    assert majors(text) == [want]
    assert call["types"] == f"{types} -> tensor<1x{x[0]}x{w[1]}xbf16>"
    assert text.count("stablehlo.pad") == sum(size % 8 != 0 for size in (x[1], w[1]))
    assert "stablehlo.transpose" not in text and "dot_general" not in text
    assert call["variant"].endswith("_threads") == (w[1] % 8 != 0) == (len(swizzles(call)) == 2)


@pytest.mark.parametrize(
    "w, want, pads",
    [
        ((1024, 256), "kk", []),  # as it is stored
        ((1024, 250), "kk", ["512x256", "1024x256"]),  # both in one pass, and no other that transposes
        ((1001, 256), "kk", []),
        ((1001, 250), "kk", ["512x256", "1001x256"]),  # neither can
    ],
)
def test_transposed_operands_have_as_few_passes_as_may_be(artifacts_dir, w, want, pads):
    text = hlo(lambda x, w: matmul(x, w.T), struct(512, w[1]), struct(*w))
    assert majors(text) == [want]
    padded = re.findall(r"stablehlo.pad .*-> tensor<1x(\w+)xbf16>", text)
    assert padded == pads


def test_padding_in_gradients_and_batches(artifacts_dir):
    x, w = struct(3, 96, 77), struct(3, 77, 99)
    text = hlo(lambda x, w, ct: jax.vjp(matmul, x, w)[1](ct), x, w, struct(3, 96, 99))
    assert sorted(majors(text)) == ["kk", "mn"]
    assert text.count("stablehlo.pad") == 4  # each factor of each product
    assert "stablehlo.transpose" not in text and "dot_general" not in text


def test_padding_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (jax.P("x"), jax.P(None, "y")), "out_specs": jax.P("x", "y")}
    text = hlo(jax.shard_map(matmul, mesh=mesh, **specs), struct(256, 30), struct(30, 258))
    assert [call["types"] for call in calls(text)] == [
        "(tensor<1x128x32xbf16>, tensor<1x30x136xbf16>) -> tensor<1x128x129xbf16>"
    ]


def test_source_of_a_transpose_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(lambda x, w: matmul(x, w.T), mesh=mesh, in_specs=(jax.P("x"), jax.P("x")), out_specs=jax.P("x"))
    text = hlo(f, struct(64, 32), struct(256, 32))
    assert majors(text) == ["kk"]
    assert "tensor<1x64x32xbf16>) -> tensor<1x16x64xbf16>" in text


def test_users_tile_under_the_majors_that_allow_it(artifacts_dir):
    """Hopper multiplies bytes of a k-major b only, which `w.T` has, and `w` has not."""
    x, w = struct(256, 512, dtype="float8_e4m3fn"), struct(1024, 256, dtype="float8_e4m3fn")
    for tile in (None, "128x128x128_cta1_cluster1x1"):
        text = hlo(lambda x, w, t=tile: matmul(x.T, w.T, out_dtype=BF16, tile=t), x, w)
        assert majors(text) == ["mk"]
        assert "tensor<1x256x512xf8E4M3FN>, tensor<1x1024x256xf8E4M3FN>" in text
    with pytest.raises(ValueError, match="cannot compute .*: sm_90a requires a k-major b"):
        hlo(
            lambda x, w: matmul(x, w, out_dtype=BF16, tile="128x128x128_cta1_cluster1x1"),
            x,
            struct(512, 64, dtype=x.dtype),
        )


def test_padding_where_the_unpadded_major_is_illegal(artifacts_dir):
    x, w = struct(250, 512, dtype="float8_e4m3fn"), struct(250, 1024, dtype="float8_e4m3fn")
    text = hlo(lambda x, w: matmul(x.T, w, out_dtype=BF16), x, w)
    (call,) = calls(text)
    assert call["types"].startswith("(tensor<1x250x1024xf8E4M3FN>, tensor<1x512x256xf8E4M3FN>)")
    assert majors(text) == ["mk"] and text.count("stablehlo.pad") == 1


@pytest.mark.parametrize("shapes, pads", [(((16, 256), (256, 1024)), 0), (((3, 250), (250, 1024)), 1)])
def test_swapped_operands(artifacts_dir, monkeypatch, shapes, pads):
    """(b, a) as they are stored, and the result's bytes as they are asked for."""
    monkeypatch.setattr(decision, "plan", swapping)
    (m, k), (_, n) = shapes
    text = hlo(matmul, *(struct(*shape) for shape in shapes))
    (call,) = calls(text)
    assert (call["a_major"], call["b_major"], call["c_major"]) == ("m", "k", "m")
    assert "_mkm_" in call["variant"]
    b, a = f"tensor<1x{k}x1024xbf16>", f"tensor<1x{m}x256xbf16>"
    assert call["types"] == f"({b}, {a}) -> tensor<1x{m}x{n}xbf16>"
    assert text.count("stablehlo.pad") == pads
    assert "stablehlo.transpose" not in text


def test_l2_hints_are_the_plans(artifacts_dir, monkeypatch):
    def hinting(*args, **settings):
        return dataclasses.replace(plan(*args, **settings), a_l2="evict_first", b_l2="evict_last", c_l2="evict_first")

    monkeypatch.setattr(decision, "plan", hinting)
    (call,) = calls(hlo(matmul, X, W))
    assert (call["a_l2"], call["b_l2"], call["c_l2"]) == ("evict_first", "evict_last", "evict_first")


@pytest.mark.parametrize("start, num_barriers", [(0, 0), (8, 0), (3, 1), (4, 1)])
def test_unaligned_slices_are_copied(artifacts_dir, start, num_barriers):
    """Weights inside one flat array, as `ravel_pytree` makes them: XLA would hand over a pointer into it."""
    flat = jax.ShapeDtypeStruct((256 * 64 + 8,), BF16)
    text = hlo(lambda x, p: matmul(x, p[start : start + 256 * 64].reshape(256, 64)), X, flat)
    assert operand_barriers(text) == num_barriers
    assert len(calls(text)) == 1


def test_weights_of_a_scan_are_not_copied(artifacts_dir):
    weights = jax.ShapeDtypeStruct((6, 256, 256), BF16)
    text = hlo(lambda x, w: jax.lax.scan(lambda c, v: (matmul(c, v), None), x, w)[0], X, weights)
    assert "optimization_barrier" not in text
    flat = jax.ShapeDtypeStruct((256 * 64 + 8,), BF16)

    def f(x, p, i):
        return matmul(x, jax.lax.dynamic_slice(p, (i,), (256 * 64,)).reshape(256, 64))

    assert operand_barriers(hlo(f, X, flat, jax.ShapeDtypeStruct((), jnp.int32))) == 1


@pytest.mark.parametrize("start, num_barriers", [(8, 0), (3, 1)])
def test_a_slice_that_a_function_returns_is_seen(artifacts_dir, start, num_barriers):
    flat = jax.ShapeDtypeStruct((256 * 64 + 8,), BF16)
    slicing = jax.jit(lambda p: p[start : start + 256 * 64])
    text = hlo(lambda x, p: matmul(x, slicing(p).reshape(256, 64)), X, flat)
    assert operand_barriers(text) == num_barriers


@pytest.mark.parametrize("start, num_barriers", [(8, 0), (3, 1)])
def test_what_an_inner_function_is_handed_may_be_a_slice(artifacts_dir, start, num_barriers):
    """XLA would inline the function and pass the middle of the array. Its other operand is no slice of that size."""
    inner, flat = jax.jit(matmul), struct(256 * 64 + 8)
    text = hlo(lambda x, p: inner(x, p[start : start + 256 * 64].reshape(256, 64)), X, flat)
    assert "func.call @matmul" in text or "call @matmul" in text
    assert operand_barriers(text) == num_barriers
    outer = jax.jit(lambda x, p: inner(x, p.reshape(256, 64)))
    assert operand_barriers(hlo(lambda x, p: outer(x, p[start : start + 256 * 64]), X, flat)) == num_barriers
    assert operand_barriers(hlo(lambda x, w: inner(x * 2, w * 2), X, W)) == 0


def test_a_result_is_not_stored_into_the_middle_of_an_array(artifacts_dir):
    """XLA has a custom call store where a dynamic_update_slice would; threads may, and a scan's rows stay aligned."""

    def written(x, w, big):
        return big.at[3 : 3 + 512 * w.shape[1]].set(matmul(x, w).reshape(-1))

    big = struct(512 * 1024 + 8)
    text = hlo(written, X, W, big)
    (result,) = re.findall(r"(%\S+) = stablehlo.custom_call @jax_bwgemm_matmul", text)
    assert f"stablehlo.optimization_barrier {result} :" in text
    threads = hlo(written, X, struct(256, 1001), big)
    assert calls(threads)[0]["variant"].endswith("_threads") and "optimization_barrier" not in threads
    stacked = hlo(lambda x, ws: jax.lax.scan(lambda c, w: (c, matmul(c, w)), x, ws)[1], X, struct(6, 256, 256))
    assert len(calls(stacked)) == 1 and "optimization_barrier" not in stacked


def test_export_with_the_check_disabled(artifacts_dir):
    check = jax.export.DisabledSafetyCheck.custom_call("jax_bwgemm_matmul_v2")
    exported = jax.export.export(jax.jit(matmul), platforms=("cuda",), disabled_checks=[check])(X, W)
    assert calls(exported.mlir_module())


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu", "rocm"), ("tpu", "cpu")])
@pytest.mark.parametrize("steps", [{}, {"activation": "relu"}], ids=["alone", "relu"])
def test_modules_for_several_platforms(artifacts_dir, platforms, steps):
    """A branch for CUDA with our call, one for the others with XLA's."""

    def f(x, w):
        return jax_bwgemm.matmul(x, w.T, device="h200", on_fallback="ignore", **steps)

    text = jax.jit(f).trace(X, struct(1024, 256)).lower(lowering_platforms=platforms).as_text()
    assert len(calls(text)) == ("cuda" in platforms) and "stablehlo.dot_general" in text
    if "tpu" not in platforms:
        check = jax.export.DisabledSafetyCheck.custom_call("jax_bwgemm_matmul_v2")
        exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=[check])(X, struct(1024, 256))
        assert set(exported.platforms) == set(platforms) and len(calls(exported.mlir_module())) == 1


def test_a_module_for_several_platforms_runs_here(artifacts_dir):
    x, w = jnp.ones((8, 16), BF16), jnp.ones((16, 24), BF16)
    f = jax.jit(lambda x, w: jax_bwgemm.matmul(x, w, device="h200", on_fallback="ignore"))
    check = jax.export.DisabledSafetyCheck.custom_call("jax_bwgemm_matmul_v2")
    exported = jax.export.export(f, platforms=("cuda", "cpu"), disabled_checks=[check])(x, w)
    assert (exported.call(x, w) == 16).all()


@pytest.mark.parametrize("b_major", "nk")
def test_more_than_few_rows_may_be_columns(artifacts_dir, swapped_rows, monkeypatch, b_major):
    """200 rows as 208 columns of the transposed product: the operands are read as they lie, and b comes first."""
    tile = Tile(64, 64, cluster_k=4)
    monkeypatch.setattr(decision, "plan", lambda problem, arch, *_, **__: swapping(problem, arch, tile))
    w = struct(4096, 512) if b_major == "n" else struct(512, 4096)
    text = hlo(lambda x, w: matmul(x, w if b_major == "n" else w.T), struct(200, 4096), w)
    (call,) = calls(text)
    assert (call["a_major"], call["b_major"], call["c_major"]) == ("mk"[b_major == "k"], "k", "m")
    stored = "4096x512" if b_major == "n" else "512x4096"
    assert call["types"] == f"(tensor<1x{stored}xbf16>, tensor<1x200x4096xbf16>) -> tensor<1x200x512xbf16>"
    assert asked_majors(text) == ["k" + b_major]
