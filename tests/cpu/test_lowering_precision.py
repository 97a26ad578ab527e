"""The StableHLO of every dtype and precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from lowered import BF16, W, X, calls, hlo, matmul, struct, swizzles

import jax_bwgemm
from jax_bwgemm.facts.arch import by_name

DTYPES = [
    ("float32", "float32", "float32", [16, 32, 16]),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", [16, 16, 16]),
    ("float8_e4m3fn", "float8_e5m2", "float32", [16, 16, 16]),
    ("int8", "int8", "int32", [16, 16, 16]),
]


@pytest.mark.parametrize("a_dtype, b_dtype, out_dtype, atoms", DTYPES)
def test_dtypes(artifacts_dir, a_dtype, b_dtype, out_dtype, atoms):
    x, w = struct(512, 256, dtype=a_dtype), struct(256, 1024, dtype=b_dtype)
    f = functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype, device="b200", on_fallback="error")
    (call,) = calls(hlo(f, x, w))
    assert call["target"] == by_name("b200").target_of(a_dtype) and [atom for _, atom in swizzles(call)] == atoms
    (call,) = calls(hlo(lambda x, w: f(x, w.T), x, struct(1024, 256, dtype=b_dtype)))
    assert call["b_major"] == "k" and [atom for _, atom in swizzles(call)] == [16, 16, 16]


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
