"""What the primitives become on each platform: our custom call where a kernel can do it, else XLA's own dot, aloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_bwgemm.artifacts import PARAM_KINDS
from jax_bwgemm.config import report_fallback
from jax_bwgemm.decision import Decision, decide
from jax_bwgemm.ffi import TARGET_NAME
from jax_bwgemm.origins import before_transpose, slice_step_bytes
from jax_bwgemm.primitive import fused_matmul_p, matmul_p
from jax_bwgemm.problem import Problem
from jax_bwgemm.reference import reference
from jax_bwgemm.shape_rules import problem_of
from jax_bwgemm.tile import TMA_ALIGN_BYTES, why_not_sizes

Emit = Callable[[Any, Sequence[Any], Decision, dict[str, Any]], Any]
_OTHER_MAJOR = {"a_major": {"k": "m", "m": "k"}, "b_major": {"k": "n", "n": "k"}}


def _matmul_xla_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Every platform but CUDA."""
    if params["emulate"] != "off":
        return _matmul_by_kernel(ctx, operands, params, _emulation)
    problem = problem_of(ctx.avals_in, **params)
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    return _fall_back(ctx, operands, problem, f"its kernels need CUDA, got {platforms}", params)


def _matmul_cuda_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["emulate"] != "off":
        raise ValueError(
            f"`emulate` requires a platform other than CUDA, such as cpu, got cuda for "
            f'{problem_of(ctx.avals_in, **params)}: pass `emulate="off"`, or compute on a CPU, as in '
            'a block of `jax.default_device(jax.devices("cpu")[0])`'
        )
    return _matmul_by_kernel(ctx, operands, params, _custom_call)


def _matmul_by_kernel(ctx: Any, operands: Sequence[Any], params: dict[str, Any], emit: Emit) -> Any:
    """Asks once; `emit` makes the chosen kernel's call."""
    for values, avals, majors in _ways(ctx, operands, params):
        own = params | majors
        problem = problem_of(avals, **own)
        if majors and problem.is_static and why_not_sizes(problem):
            continue  # the rows of the other major cannot be stepped over
        decision = _decide(problem, own)
        if decision.entry is not None:
            taken = [_aligned(ctx, value, aval) for value, aval in zip(values(), avals, strict=True)]
            return emit(ctx.replace(avals_in=avals), taken, decision, own)
    return _fall_back(ctx, operands, problem, decision.reason or "", params)


def _custom_call(ctx: Any, operands: Sequence[Any], decision: Decision, params: dict[str, Any]) -> Any:
    call = jax.ffi.ffi_lowering(TARGET_NAME)
    return call(ctx, *operands, **attributes(decision, params["alpha"]))


def _emulation(ctx: Any, operands: Sequence[Any], decision: Decision, params: dict[str, Any]) -> Any:
    """A call back to Python, with all that the custom call has.

    Not by `jax.pure_callback`, which turns the operands into JAX arrays: with operands sharded over CPU devices,
    jax 0.10.2 then waited for a device that waited for the callback. Here they arrive as NumPy arrays.
    """
    from jax_bwgemm.emulated import kernel_of  # here, so that `import jax_bwgemm` leaves the emulator out

    kernel = kernel_of(decision, problem_of(ctx.avals_in, **params))

    def call(*values: np.ndarray) -> tuple[np.ndarray]:
        return (kernel(*values),)

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    results, _, _ = mlir.emit_python_callback(ctx, call, None, operands, ctx.avals_in, ctx.avals_out, **settings)
    return results


def attributes(decision: Decision, alpha: float) -> dict[str, Any]:
    """The custom call's attributes; docs/architecture.md, "The custom call"."""
    plan, entry = decision.plan, decision.entry
    assert plan is not None and entry is not None  # the caller has a kernel
    variant, tile = entry.variant, entry.variant.tile
    params = [x for p in entry.params for x in (PARAM_KINDS.index(p.kind), p.offset, p.size)]
    ints = {
        "cta_m": tile.cta_m,
        "mma_n": tile.mma_n,
        "cluster_m": tile.cluster_m,
        "cluster_n": tile.cluster_n,
        "num_threads": entry.num_threads,
        "smem_bytes": entry.smem_bytes,
        "raster_group": plan.raster_group,
        "raster_along_n": plan.raster_along_n,
        "param_bytes": entry.param_bytes,
    }
    arrays: dict[str, tuple[int, ...]] = {f"{x}_box": entry.tma[x].box for x in "abc"}
    arrays |= {"swizzle_bytes": tuple(entry.tma[x].swizzle_bytes for x in "abc"), "params": tuple(params)}
    return {
        "variant": entry.name,
        "entry": entry.entry,
        "target": variant.target,
        "cubin_sha256": entry.cubin_sha256,
        "a_major": variant.a_major,
        "b_major": variant.b_major,
        "alpha": np.float32(alpha),
        **{name: np.int32(value) for name, value in ints.items()},
        **{name: np.array(value, np.int32) for name, value in arrays.items()},
    }


def _decide(problem: Problem, params: dict[str, Any]) -> Decision:
    if not problem.is_static:
        return Decision(reason="a kernel is chosen for sizes known at trace time, and these are symbolic")
    return decide(problem, params["device"], params["tile"], params["emulate"] != "off")


def _fall_back(ctx: Any, operands: Sequence[Any], problem: Problem, reason: str, params: dict[str, Any]) -> Any:
    if not problem.is_empty:
        report_fallback(params["on_fallback"], str(problem), reason)
    return mlir.lower_fun(reference, multiple_results=False)(ctx, *operands, **params)


def _ways(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The ways to take the operands, best first: (their values, avals, majors).

    An operand that is a transpose, as `w.T` is in `x @ w.T`, is best taken from before it, under its other major.
    """
    sources = [before_transpose(operand) for operand in operands[:2]]
    as_given: Any = (lambda: operands, ctx.avals_in, {})
    if all(source is None for source in sources):
        return [as_given]
    avals, majors = list(ctx.avals_in), {}
    for i, (source, name) in enumerate(zip(sources, _OTHER_MAJOR, strict=True)):
        if source is not None:
            batch, rows, cols = avals[i].shape
            avals[i] = avals[i].update(shape=(batch, cols, rows))
            majors[name] = _OTHER_MAJOR[name][params[name]]

    def values() -> list[Any]:
        matrices = zip(sources, operands[:2], avals[:2], strict=True)
        taken = [x if source is None else _reshaped(ctx, source, aval) for source, x, aval in matrices]
        return [*taken, *operands[2:]]

    return [(values, avals, majors), as_given]


def _reshaped(ctx: Any, value: Any, aval: Any) -> Any:
    shape = tuple(value.type.shape)
    if shape == aval.shape:
        return value
    return _emit(ctx, lambda x: lax.reshape(x, aval.shape), value, aval.update(shape=shape, sharding=None), aval)


def _aligned(ctx: Any, value: Any, aval: Any) -> Any:
    """A slice that may start between two 16-byte units is copied: TMA cannot read it where it is."""
    if slice_step_bytes(value, aval.dtype.itemsize) % TMA_ALIGN_BYTES == 0:
        return value
    return _emit(ctx, lax.optimization_barrier, value, aval, aval)


def _emit(ctx: Any, fun: Callable[[Any], Any], value: Any, aval_in: Any, aval_out: Any) -> Any:
    own = ctx.replace(avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(own, value)
    return result


for _primitive in (matmul_p, fused_matmul_p):
    # Not cacheable: a shared lowering would hide the transposes that `before_transpose` looks for.
    mlir.register_lowering(_primitive, _matmul_xla_lowering, cacheable=False)
    mlir.register_lowering(_primitive, _matmul_cuda_lowering, platform="cuda", cacheable=False)
