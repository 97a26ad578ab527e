"""A ring of transfers beside local products, and its gradient: what collective matmul is made of. Checks nothing.

Decomposed as in Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS 2023, doi 10.1145/3567955.3567959): `lax.ppermute`, unrolled, in one direction. Behind an NVSwitch a GPU
sends and receives at full rate to one neighbour; a second direction would share that.
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
from jax_bwgemm.matmul import matmul
from jax_bwgemm.ops.partition import sum_dtype
from jax_bwgemm.ops.precision import is_algorithm
from jax_bwgemm.ops.primitive import factor_dtype
from jax_bwgemm.ops.reference import finish, round_to
from jax_bwgemm.runtime.config import Config

Array = jax.Array
Rows = Array | tuple[Array, ...]  # of all devices: in order, or those of each device from this one on
GATHER_CHUNKS, SCATTER_CHUNKS = 1, 2  # of a device's rows


@dataclasses.dataclass(frozen=True)
class Ring:
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
        out: Array = matmul(a, b, **{"out_dtype": self.out_dtype} | dict(self.options) | options)
        return out

    def gradient(self, out_dtype: Any, cotangent: Any) -> Ring:
        """Of a gradient of `out_dtype`: what is chosen for the forward product alone is left out."""
        options = dict(self.options) | {"tile": None, "activation": None}
        if factor_dtype(out_dtype, cotangent) != out_dtype and is_algorithm(options["precision"]):
            options["precision"] = None  # it names the operands' dtype
        return dataclasses.replace(self, out_dtype=out_dtype, options=tuple(options.items()))

    def send(self, x: Array, hops: int) -> Array:
        sent: Array = lax.ppermute(x, self.axis_name, [(i, (i + hops) % self.size) for i in range(self.size)])
        return sent

    def bounds(self, rows: int, default: int) -> list[tuple[int, int]]:
        """Of the chunks of a device's `rows`; none is empty, unless there are no rows. One device sends nothing."""
        num = 1 if self.size == 1 else max(1, min(self.num_chunks or default, rows))
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
        if self.size == 1:
            return chunks[0]
        rows = sum(chunk.shape[axis] for chunk in chunks)
        first = (self.size - lax.axis_index(self.axis_name)) % self.size * (rows // self.size)
        return lax.dynamic_slice_in_dim(lax.concatenate([*chunks, *chunks], axis), first, rows, axis)


def _gathered(ring: Ring, a: Array, b: Array, bias: Any = None, residual: Any = None, **options: Any) -> Any:
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


def _scattered(ring: Ring, a: Rows, b: Array) -> Array:
    """This device's rows of the sum. A product waits for the one before it; the sum to which it is added was sent when
    that of `num_chunks` products before was done."""
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
def gather_product(ring: Ring, a: Array, b: Array, extras: dict[str, Array]) -> Rows:
    return ring.whole(_gathered(ring, a, b, **extras)[1])


def _gather_forward(ring: Ring, a: Array, b: Array, extras: dict[str, Array]) -> tuple[Rows, Any]:
    """Keeps the gathered rows, and the argument of an activation; a relu's result, which tells where it is flat."""
    activation, names = dict(ring.options)["activation"], dict.fromkeys(extras, ())
    if activation is None or (activation == "relu" and "residual" not in extras):
        chunks, outs = _gathered(ring, a, b, **extras)
        out = ring.whole(outs)
        return out, (chunks, b, out if activation else None, names)
    dtype = jnp.dtype("bfloat16") if str(ring.out_dtype) in FP8_DTYPES else ring.out_dtype
    added = [extras[name] for name in ("residual",) if name in extras]
    chunks, outs = _gathered(ring, a, b, extras.get("bias"), activation=None, out_dtype=dtype)
    argument = ring.whole(outs)
    epilogue = chain(activation=activation, has_residual=bool(added))
    out = jax.tree.map(lambda x: finish((_wide(x),), epilogue, added, ring.out_dtype)[0], argument)
    return out, (chunks, b, argument, names)


def _gather_backward(ring: Ring, kept: Any, ct: Rows) -> tuple[Array, Array, dict[str, Any]]:
    chunks, b, argument, names = kept
    gradients = {"residual": ct}
    if argument is not None:
        ct = jax.tree.map(functools.partial(_slope_times, dict(ring.options)["activation"]), argument, ct)
    flat = _flat(ct)
    gradients["bias"] = _wide(flat).sum(0).astype(ring.out_dtype)
    of_a = ring.gradient(chunks[0].dtype, flat.dtype)
    of_b = _of_rows(ring, ring.whole(chunks), flat, b.dtype)
    return _scattered(of_a, *_factors(ct, b.T, of_a)), of_b, {name: gradients[name] for name in names}


def _slope_times(activation: str, argument: Array, ct: Array) -> Array:
    """The cotangent of an activation's argument, in its dtype."""
    wide = _wide(ct)
    f = functools.partial(finish, epilogue=chain(activation=activation), operands=(), out_dtype=wide.dtype)
    (ct,) = jax.vjp(lambda x: f((_wide(x),))[0], argument)[1](wide)
    return ct


def _wide(x: Array) -> Array:
    """In float32, unless it is wider."""
    return x if x.dtype.itemsize > 4 else x.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_scatter(ring: Ring, a: Rows, b: Array) -> Array:
    return _scattered(ring, a, b)


def _scatter_forward(ring: Ring, a: Rows, b: Array) -> tuple[Array, Any]:
    return _scattered(ring, a, b), (a, b)


def _scatter_backward(ring: Ring, kept: tuple[Rows, Array], ct: Array) -> tuple[Rows, Array]:
    a, b = kept
    of_a = ring.gradient(jax.tree.leaves(a)[0].dtype, ct.dtype)
    chunks, outs = _gathered(of_a, *_factors(ct, b.T, of_a))
    return ring.whole(outs), _of_rows(ring, a, _flat(ring.whole(chunks)), b.dtype)


def _factors(x: Any, y: Array, ring: Ring) -> Any:
    """In the dtype in which a gradient is multiplied, as the product's own gradients are; x is the cotangent."""
    dtype = factor_dtype(ring.out_dtype, jax.tree.leaves(x)[0].dtype)
    return jax.tree.map(lambda part: part.astype(dtype), x), y.astype(dtype)


def _of_rows(ring: Ring, a: Rows, ct: Array, dtype: Any) -> Array:
    """The gradient of b: one product, whose sum over all rows is rounded once."""
    ring = ring.gradient(dtype, ct.dtype)
    ct, flat = _factors(ct, _flat(a), ring)
    return ring.multiply(flat.T, ct)


def _flat(x: Rows) -> Array:
    """A matrix of all rows, in any order."""
    matrices = [part.reshape(-1, part.shape[-1]) for part in jax.tree.leaves(x)]
    return lax.concatenate(matrices, 0)


gather_product.defvjp(_gather_forward, _gather_backward)
product_scatter.defvjp(_scatter_forward, _scatter_backward)
