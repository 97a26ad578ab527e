"""Rung 2: a CTA pair computes one 256x256 tile. Against rung 1: who holds what, and who speaks for both.

    python examples/ladder/two_cta.py [--m M --n N --k K] [--emulate]

One tcgen05.mma covers both CTAs of a cluster (2, 1). Each holds its own 128 rows of A and of the accumulator, and half
of B, 128 rows of it; the tensor cores read both halves. So a CTA loads half of B for as many columns of C.

    pipeline   producer -> consumer   filled by                        emptied by
    ab         TMA -> MMA             the bytes of A and B of both     tcgen05.commit, multicast to both CTAs: each
                                      CTAs, on the leader's barrier    waits at its own barrier before it loads again
    acc        MMA -> store           tcgen05.commit, to both CTAs     never

The leader is the even CTA: it alone waits for the loads, multiplies and commits. The odd CTA's loads signal the
leader's barrier. Both store their own rows. Neither frees its TMEM before the other has read its own.
"""

from __future__ import annotations

import _cli
import _common
import _layouts
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.sm100_tmem import wait_for_loads

TILE = Tile(256, 256, 64, cta_group=2, cluster_m=2)
CLUSTER = (TILE.cluster_m, TILE.cluster_n, 1)
MMA_M, MMA_N, K_TILE, CTA_M = TILE.mma_m, TILE.mma_n, TILE.k_tile, TILE.cta_m
STAGES, THREADS = 4, 128
FULL_BYTES = (MMA_M + MMA_N) * K_TILE * 2  # what the MMA waits for: A and B of one step of k, of both CTAs
STORE_COLS = 32  # columns that a thread takes from TMEM at once, each in a register


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    vmnk, one_stage = _layouts.cluster_layout(mma, TILE).shape, (None, None, None, 0)
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    tiler = (MMA_M, MMA_N, K_TILE)
    tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(op, a, cute.slice_(a_smem, one_stage), tiler, mma, vmnk)
    tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(b_smem, one_stage), tiler, mma, vmnk)
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    grid = ((m + MMA_M - 1) // MMA_M * 2, (n + MMA_N - 1) // MMA_N, 1)
    kernel(tma_a, tma_b, c.iterator, m, n, k).launch(grid=grid, block=(THREADS, 1, 1), cluster=CLUSTER)


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, c: cute.Pointer, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx = cute.arch.thread_idx()[0]
    m_idx, n_idx, _ = cute.arch.block_idx()
    half = m_idx % 2
    is_leader = half == 0

    # Shared memory and pipelines.
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    tmem = cutlass.memory.TmemAllocator(barrier_for_retrieve=pipeline.NamedBarrier(1, THREADS), is_two_cta=True)
    vmnk = _layouts.cluster_layout(mma, TILE)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    all_threads = pipeline.CooperativeGroup(pipeline.Agent.Thread, 2 * THREADS)
    load, multiply = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES, producer_group=one, consumer_group=one, tx_count=FULL_BYTES, cta_layout_vmnk=vmnk
    ).make_participants()
    multiplied, store = pipeline.PipelineUmmaAsync.create(
        num_stages=1, producer_group=one, consumer_group=all_threads, cta_layout_vmnk=vmnk
    ).make_participants()

    # The accumulator: 256 columns of TMEM in each CTA.
    tmem.allocate(MMA_N)
    tmem.wait_for_alloc()
    address = tmem.retrieve_ptr(Float32)
    tC = cute.make_tensor(address, mma.make_fragment_C(mma.partition_shape_C((MMA_M, MMA_N))).layout)

    # This CTA's rows of A and of B, in the coordinates that TMA takes.
    thr = mma.get_slice(half)
    # (MMA, MMA_M, MMA_K, k tile)
    tA = thr.partition_A(cute.local_tile(_layouts.row_major(m, k), (MMA_M, K_TILE), (m_idx // 2, None)))
    tB = thr.partition_B(cute.local_tile(_layouts.row_major(n, k), (MMA_N, K_TILE), (n_idx, None)))
    alone = cute.make_layout(1)
    As, Ag = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3))
    Bs, Bg = cpasync.tma_partition(tma_b, 0, alone, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3))

    # Main loop, all in warp 0. The compiler moves the loads of step i to step i - 2: `prefetch_stages`.
    if warp_idx == 0:
        fA, fB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        if is_leader:
            multiplied.acquire()
        for k_idx in cutlass.range((k + K_TILE - 1) // K_TILE, prefetch_stages=STAGES - 2):
            empty = load.acquire_and_advance()
            cute.copy(tma_a, Ag[None, k_idx], As[None, empty.index], tma_bar_ptr=empty.barrier)
            cute.copy(tma_b, Bg[None, k_idx], Bs[None, empty.index], tma_bar_ptr=empty.barrier)
            if is_leader:
                full = multiply.wait_and_advance()
                mma.set(tcgen05.Field.ACCUMULATE, k_idx != 0)
                for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                    cute.gemm(mma, tC, fA[None, None, kb, full.index], fB[None, None, kb, full.index], tC)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                full.release()
        if is_leader:
            multiplied.commit()
        load.tail()  # the last commits have arrived: nothing reaches into shared memory once the CTA has ended
    tmem.relinquish_alloc_permit()

    # Store: thread t holds row t of the tile, 32 columns at a time; every 16 bytes of it lie in C or outside.
    store.wait_and_advance()
    tC_cols = cute.flat_divide(tC[(None, None), 0, 0], (CTA_M, STORE_COLS))  # (row, column, 1, block)
    t2r = _layouts.tmem_load(tC_cols[None, None, 0, 0], STORE_COLS)
    Tt = t2r.get_slice(tidx).partition_S(tC_cols)
    values = cute.make_rmem_tensor(t2r.get_slice(tidx).partition_D(tC_cols[None, None, 0, 0]).shape, Float32)
    rounded = cute.make_rmem_tensor((8, STORE_COLS // 8), BFloat16)
    row = m_idx * CTA_M + tidx
    for i in cutlass.range_constexpr(MMA_N // STORE_COLS):
        cute.copy(t2r, Tt[None, None, None, 0, i], values)
        wait_for_loads(values)  # tcgen05.wait::ld
        for j in cutlass.range_constexpr(STORE_COLS):
            rounded[j] = values[j].to(BFloat16)
        for j in cutlass.range_constexpr(STORE_COLS // 8):
            col = n_idx * MMA_N + i * STORE_COLS + 8 * j
            if row < m and col < n:
                start = cute.assume(Int64(row) * n + col, divby=8)
                cute.autovec_copy(rounded[None, j], cute.make_tensor(c + start, cute.make_layout(8)))
    cute.arch.barrier()  # all four warps have read
    tmem.free(address)


CHANGES = """the MMA spans two CTAs: 256x256, cluster (2, 1), cta_group 2
a CTA holds 128 rows of A and half of B: half the bytes of B, a third less shared memory a stage
one CTA of two waits, multiplies and commits: half the MMA instructions"""
RUNG = _common.Rung("two_cta", "one_cta", CHANGES, launch, kernel, TILE, STAGES, THREADS)

if __name__ == "__main__":
    _cli.main(RUNG)
