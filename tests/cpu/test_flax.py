"""`dot_general` inside Flax's own layers: the same parameters, the same values, training that learns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.usefixtures("quiet")
BF16 = jnp.bfloat16


def ones_near(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), BF16)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda f: nn.Dense(24, dtype=BF16, dot_general=f), (4, 16)),
        (lambda f: nn.Dense(24, dtype=BF16, dot_general=f), (2, 3, 4, 16)),
        (lambda f: nn.Dense(24, dtype=BF16, dot_general=f), (16,)),
        (lambda f: nn.DenseGeneral((3, 8), dtype=BF16, dot_general=f), (4, 16)),
        (lambda f: nn.DenseGeneral(24, axis=(-2, -1), dtype=BF16, dot_general=f), (4, 2, 8)),
        (lambda f: nn.DenseGeneral(24, batch_dims=(0,), dtype=BF16, dot_general=f), (2, 4, 16)),
        (lambda f: nn.MultiHeadDotProductAttention(2, dtype=BF16, qkv_dot_general=f, out_dot_general=f), (2, 4, 16)),
    ],
    ids=["dense", "dense4", "dense1", "heads", "two-axes", "batch-dims", "attention"],
)
def test_linen(layer, shape):
    x = ones_near(*shape)
    ours, theirs = layer(jax_bwgemm.dot_general), layer(jax.lax.dot_general)
    variables = theirs.init(jax.random.key(0), x)
    assert jax.tree.structure(variables) == jax.tree.structure(ours.init(jax.random.key(0), x))

    def loss(module, variables):
        return (module.apply(variables, x).astype(jnp.float32) ** 2).sum()

    (got, got_grad), (want, want_grad) = (
        jax.jit(jax.value_and_grad(functools.partial(loss, module)))(variables) for module in (ours, theirs)
    )
    np.testing.assert_allclose(got, want, rtol=0.02)
    for g, w in zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad), strict=True):
        np.testing.assert_allclose(g, w, atol=0.02 * max(1.0, float(jnp.abs(w).max())), rtol=0)


def test_linen_cls():
    layer = nn.Dense(24, dtype=BF16, dot_general_cls=lambda: jax_bwgemm.dot_general)
    assert layer.init_with_output(jax.random.key(0), ones_near(4, 16))[0].shape == (4, 24)


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_nnx(preferred):
    x = ones_near(4, 16)

    def make(f):
        return nnx.Linear(16, 24, dtype=BF16, dot_general=f, rngs=nnx.Rngs(0), preferred_element_type=preferred)

    got, want = make(jax_bwgemm.dot_general)(x), make(jax.lax.dot_general)(x)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.03)


def test_layers_that_ask_for_more_than_tf32_say_so(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "warn")
    layer = nn.Dense(24, dot_general=jax_bwgemm.dot_general, precision="highest")
    with pytest.warns(jax_bwgemm.FallbackWarning, match="float32 operands are multiplied as TF32, .* got highest"):
        layer.init(jax.random.key(0), jnp.ones((4, 16)))
