"""Blackwell GEMM: warp-specialised, persistent, TMA + tcgen05, one CTA or a CTA pair (cta_group 2).

Timetable of a CTA (6 warps; 7 with a residual):

    warps 0..3   store     TMEM -> registers -> epilogue -> smem box -> TMA store; warp 0 also owns the TMEM
    warp 4       multiply  issues tcgen05.mma for the CTA or, in a pair's even CTA, for both (the odd one's is idle)
    warp 5       load      TMA of this CTA's rows of A and columns of B, for one tile after the other
    warp 6       residual  TMA of the boxes of the residual, in the order in which the store warps add them

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival in the     tcgen05.commit of every issuer that shares
                                      leader and the bytes of A and    the stage, multicast to both CTAs of a pair
                                      B of both CTAs
    acc        multiply -> store      tcgen05.commit, to both CTAs     one lane of each store warp, of both CTAs,
                                                                       at the leader
    residual   residual -> store      one expect_tx arrival, the       one lane of each store warp
                                      bytes of all groups' boxes
    store      store -> TMA           the group's threads, fence,      cp.async.bulk.wait_group.read in the group's
                                      barrier                          first warp

Where TMEM holds two accumulators, the store warps drain one while the MMAs of the next tile fill the other. A pair
frees its TMEM behind a barrier of its own (`freed`): neither CTA leaves while the other still reads. A split along k
adds the barriers of `split_k`; its load warp waits for `drained` after each tile. Where TMA cannot step over the
result's rows, each store warp stores its own (`row_store`). Every warp passes griddepcontrol.wait before it touches
global memory; the load warp releases the next kernel when its last load is on its way.

Here are the kernel and the load and multiply roles; the store and residual roles are in `sm100_store`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from jax_bwgemm.kernels import pipelines, split_k
from jax_bwgemm.kernels.gemm import Hints, Sizes, Walk
from jax_bwgemm.kernels.operands import dsl_box
from jax_bwgemm.kernels.sm100_store import ALL_STORE_BARRIER, STORE_THREADS, TMEM_BARRIER, Sm100Store
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.tile import EPILOGUE_STAGES, acc_cols, tmem_cols
from jax_bwgemm.variant import Variant

MULTIPLY_WARP = pipelines.EPILOGUE_WARPS
LOAD_WARP = MULTIPLY_WARP + 1
RESIDUAL_WARP = LOAD_WARP + 1


class Sm100Gemm(Sm100Store):
    """One variant. Sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        tile = variant.tile
        self.tmem_cols = tmem_cols(tile)
        self.pair = tile.cta_group == 2
        self.tiler = (tile.num_accs * tile.mma_m, tile.mma_n, tile.k_tile)

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def tiled_mma(self) -> cute.TiledMma:
        group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        majors = [OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in (self.a_major, self.b_major)]
        shape = (self.tile.mma_m, self.tile.mma_n)
        if self.acc_dtype is Int32:  # the helper below wants both of one sign, which kind::i8 does not
            op = tcgen05.MmaI8Op(self.a_dtype, (*shape, 32), group, tcgen05.OperandSource.SMEM, *majors)
            object.__setattr__(op, "b_dtype", self.b_dtype)
            return cute.make_tiled_mma(cute.make_mma_atom(op))
        return sm100.make_trivial_tiled_mma(self.a_dtype, self.b_dtype, *majors, self.acc_dtype, group, shape)

    def smem_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any]:
        """One CTA's part: A (MMA, MMA_M, MMA_K, stages) and B (MMA, MMA_N, MMA_K, stages)."""
        a = sm100.make_smem_layout_a(mma, self.tiler, self.a_dtype, self.stages)
        return a, sm100.make_smem_layout_b(mma, self.tiler, self.b_dtype, self.stages)

    def cluster_layout(self, mma: cute.TiledMma) -> Any:
        """(V, M, N, K) of the cluster: V counts the CTAs of a pair, M the pairs."""
        return cute.tiled_divide(cute.make_layout(self.cluster), (mma.thr_id,))

    def acc_layout(self, mma: cute.TiledMma) -> Any:
        """(MMA, accumulators, 1, acc stages) of TMEM addresses, as the MMAs write them."""
        one = mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout
        return cute.append(one, cute.make_layout(self.acc_stages, stride=acc_cols(self.tile)))

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        sizes: Sizes,
        hints: Hints,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Make the TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces
        this host code; a test compares what both pack."""
        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        vmnk = self.cluster_layout(mma)
        one_stage = (None, None, None, 0)
        tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(
            sm100.cluster_shape_to_tma_atom_A(self.cluster[:2], mma.thr_id),
            a,
            cute.slice_(a_smem, one_stage),
            self.tiler,
            mma,
            vmnk.shape,
        )
        tma_b, _ = cute.nvgpu.make_tiled_tma_atom_B(
            sm100.cluster_shape_to_tma_atom_B(self.cluster[:2], mma.thr_id),
            b,
            cute.slice_(b_smem, one_stage),
            self.tiler,
            mma,
            vmnk.shape,
        )
        out = self.store_atom(c, self.store_layout(1, 1))
        self.tma_boxes = {"a": dsl_box(tma_a), "b": dsl_box(tma_b)}
        if cutlass.const_expr(self.store_kind == "tma"):
            self.tma_boxes["c"] = dsl_box(out)
        tma_r = None
        if cutlass.const_expr(self.epilogue.has_residual):
            tma_r, _ = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                c,
                cute.slice_(self.store_layout(1, 1), (None, None, 0)),
                (self.store_rows, self.store_cols),
            )
            self.tma_boxes["r"] = dsl_box(tma_r)
        self.kernel(tma_a, tma_b, out, tma_r, sizes, hints, self.epilogue_args(alpha, bias)).launch(
            grid=self.cluster, block=(self.threads, 1, 1), cluster=self.cluster, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        out: Any,
        tma_r: cute.CopyAtom | None,
        sizes: Sizes,
        hints: Hints,
        args: tuple[Any, ...],
    ) -> None:
        tile = self.tile
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if cutlass.const_expr(self.store_kind == "tma"):
                cpasync.prefetch_descriptor(out)

        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        c_smem = self.store_layout(self.store_groups, EPILOGUE_STAGES)
        allocator = cutlass.memory.SmemAllocator()
        ab_barriers = allocator.allocate_array(Int64, 2 * self.stages)
        acc_barriers = allocator.allocate_array(Int64, 2 * self.acc_stages)
        freed = allocator.allocate_array(Int64, 1)
        written = allocator.allocate_array(Int64, 1)
        drained = allocator.allocate_array(Int64, 1)
        residual_barriers = allocator.allocate_array(Int64, 2 * EPILOGUE_STAGES)
        tmem_address = allocator.allocate_array(Int32, 1)
        sA = allocator.allocate_tensor(self.a_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(self.b_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(self.out_dtype, c_smem.outer, 1024, c_smem.inner)
        parts = cute.recast_ptr(sA.iterator, swizzle_=None, dtype=self.acc_dtype)
        split = KSplit(parts, written, drained)

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
            num_stages=self.acc_stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.acc_empty_arrivals(tile)),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        residual, sR = None, None
        if cutlass.const_expr(self.epilogue.has_residual):
            residual = pipeline.PipelineTmaAsync.create(
                barrier_storage=residual_barriers,
                num_stages=EPILOGUE_STAGES,
                producer_group=pipeline.CooperativeGroup(threads),
                consumer_group=pipeline.CooperativeGroup(threads, pipelines.residual_empty_arrivals()),
                tx_count=self.residual_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),  # every CTA of a cluster loads its own
                defer_sync=True,
            )
            sR = allocator.allocate_tensor(self.out_dtype, c_smem.outer, 1024, c_smem.inner)
        if warp_idx == 0:
            with cute.arch.elect_one():
                if cutlass.const_expr(self.pair):
                    cute.arch.mbarrier_init(freed, 1)
                if cutlass.const_expr(tile.cluster_k > 1):
                    split_k.init_barriers(split, tile, pipelines.EPILOGUE_WARPS)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        walk = self.walk(sizes)
        mA, mB, mC = self.coordinate_tensors(sizes)

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        cute.arch.griddepcontrol_wait()
        if warp_idx == LOAD_WARP:
            self.load(tma_a, tma_b, mA, mB, sA, sB, ab, split, walk, sizes, hints)
        elif warp_idx == MULTIPLY_WARP:
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(self.acc_dtype, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            self.multiply(mma, sA, sB, cute.make_tensor(address, self.acc_layout(mma)), ab, acc, walk)
        elif warp_idx == RESIDUAL_WARP:  # without one, there is no such warp
            if cutlass.const_expr(self.epilogue.has_residual):
                self.load_residual(tma_r, mC, sR, residual, walk)
        else:
            if warp_idx == 0:
                cute.arch.alloc_tmem(self.tmem_cols, tmem_address, is_two_cta=self.pair)
                cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = cute.arch.retrieve_tmem_ptr(self.acc_dtype, alignment=16, ptr_to_buffer_holding_addr=tmem_address)
            tC = cute.make_tensor(address, self.lane_layout())
            self.store(out, mC, sC, sR, tC, acc, residual, split, walk, sizes, args)
            cute.arch.barrier(barrier_id=ALL_STORE_BARRIER, number_of_threads=STORE_THREADS)  # all four have read
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
        split: KSplit,
        walk: Walk,
        sizes: Sizes,
        hints: Hints,
    ) -> None:
        """The load warp of either CTA: its half of the pair's A and B (`half`), into the stages of its own smem."""
        tile = self.tile
        pairs_m = cute.make_layout(tile.cluster_m // tile.cta_group)
        half = self.tiled_mma().get_slice(walk.x % tile.cta_group)
        tA = half.partition_A(cute.local_tile(mA, (self.tiler[0], tile.k_tile), (None, None, None)))
        tB = half.partition_B(cute.local_tile(mB, (tile.mma_n, tile.k_tile), (None, None, None)))
        As, Ag = cpasync.tma_partition(
            tma_a, walk.y, cute.make_layout(tile.cluster_n), cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3)
        )
        Bs, Bg = cpasync.tma_partition(
            tma_b, walk.x // tile.cta_group, pairs_m, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3)
        )
        self.keep_full(tma_a, As, Ag, tma_b, Bs, Bg, ab, split, walk, sizes, hints)

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
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.acc_stages)
            idx = walk.first
            while idx < walk.num_items:
                acc.producer_acquire(write)
                tC_tile = tC[None, None, None, write.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(walk.k_count, unroll=1):
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
    def free_tmem(self, address: cute.Pointer, freed: cute.Pointer) -> None:
        """Warp 0 of each CTA. In a pair, first tell the other CTA that this one has read, and wait to be told."""
        if cutlass.const_expr(self.pair):
            peer = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(freed, peer)
            cute.arch.mbarrier_wait(freed, 0)
        cute.arch.dealloc_tmem(address, self.tmem_cols, is_two_cta=self.pair)
