"""What a direct tile takes: a CTA for each tile, whose threads load, multiply and store. Every number is a constant."""

from __future__ import annotations

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import ceil_div, fill_bytes, k_steps, num_tiles
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.resources import (
    CHUNK_BYTES,
    CTA_BYTES,
    direct_ctas,
    direct_smem_bytes,
    direct_stages,
    num_stages,
    storing_warps,
)
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cycles import exchange_cycles, mma_cycles

WARP_THREADS = 32
SCHEDULERS = 4  # of an SM: a warp each issues an instruction a clock


def direct_cycles(tile: Tile, problem: Problem, arch: Arch) -> float:
    """Of a launch, gates aside: the start of a CTA, with the latency of its first loads; a step for each k tile; the
    stores; and all of it again for each round of CTAs. Those that share an SM hide each other's latencies, but take
    turns at what it does."""
    c = arch.constants
    threads = WARP_THREADS * storing_warps(tile, arch.target)
    ctas = num_tiles(tile, problem) * tile.cluster_k
    stages = launch_stages(tile, problem, arch)
    size = direct_smem_bytes(tile, problem.a_dtype, problem.out_dtype, arch.target, stages)
    room = min((arch.smem_bytes + CTA_BYTES) // (size + CTA_BYTES), direct_ctas(tile, problem.c_major))
    sharing = min(room, ceil_div(ctas, arch.num_sms))
    own = k_steps(tile, problem) * step_cycles(tile, problem, arch, sharing) + c.direct_element_cycles * (
        tile.cta_m * tile.out_n / tile.cluster_k / threads
    )
    own += exchange_cycles(tile, arch) + (c.direct_meeting_cycles if tile.cluster_k > 1 else 0)
    rounds = ceil_div(ctas, arch.num_sms * room)
    return c.direct_start_cycles + own + (rounds - 1) * (c.direct_round_cycles + own)


def launch_stages(tile: Tile, problem: Problem, arch: Arch, is_k_known: bool = True) -> int:
    """Those that a launch has room for, as `Plan` has them: 0 for the kernel's own."""
    if tile.is_thin or not tile.direct:
        return 0
    most = num_stages(tile, problem.a_dtype, problem.out_dtype, arch)
    return direct_stages(tile, problem.k if is_k_known else None, most)


def step_cycles(tile: Tile, problem: Problem, arch: Arch, sharing: int = 1) -> float:
    """Of a k tile: all threads meet, and wait for the slowest of its MMAs, what it reads from the L2 cache, and the
    instructions that load it. `sharing`: so many CTAs are on an SM."""
    c, in_bytes = arch.constants, DTYPE_BYTES[problem.a_dtype]
    ctas = min(num_tiles(tile, problem) * tile.cluster_k, arch.num_sms)
    rate = min(c.l2_alone_bytes_per_clk, c.l2_read_bytes_per_clk * arch.num_sms / ctas)
    parts = tile.cta_m, tile.mma_n
    each = (c.direct_raw_cycles if padding(problem, x) else c.direct_chunk_cycles for x in "ab")
    chunks = tile.k_tile * in_bytes / CHUNK_BYTES / (WARP_THREADS * SCHEDULERS)
    issued = chunks * sum(rows * cycles for rows, cycles in zip(parts, each, strict=True))
    slowest = max(mma_cycles(tile, in_bytes, arch), fill_bytes(tile, in_bytes) / rate, issued)
    return c.direct_step_cycles + sharing * slowest
