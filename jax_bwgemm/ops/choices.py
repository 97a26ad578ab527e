"""What a product of a lowering asks of `attempts`, and what is chosen for it: one kernel, or several for a range of
sizes; what became of it is noted. Emits nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import Symbols, sized
from jax_bwgemm.ops.dimensions import stand_in
from jax_bwgemm.ops.origins import users_line
from jax_bwgemm.ops.partition import spans_devices
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.shape_rules import viewed
from jax_bwgemm.ops.taking import Sources
from jax_bwgemm.planner.views import View
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.attempts import State, alone, choose, expected, state
from jax_bwgemm.runtime.rungs import Asked, Attempt

COMPILED_FIRST = "compiled first, once, in some seconds"


@dataclasses.dataclass(frozen=True)
class Refused:
    """A product that XLA computes, and why; whether it computes all others, too. A gated product `is_composed` where
    kernels may still compute its two. One that XLA is expected to be done with sooner (`is_sooner`) is no fallback.
    Where a program is explained, XLA stands in for a kernel that is `missing`, and would be compiled first."""

    problem: Problem
    reason: str
    is_everywhere: bool = False
    is_composed: bool = False
    is_sooner: bool = False
    missing: Attempt | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel that computes a product, how it sees the operands, what these are transposes of, and what its sizes
    may be that are symbols."""

    attempt: Attempt
    view: View
    before: Sources
    symbols: Symbols | None = None

    @property
    def entry(self) -> Entry:
        assert self.attempt.entry is not None  # that is what was chosen
        return self.attempt.entry

    @property
    def problem(self) -> Problem:
        return seen_as(self.attempt.problem, self.view)

    @property
    def profiled_name(self) -> str:
        """Problem and tile, of which the kernel's own symbol has no sizes."""
        p = self.problem
        batch = f"{p.batch}x" if p.batch != 1 else ""
        sizes = f"{batch}{p.m}x{p.n}x{p.k}".replace(" ", "")  # of a symbol such as 8*b + 1
        return f"gemm_{sizes}_{self.entry.variant.tile}"

    def is_like(self, other: Choice) -> bool:
        """Whether the same kernel has the same operands."""
        mine, others = self.attempt, other.attempt
        routes = [(x.route.from_source, x.route.transposes, x.is_fused, x.parts) for x in (mine, others)]
        return self.entry == other.entry and routes[0] == routes[1]


def seen_as(problem: Problem, view: View) -> Problem:
    """With the user's sizes, which may be symbols, and not those that stand for them."""
    batches = {"a_batch": view.rows[0].shape[0], "b_batch": view.columns[0].shape[0]}
    sizes: dict[str, Any] = {"m": view.m, "n": view.n, "k": view.k, "batch": view.batch}
    return dataclasses.replace(problem, **sizes | batches)


def chosen(ctx: Any, before: Sources, params: dict[str, Any]) -> tuple[Choice, ...] | Refused:
    """The kernel of a product; of one whose sizes are symbols, those of the parts of their range, from the least to the
    most. It has one for all of them where a part would have none."""
    view, asked = asked_of(ctx, before, params)
    if reason := why_not_precision(params["precision"], asked.problem.a_dtype):
        return Refused(seen_as(asked.problem, view), reason)
    seen = _seen(ctx, asked)

    def decided(asked: Asked) -> Attempt:
        return expected(asked) if record.is_explained() else choose(asked, seen)

    parts = asked.symbols.parts if asked.symbols and not asked.tile else ()
    found = [decided(_of_part(asked, part)) for part in parts]
    if found and all(attempt.entry for attempt in found):
        return _merged(Choice(attempt, view, before, part) for attempt, part in zip(found, parts, strict=True))
    attempt = decided(asked)
    if attempt.is_missing:
        return Refused(seen_as(attempt.problem, view), "its kernel is compiled first", missing=attempt)
    if attempt.entry is None:
        return refused(attempt, seen_as(attempt.route.problem, view))
    return (Choice(attempt, view, before, asked.symbols),)


def _of_part(asked: Asked, part: Symbols) -> Asked:
    return dataclasses.replace(asked, problem=sized(asked.problem, part.middle), symbols=part)


def _merged(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Neighbours that are alike are one; in the order of tiles that is for the larger sizes, where it counts."""
    found: list[Choice] = []
    for choice in choices:
        if found and found[-1].is_like(choice):
            before, own = found.pop().symbols, choice.symbols
            choice = dataclasses.replace(choice, symbols=before.up_to(own) if before and own else own)
        found.append(choice)
    return tuple(found)


def asked_of(ctx: Any, before: Sources, params: dict[str, Any]) -> tuple[View, Asked]:
    """How a kernel sees the operands, and what is asked for them."""
    a_modes, b_modes = (source.modes if source else None for source in before[:2])
    view, problem = viewed(ctx.avals_in, (a_modes, b_modes), **params)
    settings = params["settings"]
    if settings.is_batch_invariant and (view.flips or view.n == 1):
        # a's rows are, or would be but for being one, the kernel's columns, whose number says which epilogues it has.
        view = dataclasses.replace(view, fuses=view.fuses and params["epilogue"].is_identity)
    if problem.epilogue.reductions and not problem.is_static:  # whose parts have sizes that only a run knows
        view = dataclasses.replace(view, fuses=False)
    posed = problem if view.fuses else (alone(problem, fuses=False) or problem)
    known, symbols = (posed, None) if settings.is_emulated else stand_in(posed)
    asked = Asked(
        known,
        settings.planned_device,
        params["tile"],
        settings.is_emulated,
        settings.compile_missing == "auto",
        view.has_other,
        settings.is_batch_invariant,
        symbols,
        spans_devices(ctx),
    )
    return view, asked


def known(ctx: Any) -> dict[Any, Any]:
    """What JAX keeps for the life of a module; nothing is kept where a version of JAX has no such place."""
    found: dict[Any, Any] = getattr(ctx.module_context, "cached_primitive_lowerings", {})
    return found


def _seen(ctx: Any, asked: Asked) -> State:
    """The files are looked at once a module."""
    kept, key = known(ctx), ("jax_bwgemm", asked.device, asked.is_emulated)
    if key not in kept:
        kept[key] = state(asked)
    found: State = kept[key]
    return found


def refused(attempt: Attempt, problem: Problem) -> Refused:
    """What an attempt without a kernel says of the problem."""
    return Refused(problem, attempt.reason or "", is_composed=attempt.is_composed, is_sooner=attempt.is_sooner)


def note_refused(refused: Refused) -> None:
    made = record.Product(str(refused.problem), reason=refused.reason, where=_where())
    if not refused.is_composed:  # whose two products are noted, too
        made = dataclasses.replace(made, flops=refused.problem.flops, min_bytes=refused.problem.min_bytes)
    record.note(made)


def note_kernels(choices: Sequence[Choice]) -> None:
    """One product; its kernel is that for the largest sizes."""
    *others, choice = choices
    if not record.is_read():
        for one in choices:
            record.note(record.Product("", one.entry.name))
        return
    attempt, view, route = choice.attempt, choice.view, choice.attempt.route
    names = "ba" if view.flips else "ab"
    notes = [f"{x} moved by XLA" for x, ways in zip(names, (view.rows, view.columns), strict=True) if ways[0].moves]
    notes += [f"{x} transposed by XLA" for x, is_made in zip(names, route.as_given, strict=True) if is_made]
    notes += [f"{x} transposed" for x, flips in zip(names, route.transposes, strict=True) if flips]
    notes += [f"{x} padded" for i, x in enumerate(names) if route.padding(i) and not route.transposes[i]]
    if choice.symbols:
        notes += [f"for {choice.symbols}", *(f"{other.entry.name} for {other.symbols}" for other in others)]
    reason = None if attempt.is_fused and view.fuses else attempt.reason or "its vectors are not the kernel's"
    if attempt.parts > 1 and reason:  # what XLA has is the sum, and an epilogue with it
        notes, reason = [*notes, reason], None
    problem, name = choice.problem, choice.entry.name
    own = str(problem), name, attempt.us, reason, tuple(notes), _where(), problem.flops, problem.min_bytes
    record.note(record.Product(*own))


def note_whole(likely: Attempt) -> None:
    notes = ["of the whole, which is divided over the mesh: a device's part may have another kernel"]
    if likely.for_its_sizes:
        notes.append(f"of the whole, {likely.reason}")
    notes += [COMPILED_FIRST] if likely.is_missing else []
    _note_planned(likely, likely.problem, notes)


def note_missing(refused: Refused) -> None:
    assert refused.missing is not None
    why_xlas = None if refused.missing.is_fused else refused.missing.reason
    _note_planned(refused.missing, refused.problem, [COMPILED_FIRST], why_xlas)


def _note_planned(planned: Attempt, problem: Problem, notes: Sequence[str], why_xlas: str | None = None) -> None:
    assert planned.plan is not None and planned.plan.variant is not None  # a kernel is at hand, or can be compiled
    own = planned.plan.variant.name, planned.us, why_xlas, tuple(notes), _where(), problem.flops, problem.min_bytes
    record.note(record.Product(str(problem), *own))


def _where() -> str:
    line = users_line()
    return "" if line is None else f"{os.path.basename(line[0])}:{line[1]}"
