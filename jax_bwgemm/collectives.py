"""Collective matmul: a product whose operand is gathered over a mesh axis, or whose result is reduced and scattered, in
steps: while a product runs, the next transfer is under way. Argument checks and docstrings; `ring` has the steps.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import as_array, of_one_dtype
from jax_bwgemm.ops.precision import canonical
from jax_bwgemm.ops.shape_rules import check_bias, check_real, check_residual, match_varying, matmul_shape, result_dtype
from jax_bwgemm.ring import Ring, gather_product, product_scatter
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array


def all_gather_matmul(
    a: ArrayLike,
    b: ArrayLike,
    axis_name: str,
    *,
    gather_dimension: int = -2,
    in_order: bool = True,
    num_chunks: int | None = None,
    out_dtype: DTypeLike | None = None,
    alpha: float = 1.0,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    precision: PrecisionLike = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array | tuple[Array, ...]:
    """`matmul(lax.all_gather(a, axis_name, axis=gather_dimension, tiled=True), b)`, in a `jax.shard_map`: while a shard
    is multiplied, the next one arrives.

    Differentiable in reverse mode. The gradient of `a` is `matmul_reduce_scatter` of the cotangent, as overlapped; that
    of `b` is one product of all gathered rows, which are kept for it as `lax.all_gather`'s would be (`jax.checkpoint`
    gathers them again). The argument of any activation but relu is then rounded to the output dtype, and XLA applies
    it; with a residual, relu's too.

    Args:
      a: array of shape (..., m, k), this device's shard.
      b: array of shape (k, n). Of stacks of products, `jax.vmap` makes one.
      axis_name: a manual axis of the surrounding `jax.shard_map`, of any size.
      gather_dimension: the dimension of `a` along which the shards lie, the rows (-2) or one before them.
      in_order: False for a tuple, of the result's rows that belong to this device's shard, to that of the next device
        along the axis, and so on around it. It saves a pass over the result, which puts them in order, and
        `matmul_reduce_scatter` takes it.
      num_chunks: parts into which a shard is divided, each of which travels and is multiplied by itself; None for 1.
        More help where transfers take longer than products. The gradient divides likewise.
      out_dtype, alpha, bias, activation, precision, tile, on_fallback, device, emulate: as `matmul`'s; `tile` is for
        the product of a part of a shard.
      residual: array of the result's shape; not for a tuple.

    Returns:
      An array of shape (..., m, n) whose `gather_dimension` is as many times larger as the axis has devices; or that
      many arrays of shape (..., m, n). They vary over the axis.

    Raises:
      ValueError, TypeError: an axis that is not manual here, a dimension that cannot be gathered, a `b` that is no
        matrix, or what `matmul` refuses.

    Example:
      >>> def up(x, w):  # a tensor-parallel layer; x is sharded along its rows, w along its columns
      ...     return jax_bwgemm.all_gather_matmul(x, w, "model", activation="relu")
      >>> jax.shard_map(up, mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model"))(x, w)
    """
    a, b = of_one_dtype(as_array("a", a), as_array("b", b))
    size, dim, num_chunks = _checked(
        "all_gather_matmul", a, b, axis_name, num_chunks, gather_dimension=gather_dimension
    )
    dtype = result_dtype(a.dtype, b.dtype, out_dtype)
    given = {name: x for name, x in (("bias", bias), ("residual", residual)) if x is not None}
    for name, x in given.items():
        check_real(name, x, dtype)
    if bias is not None:
        check_bias(bias, a.shape, b.shape)
    if residual is not None and not in_order:
        raise ValueError("`residual` requires `in_order=True`, got False; add its rows to those of each device")
    if residual is not None:
        shape = list(matmul_shape(a.shape, b.shape))
        shape[dim] *= size
        check_residual(residual, tuple(shape))
    settings = resolve(on_fallback, device, emulate)
    options = _options(settings, alpha=alpha, activation=activation, precision=precision, tile=tile)
    ring = Ring(axis_name, size, dim, in_order, num_chunks, dtype, options, settings)
    rounded = (jnp.asarray(x).astype(ring.out_dtype) for x in given.values())
    a, b, *extras, _ = match_varying(a, b, *rounded, lax.axis_index(axis_name))
    return gather_product(ring, a, b, dict(zip(given, extras, strict=True)))


def matmul_reduce_scatter(
    a: ArrayLike | tuple[ArrayLike, ...],
    b: ArrayLike,
    axis_name: str,
    *,
    scatter_dimension: int = -2,
    num_chunks: int | None = None,
    out_dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`lax.psum_scatter(matmul(a, b), axis_name, scatter_dimension=scatter_dimension, tiled=True)`, in a
    `jax.shard_map`: while a part of a sum travels, the next product runs.

    Sums travel in the result's dtype, or as `config(partial_sums="float32")` says; 8-bit floats in bfloat16. A device
    adds its product to them in float32 and rounds. What follows the sum (bias, activation) is for the caller to apply.
    Differentiable in reverse mode. The gradient of `a` is `all_gather_matmul` of the cotangent, as overlapped; that of
    `b` is one product of all rows.

    Args:
      a: array of shape (..., m, k): all rows, and this device's part of k; or a tuple of each device's rows from this
        one on, as `all_gather_matmul` returns with `in_order=False`: that saves a pass over them.
      b: array of shape (k, n), this device's part of k. Of stacks of products, `jax.vmap` makes one.
      axis_name: a manual axis of the surrounding `jax.shard_map`, of any size.
      scatter_dimension: the dimension of the result of which every device gets its part: the rows (-2) or one before
        them, a multiple of the axis's size.
      num_chunks: parts into which a device's share of the result is divided; None for 2. With 2 or more, a kernel adds
        what has arrived of one part while the next one travels; with 1, XLA adds it after the product. The gradient
        divides likewise.
      out_dtype, precision, tile, on_fallback, device, emulate: as `matmul`'s; `tile` is for the product of a part.

    Returns:
      An array of shape (..., m, n) whose `scatter_dimension` is divided by the axis's size.

    Raises:
      ValueError: an axis that is not manual here, a dimension that cannot be scattered or does not divide, a `b` that
        is no matrix, `deterministic="batch"` of a `config`, or what `matmul` refuses.

    Example:
      >>> def down(h, w):  # h is sharded along its columns, w along its rows; the result along its rows
      ...     return jax_bwgemm.matmul_reduce_scatter(h, w, "model")
      >>> jax.shard_map(down, mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P("model"))(h, w)
    """
    parts = [as_array("a", x) for x in (a if isinstance(a, tuple) else (a,))]
    if not parts:
        raise ValueError("`a` requires an array, or a tuple of one for each device of the axis, got an empty tuple")
    b = as_array("b", b)
    first, b = of_one_dtype(parts[0], b)
    size, dim, num_chunks = _checked(
        "matmul_reduce_scatter", first, b, axis_name, num_chunks, scatter_dimension=scatter_dimension
    )
    kinds = {(x.shape, x.dtype) for x in parts}
    if isinstance(a, tuple) and (len(parts) != size or len(kinds) > 1):
        got = ", ".join(str(jax.typeof(x)) for x in parts)
        raise ValueError(
            f"`a` requires {size} arrays of one shape and dtype for the devices of {axis_name!r}, got {got}"
        )
    if not isinstance(a, tuple) and first.shape[dim] % size:
        raise ValueError(
            f"`scatter_dimension` requires a size that is a multiple of the {size} devices of {axis_name!r}, got "
            f"{first.shape[dim]} in {first.shape}; pad `a` with zeros"
        )
    settings = resolve(on_fallback, device, emulate)
    if settings.is_batch_invariant:
        raise ValueError(
            '`deterministic` requires "run" for `matmul_reduce_scatter`, which adds the parts of a row in an order of '
            'its place, got "batch": gather `a` and `b` along their sum, and use `matmul`'
        )
    options = _options(settings, precision=precision, tile=tile)
    dtype, in_order = result_dtype(first.dtype, b.dtype, out_dtype), not isinstance(a, tuple)
    ring = Ring(axis_name, size, dim, in_order, num_chunks, dtype, options, settings)
    *parts, b, _ = match_varying(*(x.astype(first.dtype) for x in parts), b, lax.axis_index(axis_name))
    return product_scatter(ring, parts[0] if in_order else tuple(parts), b)


def _checked(
    what: str, a: Array, b: Array, axis_name: Any, num_chunks: Any, **dimension: Any
) -> tuple[int, int, int | None]:
    """The axis's size, the dimension counted from the end, and the number of chunks."""
    if isinstance(axis_name, tuple | list):
        raise ValueError(f"`axis_name` requires one axis, got {axis_name!r}; make one axis of them in the mesh")
    try:
        size = lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):  # unbound, not hashable, or an integer, which is no name
        raise ValueError(
            f"`axis_name` requires a manual axis of a surrounding `jax.shard_map`, got {axis_name!r}, which is "
            f"unbound; call `{what}` in the function that `jax.shard_map` maps over a mesh with that axis"
        ) from None
    chunks = _integer(num_chunks)
    if num_chunks is not None and (chunks is None or chunks < 1):
        raise ValueError(f"`num_chunks` requires None or a positive integer, got {num_chunks!r}")
    if b.ndim != 2:
        raise ValueError(f"`{what}` requires a matrix `b`, got the shape {b.shape}; map over stacks with `jax.vmap`")
    if a.ndim < 2:
        raise ValueError(f"`{what}` requires an `a` of rank 2 or more, got the shape {a.shape}; reshape it to one row")
    matmul_shape(a.shape, b.shape)
    ((name, given),) = dimension.items()
    dim = _integer(given)
    if dim is None or not -a.ndim <= dim < a.ndim or dim in (-1, a.ndim - 1):
        raise ValueError(
            f"`{name}` requires a dimension of `a` before its last, which is summed, got {given!r} for {a.shape}; for "
            "columns of the result, take the transposed product"
        )
    return size, dim if dim < 0 else dim - a.ndim, chunks


def _integer(x: Any) -> int | None:
    """None for what is no integer: a flag is none."""
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def _options(settings: Config, precision: Any, **options: Any) -> tuple[tuple[str, Any], ...]:
    """`matmul`'s keywords for what is chosen now: a gradient may be traced under other settings."""
    options |= {name: getattr(settings, name) for name in ("on_fallback", "device", "emulate", "deterministic")}
    return tuple((options | {"precision": canonical(precision)}).items())
