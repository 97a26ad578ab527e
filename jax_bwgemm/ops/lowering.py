"""What the primitives become on each platform: our custom call where a kernel can do it, else XLA's own dot, aloud."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.ops.origins import may_be_in_loop
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.primitive import fused_matmul_p, matmul_p
from jax_bwgemm.ops.reference import finish, reference
from jax_bwgemm.ops.repacking import Repacker
from jax_bwgemm.ops.shape_rules import problem_of
from jax_bwgemm.ops.taking import barrier, is_transpose, take
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.attempts import Asked, Attempt, choose
from jax_bwgemm.runtime.config import report_fallback
from jax_bwgemm.runtime.decision import Decision, register
from jax_bwgemm.runtime.ffi import TARGET_NAME, as_hlo
from jax_bwgemm.runtime.launch import request

Emit = Callable[[Any, Sequence[Any], Decision], Any]


def _matmul_lowering(ctx: Any, *operands: Any, branch: str | None = None, **params: Any) -> Any:
    """Of any platforms. In a module for CUDA and others, each of the two rules below has a `branch`."""
    platforms = [branch] if branch else _platforms(ctx)
    if "cuda" not in platforms:
        return _matmul_xla_lowering(ctx, platforms, *operands, **params)
    if len(platforms) == 1:
        return _matmul_cuda_lowering(ctx, *operands, **params)

    def branches(*operands: jax.Array) -> Any:
        bind = functools.partial(ctx.primitive.bind, **params)
        others = ", ".join(platform for platform in platforms if platform != "cuda")
        cuda, default = (functools.partial(bind, branch=name) for name in ("cuda", others))
        return lax.platform_dependent(*operands, cuda=cuda, default=default)

    return mlir.lower_fun(branches, multiple_results=ctx.primitive.multiple_results)(ctx, *operands)


def _platforms(ctx: Any) -> list[str]:
    if getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) == "device_host":  # jax.experimental.compute_on
        return ["cpu"]
    return list(ctx.platforms or ctx.module_context.platforms)


def _matmul_xla_lowering(ctx: Any, platforms: list[str], *operands: Any, **params: Any) -> Any:
    """Every platform but CUDA."""
    if params["emulate"] != "off":
        return _matmul_by_kernel(ctx, operands, params, _emulation)
    problem = problem_of(ctx.avals_in, **params)
    return _fall_back(ctx, operands, problem, f"its kernels need CUDA, got {', '.join(platforms)}", params)


def _matmul_cuda_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["emulate"] != "off":
        raise ValueError(
            f"`emulate` requires a platform other than CUDA, such as cpu, got cuda for "
            f'{problem_of(ctx.avals_in, **params)}: pass `emulate="off"`, or compute on a CPU, as in '
            'a block of `jax.default_device(jax.devices("cpu")[0])`'
        )
    return _matmul_by_kernel(ctx, operands, params, _custom_call)


def _matmul_by_kernel(ctx: Any, operands: Sequence[Any], params: dict[str, Any], emit: Emit) -> Any:
    """`emit` makes the chosen kernel's call, of operands in the kernel's order."""
    problem = problem_of(ctx.avals_in, **params)
    if reason := why_not_precision(params["precision"], problem.a_dtype):
        return _fall_back(ctx, operands, problem, reason, params)
    compiles = params["compile_missing"] == "auto"
    flips = is_transpose(operands)
    asked = Asked(problem, params["device"], params["tile"], params["emulate"] != "off", compiles, flips)
    attempt = choose(asked)
    if attempt.entry is None:
        return _fall_back(ctx, operands, attempt.route.problem, attempt.reason or "", params)
    if attempt.is_fused:
        return _call(ctx, operands, attempt, params, emit)
    own = _of_product(ctx)
    return _finish(ctx, _call(own, operands[:2], attempt, params, emit), own.avals_out, operands[2:], params)


def _call(ctx: Any, operands: Sequence[Any], attempt: Attempt, params: dict[str, Any], emit: Emit) -> Any:
    plan, is_emulated = attempt.plan, params["emulate"] != "off"
    assert plan is not None  # the attempt has a kernel
    register(is_emulated)
    values, avals = take(ctx, attempt.route, operands, Repacker(params["device"], is_emulated, plan.pdl).emit)
    if plan.swapped:
        values[:2], avals[:2] = values[1::-1], avals[1::-1]
    return emit(ctx.replace(avals_in=avals), values, Decision(plan, attempt.entry))


def _of_product(ctx: Any) -> Any:
    """The context of a product alone, which has the first two operands and a float32 result."""
    return ctx.replace(avals_in=ctx.avals_in[:2], avals_out=[ctx.avals_out[0].update(dtype=jnp.dtype("float32"))])


def _finish(ctx: Any, acc: Any, acc_avals: Any, rest: Sequence[Any], params: dict[str, Any]) -> Any:
    """XLA's epilogue of a kernel's float32."""

    def finished(acc: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        return finish(acc, params["epilogue"], rest, params["out_dtype"])

    own = ctx.replace(avals_in=[*acc_avals, *ctx.avals_in[2:]])
    return mlir.lower_fun(finished, multiple_results=True)(own, *acc, *rest)


def _custom_call(ctx: Any, operands: Sequence[Any], decision: Decision) -> Any:
    """What the kernel returns beyond the product's results, such as a workspace, nobody reads."""
    assert decision.plan is not None and decision.entry is not None  # the caller has a kernel
    made, asked = request(decision.plan, decision.entry), len(ctx.avals_out)
    unread = [jax.core.ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in made.results[asked:]]
    own = ctx.replace(avals_out=[*ctx.avals_out, *unread])
    results = jax.ffi.ffi_lowering(TARGET_NAME)(own, *operands, **as_hlo(made.attributes))[:asked]
    return results if _may_lie_anywhere(decision.entry) else list(map(barrier, results))


def _may_lie_anywhere(entry: Entry) -> bool:
    """Whether the kernel can store into the middle of a larger array, where XLA has it store a result that is written
    there by a dynamic_update_slice. Threads can anywhere; TMA wants 16 bytes, which rows that it can step over keep,
    as those have that a scan stacks. (A loop that flattens a result first is refused, with the remedy.)"""
    return entry.variant.store == "threads" or may_be_in_loop()


def _emulation(ctx: Any, operands: Sequence[Any], decision: Decision) -> Any:
    """A call back to Python, with all that the custom call has.

    Not by `jax.pure_callback`, which turns the operands into JAX arrays: with operands sharded over CPU devices,
    jax 0.10.2 then waited for a device that waited for the callback. Here they arrive as NumPy arrays.
    """
    from jax_bwgemm.runtime.emulated import kernel_of  # here, so that `import jax_bwgemm` leaves the emulator out

    assert decision.plan is not None  # the caller has a kernel
    kernel, (result,) = kernel_of(decision, decision.plan.problem), ctx.avals_out

    def call(*values: np.ndarray) -> tuple[np.ndarray]:
        return (kernel(*values).reshape(result.shape),)

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    results, _, _ = mlir.emit_python_callback(ctx, call, None, operands, ctx.avals_in, ctx.avals_out, **settings)
    return results


def _fall_back(ctx: Any, operands: Sequence[Any], problem: Problem, reason: str, params: dict[str, Any]) -> Any:
    if not problem.is_empty:
        report_fallback(params["on_fallback"], str(problem), reason)
    return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands, **params)


for _primitive in (matmul_p, fused_matmul_p):
    # Not cacheable, since a shared lowering would hide the transposes that `is_transpose` looks for; and one rule for
    # all platforms: where uncached rules of several meet in one module, jax 0.9.2 to 0.12 raises TypeError.
    mlir.register_lowering(_primitive, _matmul_lowering, cacheable=False)
