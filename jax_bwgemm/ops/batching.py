"""What `jax.vmap` makes of the primitives: one larger product, never a loop, and no copy of an operand it can share.

In order of preference the mapped axis v joins the rows of `a` (when `b` is not mapped), the batch l, or the columns of
`b` (when `a` has a batch of its own and is not mapped).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.ops.primitive import fused_matmul_p, fused_product, matmul_p, product
from jax_bwgemm.ops.reference import finish
from jax_bwgemm.ops.shape_rules import sizes

Batched = tuple[jax.Array, int | None]


@dataclasses.dataclass(frozen=True)
class _Merged:
    """Operands of one larger product; of the result as (batch, m, n), axis v is dimension `dim` of `shape`."""

    a: jax.Array
    b: jax.Array
    shape: tuple[int, ...]
    dim: int

    def bias(self, bias: jax.Array) -> jax.Array:
        """One that is not mapped, for all columns."""
        return jnp.tile(bias, self.shape[2]) if self.dim == 2 else bias

    def residual(self, residual: jax.Array, dim: int | None, result: tuple[int, ...]) -> jax.Array:
        """Laid out as the larger product's `result`; repeated where it is not mapped."""
        if dim is None:
            residual = jnp.broadcast_to(jnp.expand_dims(residual, self.dim), self.shape)
        else:
            residual = jnp.moveaxis(residual, dim, self.dim)
        return residual.reshape(result)

    def split(self, out: jax.Array) -> Batched:
        return out.reshape(self.shape), self.dim


def _matmul_batch_rule(args: Any, dims: Any, **params: Any) -> Batched:
    merged = _merged(args, dims, params["a_major"], params["b_major"])
    return merged.split(product(merged.a, merged.b, **params))


def _fused_matmul_batch_rule(args: Any, dims: Any, *, epilogue: Epilogue, **params: Any) -> tuple[Any, Any]:
    extras = list(zip(epilogue.operands, args[2:], dims[2:], strict=True))
    if dims[:2] == (None, None) or any(x.place != "mn" and dim is not None for x, _, dim in extras):
        return _batch_outside(args[:2], dims[:2], [extra[1:] for extra in extras], epilogue=epilogue, **params)
    majors = params["a_major"], params["b_major"]
    merged = _merged(args[:2], dims[:2], *majors)
    result = sizes(merged.a.shape, merged.b.shape, *majors)[:3]
    own = [merged.residual(value, dim, result) if x.place == "mn" else merged.bias(value) for x, value, dim in extras]
    outs = fused_product(merged.a, merged.b, own, epilogue=epilogue, **params)
    return tuple(zip(*map(merged.split, outs), strict=True))  # type: ignore[return-value]


def _batch_outside(
    args: Any, dims: Any, extras: Sequence[Batched], *, epilogue: Epilogue, out_dtype: Any, **params: Any
) -> tuple[Any, Any]:
    """A kernel takes one vector of a kind, so a mapped one is added to the product's float32; and where only what is
    added is mapped, there is one product."""
    params |= {"epilogue": Epilogue(), "out_dtype": jnp.dtype("float32")}
    acc = product(*args, **params)[None] if dims == (None, None) else _front(*_matmul_batch_rule(args, dims, **params))
    values = []
    for x, (value, dim) in zip(epilogue.operands, extras, strict=True):
        front = _front(value, dim)
        values.append(front if x.place == "mn" else front[:, None, None, :])
    (v,) = jnp.broadcast_shapes(acc.shape[:1], *(value.shape[:1] for value in values))
    acc = jnp.broadcast_to(acc, (v, *acc.shape[1:]))
    outs = finish(acc, epilogue, values, out_dtype)
    return outs, (0,) * len(outs)


def _merged(args: Any, dims: Any, a_major: str, b_major: str) -> _Merged:
    (a, b), (a_dim, b_dim) = args, dims
    v = a.shape[a_dim] if a_dim is not None else b.shape[b_dim]
    a_v, b_v = _front(a, a_dim), _front(b, b_dim)
    batch, m, n, _ = sizes(a_v.shape[1:], b_v.shape[1:], a_major, b_major)
    rows_stack = a_major == "k"  # (l, m, k): l and m are neighbours
    if a_dim is not None and b_dim is None:
        if b.shape[0] == 1:
            rows = _merge(a_v, 0, 3)[None] if rows_stack else _merge(a_v, 0, 2)
            return _Merged(rows, b, (v, batch, m, n), 0)
        return _Merged(_into(a, a_dim, 1 if rows_stack else 2), b, (batch, v, m, n), 1)
    if rows_stack and b_v.shape[1] == 1 and batch > 1:
        return _Merged(_merge(a_v, 1, 3), _merge(b_v, 0, 2), (v, batch, m, n), 0)
    if a_dim is None and batch > 1 and a.shape[0] > 1:
        return _Merged(a, _into(b, b_dim, 2 if b_major == "n" else 1), (batch, m, v, n), 2)
    if a_dim is not None:
        a_v, b_v = (jnp.broadcast_to(x, (v, batch, *x.shape[2:])) for x in (a_v, b_v))
    return _Merged(_merge(a_v, 0, 2), _merge(b_v, 0, 2), (v, batch, m, n), 0)


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
