"""What the primitives become on each platform: our custom call where a kernel can do it, else XLA's own dot, aloud."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_bwgemm.facts.epilogue import Epilogue, unfused
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.ops.calls import custom_call
from jax_bwgemm.ops.origins import may_be_in_loop, named, users_line
from jax_bwgemm.ops.partition import is_divided, lower_divided, why_not
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.primitive import fused_matmul_p, matmul_p, product
from jax_bwgemm.ops.reference import aligned, finish, reference
from jax_bwgemm.ops.repacking import Repacker
from jax_bwgemm.ops.repeats import Emitted
from jax_bwgemm.ops.shape_rules import viewed
from jax_bwgemm.ops.taking import Sources, Taker, barrier, is_aligned, sources, whole_sources
from jax_bwgemm.planner.views import View
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.attempts import Asked, Attempt, State, alone, choose, expected, state
from jax_bwgemm.runtime.config import Config, report_fallback
from jax_bwgemm.runtime.decision import Decision, register
from jax_bwgemm.runtime.ffi import TARGET_NAME
from jax_bwgemm.runtime.launch import request

Emit = Callable[[Any, Sequence[Any], Decision], Any]


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


@dataclasses.dataclass(frozen=True)
class Refused:
    """A product that XLA computes, and why; whether it computes all others, too. A gated product `is_composed` where
    kernels may still compute its two."""

    problem: Problem
    reason: str
    is_everywhere: bool = False
    is_composed: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel that computes a product, how it sees the operands, and what these are transposes of."""

    attempt: Attempt
    view: View
    before: Sources


def _or_fall_back(ctx: Any, operands: Sequence[Any], params: dict[str, Any], made: Sequence[Any] | Refused) -> Any:
    if not isinstance(made, Refused):
        return made
    if made.is_composed:
        note_refused(made)
        return _composed(ctx, operands, params)
    if not made.problem.is_empty:
        note_refused(made)
        where = users_line()
        settings, what = params["settings"], str(made.problem)
        report_fallback(settings.on_fallback, what, settings.why_aloud(made.reason), where, made.is_everywhere)
    return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands, **params)


def note_refused(refused: Refused) -> None:
    record.note(record.Product(str(refused.problem), reason=refused.reason, where=_where()))


def _where() -> str:
    line = users_line()
    return "" if line is None else f"{os.path.basename(line[0])}:{line[1]}"


def _note_kernel(choice: Choice) -> None:
    attempt, view = choice.attempt, choice.view
    assert attempt.plan is not None and attempt.entry is not None  # it has a kernel
    if not record.is_read():
        record.note(record.Product("", attempt.entry.name))
        return
    names = "ba" if view.flips else "ab"
    moved = [f"{x} moved by XLA" for x, ways in zip(names, (view.rows, view.columns), strict=True) if ways[0].moves]
    route = attempt.route
    moved += [f"{x} transposed" for x, flips in zip(names, route.transposes, strict=True) if flips]
    moved += [f"{x} padded" for i, x in enumerate(names) if route.padding(i) and not route.transposes[i]]
    reason = None if attempt.is_fused and view.fuses else attempt.reason or "its vectors are not the kernel's"
    made = record.Product(str(route.problem), attempt.entry.name, attempt.us, reason, tuple(moved), _where())
    record.note(made)


def _note_whole(likely: Attempt) -> None:
    assert likely.plan is not None and likely.plan.variant is not None  # it is not XLA's
    notes = ("of the whole, which is divided over the mesh: a device's part may have another kernel",)
    name = likely.plan.variant.name
    record.note(record.Product(str(likely.route.problem), name, likely.us, None, notes, _where()))


def on_cuda(ctx: Any, operands: Sequence[Any], params: dict[str, Any], moves: bool = True) -> Sequence[Any] | Refused:
    """Our kernels' results; without `moves`, only of operands that they can read as they lie."""
    if not moves:
        view, asked = _asked(ctx, sources(operands, params["contraction"]), params)
        if view.moves:
            return Refused(asked.problem, "no kernel reads the operands as they lie, and XLA may not have to move them")
    return _divided(ctx, operands, params) if is_divided(ctx) else _by_custom_call(ctx, operands, params)


def _by_custom_call(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | Refused:
    """Emitted anew, or as the same product was before in this module."""
    before = sources(operands, params["contraction"])
    given, key = _deciding(ctx, operands, before, params)
    known = _known(ctx)
    if key in known:
        choice, emitted = known[key]
        _note_kernel(choice)
        with named(ctx, _profiled_name(choice.attempt)):
            again: list[Any] = emitted.again(given)
        return again
    choice = _chosen(ctx, before, params)
    if isinstance(choice, Refused):
        return choice
    results = _by_kernel(ctx, operands, params, choice, _custom_call)
    is_padded = any(choice.attempt.route.padding(i) for i in range(2))  # by whom depends on what made the operand
    if not is_padded and (emitted := Emitted.of(given, results)):
        known[key] = choice, emitted
    return results


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
    choice = _chosen(ctx, sources(operands, params["contraction"]), params)
    return choice if isinstance(choice, Refused) else _by_kernel(ctx, operands, params, choice, _emulation)


def _chosen(ctx: Any, before: Sources, params: dict[str, Any]) -> Choice | Refused:
    view, asked = _asked(ctx, before, params)
    if reason := why_not_precision(params["precision"], asked.problem.a_dtype):
        return Refused(asked.problem, reason)
    attempt = choose(asked, _seen(ctx, asked))
    if attempt.entry is None:
        return Refused(attempt.route.problem, attempt.reason or "", is_composed=attempt.is_composed)
    return Choice(attempt, view, before)


def _known(ctx: Any) -> dict[Any, Any]:
    """What JAX keeps for the life of a module; nothing is kept where a version of JAX has no such place."""
    found: dict[Any, Any] = getattr(ctx.module_context, "cached_primitive_lowerings", {})
    return found


def _seen(ctx: Any, asked: Asked) -> State:
    """The files are looked at once a module."""
    known, key = _known(ctx), ("jax_bwgemm", asked.device, asked.is_emulated)
    if key not in known:
        known[key] = state(asked)
    found: State = known[key]
    return found


def _by_kernel(ctx: Any, operands: Sequence[Any], params: dict[str, Any], choice: Choice, emit: Emit) -> Sequence[Any]:
    """`emit` makes the kernel's call, of operands in the kernel's order."""
    _note_kernel(choice)
    attempt, view = choice.attempt, choice.view
    taker, outer = Taker(ctx, params["contraction"], params["epilogue"], view, choice.before), None
    if not (view.fuses and attempt.is_fused):
        inner, outer = unfused(params["epilogue"]) if view.fuses else (Epilogue(), params["epilogue"])
        taker = dataclasses.replace(taker, ctx=_of_product(ctx, inner, outer), **_without(params, inner))
    results = _call(taker, operands, attempt, params["settings"], emit)
    return results if outer is None else _finish(ctx, results, taker.ctx.avals_out, operands[2:], params, inner, outer)


def _asked(ctx: Any, before: Sources, params: dict[str, Any]) -> tuple[View, Asked]:
    """How a kernel sees the operands, and what is asked for them."""
    a_modes, b_modes = (source.modes if source else None for source in before[:2])
    view, problem = viewed(ctx.avals_in, (a_modes, b_modes), **params)
    settings = params["settings"]
    if settings.is_batch_invariant and (view.flips or view.n == 1):
        # a's rows are, or would be but for being one, the kernel's columns, whose number says which epilogues it has.
        view = dataclasses.replace(view, fuses=view.fuses and params["epilogue"].is_identity)
    posed = problem if view.fuses else (alone(problem) or problem)
    asked = Asked(
        posed,
        settings.planned_device,
        params["tile"],
        settings.is_emulated,
        settings.compile_missing == "auto",
        view.has_other,
        settings.is_batch_invariant,
    )
    return view, asked


def _divided(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | Refused:
    """Over the devices of a mesh. Whether a kernel is worth it, and whether an operand is taken from before its
    transpose, is settled for the whole product, since a device's part sees no more than its shards; all else is for
    that part to choose."""
    before = sources(operands, params["contraction"])
    view, asked = _asked(ctx, before, params)
    if reason := why_not(ctx) or why_not_precision(params["precision"], asked.problem.a_dtype):
        return Refused(asked.problem, reason)
    likely = expected(asked)
    if likely.entry is None and not likely.is_missing:
        return Refused(likely.route.problem, likely.reason or "", is_composed=likely.is_composed)
    if record.is_listed():  # of a program that is not compiled, and its parts are lowered when XLA compiles
        _note_whole(likely)
    ways = zip((view.rows, view.columns), likely.route.from_source, strict=True)
    is_given = [choice[int(other)].is_given for choice, other in ways]
    taken = [
        None if given else source for given, source in zip(is_given[:: -1 if view.flips else 1], before, strict=True)
    ]
    own, values, contraction = whole_sources(ctx, operands, params["contraction"], taken)
    return lower_divided(own, values, params | {"contraction": contraction})


def _call(taker: Taker, operands: Sequence[Any], attempt: Attempt, settings: Config, emit: Emit) -> list[Any]:
    plan, avals_out = attempt.plan, taker.ctx.avals_out
    assert plan is not None  # the attempt has a kernel
    register(settings.is_emulated)
    repacker = Repacker(settings.planned_device, settings.is_emulated, plan.pdl)
    takes_one = plan.tile is not None and plan.tile.symmetric
    values, avals = taker.take(attempt.route, operands[: len(taker.ctx.avals_in)], repacker.emit, takes_one)
    if plan.swapped:
        values[:2], avals[:2] = values[1::-1], avals[1::-1]
    own = taker.ctx.replace(avals_in=avals, avals_out=list(map(taker.result_aval, avals_out)))
    with named(taker.ctx, _profiled_name(attempt)):
        results = emit(own, values, Decision(plan, attempt.entry))
    return [taker.give(result, aval) for result, aval in zip(results, avals_out, strict=True)]


def _profiled_name(attempt: Attempt) -> str:
    """Problem and tile, of which the kernel's own symbol has no sizes."""
    assert attempt.entry is not None  # the attempt has a kernel
    p = attempt.route.problem
    batch = f"{p.batch}x" if p.batch != 1 else ""
    return f"gemm_{batch}{p.m}x{p.n}x{p.k}_{attempt.entry.variant.tile}"


def _of_product(ctx: Any, inner: Epilogue, outer: Epilogue) -> Any:
    """The context of a product with the first part of an epilogue: of its first operands, and one result, in float32
    unless it is itself a result."""
    out = ctx.avals_out[0] if outer.seconds else ctx.avals_out[0].update(dtype=jnp.dtype("float32"))
    return ctx.replace(avals_in=ctx.avals_in[: 2 + len(inner.operands)], avals_out=[out])


def _without(params: dict[str, Any], inner: Epilogue) -> dict[str, Any]:
    extras = params["contraction"].extras[: len(inner.operands)]
    return {"contraction": dataclasses.replace(params["contraction"], extras=extras), "epilogue": inner}


def _finish(
    ctx: Any, acc: Any, acc_avals: Any, rest: Sequence[Any], params: dict[str, Any], inner: Epilogue, outer: Epilogue
) -> Any:
    """XLA's part of an epilogue, of what a kernel has made of the rest."""
    known = params["epilogue"].operands

    def finished(acc: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        values = dict(zip(known, aligned(rest, params["contraction"]), strict=True))
        own = [values[x] for x in outer.operands]
        return finish((acc.astype(jnp.float32),), outer, own, params["out_dtype"])

    own = ctx.replace(avals_in=[*acc_avals, *ctx.avals_in[2:]])
    return mlir.lower_fun(finished, multiple_results=True)(own, *acc, *rest)


def _composed(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """A gated product as two, each with its own choice, and XLA's pass over both."""

    def composed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        count = len(params["contraction"].factors)
        own = params | {"contraction": params["contraction"].product, "epilogue": Epilogue(), "tile": None}
        sums = [product(operands[0], b, **own).astype(jnp.float32) for b in operands[1:count]]
        return finish(sums, params["epilogue"], aligned(operands[count:], params["contraction"]), params["out_dtype"])

    return mlir.lower_fun(composed, multiple_results=True)(ctx, *operands)


def _custom_call(ctx: Any, operands: Sequence[Any], decision: Decision) -> Any:
    """What the kernel returns beyond the product's results, such as a workspace, nobody reads."""
    assert decision.plan is not None and decision.entry is not None  # the caller has a kernel
    made, asked = request(decision.plan, decision.entry), len(ctx.avals_out)
    unread = [jax.core.ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in made.results[asked:]]
    own = ctx.replace(avals_out=[*ctx.avals_out, *unread])
    results = custom_call(own, TARGET_NAME, operands, made.attributes)[:asked]
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
