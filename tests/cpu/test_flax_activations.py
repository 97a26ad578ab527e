"""Activations of the layers of `jax_bwgemm.flax` that are no name: what is fused, what is XLA's, and the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
ours = pytest.importorskip("jax_bwgemm.flax")

BF16, F32 = jnp.bfloat16, jnp.float32
KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), F32)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        atol = tolerance * float(jnp.abs(w).max() + 1e-3)
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=0, atol=atol)


PROMOTING: dict[str, Callable[[Any], Any]] = {
    "a number on the device": lambda v: v * jnp.float32(2),
    "an array": lambda v: v * jnp.arange(24.0),
    "a cast": lambda v: v.astype(F32),
    "an int": lambda v: v.astype(jnp.int32),
    "a number": lambda v: v * 2.0,
    "there and back": lambda v: (v.astype(F32) * 2).astype(v.dtype),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("activation", PROMOTING.values(), ids=PROMOTING)
def test_the_result_has_the_dtype_of_the_activation(activation: Any) -> None:
    for dtype in (BF16, F32):
        plain = nnx.Linear(16, 24, dtype=dtype, rngs=nnx.Rngs(0))
        layer = ours.nnx.Linear(16, 24, dtype=dtype, activation=activation, rngs=nnx.Rngs(0))
        want = activation(plain(X))
        atol = 1 if want.dtype == jnp.int32 else 0.02
        close(layer(X), want, atol)
        residual = jnp.ones((4, 24), BF16)
        close(layer(X, residual=residual), want + residual, atol)


@pytest.mark.usefixtures("quiet")
def test_a_bias_of_another_dtype_promotes() -> None:
    made = [room.Linear(16, 24, dtype=F32, preferred_element_type=BF16, rngs=nnx.Rngs(0)) for room in (ours.nnx, nnx)]
    close(*(layer(X) for layer in made), 0.02)


@pytest.mark.usefixtures("quiet")
def test_modules_of_linen() -> None:
    """Their parameters, statistics and random numbers are made behind the layer, as Flax's are."""
    rngs = {"params": KEY, "dropout": jax.random.key(1)}

    class Closing(nn.Module):
        activation: Any
        room: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            inner = self.activation.copy()
            if self.room is ours.linen:
                return ours.linen.Dense(24, activation=lambda v: inner(v), name="dense")(x)
            return inner(nn.Dense(24, name="dense")(x))

    for module in (nn.PReLU(), nn.Dropout(0.5, deterministic=False), nn.BatchNorm(False)):
        layer = ours.linen.Dense(24, activation=module)
        variables = layer.init(rngs, X)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables))
        got, _ = layer.apply(variables, X, rngs=rngs, mutable=["batch_stats"])
        dense = {"params": {name: variables["params"][name] for name in ("kernel", "bias")}}
        own = {kind: found["activation"] for kind, found in variables.items() if "activation" in found}
        assert got.shape == (4, 24)
        if not isinstance(module, nn.Dropout):
            want, _ = module.apply(own, nn.Dense(24).apply(dense, X), mutable=["batch_stats"])
            close(got, want, 1e-4)
        (got, variables), (want, theirs) = (
            Closing(module, room).init_with_output(rngs, X) for room in (ours.linen, nn)
        )
        close(got, want, 1e-4)
        close(variables, theirs)


@pytest.mark.usefixtures("quiet")
def test_modules_of_nnx() -> None:
    plain = nnx.Linear(16, 24, rngs=nnx.Rngs(0))

    def dropout() -> Any:
        return nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def norm() -> Any:
        return nnx.BatchNorm(24, rngs=nnx.Rngs(0))

    for make in (dropout, norm, lambda: nnx.PReLU()):
        own, theirs = make(), make()
        for activation in (own, own.__call__, lambda v, own=own: own(v)):
            layer = ours.nnx.Linear(16, 24, activation=activation, rngs=nnx.Rngs(0))
            close(layer(X), theirs(plain(X)), 1e-4)
    layer = ours.nnx.Linear(16, 24, activation=dropout(), rngs=nnx.Rngs(0))
    step = nnx.jit(lambda layer: layer(X))
    assert (step(layer) != step(layer)).any()  # the count goes on


@pytest.mark.usefixtures("quiet")
def test_a_function_that_jax_cannot_trace_is_called_behind_the_layer() -> None:
    plain = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    layer = ours.nnx.Linear(16, 24, activation=lambda v: jnp.asarray(np.tanh(np.asarray(v))), rngs=nnx.Rngs(0))
    close(layer(X), jnp.tanh(plain(X)), 1e-4)


@pytest.mark.usefixtures("quiet")
def test_a_residual_has_the_shape_of_the_activation() -> None:
    layer = ours.nnx.Linear(16, 24, activation=jax.nn.glu, rngs=nnx.Rngs(0))
    close(layer(X, residual=jnp.ones((4, 12))), layer(X) + 1)
    with pytest.raises(ValueError, match=r"`residual` requires the result's shape \(4, 12\), got \(4, 24\)"):
        layer(X, residual=jnp.ones((4, 24)))
    layer.activation = jnp.sin
    with pytest.raises(ValueError, match=r"`residual` requires the result's shape \(4, 24\), got \(24,\)"):
        layer(X, residual=jnp.ones(24))


@pytest.mark.parametrize("given", [3, True, (), jnp.ones(24)], ids=str)
def test_what_is_no_activation(given: Any) -> None:
    for layer in (
        ours.nnx.Linear(16, 24, activation=given, rngs=nnx.Rngs(0)),
        ours.nnx.MLP(16, 24, activation=given, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(TypeError, match="`activation` requires a name, a function or None, got "):
            layer(X)


@pytest.mark.usefixtures("quiet")
def test_parameters_of_other_shapes_are_flaxs_sum() -> None:
    plain, layer = (room.Linear(16, 8, rngs=nnx.Rngs(0)) for room in (nnx, ours.nnx))
    for own in (plain, layer):
        own.kernel, own.bias = nnx.Param(jnp.ones((16, 1))), nnx.Param(jnp.arange(8.0))
    close(layer(X, residual=jnp.ones((4, 8))), plain(X) + 1)
    layer.bias = nnx.Param(jnp.ones(3))
    layer.kernel = nnx.Param(jnp.ones((16, 8)))
    with pytest.raises(TypeError, match=r"incompatible shapes for broadcasting: \(4, 8\), \(1, 3\)"):
        layer(X)
    block = ours.nnx.MLP(16, 8, rngs=nnx.Rngs(0))
    block.down_proj.kernel = nnx.Param(jnp.ones((8, 1)))
    assert block(X).shape == (4, 16)


REASONS = {
    "softmax": (jax.nn.softmax, "it is not pointwise in the product"),
    "glu": (jax.nn.glu, "it is not pointwise in the product"),
    "cos": (jnp.cos, "`cos` is no operation of an epilogue"),
    "Dropout": (nnx.Dropout(0.0), "a module of Flax's makes or changes variables"),
    "as_int": (lambda v: v.astype(jnp.int32), "it returns int32, which is no float"),
}


@pytest.mark.parametrize("activation, reason", REASONS.values(), ids=REASONS)
def test_what_is_xlas_says_so(activation: Any, reason: str) -> None:
    layer = ours.nnx.Linear(16, 24, activation=activation, rngs=nnx.Rngs(0))
    with jax_bwgemm.config(on_fallback="error"):
        message = rf"XLA computes the activation .* of a product of float32\[4, 24\]: {reason}"
        with pytest.raises(jax_bwgemm.FallbackError, match=message):
            layer(X)
