"""Which products are left to XLA, because it is expected to be done with them sooner than a kernel of ours."""

from __future__ import annotations

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.xla import KINDS, THIN, kind_of, xla_us

# Times what is predicted of our kernels. Of short and uneven products, a tenth of ours take over 1.05 times that and a
# tenth of XLA's under 0.87 times what is expected, and what is close is XLA's, since it is what the user would have
# had: of 266 that take less than 4 us, and 154 others, that ours had timed by today's choice, these factors leave the
# fewest behind XLA that cost little in the mean (results/random, XLA by trees of others, an H200, by hand). Of others
# what is close is ours: 1.05 would leave over a third of models' layers to XLA, and gain nothing
# (tests/cpu/test_xla.py). Of long ones few were learned from, most of them on H100s, and of an H200 some 3 % less is
# expected than XLA takes: a gradient of an MLP took longer where two of its products were left to it (docs/results.md,
# "Meshes").
BRIEF_ROW, SHORT_ROW, ROW, LONG_ROW = 1.03, 1.06, 0.98, 0.92
# Of a vector times a matrix whose lines begin anywhere, XLA takes 15 % less and ours 6 % more than expected, in the
# medians of the 14 of results that were ours: those for which much was expected of XLA (by hand).
VECTOR_ROW = 1.3
BRIEF_US, LONG_US = 4.0, 150.0  # of our kernel; of the roofline
TIMED_ROW = 0.99  # of products that both were timed for, one beside the other: means over processes repeat within 1 %


def expected_us(problem: Problem, arch: Arch, is_known: bool = False) -> float | None:
    """Microseconds that XLA is expected to take; None where nothing is expected of it. One that `is_known`, by its
    measured time or for a range of sizes, is compared with no time that trees alone expect. Nor is one whose operands
    have rows off 16 bytes: XLA pads them or, by its default flags, has a kernel that may take 1.7 times as long. Of 333
    such products of results/random and results/xla, trees would leave six to it, and lose 17 % by these (by hand)."""
    if problem.batch > 1 or not problem.epilogue.is_identity:
        return None
    return None if is_learned(problem) and (is_known or _is_padded(problem)) else xla_us(problem, arch)


def _is_padded(problem: Problem) -> bool:
    return min(problem.m, problem.n) > THIN and any(padding(problem, operand) for operand in "ab")


def is_learned(problem: Problem) -> bool:
    """Whether trees alone tell what is expected of XLA: it goes by the sizes, of which a part of a product has others.
    What is expected of short and uneven products goes by what they are, which their parts are, too."""
    return not KINDS[kind_of(problem)].alone


def _row(problem: Problem, us: float, arch: Arch) -> float:
    if kind_of(problem) == "vector":
        return VECTOR_ROW
    if not is_learned(problem):
        return BRIEF_ROW if us < BRIEF_US else SHORT_ROW
    return LONG_ROW if roofline_us(problem, arch) > LONG_US else ROW


def why_xla(problem: Problem, us: float, arch: Arch, is_known: bool = False) -> str | None:
    """One sentence if XLA is expected to be done before a kernel of ours, which is predicted to take `us`."""
    xla = expected_us(problem, arch, is_known)
    if xla is None:
        return None
    kernel_us = us - arch.constants.launch_us
    counted_us = arch.constants.launch_us + _row(problem, kernel_us, arch) * kernel_us
    if xla >= counted_us:
        return None
    is_close = us < counted_us and round(us, 1) <= round(xla, 1)  # ours has no larger time, and `explain` shows it
    counted = f" (counted as {counted_us:.1f}, by how far such predictions were off)" if is_close else ""
    return (
        f"XLA is expected to take {xla:.1f} us for {problem.m} x {problem.n} sums of {problem.k} products, our kernel "
        f"{us:.1f}{counted}: pass `tile=` for a kernel nevertheless"
    )


def why_timed(problem: Problem, us: float, xla_us: float) -> str | None:
    """One sentence if XLA took less than our kernel, which took `us`."""
    if xla_us >= TIMED_ROW * us:
        return None
    return (
        f"XLA was timed to take {xla_us:.1f} us for {problem.m} x {problem.n} sums of {problem.k} products, our kernel "
        f"{us:.1f}: pass `tile=` for a kernel nevertheless"
    )
