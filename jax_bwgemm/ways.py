"""The ways in which a kernel can take a product's operands: from before a transpose or as given, padded or transposed
first, or not.

Emits what a way needs. Knows no device and no kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.origins import before_transpose, is_fusible, slice_step_bytes
from jax_bwgemm.problem import Problem
from jax_bwgemm.shape_rules import problem_of
from jax_bwgemm.tile import TMA_ALIGN_BYTES, padding

# (context, kind of repack, value, aval, aval of the result) -> the repacked value, or None where there is no kernel.
EmitRepack = Callable[[Any, str, Any, Any, Any], Any]

_OTHER_MAJOR = {"a_major": {"k": "m", "m": "k"}, "b_major": {"k": "n", "n": "k"}}


@dataclasses.dataclass(frozen=True)
class Way:
    """`problem` has the majors of this way; a source is an operand from before its transpose, None as it is given.

    `transposes` says which of a and b are repacked: under the other major than `problem` has, until then.
    """

    problem: Problem
    avals: tuple[Any, ...]
    sources: tuple[Any, Any]
    transposes: tuple[bool, bool] = (False, False)

    def padding(self, operand: int) -> int:
        """Elements by which the contiguous dimension of operand 0 or 1 grows."""
        return padding(self.problem, "ab"[operand])

    def preference(self) -> tuple[int, list[tuple[bool, bool]]]:
        """Few bytes that repacks transpose before many; unpadded before padded, and of these without the transpose
        before with it."""
        transposed = (aval.size * flips for aval, flips in zip(self.avals, self.transposes, strict=False))
        return sum(transposed), [(self.padding(i) > 0, source is None) for i, source in enumerate(self.sources)]


def ways(
    ctx: Any, operands: Sequence[Any], params: dict[str, Any], k_major: Callable[[Problem], Iterable[Problem]]
) -> list[Way]:
    """Best first. An operand that is a transpose, as `w.T` is in `x @ w.T`, can be had under either major; and where
    `k_major` knows the same product of operands that a repack makes k-major, also that."""
    as_given = _way(ctx, (None, None), params)
    if not as_given.problem.is_static:
        return [as_given]
    sources = [(None,) if source is None else (source, None) for source in map(before_transpose, operands[:2])]
    found = [_way(ctx, pair, params) for pair in itertools.product(*sources)]
    found += [_transposing(way, problem) for way in found for problem in k_major(way.problem)]
    return sorted(found, key=Way.preference)


def take(ctx: Any, way: Way, operands: Sequence[Any], repack: EmitRepack) -> tuple[list[Any], list[Any]]:
    """(values, avals) of the operands, emitted the way that `way` says."""
    values, avals = list(operands), list(way.avals)
    for i in range(len(way.sources), len(values)):
        values[i] = _aligned(ctx, operands[i], avals[i])
    for i, source in enumerate(way.sources):
        given = _flipped(avals[i]) if way.transposes[i] else avals[i]
        value = operands[i] if source is None else _reshaped(ctx, source, given)
        *slow, contiguous = avals[i].shape
        final = _reshape_aval(avals[i], (*slow, contiguous + way.padding(i)))
        if way.transposes[i]:
            values[i], avals[i] = repack(ctx, "transpose", value, _reshape_aval(given, given.shape), final), final
        elif way.padding(i):
            values[i], avals[i] = _padded(ctx, value, avals[i], final, repack), final
        else:
            values[i] = _aligned(ctx, value, avals[i])
    return values, avals


def _way(ctx: Any, sources: tuple[Any, ...], params: dict[str, Any]) -> Way:
    avals, majors = list(ctx.avals_in), {}
    for i, (source, name) in enumerate(zip(sources, _OTHER_MAJOR, strict=True)):
        if source is not None:
            avals[i] = _flipped(avals[i])
            majors[name] = _OTHER_MAJOR[name][params[name]]
    a, b = sources
    return Way(problem_of(avals, **(params | majors)), tuple(avals), (a, b))


def _transposing(way: Way, problem: Problem) -> Way:
    """`way`, but that operands of other majors in `problem`, the product of what comes out, are repacked."""
    a, b = transposes = way.problem.a_major != problem.a_major, way.problem.b_major != problem.b_major
    avals = [_flipped(aval) if flips else aval for aval, flips in zip(way.avals[:2], (a, b), strict=True)]
    return Way(problem, (*avals, *way.avals[2:]), way.sources, transposes)


def _flipped(aval: Any) -> Any:
    batch, rows, cols = aval.shape
    return aval.update(shape=(batch, cols, rows))


def _reshaped(ctx: Any, value: Any, aval: Any) -> Any:
    shape = tuple(value.type.shape)
    if shape == aval.shape:
        return value
    return _emit(ctx, lambda x: lax.reshape(x, aval.shape), value, _reshape_aval(aval, shape), aval)


def _padded(ctx: Any, value: Any, aval: Any, padded: Any, repack: EmitRepack) -> Any:
    """With zeros behind the contiguous dimension: by a repack, or by XLA where that is no pass of its own."""
    if not is_fusible(value):
        repacked = repack(ctx, "pad", value, _reshape_aval(aval, aval.shape), padded)
        if repacked is not None:
            return repacked
    edges = [(0, 0, 0), (0, 0, 0), (0, padded.shape[2] - aval.shape[2], 0)]
    return _emit(
        ctx, lambda x: lax.pad(x, jnp.zeros((), x.dtype), edges), value, _reshape_aval(aval, aval.shape), padded
    )


def _aligned(ctx: Any, value: Any, aval: Any) -> Any:
    """A slice that may start between two 16-byte units is copied: TMA cannot read it where it is."""
    if slice_step_bytes(value, aval.dtype.itemsize) % TMA_ALIGN_BYTES == 0:
        return value
    return _emit(ctx, lax.optimization_barrier, value, aval, aval)


def _reshape_aval(aval: Any, shape: tuple[int, ...]) -> Any:
    """Unsharded, but on the same mesh, over whose manual axes it may vary."""
    return aval.update(shape=shape, sharding=NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape))))


def _emit(ctx: Any, fun: Callable[[Any], Any], value: Any, aval_in: Any, aval_out: Any) -> Any:
    own = ctx.replace(avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(own, value)
    return result
