"""Hopper, loop 1: copy a step of k, wait for it, multiply it, wait for that. Nothing overlaps.

    python examples/ladder/hopper_naive.py [--m M --n N --k K] [--emulate]

A (m, k), B (n, k) and C (m, n) are bfloat16, row-major; sums are float32. Two warpgroups multiply a 128x256 tile, 64
rows each; their accumulators are registers, 128 a thread. A step of k is 64 elements (128 bytes, one swizzle span).
hopper_prefetch and hopper_compiler_prefetch differ from this file in the main loop alone.

    warp 0        load; then it multiplies like the rest
    warps 0..7    multiply, then store from registers

    pipeline   producer -> consumer   filled by                       emptied by
    ab         TMA -> wgmma           the bytes of A and B            one lane of each of the 8 warps

One step of k, over and over:

    warp 0     acquire  copy .............
    all                     wait ........ full  wgmma ........ wait  release
"""

from __future__ import annotations

import _cli
import _common
import _layouts_sm90 as layouts
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines

TILE = Tile(128, 256, 64)
CTA_M, CTA_N, K_TILE = TILE.cta_m, TILE.mma_n, TILE.k_tile
STAGES, THREADS = 4, 256  # this loop would do with one stage; it has those of the other loops
FULL_BYTES = (CTA_M + CTA_N) * K_TILE * 2  # what the wgmmas wait for: A and B of one step of k


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    tma_a, tma_b = layouts.operand_atoms(a, b, TILE, STAGES)
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    grid = ((m + CTA_M - 1) // CTA_M, (n + CTA_N - 1) // CTA_N, 1)
    kernel(tma_a, tma_b, c.iterator, m, n, k).launch(grid=grid, block=(THREADS, 1, 1))


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, c: cute.Pointer, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx = cute.arch.thread_idx()[0]
    x, y, _ = cute.arch.block_idx()
    m_idx, n_idx = layouts.tile_of_cta(TILE, x, y, cute.arch.grid_dim()[0], cute.arch.grid_dim()[1])

    # Shared memory and the pipeline.
    a_smem, b_smem = layouts.smem_layouts(TILE, STAGES)
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, pipelines.hopper_empty_arrivals(TILE))  # 8
    ab = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=one,
        consumer_group=warps,
        tx_count=FULL_BYTES,
        cta_layout_vmnk=layouts.cluster_layout(TILE),
    )
    fill = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
    read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)

    # This CTA's rows of A and of B, in the coordinates that TMA takes.
    gA = cute.local_tile(layouts.row_major(m, k), (CTA_M, K_TILE), (m_idx, None))  # (row, k, k tile)
    gB = cute.local_tile(layouts.row_major(n, k), (CTA_N, K_TILE), (n_idx, None))
    alone = cute.make_layout(1)
    As, Ag = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
    Bs, Bg = cpasync.tma_partition(tma_b, 0, alone, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))

    # This warpgroup's rows of the stages, and its accumulator.
    mma = layouts.tiled_mma(TILE)
    group = mma.get_slice(cute.arch.make_warp_uniform(tidx // 128) * 128)
    fA = mma.make_fragment_A(group.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
    fB = mma.make_fragment_B(group.partition_B(sB))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((CTA_M, CTA_N)), Float32)  # ((pair, row, column), 1, 1)

    # Main loop.
    for k_idx in cutlass.range((k + K_TILE - 1) // K_TILE, unroll=1):
        if warp_idx == 0:
            ab.producer_acquire(fill)
            full = ab.producer_get_barrier(fill)
            cute.copy(tma_a, Ag[None, k_idx], As[None, fill.index], tma_bar_ptr=full)
            cute.copy(tma_b, Bg[None, k_idx], Bs[None, fill.index], tma_bar_ptr=full)
        fill.advance()
        ab.consumer_wait(read)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, k_idx != 0)
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        ab.consumer_release(read)
        read.advance()

    # Store: a thread holds pairs of columns, every 8, of rows r and r + 8; a pair lies in C or outside.
    rounded = cute.make_rmem_tensor(acc.layout, BFloat16)
    rounded.store(acc.load().to(BFloat16))
    row = m_idx * CTA_M + tidx // 32 * 16 + tidx % 32 // 4
    col = n_idx * CTA_N + tidx % 4 * 2
    for i in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(CTA_N // 8):
            if row + 8 * i < m and col + 8 * j < n:
                start = cute.assume(Int64(row + 8 * i) * n + (col + 8 * j), divby=2)
                cute.autovec_copy(rounded[(None, i, j), 0, 0], cute.make_tensor(c + start, cute.make_layout(2)))


CHANGES = "the first: each step of k is loaded, waited for, multiplied, waited for"
RUNG = _common.Rung("hopper_naive", "", CHANGES, launch, kernel, TILE, STAGES, THREADS, arch="sm_90a")

if __name__ == "__main__":
    _cli.main(RUNG)
