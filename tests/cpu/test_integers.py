"""Products of integers are exact and wrap around, with a bias and a residual too."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm

pytestmark = pytest.mark.usefixtures("quiet")

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def draw(shape, dtype, seed=0):
    """Over all of its range."""
    bounds = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def exact(a, b, *added, out_dtype):
    """Modulo 2**64, whose rest modulo any shorter dtype is the same."""
    with np.errstate(over="ignore"):
        return sum((x.astype(np.int64) for x in added), a.astype(np.int64) @ b.astype(np.int64)).astype(out_dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_bias_and_a_residual_are_added_exactly(dtype):
    a, b, bias, residual = (draw(s, dtype, i) for i, s in enumerate([(5, 33), (33, 7), (7,), (5, 7)]))
    for relu, has_bias, has_residual in itertools.product((None, "relu"), (False, True), (False, True)):
        added = [bias] * has_bias + [residual] * has_residual
        given = {"bias": bias} if has_bias else {}
        given |= {"residual": residual} if has_residual else {}
        want = exact(a, b, *added, out_dtype=dtype)
        if relu is None:
            np.testing.assert_array_equal(jax_bwgemm.matmul(a, b, **given), want)
            np.testing.assert_array_equal(jax.jit(jax_bwgemm.matmul)(a, b, **given), want)
        elif dtype == "int32":
            argument = exact(a, b, *added[:has_bias], out_dtype=dtype)
            want = np.maximum(argument, 0) + (residual if has_residual else 0)
            np.testing.assert_array_equal(jax_bwgemm.matmul(a, b, **given, activation=relu), want)


@pytest.mark.parametrize("dtypes", [*itertools.product(("int8", "uint8"), repeat=2)], ids="-".join)
def test_one_byte_operands_into_int32(dtypes):
    a, b = (draw(s, dtype) for s, dtype in zip([(3, 4096), (4096, 5)], dtypes, strict=True))
    bias = np.ones(5, np.int32)
    got = jax_bwgemm.matmul(a, b, out_dtype=jnp.int32, bias=bias)
    np.testing.assert_array_equal(got, exact(a, b, bias, out_dtype="int32"))


def test_a_gram_product():
    a, residual = draw((4, 4096), "int8"), draw((4, 4), "int32")
    got = jax_bwgemm.gram(a, out_dtype=jnp.int32, residual=residual)
    np.testing.assert_array_equal(got, exact(a, a.T, residual, out_dtype="int32"))


def test_int64():
    with jax.enable_x64(True):
        a, b, residual = (draw(s, "int64", i) for i, s in enumerate([(3, 9), (9, 2), (3, 2)]))
        got = jax_bwgemm.matmul(a, b, residual=residual)
        assert got.dtype == "int64"
        np.testing.assert_array_equal(got, exact(a, b, residual, out_dtype="int64"))
        assert jax_bwgemm.matmul(a, b, activation="silu").dtype == "int64"


def test_a_scale_and_an_activation_are_float32s():
    """Of the exact int32 sums, not of ones that wrapped around in the result's dtype."""
    a = jnp.full((1, 1024), 100, jnp.int8)
    assert jax_bwgemm.matmul(a, a.T, alpha=2.0**-18)[0, 0] == 39
    assert jax_bwgemm.matmul(a, a.T, out_dtype=jnp.int32, alpha=0.5, bias=jnp.ones(1, jnp.int32))[0, 0] == 5120001
    assert jax_bwgemm.matmul(a, a.T, out_dtype=jnp.int32, activation="sigmoid")[0, 0] == 1
