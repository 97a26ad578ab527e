"""Static objects of a Blackwell tile: functions of the tile alone, made alike for the host and in the kernel.

They cross no kernel boundary, so they cost no parameter. What the device does with them is in the rungs.
"""

from __future__ import annotations

from typing import Any

import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile


def tiled_mma(tile: Tile) -> cute.TiledMma:
    """tcgen05.mma of mma_m x mma_n x 16 by one CTA or a pair: bfloat16, k-major, in shared memory; float32 sums."""
    group = tcgen05.CtaGroup.TWO if tile.cta_group == 2 else tcgen05.CtaGroup.ONE
    k_major, shape = OperandMajorMode.K, (tile.mma_m, tile.mma_n)
    return sm100.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, group, shape)


def smem_layouts(mma: cute.TiledMma, tile: Tile, stages: int) -> tuple[Any, Any]:
    """One CTA's part of A (MMA, MMA_M, MMA_K, stage) and of B (MMA, MMA_N, MMA_K, stage)."""
    tiler = (tile.mma_m, tile.mma_n, tile.k_tile)
    a = sm100.make_smem_layout_a(mma, tiler, BFloat16, stages)
    return a, sm100.make_smem_layout_b(mma, tiler, BFloat16, stages)


def store_layout(rows: int, cols: int, boxes: int) -> Any:
    """(row, column, box) of what TMA stores, each box swizzled by itself."""
    return sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (rows, cols), boxes)


def cluster_layout(mma: cute.TiledMma, tile: Tile) -> Any:
    """(V, M, N, K) of the cluster: V counts the CTAs of a pair, M and N the pairs, or single CTAs."""
    return cute.tiled_divide(cute.make_layout((tile.cluster_m, tile.cluster_n, 1)), (mma.thr_id,))


def row_major(rows: Int32, cols: Int32) -> cute.Tensor:
    """(rows, cols) coordinates as a tensor map counts them: E(0) is its contiguous dimension."""
    return cute.make_tensor((0, 0), cute.make_layout((rows, cols), stride=(cute.E(1), cute.E(0))))


def tmem_load(accumulator: cute.Tensor, cols: int) -> Any:
    """tcgen05.ld of 128 lanes x `cols` columns by four warps: thread t gets row t, a register a column."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(cols)), Float32)
    return tcgen05.make_tmem_copy(atom, accumulator)
