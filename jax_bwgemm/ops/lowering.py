"""What the primitives become on each platform: our custom call where a kernel can do it, else XLA's own dot, aloud."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_bwgemm.facts.epilogue import Epilogue, unfused
from jax_bwgemm.ops.calls import custom_call
from jax_bwgemm.ops.choices import (
    Choice,
    Refused,
    asked_of,
    chosen,
    known,
    note_kernels,
    note_missing,
    note_refused,
    note_whole,
    refused,
    seen_as,
)
from jax_bwgemm.ops.origins import may_be_in_loop, named, users_line
from jax_bwgemm.ops.partition import is_divided, lower_divided, why_not
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.primitive import fused_matmul_p, matmul_p, product
from jax_bwgemm.ops.reference import aligned, finish, reference
from jax_bwgemm.ops.repacking import Repacker
from jax_bwgemm.ops.repeats import Emitted
from jax_bwgemm.ops.shape_rules import viewed
from jax_bwgemm.ops.taking import (
    Sources,
    Taker,
    barrier,
    is_aligned,
    reshape_aval,
    sources,
    type_of,
    whole_sources,
)
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.attempts import expected
from jax_bwgemm.runtime.config import Config, report_fallback
from jax_bwgemm.runtime.decision import Decision, register
from jax_bwgemm.runtime.ffi import TARGET_NAME
from jax_bwgemm.runtime.launch import request

Emit = Callable[[Any, Sequence[Any], Decision, Mapping[int, int]], Any]


def _matmul_lowering(ctx: Any, *operands: Any, branch: str | None = None, **params: Any) -> Any:
    """Of any platforms. In a module for CUDA and others, each of the two rules below has a `branch`."""
    platforms = [branch] if branch else platforms_of(ctx)
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


def platforms_of(ctx: Any) -> list[str]:
    if getattr(ctx.jaxpr_eqn_ctx, "compute_type", None) == "device_host":  # jax.experimental.compute_on
        return ["cpu"]
    return list(ctx.platforms or ctx.module_context.platforms)


def _matmul_xla_lowering(ctx: Any, platforms: list[str], *operands: Any, **params: Any) -> Any:
    """Every platform but CUDA."""
    if params["settings"].is_emulated:
        return _or_fall_back(ctx, operands, params, _by_emulated_kernel(ctx, operands, params))
    problem = viewed(ctx.avals_in, **params)[1]
    refused = Refused(problem, f"its kernels need CUDA, got {', '.join(platforms)}", is_everywhere=True)
    return _or_fall_back(ctx, operands, params, refused)


def _matmul_cuda_lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["settings"].is_emulated:
        raise ValueError(
            f"`emulate` requires a platform other than CUDA, such as cpu, got cuda for "
            f'{viewed(ctx.avals_in, **params)[1]}: pass `emulate="off"`, or compute on a CPU, as in '
            'a block of `jax.default_device(jax.devices("cpu")[0])`'
        )
    return _or_fall_back(ctx, operands, params, on_cuda(ctx, operands, params))


def _or_fall_back(ctx: Any, operands: Sequence[Any], params: dict[str, Any], made: Sequence[Any] | Refused) -> Any:
    if not isinstance(made, Refused):
        return made
    if made.is_composed:
        note_refused(made)
        return _composed(ctx, operands, params)
    if made.missing:
        note_missing(made)
    elif not made.problem.is_empty:
        note_refused(made)
        settings, what = params["settings"], str(made.problem)
        if not made.is_sooner:
            reason, where = settings.why_aloud(made.reason), users_line()
            report_fallback(settings.on_fallback, what, reason, where, made.is_everywhere)
    return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands, **params)


def on_cuda(ctx: Any, operands: Sequence[Any], params: dict[str, Any], moves: bool = True) -> Sequence[Any] | Refused:
    """Our kernels' results; without `moves`, only of operands that they can read as they lie."""
    if not moves:
        view, asked = asked_of(ctx, sources(operands, params["contraction"]), params)
        if view.moves:
            return Refused(
                seen_as(asked.problem, view),
                "no kernel reads the operands as they lie, and XLA may not have to move them",
            )
    return _divided(ctx, operands, params) if is_divided(ctx) else _by_custom_call(ctx, operands, params)


def _by_custom_call(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | Refused:
    """Emitted anew, or as the same product was before in this module."""
    before = sources(operands, params["contraction"])
    given, key = _deciding(ctx, operands, before, params)
    kept = known(ctx)
    if key in kept:
        choice, emitted = kept[key]
        note_kernels((choice,))
        with named(ctx, choice.profiled_name):
            again: list[Any] = emitted.again(given)
        return again
    choices = chosen(ctx, before, params)
    if isinstance(choices, Refused):
        return choices
    note_kernels(choices)
    if len(choices) > 1:
        return _by_size(ctx, operands, params, choices)
    results = _by_kernel(ctx, operands, params, choices[0], _custom_call)
    is_padded = any(choices[0].attempt.route.padding(i) for i in range(2))  # by whom depends on what made the operand
    if not is_padded and (emitted := Emitted.of(given, results)):
        kept[key] = choices[0], emitted
    return results


def _by_size(ctx: Any, operands: Sequence[Any], params: dict[str, Any], choices: Sequence[Choice]) -> Sequence[Any]:
    """A branch for the kernel of each part of a range. Where the program is compiled, the size is known, and XLA leaves
    one of them."""
    view, parts = choices[0].view, [choice.symbols for choice in choices if choice.symbols]
    dim, ends = parts[0].divided, [getattr(part, parts[0].divided).most for part in parts[:-1]]

    def index() -> jax.Array:
        size = jnp.asarray(getattr(view, dim), jnp.int32)
        return sum((jnp.asarray(size > end, jnp.int32) for end in ends), jnp.int32(0))

    own = ctx.replace(avals_in=[], avals_out=[jax.core.ShapedArray((), jnp.dtype("int32"))])
    (branch,) = mlir.lower_fun(index, multiple_results=False)(own)
    case = stablehlo.CaseOp(list(map(type_of, ctx.avals_out)), index=branch, num_branches=len(choices))
    for region, choice in zip(case.regions, choices, strict=True):
        with ir.InsertionPoint(region.blocks.append()):
            stablehlo.return_(_by_kernel(ctx, operands, params, choice, _custom_call))
    return list(case.results)


def _deciding(ctx: Any, operands: Sequence[Any], before: Sources, params: dict[str, Any]) -> tuple[list[Any], Any]:
    """The values that a product is made of, and all else that says what is emitted, as a key."""
    avals = [*ctx.avals_in, *(aval for aval, source in zip(ctx.avals_in, before, strict=False) if source)]
    given = [*operands, *(source.value for source in before if source)]
    values = tuple((value.type, is_aligned(ctx, value, aval)) for value, aval in zip(given, avals, strict=True))
    modes = tuple(source and source.modes for source in before)
    same = tuple(given.index(value) for value in given)  # of x @ x, nobody knows later which x was which
    where = ctx.primitive, may_be_in_loop(), *ctx.avals_in, *ctx.avals_out
    return given, ("jax_bwgemm", where, values, modes, same, *params.items())


def _by_emulated_kernel(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | Refused:
    choices = chosen(ctx, sources(operands, params["contraction"]), params)
    if isinstance(choices, Refused):
        return choices
    note_kernels(choices)
    return _by_kernel(ctx, operands, params, choices[0], _emulation)


def _by_kernel(ctx: Any, operands: Sequence[Any], params: dict[str, Any], choice: Choice, emit: Emit) -> Sequence[Any]:
    """`emit` makes the kernel's call, of operands in the kernel's order."""
    attempt, view = choice.attempt, choice.view
    taker, outer = Taker(ctx, params["contraction"], params["epilogue"], view, choice.before, attempt.parts), None
    if not (view.fuses and attempt.is_fused):
        has_vectors = view.fuses and attempt.parts == 1
        inner, outer = unfused(params["epilogue"]) if has_vectors else (Epilogue(), params["epilogue"])
        taker = dataclasses.replace(taker, ctx=_of_product(ctx, inner, outer), **_without(params, inner))
    over = params.get("in_place") if outer is None and not params["settings"].is_emulated else None
    results = _call(taker, operands, choice, params["settings"], emit, over)
    return results if outer is None else _finish(ctx, results, taker.ctx.avals_out, operands[2:], params, inner, outer)


def _divided(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | Refused:
    """Over the devices of a mesh. Whether there is a kernel, and whether an operand is taken from before its transpose,
    is settled for the whole product, since a device's part sees no more than its shards; all else is for that part to
    choose, and whether XLA is sooner done with products of its sizes."""
    before = sources(operands, params["contraction"])
    view, asked = asked_of(ctx, before, params)
    reason = (
        "over a mesh a kernel requires sizes known at trace time, and these are symbolic" if asked.symbols else None
    )
    if reason := reason or why_not(ctx) or why_not_precision(params["precision"], asked.problem.a_dtype):
        return Refused(seen_as(asked.problem, view), reason)
    likely = expected(asked)
    if likely.entry is None and not (likely.is_missing or likely.for_its_sizes):
        return refused(likely, likely.route.problem)
    if record.is_listed():  # of a program that is not compiled, and its parts are lowered when XLA compiles
        note_whole(likely)
    ways = zip((view.rows, view.columns), likely.route.from_source, strict=True)
    is_given = [choice[int(other)].is_given for choice, other in ways][:: -1 if view.flips else 1]
    taken = [None if given else source for given, source in zip(is_given, before[:2], strict=True)]
    own, values, contraction = whole_sources(ctx, operands, params["contraction"], taken)
    return lower_divided(own, values, params | {"contraction": contraction})


def _call(
    taker: Taker, operands: Sequence[Any], choice: Choice, settings: Config, emit: Emit, over: int | None = None
) -> list[Any]:
    """`over`: which of the epilogue's operands the first result is stored over, if it is one like that."""
    attempt, avals_out = choice.attempt, taker.ctx.avals_out
    plan = attempt.plan
    assert plan is not None  # the attempt has a kernel
    register(settings.is_emulated)
    repacker = Repacker(settings.planned_device, settings.is_emulated, plan.pdl)
    takes_one = plan.tile is not None and plan.tile.symmetric
    values, avals = taker.take(attempt.route, operands[: len(taker.ctx.avals_in)], repacker.emit, takes_one)
    if plan.swapped:
        values[:2], avals[:2] = values[1::-1], avals[1::-1]
    num = len(avals_out) - len(taker.epilogue.reductions)
    parts = [] if num == len(avals_out) else _parts(taker, Decision(plan, attempt.entry), num)
    own = taker.ctx.replace(avals_in=avals, avals_out=[*map(taker.result_aval, avals_out[:num]), *parts])
    aliases = {}
    if over is not None and over < len(taker.epilogue.operands) and taker.lies_alike(over):
        # As they are, without a batch: what is reshaped, XLA copies before it is stored over.
        at, given = len(values) - len(taker.epilogue.operands) + over, len(taker.contraction.factors) + over
        values[at], avals[at], aliases = operands[given], taker.ctx.avals_in[given], {at: 0}
        own = own.replace(avals_in=avals, avals_out=[avals_out[0], *own.avals_out[1:]])
    with named(taker.ctx, choice.profiled_name):
        results = emit(own, values, Decision(plan, attempt.entry), aliases)
    found = [taker.give(result, aval) for result, aval in zip(results[:num], avals_out[:num], strict=True)]
    reduced = enumerate(zip(results[num:], parts, avals_out[num:], strict=True))
    return found + [taker.give_reduced(*given, i) for i, given in reduced]


def _parts(taker: Taker, decision: Decision, num: int) -> list[Any]:
    """Avals of the parts of reductions that a kernel returns behind its `num` matrices."""
    assert decision.plan is not None and decision.entry is not None  # the caller has a kernel
    shapes = request(decision.plan, decision.entry).results[num : num + len(taker.epilogue.reductions)]
    return [reshape_aval(taker.ctx.avals_out[num], x.shape) for x in shapes]


def _of_product(ctx: Any, inner: Epilogue, outer: Epilogue) -> Any:
    """The context of a product with the first part of an epilogue: of its first operands, and one result, in float32
    unless it is itself a result."""
    out = ctx.avals_out[0] if outer.returns_sums else ctx.avals_out[0].update(dtype=jnp.dtype("float32"))
    return ctx.replace(avals_in=ctx.avals_in[: 2 + len(inner.operands)], avals_out=[out])


def _without(params: dict[str, Any], inner: Epilogue) -> dict[str, Any]:
    extras = params["contraction"].extras[: len(inner.operands)]
    contraction = dataclasses.replace(params["contraction"], extras=extras, reduced=())
    return {"contraction": contraction, "epilogue": inner}


def _finish(
    ctx: Any, acc: Any, acc_avals: Any, rest: Sequence[Any], params: dict[str, Any], inner: Epilogue, outer: Epilogue
) -> Any:
    """XLA's part of an epilogue, of what a kernel has made of the rest."""
    known = params["epilogue"].operands

    def finished(acc: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        values = dict(zip(known, aligned(rest, params["contraction"]), strict=True))
        own = [values[x] for x in outer.operands]
        axes = params["contraction"].reduced_axes
        return finish((acc.astype(jnp.float32),), outer, own, params["out_dtype"], axes)

    own = ctx.replace(avals_in=[*acc_avals, *ctx.avals_in[2:]])
    return mlir.lower_fun(finished, multiple_results=True)(own, *acc, *rest)


def _composed(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """A gated product as two, each with its own choice, and XLA's pass over both."""

    def composed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        count = len(params["contraction"].factors)
        own = params | {"contraction": params["contraction"].product, "epilogue": Epilogue(), "tile": None}
        sums = [product(operands[0], b, **own).astype(jnp.float32) for b in operands[1:count]]
        extras, axes = aligned(operands[count:], params["contraction"]), params["contraction"].reduced_axes
        return finish(sums, params["epilogue"], extras, params["out_dtype"], axes)

    return mlir.lower_fun(composed, multiple_results=True)(ctx, *operands)


def _custom_call(ctx: Any, operands: Sequence[Any], decision: Decision, aliases: Mapping[int, int]) -> Any:
    """What the kernel returns beyond the product's results, such as a workspace, nobody reads."""
    assert decision.plan is not None and decision.entry is not None  # the caller has a kernel
    made, asked = request(decision.plan, decision.entry), len(ctx.avals_out)
    unread = [jax.core.ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in made.results[asked:]]
    own = ctx.replace(avals_out=[*ctx.avals_out, *unread])
    results = custom_call(own, TARGET_NAME, operands, made.attributes, aliases)[:asked]
    return results if _may_lie_anywhere(decision.entry) else list(map(barrier, results))


def _may_lie_anywhere(entry: Entry) -> bool:
    """Whether the kernel can store into the middle of a larger array, where XLA has it store a result that is written
    there by a dynamic_update_slice. Threads can anywhere; TMA wants 16 bytes, which rows that it can step over keep,
    as those have that a scan stacks. (A loop that flattens a result first is refused, with the remedy.)"""
    return entry.variant.store == "threads" or may_be_in_loop()


def _emulation(ctx: Any, operands: Sequence[Any], decision: Decision, aliases: Mapping[int, int]) -> Any:
    """A call back to Python, with all that the custom call has, but that its result is an array of its own.

    Not by `jax.pure_callback`, which turns the operands into JAX arrays: with operands sharded over CPU devices,
    jax 0.10.2 then waited for a device that waited for the callback. Here they arrive as NumPy arrays.
    """
    from jax_bwgemm.runtime.emulated import kernel_of  # here, so that `import jax_bwgemm` leaves the emulator out

    assert decision.plan is not None  # the caller has a kernel
    kernel = kernel_of(decision, decision.plan.problem)

    def call(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x.reshape(aval.shape) for x, aval in zip(kernel(*values), ctx.avals_out, strict=True))

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    results, _, _ = mlir.emit_python_callback(ctx, call, None, operands, ctx.avals_in, ctx.avals_out, **settings)
    return results


for _primitive in (matmul_p, fused_matmul_p):
    # Not cacheable, since a shared lowering would hide the transposes that `sources` looks for; and one rule for
    # all platforms: where uncached rules of several meet in one module, jax 0.9.2 to 0.12 raises TypeError.
    mlir.register_lowering(_primitive, _matmul_lowering, cacheable=False)
