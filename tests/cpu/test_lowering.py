"""The StableHLO that a CPU host emits for CUDA: attributes, majors, no transposes; and every road to the fallback."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry

import jax_bwgemm
from jax_bwgemm import decision
from jax_bwgemm.artifacts import PARAM_KINDS
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant

BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((512, 256), BF16)
W = jax.ShapeDtypeStruct((256, 1024), BF16)
CUDA = {"device": "h200", "on_fallback": "error"}


def hlo(f, *args, platform="cuda") -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


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


def matmul(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **CUDA, **kwargs)


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
        "cta_m": "128 : i32",
        "mma_n": "256 : i32",
        "cluster_m": "2 : i32",
        "cluster_n": "1 : i32",
        "num_threads": f"{entry.num_threads} : i32",
        "smem_bytes": f"{entry.smem_bytes} : i32",
        "raster_group": "4 : i32",
        "raster_along_n": "1 : i32",
        "param_bytes": "408 : i32",
        "alpha": "1.000000e+00 : f32",
        "a_box": "dense<[64, 128, 1]>",
        "b_box": "dense<[64, 256, 1]>",
        "c_box": "dense<[16, 64, 1]>",
        "swizzle_bytes": "dense<[128, 128, 64]>",
        "params": f"dense<{params}>",
    }
    assert {name: call.get(name) for name in want} == want
    config = re.search(r"mhlo.backend_config = \{(.*?)\}", hlo(matmul, X, W))
    assert set(re.findall(r"(\w+) = ", config[1])) == set(want)
    assert call["types"] == "(tensor<1x512x256xbf16>, tensor<1x256x1024xbf16>) -> tensor<1x512x1024xf32>"


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
    assert (call["target"], call["cta_m"], call["mma_n"]) == ("sm_100a", "128 : i32", "256 : i32")


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


def test_transpose_stays_where_the_other_major_is_illegal(artifacts_dir):
    operands = jax.ShapeDtypeStruct((64, 9), BF16), jax.ShapeDtypeStruct((64, 64), BF16)
    text = hlo(lambda x, w: matmul(x.T, w), *operands)
    assert majors(text) == ["kn"]  # rows of 9 elements cannot be stepped over, rows of 64 can
    assert majors(hlo(lambda x, w: matmul(x.T, w, tile="128x128x64_cta1_cluster1x1"), *operands)) == ["kn"]
    assert "stablehlo.transpose" in text


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


def test_unaligned_falls_back(artifacts_dir):
    w = jax.ShapeDtypeStruct((256, 1001), BF16)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="XLA computes 512x1001x256 .*: TMA requires a row pitch"):
        text = hlo(lambda a, b: jax_bwgemm.matmul(a, b, device="h200"), X, w)
    assert not calls(text)
    assert "dot_general" in text
    with pytest.raises(jax_bwgemm.FallbackError, match="TMA requires a row pitch"):
        hlo(matmul, X, w)


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
