"""The models of `digits.py`: an MLP in linen, written with Flax's layers and with ours, and a transformer in nnx."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jax_bwgemm.flax import linen as our_linen
from jax_bwgemm.flax import replace

BF16, NUM_CLASSES = jnp.bfloat16, 10


class FlaxBlock(nn.Module):
    """A feed-forward block as one writes it in Flax, with the names that `MLP` gives its layers."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Dense(self.hidden, dtype=BF16, name="up_proj")(x))
        return x + nn.Dense(x.shape[-1], dtype=BF16, name="down_proj")(hidden)


class FlaxMlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        x = nn.gelu(nn.Dense(self.width, dtype=BF16, name="stem")(x))
        x = FlaxBlock(4 * self.width, name="block")(x)
        return nn.Dense(NUM_CLASSES, dtype=BF16, name="head")(x)


class OurMlp(nn.Module):
    """The same; its activations and the residual are parts of the products."""

    width: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        x = our_linen.Dense(self.width, activation="gelu", dtype=BF16, name="stem")(x)
        x = our_linen.MLP(4 * self.width, dtype=BF16, name="block")(x, residual=x)
        return our_linen.Dense(NUM_CLASSES, dtype=BF16, name="head")(x)


class Layer(nnx.Module):
    """Of a transformer: attention and a feed-forward block, each behind a norm and beside a residual."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        how: dict[str, Any] = {"dtype": BF16, "rngs": rngs}
        self.norms = nnx.Sequential(nnx.LayerNorm(width, **how), nnx.LayerNorm(width, **how))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, **how)
        self.up, self.down = nnx.Linear(width, 4 * width, **how), nnx.Linear(4 * width, width, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        before_attention, before_block = self.norms.layers
        x = x + self.attention(before_attention(x))
        return x + self.down(nnx.gelu(self.up(before_block(x))))


class Transformer(nnx.Module):
    """Reads an image as eight words, which are its rows."""

    def __init__(self, width: int, num_layers: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Linear(8, width, dtype=BF16, rngs=rngs)
        self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (8, width)))
        self.layers = nnx.Sequential(*(Layer(width, rngs) for _ in range(num_layers)))
        self.head = nnx.Linear(width, NUM_CLASSES, dtype=BF16, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embedding(images) + self.places[...].astype(BF16)
        return self.head(self.layers(x).mean(1))


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained: from parameters and images to logits."""

    apply: Callable[[Any, jax.Array], jax.Array]
    params: Any


def mlps(width: int, seed: int) -> tuple[Model, Model]:
    """Of Flax and of ours, with Flax's parameters."""
    plain, ours = FlaxMlp(width), OurMlp(width)
    params = plain.init(jax.random.key(seed), jnp.zeros((1, 8, 8)))
    return Model(plain.apply, params), Model(ours.apply, params)


def transformers(width: int, num_layers: int, seed: int) -> tuple[Model, Model]:
    """One, and another whose layers are swapped and which loads the first one's parameters."""
    models = [Transformer(width, num_layers, nnx.Rngs(seed + i)) for i in range(2)]
    models[1] = replace(models[1]).model
    params = nnx.state(models[0], nnx.Param)

    def split(model: Transformer) -> Model:
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        return Model(lambda params, images: nnx.merge(graph, params, rest)(images), params)

    return split(models[0]), split(models[1])
