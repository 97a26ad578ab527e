"""What `jax.vmap` makes of the primitives: one larger product, never a loop, and no copy of an operand it can share.

In order of preference the mapped axis v joins the rows of `a` (when `b` is not mapped), the batch l, or the columns of
`b` (when `a` has a batch of its own and is not mapped).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jax_bwgemm.primitive import fused_matmul_p, fused_product, matmul_p, product
from jax_bwgemm.reference import apply_epilogue
from jax_bwgemm.shape_rules import sizes

Batched = tuple[jax.Array, int | None]
Bind = Callable[..., jax.Array]


def _matmul_batch_rule(args: Any, dims: Any, **params: Any) -> Batched:
    return _batch(functools.partial(product, **params), args, dims, params["a_major"], params["b_major"])


def _fused_matmul_batch_rule(args: Any, dims: Any, **params: Any) -> Batched:
    (a, b, *bias), (a_dim, b_dim, *bias_dim) = args, dims
    if bias and bias_dim[0] is not None:
        return _batch_bias((a, b), (a_dim, b_dim), bias[0], bias_dim[0], **params)

    def bind(a: jax.Array, b: jax.Array, repeats: int = 1) -> jax.Array:
        return fused_product(a, b, jnp.tile(bias[0], repeats) if bias else None, **params)

    return _batch(bind, (a, b), (a_dim, b_dim), params["a_major"], params["b_major"], has_columns=bool(bias))


def _batch_bias(
    args: Any,
    dims: Any,
    bias: jax.Array,
    bias_dim: int,
    activation: str | None,
    out_dtype: Any,
    alpha: float,
    **params: Any,
) -> Batched:
    """A kernel takes one bias, so a mapped one is added to the product's float32."""
    params |= {"alpha": 1.0, "out_dtype": jnp.dtype("float32")}
    mapped = dims != (None, None)
    acc = _front(*_matmul_batch_rule(args, dims, **params)) if mapped else product(*args, **params)[None]
    bias = jnp.moveaxis(bias, bias_dim, 0)[:, None, None, :]
    return apply_epilogue(acc, bias, alpha=alpha, activation=activation, out_dtype=out_dtype), 0


def _batch(bind: Bind, args: Any, dims: Any, a_major: str, b_major: str, has_columns: bool = False) -> Batched:
    (a, b), (a_dim, b_dim) = args, dims
    v = a.shape[a_dim] if a_dim is not None else b.shape[b_dim]
    a_v, b_v = _front(a, a_dim), _front(b, b_dim)
    batch, m, n, _ = sizes(a_v.shape[1:], b_v.shape[1:], a_major, b_major)
    rows_stack = a_major == "k"  # (l, m, k): l and m are neighbours
    if a_dim is not None and b_dim is None:
        if b.shape[0] == 1:
            out = bind(_merge(a_v, 0, 3)[None] if rows_stack else _merge(a_v, 0, 2), b)
            return out.reshape(v, batch, m, n), 0
        out = bind(_into(a, a_dim, 1 if rows_stack else 2), b)
        return out.reshape(batch, v, m, n), 1
    if rows_stack and b_v.shape[1] == 1 and batch > 1:
        a_rows = _merge(a_v, 1, 3)
        return bind(a_rows, _merge(b_v, 0, 2)).reshape(v, batch, m, n), 0
    if a_dim is None and batch > 1 and a.shape[0] > 1:
        out = bind(a, _into(b, b_dim, 2 if b_major == "n" else 1), *([v] if has_columns else []))
        return out.reshape(batch, m, v, n), 2
    if a_dim is not None:
        a_v, b_v = (jnp.broadcast_to(x, (v, batch, *x.shape[2:])) for x in (a_v, b_v))
    return bind(_merge(a_v, 0, 2), _merge(b_v, 0, 2)).reshape(v, batch, m, n), 0


def _front(x: jax.Array, dim: int | None) -> jax.Array:
    """(v, ...), or (1, ...) if `x` is not mapped."""
    return x[None] if dim is None else jnp.moveaxis(x, dim, 0)


def _into(x: jax.Array, dim: int, axis: int) -> jax.Array:
    """The mapped axis `dim` as the slow part of the unmapped array's `axis`."""
    return _merge(jnp.moveaxis(x, dim, axis), axis, axis + 2)


def _merge(x: jax.Array, start: int, stop: int) -> jax.Array:
    size = 1
    for dim in x.shape[start:stop]:
        size *= dim
    return x.reshape(*x.shape[:start], size, *x.shape[stop:])


batching.primitive_batchers[matmul_p] = _matmul_batch_rule
batching.primitive_batchers[fused_matmul_p] = _fused_matmul_batch_rule
