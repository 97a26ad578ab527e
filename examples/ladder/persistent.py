"""Rung 6: warps with one job each walk over many tiles. Against rung 5: who runs what, and when.

    python examples/ladder/persistent.py [--m M --n N --k K] [--emulate]

Only as many clusters start as run at once; cluster i computes tiles i, i + step, ... in the order of
`jax_bwgemm.kernels.scheduler`. The roles no longer take turns: while the store warps drain one accumulator, the MMAs of
the next tile fill the other, and the loads of the tile after that are on their way.

    warps 0..3   store   TMEM -> registers -> boxes -> TMA; warp 0 also owns the TMEM
    warp 4       MMA     in the leader; the odd CTA's is idle
    warp 5       load    of this CTA's rows of A and B

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> MMA            the bytes of A and B of both     tcgen05.commit, multicast to both CTAs
                                      CTAs, on the leader's barrier
    acc        MMA -> store           tcgen05.commit, to both CTAs     one lane of each store warp of both CTAs
    boxes      store -> TMA           128 threads, fence, barrier      cp.async.bulk.wait_group.read in warp 0
"""

from __future__ import annotations

import _cli
import _common
import _layouts
import cutlass
import cutlass.utils.blackwell_helpers as sm100
from _order import TileOrder
from cutlass import BFloat16, Float32, Int32, Uint32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.sm100_tmem import wait_for_loads

TILE = Tile(256, 256, 64, cta_group=2, cluster_m=2)
CLUSTER = (TILE.cluster_m, TILE.cluster_n, 1)
MMA_M, MMA_N, K_TILE, CTA_M = TILE.mma_m, TILE.mma_n, TILE.k_tile, TILE.cta_m
STAGES, ACC_STAGES = 4, 2
STORE_THREADS, MMA_WARP, LOAD_WARP, THREADS = 128, 4, 5, 192
FULL_BYTES = (MMA_M + MMA_N) * K_TILE * 2  # what the MMA waits for: A and B of one step of k, of both CTAs
STORE_COLS = 32  # columns that a thread takes from TMEM at once: a box's row of 64 bytes, one swizzle span
BOXES = MMA_N // STORE_COLS
RASTER_GROUP = 8  # rows of tiles that are walked together, so that a wave's operands fit in L2
TMEM_BARRIER, STORE_BARRIER = 1, 2


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
    # gridDim.z is for the launcher to say: the clusters that run at once.
    kernel(tma_a, tma_b, tma_c, m, n, k).launch(grid=CLUSTER, block=(THREADS, 1, 1), cluster=CLUSTER)


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, tma_c: cute.CopyAtom, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx = cute.arch.thread_idx()[0]
    half, _, first = cute.arch.block_idx()

    # Shared memory and pipelines.
    mma = _layouts.tiled_mma(TILE)
    a_smem, b_smem = _layouts.smem_layouts(mma, TILE, STAGES)
    c_smem = _layouts.store_layout(CTA_M, STORE_COLS, BOXES)
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    sC = allocator.allocate_tensor(BFloat16, c_smem.outer, 1024, c_smem.inner)
    tmem_known = pipeline.NamedBarrier(TMEM_BARRIER, STORE_THREADS + 32)  # store warps and MMA warp
    tmem = cutlass.memory.TmemAllocator(barrier_for_retrieve=tmem_known, is_two_cta=True)
    vmnk = _layouts.cluster_layout(mma, TILE)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    store_warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, pipelines.acc_empty_arrivals(TILE))  # 4 + 4
    load, multiply = pipeline.PipelineTmaUmma.create(
        num_stages=STAGES, producer_group=one, consumer_group=one, tx_count=FULL_BYTES, cta_layout_vmnk=vmnk
    ).make_participants()
    multiplied, store = pipeline.PipelineUmmaAsync.create(
        num_stages=ACC_STAGES, producer_group=one, consumer_group=store_warps, cta_layout_vmnk=vmnk
    ).make_participants()

    # This CTA's rows of A and of B, in the coordinates that TMA takes.
    thr = mma.get_slice(half)
    # (MMA, MMA_M, MMA_K, tile of A, k tile)
    tA = thr.partition_A(cute.local_tile(_layouts.row_major(m, k), (MMA_M, K_TILE), (None, None)))
    tB = thr.partition_B(cute.local_tile(_layouts.row_major(n, k), (MMA_N, K_TILE), (None, None)))
    alone = cute.make_layout(1)
    As, Ag = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3))
    Bs, Bg = cpasync.tma_partition(tma_b, 0, alone, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3))

    # The tiles of this cluster, and the two accumulators.
    tiles_m, tiles_n = Uint32((m + MMA_M - 1) // MMA_M), Uint32((n + MMA_N - 1) // MMA_N)
    order, num_tiles = TileOrder(tiles_m, tiles_n, Uint32(RASTER_GROUP)), tiles_m * tiles_n
    first, step = Uint32(first), Uint32(cute.arch.grid_dim()[2])
    k_tiles = (k + K_TILE - 1) // K_TILE
    acc_layout = mma.make_fragment_C(cute.append(mma.partition_shape_C((MMA_M, MMA_N)), ACC_STAGES)).layout

    if warp_idx == LOAD_WARP:
        idx = first
        while idx < num_tiles:
            tile_m, tile_n = order.of(idx)
            for k_idx in cutlass.range(k_tiles, unroll=1):
                empty = load.acquire_and_advance()
                cute.copy(tma_a, Ag[None, Int32(tile_m), k_idx], As[None, empty.index], tma_bar_ptr=empty.barrier)
                cute.copy(tma_b, Bg[None, Int32(tile_n), k_idx], Bs[None, empty.index], tma_bar_ptr=empty.barrier)
            idx += step
        load.tail()

    elif warp_idx == MMA_WARP:
        tmem.wait_for_alloc()
        tC = cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout)  # (MMA, MMA_M, MMA_N, accumulator)
        fA, fB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        if half == 0:  # the leader
            idx = first
            while idx < num_tiles:
                acc = multiplied.acquire_and_advance()
                tC_tile = tC[None, None, None, acc.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles, unroll=1):
                    full = multiply.wait_and_advance()
                    for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                        cute.gemm(mma, tC_tile, fA[None, None, kb, full.index], fB[None, None, kb, full.index], tC_tile)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
                acc.commit()
                idx += step
            multiplied.tail()

    else:
        tmem.allocate(ACC_STAGES * MMA_N)
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(Float32)
        tC = cute.make_tensor(address, acc_layout)
        tC_boxes = cute.flat_divide(tC[(None, None), 0, 0, None], (CTA_M, STORE_COLS))  # (row, column, 1, box, acc)
        t2r = _layouts.tmem_load(tC_boxes[None, None, 0, 0, 0], STORE_COLS)
        Tt = t2r.get_slice(tidx).partition_S(tC_boxes)
        values = cute.make_rmem_tensor(t2r.get_slice(tidx).partition_D(tC_boxes[None, None, 0, 0, 0]).shape, Float32)
        rounded = cute.make_rmem_tensor(values.shape, BFloat16)
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, BFloat16, Float32, t2r), t2r)
        Rr, Rs = r2s.retile(rounded), r2s.get_slice(tidx).partition_D(sC)
        # (row, column, CTA tile, box of C)
        gC = cute.local_tile(_layouts.row_major(m, n), (CTA_M, STORE_COLS), (None, None))
        Cs, Cg = cpasync.tma_partition(tma_c, 0, alone, cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2))
        idx = first
        while idx < num_tiles:
            tile_m, tile_n = order.of(idx)
            if warp_idx == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # TMA has read the boxes of the tile before
            cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=STORE_THREADS)
            acc = store.wait_and_advance()
            for i in cutlass.range_constexpr(BOXES):
                cute.copy(t2r, Tt[None, None, None, 0, i, acc.index], values)
                wait_for_loads(values)  # tcgen05.wait::ld
                if cutlass.const_expr(i == BOXES - 1):  # all is in registers: the MMAs may have the accumulator back
                    with cute.arch.elect_one():
                        acc.release()
                rounded.store(values.load().to(BFloat16))
                cute.copy(r2s, Rr, Rs[None, None, None, i])
                cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, TMA may read
                cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=STORE_THREADS)
                if warp_idx == 0:
                    cute.copy(tma_c, Cs[None, i], Cg[None, Int32(tile_m) * 2 + half, Int32(tile_n) * BOXES + i])
                    cute.arch.cp_async_bulk_commit_group()
            idx += step
        if warp_idx == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        tmem.relinquish_alloc_permit()
        tmem.free(address)


CHANGES = """a grid of the clusters that run at once; each walks over tiles instead of ending
six warps with three roles, each at its own pace, instead of four that take turns
two accumulators: a tile is stored while the next is multiplied"""
RUNG = _common.Rung(
    "persistent", "tma_store", CHANGES, launch, kernel, TILE, STAGES, THREADS, (STORE_COLS, CTA_M), BOXES, True
)

if __name__ == "__main__":
    _cli.main(RUNG)
