"""`gram`: the product of a matrix and its own transpose; and Newton-Schulz's iteration, which is made of such."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_bwgemm.contract import contract
from jax_bwgemm.facts.contraction import Contraction, of_matmul
from jax_bwgemm.facts.epilogue import axpby
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import as_array, checked_params, matmul, python_number
from jax_bwgemm.ops.reference import at_least_float32
from jax_bwgemm.ops.shape_rules import check_real, check_residual
from jax_bwgemm.runtime.config import resolve

Array = jax.Array
MUON = (3.4445, -4.775, 2.0315)  # Keller Jordan's, which bring singular values of 0.01 to 1 near 1 in five steps


def gram(
    a: ArrayLike,
    *,
    transpose_a: bool = False,
    alpha: float = 1.0,
    residual: ArrayLike | None = None,
    beta: float = 1.0,
    out_dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
    deterministic: str | None = None,
) -> Array:
    """`alpha * (a @ a^T) + beta * residual`, or of `a^T @ a`: BLAS's syrk, with both triangles of the result.

    For large matrices a kernel computes the tiles on and under the diagonal alone, half of all, and stores the others
    as their mirror images. What a kernel of ours computes is bitwise symmetric, if the residual is. Where the rows are
    sharded over devices, each has a part that is no symmetric product, and computes that as `matmul` does. The gradient
    is (g + g^T) a, one product.

    Args:
      a: array of shape (..., m, k); with `transpose_a` of (..., k, m), whose columns are then paired.
      alpha, beta: Python numbers.
      residual: array of the result's shape (..., m, m), symmetric: kernels may read its lower triangle alone. It is
        rounded to the output dtype, and added in float32.
      out_dtype, precision, out_sharding, on_fallback, device, emulate, deterministic: as `matmul`'s.
      tile: as `matmul`'s: one with `symmetric`, such as "128x256x64_cta1_cluster2x1_symmetric", whose cluster tiles are
        square, or any other, which computes all of the result.

    Returns:
      An array of shape (..., m, m).

    Raises:
      ValueError, TypeError: a vector, a residual of another shape, a `beta` without a residual, or what `matmul`
        refuses.
      FallbackError: as `matmul`.

    Example:
      >>> x = jnp.ones((512, 256), jnp.bfloat16)
      >>> jax.jit(jax_bwgemm.gram)(x).shape
      (512, 512)
    """
    a = as_array("a", a)
    if a.ndim < 2:
        raise ValueError(f"`gram` requires a matrix `a`, got shape {a.shape}")
    settings = resolve(on_fallback, device, emulate, deterministic=deterministic)
    contraction = contraction_of(a.ndim, transpose_a, residual is not None)
    stored = jax.ShapeDtypeStruct((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)
    pair = (stored, a) if transpose_a else (a, stored)  # as `matmul` takes them
    params = checked_params(*pair, out_dtype=out_dtype, tile=tile, precision=precision, out_sharding=out_sharding)
    params["epilogue"] = axpby(python_number("alpha", alpha), python_number("beta", beta), residual is not None)
    check_real("a", a, params["out_dtype"])
    if residual is not None:
        check_real("residual", residual, params["out_dtype"])
        check_residual(residual, (*a.shape[:-2], *pair[0].shape[-2:-1] * 2))
    elif beta != 1.0:
        raise ValueError(f"`beta` requires a `residual`, which it scales, got {beta} without one")
    others = () if residual is None else (as_array("residual", residual),)
    return contract(a, a, others, contraction=contraction, settings=settings, **params)[0]


@functools.lru_cache(maxsize=64)
def contraction_of(rank: int, transpose_a: bool, has_residual: bool) -> Contraction:
    """Of one array, as both factors."""
    found = of_matmul((2,) * rank, (2,) * rank)[0]
    batch = found.batch
    own = ("km", "kn") if transpose_a else ("mk", "nk")
    return Contraction(batch + own[0], batch + own[1], found.out, (found.out,) * has_residual, symmetric=True)


def newton_schulz(
    x: ArrayLike,
    *,
    steps: int = 5,
    coefficients: Sequence[float] | Sequence[Sequence[float]] = MUON,
    eps: float = 1e-7,
    dtype: DTypeLike = jnp.bfloat16,
    **options: Any,
) -> Array:
    """The orthogonal polar factor of `x`, nearly: U V^T of its singular value decomposition, as Muon's update has it.

    Each step is X <- a X + (b A + c A^2) X with A = X X^T, of X with at most as many rows as columns and at first a
    Frobenius norm of 1: two symmetric products, each for half of its operations, and one other.

    Args:
      x: array of shape (..., m, n), each matrix of which is one.
      steps: how many.
      coefficients: (a, b, c), with a not 0, or one such triple for each step. The default brings singular values of
        0.01 to 1 to about 0.7 to 1.2, which is what Muon wants; (1.5, -0.5, 0.0) converges to 1, slowly.
      eps: added to the norm.
      dtype: of what is multiplied, bfloat16 or float16.
      options: `matmul`'s and `gram`'s `precision`, `on_fallback`, `device`, `emulate` and `deterministic`.

    Returns:
      An array of x's shape and dtype.

    Raises:
      ValueError: a vector, coefficients that are no triples, or not one a step, an a of 0, or what `gram` refuses.

    Example:
      >>> update = jax.jit(jax_bwgemm.newton_schulz)(momentum)
    """
    x = as_array("x", x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`newton_schulz` requires a matrix `x` of floats, got {x.dtype}{list(x.shape)}")
    triples = _triples(coefficients, steps)
    is_tall = x.shape[-2] > x.shape[-1]
    own = x.swapaxes(-1, -2) if is_tall else x
    wide = own.astype(at_least_float32(own.dtype))
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    own = (wide / (norm + eps)).astype(dtype)
    scale = 1.0  # X is this times `own`: so the term a X is the residual of a product, as it is
    for a, b, c in triples:
        square = gram(own, alpha=scale * scale, **options)
        polynomial = gram(square, alpha=c / a, residual=square, beta=b / a, **options)
        own = matmul(polynomial, own, residual=own, **options)
        scale *= a
    found: Array = (own.astype(wide.dtype) * scale).astype(x.dtype)
    return found.swapaxes(-1, -2) if is_tall else found


def _triples(coefficients: Any, steps: int) -> list[tuple[float, float, float]]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"`steps` requires an int of at least 0, got {steps!r}")
    rows = list(coefficients)
    rows = rows if rows and isinstance(rows[0], Sequence) else [rows] * steps
    found = [tuple(python_number("coefficients", x) for x in row) for row in rows]
    if len(found) != steps or any(len(row) != 3 or row[0] == 0.0 for row in found):
        raise ValueError(f"`coefficients` requires (a, b, c) with a not 0, or {steps} of them, got {coefficients!r}")
    return [(a, b, c) for a, b, c in found]
