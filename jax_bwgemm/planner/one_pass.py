"""Which products are one pass over a large matrix, whose lines begin anywhere, and what a thin tile takes for it: CTAs
read some rows' windows each, and add up what they have left."""

from __future__ import annotations

from collections.abc import Iterable

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import ceil_div, num_tiles, operand_bytes
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.thin import CTAS, FILLS, WARPS, a_major_of, num_stages, stage_bytes, window_terms
from jax_bwgemm.facts.tile import THIN_COLS, Tile

LEAST_BYTES, LEAST_TERMS = 3e5, 128  # of a matrix and of a sum, by measurement: direct tiles read less as soon


def is_plain_half(problem: Problem) -> bool:
    """Whether the kernel's dtypes and epilogue are such."""
    return DTYPE_BYTES[problem.a_dtype] == 2 and problem.epilogue.is_identity and not problem.whole_k


def thin_tiles(problem: Problem, shipped: Iterable[Tile]) -> list[Tile]:
    """Those of a plain product of 2-byte operands. Lines that begin on 16 bytes are TMA's, which reads them as fast."""
    is_little = operand_bytes(problem)[0] < LEAST_BYTES or problem.k < LEAST_TERMS
    if problem.n > THIN_COLS or padding(problem, "a") == 0 or is_little:
        return []
    terms = window_terms(problem.a_major)
    own = (tile for tile in shipped if a_major_of(tile) == problem.a_major)
    return [tile for tile in own if tile.cluster_k == 1 or problem.k > tile.cluster_k * terms]


def thin_cycles(tile: Tile, problem: Problem, arch: Arch) -> float:
    """Of a launch: the rounds of as many CTAs as there is room for, each of which brings its vectors, and its windows
    as fast as their loads' latency lets them come or its instructions are issued, in turns with those of another CTA;
    and the exchange of sums."""
    c, major = arch.constants, a_major_of(tile)
    ctas, split = num_tiles(tile, problem) * tile.cluster_k, tile.cluster_k
    room = split * arch.max_clusters(split // CTAS) if split >= CTAS else CTAS * arch.num_sms  # CTAs share SMs
    rounds = ceil_div(ctas, room)
    windows = ceil_div(ceil_div(problem.k, window_terms(major)), split)
    sharing = min(CTAS, ceil_div(ctas, arch.num_sms))
    step = max(c.thin_latency_cycles / (num_stages(tile) - 1), sharing * c.thin_kib_cycles * stage_bytes(major) / 1024)
    columns = 1 << (min(problem.n, THIN_COLS) - 1).bit_length()
    fills = windows * window_terms(major) * columns / (32 * WARPS * FILLS)
    own = c.thin_start_cycles + windows * step + fills * c.thin_fill_cycles
    return rounds * own + (c.thin_meeting_cycles if split > 1 else 0)
