"""Hopper, loop 4: one warp loads, two warpgroups multiply and store; all walk over many tiles.

    python examples/ladder/hopper_warp_specialised.py [--m M --n N --k K] [--emulate]

Against hopper_prefetch, whose warp 0 does both: the load warp waits for nothing but empty stages, and runs ahead into
the next tile while the others store. `setmaxnreg` moves registers from its warpgroup to those with accumulators. Two
CTAs along m form a cluster: each loads half of the 256 rows of B for both. Only as many clusters start as run at once;
cluster i computes tiles i, i + step, ... TMA stores the result, from boxes in shared memory.

    warp 0        load      with warps 1..3, which are idle, at 40 registers a thread
    warps 4..11   multiply  two warpgroups at 232; then each stores its own 64 rows, box by box

    pipeline   producer -> consumer   filled by                       emptied by
    ab         load -> multiply       the bytes of A and of B, half   one lane of each of the 8 warps of both CTAs
                                      of them from the other CTA
    boxes      multiply -> TMA        stmatrix of a warpgroup,        cp.async.bulk.wait_group.read in its first
                                      fence, its named barrier        warp, then the barrier

Two tiles (a step's loads in brackets):

    load       [0] [1] [2] [3] [4] ... [0] [1] [2] [3]               [4] ...
    multiply               wgmma 0  wgmma 1 ... store . . . . . . .  wgmma 0  wgmma 1 ...
"""

from __future__ import annotations

import _cli
import _common
import _layouts_sm90 as layouts
import cutlass
from cutlass import BFloat16, Float32, Int16, Int32, Uint32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import masks, pipelines

TILE = Tile(128, 256, 64, cluster_m=2)
CLUSTER = (TILE.cluster_m, TILE.cluster_n, 1)
CTA_M, CTA_N, K_TILE = TILE.cta_m, TILE.mma_n, TILE.k_tile
STAGES, THREADS = 4, 384
FULL_BYTES = (CTA_M + CTA_N) * K_TILE * 2  # what the wgmmas wait for: A and B of one step of k
LOAD_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # 128 * 40 + 256 * 232 = 64512 of 65536
WARPGROUP, STORE_BARRIER = 128, 1  # threads; named barriers 1 and 2: of each warpgroup that stores
STORE_ROWS, STORE_COLS = 64, 32  # a box: a warpgroup's rows, 64 bytes of each, one swizzle span
BOXES = CTA_N // STORE_COLS  # of a warpgroup and tile
BUFFERS = 4  # of a warpgroup, in shared memory


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
    tma_a, tma_b = layouts.operand_atoms(a, b, TILE, STAGES)
    one_box = cute.slice_(layouts.store_layout(STORE_ROWS, STORE_COLS, 1), (None, None, 0))
    tma_c, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, one_box, (STORE_ROWS, STORE_COLS))
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    # gridDim.z is for the launcher to say: the clusters that run at once.
    kernel(tma_a, tma_b, tma_c, m, n, k).launch(grid=CLUSTER, block=(THREADS, 1, 1), cluster=CLUSTER)


@cute.kernel
def kernel(tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, tma_c: cute.CopyAtom, m: Int32, n: Int32, k: Int32) -> None:
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank, _, first = cute.arch.block_idx()

    # Shared memory and the pipeline.
    a_smem, b_smem = layouts.smem_layouts(TILE, STAGES)
    c_smem = layouts.store_layout(2 * STORE_ROWS, STORE_COLS, BUFFERS)  # the rows of both warpgroups
    allocator = cutlass.memory.SmemAllocator()
    sA = allocator.allocate_tensor(BFloat16, a_smem.outer, 1024, a_smem.inner)
    sB = allocator.allocate_tensor(BFloat16, b_smem.outer, 1024, b_smem.inner)
    sC = allocator.allocate_tensor(BFloat16, c_smem.outer, 1024, c_smem.inner)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, pipelines.hopper_empty_arrivals(TILE))  # 8 + 8
    ab = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=one,
        consumer_group=warps,
        tx_count=FULL_BYTES,
        cta_layout_vmnk=layouts.cluster_layout(TILE),
    )

    # The tiles of this cluster.
    rows = TILE.cluster_m * CTA_M
    tiles_m, tiles_n = Uint32((m + rows - 1) // rows), Uint32((n + CTA_N - 1) // CTA_N)
    order, num_tiles = layouts.tile_order(TILE, tiles_m, tiles_n), tiles_m * tiles_n
    idx, step = Uint32(first), Uint32(cute.arch.grid_dim()[2])
    k_tiles = (k + K_TILE - 1) // K_TILE

    if warp_idx < 4:
        cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp_idx == 0:
            # Rows of A, and this CTA's part of rows of B, in the coordinates that TMA takes.
            gA = cute.local_tile(layouts.row_major(m, k), (CTA_M, K_TILE), (None, None))  # (row, k, tile, k tile)
            gB = cute.local_tile(layouts.row_major(n, k), (CTA_N, K_TILE), (None, None))
            alone, both = cute.make_layout(1), cute.make_layout(TILE.cluster_m)
            As, Ag = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
            Bs, Bg = cpasync.tma_partition(tma_b, rank, both, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
            b_mask = Int16(masks.b_mask(TILE, rank, 0))
            fill = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            while idx < num_tiles:
                tile_m, tile_n = order.of(idx)
                m_idx, n_idx = Int32(tile_m) * TILE.cluster_m + rank, Int32(tile_n)
                for k_idx in cutlass.range(k_tiles, unroll=1):
                    ab.producer_acquire(fill)
                    full = ab.producer_get_barrier(fill)
                    cute.copy(tma_a, Ag[None, m_idx, k_idx], As[None, fill.index], tma_bar_ptr=full)
                    cute.copy(tma_b, Bg[None, n_idx, k_idx], Bs[None, fill.index], tma_bar_ptr=full, mcast_mask=b_mask)
                    fill.advance()
                idx += step
            ab.producer_tail(fill)  # the other CTA's last releases have arrived

    else:
        cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - 1)
        is_store_warp = warp_idx % 4 == 0
        store_barrier = STORE_BARRIER + group

        # This warpgroup's rows of the stages, its accumulator, its way out: registers -> boxes -> TMA.
        mma, own = layouts.tiled_mma(TILE), layouts.tiled_mma(Tile(64, CTA_N))
        slab = mma.get_slice(group * WARPGROUP)
        fA = mma.make_fragment_A(slab.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(slab.partition_B(sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((CTA_M, CTA_N)), Float32)
        r2s = layouts.store_matrices(own)
        boxes = cute.local_tile(sC, (STORE_ROWS, STORE_COLS), (group, 0, None))  # (row, column, buffer)
        Rs = r2s.get_slice(tidx).partition_D(boxes)
        rounded = cute.make_rmem_tensor(cute.shape(Rs)[:3], BFloat16)
        sums, per_box = cute.coalesce(r2s.retile(acc)), CTA_N // BOXES // 2  # a thread's: pairs, every 8 columns
        gC = cute.local_tile(layouts.row_major(m, n), (STORE_ROWS, STORE_COLS), (None, None))
        alone = cute.make_layout(1)
        Cs, Cg = cpasync.tma_partition(tma_c, 0, alone, cute.group_modes(boxes, 0, 2), cute.group_modes(gC, 0, 2))

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)  # one behind `read`
        while idx < num_tiles:
            ab.consumer_wait(read)
            warpgroup.fence()
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            read.advance()
            for _ in cutlass.range(1, k_tiles, unroll=1):
                ab.consumer_wait(read)
                for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                    cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)  # the group before this one has read its stage
                ab.consumer_release(done)
                read.advance()
                done.advance()
            warpgroup.wait_group(0)
            ab.consumer_release(done)
            done.advance()

            tile_m, tile_n = order.of(idx)
            m_box = (Int32(tile_m) * TILE.cluster_m + rank) * 2 + group
            for i in cutlass.range_constexpr(BOXES):
                for j in cutlass.range_constexpr(per_box):
                    rounded[j] = sums[i * per_box + j].to(BFloat16)
                if is_store_warp:
                    cute.arch.cp_async_bulk_wait_group(BUFFERS - 1, read=True)  # TMA has read this buffer
                cute.arch.barrier(barrier_id=store_barrier, number_of_threads=WARPGROUP)
                cute.copy(r2s, rounded, Rs[None, None, None, i % BUFFERS])
                cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, TMA may read
                cute.arch.barrier(barrier_id=store_barrier, number_of_threads=WARPGROUP)
                if is_store_warp:
                    cute.copy(tma_c, Cs[None, i % BUFFERS], Cg[None, m_box, Int32(tile_n) * BOXES + i])
                    cute.arch.cp_async_bulk_commit_group()
            idx += step
        if is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


CHANGES = """a warp of its own loads; two warpgroups, with its registers, multiply
two CTAs share B: each loads half of it for both
a grid of the clusters that run at once; loads of the next tile run beside the store of this one
the result goes registers -> shared memory -> TMA store, in boxes of 64x32"""
BOX = (STORE_COLS, STORE_ROWS)
RUNG = _common.Rung(
    "hopper_warp_specialised",
    "hopper_prefetch",
    CHANGES,
    launch,
    kernel,
    TILE,
    STAGES,
    THREADS,
    BOX,
    2 * BUFFERS,
    is_persistent=True,
    arch="sm_90a",
)

if __name__ == "__main__":
    _cli.main(RUNG)
