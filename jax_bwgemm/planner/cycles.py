"""Cycles of the parts of a kernel: a k step's MMAs and loads, an epilogue, an exchange, and the clock that they run at.
Puts none together: that is `streams`' and `cost`'s. The numbers are the arch's `constants`."""

from __future__ import annotations

import functools

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import concurrent_clusters, fill_bytes, fill_parts, inside, num_tiles, readers
from jax_bwgemm.facts.padding import ends_within_sectors, is_torn
from jax_bwgemm.facts.problem import COARSE_DTYPES, DTYPE_BYTES, Problem
from jax_bwgemm.facts.resources import (
    WARPS_PER_WARPGROUP,
    column_halves,
    load_box,
    loading_ctas,
    segments,
    sharing_ctas,
    store_box,
    store_boxes,
    store_rows,
    storing_warps,
)
from jax_bwgemm.facts.tile import Tile

MMA_K_BYTES = 32  # the k extent of one wgmma or tcgen05.mma, PTX ISA
INSTRUCTIONS_PER_CLK = 128  # float32 operations of an SM, CUDA C++ guide, arithmetic instructions
LOAD_LATENCY = ((512, 900), (65536, 2700))  # (bytes, cycles) of a TMA round trip; published, B200; linear between


def overlapped(x: float, y: float, exponent: float) -> float:
    """Two activities beside each other: the longer one, and more the closer they are, for neither is smooth."""
    both: float = (x**exponent + y**exponent) ** (1 / exponent)
    return both


def loaded_clock(tile: Tile, arch: Arch, utilisation: float) -> float:
    """GHz of the SMs while their tensor cores are busy for this fraction of the time."""
    c = arch.constants
    under_load = c.clock_idle_ghz - c.clock_slope_ghz * utilisation + c.clock_pairs_ghz * (tile.cta_group - 1)
    return min(arch.clock_ghz, under_load)


def memory_bytes_per_clk(arch: Arch) -> float:
    """Of all device memory, in clocks of the SMs' highest."""
    return arch.memory_tb_per_s * 1e3 / arch.clock_ghz


def mma_interval(tile: Tile, arch: Arch) -> float:
    """Tensor core cycles of one MMA, which covers 32 bytes of k, or of those that lie side by side in a tile: the
    multiplier's rate, or reading the operands.

    The rates: wgmma m64nN takes N/2 cycles (measured on an H200); tcgen05.mma N/2, but N/4 with 128 rows over a pair
    (published, B200). A CTA's tensor cores read its rows of A and its columns of B from shared memory, which gives the
    published 32 + N/4 (1-CTA), 32 + N/8 and 16 + N/8 (2-CTA), and the H200's knee at N = 64. For 64 rows on one
    Blackwell CTA only N/2 is published; the operands' term is below it from N = 64 on.
    """
    rows = store_rows(tile, arch.target)
    side_by_side = tile.mma_m // (rows * tile.cta_group)
    operands = (rows + tile.load_n) * MMA_K_BYTES / arch.constants.smem_bytes_per_clk
    return side_by_side * max(tile.mma_n / (2 * column_halves(tile)), operands)


def mma_cycles(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Tensor core cycles of one k step of one CTA (or CTA pair)."""
    return tile.num_accs * mma_interval(tile, arch) * tile.k_tile * in_bytes / MMA_K_BYTES


def fill_cycles(tile: Tile, problem: Problem, arch: Arch, sharing: int = 1) -> float:
    """L2 cycles of one k step of one CTA, at the device's highest clock; `sharing` clusters divide tiles along k.

    The CTAs at work share what all SMs get out of the L2 cache, until one has all that it can take. A row of a load
    that does not start on a line of 128 bytes lies in one more; one beyond the operand's edge is not read, but takes
    its turn. Nor is a line sooner there than all who want it at the same time have had it, one after the other.
    """
    c, clusters = arch.constants, max(num_tiles(tile, problem), sharing)
    ctas = min(concurrent_clusters(tile, arch), clusters) * tile.cluster_ctas
    rate = min(c.l2_alone_bytes_per_clk, c.l2_read_bytes_per_clk * arch.num_sms / ctas)
    read_bytes, least = _filled(tile, problem, arch)
    return max(read_bytes / rate, least)


@functools.lru_cache(maxsize=1024)
def _filled(tile: Tile, problem: Problem, arch: Arch) -> tuple[float, float]:
    """Of `fill_cycles`, which is asked for every way of sharing tiles: the bytes that are read, and the cycles that
    lines and those who want them take at any rate."""
    c = arch.constants
    a, b = fill_parts(tile, DTYPE_BYTES[problem.a_dtype])
    inside_a, inside_b = inside(tile, problem)
    torn_a, torn_b = (c.torn_lines if is_torn(problem, x) else 1.0 for x in "ab")
    turns = c.row_cycles * sum(load_rows(tile, problem, x, c.torn_lines) for x in "ab")
    read_bytes = a * inside_a * torn_a + b * inside_b * torn_b
    return read_bytes, max(turns, c.line_cycles * max(readers(tile, problem, arch)))


def load_rows(tile: Tile, problem: Problem, operand: str, torn: float) -> float:
    """Of the boxes that a CTA loads of "a" or "b" for a k step, those beyond the edge, too; one that is read and does
    not start on a line counts for `torn`. Where only some CTAs load for those that share it, of one of these."""
    major, part = (problem.a_major, 0) if operand == "a" else (problem.b_major, 1)
    in_bytes = DTYPE_BYTES[problem.a_dtype]
    row_bytes = load_box(tile, operand, major, problem.a_dtype)[0] * in_bytes
    read = inside(tile, problem)[part] if major == "k" else 1.0
    lines = torn if is_torn(problem, operand) else 1.0
    others = sharing_ctas(tile, operand) / loading_ctas(tile, operand, major)
    return fill_parts(tile, in_bytes)[part] * others / row_bytes * (1 + read * (lines - 1))


def step_cycles(tile: Tile, problem: Problem, arch: Arch, sharing: int = 1) -> float:
    """One k step at the device's highest clock, its tensor cores beside the L2 cache."""
    mma = mma_cycles(tile, DTYPE_BYTES[problem.a_dtype], arch)
    return overlapped(mma, fill_cycles(tile, problem, arch, sharing), arch.constants.overlap)


def fill_rate(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Bytes a clock that one CTA must read from L2 while its tensor cores never wait."""
    return fill_bytes(tile, in_bytes) / mma_cycles(tile, in_bytes, arch)


def load_latency(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Cycles from issuing the larger operand's load to its arrival, at the highest clock."""
    (small, least), (large, most) = LOAD_LATENCY
    size = max(tile.cta_m // tile.num_accs, tile.load_n) * tile.k_tile * in_bytes
    return arch.constants.latency * (least + (most - least) * (size - small) / (large - small))


def commit_cycles(tile: Tile, arch: Arch) -> float:
    """From a tile's last MMA until its sums can be read."""
    return arch.constants.commit_cycles if tile.cta_group == 1 else arch.constants.commit_pair_cycles


def epilogue_cycles(
    tile: Tile, out_bytes: int, arch: Arch, store: str = "tma", store_bytes_per_clk: float | None = None
) -> float:
    """Conversion and store of one CTA's part of the result."""
    c, elems = arch.constants, tile.cta_m * tile.out_n / tile.cluster_k
    rate = store_bytes_per_clk or c.store_bytes_per_clk
    warpgroups = 1 if tile.pingpong else storing_warps(tile, arch.target) // WARPS_PER_WARPGROUP
    drain, moved = c.drain_cycles * tile.num_bs * elems / (128 * 256 * warpgroups), elems * out_bytes / rate
    if store == "tma":
        return drain + moved
    staged = 0 if arch.family.sums_in_tmem else drain  # the published kernels store out of registers
    return max(staged + moved, elems * c.thread_store_cycles)


def box_cycles(tile: Tile, problem: Problem, arch: Arch) -> float:
    """Of the boxes that a warpgroup stores one after the other, beside their elements: its threads meet for each."""
    if arch.family.sums_in_tmem:
        return 0.0
    return arch.constants.box_cycles * -(-store_boxes(tile, problem.out_dtype) // tile.cluster_k)


def store_rate(tile: Tile, problem: Problem, arch: Arch, store: str = "tma") -> float:
    """Bytes a clock at which a CTA stores: shared memory's rate, or its share of device memory's where all CTAs store,
    load nothing meanwhile, and the L2 cache cannot take it. Where threads store, each piece of a row costs as if it had
    `segment_bytes` more; where TMA stores rows that end within sectors, each costs as `torn_bytes` more."""
    size = DTYPE_BYTES[problem.out_dtype]
    is_kept = problem.batch * problem.m * problem.n * size <= arch.constants.retained * arch.l2_bytes
    rate = arch.constants.store_bytes_per_clk
    if not (is_kept or arch.family.multiplies_while_storing):
        rate = memory_bytes_per_clk(arch) / (concurrent_clusters(tile, arch) * tile.cluster_ctas)
    if store == "tma":
        if not ends_within_sectors(problem):
            return rate
        stored = store_box(tile, problem.out_dtype, problem.c_major, arch.target, store, problem.epilogue.moves)
        return rate / (1 + arch.constants.torn_bytes / (stored[0] * size))
    _, cols = segments(tile, problem.out_dtype, arch.target)
    return rate / (1 + arch.constants.segment_bytes / (cols * size))


def gate_cycles(tile: Tile, problem: Problem, arch: Arch) -> float:
    """The special functions of one CTA's part of the result, and what other instructions no MMA hides."""
    is_coarse = problem.out_dtype in COARSE_DTYPES
    special = sum(op.coarse if is_coarse else op.fine for op in problem.epilogue.ops())
    others = sum(op.instructions for op in problem.epilogue.ops())
    elements = tile.cta_m * tile.out_n / tile.cluster_k
    return elements * special / arch.constants.special_per_clk + elements * others / INSTRUCTIONS_PER_CLK


def exchange_cycles(tile: Tile, arch: Arch) -> float:
    """Split-K: each CTA reads its part of the accumulators of the others, through distributed shared memory.

    Assumed to be as fast as L2; what the CTAs' meetings cost is fitted.
    """
    if tile.cluster_k == 1:
        return 0.0
    c, others = arch.constants, 4 * tile.cta_m * tile.mma_n * (tile.cluster_k - 1) / tile.cluster_k
    return c.exchange_cycles + c.exchange_cta_cycles * tile.cluster_k + others / c.l2_read_bytes_per_clk
