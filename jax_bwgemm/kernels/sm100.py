"""Blackwell GEMM: warp-specialised, persistent, TMA + tcgen05, one CTA or a CTA pair (cta_group 2).

Timetable of a CTA (6 warps):

    warps 0..3   store     TMEM -> registers -> epilogue -> smem box -> TMA store; warp 0 also owns the TMEM
    warp 4       multiply  issues tcgen05.mma for the CTA or, in a pair's even CTA, for both (the odd one's is idle)
    warp 5       load      TMA of this CTA's rows of A and columns of B, for one tile after the other

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival in the     tcgen05.commit of every issuer that shares
                                      leader and the bytes of A and    the stage, multicast to both CTAs of a pair
                                      B of both CTAs
    acc        multiply -> store      tcgen05.commit, to both CTAs     one lane of each store warp, of both CTAs,
                                                                       at the leader
    store      store -> TMA           128 threads, fence, barrier      cp.async.bulk.wait_group.read in warp 0

Two accumulators in TMEM: the store warps drain one while the MMAs of the next tile fill the other. A pair frees its
TMEM behind a barrier of its own (`freed`): neither CTA leaves while the other still reads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.kernels import masks, pipelines
from jax_bwgemm.kernels.epilogue import Epilogue, Run
from jax_bwgemm.kernels.operands import DSL_DTYPES, coordinate_tensor, dsl_box
from jax_bwgemm.kernels.scheduler import TileOrder, tile_coordinates
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import ACC_STAGES, EPILOGUE_STAGES, num_stages, num_threads, store_box, tmem_cols
from jax_bwgemm.variant import Variant

MULTIPLY_WARP = pipelines.EPILOGUE_WARPS
LOAD_WARP = MULTIPLY_WARP + 1
STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS
STORE_BARRIER = 1  # named barriers: the store warps among themselves,
TMEM_BARRIER = 2  # and the store warps with the multiply warp, once the TMEM address is known


class Sm100Gemm:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        tile = self.tile = variant.tile
        self.in_dtype = DSL_DTYPES[variant.a_dtype]
        self.out_dtype = DSL_DTYPES[variant.out_dtype]
        self.a_major, self.b_major = variant.a_major, variant.b_major
        self.in_bytes = DTYPE_BYTES[variant.a_dtype]
        self.stages = num_stages(tile, self.in_bytes, ARCHS["b200"].smem_bytes)
        self.threads = num_threads(tile, variant.target)
        self.tmem_cols = tmem_cols(tile)
        self.pair = tile.cta_group == 2
        self.tiler = (tile.mma_m, tile.mma_n, tile.k_tile)
        self.store_cols, self.store_rows = store_box(tile, variant.out_dtype, variant.target)
        self.epilogue = Epilogue(variant.epilogue)

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def tiled_mma(self) -> cute.TiledMma:
        return sm100.make_trivial_tiled_mma(
            self.in_dtype,
            self.in_dtype,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            Float32,
            tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE,
            self.tiler[:2],
        )

    def smem_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any]:
        """One CTA's part: A (MMA, MMA_M, MMA_K, stages) and B (MMA, MMA_N, MMA_K, stages)."""
        a = sm100.make_smem_layout_a(mma, self.tiler, self.in_dtype, self.stages)
        return a, sm100.make_smem_layout_b(mma, self.tiler, self.in_dtype, self.stages)

    def store_layout(self, stages: int) -> Any:
        """(store_rows, store_cols, stages)"""
        box = (self.store_rows, self.store_cols)
        return sm100.make_smem_layout_epi(self.out_dtype, LayoutEnum.ROW_MAJOR, box, stages)

    def cluster_layout(self, mma: cute.TiledMma) -> Any:
        """(V, M, N, K) of the cluster: V counts the CTAs of a pair, M the pairs."""
        return cute.tiled_divide(cute.make_layout((self.tile.cluster_m, self.tile.cluster_n, 1)), (mma.thr_id,))

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        a_batch_step: Int32,
        b_batch_step: Int32,
        raster_group: Int32,
        raster_along_n: Int32,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Make the TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces
        this host code; a test compares what both pack."""
        cluster = (self.tile.cluster_m, self.tile.cluster_n)
        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        vmnk = self.cluster_layout(mma)
        example = {"alpha": alpha, "bias": bias}
        args = tuple(example[param] for param in self.epilogue.params)
        one_stage = (None, None, None, 0)
        tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(
            sm100.cluster_shape_to_tma_atom_A(cluster, mma.thr_id),
            a,
            cute.slice_(a_smem, one_stage),
            self.tiler,
            mma,
            vmnk.shape,
        )
        tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(
            sm100.cluster_shape_to_tma_atom_B(cluster, mma.thr_id),
            b,
            cute.slice_(b_smem, one_stage),
            self.tiler,
            mma,
            vmnk.shape,
        )
        tma_c, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            c,
            cute.slice_(self.store_layout(1), (None, None, 0)),
            (self.store_rows, self.store_cols),
        )
        self.tma_boxes = {"a": dsl_box(tma_a), "b": dsl_box(tma_b), "c": dsl_box(tma_c)}
        sizes = (m, n, k, batch, a_batch_step, b_batch_step, raster_group, raster_along_n)
        self.kernel(tma_a, tma_b, tma_c, *sizes, args).launch(
            grid=(*cluster, 1), block=(self.threads, 1, 1), cluster=(*cluster, 1), min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        tma_c: cute.CopyAtom,
        m: Int32,
        n: Int32,
        k: Int32,
        batch: Int32,
        a_batch_step: Int32,
        b_batch_step: Int32,
        raster_group: Int32,
        raster_along_n: Int32,
        args: tuple[Any, ...],
    ) -> None:
        tile = self.tile
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_c)

        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        c_smem = self.store_layout(EPILOGUE_STAGES)
        allocator = cutlass.memory.SmemAllocator()
        ab_barriers = allocator.allocate_array(Int64, 2 * self.stages)
        acc_barriers = allocator.allocate_array(Int64, 2 * ACC_STAGES)
        freed = allocator.allocate_array(Int64, 1)
        tmem_address = allocator.allocate_array(Int32, 1)
        sA = allocator.allocate_tensor(self.in_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(self.in_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(self.out_dtype, c_smem.outer, 1024, c_smem.inner)

        threads = pipeline.Agent.Thread
        vmnk = self.cluster_layout(mma)
        ab = pipeline.PipelineTmaUmma.create(
            barrier_storage=ab_barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.blackwell_empty_arrivals(tile)),
            tx_count=pipelines.full_bytes(tile, self.in_bytes),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        acc = pipeline.PipelineUmmaAsync.create(
            barrier_storage=acc_barriers,
            num_stages=ACC_STAGES,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.acc_empty_arrivals(tile)),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        if cutlass.const_expr(self.pair):  # noqa: SIM102 (a compile-time condition stands alone in CuTeDSL)
            if warp_idx == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_init(freed, 1)
        cluster = (tile.cluster_m, tile.cluster_n)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)

        tiles_m = Uint32((m + (tile.cluster_m * tile.cta_m - 1)) // (tile.cluster_m * tile.cta_m))
        tiles_n = Uint32((n + (tile.cluster_n * tile.mma_n - 1)) // (tile.cluster_n * tile.mma_n))
        order = TileOrder(tiles_m, tiles_n, Uint32(raster_group), Uint32(raster_along_n))
        num_tiles = tiles_m * tiles_n * Uint32(batch)
        k_tiles = (k + (tile.k_tile - 1)) // tile.k_tile
        mA = coordinate_tensor(self.a_major == "k", m, k, batch)
        mB = coordinate_tensor(self.b_major == "k", n, k, batch)
        mC = coordinate_tensor(True, m, n, batch)
        # (MMA, MMA_M, MMA_N, acc stages): the layout of the accumulators from TMEM address 0 on
        acc_layout = mma.make_fragment_C(cute.append(mma.partition_shape_C(self.tiler[:2]), ACC_STAGES)).layout

        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
        if warp_idx == LOAD_WARP:
            self.load(tma_a, tma_b, mA, mB, sA, sB, ab, order, num_tiles, k_tiles, (a_batch_step, b_batch_step))
        elif warp_idx == MULTIPLY_WARP:
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            self.multiply(mma, sA, sB, cute.make_tensor(address, acc_layout), ab, acc, num_tiles, k_tiles)
        else:
            if warp_idx == 0:
                cute.arch.alloc_tmem(self.tmem_cols, tmem_address, is_two_cta=self.pair)
                cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            self.store(tma_c, mC, sC, cute.make_tensor(address, acc_layout), acc, order, num_tiles, n, args)
            cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=STORE_THREADS)  # all four have read
            if warp_idx == 0:
                self.free_tmem(address, freed)

    @cute.jit
    def load(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        mA: cute.Tensor,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ab: pipeline.PipelineTmaUmma,
        order: TileOrder,
        num_tiles: Uint32,
        k_tiles: Int32,
        batch_steps: tuple[Any, Any],
    ) -> None:
        """The load warp of either CTA: its half of the pair's A and B (`slice`), into the stages of its own smem."""
        tile = self.tile
        x, y, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        pairs_m = tile.cluster_m // tile.cta_group
        pair_x = x // tile.cta_group
        a_mask = cutlass.Int16(masks.a_mask(tile, x))
        b_mask = cutlass.Int16(masks.b_mask(tile, x, y))
        half = self.tiled_mma().get_slice(x % tile.cta_group)
        tA = half.partition_A(cute.local_tile(mA, (tile.mma_m, tile.k_tile), (None, None, None)))
        tB = half.partition_B(cute.local_tile(mB, (tile.mma_n, tile.k_tile), (None, None, None)))
        As, Ag = cpasync.tma_partition(  # (TMA, stage), (TMA, Mt, Kt, l)
            tma_a, y, cute.make_layout(tile.cluster_n), cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3)
        )
        Bs, Bg = cpasync.tma_partition(  # (TMA, stage), (TMA, Nt, Kt, l)
            tma_b, pair_x, cute.make_layout(pairs_m), cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        idx = Uint32(first)
        while idx < num_tiles:
            tile_m, tile_n, l_idx = tile_coordinates(idx, order, cutlass.min)
            Ag_tile = Ag[None, Int32(tile_m) * pairs_m + pair_x, None, Int32(l_idx) * batch_steps[0]]
            Bg_tile = Bg[None, Int32(tile_n) * tile.cluster_n + y, None, Int32(l_idx) * batch_steps[1]]
            for k_idx in cutlass.range(k_tiles, unroll=1):
                ab.producer_acquire(state)
                barrier = ab.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    Ag_tile[None, k_idx],
                    As[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=a_mask if cutlass.const_expr(tile.cluster_n > 1) else None,
                )
                cute.copy(
                    tma_b,
                    Bg_tile[None, k_idx],
                    Bs[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=b_mask if cutlass.const_expr(pairs_m > 1) else None,
                )
                state.advance()
            idx += Uint32(step)
        ab.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        tC: cute.Tensor,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
        num_tiles: Uint32,
        k_tiles: Int32,
    ) -> None:
        """The MMA warp of the leader CTA: one accumulator after the other. Needs no coordinates, only the count."""
        x, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        fA = mma.make_fragment_A(sA)  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(sB)  # (MMA, MMA_N, MMA_K, stage)
        if x % self.tile.cta_group == 0:
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
            idx = Uint32(first)
            while idx < num_tiles:
                acc.producer_acquire(write)
                tC_tile = tC[None, None, None, write.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles, unroll=1):
                    ab.consumer_wait(read)
                    for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                        cute.gemm(mma, tC_tile, fA[None, None, kb, read.index], fB[None, None, kb, read.index], tC_tile)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    ab.consumer_release(read)
                    read.advance()
                acc.producer_commit(write)
                write.advance()
                idx += Uint32(step)
            acc.producer_tail(write)

    @cute.jit
    def store(
        self,
        tma_c: cute.CopyAtom,
        mC: cute.Tensor,
        sC: cute.Tensor,
        tC: cute.Tensor,
        acc: pipeline.PipelineUmmaAsync,
        order: TileOrder,
        num_tiles: Uint32,
        n: Int32,
        args: tuple[Any, ...],
    ) -> None:
        """The four store warps: TMEM -> registers -> epilogue -> smem box -> TMA store, box after box."""
        tile = self.tile
        x, y, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        tidx = cute.arch.thread_idx()[0]
        is_store_warp = cute.arch.make_warp_uniform(tidx // 32) == 0
        box = (self.store_rows, self.store_cols)
        tC_boxes = cute.flat_divide(tC[(None, None), 0, 0, None], box)  # (rows, cols, 1, boxes, acc stage)
        load_op = sm100.get_tmem_load_op(
            (tile.cta_m, tile.mma_n, tile.k_tile), LayoutEnum.ROW_MAJOR, self.out_dtype, Float32, box, self.pair
        )
        t2r = tcgen05.make_tmem_copy(load_op, tC_boxes[None, None, 0, 0, 0])
        thr_t2r = t2r.get_slice(tidx)
        Tt = thr_t2r.partition_S(tC_boxes)  # (T2R, T2R_M, T2R_N, 1, boxes, acc stage)
        values = cute.make_rmem_tensor(
            thr_t2r.partition_D(cute.make_identity_tensor(box)).shape, Float32
        )  # one row, store_cols columns
        rounded = cute.make_rmem_tensor(values.shape, self.out_dtype)
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.out_dtype, Float32, t2r), t2r)
        Rr = r2s.retile(rounded)
        Rs = r2s.get_slice(tidx).partition_D(sC)  # (R2S, R2S_M, R2S_N, stage)
        runs = fragment_runs(self.store_cols, 16 * 8 // self.out_dtype.width)
        boxes = cutlass.const_expr(tile.mma_n // self.store_cols)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACC_STAGES)
        idx = Uint32(first)
        while idx < num_tiles:
            tile_m, tile_n, l_idx = tile_coordinates(idx, order, cutlass.min)
            m_idx = Int32(tile_m) * tile.cluster_m + x
            n_idx = Int32(tile_n) * tile.cluster_n + y
            gC = cute.local_tile(  # (store_rows, store_cols, 1, boxes) of this CTA's tile
                cute.local_tile(mC, (tile.cta_m, tile.mma_n), (m_idx, n_idx, Int32(l_idx))), box, (None, None)
            )
            Cs, Cg = cpasync.tma_partition(
                tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
            )
            if is_store_warp:  # all buffers are free for this tile
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=STORE_THREADS)
            acc.consumer_wait(read)
            for i in cutlass.range_constexpr(boxes):
                cute.copy(t2r, Tt[None, None, None, 0, i, read.index], values)
                cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld
                if cutlass.const_expr(i == boxes - 1):  # everything has been read: the MMAs may have it back
                    with cute.arch.elect_one():
                        acc.consumer_release(read)
                self.epilogue.apply(values, runs, n_idx * tile.mma_n + i * self.store_cols, n, args)
                rounded.store(values.load().to(self.out_dtype))
                stage = i % EPILOGUE_STAGES
                cute.copy(r2s, Rr, Rs[None, None, None, stage])
                cute.arch.fence_proxy("async.shared", space="cta")
                if (
                    is_store_warp
                ):  # so that after the barrier the next buffer may be written: its last store has read it
                    cute.arch.cp_async_bulk_wait_group(pipelines.stores_in_flight(), read=True)
                cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=STORE_THREADS)
                if is_store_warp:
                    cute.copy(tma_c, Cs[None, stage], Cg[None, 0, i])
                    cute.arch.cp_async_bulk_commit_group()
            read.advance()
            idx += Uint32(step)
        if is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def free_tmem(self, address: cute.Pointer, freed: cute.Pointer) -> None:
        """Warp 0 of each CTA. In a pair, first tell the other CTA that this one has read, and wait to be told."""
        if cutlass.const_expr(self.pair):
            peer = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(freed, peer)
            cute.arch.mbarrier_wait(freed, 0)
        cute.arch.dealloc_tmem(address, self.tmem_cols, is_two_cta=self.pair)


def fragment_runs(elements: int, width: int) -> tuple[Run, ...]:
    """A 32x32b TMEM load: thread t holds row t; register j is column j. `width`: elements of one 16-byte load."""
    return tuple(Run(j, width, (tuple(range(j, j + width)),)) for j in range(0, elements, width))
