"""`MLP` and `GatedMLP` of `jax_bwgemm.flax`: layers that are put in the place of theirs, and their `layers`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
ours = pytest.importorskip("jax_bwgemm.flax")

pytestmark = pytest.mark.usefixtures("quiet")
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)


def close(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


class Doubled(nnx.Linear):
    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return 2 * super().__call__(inputs, out_sharding)


def own_product(*args: Any, **kwargs: Any) -> jax.Array:
    return 2 * jax.lax.dot_general(*args, **kwargs)


def lora(m: int, n: int) -> Any:
    layer = nnx.LoRALinear(m, n, lora_rank=2, rngs=nnx.Rngs(1))
    layer.lora.lora_b[...] = jnp.ones((2, n))
    return layer


PUT = {
    "LoRA": lora,
    "a subclass": lambda m, n: Doubled(m, n, rngs=nnx.Rngs(1)),
    "its own product": lambda m, n: nnx.Linear(m, n, dot_general=own_product, rngs=nnx.Rngs(1)),
    "an activation": lambda m, n: ours.nnx.Linear(m, n, activation="relu", rngs=nnx.Rngs(1)),
    "several": lambda m, n: nnx.Sequential(nnx.Linear(m, n, rngs=nnx.Rngs(1)), nnx.relu),
    "Flax's": lambda m, n: nnx.Linear(m, n, rngs=nnx.Rngs(1)),
}


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("make", PUT.values(), ids=PUT)
def test_what_is_put_in_the_place_of_a_layer_is_called(make: Any, name: str) -> None:
    for kind in (ours.nnx.MLP, ours.nnx.GatedMLP):
        block = kind(16, 32, activation="gelu", rngs=nnx.Rngs(0))
        if not hasattr(block, name):
            continue
        sizes = (32, 16) if name == "down_proj" else (16, 32)
        setattr(block, name, make(*sizes))
        first = block.up_proj if kind is ours.nnx.MLP else block.gate_proj
        hidden = jax.nn.gelu(first(X)) * (1 if kind is ours.nnx.MLP else block.up_proj(X))
        close(block(X), block.down_proj(hidden))
        close(block(X, residual=X), block.down_proj(hidden) + X)
        close(nnx.jit(block)(X), block(X))


def test_layers_have_no_activation_of_their_own() -> None:
    own = {"down_proj": {"activation": "relu"}}
    rule = "`layers` requires options of `flax.{}`, got activation for down_proj: use one of use_bias, dtype, "
    with pytest.raises(ValueError, match=rule.format("nnx.Linear")):
        ours.nnx.MLP(16, 32, layers=own, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rule.format("linen.Dense")):
        ours.linen.GatedMLP(32, layers=own)


@pytest.mark.parametrize("given", [["up_proj"], {"up_proj": 3}])
def test_layers_that_are_none(given: Any) -> None:
    for make in (functools.partial(ours.nnx.MLP, 16, 32, rngs=nnx.Rngs(0)), functools.partial(ours.linen.MLP, 32)):
        with pytest.raises(TypeError, match="`layers` requires a mapping of names to mappings of options, got"):
            make(layers=given)


def test_a_module_with_layers_is_hashable() -> None:
    module = ours.linen.MLP(32, layers={"down_proj": {"use_bias": False}})
    assert module.layers == {"down_proj": {"use_bias": False}} and hash(module) == hash(module.clone())
    variables = module.init(jax.random.key(0), X)
    apply = jax.jit(lambda module, *args: module.apply(*args), static_argnums=0)
    close(apply(module, variables, X), module.apply(variables, X))
