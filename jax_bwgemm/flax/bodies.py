"""Flax's own layers, run as they are but for their product: from an input to a `Product` that waits."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from jax_bwgemm.dot_general import dot_general as our_dot_general
from jax_bwgemm.flax import product
from jax_bwgemm.flax.product import Product

LINEN = (nn.Dense, nn.DenseGeneral, nn.Einsum)
NNX = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_OWN: dict[type, dict[str, Any]] = {  # what a layer calls in place of its product
    nn.Dense: {"dot_general": product.dot_general, "dot_general_cls": None},
    nn.DenseGeneral: {"dot_general": product.dot_general, "dot_general_cls": None},
    nnx.Linear: {"dot_general": product.dot_general},
    nnx.LinearGeneral: {"dot_general": product.dot_general, "dot_general_cls": None},
    nnx.Einsum: {"einsum_op": product.einsum},
}
_DEFAULTS = (None, lax.dot_general, jnp.einsum, our_dot_general)


class _With:
    """A module as Flax's code sees it, but for some attributes."""

    def __init__(self, module: Any, attributes: dict[str, Any]) -> None:
        self.__dict__ |= attributes
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def why_not(base: type, module: Any) -> str | None:
    """None if its product is JAX's own, or ours."""
    given = (getattr(module, name) for name in _OWN.get(base, {}))
    own = next((x for x in given if not any(x is default for default in _DEFAULTS)), None)
    return None if own is None else f"it has a product of its own, {getattr(own, '__name__', own)}"


def check_layers(layers: Any, names: Collection[str], known: Collection[str], kind: str) -> None:
    """Of a block's `layers`, options by the name of a layer: TypeError if they are none, ValueError for a name or an
    option that is not known; `kind` is the class that has these."""
    if not isinstance(layers, Mapping) or not all(isinstance(options, Mapping) for options in layers.values()):
        raise TypeError(f"`layers` requires a mapping of names to mappings of options, got {layers!r}")
    if unknown := set(layers) - set(names):
        raise ValueError(f"`layers` requires names of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    for name, options in layers.items():
        if unknown := set(options) - set(known):
            got = ", ".join(sorted(unknown))
            raise ValueError(
                f"`layers` requires options of `{kind}`, got {got} for {name}: use one of {', '.join(known)}"
            )


def product_of(base: type, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The `Product` that `base`, a layer of Flax's, makes of its inputs with the parameters of `module`, or an array
    where an einsum is none, or a bias none of a kernel's; of linen, in a compact method of `module`.

    ValueError if `module` has a product of its own.
    """
    if reason := why_not(base, module):
        rule = "no `dot_general`, `dot_general_cls` or `einsum_op`"
        raise ValueError(f"`{base.__name__}` of `jax_bwgemm.flax` requires {rule}, but {reason}: use Flax's layer")
    if base is nn.Einsum:
        return _linen_einsum(module, *args, **kwargs)
    body: Any = inspect.unwrap(base.__call__)
    return body(_With(module, _OWN[base]), *args, **kwargs)


def _linen_einsum(module: Any, inputs: jax.Array, einsum_str: str | None = None) -> Product | jax.Array:
    """It calls `jnp.einsum` in so many words, so its parameters are made here as it makes them."""
    subscripts = nn.merge_param("einsum_str", module.einsum_str, einsum_str).replace(" ", "")
    if "->" not in subscripts or subscripts.count(",") != 1:
        raise ValueError(f"`einsum_str` requires two operands and `->`, as in 'bsd,df->bsf', got {subscripts!r}")
    kernel, bias = module.param("kernel", module.kernel_init, module.shape, module.param_dtype), None
    if module.use_bias:
        shape, spread = module._get_bias_shape(subscripts, inputs, kernel)
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    dot = product.einsum(subscripts, inputs, kernel, **options)
    return dot if bias is None else dot + jnp.reshape(bias, spread)
