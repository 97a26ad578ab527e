"""The product inside a layer of Flax's, which waits for what follows it, so that one kernel can do both.

Flax's own code runs as it is, with `dot_general` or `einsum` of this room in place of JAX's: it makes the parameters,
promotes them and adds the bias, of which a `Product` takes note. Knows no parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum
from jax import lax

from jax_bwgemm.contract import contract
from jax_bwgemm.dot_general import result_of
from jax_bwgemm.facts.contraction import Contraction, of_dot_general
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.mlp import gated_mlp, mlp
from jax_bwgemm.ops.functions import Bound, traced
from jax_bwgemm.ops.reference import OPS
from jax_bwgemm.runtime.config import current, report_fallback

Array = jax.Array
Activation = str | Callable[[Array], Array] | None

_KNOWN: tuple[tuple[Any, str], ...] = (
    (jax.nn.relu, "relu"),
    (jax.nn.gelu, "gelu"),
    (jax.nn.silu, "silu"),
    (jax.nn.sigmoid, "sigmoid"),
    (jax.nn.leaky_relu, "leaky_relu"),
    (jnp.tanh, "tanh"),
    (lax.tanh, "tanh"),
)


_WIDE = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Product:
    """Of `a` and `b`, with `result`'s shape and dtype. A bias that Flax has added has dimensions of size 1, or all."""

    a: Array
    b: Array
    contraction: Contraction
    result: jax.ShapeDtypeStruct
    precision: Any
    out_sharding: Any
    bias: Array | None = None

    @property
    def ndim(self) -> int:
        return len(self.result.shape)

    def __add__(self, bias: Array) -> Product:
        assert self.bias is None  # a layer of Flax's has one
        return dataclasses.replace(self, bias=bias)


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> Product:
    """In place of `lax.dot_general`, whose errors are the errors."""

    result = result_of(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    contraction = of_dot_general(lhs.ndim, rhs.ndim, dimension_numbers)
    return Product(lhs, rhs, contraction, result, precision, out_sharding)


def einsum(
    subscripts: str,
    lhs: Array,
    rhs: Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Product | Array:
    """In place of `jnp.einsum`; what is no contraction of two arrays, such as a sum of one, is XLA's."""
    dot = functools.partial(
        jnp.einsum,
        subscripts,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    result = jax.eval_shape(dot, lhs, rhs)
    contraction = _contraction(subscripts, lhs, rhs)
    if isinstance(contraction, str):
        what = f"the einsum {subscripts} of {lhs.dtype}{list(lhs.shape)} and {rhs.dtype}{list(rhs.shape)}"
        report_fallback(current().on_fallback, what, contraction)
        return dot(lhs, rhs)
    return Product(lhs, rhs, contraction, result, precision, out_sharding)


def _contraction(subscripts: str, lhs: Array, rhs: Array) -> Contraction | str:
    """Or why it is none."""
    operands, out, _ = opt_einsum.parser.parse_einsum_input((subscripts, lhs, rhs))
    a, b = operands.split(",")
    try:
        found = Contraction(a, b, out)
    except ValueError as error:
        return str(error)
    sizes = dict(zip(a, lhs.shape, strict=True))
    if any(sizes.get(mode, size) != size for mode, size in zip(b, rhs.shape, strict=True)):
        return "a contraction requires one size of each mode, got one that is repeated"
    return found


def finished(product: Product | Array, activation: Activation = None, residual: Any = None) -> Array:
    """`activation(product) + residual`, in the dtype to which JAX promotes them, rounded once.

    A function that no epilogue has is XLA's, of the rounded sums. ValueError for a residual of another shape, or an
    unknown name.
    """
    name = named(activation)
    act = OPS[name] if name else activation
    shape = (product.result if isinstance(product, Product) else product).shape
    if residual is not None and jnp.shape(residual) != shape:
        raise ValueError(
            f"`residual` requires the result's shape {shape}, got {jnp.shape(residual)}: broadcast it first"
        )
    found = _bound(product, activation, residual) if isinstance(product, Product) else None
    if not isinstance(product, Product) or found is None:
        out = finished(product) if isinstance(product, Product) else product
        out = act(out) if callable(act) else out
        return out if residual is None else out + residual
    return contract(
        product.a,
        product.b,
        found.operands,
        contraction=found.contraction,
        out_dtype=jnp.result_type(product.result.dtype, *found.operands),
        epilogue=found.epilogue,
        precision=product.precision,
        out_sharding=product.out_sharding,
        settings=current(),
    )[0]


def _bound(product: Product, activation: Activation, residual: Any) -> Bound | None:
    """What follows a product as an epilogue, if it is one; `activation` by its name, or as traced."""
    name, contraction = named(activation), product.contraction
    bias = () if product.bias is None else (product.bias,)
    others = () if residual is None else (jnp.asarray(residual),)
    if name is None and callable(activation):

        def function(acc: Array, *operands: Array) -> Array:
            out = activation(acc + operands[0] if bias else acc)
            return out + operands[-1] if others else out

        sums = product.result.update(dtype=jnp.dtype("float32"))
        try:
            found = traced(function, sums, (*bias, *others))
        except ValueError:  # it is not pointwise
            return None
        whole = found.bound(contraction) if found.is_single else None
        return whole if isinstance(whole, Bound) else None
    ones = [[i for i, size in enumerate(x.shape) if size == 1] for x in bias]
    modes = ["".join(mode for i, mode in enumerate(contraction.out) if i not in own) for own in ones]
    extras = (*modes, *(contraction.out for _ in others))
    operands = (*(lax.squeeze(x, own) for x, own in zip(bias, ones, strict=True)), *others)
    epilogue = chain(has_bias=bool(bias), activation=name, has_residual=bool(others))
    return Bound(dataclasses.replace(contraction, extras=extras), epilogue, operands)


def block(
    firsts: Sequence[Product], down: Product, activation: Activation, residual: Any, then: Callable[[Array], Array]
) -> Array:
    """`activation(first)`, times the second of `firsts` if there are two, through a last layer: fused forward and
    backward where `mlp` and `gated_mlp` take it. `down` has the last layer's weights, and `then` is that layer."""
    name, products = named(activation), (*firsts, down)
    if name is None or not _is_of_one_kind(products, residual):
        hidden = finished(firsts[0], activation)
        return then(hidden if len(firsts) == 1 else hidden * finished(firsts[1]))
    biases = [None if x.bias is None else lax.squeeze(x.bias, range(x.bias.ndim - 1)) for x in products]
    weights = [product.b for product in products]
    how: dict[str, Any] = {"activation": name, "residual": residual, "precision": down.precision}
    if len(firsts) == 1:
        return mlp(firsts[0].a, *weights, bias_in=biases[0], bias_out=biases[1], **how)
    bias_gate, bias_up, bias_down = biases
    return gated_mlp(firsts[0].a, *weights, bias_gate=bias_gate, bias_up=bias_up, bias_down=bias_down, **how)


def _is_of_one_kind(products: Sequence[Product], residual: Any) -> bool:
    """Whether all is of one dtype that kernels have, of one precision, and all but the last have a bias or none has."""
    arrays = [x for product in products for x in (product.a, product.b, product.bias, product.result)]
    dtypes = {x.dtype for x in (*arrays, residual) if x is not None}
    is_precise_alike = all(product.precision == products[0].precision for product in products)
    have_bias = {product.bias is None for product in products[:-1]}
    return len(dtypes) == 1 and str(*dtypes) in _WIDE and is_precise_alike and len(have_bias) == 1


def named(activation: Activation) -> str | None:
    """By which an epilogue knows it; None if it does not."""
    if isinstance(activation, str):
        chain(activation=activation)
        return activation
    if isinstance(activation, functools.partial) and activation.func is jax.nn.gelu and not activation.args:
        return {True: "gelu", False: "gelu_exact"}.get(activation.keywords.get("approximate", True))
    return next((name for known, name in _KNOWN if known is activation), None)
