"""Which products XLA has though a kernel of ours is at hand: it was timed to be done sooner, is expected to be, or has
tiles that we lack."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner import measured, sooner
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.routes import flipped
from jax_bwgemm.runtime.rungs import Asked, Attempt, is_as_good_as_any, launched_us, least_us

XLA_LIMIT, XLA_SLACK_US = 1.25, 5.0  # of the best tile of our lists: XLA's kernels are about as fast (docs/results.md);
# and two launches more, since its times for small products differ by as much between processes


def in_place_of(kernel: Attempt, asked: Asked, first: Attempt) -> Attempt | None:
    """XLA's attempt, and why, if it is to compute what is `asked` in place of the `kernel` at hand. `first`: the one
    that was looked at first, whose plan has all tiles."""
    if not _may_be_xlas(asked, kernel):
        return None
    why = _why_sooner(asked, kernel, kernel.us, first)
    best_us = min(kernel.us, least_us(kernel.plan))
    is_sooner = why is not None and _why_sooner(asked, kernel, best_us, first) is not None
    is_of_its_sizes = _timed_us(asked, kernel) is not None or sooner.is_learned(_as_xla_has(asked, kernel))
    reason = why or _why_lacking(asked, kernel, first)
    if reason is None:
        return None
    for_its_sizes = why is not None and is_of_its_sizes
    return dataclasses.replace(first, entry=None, reason=reason, is_sooner=is_sooner, for_its_sizes=for_its_sizes)


def _may_be_xlas(asked: Asked, kernel: Attempt) -> bool:
    """Though the kernel is at hand. Not of 8-bit operands, which XLA widens first."""
    is_fixed = asked.tile or asked.is_emulated or asked.batch_invariant
    return kernel.entry is not None and not is_fixed and DTYPE_BYTES[asked.problem.a_dtype] > 1


def _why_sooner(asked: Asked, kernel: Attempt, us: float, first: Attempt) -> str | None:
    """One sentence if XLA is expected to be done before the kernel, if that takes `us`; by its time, if it has one."""
    if first.plan is None:
        return None
    if (timed_us := _timed_us(asked, kernel)) is not None:
        return sooner.why_timed(kernel.problem, us, timed_us)
    us = launched_us(us, kernel.plan) if kernel.plan else us
    return sooner.why_xla(_as_xla_has(asked, kernel), us, first.plan.arch, _is_known(asked, first.plan))


def _why_lacking(asked: Asked, kernel: Attempt, first: Attempt) -> str | None:
    """One sentence if XLA is predicted to be done well before the best kernel at hand: it has tiles of all sizes, of
    which ours lack some for some dtypes and epilogues. Of no product of which XLA's own time is known, or expected,
    which says more."""
    if first.plan is None or _timed_us(asked, kernel) is not None:
        return None
    least = least_us(first.plan)
    if kernel.us <= max(XLA_LIMIT * least, least + XLA_SLACK_US) or is_as_good_as_any(kernel):
        return None
    if sooner.expected_us(_as_xla_has(asked, kernel), first.plan.arch, _is_known(asked, first.plan)) is not None:
        return None
    return (
        f"the kernels at hand are predicted to take {kernel.us:.1f} us, and tiles that this dtype or epilogue has no "
        f"cubin of, as XLA has, {least:.1f} us: pass `tile=` for a kernel nevertheless"
    )


def _as_xla_has(asked: Asked, kernel: Attempt) -> Problem:
    """With operands from before their transposes, which XLA folds into the product, and none that passes of ours
    transpose."""
    lying = flipped(asked.problem, asked.is_transpose)
    return dataclasses.replace(kernel.problem, a_major=lying.a_major, b_major=lying.b_major)


def _timed_us(asked: Asked, kernel: Attempt) -> float | None:
    """What XLA took, where the kernel was chosen by times of the product as XLA has it."""
    record = kernel.plan.record if kernel.plan else None
    is_its = record is not None and record.problem == measured.key(_as_xla_has(asked, kernel))
    return record.xla_us if record and is_its else None


def _is_known(asked: Asked, plan: Plan) -> bool:
    """Whether no time that is only learned counts: kernels were measured, or sizes are a range."""
    return plan.record is not None or asked.symbols is not None
