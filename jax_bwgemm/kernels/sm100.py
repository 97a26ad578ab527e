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
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.epilogue import Run
from jax_bwgemm.kernels.gemm import Gemm, Sizes, Walk
from jax_bwgemm.kernels.operands import dsl_box
from jax_bwgemm.tile import ACC_STAGES, EPILOGUE_STAGES, tmem_cols
from jax_bwgemm.variant import Variant

MULTIPLY_WARP = pipelines.EPILOGUE_WARPS
LOAD_WARP = MULTIPLY_WARP + 1
STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS
STORE_BARRIER = 1  # named barriers: the store warps among themselves,
TMEM_BARRIER = 2  # and the store warps with the multiply warp, once the TMEM address is known


class Sm100Gemm(Gemm):
    """One variant. Sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        tile = variant.tile
        self.tmem_cols = tmem_cols(tile)
        self.pair = tile.cta_group == 2
        self.tiler = (tile.mma_m, tile.mma_n, tile.k_tile)

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
        self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, sizes: Sizes, alpha: Float32, bias: cute.Pointer
    ) -> None:
        """Make the TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces
        this host code; a test compares what both pack."""
        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        vmnk = self.cluster_layout(mma)
        one_stage = (None, None, None, 0)
        tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(
            sm100.cluster_shape_to_tma_atom_A(self.cluster, mma.thr_id),
            a,
            cute.slice_(a_smem, one_stage),
            self.tiler,
            mma,
            vmnk.shape,
        )
        tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(
            sm100.cluster_shape_to_tma_atom_B(self.cluster, mma.thr_id),
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
        self.kernel(tma_a, tma_b, tma_c, sizes, self.epilogue_args(alpha, bias)).launch(
            grid=(*self.cluster, 1), block=(self.threads, 1, 1), cluster=(*self.cluster, 1), min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, tma_b: cute.CopyAtom, tma_c: cute.CopyAtom, sizes: Sizes, args: tuple[Any, ...]
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
            tx_count=self.full_bytes,
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
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        walk = self.walk(sizes)
        mA, mB, mC = self.coordinate_tensors(sizes)
        # (MMA, MMA_M, MMA_N, acc stages): the layout of the accumulators from TMEM address 0 on
        acc_layout = mma.make_fragment_C(cute.append(mma.partition_shape_C(self.tiler[:2]), ACC_STAGES)).layout

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        if warp_idx == LOAD_WARP:
            self.load(tma_a, tma_b, mA, mB, sA, sB, ab, walk, sizes)
        elif warp_idx == MULTIPLY_WARP:
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            self.multiply(mma, sA, sB, cute.make_tensor(address, acc_layout), ab, acc, walk)
        else:
            if warp_idx == 0:
                cute.arch.alloc_tmem(self.tmem_cols, tmem_address, is_two_cta=self.pair)
                cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            self.store(tma_c, mC, sC, cute.make_tensor(address, acc_layout), acc, walk, sizes, args)
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
        walk: Walk,
        sizes: Sizes,
    ) -> None:
        """The load warp of either CTA: its half of the pair's A and B (`half`), into the stages of its own smem."""
        tile = self.tile
        pairs_m = cute.make_layout(tile.cluster_m // tile.cta_group)
        half = self.tiled_mma().get_slice(walk.x % tile.cta_group)
        tA = half.partition_A(cute.local_tile(mA, (tile.mma_m, tile.k_tile), (None, None, None)))
        tB = half.partition_B(cute.local_tile(mB, (tile.mma_n, tile.k_tile), (None, None, None)))
        As, Ag = cpasync.tma_partition(
            tma_a, walk.y, cute.make_layout(tile.cluster_n), cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3)
        )
        Bs, Bg = cpasync.tma_partition(
            tma_b, walk.x // tile.cta_group, pairs_m, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3)
        )
        self.keep_full(tma_a, As, Ag, tma_b, Bs, Bg, ab, walk, sizes)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        tC: cute.Tensor,
        ab: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
        walk: Walk,
    ) -> None:
        """The MMA warp of the leader CTA: one accumulator after the other. Needs no coordinates, only the count."""
        fA = mma.make_fragment_A(sA)  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(sB)  # (MMA, MMA_N, MMA_K, stage)
        if walk.x % self.tile.cta_group == 0:
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
            idx = walk.first
            while idx < walk.num_tiles:
                acc.producer_acquire(write)
                tC_tile = tC[None, None, None, write.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(walk.k_tiles, unroll=1):
                    ab.consumer_wait(read)
                    for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                        cute.gemm(mma, tC_tile, fA[None, None, kb, read.index], fB[None, None, kb, read.index], tC_tile)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    ab.consumer_release(read)
                    read.advance()
                acc.producer_commit(write)
                write.advance()
                idx += walk.step
            acc.producer_tail(write)

    @cute.jit
    def store(
        self,
        tma_c: cute.CopyAtom,
        mC: cute.Tensor,
        sC: cute.Tensor,
        tC: cute.Tensor,
        acc: pipeline.PipelineUmmaAsync,
        walk: Walk,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """The four store warps: TMEM -> registers -> epilogue -> smem box -> TMA store, box after box."""
        tile = self.tile
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
        idx = walk.first
        while idx < walk.num_tiles:
            m_idx, n_idx, l_idx = walk.tile_of(tile, idx)
            gC = cute.local_tile(  # (store_rows, store_cols, 1, boxes) of this CTA's tile
                cute.local_tile(mC, (tile.cta_m, tile.mma_n), (m_idx, n_idx, l_idx)), box, (None, None)
            )
            Cs, Cg = cpasync.tma_partition(
                tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
            )
            self.reclaim(is_store_warp, STORE_BARRIER, STORE_THREADS)
            acc.consumer_wait(read)
            for i in cutlass.range_constexpr(boxes):
                cute.copy(t2r, Tt[None, None, None, 0, i, read.index], values)
                cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld
                if cutlass.const_expr(i == boxes - 1):  # everything has been read: the MMAs may have it back
                    with cute.arch.elect_one():
                        acc.consumer_release(read)
                self.epilogue.apply(values, runs, n_idx * tile.mma_n + i * self.store_cols, sizes.n, args)
                rounded.store(values.load().to(self.out_dtype))
                self.publish(r2s, Rr, Rs, tma_c, Cs, Cg[None, 0, i], i, is_store_warp, STORE_BARRIER, STORE_THREADS)
            read.advance()
            idx += walk.step
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
