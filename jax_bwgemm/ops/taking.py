"""Emits the operands of a kernel as a route says: from before a transpose or as given, padded or transposed first.

Knows no device and no kernel: who calls hands over what emits a repack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.facts.tile import TMA_ALIGN_BYTES
from jax_bwgemm.ops.origins import before_transpose, is_fusible, slice_step_bytes
from jax_bwgemm.planner.routes import Pair, Route

# (context, kind of repack, value, aval, aval of the result) -> the repacked value, or None where there is no kernel.
EmitRepack = Callable[[Any, str, Any, Any, Any], Any]


def is_transpose(operands: Sequence[Any]) -> Pair:
    """Which of a and b are transposes, as `w` in `x @ w.T`: a route may take them from before."""
    a, b = (before_transpose(x) is not None for x in operands[:2])
    return a, b


def take(ctx: Any, route: Route, operands: Sequence[Any], repack: EmitRepack) -> tuple[list[Any], list[Any]]:
    """(values, avals) of the operands, emitted the way that `route` says."""
    values, avals = list(operands), list(ctx.avals_in)
    for i, operand in enumerate(operands):
        if i < 2:
            values[i], avals[i] = _take(ctx, route, i, operand, repack)
        else:
            values[i] = _aligned(ctx, operand, avals[i])
    return values, avals


def _take(ctx: Any, route: Route, i: int, operand: Any, repack: EmitRepack) -> tuple[Any, Any]:
    given, value = ctx.avals_in[i], operand
    if route.from_source[i]:
        given = _flipped(given)
        value = _reshaped(ctx, before_transpose(operand), given)
    lying = _flipped(given) if route.transposes[i] else given
    *slow, contiguous = lying.shape
    final = _reshape_aval(lying, (*slow, contiguous + route.padding(i)))
    if route.transposes[i]:
        return repack(ctx, "transpose", value, _reshape_aval(given, given.shape), final), final
    if route.padding(i):
        return _padded(ctx, value, given, final, repack), final
    return _aligned(ctx, value, given), given


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
    if not is_fusible(value, ctx.module_context.module.operation):
        repacked = repack(ctx, "pad", value, _reshape_aval(aval, aval.shape), padded)
        if repacked is not None:
            return repacked
    edges = [(0, 0, 0), (0, 0, 0), (0, padded.shape[2] - aval.shape[2], 0)]
    return _emit(
        ctx, lambda x: lax.pad(x, jnp.zeros((), x.dtype), edges), value, _reshape_aval(aval, aval.shape), padded
    )


def barrier(value: Any) -> Any:
    """What XLA allocates by itself: neither a part of a larger array nor stored into one."""
    return stablehlo.optimization_barrier([value])  # type: ignore[attr-defined]


def _aligned(ctx: Any, value: Any, aval: Any) -> Any:
    """A slice that may start between two 16-byte units is copied: TMA cannot read it where it is."""
    step = slice_step_bytes(value, aval.dtype.itemsize, ctx.module_context.module.operation)
    return value if step % TMA_ALIGN_BYTES == 0 else barrier(value)


def _reshape_aval(aval: Any, shape: tuple[int, ...]) -> Any:
    """Unsharded, but on the same mesh, over whose manual axes it may vary."""
    return aval.update(shape=shape, sharding=NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape))))


def _emit(ctx: Any, fun: Callable[[Any], Any], value: Any, aval_in: Any, aval_out: Any) -> Any:
    own = ctx.replace(avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(own, value)
    return result
