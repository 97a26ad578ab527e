"""Rung 4: single CTAs in a cluster of 4x4 share what they load. Against rung 1: multicast; against rung 3: no pairs.

    python examples/ladder/one_cta_multicast.py [--m M --n N --k K] [--emulate]

The four CTAs of a row of the cluster need the same 128 rows of A: each loads a quarter of them and TMA hands it to all
four. The four CTAs of a column share 256 rows of B in the same way.

    pipeline   producer -> consumer   filled by                        emptied by
    ab         TMA -> MMA             the bytes of A and B, from       tcgen05.commit of every CTA in this row and
                                      7 CTAs' TMAs                     column
    acc        MMA -> store           tcgen05.commit                   never

A stage of a CTA may be overwritten by any CTA of its row and column, so all of these must have read theirs: 4 + 4,
itself counted once, make 7 arrivals. A CTA loads as many bytes as in rung 3, but its stages hold all 256 rows of B, not
half of them, and every CTA issues MMAs of its own.
"""

from __future__ import annotations

import _cli
import _common
import _layouts
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import masks, pipelines
from jax_bwgemm.kernels.sm100_tmem import wait_for_loads

TILE = Tile(128, 256, 64, cluster_m=4, cluster_n=4)
CLUSTER = (TILE.cluster_m, TILE.cluster_n, 1)
MMA_M, MMA_N, K_TILE, CTA_M = TILE.mma_m, TILE.mma_n, TILE.k_tile, TILE.cta_m
STAGES, THREADS = 4, 128
FULL_BYTES = (MMA_M + MMA_N) * K_TILE * 2  # what the MMA waits for: A and B of one step of k
STORE_COLS = 32  # columns that a thread takes from TMEM at once, each in a register
EMPTY_ARRIVALS = pipelines.blackwell_empty_arrivals(TILE)  # 4 + 4 - 1 = 7


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    vmnk, one_stage = _layouts.cluster_layout(mma, TILE).shape, (None, None, None, 0)
    op = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
    tiler = (MMA_M, MMA_N, K_TILE)
    tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(op, a, cute.slice_(a_smem, one_stage), tiler, mma, vmnk)
    tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(b_smem, one_stage), tiler, mma, vmnk)
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    rows, cols = CTA_M * TILE.cluster_m, MMA_N * TILE.cluster_n  # of C, in whole clusters
    grid = ((m + rows - 1) // rows * TILE.cluster_m, (n + cols - 1) // cols * TILE.cluster_n, 1)
    kernel(tma_a, tma_b, c.iterator, m, n, k).launch(grid=grid, block=(THREADS, 1, 1), cluster=CLUSTER)


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, c: cute.Pointer, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx = cute.arch.thread_idx()[0]
    m_idx, n_idx, _ = cute.arch.block_idx()
    x, y = m_idx % TILE.cluster_m, n_idx % TILE.cluster_n  # in the cluster

    # Shared memory and pipelines.
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    tmem = cutlass.memory.TmemAllocator(barrier_for_retrieve=pipeline.NamedBarrier(1, THREADS))
    vmnk = _layouts.cluster_layout(mma, TILE)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    sharers = pipeline.CooperativeGroup(pipeline.Agent.Thread, EMPTY_ARRIVALS)
    all_threads = pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS)
    load, multiply = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES, producer_group=one, consumer_group=sharers, tx_count=FULL_BYTES, cta_layout_vmnk=vmnk
    ).make_participants()
    multiplied, store = pipeline.PipelineUmmaAsync.create(
        num_stages=1, producer_group=one, consumer_group=all_threads, cta_layout_vmnk=vmnk
    ).make_participants()

    # The accumulator: 256 columns of TMEM.
    tmem.allocate(MMA_N)
    tmem.wait_for_alloc()
    address = tmem.retrieve_ptr(Float32)
    tC = cute.make_tensor(address, mma.make_fragment_C(mma.partition_shape_C((MMA_M, MMA_N))).layout)

    # This CTA's rows of A and of B, in the coordinates that TMA takes.
    thr = mma.get_slice(0)
    # (MMA, MMA_M, MMA_K, k tile)
    tA = thr.partition_A(cute.local_tile(_layouts.row_major(m, k), (MMA_M, K_TILE), (m_idx, None)))
    tB = thr.partition_B(cute.local_tile(_layouts.row_major(n, k), (MMA_N, K_TILE), (n_idx, None)))
    sA_, tA_, sB_, tB_ = (cute.group_modes(each, 0, 3) for each in (sA, tA, sB, tB))
    As, Ag = cpasync.tma_partition(tma_a, y, cute.make_layout(TILE.cluster_n), sA_, tA_)  # a quarter of A
    Bs, Bg = cpasync.tma_partition(tma_b, x, cute.make_layout(TILE.cluster_m), sB_, tB_)  # a quarter of B
    a_mask = cutlass.Int16(masks.a_mask(TILE, x))
    b_mask = cutlass.Int16(masks.b_mask(TILE, x, y))

    # Main loop, all in warp 0. The compiler moves the loads of step i to step i - 2: `prefetch_stages`.
    if warp_idx == 0:
        fA, fB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        acc = multiplied.acquire_and_advance()
        for k_idx in cutlass.range((k + K_TILE - 1) // K_TILE, prefetch_stages=STAGES - 2):
            empty = load.acquire_and_advance()
            cute.copy(tma_a, Ag[None, k_idx], As[None, empty.index], tma_bar_ptr=empty.barrier, mcast_mask=a_mask)
            cute.copy(tma_b, Bg[None, k_idx], Bs[None, empty.index], tma_bar_ptr=empty.barrier, mcast_mask=b_mask)
            full = multiply.wait_and_advance()
            mma.set(tcgen05.Field.ACCUMULATE, k_idx != 0)
            for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                cute.gemm(mma, tC, fA[None, None, kb, full.index], fB[None, None, kb, full.index], tC)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            full.release()
        acc.commit()
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


CHANGES = """a cluster of 4x4 CTAs shares its loads: a quarter of the bytes of A and of B
a load reaches the CTAs in its mask, a commit every CTA that shares a stage with this one
a stage is empty after 7 arrivals instead of 1"""
RUNG = _common.Rung("one_cta_multicast", "one_cta", CHANGES, launch, kernel, TILE, STAGES, THREADS)

if __name__ == "__main__":
    _cli.main(RUNG)
