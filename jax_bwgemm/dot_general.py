"""`dot_general`: a drop-in for `lax.dot_general` that maps its dimension numbers to the primitive's contraction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.contract import check_tile, refuse, why_not_ours
from jax_bwgemm.facts.contraction import of_dot_general
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import checked_params
from jax_bwgemm.ops.primitive import product
from jax_bwgemm.ops.shape_rules import viewed
from jax_bwgemm.runtime.config import resolve

Array = jax.Array


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
    deterministic: str | None = None,
) -> Array:
    """`lax.dot_general` on this package's kernels, for `flax` layers and `jnp.einsum(..., _dot_general=)`.

    Any number of contracting and batch dimensions. An operand whose dimensions already stand in the order batch, free,
    contracting, or batch, contracting, free, is read as it lies; others are transposed. Ours are the dtypes that
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
      out_sharding: as for `lax.dot_general`.
      tile: as for `matmul`.
      on_fallback: as for `matmul`.
      device: as for `matmul`.
      emulate: as for `matmul`.
      deterministic: as for `matmul`.

    Returns:
      An array of shape (batch..., lhs free..., rhs free...).

    Example:
      >>> layer = flax.linen.Dense(512, dtype=jnp.bfloat16, dot_general=jax_bwgemm.dot_general)
    """
    settings = resolve(on_fallback, device, emulate, deterministic=deterministic)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    result = result_of(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    params = checked_params(lhs, rhs, out_dtype=result.dtype, tile=tile, precision=precision, out_sharding=out_sharding)
    contraction = of_dot_general(lhs.ndim, rhs.ndim, dimension_numbers)
    problem = viewed((lhs, rhs), contraction=contraction, **params)[1]
    if reason := why_not_ours(problem, params["precision"]):
        refuse(settings, problem, reason)
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
    if params["tile"] is not None:
        check_tile(params["tile"], problem, settings)
    return product(lhs, rhs, contraction=contraction, settings=settings, **params)


def result_of(
    lhs: Array, rhs: Array, dimension_numbers: Any, precision: Any, preferred_element_type: Any, out_sharding: Any
) -> jax.ShapeDtypeStruct:
    """By `lax.dot_general`'s own rule, so that its errors are the errors."""

    def dot(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)

    result: jax.ShapeDtypeStruct = jax.eval_shape(dot, jax.typeof(lhs), jax.typeof(rhs))
    return result
