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
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import pipelines, row_store, split_k
from jax_bwgemm.kernels.epilogue import Run, fragment_runs
from jax_bwgemm.kernels.gemm import Gemm, Hints, Outlet, Sizes, StoreGroup, Walk, buffer_of
from jax_bwgemm.kernels.operands import dsl_box
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.tile import EPILOGUE_STAGES, TMEM_LANES, acc_cols, acc_stages, tmem_cols
from jax_bwgemm.variant import Variant

MULTIPLY_WARP = pipelines.EPILOGUE_WARPS
LOAD_WARP = MULTIPLY_WARP + 1
RESIDUAL_WARP = LOAD_WARP + 1
STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS
ALL_STORE_BARRIER = 1  # named barriers: the store warps among themselves,
TMEM_BARRIER = 2  # the store warps with the multiply warp, once the TMEM address is known,
GROUP_BARRIER = 3  # and GROUP_BARRIER + g, the warps of one store group
LANE_STRIDE = 1 << 16  # of a TMEM address, PTX ISA, tensor memory addressing


class Sm100Gemm(Gemm):
    """One variant. Sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        tile = variant.tile
        self.tmem_cols = tmem_cols(tile)
        self.acc_stages = acc_stages(tile)
        self.pair = tile.cta_group == 2
        self.tiler = (tile.num_accs * tile.mma_m, tile.mma_n, tile.k_tile)
        self.group_threads = STORE_THREADS // self.store_groups
        self.group_cols = tile.mma_n // self.store_groups
        self.boxes = self.group_cols // self.store_cols

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

    def lane_layout(self) -> Any:
        """(lanes, columns of a store group, accumulators, acc stages) of TMEM addresses, as the store warps read them.

        A lane is a row; with two store groups, lanes 64..127 are the second half of the columns of rows 0..63; where an
        MMA has 64 rows in one CTA, each warp's first 16 lanes have 16 of them (PTX ISA, tcgen05 data path layouts).
        """
        lanes: Any = (TMEM_LANES, LANE_STRIDE)
        if self.store_rows * self.store_groups == 64:
            lanes = ((16, 4), (LANE_STRIDE, 32 * LANE_STRIDE))
        shape = (lanes[0], self.group_cols, self.tile.num_accs, self.acc_stages)
        stride = (lanes[1], 1, self.group_cols, acc_cols(self.tile))
        return cute.make_layout(shape, stride=stride)

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
    def store(
        self,
        out: Any,
        mC: cute.Tensor,
        sC: cute.Tensor,
        sR: cute.Tensor | None,
        tC: cute.Tensor,
        acc: pipeline.PipelineUmmaAsync,
        residual: Any,  # a PipelineTmaAsync, or None
        split: KSplit,
        walk: Walk,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """The four store warps: TMEM -> registers -> epilogue -> smem box -> the result, box after box."""
        tile = self.tile
        tidx = cute.arch.thread_idx()[0]
        group = self.store_group(tidx)
        box = (self.store_rows * self.store_groups, self.store_cols)  # of all groups, below each other
        tC_boxes = cute.flat_divide(tC, box)  # (rows, cols, 1, boxes, accumulator, acc stage)
        t2r = tcgen05.make_tmem_copy(
            cute.make_copy_atom(self.tmem_load_op(), self.acc_dtype), tC_boxes[None, None, 0, 0, 0, 0]
        )
        thr_t2r = t2r.get_slice(tidx)
        Tt = thr_t2r.partition_S(tC_boxes)[None, None, None, 0, None, None, None]  # (T2R, M, N, box, acc, stage)
        values = cute.make_rmem_tensor(  # one row, store_cols columns; or parts of two rows
            thr_t2r.partition_D(cute.make_identity_tensor(box)).shape, self.acc_dtype
        )
        outlet = self.outlet(out, mC, sC, t2r, tidx, group)
        by_element = cute.make_tiled_copy_D(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out_dtype), t2r)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.acc_stages)
        add = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, EPILOGUE_STAGES)
        phase = Int32(0)
        idx = walk.first
        while idx < walk.num_items:
            m_idx, n_idx, l_idx = walk.tile_of(tile, idx)
            row, col = self.first_box(m_idx, n_idx, group.idx)
            self.reclaim(group, self.group_threads)
            acc.consumer_wait(read)
            if cutlass.const_expr(tile.cluster_k == 1):
                for j in cutlass.range_constexpr(tile.num_accs * self.boxes):
                    acc_idx, i = j // self.boxes, j % self.boxes
                    self.take(t2r, Tt[None, None, None, i, acc_idx, read.index], values)
                    if cutlass.const_expr(j == tile.num_accs * self.boxes - 1):
                        with cute.arch.elect_one():  # everything has been read: the MMAs may have it back
                            acc.consumer_release(read)
                    at = (row + acc_idx * tile.cta_group, col + i, l_idx)
                    self.apply_epilogue(values, at, tidx, sizes, args)
                    if cutlass.const_expr(self.epilogue.has_residual):
                        residual.consumer_wait(add)
                        self.add_residual(values, by_element.get_slice(tidx).partition_D(sR), add.index)
                        residual.consumer_release(add)
                        add.advance()
                    self.round_and_publish(values, outlet, at, buffer_of(j), group, sizes)
            else:
                for i in cutlass.range_constexpr(self.boxes):
                    if walk.k_count > 0:
                        self.take(t2r, Tt[None, None, None, i, 0, read.index], values)
                    else:
                        values.fill(0)
                    split_k.leave_part(split, values, i, tidx, STORE_THREADS)
                with cute.arch.elect_one():
                    acc.consumer_release(read)
                split_k.meet(split, tile, walk.x, phase)
                for j in cutlass.range_constexpr(-(-self.boxes // tile.cluster_k)):
                    box_idx = j * tile.cluster_k + walk.z
                    if box_idx < self.boxes:
                        split_k.add_parts(split, values, box_idx, tidx, STORE_THREADS, tile, walk.x)
                        at = (row, col + box_idx, l_idx)
                        self.apply_epilogue(values, at, tidx, sizes, args)
                        self.round_and_publish(values, outlet, at, buffer_of(j), group, sizes)
                split_k.part(split, tile, walk.x, phase)
                phase = phase ^ 1
            read.advance()
            idx += walk.step
        self.finish_stores(group)

    def outlet(
        self, out: Any, mC: cute.Tensor, sC: cute.Tensor, t2r: cute.TiledCopy, tidx: Int32, group: StoreGroup
    ) -> Outlet:
        """One store group's way out, box by box."""
        if cutlass.const_expr(self.by_rows):
            return self.row_outlet(out, mC, sC, group, self.group_threads)
        enum = LayoutEnum.ROW_MAJOR if cutlass.const_expr(self.c_major == "n") else LayoutEnum.COL_MAJOR
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(enum, self.out_dtype, self.acc_dtype, t2r), t2r)
        return Outlet(
            r2s,
            r2s.get_slice(tidx).partition_D(sC),  # (R2S, R2S_M, R2S_N, stage)
            cute.local_tile(sC, (self.store_rows, self.store_cols), (group.idx, 0, None)),
            out,
            mC,
        )

    @cute.jit
    def load_residual(
        self,
        tma_r: cute.CopyAtom,
        mC: cute.Tensor,
        sR: cute.Tensor,
        residual: pipeline.PipelineTmaAsync,
        walk: Walk,
    ) -> None:
        """The residual warp: box after box of all store groups, in the order of the store warps."""
        tile = self.tile
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, EPILOGUE_STAGES)
        idx = walk.first
        while idx < walk.num_items:
            m_idx, n_idx, l_idx = walk.tile_of(tile, idx)
            for j in cutlass.range_constexpr(tile.num_accs * self.boxes):
                residual.producer_acquire(state)
                barrier = residual.producer_get_barrier(state)
                for group_idx in cutlass.range_constexpr(self.store_groups):
                    row, col = self.first_box(m_idx, n_idx, group_idx)
                    at = (row + j // self.boxes * tile.cta_group, col + j % self.boxes, l_idx)
                    box = (self.store_rows, self.store_cols)
                    sR_group = cute.local_tile(sR, box, (group_idx, 0, None))
                    gR = cute.local_tile(mC, box, at)
                    Rs, Rg = cpasync.tma_partition(
                        tma_r, 0, cute.make_layout(1), cute.group_modes(sR_group, 0, 2), cute.group_modes(gR, 0, 2)
                    )
                    cute.copy(tma_r, Rg, Rs[None, state.index], tma_bar_ptr=barrier)
                state.advance()
            idx += walk.step
        residual.producer_tail(state)

    def first_box(self, m_idx: Any, n_idx: Any, group_idx: Any) -> tuple[Any, Any]:
        """(row, column) of a store group's first box of a CTA's tile, in boxes."""
        tile = self.tile
        row = (m_idx // tile.cta_group * tile.num_accs) * tile.cta_group + m_idx % tile.cta_group
        return row, (n_idx * self.store_groups + group_idx) * self.boxes

    @cute.jit
    def apply_epilogue(self, values: cute.Tensor, at: Any, tidx: Int32, sizes: Sizes, args: tuple[Any, ...]) -> None:
        column = at[1] * self.store_cols + self.lane_col(tidx)
        self.epilogue.apply(values, self.runs(cute.size(values)), column, sizes.n, args)

    @cute.jit
    def add_residual(self, values: cute.Tensor, Rt: cute.Tensor, stage: Int32) -> None:
        """Rt: this thread's elements (T2R, T2R_M, T2R_N, stage). All lanes have read when the warp meets."""
        own = Rt[None, None, None, stage]
        loaded = cute.make_rmem_tensor(own.shape, self.out_dtype)
        cute.autovec_copy(own, loaded)
        addend = cute.make_tensor(loaded.iterator, values.layout)  # the same elements in the same order
        values.store(values.load() + addend.load().to(self.acc_dtype))
        cute.arch.fence_proxy("async.shared", space="cta")  # the next load overwrites what was read
        cute.arch.sync_warp()

    @cute.jit
    def round_and_publish(
        self, values: cute.Tensor, outlet: Outlet, at: Any, stage: cutlass.Constexpr, group: StoreGroup, sizes: Sizes
    ) -> None:
        rounded = cute.make_rmem_tensor(values.shape, self.out_dtype)
        rounded.store(values.load().to(self.out_dtype))
        registers = rounded if cutlass.const_expr(self.by_rows) else outlet.r2s.retile(rounded)
        self.publish(outlet, registers, at, stage, group, self.group_threads, sizes)

    @cute.jit
    def take(self, t2r: cute.TiledCopy, Tt: cute.Tensor, values: cute.Tensor) -> None:
        """A box of an accumulator, from TMEM into registers."""
        cute.copy(t2r, Tt, values)
        cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld

    @cute.jit
    def free_tmem(self, address: cute.Pointer, freed: cute.Pointer) -> None:
        """Warp 0 of each CTA. In a pair, first tell the other CTA that this one has read, and wait to be told."""
        if cutlass.const_expr(self.pair):
            peer = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(freed, peer)
            cute.arch.mbarrier_wait(freed, 0)
        cute.arch.dealloc_tmem(address, self.tmem_cols, is_two_cta=self.pair)

    def store_group(self, tidx: Int32) -> StoreGroup:
        idx = cute.arch.make_warp_uniform(tidx // self.group_threads)
        own = tidx % self.group_threads
        return StoreGroup(idx, own, cute.arch.make_warp_uniform(own // 32) == 0, GROUP_BARRIER + idx)

    # Which values of a box a thread holds: one row of 32 lanes' each, or wgmma-like fragments of 16 rows a warp.

    def has_row_per_lane(self) -> bool:
        return self.store_rows * self.store_groups == TMEM_LANES and not self.by_rows

    def tmem_load_op(self) -> Any:
        if self.has_row_per_lane():
            return tcgen05.Ld32x32bOp(tcgen05.Repetition(self.store_cols))
        return tcgen05.Ld16x256bOp(tcgen05.Repetition(self.store_cols // 8))

    def runs(self, elements: int) -> tuple[Run, ...]:
        if not self.has_row_per_lane():
            count = self.store_rows * self.store_groups // (row_store.FRAGMENT_ROWS * pipelines.EPILOGUE_WARPS)
            return fragment_runs(elements, 2 if self.store_kind == "tma" else 1, count)
        return row_runs(elements, 16 * 8 // self.out_dtype.width if self.store_kind == "tma" else 1)

    def lane_col(self, tidx: Int32) -> Any:
        return 0 if self.has_row_per_lane() else tidx % 4 * 2


def row_runs(elements: int, width: int) -> tuple[Run, ...]:
    """A 32x32b TMEM load: thread t holds row t; register j is column j. `width`: elements of one load of a bias."""
    return tuple(Run(j, width, (tuple(range(j, j + width)),)) for j in range(0, elements, width))
