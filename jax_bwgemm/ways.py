"""The ways in which a kernel can take a product's operands: from before a transpose or as given, padded or not.

Emits what a way needs. Knows no device and no kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.origins import before_transpose, slice_step_bytes
from jax_bwgemm.problem import Problem
from jax_bwgemm.shape_rules import problem_of
from jax_bwgemm.tile import TMA_ALIGN_BYTES, padding

_OTHER_MAJOR = {"a_major": {"k": "m", "m": "k"}, "b_major": {"k": "n", "n": "k"}}


@dataclasses.dataclass(frozen=True)
class Way:
    """`problem` has the majors of this way; a source is an operand from before its transpose, None as it is given."""

    problem: Problem
    avals: tuple[Any, ...]
    sources: tuple[Any, Any]

    def padding(self, operand: int) -> int:
        """Elements by which the contiguous dimension of operand 0 or 1 grows."""
        return padding(self.problem, "ab"[operand])

    def preference(self) -> list[tuple[bool, bool]]:
        """Unpadded before padded, and of these without the transpose before with it."""
        return [(self.padding(i) > 0, source is None) for i, source in enumerate(self.sources)]


def ways(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Way]:
    """Best first. An operand that is a transpose, as `w.T` is in `x @ w.T`, can be had under either major."""
    as_given = _way(ctx, (None, None), params)
    if not as_given.problem.is_static:
        return [as_given]
    sources = [(None,) if source is None else (source, None) for source in map(before_transpose, operands[:2])]
    return sorted((_way(ctx, pair, params) for pair in itertools.product(*sources)), key=Way.preference)


def take(ctx: Any, way: Way, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(values, avals) of the operands, emitted the way that `way` says."""
    values, avals = list(operands), list(way.avals)
    for i in range(len(way.sources), len(values)):
        values[i] = _aligned(ctx, operands[i], avals[i])
    for i, source in enumerate(way.sources):
        value = operands[i] if source is None else _reshaped(ctx, source, avals[i])
        if extra := way.padding(i):
            *slow, contiguous = avals[i].shape
            padded = _reshape_aval(avals[i], (*slow, contiguous + extra))
            values[i], avals[i] = _padded(ctx, value, avals[i], padded), padded
        else:
            values[i] = _aligned(ctx, value, avals[i])
    return values, avals


def _way(ctx: Any, sources: tuple[Any, ...], params: dict[str, Any]) -> Way:
    avals, majors = list(ctx.avals_in), {}
    for i, (source, name) in enumerate(zip(sources, _OTHER_MAJOR, strict=True)):
        if source is not None:
            batch, rows, cols = avals[i].shape
            avals[i] = avals[i].update(shape=(batch, cols, rows))
            majors[name] = _OTHER_MAJOR[name][params[name]]
    a, b = sources
    return Way(problem_of(avals, **(params | majors)), tuple(avals), (a, b))


def _reshaped(ctx: Any, value: Any, aval: Any) -> Any:
    shape = tuple(value.type.shape)
    if shape == aval.shape:
        return value
    return _emit(ctx, lambda x: lax.reshape(x, aval.shape), value, _reshape_aval(aval, shape), aval)


def _padded(ctx: Any, value: Any, aval: Any, padded: Any) -> Any:
    """With zeros behind the contiguous dimension; XLA fuses them with what makes the operand."""
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
