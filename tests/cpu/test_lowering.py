"""The StableHLO that a CPU host emits for CUDA: attributes, majors, no transposes; and every road to the fallback."""

from __future__ import annotations

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import catalogue, fake_entry
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm import artifacts, decision
from jax_bwgemm.artifacts import PARAM_KINDS
from jax_bwgemm.plan import Candidate, plan
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant

BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((512, 256), BF16)
W = jax.ShapeDtypeStruct((256, 1024), BF16)
CUDA = {"device": "h200", "on_fallback": "error"}


def hlo(f, *args, platform="cuda") -> str:
    """Of a function that no cache has seen."""
    return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str) -> list[dict[str, str]]:
    """The attributes of our custom calls, as text, with the operand and result types under "types"."""
    found = []
    for line in text.splitlines():
        if "@jax_bwgemm_matmul_v1" in line:
            fields = dict(re.findall(r'(\w+) = (dense<[^>]*>|"[^"]*"|[^,{}]+)', line))
            fields["types"] = line.rsplit(" : ", 1)[1]
            found.append({name: value.strip('"') for name, value in fields.items()})
    return found


def majors(text: str) -> list[str]:
    return [call["a_major"] + call["b_major"] for call in calls(text)]


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def matmul(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **CUDA | kwargs)


def test_attributes(artifacts_dir):
    (call,) = calls(hlo(lambda a, b: matmul(a, b, tile="128x256x64_cta1_cluster2x1", out_dtype=jnp.float32), X, W))
    variant = Variant("sm_90a", "bfloat16", "bfloat16", "float32", "k", "n", Tile(128, 256, cluster_m=2))
    entry = fake_entry(variant)
    params = [x for p in entry.params for x in (PARAM_KINDS.index(p.kind), p.offset, p.size)]
    want = {
        "variant": variant.name,
        "entry": "kernel_symbol",
        "target": "sm_90a",
        "cubin_sha256": entry.cubin_sha256,
        "a_major": "k",
        "b_major": "n",
        "c_major": "n",
        "cta_m": "128 : i32",
        "mma_n": "256 : i32",
        "cluster_m": "2 : i32",
        "cluster_n": "1 : i32",
        "cluster_k": "1 : i32",
        "num_threads": f"{entry.num_threads} : i32",
        "smem_bytes": f"{entry.smem_bytes} : i32",
        "raster_group": "4 : i32",
        "raster_along_n": "1 : i32",
        "a_l2": "0 : i32",
        "b_l2": "0 : i32",
        "tail_parts": "1 : i32",
        "pdl": "1 : i32",
        "param_bytes": f"{entry.param_bytes} : i32",
        "alpha": "1.000000e+00 : f32",
        **{f"{x}_box": f"dense<{list(entry.tma[x].box)}>" for x in "abc"},
        "swizzle_bytes": "dense<[128, 128, 64]>",
        "swizzle_atom_bytes": "dense<16>",
        "params": f"dense<{params}>",
    }
    assert {name: call.get(name) for name in want} == want
    config = re.search(r"mhlo.backend_config = \{(.*?)\}", hlo(matmul, X, W))
    assert set(re.findall(r"(\w+) = ", config[1])) == set(want)
    assert call["types"] == "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>) -> tensor<1x512x1024xf32>"


def test_a_split_tail_has_a_second_result(artifacts_dir):
    """2 x 4 tiles of 256x256 and 66 clusters of two CTAs; of 128 k tiles each gets 8 parts, one a cluster."""
    tail = "128x256x64_cta1_cluster2x1_tail"
    x, w = struct(512, 8192), struct(8192, 1024)
    text = hlo(lambda a, b: matmul(a, b, tile=tail), x, w)
    (call,) = calls(text)
    result = "tensor<1x512x1024xbf16>"
    assert call["types"].endswith(f" -> ({result}, tensor<{4096 + 66 * 2 * 128 * 256 * 4}xui8>)")
    assert (call["tail_parts"], call["pdl"]) == ("8 : i32", "0 : i32")
    entry = fake_entry(Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile.from_str(tail)))
    kinds = [PARAM_KINDS[int(kind)] for kind in re.findall(r"\d+", call["params"].removeprefix("dense"))[::3]]
    assert kinds == [p.kind for p in entry.params] and kinds[-3:] == ["tail_parts", "workspace", "token"]
    assert text.count("ui8") == 1 and re.search(r"-> \(tensor<512x1024xbf16>", text)
    short = calls(hlo(lambda a, b: matmul(a, b, tile=tail), X, W))[0]
    assert (short["tail_parts"], short["pdl"]) == ("1 : i32", "1 : i32")


def test_a_weight_gradient_may_split_its_tail(artifacts_dir):
    x, w = struct(65536, 1024), struct(1024, 1024)
    text = hlo(lambda x, w, ct: jax.vjp(matmul, x, w)[1](ct), x, w, x)
    of_x, of_w = sorted(calls(text), key=lambda call: call["a_major"])
    assert (of_x["a_major"], of_x["types"].count("ui8")) == ("k", 0)
    assert (of_w["a_major"], of_w["types"].count("ui8"), of_w["tail_parts"]) == ("m", 1, "4 : i32")


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
    assert (call["target"], call["cta_m"]) == ("sm_100a", "128 : i32")


def test_device_from_environment_and_block(artifacts_dir, monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")

    def f(a, b):
        return jax_bwgemm.matmul(a, b)

    assert calls(hlo(f, X, W))[0]["target"] == "sm_100a"
    with jax_bwgemm.config(device="h200"):  # the same function: the block is part of the key of jit's caches
        assert calls(hlo(f, X, W))[0]["target"] == "sm_90a"
    assert calls(hlo(f, X, W))[0]["target"] == "sm_100a"


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
    assert sorted(majors(text)) == sorted([d_a, d_b])
    assert "stablehlo.transpose" not in text
    assert "dot_general" not in text


def test_dense_layer_gradient(artifacts_dir):
    """A stack of rows against one weight: three two-dimensional products, the sum over the batch inside the last."""
    x = jax.ShapeDtypeStruct((4, 64, 128), BF16)

    def loss(x, w):
        return matmul(x, w).astype(jnp.float32).sum()

    text = hlo(jax.value_and_grad(loss, (0, 1)), x, jax.ShapeDtypeStruct((128, 256), BF16))
    types = [call["types"] for call in calls(text)]
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

    assert majors(hlo(moved, x, jax.ShapeDtypeStruct((256, 3, 128), BF16))) == ["kn"]


@pytest.mark.parametrize(
    "x, w, want, types",
    [
        ((512, 256), (256, 1024), "kn", "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>)"),
        ((512, 250), (250, 1024), "kn", "(tensor<1x512x256xbf16>, tensor<1x250x1024xbf16>)"),
        ((512, 256), (256, 1001), "kn", "(tensor<1x512x256xbf16>, tensor<1x256x1008xbf16>)"),
        ((5, 250), (250, 1), "kn", "(tensor<1x5x256xbf16>, tensor<1x250x8xbf16>)"),
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
    assert call["variant"].endswith("_threads") == (w[1] % 8 != 0) == (call["c_box"] == "dense<0>")


@pytest.mark.parametrize(
    "w, want, pads",
    [
        ((1024, 256), "kk", []),  # as it is stored
        ((1024, 250), "kn", ["512x256"]),  # rows of 250 cannot be stepped over, those of the transpose can
        ((1001, 256), "kk", []),
        ((1001, 250), "kk", ["512x256", "1001x256"]),  # neither can
    ],
)
def test_transposed_operands_prefer_the_major_without_padding(artifacts_dir, w, want, pads):
    text = hlo(lambda x, w: matmul(x, w.T), struct(512, w[1]), struct(*w))
    assert majors(text) == [want]
    padded = re.findall(r"stablehlo.pad .*-> tensor<1x(\w+)xbf16>", text)
    assert padded == pads


def test_padding_in_gradients_and_batches(artifacts_dir):
    x, w = struct(3, 64, 9), struct(3, 9, 33)
    text = hlo(lambda x, w, ct: jax.vjp(matmul, x, w)[1](ct), x, w, struct(3, 64, 33))
    assert sorted(majors(text)) == ["kk", "mn"]
    assert text.count("stablehlo.pad") == 4  # each factor of each product
    assert "stablehlo.transpose" not in text and "dot_general" not in text


def test_padding_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (jax.P("x"), jax.P(None, "y")), "out_specs": jax.P("x", "y")}
    text = hlo(jax.shard_map(matmul, mesh=mesh, **specs), struct(64, 30), struct(30, 66))
    assert [call["types"] for call in calls(text)] == [
        "(tensor<1x32x32xbf16>, tensor<1x30x40xbf16>) -> tensor<1x32x33xbf16>"
    ]


def test_source_of_a_transpose_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(lambda x, w: matmul(x, w.T), mesh=mesh, in_specs=(jax.P("x"), jax.P("x")), out_specs=jax.P("x"))
    text = hlo(f, struct(64, 32), struct(256, 32))
    assert majors(text) == ["kk"]
    assert "tensor<1x64x32xbf16>) -> tensor<1x16x64xbf16>" in text


def test_users_tile_under_the_majors_that_allow_it(artifacts_dir):
    """Hopper multiplies bytes k-major only, so `x.T` stays a transpose and `w.T` does not."""
    x, w = struct(256, 512, dtype="float8_e4m3fn"), struct(1024, 256, dtype="float8_e4m3fn")
    for tile in (None, "128x128x128_cta1_cluster1x1"):
        text = hlo(lambda x, w, t=tile: matmul(x.T, w.T, out_dtype=BF16, tile=t), x, w)
        assert majors(text) == ["kk"]
        assert "tensor<1x512x256xf8E4M3FN>, tensor<1x1024x256xf8E4M3FN>" in text
    with pytest.raises(ValueError, match="cannot compute .*: sm_90a requires both operands k-major"):
        hlo(
            lambda x, w: matmul(x, w, out_dtype=BF16, tile="128x128x128_cta1_cluster1x1"),
            x,
            struct(512, 64, dtype=x.dtype),
        )


def test_padding_where_the_unpadded_major_is_illegal(artifacts_dir):
    x, w = struct(512, 250, dtype="float8_e4m3fn"), struct(1024, 250, dtype="float8_e4m3fn")
    text = hlo(lambda x, w: matmul(x, w.T, out_dtype=BF16), x, w)
    assert majors(text) == ["kk"]
    assert text.count("stablehlo.pad") == 2


def swapping(problem, arch, tile=None, missing=lambda variant: None, record=None):
    """A planner that likes nothing but C^T = B^T A^T."""
    return plan(problem, arch, None, missing, [Candidate(tile or Tile(64, 128), problem.transposed, swapped=True)])


@pytest.mark.parametrize("shapes, pads", [(((16, 256), (256, 1024)), 0), (((3, 250), (250, 1001)), 2)])
def test_swapped_operands(artifacts_dir, monkeypatch, shapes, pads):
    """(b, a) as they are stored, and the result's bytes as they are asked for."""
    monkeypatch.setattr(decision, "plan", swapping)
    (m, k), (_, n) = shapes
    text = hlo(matmul, *(struct(*shape) for shape in shapes))
    (call,) = calls(text)
    assert (call["a_major"], call["b_major"], call["c_major"]) == ("m", "k", "m")
    assert "_mkm_" in call["variant"]
    b, a = f"tensor<1x{k}x{-(-n // 8) * 8}xbf16>", f"tensor<1x{m}x{-(-k // 8) * 8}xbf16>"
    assert call["types"] == f"({b}, {a}) -> tensor<1x{m}x{n}xbf16>"
    assert text.count("stablehlo.pad") == pads
    assert "stablehlo.transpose" not in text


BIAS, RESIDUAL = struct(1024), struct(512, 1024)


def on_b200(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **{"device": "b200", "on_fallback": "error"} | kwargs)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_residual_operand(artifacts_dir, batch):
    x, w, r = (struct(*batch, *y.shape) for y in (X, W, RESIDUAL))
    text = hlo(lambda a, b, r: on_b200(a, b, residual=r), x, w, r)
    (call,) = calls(text)
    num = batch[0] if batch else 1
    assert call["variant"].endswith("_residual") and call["target"] == "sm_100a"
    out = f"tensor<{num}x512x1024xbf16>"
    assert call["types"] == f"(tensor<{num}x512x256xbf16>, tensor<{num}x256x1024xbf16>, {out}) -> {out}"
    entry = artifacts.find(next(v for v in (fake.variant for fake in catalogue()) if v.name == call["variant"]))
    params = [x for p in entry.params for x in (PARAM_KINDS.index(p.kind), p.offset, p.size)]
    assert call["params"] == f"dense<{params}>" and params[6:12] == [2, 256, 128, 3, 384, 128]
    assert call["num_threads"] == "224 : i32"
    assert "stablehlo.add" not in text


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
    assert text.count("optimization_barrier") == num_barriers and len(calls(text)) == 1


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


WITHOUT_KERNEL = [
    ("h200", dict(activation="relu"), (), "sm_90a_bf16_bf16_f32_"),
    ("h200", dict(alpha=0.5, out_dtype="float8_e4m3fn"), (), "sm_90a_bf16_bf16_f32_"),
    ("h200", dict(), (RESIDUAL,), "sm_90a_bf16_bf16_f32_"),  # sm_90a has no warp that loads one
    ("b200", dict(activation="relu"), (RESIDUAL,), "sm_100a_bf16_bf16_f32_"),
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
    assert (call["types"].endswith("tensor<1x512x1024xf32>"), call["alpha"]) == (True, "1.000000e+00 : f32")
    out = steps.get("out_dtype", "bf16").replace("float8_e4m3fn", "f8E4M3FN")
    assert re.findall(r"stablehlo.convert .*\(tensor<\S+xf32>\) -> tensor<\S+x(\w+)>", text) == [out]
    assert "dot_general" not in text and "stablehlo.transpose" not in text


def test_an_epilogue_without_a_kernel_and_its_unaligned_operands(artifacts_dir):
    """Transposes, padding, batches and threads that store are the product's, as without an epilogue."""
    text = hlo(lambda a, b, r: on_b200(a, b.mT, residual=r), struct(3, 64, 30), struct(3, 33, 30), struct(3, 64, 33))
    (call,) = calls(text)
    assert call["variant"].endswith("_identity_threads") and call["b_major"] == "k"
    assert call["types"] == "(tensor<3x64x32xbf16>, tensor<3x33x32xbf16>) -> tensor<3x64x33xf32>"
    assert "stablehlo.add" in text and "dot_general" not in text


def test_an_epilogue_without_a_kernel_in_shard_map(artifacts_dir):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x")}
    f = jax.shard_map(lambda a, b, c: matmul(a, b, bias=c, residual=a), mesh=mesh, **specs)
    (call,) = calls(hlo(f, struct(64, 32), struct(32, 32), struct(32)))
    assert call["types"] == "(tensor<1x16x32xbf16>, tensor<1x32x32xbf16>) -> tensor<1x16x32xf32>"


def test_neither_fused_nor_alone(artifacts_dir):
    """There is no float16 product in float32 here; the reason is the one for the whole."""
    x, w = struct(512, 256, dtype="float16"), struct(256, 1024, dtype="float16")
    with pytest.raises(
        jax_bwgemm.FallbackError, match=r"float16 .* relu: no cubin sm_90a_f16_f16_f16_knn_\S+_relu in "
    ):
        hlo(lambda a, b: matmul(a, b, activation="relu"), x, w)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="a residual requires a Blackwell kernel") as caught:
        text = hlo(lambda a, b: matmul(a, b, residual=jnp.ones((512, 1024)), on_fallback="warn"), x, w)
    assert not calls(text) and len(caught) == 1


def test_users_tile_for_the_product_alone(artifacts_dir):
    """Legal for the product, not for its epilogue on this device."""
    tile = "128x128x64_cta1_cluster1x1"
    (call,) = calls(hlo(lambda a, b, r: matmul(a, b, residual=r, tile=tile), X, W, RESIDUAL))
    assert tile in call["variant"] and "_f32_" in call["variant"]
    with pytest.raises(ValueError, match="cannot compute .* residual on h200: `cta_group` requires 1"):
        hlo(lambda a, b, r: matmul(a, b, residual=r, tile=Tile(256, 256, cta_group=2, cluster_m=2)), X, W, RESIDUAL)


DTYPES = [
    ("float32", "float32", "float32", "dense<[16, 32, 16]>"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "dense<16>"),
    ("float8_e4m3fn", "float8_e5m2", "float32", "dense<16>"),
    ("int8", "int8", "int32", "dense<16>"),
]


@pytest.mark.parametrize("a_dtype, b_dtype, out_dtype, atoms", DTYPES)
def test_dtypes(artifacts_dir, a_dtype, b_dtype, out_dtype, atoms):
    x, w = struct(512, 256, dtype=a_dtype), struct(256, 1024, dtype=b_dtype)
    f = functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype, device="b200", on_fallback="error")
    (call,) = calls(hlo(f, x, w))
    assert call["target"] == "sm_100a" and call["swizzle_atom_bytes"] == atoms
    (call,) = calls(hlo(lambda x, w: f(x, w.T), x, struct(1024, 256, dtype=b_dtype)))
    assert call["b_major"] == "k" and call["swizzle_atom_bytes"] == "dense<16>"


def test_l2_hints_are_the_plans(artifacts_dir, monkeypatch):
    def hinting(*args, **settings):
        return plan(*args).__class__(**vars(plan(*args, **settings)) | {"a_l2": "evict_first", "b_l2": "evict_last"})

    monkeypatch.setattr(decision, "plan", hinting)
    (call,) = calls(hlo(matmul, X, W))
    assert (call["a_l2"], call["b_l2"]) == ("1 : i32", "2 : i32")


F32_X, F32_W = struct(512, 256, dtype="float32"), struct(256, 1024, dtype="float32")
B200 = functools.partial(jax_bwgemm.matmul, device="b200")
TF32 = (None, "default", "fastest", "bfloat16", "high", "tensorfloat32", jax.lax.Precision.HIGH, "TF32_TF32_F32")


@pytest.mark.parametrize("precision", TF32, ids=str)
def test_precisions_that_jax_computes_in_tf32(artifacts_dir, precision):
    assert calls(hlo(functools.partial(B200, precision=precision, on_fallback="error"), F32_X, F32_W))
    if isinstance(precision, str) and precision != "fastest":
        with jax.default_matmul_precision(precision):
            assert calls(hlo(functools.partial(B200, on_fallback="error"), F32_X, F32_W))


MORE = ["highest", "float32", "F32_F32_F32"]


@pytest.mark.parametrize(
    "by, precision", [*(("argument", x) for x in (*MORE, ("default", "highest"))), *(("config", x) for x in MORE)]
)
def test_more_precision_is_xlas_and_kept(artifacts_dir, precision, by):
    """In the fallback, and in its gradients."""

    def gradients(x, w, ct):
        return jax.vjp(functools.partial(B200, precision=precision if by == "argument" else None), x, w)[1](ct)

    with jax.default_matmul_precision(precision if by == "config" else "default"):
        reason = "`precision` requires TF32_TF32_F32" if precision == "F32_F32_F32" else "below highest, got highest"
        with pytest.warns(jax_bwgemm.FallbackWarning, match=reason):
            text = hlo(gradients, F32_X, F32_W, struct(512, 1024, dtype="float32"))
    assert not calls(text)
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 2
    mark = "accumulation_type = f32" if precision == "F32_F32_F32" else "HIGHEST"
    assert all(mark in line for line in dots)


def test_precision_of_a_gradient_in_float32(artifacts_dir):
    """A float8 product is a kernel's at any precision; its gradient in float32 is not."""
    x, w = struct(512, 256, dtype="float8_e4m3fn"), struct(256, 1024, dtype="float8_e4m3fn")
    f = functools.partial(B200, out_dtype=BF16, precision="highest", on_fallback="ignore")
    assert len(calls(hlo(f, x, w))) == 1

    def gradient(x, w, ct):
        return jax.vjp(functools.partial(f, out_dtype=jnp.float32), x, w)[1](ct)

    text = hlo(gradient, x, w, struct(512, 1024, dtype="float32"))
    assert not calls(text) and text.count("HIGHEST") == 4  # of two products with two operands
    text = hlo(lambda x, w, ct: jax.vjp(f, x, w)[1](ct), x, w, struct(512, 1024))
    assert len(calls(text)) == 2 and "dot_general" not in text


def test_precision_means_nothing_for_narrow_operands(artifacts_dir):
    assert calls(hlo(functools.partial(matmul, precision="highest"), X, W))


def test_dot_general_precision(artifacts_dir):
    dims = (((1,), (0,)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, device="b200", on_fallback="ignore")
    assert calls(hlo(functools.partial(f, precision="high"), F32_X, F32_W))
    text = hlo(functools.partial(f, precision="highest"), F32_X, F32_W)
    assert not calls(text) and "HIGHEST" in text


@pytest.mark.parametrize("start, num_barriers", [(0, 0), (8, 0), (3, 1), (4, 1)])
def test_unaligned_slices_are_copied(artifacts_dir, start, num_barriers):
    """Weights inside one flat array, as `ravel_pytree` makes them: XLA would hand over a pointer into it."""
    flat = jax.ShapeDtypeStruct((256 * 64 + 8,), BF16)
    text = hlo(lambda x, p: matmul(x, p[start : start + 256 * 64].reshape(256, 64)), X, flat)
    assert text.count("optimization_barrier") == num_barriers
    assert len(calls(text)) == 1


def test_weights_of_a_scan_are_not_copied(artifacts_dir):
    weights = jax.ShapeDtypeStruct((6, 256, 256), BF16)
    text = hlo(lambda x, w: jax.lax.scan(lambda c, v: (matmul(c, v), None), x, w)[0], X, weights)
    assert "optimization_barrier" not in text
    flat = jax.ShapeDtypeStruct((256 * 64 + 8,), BF16)

    def f(x, p, i):
        return matmul(x, jax.lax.dynamic_slice(p, (i,), (256 * 64,)).reshape(256, 64))

    assert "optimization_barrier" in hlo(f, X, flat, jax.ShapeDtypeStruct((), jnp.int32))


def test_missing_cubins_fall_back(no_artifacts):
    with pytest.warns(jax_bwgemm.FallbackWarning, match="no cubins: .* run `python -m jax_bwgemm build`"):
        assert not calls(hlo(lambda a, b: jax_bwgemm.matmul(a, b, device="h200"), X, W))


def test_no_device_falls_back(artifacts_dir):
    with pytest.warns(jax_bwgemm.FallbackWarning, match="no CUDA device here; to plan for one, pass `device=`"):
        assert not calls(hlo(lambda a, b: jax_bwgemm.matmul(a, b), X, W))


def test_symbolic_sizes_fall_back(artifacts_dir):
    (m,) = jax.export.symbolic_shape("m")
    with pytest.warns(jax_bwgemm.FallbackWarning, match="sizes known at trace time, and these are symbolic"):
        f = jax.jit(lambda a, b: jax_bwgemm.matmul(a, b, device="h200"))
        exported = jax.export.export(f, platforms=("cuda",))(jax.ShapeDtypeStruct((m, 256), BF16), W)
    assert "dot_general" in exported.mlir_module()


class FakeDevice:
    device_kind, compute_capability, core_count = "NVIDIA H200", "9.0", 132


@pytest.mark.parametrize("reason", ["the library is missing; build it", None])
def test_live_device(artifacts_dir, monkeypatch, reason):
    """With a GPU at hand the library must be usable, and is told where the cubins are."""
    registered = []
    monkeypatch.setattr(decision, "_cuda_devices", lambda: [FakeDevice])
    monkeypatch.setattr(decision.ffi, "status", lambda: reason)
    monkeypatch.setattr(decision.ffi, "register", registered.append)
    if reason:
        with pytest.raises(jax_bwgemm.FallbackError, match=reason):
            hlo(lambda a, b: jax_bwgemm.matmul(a, b, on_fallback="error"), X, W)
    else:
        assert calls(hlo(lambda a, b: jax_bwgemm.matmul(a, b, on_fallback="error"), X, W))
        assert registered == [(artifacts_dir,)]


def test_emulation_is_refused_on_cuda(artifacts_dir):
    with pytest.raises(ValueError, match="`emulate` requires a platform other than CUDA, .*, got cuda for 512x1024"):
        hlo(lambda a, b: jax_bwgemm.matmul(a, b, emulate="sm_100a"), X, W)


def test_unsupported_gpu(artifacts_dir, monkeypatch):
    ampere = type("Ampere", (), {"device_kind": "NVIDIA A100", "compute_capability": "8.0"})
    monkeypatch.setattr(decision, "_cuda_devices", lambda: [ampere])
    with pytest.warns(jax_bwgemm.FallbackWarning, match=r"requires compute capability .*, got 8.0 \(NVIDIA A100\)"):
        hlo(lambda a, b: jax_bwgemm.matmul(a, b), X, W)


@pytest.mark.parametrize("shapes", [((512, 0), (0, 64)), ((0, 64), (64, 64)), ((64, 64), (64, 0))])
def test_empty_products_are_xlas_and_silent(artifacts_dir, shapes):
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    assert not calls(hlo(matmul, *operands))


def test_cpu_warns_once_a_problem():
    x, w = jnp.ones((8, 16), BF16), jnp.ones((16, 24), BF16)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="8x24x16 .*: its kernels need CUDA, got cpu") as caught:
        jax.jit(jax_bwgemm.matmul)(x, w)
        jax.jit(lambda x, w: jax_bwgemm.matmul(x, w))(x, w)
        jax_bwgemm.matmul(x, w)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_bwgemm.matmul(x[:4], w, on_fallback="ignore")
    with pytest.raises(jax_bwgemm.FallbackError, match="its kernels need CUDA, got cpu"):
        jax_bwgemm.matmul(x, w, on_fallback="error")


def test_policy_is_part_of_the_compiled_function():
    x, w = jnp.ones((8, 16), BF16), jnp.ones((16, 24), BF16)
    jax_bwgemm.matmul(x, w, on_fallback="ignore")
    with pytest.raises(jax_bwgemm.FallbackError), jax_bwgemm.config(on_fallback="error"):
        jax_bwgemm.matmul(x, w)


def test_fallback_computes_the_same(quiet):
    x, w = jnp.ones((8, 16), BF16), jnp.ones((16, 24), BF16)
    np.testing.assert_array_equal(jax_bwgemm.matmul(x, w), jnp.dot(x, w))


def test_export_with_the_check_disabled(artifacts_dir):
    check = jax.export.DisabledSafetyCheck.custom_call("jax_bwgemm_matmul_v1")
    exported = jax.export.export(jax.jit(matmul), platforms=("cuda",), disabled_checks=[check])(X, W)
    assert calls(exported.mlir_module())
