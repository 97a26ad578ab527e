"""Products of so few terms a sum that XLA may be done sooner: its kernels for them start and store faster than ours.

Up to a few terms a product is little more than its stores, and XLA's, always. Beyond, XLA's kernel walks over k for
each of its own small tiles, and its time follows from three numbers, which is compared with that of our kernel.
Operands that have to be padded first, or that threads realign, leave it more room. A direct tile starts and stores
nearly as fast as XLA's.
"""

from __future__ import annotations

import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import Problem

# Of k, up to which XLA has the product, and up to which it is compared; by what is done with operands. On an H200, of
# random products (results/random, times of ours in results/regret/h200_short.json) XLA was faster at 37 of 44 of up to
# 32, by a fifth as a rule; beyond, its time depends on what it happens to choose.
LIMITS = {"tma": (32, 128), "padded": (32, 800), "direct": (32, 64), "realigned": (32, 800)}
# Rows or columns, and of how many terms, that XLA multiplies by vectors as it reads the other operand, which we would
# read twice: it took 0.49 to 0.94 times as long for six such products of more than 32 terms, and 1.06 times for one
# (results/random, results/regret). With more terms it is the slower one.
THIN, THIN_TERMS = 5, 3200
# Fitted to 25 of those that XLA computed in one kernel: most are within a fifth, none is much faster.
START_US, TERM_US, MEMORY_SHARE = 1.2, 0.0075, 0.56
TILE = 64  # rows and columns of its own; on all SMs at a time


def xla_us(problem: Problem, arch: Arch) -> float:
    """What XLA's kernel for a short sum is expected to take on the device, with its launch."""
    waves = math.ceil(math.ceil(problem.m / TILE) * math.ceil(problem.n / TILE) / arch.num_sms)
    moved_us = problem.min_bytes / (MEMORY_SHARE * arch.memory_tb_per_s * 1e6)
    return arch.constants.launch_us + START_US + TERM_US * problem.k * waves + moved_us


def _is_thin(problem: Problem) -> bool:
    """Whether it is little but one pass over its larger operand, whose rows TMA cannot step over."""
    large = "b" if problem.m <= problem.n else "a"
    return min(problem.m, problem.n) <= THIN and problem.k <= THIN_TERMS and padding(problem, large) > 0


def why_xla(problem: Problem, way: str, us: float, arch: Arch) -> str | None:
    """One sentence if XLA is expected to be done before a kernel of ours, which is predicted to take `us`; `way`: how
    operands come to it, of `LIMITS`."""
    always, compared = LIMITS[way]
    if problem.batch > 1 or not problem.epilogue.is_identity:
        return None
    is_uneven = way in ("padded", "realigned")
    what = f"with operands that have to be {way}, " if is_uneven else ""
    if compared and is_uneven and _is_thin(problem):
        return (
            f"{what}XLA is faster with up to {THIN} rows or columns and {THIN_TERMS} products a sum, got "
            f"{min(problem.m, problem.n)} and {problem.k}: pass `tile=` for a kernel nevertheless"
        )
    if problem.k > compared:
        return None
    if problem.k <= always:
        return (
            f"{what}XLA is faster at sums of up to {always} products, got {problem.k}: pass `tile=` for a kernel "
            "nevertheless"
        )
    xla = xla_us(problem, arch)
    if xla >= us:
        return None
    return (
        f"{what}XLA is expected to take {xla:.1f} us for sums of {problem.k} products, our kernel {us:.1f}: pass "
        "`tile=` for a kernel nevertheless"
    )
