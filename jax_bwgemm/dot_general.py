"""`dot_general`: a drop-in for `lax.dot_general` that maps its dimension numbers to the primitive's majors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import Operands, checked_params, why_not_ours
from jax_bwgemm.runtime.config import report_fallback, resolve

Array = jax.Array
Axes = tuple[int, ...]


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`lax.dot_general` on this package's kernels, for `flax` layers and `jnp.einsum(..., _dot_general=)`.

    Any number of contracting and batch dimensions. An operand whose dimensions already stand in the order batch, free,
    contracting, or batch, contracting, free, is taken as it is; others are transposed. Ours are the dtypes that
    `matmul` names; all else is handed to `lax.dot_general` as it came, and `on_fallback` decides how loudly. A float8
    result of ours saturates, and gradients are `matmul`'s.

    Args:
      lhs: array.
      rhs: array.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: as for `lax.dot_general`; "highest" for float32 operands, and an algorithm that the kernels do not
        compute, are left to XLA. It means nothing for other operands: their products are exact, sums are float32.
      preferred_element_type: the result's dtype, int32 for integers to use a kernel; None for what lax makes of the
        operands.
      out_sharding: left to XLA, if given.
      tile: as for `matmul`.
      on_fallback: as for `matmul`.
      device: as for `matmul`.
      emulate: as for `matmul`.

    Returns:
      An array of shape (batch..., lhs free..., rhs free...).

    Example:
      >>> layer = flax.linen.Dense(512, dtype=jnp.bfloat16, dot_general=jax_bwgemm.dot_general)
    """
    settings = resolve(on_fallback, device, emulate)
    result = _result(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    plain: dict[str, Any] = {"alpha": 1.0, "bias": None, "activation": None, "residual": None}
    params = checked_params(lhs, rhs, out_dtype=result.dtype, **plain, tile=tile, precision=precision)
    split = _split(lhs, rhs, dimension_numbers)
    problem = split.problem(lhs, rhs, params)
    if reason := _why_not(problem, params["precision"], out_sharding):
        report_fallback(settings.on_fallback, str(problem), reason)
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
    return split.operands(lhs, rhs).multiply(params, settings).reshape(result.shape)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The axes of both operands, in the order in which the product pairs them."""

    lhs_batch: Axes
    rhs_batch: Axes
    lhs_contract: Axes
    rhs_contract: Axes
    lhs_free: Axes
    rhs_free: Axes

    def operands(self, lhs: Array, rhs: Array) -> Operands:
        """`lhs` as the rows, unless `rhs` is a (batch of) vectors: then that, so that the result is contiguous."""
        left = (lhs, self.lhs_batch, self.lhs_free, self.lhs_contract)
        right = (rhs, self.rhs_batch, self.rhs_free, self.rhs_contract)
        a, b = (left, right) if self.rhs_free else (right, left)
        a3, a_is_k_major = _as_rows(*a)
        b3, b_is_k_major = _as_rows(*b)
        return Operands(a3, b3, "k" if a_is_k_major else "m", "k" if b_is_k_major else "n")

    def problem(self, lhs: Array, rhs: Array, params: dict[str, Any]) -> Problem:
        """For its dtypes and its sizes; majors are not decided yet."""
        m, k = (math.prod(lhs.shape[i] for i in axes) for axes in (self.lhs_free, self.lhs_contract))
        n, batch = (math.prod(rhs.shape[i] for i in axes) for axes in (self.rhs_free, self.rhs_batch))
        dtypes = str(lhs.dtype), str(rhs.dtype), str(params["out_dtype"])
        return Problem(m, n, k, batch, *dtypes, a_batch=batch, b_batch=batch)


def _as_rows(x: Array, batch: Axes, free: Axes, contract: Axes) -> tuple[Array, bool]:
    """(l, free, contract) and True, or (l, contract, free) and False where that is how `x` is stored."""
    num, rows, k = (math.prod(x.shape[i] for i in axes) for axes in (batch, free, contract))
    if _is_sorted(batch + contract + free) and not _is_sorted(batch + free + contract):
        return x.reshape(num, k, rows), False
    return jnp.transpose(x, batch + free + contract).reshape(num, rows, k), True


def _split(lhs: Array, rhs: Array, dimension_numbers: Any) -> _Split:
    """Contracting pairs are ordered as `lhs` or as `rhs` stores them, whichever transposes fewer elements."""
    (lhs_c, rhs_c), (lhs_b, rhs_b) = dimension_numbers
    lhs_c, lhs_b = _positive(lhs_c, lhs.ndim), _positive(lhs_b, lhs.ndim)
    rhs_c, rhs_b = _positive(rhs_c, rhs.ndim), _positive(rhs_b, rhs.ndim)
    lhs_free = tuple(i for i in range(lhs.ndim) if i not in lhs_c + lhs_b)
    rhs_free = tuple(i for i in range(rhs.ndim) if i not in rhs_c + rhs_b)

    def ordered_by(axes: Axes) -> _Split:
        order = sorted(range(len(axes)), key=lambda i: axes[i])
        contract = tuple(lhs_c[i] for i in order), tuple(rhs_c[i] for i in order)
        return _Split(lhs_b, rhs_b, *contract, lhs_free, rhs_free)

    def transposed_elems(split: _Split) -> int:
        left = _is_in_place(split.lhs_batch, split.lhs_free, split.lhs_contract)
        right = _is_in_place(split.rhs_batch, split.rhs_free, split.rhs_contract)
        return (0 if left else lhs.size) + (0 if right else rhs.size)

    return min(ordered_by(lhs_c), ordered_by(rhs_c), key=transposed_elems)


def _why_not(problem: Problem, precision: Any, out_sharding: Any) -> str | None:
    if reason := why_not_ours(problem, precision):
        return reason
    return None if out_sharding is None else "`out_sharding` requires XLA's partitioner"


def _result(lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred: Any) -> jax.ShapeDtypeStruct:
    """By `lax.dot_general`'s own rule, so that its errors are the errors."""
    operands = (jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in (lhs, rhs))
    return jax.eval_shape(lambda x, y: lax.dot_general(x, y, dimension_numbers, precision, preferred), *operands)


def _is_in_place(batch: Axes, free: Axes, contract: Axes) -> bool:
    return _is_sorted(batch + free + contract) or _is_sorted(batch + contract + free)


def _is_sorted(axes: Axes) -> bool:
    return list(axes) == sorted(axes)


def _positive(axes: Sequence[int], rank: int) -> Axes:
    return tuple(int(axis) % rank for axis in axes)
