"""k in parts: a product of few tiles and a long sum as a batch of shorter products, whose results one pass adds up.

It is libraries' split-k with a kernel of its own that adds (CUTLASS: parallel split-k). A split along k in a cluster
and a stream of k tiles are one kernel each, and need no second launch; but a cluster has at most eight CTAs for k, and
in a stream one CTA adds up all parts of a tile. Operands stay as they are: the kernel begins each matrix of the batch
at the k tile that follows the last one of the matrix before, and the last one has what is left. Says which numbers of
parts are worth a look, what they are as a problem, and what the pass takes; chooses nothing.
"""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.geometry import ceil_div, concurrent_clusters, num_tiles
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.cost import pass_us, roofline_us

MOST = 32  # parts: so many times what it writes the pass reads, and twice that of a 2-byte result; assumed
LEAST_TERMS = 128  # of a part, two k tiles: a kernel of so few terms takes little more than its start
TILES = (
    Tile(64, 16),
    Tile(64, 64),
    Tile(64, 32, cluster_m=4),
    Tile(64, 128, cluster_m=4),
    Tile(128, 64, cluster_m=4),
    Tile(128, 96, cluster_n=4),
    Tile(128, 128, cluster_n=2),
    Tile(192, 128, cluster_n=2),
    Tile(128, 128, cluster_m=4, cluster_n=2),
)  # that parts are counted by: of usual sizes and clusters, one of which is near to any that ships


def counts(problem: Problem, arch: Arch, us: float) -> tuple[int, ...]:
    """In how many parts a product may be done sooner than by one kernel, which is predicted to take `us`: the most with
    which tiles of a usual kind all run at once, if they can gain at all. None where predictions are not
    corrected by what was measured, for two of them are compared; and of what is not one plain sum of 2-byte operands.
    """
    if not _is_plain(problem) or calibration.of(arch) is None:
        return ()
    most = min(MOST, problem.k // LEAST_TERMS)
    at_once = (concurrent_clusters(tile, arch) // num_tiles(tile, problem) for tile in TILES)
    wanted = {_without_empty(problem, min(most, num)) for num in at_once} - {0, 1}
    return tuple(
        n for n in sorted(wanted) if _bytes(problem, n) <= _room(arch) and _least_us(problem, n, arch, us) < us
    )


def divided(problem: Problem, count: int) -> Problem:
    """The batch of `count` products, of float32 results, whose sum the product is: each of as many k tiles but the
    last. To read them, operands count as if each had its own."""
    plain = dataclasses.replace(problem, out_dtype="float32", epilogue=Epilogue(), whole_k=problem.k)
    return dataclasses.replace(plain, k=_terms(problem, count), batch=count, a_batch=count, b_batch=count)


def whole(parts: Problem) -> Problem:
    """The product of float32 result whose k is in these parts."""
    return dataclasses.replace(parts, k=parts.whole_k, whole_k=0, batch=1, a_batch=1, b_batch=1)


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


def _terms(problem: Problem, count: int) -> int:
    """Of each of `count` parts, whole k tiles."""
    step = k_tile(problem.a_dtype)
    return ceil_div(ceil_div(problem.k, step), count) * step


def _without_empty(problem: Problem, count: int) -> int:
    """Parts of as many terms as each of `count` has, of which none is left without any."""
    return ceil_div(problem.k, _terms(problem, count)) if count else 0


def _bytes(problem: Problem, count: int) -> int:
    return count * problem.m * problem.n * DTYPE_BYTES["float32"]


def _room(arch: Arch) -> float:
    """For parts, where the pass that follows finds them: what the L2 cache keeps."""
    return arch.constants.retained * arch.l2_bytes


def _least_us(problem: Problem, count: int, arch: Arch, us: float) -> float:
    """What kernel and pass take at least: parts make no kernel start sooner, and the rest of the `us` of one kernel is
    at best divided by their number."""
    c = arch.constants
    start_cycles = c.start_cycles if "direct" in arch.family.lacks else min(c.start_cycles, c.direct_start_cycles)
    start_us = start_cycles / (arch.clock_ghz * 1e3)
    kernel_us = start_us + max(0.0, us - c.launch_us - start_us) / count
    moved_us = roofline_us(divided(problem, count), arch)
    return c.launch_us + max(kernel_us, moved_us) + sum_us(problem, count, arch)
