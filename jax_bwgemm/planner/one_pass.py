"""Which products are one pass over a large matrix, whose lines begin anywhere, and what a thin tile takes for it: CTAs
read some rows' windows each, and add up what they have left."""

from __future__ import annotations

from collections.abc import Iterable

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import ceil_div, num_tiles, operand_bytes
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.thin import CTAS, a_major_of, num_stages, stage_bytes, window_terms
from jax_bwgemm.facts.tile import THIN_COLS, Tile

LEAST_BYTES = 16e6  # of a matrix, by hand: smaller ones are soon read, by direct tiles, too


def is_plain_half(problem: Problem) -> bool:
    """Whether the kernel's dtypes and epilogue are such."""
    return DTYPE_BYTES[problem.a_dtype] == 2 and problem.epilogue.is_identity and not problem.whole_k


def thin_tiles(problem: Problem, shipped: Iterable[Tile]) -> list[Tile]:
    """Those of a plain product of 2-byte operands. Lines that begin on 16 bytes are TMA's, which reads them as fast."""
    if problem.n > THIN_COLS or padding(problem, "a") == 0 or operand_bytes(problem)[0] < LEAST_BYTES:
        return []
    terms = window_terms(problem.a_major)
    own = (tile for tile in shipped if a_major_of(tile) == problem.a_major)
    return [tile for tile in own if tile.cluster_k == 1 or problem.k > tile.cluster_k * terms]


def thin_cycles(tile: Tile, problem: Problem, arch: Arch) -> float:
    """Of a launch: the start of a CTA, with its vectors; its windows, as fast as their loads' latency lets them come or
    its instructions are issued, in turns with those of another CTA; its sums; and all of it for each round of CTAs."""
    c, major = arch.constants, a_major_of(tile)
    ctas = num_tiles(tile, problem) * tile.cluster_k
    windows = ceil_div(ceil_div(problem.k, window_terms(major)), tile.cluster_k)
    sharing = min(CTAS, ceil_div(ctas, arch.num_sms))
    step = max(c.thin_latency_cycles / (num_stages(tile) - 1), sharing * c.thin_kib_cycles * stage_bytes(major) / 1024)
    own = windows * step + (c.direct_meeting_cycles if tile.cluster_k > 1 else 0)
    return ceil_div(ctas, CTAS * arch.num_sms) * (c.thin_start_cycles + own)
