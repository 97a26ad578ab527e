"""Collective matmul: a product whose operand is gathered over a mesh axis, or whose result is reduced and scattered, in
steps: while a product runs, the next transfer is under way.

Decomposed as in Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS 2023, doi 10.1145/3567955.3567959): a ring of `lax.ppermute`, unrolled, in one direction. Behind an
NVSwitch a GPU sends and receives at full rate to one neighbour; a second direction would share that.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import as_array, matmul, of_one_dtype
from jax_bwgemm.ops.partition import sum_dtype
from jax_bwgemm.ops.precision import canonical, is_algorithm
from jax_bwgemm.ops.primitive import factor_dtype
from jax_bwgemm.ops.reference import finish, round_to
from jax_bwgemm.ops.shape_rules import check_bias, check_residual, match_varying, matmul_shape, result_dtype
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array
Rows = Array | tuple[Array, ...]  # of all devices: in order, or those of each device from this one on
GATHER_CHUNKS, SCATTER_CHUNKS = 1, 2  # of a device's rows


def all_gather_matmul(
    a: Any,
    b: Any,
    axis_name: str,
    *,
    gather_dimension: int = -2,
    in_order: bool = True,
    num_chunks: int | None = None,
    out_dtype: Any = None,
    alpha: float = 1.0,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    precision: Any = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Any:
    """`matmul(lax.all_gather(a, axis_name, axis=gather_dimension, tiled=True), b)`, in a `jax.shard_map`: while a shard
    is multiplied, the next one arrives.

    Differentiable in reverse mode. The gradient of `a` is `matmul_reduce_scatter` of the cotangent, as overlapped; that
    of `b` is one product of all gathered rows, which are kept for it as `lax.all_gather`'s would be (`jax.checkpoint`
    gathers them again). An activation's argument is then rounded to the output dtype, and XLA applies it.

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
      ValueError: an axis that is not manual here, a dimension that cannot be gathered, a `b` that is no matrix, or
        what `matmul` refuses.

    Example:
      >>> def up(x, w):  # a tensor-parallel layer; x is sharded along its rows, w along its columns
      ...     return jax_bwgemm.all_gather_matmul(x, w, "model", activation="relu")
      >>> jax.shard_map(up, mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model"))(x, w)
    """
    a, b = of_one_dtype(as_array("a", a), as_array("b", b))
    size, dim = _checked("all_gather_matmul", a, b, axis_name, num_chunks, gather_dimension=gather_dimension)
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
    dtype = result_dtype(a.dtype, b.dtype, out_dtype)
    ring = _Ring(axis_name, size, dim, in_order, num_chunks, dtype, options, settings)
    given = {name: x for name, x in (("bias", bias), ("residual", residual)) if x is not None}
    rounded = (jnp.asarray(x).astype(ring.out_dtype) for x in given.values())
    a, b, *extras, _ = match_varying(a, b, *rounded, lax.axis_index(axis_name))
    return _gather_product(ring, a, b, dict(zip(given, extras, strict=True)))


def matmul_reduce_scatter(
    a: Any,
    b: Any,
    axis_name: str,
    *,
    scatter_dimension: int = -2,
    num_chunks: int | None = None,
    out_dtype: Any = None,
    precision: Any = None,
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
        is no matrix, or what `matmul` refuses.

    Example:
      >>> def down(h, w):  # h is sharded along its columns, w along its rows; the result along its rows
      ...     return jax_bwgemm.matmul_reduce_scatter(h, w, "model")
      >>> jax.shard_map(down, mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P("model"))(h, w)
    """
    parts = [as_array("a", x) for x in (a if isinstance(a, tuple) else (a,))]
    b = as_array("b", b)
    first, b = of_one_dtype(parts[0], b)
    size, dim = _checked("matmul_reduce_scatter", first, b, axis_name, num_chunks, scatter_dimension=scatter_dimension)
    if isinstance(a, tuple) and (len(a) != size or any((x.shape, x.dtype) != (a[0].shape, a[0].dtype) for x in a)):
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
    options = _options(settings, precision=precision, tile=tile)
    dtype, in_order = result_dtype(first.dtype, b.dtype, out_dtype), not isinstance(a, tuple)
    ring = _Ring(axis_name, size, dim, in_order, num_chunks, dtype, options, settings)
    *parts, b, _ = match_varying(*(x.astype(first.dtype) for x in parts), b, lax.axis_index(axis_name))
    return _product_scatter(ring, parts[0] if in_order else tuple(parts), b)


def _checked(what: str, a: Array, b: Array, axis_name: Any, num_chunks: Any, **dimension: int) -> tuple[int, int]:
    """The axis's size, and the dimension counted from the end."""
    if isinstance(axis_name, tuple | list):
        raise ValueError(f"`axis_name` requires one axis, got {axis_name!r}; make one axis of them in the mesh")
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"`axis_name` requires a manual axis of a surrounding `jax.shard_map`, got {axis_name!r}, which is "
            f"unbound; call `{what}` in the function that `jax.shard_map` maps over a mesh with that axis"
        ) from None
    if num_chunks is not None and (not isinstance(num_chunks, int) or num_chunks < 1):
        raise ValueError(f"`num_chunks` requires None or a positive integer, got {num_chunks!r}")
    if b.ndim != 2:
        raise ValueError(f"`{what}` requires a matrix `b`, got the shape {b.shape}; map over stacks with `jax.vmap`")
    if a.ndim < 2:
        raise ValueError(f"`{what}` requires an `a` of rank 2 or more, got the shape {a.shape}; reshape it to one row")
    matmul_shape(a.shape, b.shape)
    ((name, dim),) = dimension.items()
    if not -a.ndim <= dim < a.ndim or dim in (-1, a.ndim - 1):
        raise ValueError(
            f"`{name}` requires a dimension of `a` before its last, which is summed, got {dim} for {a.shape}; for "
            "columns of the result, take the transposed product"
        )
    return size, dim if dim < 0 else dim - a.ndim


def _options(settings: Config, precision: Any, **options: Any) -> tuple[tuple[str, Any], ...]:
    """`matmul`'s keywords for what is chosen now: a gradient may be traced under other settings."""
    options |= {name: getattr(settings, name) for name in ("on_fallback", "device", "emulate")}
    return tuple((options | {"precision": canonical(precision)}).items())


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What is static of a decomposed product, or of its gradient: `dim` is counted from the end, `options` are
    `matmul`'s keywords."""

    axis_name: Any
    size: int
    dim: int
    in_order: bool
    num_chunks: int | None
    out_dtype: Any
    options: tuple[tuple[str, Any], ...]
    settings: Config

    def multiply(self, a: Array, b: Array, **options: Any) -> Array:
        return matmul(a, b, **{"out_dtype": self.out_dtype} | dict(self.options) | options)

    def gradient(self, out_dtype: Any, cotangent: Any) -> _Ring:
        """Of a gradient of `out_dtype`: what is chosen for the forward product alone is left out."""
        options = dict(self.options) | {"tile": None, "activation": None}
        if factor_dtype(out_dtype, cotangent) != out_dtype and is_algorithm(options["precision"]):
            options["precision"] = None  # it names the operands' dtype
        return dataclasses.replace(self, out_dtype=out_dtype, options=tuple(options.items()))

    def send(self, x: Array, hops: int) -> Array:
        return lax.ppermute(x, self.axis_name, [(i, (i + hops) % self.size) for i in range(self.size)])

    def bounds(self, rows: int, default: int) -> list[tuple[int, int]]:
        """Of the chunks of a device's `rows`; no chunk is empty, unless there are no rows."""
        num = max(1, min(self.num_chunks or default, rows))
        return list(itertools.pairwise(i * rows // num for i in range(num + 1)))

    def part(self, x: Rows, device: int, bounds: tuple[int, int]) -> Array:
        """Of all rows: those of the `device`th device from this one on, within `bounds`."""
        if isinstance(x, tuple):
            return lax.slice_in_dim(x[device], *bounds, axis=x[device].ndim + self.dim)
        owner = (lax.axis_index(self.axis_name) + device) % self.size
        start = owner * (x.shape[self.dim] // self.size) + bounds[0]
        return lax.dynamic_slice_in_dim(x, start, bounds[1] - bounds[0], x.ndim + self.dim)

    def whole(self, chunks: Sequence[Array]) -> Rows:
        """All rows, of chunks of every device's from this one on. Their order takes one pass, which XLA fuses with what
        follows."""
        axis, num = chunks[0].ndim + self.dim, len(chunks) // self.size
        if not self.in_order:
            return tuple(lax.concatenate(chunks[i : i + num], axis) for i in range(0, len(chunks), num))
        rows = sum(chunk.shape[axis] for chunk in chunks)
        first = (self.size - lax.axis_index(self.axis_name)) % self.size * (rows // self.size)
        return lax.dynamic_slice_in_dim(lax.concatenate([*chunks, *chunks], axis), first, rows, axis)


def _gathered(ring: _Ring, a: Array, b: Array, bias: Any = None, residual: Any = None, **options: Any) -> Any:
    """(gathered rows of a, their products), as chunks of every device's from this one on.

    Products and transfers go in step, one of each at a time: a chunk is sent on, and multiplied, when the product
    before it is done. Without that, XLA may let the transfers run first.
    """
    axis = a.ndim + ring.dim
    bounds = ring.bounds(a.shape[axis], GATHER_CHUNKS)
    chunks = [lax.slice_in_dim(a, *bound, axis=axis) for bound in bounds]
    outs: list[Array] = []
    for device, bound in itertools.product(range(ring.size), bounds):
        idx = len(outs)
        if outs:
            chunks[idx], outs[-1] = lax.optimization_barrier((chunks[idx], outs[-1]))
        if device + 1 < ring.size:
            chunks.append(ring.send(chunks[idx], -1))
        added = None if residual is None else ring.part(residual, device, bound)
        outs.append(ring.multiply(chunks[idx], b, bias=bias, residual=added, **options))
    return chunks, outs


def _scattered(ring: _Ring, a: Rows, b: Array) -> Array:
    """This device's rows of the sum. Each product waits for the one before, not for a transfer: what it is added to was
    sent when the first of `num_chunks` products before it was done."""
    dtype = sum_dtype(ring.out_dtype, ring.settings.partial_sums)
    own = a[0].shape[ring.dim] if isinstance(a, tuple) else a.shape[ring.dim] // ring.size
    bounds = ring.bounds(own, SCATTER_CHUNKS)
    is_fused = len(bounds) > 1 and jnp.issubdtype(dtype, jnp.floating)
    sums: list[Array] = []
    for device, bound in itertools.product(reversed(range(ring.size)), bounds):
        if sums:
            a, sums[-1] = lax.optimization_barrier((a, sums[-1]))
        received = ring.send(sums[-len(bounds)], 1) if len(sums) >= len(bounds) else None
        out = ring.multiply(ring.part(a, device, bound), b, out_dtype=dtype, residual=received if is_fused else None)
        sums.append(out if received is None or is_fused else out + received)
    return round_to(lax.concatenate(sums[-len(bounds) :], sums[0].ndim + ring.dim), ring.out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_product(ring: _Ring, a: Array, b: Array, extras: dict[str, Array]) -> Rows:
    return ring.whole(_gathered(ring, a, b, **extras)[1])


def _gather_forward(ring: _Ring, a: Array, b: Array, extras: dict[str, Array]) -> tuple[Rows, Any]:
    """Keeps the gathered rows, and the argument of an activation."""
    activation, names = dict(ring.options)["activation"], dict.fromkeys(extras, ())
    if activation is None:
        chunks, outs = _gathered(ring, a, b, **extras)
        return ring.whole(outs), (chunks, b, None, names)
    dtype = jnp.dtype("bfloat16") if str(ring.out_dtype) in FP8_DTYPES else ring.out_dtype
    added = [extras[name] for name in ("residual",) if name in extras]
    chunks, outs = _gathered(ring, a, b, extras.get("bias"), activation=None, out_dtype=dtype)
    argument = ring.whole(outs)
    epilogue = chain(activation=activation, has_residual=bool(added))
    out = jax.tree.map(lambda x: finish(x.astype(jnp.float32), epilogue, added, ring.out_dtype)[0], argument)
    return out, (chunks, b, argument, names)


def _gather_backward(ring: _Ring, kept: Any, ct: Rows) -> tuple[Array, Array, dict[str, Any]]:
    chunks, b, argument, names = kept
    gradients = {"residual": ct}
    if argument is not None:
        ct = jax.tree.map(functools.partial(_slope_times, dict(ring.options)["activation"]), argument, ct)
    flat = _flat(ct)
    gradients["bias"] = flat.astype(jnp.float32).sum(0).astype(ring.out_dtype)
    of_a = ring.gradient(chunks[0].dtype, flat.dtype)
    of_b = _of_rows(ring, ring.whole(chunks), flat, b.dtype)
    return _scattered(of_a, *_factors(ct, b.T, of_a)), of_b, {name: gradients[name] for name in names}


def _slope_times(activation: str, argument: Array, ct: Array) -> Array:
    """The cotangent of an activation's argument, in its dtype."""
    f = functools.partial(finish, epilogue=chain(activation=activation), operands=(), out_dtype=jnp.dtype("float32"))
    (ct,) = jax.vjp(lambda x: f(x.astype(jnp.float32))[0], argument)[1](ct.astype(jnp.float32))
    return ct


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_scatter(ring: _Ring, a: Rows, b: Array) -> Array:
    return _scattered(ring, a, b)


def _scatter_forward(ring: _Ring, a: Rows, b: Array) -> tuple[Array, Any]:
    return _scattered(ring, a, b), (a, b)


def _scatter_backward(ring: _Ring, kept: tuple[Rows, Array], ct: Array) -> tuple[Rows, Array]:
    a, b = kept
    of_a = ring.gradient(jax.tree.leaves(a)[0].dtype, ct.dtype)
    chunks, outs = _gathered(of_a, *_factors(ct, b.T, of_a))
    return ring.whole(outs), _of_rows(ring, a, _flat(ring.whole(chunks)), b.dtype)


def _factors(x: Any, y: Array, ring: _Ring) -> Any:
    """In the dtype in which a gradient is multiplied, as the product's own gradients are; x is the cotangent."""
    dtype = factor_dtype(ring.out_dtype, jax.tree.leaves(x)[0].dtype)
    return jax.tree.map(lambda part: part.astype(dtype), x), y.astype(dtype)


def _of_rows(ring: _Ring, a: Rows, ct: Array, dtype: Any) -> Array:
    """The gradient of b: one product, whose sum over all rows is rounded once."""
    ring = ring.gradient(dtype, ct.dtype)
    ct, flat = _factors(ct, _flat(a), ring)
    return ring.multiply(flat.T, ct)


def _flat(x: Rows) -> Array:
    """A matrix of all rows, in any order."""
    matrices = [part.reshape(-1, part.shape[-1]) for part in jax.tree.leaves(x)]
    return lax.concatenate(matrices, 0)


_gather_product.defvjp(_gather_forward, _gather_backward)
_product_scatter.defvjp(_scatter_forward, _scatter_backward)
