"""What XLA computes where no kernel of ours does: the same values, dtypes and epilogue, from `lax.dot_general`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def reference(
    a: jax.Array,
    b: jax.Array,
    *bias: jax.Array,
    a_major: str,
    b_major: str,
    out_dtype: Any,
    alpha: float,
    activation: str | None = None,
    **_: Any,
) -> jax.Array:
    """The primitives' result (l, m, n), from their operands and params."""
    if alpha == 1.0 and activation is None and not bias and out_dtype in (a.dtype, jnp.float32):
        return _dot(a, b, a_major, b_major, out_dtype)
    acc = _dot(a, b, a_major, b_major, jnp.dtype("float32"))
    return apply_epilogue(acc, bias[0] if bias else None, alpha=alpha, activation=activation, out_dtype=out_dtype)


def apply_epilogue(
    acc: jax.Array, bias: jax.Array | None, *, alpha: float, activation: str | None, out_dtype: Any
) -> jax.Array:
    """`activation(alpha * acc + bias)` in `acc`'s dtype, rounded once; `bias` broadcasts against `acc`."""
    if alpha != 1.0:
        acc = acc * jnp.asarray(alpha, acc.dtype)
    if bias is not None:
        acc = acc + bias.astype(acc.dtype)
    if activation == "relu":
        acc = jax.nn.relu(acc)
    return acc.astype(out_dtype)


def _dot(a: jax.Array, b: jax.Array, a_major: str, b_major: str, dtype: Any) -> jax.Array:
    """A shared `b` meets all rows at once where they are neighbours; any other shared operand is repeated.

    The unrepeated forms would transpose what is larger, and XLA:CPU (jax 0.12) sums some of them in bfloat16.
    """
    k_a, k_b = 2 if a_major == "k" else 1, 1 if b_major == "n" else 2
    if b.shape[0] == 1 and a_major == "k":
        return lax.dot_general(a, b[0], (((k_a,), (k_b - 1,)), ((), ())), preferred_element_type=dtype)
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    a, b = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (a, b))
    return lax.dot_general(a, b, (((k_a,), (k_b,)), ((0,), (0,))), preferred_element_type=dtype)
