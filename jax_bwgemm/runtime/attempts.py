"""The one ladder of what can compute a product. The lowering goes down it, `explain` says where that ends.

    fused    one kernel, epilogue and all
    alone    the kernel of the product alone, which keeps float32; XLA computes the epilogue and rounds once, as ever
    parts    in the place of one of these: a kernel of k in parts, which keeps float32; XLA adds them up, and as before
    XLA      its own dot_general: where there is no kernel, or none that is predicted to be as fast

A rung's kernel has the operands by one of the `routes`, and a price. What was found is kept for as long as the
artifacts, the tables and the library stay what they are. Emits nothing, and compiles nothing but in `choose`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import Epilogue, unfused
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.repack import Shape
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.planner import measured, parts
from jax_bwgemm.planner.cost import pass_us
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.planner.routes import Route, routes
from jax_bwgemm.runtime import artifacts, jit_build, packs, rivals, rungs
from jax_bwgemm.runtime.decision import Decision, decide, find_repack, target_arch, why_not_asked, why_not_launched
from jax_bwgemm.runtime.rungs import Asked, Attempt, Ladder, is_as_good_as_any, us_of

SOONER = 1.02  # parts of k than one kernel: both are predicted by one model, whose errors are alike

State = tuple[Arch | str, tuple[object, ...]]

_asked: contextvars.ContextVar[list[tuple[Problem, Arch]] | None] = contextvars.ContextVar("asked", default=None)


def choose(asked: Asked, seen: State | None = None) -> Attempt:
    """The first attempt whose kernel is there, or can be compiled now; else XLA's. `seen`: what `state` gave before.

    ValueError if the user's tile can compute the product in no way.
    """
    found, refusals = _ladder(asked, *(seen or state(asked))), []
    _note(asked, found)
    for attempt in found.attempts:
        made = _built(attempt) if attempt.is_missing else attempt
        if isinstance(made, str):
            refusals.append(made)
            continue
        if made.entry is None and found.illegal is not None:
            raise ValueError(found.illegal)
        reason = "; ".join(filter(None, (made.reason, *refusals[:1])))
        return dataclasses.replace(made, reason=reason) if refusals else made
    raise AssertionError("a ladder ends with XLA")


def expected(asked: Asked) -> Attempt:
    """What `choose` will return if its compiler succeeds, or is not needed. Compiles nothing."""
    found = ladder(asked)
    is_compiler = jit_build.why_not_here() is None
    chosen = next(attempt for attempt in found.attempts if is_compiler or not attempt.is_missing)
    if chosen.entry is None and not chosen.is_missing and found.illegal is not None:
        raise ValueError(found.illegal)
    return chosen


def ladder(asked: Asked) -> Ladder:
    """All attempts, the cheapest first; kept until the artifacts, the tables or the library change."""
    return _ladder(asked, *state(asked))


def forget() -> None:
    """Drops what `ladder` has kept."""
    _ladder.cache_clear()


@contextlib.contextmanager
def asked_problems() -> Iterator[list[tuple[Problem, Arch]]]:
    """What is asked in the block, by this thread, and may have a tile chosen for it on a GPU; repeated as asked."""
    problems: list[tuple[Problem, Arch]] = []
    token = _asked.set(problems)
    try:
        yield problems
    finally:
        _asked.reset(token)


def alone(problem: Problem, fuses: bool = True) -> Problem | None:
    """The product that XLA can finish: in float32, so that there is one rounding as ever, or what goes into a function,
    if that is a result; without any vector, unless it `fuses` them. None where that is what was asked, of integers,
    which are not rounded, and of gated products, which are two."""
    inner, outer = unfused(problem.epilogue) if fuses else (Epilogue(), problem.epilogue)
    if problem.epilogue.is_gated:
        return None
    if outer.returns_sums:
        return dataclasses.replace(problem, epilogue=inner)
    plain = dataclasses.replace(problem, out_dtype="float32", epilogue=Epilogue())
    return None if plain == problem or problem.out_dtype == "int32" else plain


def _note(asked: Asked, found: Ladder) -> None:
    arch, noted = target_arch(asked.device), _asked.get()
    is_tunable = asked.tile is None and not asked.is_emulated and asked.symbols is None
    if noted is not None and isinstance(arch, Arch) and is_tunable:
        noted += [(problem, arch) for problem in found.considered]


def state(asked: Asked) -> State:
    """The device, and what else an answer depends on: it changes with a build, a tuning or an installation."""
    arch = target_arch(asked.device)
    tables = measured.state(arch.name) if isinstance(arch, Arch) else ()
    return arch, (artifacts.state(), tables, why_not_launched(asked.is_emulated))


@functools.lru_cache(maxsize=4096)
def _ladder(asked: Asked, arch: Arch | str, files: tuple[object, ...]) -> Ladder:
    if isinstance(arch, str):
        return Ladder((Attempt(Route(asked.problem), reason=arch),))
    if reason := why_not_asked(asked.problem, asked.symbols):
        return Ladder((Attempt(Route(asked.problem), reason=reason),))
    fused = _rung(asked, asked.problem, arch)
    product = None
    if not (fused.ready and (asked.tile or is_as_good_as_any(fused.ready))):
        plain = alone(asked.problem)
        product = _rung(asked, plain, arch) if plain else None
    if asked.problem.epilogue.is_gated:
        return _of_gated(asked, arch, fused)
    return _in_order(asked, arch, fused, product or _Rung())


@dataclasses.dataclass(frozen=True)
class _Rung:
    """One product under all routes: the cheapest of the kernels that are at hand, passes before it and all; if there is
    none, those that could be compiled, and the refusals. `illegal` and `considered` as in `Ladder`."""

    ready: Attempt | None = None
    missing: tuple[Attempt, ...] = ()
    refused: tuple[Attempt, ...] = ()
    illegal: str | None = None
    considered: tuple[Problem, ...] = ()

    def why_not(self, route: Route) -> str | None:
        """Of the route that has the operands as `route` has them, or else of the first."""
        majors = route.problem.a_major, route.problem.b_major
        alike = (r for r in self.refused if (r.route.problem.a_major, r.route.problem.b_major) == majors)
        return next((refused.reason for refused in (*alike, *self.refused)), self.illegal)


def _rung(asked: Asked, problem: Problem, arch: Arch) -> _Rung:
    def has_repack(kind: str, element_bytes: int, shape: Shape) -> bool:
        if asked.symbols:  # its launch says how many CTAs there are
            return False
        return find_repack(kind, element_bytes, shape, asked.device, asked.is_emulated) is not None

    refused: list[Attempt] = []
    considered: list[Problem] = []
    illegal, best = None, None
    for route in routes(problem, asked.is_transpose, arch, has_repack):
        if best is not None and not route.may_beat(best.route):
            continue
        considered.append(route.problem)
        try:
            how = asked.device, asked.tile, asked.is_emulated, asked.batch_invariant, asked.symbols
            decision = decide(route.problem, *how, shares_device=asked.shares_device)
        except ValueError as error:
            illegal = illegal or str(error)
            continue
        if decision.entry is None:
            refused.append(Attempt(route, decision.plan, reason=_with_remedy(asked, decision)))
            continue
        own = route.to(decision.entry.variant.tile)
        ready = _priced(Attempt(own, decision.plan, decision.entry), arch)
        best = min(filter(None, (best, ready)), key=_launched_us)
        if asked.batch_invariant or not own.has_passes:
            break
    if best is not None:
        return _Rung(best, considered=tuple(considered))
    missing = [_to_build(asked, attempt, arch) for attempt in refused] if asked.compiles else []
    return _Rung(None, tuple(filter(None, missing)), tuple(refused), illegal, tuple(considered))


def _to_build(asked: Asked, refused: Attempt, arch: Arch) -> Attempt | None:
    """With the kernel that the planner would choose of all, if that is all that is missing."""
    problem, symbols = refused.route.problem, asked.symbols
    is_invariant, shares = asked.batch_invariant, asked.shares_device
    wanted = plan(problem, arch, asked.tile, batch_invariant=is_invariant, symbols=symbols, shares_device=shares)
    if wanted.variant is None or why_not_launched(asked.is_emulated):
        return None
    return _priced(Attempt(refused.route.to(wanted.tile), wanted, is_missing=True, reason=refused.reason), arch)


def _with_remedy(asked: Asked, decision: Decision) -> str | None:
    """Why there is no kernel and, where it only has to be built, how; a compiler that is asked has its own answer."""
    legal = [c for c in decision.plan.candidates if c.cost] if decision.plan else []
    if asked.compiles or not legal or decision.plan is None:
        return decision.reason
    arch = decision.plan.arch
    wanted = [variant_for(c.problem, c.tile, arch.target_of(c.problem.a_dtype)) for c in legal]
    is_told = any(remedy in (decision.reason or "") for remedy in (artifacts.REMEDY, packs.REMEDY))
    return decision.reason if is_told else f"{decision.reason}; {jit_build.remedy(wanted)}"


def _priced(attempt: Attempt, arch: Arch) -> Attempt:
    chosen = attempt.plan.chosen if attempt.plan else None
    assert attempt.plan is not None and chosen is not None  # it has a kernel
    kernel_us = us_of(chosen, attempt.plan.record is not None)
    return dataclasses.replace(attempt, us=kernel_us + attempt.route.transpose_us(arch))


def _launched_us(attempt: Attempt) -> float:
    assert attempt.plan is not None  # it has a kernel
    return rungs.launched_us(attempt.us, attempt.plan)


def _in_order(asked: Asked, arch: Arch, fused: _Rung, product: _Rung) -> Ladder:
    """What is ready before what must be compiled, but a fused kernel that must before an epilogue of XLA's."""
    first = fused.ready or next(iter(fused.refused), Attempt(Route(asked.problem), reason=fused.illegal))
    has_epilogue = not asked.problem.epilogue.is_identity  # else it is no gain to compile another product
    found = [product.ready] if product.ready else product.missing if has_epilogue else ()
    finished = [_finished(attempt, asked.problem, arch, fused.why_not(attempt.route)) for attempt in found]
    kernels = [*fused.missing, *finished]
    if fused.ready:
        is_slower = any(attempt.entry and rungs.CLEARLY * attempt.us < fused.ready.us for attempt in finished)
        kernels = finished if is_slower and not asked.batch_invariant else [fused.ready]
    if kernels and (in_parts := _in_parts(asked, arch, kernels[0])):
        kernels = [in_parts]
    xlas = dataclasses.replace(first, entry=None)
    if kernels and (instead := rivals.in_place_of(kernels[0], asked, first)):
        xlas, kernels = instead, []
    return Ladder((*kernels, xlas), fused.considered + product.considered, fused.illegal or product.illegal)


def _in_parts(asked: Asked, arch: Arch, whole: Attempt) -> Attempt | None:
    """The best kernel of k in parts, if it and the pass that adds them are predicted to be faster, by SOONER, than the
    kernel of the `whole`, which is at hand. What was measured of that one gives way to no prediction."""
    is_fixed = asked.tile or asked.batch_invariant or asked.symbols
    if is_fixed or whole.entry is None or whole.plan is None or whole.plan.record:
        return None
    lying = whole.route.problem
    problem = dataclasses.replace(asked.problem, a_major=lying.a_major, b_major=lying.b_major)
    counts = parts.counts(problem, arch, whole.us / SOONER)
    found = filter(None, (_of_parts(asked, arch, whole.route, problem, count) for count in counts))
    best = min(found, key=lambda attempt: attempt.us, default=None)
    if best is None or SOONER * best.us >= whole.us:
        return None
    sum_us = parts.sum_us(problem, best.parts, arch)
    reason = (
        f"k in {best.parts} parts, which XLA adds up in {sum_us:.1f} us, is predicted to take {best.us:.1f} us, and "
        f"one kernel {whole.us:.1f}"
    )
    return dataclasses.replace(best, reason=reason)


def _of_parts(asked: Asked, arch: Arch, route: Route, problem: Problem, count: int) -> Attempt | None:
    """By the route of the whole, which has no other passes before it."""
    divided = parts.divided(problem, count)
    decision = decide(divided, asked.device, None, asked.is_emulated, shares_device=asked.shares_device)
    if decision.entry is None:
        return None
    own = dataclasses.replace(route, problem=divided).to(decision.entry.variant.tile)
    priced = _priced(Attempt(own, decision.plan, decision.entry, is_fused=False, parts=count), arch)
    return dataclasses.replace(priced, us=priced.us + parts.sum_us(problem, count, arch))


def _of_gated(asked: Asked, arch: Arch, fused: _Rung) -> Ladder:
    """One kernel of both products, or each alone and XLA's pass over the two."""
    problem = asked.problem
    half = _rung(dataclasses.replace(asked, tile=None), dataclasses.replace(problem, epilogue=Epilogue()), arch)
    refused = next(iter(fused.refused), Attempt(Route(problem), reason=fused.illegal))
    kernels = [fused.ready] if fused.ready else list(fused.missing)
    reason = refused.reason
    if half.ready and fused.ready and not asked.tile:
        elements = problem.batch * problem.m * problem.n
        planes = problem.num_bs + len(problem.results) + problem.epilogue.num_matrices
        us = 2 * half.ready.us + pass_us(elements * planes * DTYPE_BYTES[problem.out_dtype], arch)
        if rungs.CLEARLY * us < fused.ready.us:
            kernels = []
            reason = (
                f"two products and XLA's pass over them are predicted to take {us:.1f} us, not {fused.ready.us:.1f}"
            )
    composed = dataclasses.replace(refused, entry=None, is_composed=True, reason=reason)
    considered = fused.considered + half.considered
    return Ladder((*kernels, composed), considered, fused.illegal if asked.tile else None)


def _finished(attempt: Attempt, problem: Problem, arch: Arch, reason: str | None) -> Attempt:
    """The kernel of a product alone, and XLA's pass over its float32 that makes of it what was asked."""
    elements = problem.batch * problem.m * problem.n
    out_bytes = DTYPE_BYTES[problem.out_dtype] * (len(problem.results) + problem.epilogue.num_matrices)
    us = attempt.us + pass_us(elements * (DTYPE_BYTES["float32"] + out_bytes), arch)
    slower = f"the kernel that has it takes longer than the product's and XLA's pass over it, {us:.1f} us"
    return dataclasses.replace(attempt, is_fused=False, us=us, reason=reason or slower)


def _built(missing: Attempt) -> Attempt | str:
    """With its kernel, compiled now or before; else why not. The plan is made anew: of what is there now."""
    assert missing.plan is not None and missing.plan.variant is not None  # that is what is missing
    entry = jit_build.build(missing.plan.variant)
    if isinstance(entry, str):
        return entry
    return dataclasses.replace(
        missing, entry=entry, is_missing=False, reason=None if missing.is_fused else missing.reason
    )
