"""Which products are left to XLA because it is expected to be done with them sooner: short and uneven ones, of which
that is known (`xla`)."""

from __future__ import annotations

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.xla import xla_us

# Times what is predicted of our kernels, which were timed several launches in a row (bench/candidates). Behind others,
# as XLA's were timed, half take over 1.05 times that, a tenth over 1.16; and what is close is XLA's, since that is what
# the user would have had. Of 800 products that the trees of `xla` had not seen (results/short/h100-828282.json), 15
# instead of 20 are then slower than by XLA by over 5 %, and all together 0.5 % slower than with 1.07.
ROW = 1.12


def why_xla(problem: Problem, us: float, arch: Arch) -> str | None:
    """One sentence if XLA is expected to be done before a kernel of ours, which is predicted to take `us`."""
    if problem.batch > 1 or not problem.epilogue.is_identity:
        return None
    xla, launch_us = xla_us(problem, arch), arch.constants.launch_us
    us = launch_us + ROW * (us - launch_us)
    if xla is None or xla >= us:
        return None
    return (
        f"XLA is expected to take {xla:.1f} us for {problem.m} x {problem.n} sums of {problem.k} products, our kernel "
        f"{us:.1f}: pass `tile=` for a kernel nevertheless"
    )
