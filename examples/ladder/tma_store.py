"""Rung 5: the result leaves through shared memory and TMA. Against rung 2: the epilogue, and nothing before it.

    python examples/ladder/tma_store.py [--m M --n N --k K] [--emulate]

A thread holds one row of the tile. Storing it directly, the 32 lanes of a warp write 16 bytes each to 32 rows. Here the
threads write a box of 128 rows x 32 columns into shared memory, swizzled, and TMA stores it as a whole, clipped at the
edges of C. Eight boxes make the CTA's half of the tile, each with a place of its own: while TMA stores one, the threads
convert the next.

    pipeline   producer -> consumer   filled by                        emptied by
    ab, acc    as in rung 2
    boxes      threads -> TMA         128 threads, a fence of the      never: the CTA ends when TMA has read them
                                      async proxy, a barrier
"""

from __future__ import annotations

import _cli
import _common
import _layouts
import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.sm100_tmem import wait_for_loads

TILE = Tile(256, 256, 64, cta_group=2, cluster_m=2)
CLUSTER = (TILE.cluster_m, TILE.cluster_n, 1)
MMA_M, MMA_N, K_TILE, CTA_M = TILE.mma_m, TILE.mma_n, TILE.k_tile, TILE.cta_m
STAGES, THREADS = 4, 128
FULL_BYTES = (MMA_M + MMA_N) * K_TILE * 2  # what the MMA waits for: A and B of one step of k, of both CTAs
STORE_COLS = 32  # columns that a thread takes from TMEM at once: a box's row of 64 bytes, one swizzle span
BOXES = MMA_N // STORE_COLS


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    vmnk, one_stage = _layouts.cluster_layout(mma, TILE).shape, (None, None, None, 0)
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    tiler = (MMA_M, MMA_N, K_TILE)
    tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(op, a, cute.slice_(a_smem, one_stage), tiler, mma, vmnk)
    tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(op, b, cute.slice_(b_smem, one_stage), tiler, mma, vmnk)
    one_box = cute.slice_(_layouts.store_layout(CTA_M, STORE_COLS, 1), (None, None, 0))
    tma_c, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, one_box, (CTA_M, STORE_COLS))
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    grid = ((m + MMA_M - 1) // MMA_M * 2, (n + MMA_N - 1) // MMA_N, 1)
    kernel(tma_a, tma_b, tma_c, m, n, k).launch(grid=grid, block=(THREADS, 1, 1), cluster=CLUSTER)


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, tma_c: cute.CopyAtom, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx = cute.arch.thread_idx()[0]
    m_idx, n_idx, _ = cute.arch.block_idx()
    half = m_idx % 2
    is_leader = half == 0

    # Shared memory and pipelines.
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    c_smem = _layouts.store_layout(CTA_M, STORE_COLS, BOXES)
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    sC = allocator.allocate_tensor(BFloat16, c_smem.outer, 1024, c_smem.inner)
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

    # Store: thread t holds row t of this CTA's half of the tile and writes it box by box; warp 0 hands them to TMA.
    store.wait_and_advance()
    tC_boxes = cute.flat_divide(tC[(None, None), 0, 0], (CTA_M, STORE_COLS))  # (row, column, 1, box)
    t2r = _layouts.tmem_load(tC_boxes[None, None, 0, 0], STORE_COLS)
    Tt = t2r.get_slice(tidx).partition_S(tC_boxes)
    values = cute.make_rmem_tensor(t2r.get_slice(tidx).partition_D(tC_boxes[None, None, 0, 0]).shape, Float32)
    rounded = cute.make_rmem_tensor(values.shape, BFloat16)
    r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, BFloat16, Float32, t2r), t2r)
    Rr, Rs = r2s.retile(rounded), r2s.get_slice(tidx).partition_D(sC)
    gC = cute.local_tile(_layouts.row_major(m, n), (CTA_M, STORE_COLS), (m_idx, None))  # (row, column, box of C)
    Cs, Cg = cpasync.tma_partition(tma_c, 0, alone, cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2))
    for i in cutlass.range_constexpr(BOXES):
        cute.copy(t2r, Tt[None, None, None, 0, i], values)
        wait_for_loads(values)  # tcgen05.wait::ld
        rounded.store(values.load().to(BFloat16))
        cute.copy(r2s, Rr, Rs[None, None, None, i])
        cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, TMA may read
        cute.arch.barrier()
        if warp_idx == 0:
            cute.copy(tma_c, Cs[None, i], Cg[None, n_idx * BOXES + i])
            cute.arch.cp_async_bulk_commit_group()
    if warp_idx == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    tmem.free(address)


CHANGES = """the result goes TMEM -> registers -> shared memory -> TMA store, in boxes of 128x32
no predicate and no address of C in any thread: TMA clips; its map of C is a kernel parameter
64 KiB more of shared memory"""
BOX = (STORE_COLS, CTA_M)
RUNG = _common.Rung("tma_store", "two_cta", CHANGES, launch, kernel, TILE, STAGES, THREADS, BOX, BOXES)

if __name__ == "__main__":
    _cli.main(RUNG)
