"""Analytic cost of a tile: cycles of its main loop, its waves and its memory traffic. States no preference.

The model orders tiles; it does not promise a time. A cluster tile costs, per CTA,

    main loop = k steps * (tensor core cycles beside L2 fill cycles), epilogue, and a latency once per launch

and the product takes as many waves of cluster tiles as the SMs need. On Hopper the consumers store their result before
they go on; on Blackwell the epilogue of one accumulator runs beside the main loop of the next, and only the last shows.
"""

from __future__ import annotations

import dataclasses

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.problem import DTYPE_BYTES, Problem
from jax_bwgemm.tile import Tile, num_threads

MMA_K_BYTES = 32  # the k extent of one wgmma or tcgen05.mma, PTX ISA
LATENCY_CYCLES = 2000  # the first stage's TMA round trip: 900 cycles for 512 bytes, 2700 for 64 KB, published on a B200
LAUNCH_US = 2.4  # cuLaunchKernelEx of an empty kernel, measured on an H200, driver 580.159.04
STORE_BYTES_PER_CLK = 64  # shared memory to L2 by TMA store: half of shared memory's 128 B/clk, CUDA C++ guide
OVERLAP = 4.0  # chosen, not fitted: on the 9 products it was tried on (H200) the choice was within 1 % of the best
DRAIN_CYCLES = 500  # registers or TMEM through the conversion into shared memory, for one warpgroup's 128x256; assumed


@dataclasses.dataclass(frozen=True)
class Cost:
    """`us` on the device, `utilisation` of its dense peak, `waves` of cluster tiles, what `bound` the time, and how
    many `l2_bytes` all CTAs read.
    """

    us: float
    utilisation: float
    waves: int
    bound: str
    l2_bytes: float


def cost(tile: Tile, problem: Problem, arch: Arch) -> Cost:
    """What `tile` takes for `problem` on `arch`. Meaningful only where `tile.why_not` has no objection."""
    waves = num_waves(tile, problem, arch)
    cycles = LATENCY_CYCLES + _tile_cycles(tile, problem, arch, waves)
    compute_us = cycles / (arch.clock_ghz * 1e3)
    memory_us = problem.min_bytes / (arch.memory_tb_per_s * 1e6)
    us = _overlapped(compute_us, memory_us) + LAUNCH_US
    bound = "memory" if memory_us > compute_us else _step_bound(tile, problem, arch)
    return Cost(us, problem.flops / (us * arch.peak_tflops * 1e6), waves, bound, _l2_bytes(tile, problem))


def num_waves(tile: Tile, problem: Problem, arch: Arch) -> int:
    """Rounds of cluster tiles, one CTA a SM."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    slots = max(1, arch.num_sms // (tile.cluster_m * tile.cluster_n))
    return _ceil_div(tiles_m * tiles_n * problem.batch, slots)


def cluster_tiles(tile: Tile, problem: Problem) -> tuple[int, int]:
    """Cluster tiles along m and n of one matrix of the batch."""
    return _ceil_div(problem.m, tile.cluster_m * tile.cta_m), _ceil_div(problem.n, tile.cluster_n * tile.mma_n)


def mma_cycles(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Tensor core cycles of one k step of one CTA (or CTA pair)."""
    n = tile.mma_n
    if family(arch.target) == "hopper":
        interval = tile.mma_m / 64 * n / 2  # m64nNk16 takes N/2 cycles; measured on an H200, CUDA 13
    elif tile.cta_group == 2:
        interval = max(n / 2, 32 + n / 8)  # M=256 over a CTA pair; published microbenchmark on a B200
    else:
        interval = max(n / 2, 32 + n / 4)  # M=128; the same
    return interval * tile.k_tile * in_bytes / MMA_K_BYTES


def fill_cycles(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """L2 cycles of one k step of one CTA."""
    return fill_bytes(tile, in_bytes) / arch.l2_read_bytes_per_clk


def fill_bytes(tile: Tile, in_bytes: int) -> float:
    """What one k step of one CTA reads from L2: a multicast operand counts once for the CTAs that share it."""
    a_rows = tile.cta_m / tile.cluster_n
    b_rows = tile.load_n / (tile.cluster_m / tile.cta_group)
    return (a_rows + b_rows) * tile.k_tile * in_bytes


def epilogue_cycles(tile: Tile, out_bytes: int, arch: Arch) -> float:
    """Conversion and store of one CTA's part of the result."""
    warpgroups = num_threads(tile, arch.target) // 128 - 1 if family(arch.target) == "hopper" else 1
    elems = tile.cta_m * tile.mma_n
    return DRAIN_CYCLES * elems / (128 * 256 * warpgroups) + elems * out_bytes / STORE_BYTES_PER_CLK


def _tile_cycles(tile: Tile, problem: Problem, arch: Arch, waves: int) -> float:
    in_bytes = DTYPE_BYTES[problem.a_dtype]
    steps = _ceil_div(problem.k, tile.k_tile)
    main = steps * _overlapped(mma_cycles(tile, in_bytes, arch), fill_cycles(tile, in_bytes, arch))
    epilogue = epilogue_cycles(tile, DTYPE_BYTES[problem.out_dtype], arch)
    if family(arch.target) == "hopper":
        return waves * (main + epilogue)
    return main + (waves - 1) * max(main, epilogue) + epilogue


def _overlapped(x: float, y: float) -> float:
    """Two activities beside each other: the longer one, and more the closer they are, for neither is smooth."""
    return (x**OVERLAP + y**OVERLAP) ** (1 / OVERLAP)


def _l2_bytes(tile: Tile, problem: Problem) -> float:
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    steps = tiles_m * tiles_n * problem.batch * tile.cluster_m * tile.cluster_n * _ceil_div(problem.k, tile.k_tile)
    return steps * fill_bytes(tile, DTYPE_BYTES[problem.a_dtype])


def _step_bound(tile: Tile, problem: Problem, arch: Arch) -> str:
    in_bytes = DTYPE_BYTES[problem.a_dtype]
    return "L2" if fill_cycles(tile, in_bytes, arch) > mma_cycles(tile, in_bytes, arch) else "tensor cores"


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
