"""Layers of `flax.linen` whose bias, activation and residual are part of the product's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict, freeze
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype

from jax_bwgemm.flax.bodies import check_layers, product_of
from jax_bwgemm.flax.product import Activation, Product, block, finished

Array = jax.Array
_OPTIONS = tuple(name for name in nn.Dense.__dataclass_fields__ if name not in ("features", "parent", "name"))


class Dense(nn.Dense):
    """`activation(inputs @ kernel + bias) + residual`: `flax.linen.Dense`, and its attributes.

    The result is rounded once, from float32, to the dtype to which JAX promotes the activation's and the residual's.

    Attributes:
      activation: a name that `jax_bwgemm.matmul` knows, or a function, such as `jax.nn.gelu`, which the kernel has as
        `matmul`'s `epilogue`, in float32; XLA has one that no kernel can have, such as an `nn.Module`, behind the
        layer, with a `FallbackWarning`. None for none.

    A call takes `residual`, of the result's shape, and what Flax's takes. ValueError for a `dot_general` of one's own.

    Example:
      >>> layer = jax_bwgemm.flax.linen.Dense(512, activation="gelu", dtype=jnp.bfloat16)
    """

    activation: Activation = None

    @nn.compact
    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        return finished(product_of(nn.Dense, self, inputs), self.activation, residual)


class DenseGeneral(nn.DenseGeneral):
    """`flax.linen.DenseGeneral`, and its attributes, with `activation` and `residual` as `Dense` has them."""

    activation: Activation = None

    @nn.compact
    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        return finished(product_of(nn.DenseGeneral, self, inputs), self.activation, residual)


class Einsum(nn.Einsum):
    """`flax.linen.Einsum`, and its attributes, with `activation` and `residual` as `Dense` has them."""

    activation: Activation = None

    @nn.compact
    def __call__(self, inputs: Array, einsum_str: str | None = None, *, residual: Array | None = None) -> Array:
        return finished(product_of(nn.Einsum, self, inputs, einsum_str), self.activation, residual)


class _Waiting(nn.Dense):
    """A dense layer whose product waits, or does not."""

    @nn.compact
    def product(self, inputs: Array) -> Product | Array:
        found: Product | Array = product_of(nn.Dense, self, inputs)
        return found

    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        return finished(self.product(inputs), residual=residual)


class MLP(nn.Module):
    """`down_proj(activation(up_proj(inputs))) + residual`, of two `Dense`, by `jax_bwgemm.mlp` where that takes their
    dtypes and the activation is a name that `matmul` knows, or JAX's function of it, such as `jax.nn.gelu`.

    Attributes:
      hidden_features: of what is between the two.
      out_features: of the result; None for the inputs'.
      activation: as for `Dense`.
      layers: attributes of one layer alone, by its name, as in `{"down_proj": {"kernel_init": nn.initializers.zeros}}`.

    The others are `flax.linen.Dense`'s, for every layer.
    """

    hidden_features: int
    out_features: int | None = None
    activation: Activation = "gelu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = initializers.lecun_normal()
    bias_init: Any = initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    layers: Mapping[str, Mapping[str, Any]] = FrozenDict()

    _names: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")

    def __post_init__(self) -> None:
        check_layers(self.layers, self._names, _OPTIONS, "flax.linen.Dense")
        self.layers = freeze({name: dict(options) for name, options in self.layers.items()})  # so that it is hashable
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        features = inputs.shape[-1] if self.out_features is None else self.out_features
        *firsts, last = (
            self._dense(name, features if name == "down_proj" else self.hidden_features) for name in self._names
        )
        products = [layer.product(inputs) for layer in firsts]
        hidden = jnp.zeros(self.hidden_features, products[0].dtype)  # of which nothing but the dtype is read
        down = last.product(hidden)
        return block(products, down, self.activation, residual, lambda x: last(x, residual=residual))

    @nn.nowrap
    def _dense(self, name: str, features: int) -> Any:
        shared = ("use_bias", "dtype", "param_dtype", "precision", "kernel_init", "bias_init", "promote_dtype")
        options = {option: getattr(self, option) for option in shared} | dict(self.layers.get(name, {}))
        return _Waiting(features, name=name, **options)


class GatedMLP(MLP):
    """`down_proj(activation(gate_proj(inputs)) * up_proj(inputs)) + residual`, of three `Dense`.

    SwiGLU with the activation "silu", GEGLU with "gelu": by `jax_bwgemm.gated_mlp`, on the conditions of `MLP`, whose
    attributes it has.
    """

    activation: Activation = "silu"

    _names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
