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
from flax import linen as nn
from flax import nnx
from jax import lax

from jax_bwgemm.contract import contract, leave
from jax_bwgemm.dot_general import canonical_dot
from jax_bwgemm.facts.contraction import Contraction, of_dot_general
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.mlp import gated_mlp, mlp
from jax_bwgemm.ops.functions import Bound, traced
from jax_bwgemm.ops.reference import OPS
from jax_bwgemm.runtime.config import current

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
_NOT_POINTWISE = "it is not pointwise in the product"
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

    @property
    def dtype(self) -> Any:
        return self.result.dtype

    def __add__(self, bias: Array) -> Product | Array:
        """With the layer's bias; where that is none that a kernel adds, JAX's sum, whose errors are the errors."""
        assert self.bias is None  # a layer of Flax's has one
        shape = self.result.shape
        if bias.ndim != self.ndim or any(own not in (1, size) for own, size in zip(bias.shape, shape, strict=True)):
            return finished(self) + bias
        result = self.result.update(dtype=jnp.result_type(self.result.dtype, bias))
        return dataclasses.replace(self, bias=bias, result=result)


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

    numbers, result = canonical_dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    contraction = of_dot_general(lhs.ndim, rhs.ndim, numbers)
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
        leave(current().on_fallback, what, contraction)
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

    A function that no epilogue has is XLA's, of the rounded sums, which `on_fallback` is told. ValueError for a
    residual of another shape, or an unknown name; TypeError for an activation that is none.
    """
    name = named(activation)
    if isinstance(product, Product):
        is_named = name is not None or activation is None
        found = _chained(product, name, residual) if is_named else _traced(product, activation, residual)
        if isinstance(found, _Fused):
            return contract(
                product.a,
                product.b,
                found.bound.operands,
                contraction=found.bound.contraction,
                out_dtype=found.dtype,
                epilogue=found.bound.epilogue,
                precision=product.precision,
                out_sharding=product.out_sharding,
                settings=current(),
            )[0]
        what = f"the activation {getattr(activation, '__name__', type(activation).__name__)} of a product of "
        what += f"{product.result.dtype}{list(product.result.shape)}"
        leave(current().on_fallback, what, found)
    out = finished(product) if isinstance(product, Product) else product
    act = OPS[name] if name else activation
    out = act(out) if callable(act) else out
    _check_residual(residual, jnp.shape(out))
    return out if residual is None else out + residual


@dataclasses.dataclass(frozen=True)
class _Fused:
    """What follows a product, as an epilogue, and the dtype of the result."""

    bound: Bound
    dtype: Any


def _chained(product: Product, name: str | None, residual: Any) -> _Fused:
    """Of an activation that an epilogue knows by its name."""
    contraction = product.contraction
    _check_residual(residual, product.result.shape)
    bias, others = _operands(product, residual)
    ones = [[i for i, size in enumerate(x.shape) if size == 1] for x in bias]
    modes = ["".join(mode for i, mode in enumerate(contraction.out) if i not in own) for own in ones]
    extras = (*modes, *(contraction.out for _ in others))
    operands = (*(lax.squeeze(x, own) for x, own in zip(bias, ones, strict=True)), *others)
    epilogue = chain(has_bias=bool(bias), activation=name, has_residual=bool(others))
    bound = Bound(dataclasses.replace(contraction, extras=extras), epilogue, operands)
    return _Fused(bound, jnp.result_type(product.result.dtype, *others))


def _traced(product: Product, activation: Any, residual: Any) -> _Fused | str:
    """Of a function; or why no epilogue has it."""
    if _is_module(activation):
        return "a module of Flax's makes or changes variables, which a kernel cannot"
    try:
        made = jax.eval_shape(activation, product.result)
    except Exception as error:  # behind the layer, it raises that again, or does without being traced
        return f"it cannot be traced apart ({type(error).__name__})"
    if not isinstance(made, jax.ShapeDtypeStruct) or made.shape != product.result.shape:
        return _NOT_POINTWISE
    _check_residual(residual, made.shape)
    if not jnp.issubdtype(made.dtype, jnp.floating):
        return f"it returns {made.dtype}, which is no float"
    bias, others = _operands(product, residual)

    def function(acc: Array, *operands: Array) -> Array:
        out: Array = activation(acc + operands[0] if bias else acc)
        return out + operands[-1] if others else out

    sums = product.result.update(dtype=jnp.dtype("float32"))
    try:
        bound = traced(function, sums, (*bias, *others)).bound(product.contraction)
    except ValueError:
        return _NOT_POINTWISE
    return bound if isinstance(bound, str) else _Fused(bound, jnp.result_type(made.dtype, *others))


def _operands(product: Product, residual: Any) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The bias, and the residual, if there is one."""
    bias = () if product.bias is None else (product.bias,)
    return bias, () if residual is None else (jnp.asarray(residual),)


def _check_residual(residual: Any, shape: tuple[int, ...]) -> None:
    if residual is not None and jnp.shape(residual) != shape:
        raise ValueError(
            f"`residual` requires the result's shape {shape}, got {jnp.shape(residual)}: broadcast it first"
        )


def _is_module(activation: Any) -> bool:
    """Or a method of one, or a function that has one of linen's, which would keep our tracers as its parameters; nnx
    refuses these itself."""
    if isinstance(activation, functools.partial):
        return _is_module(activation.func)
    if isinstance(getattr(activation, "__self__", activation), nn.Module | nnx.Module):
        return True
    cells = getattr(activation, "__closure__", None) or ()
    return any(isinstance(cell.cell_contents, nn.Module) for cell in cells)


def block(
    firsts: Sequence[Product | Array],
    down: Product | Array | None,
    activation: Activation,
    residual: Any,
    then: Callable[[Array], Array],
) -> Array:
    """`activation(first)`, times the second of `firsts` if there are two, through a last layer: fused forward and
    backward where `mlp` and `gated_mlp` take it. `down` has the last layer's weights, if it is a product, and `then`
    is that layer."""
    name, products = named(activation), [x for x in (*firsts, down) if isinstance(x, Product)]
    if name is None or len(products) <= len(firsts) or not _is_of_one_kind(products, residual):
        hidden = finished(firsts[0], activation)
        return then(hidden if len(firsts) == 1 else hidden * finished(firsts[1]))
    biases = [None if x.bias is None else lax.squeeze(x.bias, range(x.bias.ndim - 1)) for x in products]
    x, weights = products[0].a, [product.b for product in products]
    how: dict[str, Any] = {"activation": name, "residual": residual, "precision": products[-1].precision}
    if len(firsts) == 1:
        return mlp(x, *weights, bias_in=biases[0], bias_out=biases[1], **how)
    bias_gate, bias_up, bias_down = biases
    return gated_mlp(x, *weights, bias_gate=bias_gate, bias_up=bias_up, bias_down=bias_down, **how)


def _is_of_one_kind(products: Sequence[Product], residual: Any) -> bool:
    """Whether all is of one dtype that kernels have, of one precision, and all but the last have a bias or none has."""
    arrays = [x for product in products for x in (product.a, product.b, product.bias, product.result)]
    dtypes = {x.dtype for x in (*arrays, residual) if x is not None}
    is_precise_alike = all(product.precision == products[0].precision for product in products)
    have_bias = {product.bias is None for product in products[:-1]}
    return len(dtypes) == 1 and str(*dtypes) in _WIDE and is_precise_alike and len(have_bias) == 1


def named(activation: Activation) -> str | None:
    """By which an epilogue knows it; None if it does not. TypeError if it is none."""
    if isinstance(activation, str):
        chain(activation=activation)
        return activation
    if activation is not None and not callable(activation):
        raise TypeError(f"`activation` requires a name, a function or None, got {type(activation).__name__}")
    if isinstance(activation, functools.partial) and activation.func is jax.nn.gelu and not activation.args:
        return {True: "gelu", False: "gelu_exact"}.get(activation.keywords.get("approximate", True))
    return next((name for known, name in _KNOWN if known is activation), None)
