"""Layers of `flax.nnx` whose bias, activation and residual are part of the product's kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_bwgemm.flax.bodies import check_layers, product_of, why_not
from jax_bwgemm.flax.product import Activation, Product, block, finished

Array = jax.Array
_OPTIONS = tuple(inspect.getfullargspec(nnx.Linear.__init__).kwonlyargs)
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Linear(nnx.Linear):
    """`activation(inputs @ kernel + bias) + residual`: `flax.nnx.Linear`, and its arguments.

    The result is rounded once, from float32, to the dtype to which JAX promotes the activation's and the residual's.

    Args:
      activation: a name that `jax_bwgemm.matmul` knows, or a function, such as `jax.nn.gelu`, which the kernel has as
        `matmul`'s `epilogue`, in float32; XLA has one that no kernel can have, such as an `nnx.Module`, behind the
        layer, with a `FallbackWarning`. None for none.

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
    dtypes and the activation is a name that `matmul` knows, or JAX's function of it, such as `jax.nn.gelu`.

    What is put in the place of a layer, such as `nnx.LoRALinear`, is called as it is.

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
        check_layers(layers, self._names, _OPTIONS, "flax.nnx.Linear")
        self.activation = activation
        out_features = in_features if out_features is None else out_features
        for name in self._names:
            sizes = (hidden_features, out_features) if name == "down_proj" else (in_features, hidden_features)
            setattr(self, name, Linear(*sizes, **{**options, **layers.get(name, {})}))

    def __call__(self, inputs: Array, *, residual: Array | None = None) -> Array:
        *firsts, last = (getattr(self, name) for name in self._names)
        products, down = [_product(layer, inputs) for layer in firsts], None
        if _is_plain(last):
            hidden = jnp.zeros(last.in_features, products[0].dtype)  # of which nothing but the dtype is read
            down = product_of(nnx.Linear, last, hidden)
        return block(
            products, down, self.activation, residual, lambda x: finished(_product(last, x), residual=residual)
        )


def _product(layer: Any, inputs: Array) -> Product | Array:
    """It waits; but what was put in the place of a layer of the block's, such as LoRA's, is called as it is."""
    return product_of(nnx.Linear, layer, inputs) if _is_plain(layer) else layer(inputs)


def _is_plain(layer: Any) -> bool:
    """Whether it is nothing but a product and its bias."""
    is_linear = type(layer) is nnx.Linear or (type(layer) is Linear and layer.activation is None)
    return is_linear and why_not(nnx.Linear, layer) is None


class GatedMLP(MLP):
    """`down_proj(activation(gate_proj(inputs)) * up_proj(inputs)) + residual`, of three `Linear`.

    SwiGLU with the activation "silu", GEGLU with "gelu": by `jax_bwgemm.gated_mlp`, on the conditions of `MLP`, whose
    arguments it has.
    """

    _names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, *sizes: Any, activation: Activation = "silu", **options: Any) -> None:
        super().__init__(*sizes, activation=activation, **options)
