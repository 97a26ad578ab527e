"""k in parts: a product of few tiles and a long sum as a batch of shorter products, whose results one pass adds up.

It is libraries' split-k with a kernel of its own that adds (CUTLASS: parallel split-k). A split along k in a cluster
and a stream of k tiles are one kernel each, and need no second launch; but a cluster has at most eight CTAs for k, and
in a stream one CTA adds up all parts of a tile. Says which numbers of parts are worth a look, what they are as a
problem, and what the pass takes; chooses nothing.
"""

from __future__ import annotations

import dataclasses
import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.cost import pass_us, roofline_us

MOST = 32  # parts: so many times what it writes the pass reads, and twice that of a 2-byte result; assumed
LEAST_TERMS = 256  # of a part, four k tiles: fewer do not fill a tile's stages; assumed
SPANS = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128))  # of tiles that parts are counted by


def counts(problem: Problem, arch: Arch, us: float) -> tuple[int, ...]:
    """In how many parts a product may be done sooner than by one kernel, which is predicted to take `us`: those with
    which tiles of a usual size come nearest to one for each SM, if they can gain at all. None where predictions are not
    corrected by what was measured, for two of them are compared; and of what is not one plain sum of 2-byte operands.
    """
    if not _is_plain(problem) or calibration.of(arch) is None:
        return ()
    tiles = [math.ceil(problem.m / rows) * math.ceil(problem.n / columns) for rows, columns in SPANS]
    most = min(MOST, problem.k // LEAST_TERMS, arch.num_sms // min(tiles))
    fitting = [n for n in range(2, most + 1) if problem.k % n == 0 and _is_readable(divided(problem, n))]
    wanted = {max((n for n in fitting if n * num <= arch.num_sms), default=1) for num in tiles} - {1}
    return tuple(
        n for n in sorted(wanted) if _bytes(problem, n) <= _room(arch) and _least_us(problem, n, arch, us) < us
    )


def divided(problem: Problem, count: int) -> Problem:
    """The batch of `count` products, of float32 results, whose sum the product is."""
    plain = dataclasses.replace(problem, out_dtype="float32", epilogue=Epilogue())
    return dataclasses.replace(plain, k=problem.k // count, batch=count, a_batch=count, b_batch=count)


def whole(parts: Problem) -> Problem:
    """The product of float32 result whose k is in these parts."""
    return dataclasses.replace(parts, k=parts.k * parts.batch, batch=1, a_batch=1, b_batch=1)


def sum_us(problem: Problem, count: int, arch: Arch) -> float:
    """The pass that adds up the parts of `problem` and makes of the sums what was asked."""
    planes = 1 + problem.epilogue.num_matrices
    return pass_us(_bytes(problem, count) + planes * problem.m * problem.n * DTYPE_BYTES[problem.out_dtype], arch)


def _is_plain(problem: Problem) -> bool:
    """Whether it is one sum of 2-byte operands, what follows which XLA can compute beside the sum of parts."""
    epilogue = problem.epilogue
    is_batch = (problem.batch, problem.a_batch, problem.b_batch) != (1, 1, 1)
    has_more = bool(epilogue.seconds or epilogue.reductions or epilogue.is_gated)
    is_other = problem.promoted or problem.symmetric or problem.out_dtype not in ("bfloat16", "float16", "float32")
    return not (is_batch or has_more or is_other or problem.is_empty) and DTYPE_BYTES[problem.a_dtype] == 2


def _is_readable(parts: Problem) -> bool:
    """Whether a kernel can read them in place: in a k-major operand they lie side by side in its rows, and TMA steps
    from one to the next by multiples of 16 bytes."""
    majors = (("a", parts.a_major), ("b", parts.b_major))
    return not any(major == "k" and padding(parts, operand) for operand, major in majors)


def _bytes(problem: Problem, count: int) -> int:
    return count * problem.m * problem.n * DTYPE_BYTES["float32"]


def _room(arch: Arch) -> float:
    """For parts, where the pass that follows finds them: what the L2 cache keeps."""
    return arch.constants.retained * arch.l2_bytes


def _least_us(problem: Problem, count: int, arch: Arch, us: float) -> float:
    """What kernel and pass take at least: parts make no kernel start sooner, and the rest of the `us` of one kernel is
    at best divided by their number."""
    start_us = arch.constants.start_cycles / (arch.clock_ghz * 1e3)
    kernel_us = start_us + max(0.0, us - arch.constants.launch_us - start_us) / count
    moved_us = roofline_us(divided(problem, count), arch)
    return arch.constants.launch_us + max(kernel_us, moved_us) + sum_us(problem, count, arch)
