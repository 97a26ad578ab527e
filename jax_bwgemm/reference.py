"""What XLA computes where no kernel of ours does: the same values, dtypes and epilogue, from `lax.dot_general`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.problem import FP8_DTYPES, INT8_DTYPES
from jax_bwgemm.shape_rules import extras

_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def reference(
    a: jax.Array,
    b: jax.Array,
    *rest: jax.Array,
    a_major: str,
    b_major: str,
    out_dtype: Any,
    alpha: float,
    activation: str | None = None,
    precision: Any = None,
    **_: Any,
) -> jax.Array:
    """The primitives' result (l, m, n), from their operands and params."""
    acc_dtype = jnp.dtype("int32" if str(a.dtype) in INT8_DTYPES else "float32")
    is_identity = alpha == 1.0 and activation is None and not rest
    if is_identity and out_dtype in (a.dtype, acc_dtype) and str(out_dtype) not in FP8_DTYPES:
        return _dot(a, b, a_major, b_major, out_dtype, precision)
    acc = _dot(a, b, a_major, b_major, acc_dtype, precision)
    return apply_epilogue(acc, *extras((a, b, *rest)), alpha=alpha, activation=activation, out_dtype=out_dtype)


def apply_epilogue(
    acc: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    alpha: float,
    activation: str | None,
    out_dtype: Any,
) -> jax.Array:
    """`activation(alpha * acc + bias) + residual` in `acc`'s dtype, rounded once; `bias` and `residual` broadcast."""
    if alpha != 1.0:
        acc = acc * jnp.asarray(alpha, acc.dtype)
    if bias is not None:
        acc = _add(acc, bias)
    if activation is not None:
        acc = activate(acc, activation)
    if residual is not None:
        acc = _add(acc, residual)
    return round_to(acc, out_dtype)


def _add(acc: jax.Array, term: jax.Array) -> jax.Array:
    """Broadcast in so many words, which `jax.numpy_rank_promotion("raise")` demands."""
    shape = jnp.broadcast_shapes(acc.shape, term.shape)
    return jnp.broadcast_to(acc, shape) + jnp.broadcast_to(term.astype(acc.dtype), shape)


def activate(x: jax.Array, activation: str) -> jax.Array:
    """jax.nn's function of that name, gelu in its tanh form."""
    return _FUNCTIONS[activation](x)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`. 8-bit floats saturate, infinities too, as the kernels' conversions do; NaN stays NaN."""
    if str(dtype) in FP8_DTYPES:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _dot(a: jax.Array, b: jax.Array, a_major: str, b_major: str, dtype: Any, precision: Any) -> jax.Array:
    """A shared `b` meets all rows at once where they are neighbours; any other shared operand is repeated.

    The unrepeated forms would transpose what is larger, and XLA:CPU (jax 0.12) sums some of them in bfloat16; also of a
    stack of one, so that two matrices are multiplied as such.
    """
    k_a, k_b = 2 if a_major == "k" else 1, 1 if b_major == "n" else 2
    dims: Any
    if a.shape[0] == b.shape[0] == 1:
        dims = (((k_a - 1,), (k_b - 1,)), ((), ()))
        return lax.dot_general(a[0], b[0], dims, precision, preferred_element_type=dtype)[None]
    if b.shape[0] == 1 and a_major == "k":
        dims = (((k_a,), (k_b - 1,)), ((), ()))
        return lax.dot_general(a, b[0], dims, precision, preferred_element_type=dtype)
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    a, b = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (a, b))
    return lax.dot_general(a, b, (((k_a,), (k_b,)), ((0,), (0,))), precision, preferred_element_type=dtype)
