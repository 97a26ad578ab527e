"""`dot_general`: a drop-in for `lax.dot_general` that maps its dimension numbers to the primitive's contraction."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_bwgemm.contract import check_tile, refuse, why_not_ours
from jax_bwgemm.facts.contraction import of_dot_general
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import as_array, checked_params, weakly_typed
from jax_bwgemm.ops.primitive import product
from jax_bwgemm.ops.shape_rules import viewed
from jax_bwgemm.runtime.config import resolve

Array = jax.Array


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
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
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), or what else this JAX takes.
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

    Raises:
      TypeError: an operand that is no array, and what `lax.dot_general` raises.
      ValueError, FallbackError: as `matmul`.

    Example:
      >>> layer = flax.linen.Dense(512, dtype=jnp.bfloat16, dot_general=jax_bwgemm.dot_general)
    """
    settings = resolve(on_fallback, device, emulate, deterministic=deterministic)
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    numbers, result = canonical_dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    params = checked_params(lhs, rhs, out_dtype=result.dtype, tile=tile, precision=precision, out_sharding=out_sharding)
    contraction = of_dot_general(lhs.ndim, rhs.ndim, numbers)
    problem = viewed((lhs, rhs), contraction=contraction, **params)[1]
    if reason := why_not_ours(problem, params["precision"]):
        refuse(settings, problem, reason)
        return lax.dot_general(lhs, rhs, numbers, precision, preferred_element_type, out_sharding=out_sharding)
    if params["tile"] is not None:
        check_tile(params["tile"], problem, settings)
    out = product(lhs, rhs, contraction=contraction, settings=settings, **params)
    return weakly_typed(out) if result.weak_type else out


def canonical_dot(
    lhs: Array, rhs: Array, dimension_numbers: Any, precision: Any, preferred_element_type: Any, out_sharding: Any
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Canonical dimension numbers, and what the result is, by `lax.dot_general`'s own rule, so that its errors are the
    errors."""

    def dot(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)

    jaxpr = jax.make_jaxpr(dot)(jax.typeof(lhs), jax.typeof(rhs))
    eqn = next(eqn for eqn in jaxpr.eqns if eqn.primitive is lax.dot_general_p)
    out = jaxpr.out_avals[0]
    return eqn.params["dimension_numbers"], jax.ShapeDtypeStruct(out.shape, out.dtype, weak_type=out.weak_type)
