"""Layers of `flax.nnx` whose bias, activation and residual are part of the product's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_bwgemm.flax.bodies import product_of
from jax_bwgemm.flax.product import Activation, block, finished

Array = jax.Array
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Linear(nnx.Linear):
    """`activation(inputs @ kernel + bias) + residual`: `flax.nnx.Linear`, and its arguments.

    The result is rounded once, from float32, to the dtype to which JAX promotes the layer's and the residual's.

    Args:
      activation: a name that `jax_bwgemm.matmul` knows, or a function, such as `jax.nn.gelu`, which the kernel has as
        `matmul`'s `epilogue`, in float32; XLA has one that no kernel can have, behind the layer. None for none.

    A call takes `residual`, of the result's shape, and what Flax's takes. ValueError for a `dot_general` of one's own.

    Example:
      >>> layer = jax_bwgemm.flax.nnx.Linear(256, 512, activation="gelu", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    """

    activation: Activation = None

    def __init__(self, in_features: int, out_features: int, *, activation: Activation = None, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.activation = activation

    def __call__(self, inputs: Array, out_sharding: Any = None, *, residual: Array | None = None) -> Array:
        return finished(product_of(nnx.Linear, self, inputs, out_sharding), self.activation, residual)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, and its arguments, with `activation` and `residual` as `Linear` has them."""

    activation: Activation = None

    def __init__(self, in_features: Any, out_features: Any, *, activation: Activation = None, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.activation = activation

    def __call__(self, inputs: Array, out_sharding: Any = None, *, residual: Array | None = None) -> Array:
        return finished(product_of(nnx.LinearGeneral, self, inputs, out_sharding), self.activation, residual)


class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum`, and its arguments, with `activation` and `residual` as `Linear` has them."""

    activation: Activation = None

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Any,
        bias_shape: Any = None,
        *,
        activation: Activation = None,
        **options: Any,
    ) -> None:
        super().__init__(einsum_str, kernel_shape, bias_shape, **options)
        self.activation = activation

    def __call__(
        self,
        inputs: Array,
        einsum_str: str | None = None,
        out_sharding: Any = None,
        *,
        residual: Array | None = None,
    ) -> Array:
        return finished(product_of(nnx.Einsum, self, inputs, einsum_str, out_sharding), self.activation, residual)


class MLP(nnx.Module):
    """`down_proj(activation(up_proj(inputs))) + residual`, of two `Linear`, by `jax_bwgemm.mlp` where that takes their
    dtypes.

    Args:
      in_features: of the inputs.
      hidden_features: of what is between the two.
      out_features: of the result; None for `in_features`.
      activation: as for `Linear`.
      layers: options for one layer alone, by its name, as in `{"down_proj": {"kernel_init": nnx.initializers.zeros}}`.
      options: those of `flax.nnx.Linear`, for every layer; `rngs` must be among them.
    """

    _names: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        layers: Mapping[str, Mapping[str, Any]] = _NO_OPTIONS,
        **options: Any,
    ) -> None:
        if unknown := layers.keys() - set(self._names):
            raise ValueError(f"`layers` requires names of {', '.join(self._names)}, got {', '.join(sorted(unknown))}")
        self.activation = activation
        out_features = in_features if out_features is None else out_features
        for name in self._names:
            sizes = (hidden_features, out_features) if name == "down_proj" else (in_features, hidden_features)
            setattr(self, name, Linear(*sizes, **{**options, **layers.get(name, {})}))

    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        *firsts, last = (getattr(self, name) for name in self._names)
        products = [product_of(nnx.Linear, layer, inputs) for layer in firsts]
        hidden = jnp.zeros(last.in_features, products[0].result.dtype)  # of which nothing but the dtype is read
        down = product_of(nnx.Linear, last, hidden)
        return block(products, down, self.activation, residual, lambda x: last(x, residual=residual))


class GatedMLP(MLP):
    """`down_proj(activation(gate_proj(inputs)) * up_proj(inputs)) + residual`, of three `Linear`.

    SwiGLU with the activation "silu", GEGLU with "gelu". Arguments are those of `MLP`.
    """

    _names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, *sizes: Any, activation: Activation = "silu", **options: Any) -> None:
        super().__init__(*sizes, activation=activation, **options)
