"""What XLA computes where no kernel of ours does: the same values, dtypes and epilogue, from `lax.dot_general`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.facts.epilogue import Epilogue, Input, Node
from jax_bwgemm.facts.problem import FP8_DTYPES, INT8_DTYPES

OPS: dict[str, Callable[..., jax.Array]] = {
    "add": lambda x, y: jnp.add(*_alike(x, y)),
    "mul": lambda x, y: jnp.multiply(*_alike(x, y)),
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "leaky_relu": jax.nn.leaky_relu,
}  # what the operations of an epilogue mean, and what JAX differentiates


def reference(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    a_major: str,
    b_major: str,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any = None,
    **_: Any,
) -> tuple[jax.Array, ...]:
    """The primitives' results (l, m, n), from their operands and params."""
    acc_dtype = jnp.dtype("int32" if str(a.dtype) in INT8_DTYPES else "float32")
    if epilogue.is_identity and out_dtype in (a.dtype, acc_dtype) and str(out_dtype) not in FP8_DTYPES:
        return (_dot(a, b, a_major, b_major, out_dtype, precision),)
    acc = _dot(a, b, a_major, b_major, acc_dtype, precision)
    return finish(acc, epilogue, operands, out_dtype)


def finish(acc: jax.Array, epilogue: Epilogue, operands: Sequence[jax.Array], out_dtype: Any) -> tuple[jax.Array, ...]:
    """All results of `epilogue`, in `acc`'s dtype and rounded once. `operands` in its order; they broadcast."""
    known: dict[str, Any] = {x.role: value for x, value in zip(epilogue.operands, operands, strict=True)}
    known = {role: value.astype(acc.dtype) for role, value in known.items()}
    known |= {role: jnp.asarray(value, acc.dtype) for role, value in epilogue.scalars} | {"acc": acc}
    return tuple(round_to(evaluate(node, known), out_dtype) for _, node in epilogue.results)


def evaluate(node: Node, known: Mapping[str, jax.Array]) -> jax.Array:
    """`node` of inputs by their roles."""
    if isinstance(node, Input):
        return known[node.role]
    return OPS[node.op](*(evaluate(arg, known) for arg in node.args))


def _alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcast in so many words, which `jax.numpy_rank_promotion("raise")` demands; a scalar is left alone."""
    if x.ndim == y.ndim or 0 in (x.ndim, y.ndim):
        return x, y
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape)


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
