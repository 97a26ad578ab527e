"""What the primitives become on each platform: our custom call where a kernel can do it, else XLA's own dot, aloud."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_bwgemm.artifacts import PARAM_KINDS, TmaFacts
from jax_bwgemm.config import report_fallback
from jax_bwgemm.decision import Decision, decide, k_major, without_epilogue
from jax_bwgemm.ffi import L2_CODES, RASTER_CODES, TARGET_NAME
from jax_bwgemm.geometry import concurrent_clusters
from jax_bwgemm.precision import why_not_precision
from jax_bwgemm.primitive import fused_matmul_p, matmul_p
from jax_bwgemm.problem import Problem
from jax_bwgemm.reference import apply_epilogue, reference
from jax_bwgemm.repacking import Repacker
from jax_bwgemm.shape_rules import extras, problem_of
from jax_bwgemm.tile import workspace_bytes
from jax_bwgemm.ways import Way, take, ways

Emit = Callable[[Any, Sequence[Any], Decision], Any]
_NO_TMA = TmaFacts((0, 0, 0), 0, 0)


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
    """`emit` makes the chosen kernel's call, of operands in the kernel's order."""
    problem = problem_of(ctx.avals_in, **params)
    if reason := why_not_precision(params["precision"], problem.a_dtype):
        return _fall_back(ctx, operands, problem, reason, params)
    choice = _choose(_ways(ctx, operands, params), params)
    if choice.decision.entry is not None:
        return _call(ctx, operands, choice, params, emit)
    if (alone := without_epilogue(problem)) is not None:
        own, own_params = _without_epilogue(ctx, alone, params)
        split = _choose(_ways(own, operands[:2], own_params), own_params)
        if split.decision.entry is not None:
            return _finish(ctx, _call(own, operands[:2], split, own_params, emit), own.avals_out, operands[2:], params)
    if choice.illegal is not None:
        raise choice.illegal
    return _fall_back(ctx, operands, choice.way.problem, choice.decision.reason or "", params)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """`illegal`: there is no kernel, since the user's tile cannot compute the product under some way's majors."""

    way: Way
    decision: Decision
    illegal: ValueError | None = None


def _ways(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Way]:
    where = {"device": params["device"], "is_emulated": params["emulate"] != "off"}
    return ways(ctx, operands, params, functools.partial(k_major, **where))


def _choose(found: list[Way], params: dict[str, Any]) -> _Choice:
    """The first way that has a kernel; else the first for which one can be compiled; else the first and why not."""
    refused: list[_Choice] = []
    for compiles in (False, True) if params["compile_missing"] == "auto" else (False,):
        refused = []
        for way in found:
            try:
                decision = _decide(way.problem, params, compiles)
            except ValueError as illegal:
                refused.append(_Choice(way, Decision(), illegal))
                continue
            if decision.entry is not None:
                return _Choice(way, decision)
            refused.append(_Choice(way, decision))
    return next((choice for choice in refused if choice.illegal is not None), refused[0])


def _call(ctx: Any, operands: Sequence[Any], choice: _Choice, params: dict[str, Any], emit: Emit) -> Any:
    plan = choice.decision.plan
    assert plan is not None  # the caller has a kernel
    repacker = Repacker(params["device"], params["emulate"] != "off", plan.pdl)
    values, avals = take(ctx, choice.way, operands, repacker.emit)
    if plan.swapped:
        values[:2], avals[:2] = values[1::-1], avals[1::-1]
    return emit(ctx.replace(avals_in=avals), values, choice.decision)


def _without_epilogue(ctx: Any, alone: Problem, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The context and params of `alone`, which has the first two operands and a result of its own dtype."""
    dtype, plain = jnp.dtype(alone.out_dtype), alone.epilogue
    own = ctx.replace(avals_in=ctx.avals_in[:2], avals_out=[ctx.avals_out[0].update(dtype=dtype)])
    return own, params | {"out_dtype": dtype, "alpha": plain.alpha, "activation": plain.activation}


def _finish(ctx: Any, acc: Any, acc_avals: Any, rest: Sequence[Any], params: dict[str, Any]) -> Any:
    """XLA's epilogue of a kernel's float32."""

    def finish(acc: jax.Array, *rest: jax.Array) -> jax.Array:
        steps = {"alpha": params["alpha"], "activation": params.get("activation"), "out_dtype": params["out_dtype"]}
        return apply_epilogue(acc, *extras((None, None, *rest)), **steps)

    own = ctx.replace(avals_in=[*acc_avals, *ctx.avals_in[2:]])
    return mlir.lower_fun(finish, multiple_results=False)(own, *acc, *rest)


def _decide(problem: Problem, params: dict[str, Any], compiles: bool) -> Decision:
    if not problem.is_static:
        return Decision(reason="a kernel is chosen for sizes known at trace time, and these are symbolic")
    return decide(problem, params["device"], params["tile"], params["emulate"] != "off", compiles)


def _custom_call(ctx: Any, operands: Sequence[Any], decision: Decision) -> Any:
    """A workspace is a second result, which nobody reads."""
    if size := workspace_of(decision):
        ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((size,), np.dtype(np.uint8))])
    return jax.ffi.ffi_lowering(TARGET_NAME)(ctx, *operands, **attributes(decision))[:1]


def workspace_of(decision: Decision) -> int:
    """Bytes; 0 if the kernel takes none."""
    plan = decision.plan
    assert plan is not None and plan.tile is not None  # the caller has a kernel
    return workspace_bytes(plan.tile, concurrent_clusters(plan.tile, plan.arch))


def _emulation(ctx: Any, operands: Sequence[Any], decision: Decision) -> Any:
    """A call back to Python, with all that the custom call has.

    Not by `jax.pure_callback`, which turns the operands into JAX arrays: with operands sharded over CPU devices,
    jax 0.10.2 then waited for a device that waited for the callback. Here they arrive as NumPy arrays.
    """
    from jax_bwgemm.emulated import kernel_of  # here, so that `import jax_bwgemm` leaves the emulator out

    assert decision.plan is not None  # the caller has a kernel
    kernel, (result,) = kernel_of(decision, decision.plan.problem), ctx.avals_out

    def call(*values: np.ndarray) -> tuple[np.ndarray]:
        return (kernel(*values).reshape(result.shape),)

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    results, _, _ = mlir.emit_python_callback(ctx, call, None, operands, ctx.avals_in, ctx.avals_out, **settings)
    return results


def attributes(decision: Decision) -> dict[str, Any]:
    """The custom call's attributes; docs/architecture.md, "The custom calls"."""
    plan, entry = decision.plan, decision.entry
    assert plan is not None and entry is not None  # the caller has a kernel
    variant, tile = entry.variant, entry.variant.tile
    tma = [entry.tma.get(x, _NO_TMA) for x in "abc"]
    ints = {
        "cta_m": tile.cta_m,
        "mma_n": tile.mma_n,
        "cluster_m": tile.cluster_m,
        "cluster_n": tile.cluster_n,
        "cluster_k": tile.cluster_k,
        "num_threads": entry.num_threads,
        "smem_bytes": entry.smem_bytes,
        "raster_group": plan.raster_group,
        "raster_along_n": plan.raster_along_n,
        "raster_order": RASTER_CODES[plan.raster_order],
        "a_l2": L2_CODES[plan.a_l2],
        "b_l2": L2_CODES[plan.b_l2],
        "stream_tiles": plan.stream.tiles,
        "stream_clusters": plan.stream.clusters,
        "pdl": int(plan.pdl),
        "param_bytes": entry.param_bytes,
    }
    arrays: dict[str, tuple[int, ...]] = {f"{x}_box": facts.box for x, facts in zip("abc", tma, strict=True)}
    arrays["swizzle_bytes"] = tuple(facts.swizzle_bytes for facts in tma)
    arrays["swizzle_atom_bytes"] = tuple(facts.swizzle_atom_bytes for facts in tma)
    arrays["params"] = tuple(x for p in entry.params for x in (PARAM_KINDS.index(p.kind), p.offset, p.size))
    return {
        "variant": entry.name,
        "entry": entry.entry,
        "target": variant.target,
        "cubin_sha256": entry.cubin_sha256,
        "a_major": variant.a_major,
        "b_major": variant.b_major,
        "c_major": variant.c_major,
        "alpha": np.float32(plan.problem.epilogue.alpha),
        **{name: np.int32(value) for name, value in ints.items()},
        **{name: np.array(value, np.int32) for name, value in arrays.items()},
    }


def _fall_back(ctx: Any, operands: Sequence[Any], problem: Problem, reason: str, params: dict[str, Any]) -> Any:
    if not problem.is_empty:
        report_fallback(params["on_fallback"], str(problem), reason)
    return mlir.lower_fun(reference, multiple_results=False)(ctx, *operands, **params)


for _primitive in (matmul_p, fused_matmul_p):
    # Not cacheable: a shared lowering would hide the transposes that `before_transpose` looks for.
    mlir.register_lowering(_primitive, _matmul_xla_lowering, cacheable=False)
    mlir.register_lowering(_primitive, _matmul_cuda_lowering, platform="cuda", cacheable=False)
