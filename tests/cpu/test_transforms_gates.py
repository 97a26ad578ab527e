"""Derivatives of gelu and silu behind a product, and what is kept for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms import BF16, F32, arrays

import jax_bwgemm
from tests.cases import GATES

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.long
@pytest.mark.parametrize("activation", GATES)
def test_higher_derivatives_of_a_gate(activation):
    """Through the rounded input and the slope, in both modes."""
    a, b = (x.astype(F32) for x in arrays((5,), (5, 8)))

    def nth(f, n):
        fun = functools.reduce(lambda g, d: d(g), [jax.jacfwd, jax.jacrev, jax.jacfwd][:n], f)
        with jax.default_matmul_precision("highest"):
            return fun(a)

    for n in (1, 2, 3):
        got = nth(lambda a: jax_bwgemm.matmul(a, b, activation=activation), n)
        np.testing.assert_allclose(got, nth(lambda a: getattr(jax.nn, activation)(a @ b), n), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", GATES)
def test_what_a_gate_keeps_for_its_gradient(activation):
    """One array of the result's size and dtype: the slope, not what goes in, nor float32."""
    a, b, bias, residual = arrays((24, 16), (16, 40), (40,), (24, 40))

    def f(a, b, bias, residual):
        return jax_bwgemm.matmul(a, b, bias=bias, activation=activation, residual=residual)

    _, pullback = jax.vjp(f, a, b, bias, residual)
    kept = [x for x in jax.tree.leaves(pullback) if np.size(x) >= 24 * 40]
    assert [(x.size, x.dtype) for x in kept] == [(24 * 40, BF16)]


@pytest.mark.parametrize("activation", GATES)
def test_gates_of_the_largest_and_of_no_number(activation):
    """As jax.nn has it: an infinity times no slope at all is NaN."""
    rows = jnp.asarray([[3e38], [1e20], [100.0], [-100.0], [-1e20], [-3e38], [np.inf], [-np.inf], [np.nan]], F32)
    one = jnp.ones((1, 1), F32)
    got = jax_bwgemm.matmul(rows, one, activation=activation, precision="highest")
    np.testing.assert_array_equal(got, getattr(jax.nn, activation)(rows))
    assert np.isnan(got).ravel().tolist() == [False] * 7 + [True] * 2
    slopes = jax.vmap(jax.grad(lambda x: jax_bwgemm.matmul(x[None], one, activation=activation)[0, 0]))(rows[2:4])
    np.testing.assert_array_equal(slopes, [[1.0], [0.0]])
