"""Hopper GEMM: warp-specialised, persistent, TMA + wgmma.

Timetable of a CTA (1 + W warpgroups, W = 1 or 2 consumers):

    warpgroup 0, warp 0   load      TMA of A and B into the stages, for one tile after the other
    warpgroups 1..W       multiply  wgmma on 64-row slabs of every stage, then convert and store their own rows

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival and the    one lane of each consumer warp, in every
                                      bytes of A and B                 CTA that shares the stage (multicast)
    store      multiply -> TMA        the warpgroup's 128 threads,     cp.async.bulk.wait_group.read in the
                                      fence, its named barrier         warpgroup's first warp

The load warp runs ahead into the next tile while the consumers store: that is what persistence buys here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.epilogue import Run
from jax_bwgemm.kernels.gemm import Gemm, Sizes, Walk
from jax_bwgemm.kernels.operands import dsl_box, layout_enum
from jax_bwgemm.tile import EPILOGUE_STAGES
from jax_bwgemm.variant import Variant

WARPGROUP_THREADS = 128
LOAD_REGISTERS = 40  # setmaxnreg: (40 + 2 * 232) * 128 <= 65536, multiples of 8
MULTIPLY_REGISTERS = 232
STORE_BARRIER = 1  # named barriers STORE_BARRIER + w, one a consumer warpgroup; 0 is the CTA's


class Sm90Gemm(Gemm):
    """One variant. Sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        self.warpgroups = variant.tile.num_consumer_warpgroups

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def tiled_mma(self) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            self.in_dtype,
            self.in_dtype,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            Float32,
            (self.warpgroups, 1, 1),
            (64, self.tile.mma_n),
        )

    def smem_layouts(self) -> tuple[Any, Any, Any]:
        """A: (cta_m, k_tile, stages); B: (mma_n, k_tile, stages); C: (warpgroups * store_rows, store_cols, stages)."""
        tiler = (self.tile.cta_m, self.tile.mma_n, self.tile.k_tile)
        a = sm90.make_smem_layout_a(layout_enum(self.a_major), tiler, self.in_dtype, self.stages)
        b = sm90.make_smem_layout_b(layout_enum(self.b_major), tiler, self.in_dtype, self.stages)
        return a, b, self.store_layout(self.warpgroups, EPILOGUE_STAGES)

    def store_layout(self, warpgroups: int, stages: int) -> Any:
        """(warpgroups * store_rows, store_cols, stages); the rows of one warpgroup are one contiguous TMA box."""
        box = (self.store_rows * warpgroups, self.store_cols)
        return sm90.make_smem_layout_epi(self.out_dtype, LayoutEnum.ROW_MAJOR, box, stages)

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, sizes: Sizes, alpha: Float32, bias: cute.Pointer
    ) -> None:
        """Make the TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces
        this host code; a test compares what both pack."""
        tile = self.tile
        a_smem, b_smem, _ = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_a, _ = cpasync.make_tiled_tma_atom(
            multicast if tile.cluster_n > 1 else load,
            a,
            cute.slice_(a_smem, (None, None, 0)),
            (tile.cta_m, tile.k_tile),
            num_multicast=tile.cluster_n,
        )
        tma_b, _ = cpasync.make_tiled_tma_atom(
            multicast if tile.cluster_m > 1 else load,
            b,
            cute.slice_(b_smem, (None, None, 0)),
            (tile.mma_n, tile.k_tile),
            num_multicast=tile.cluster_m,
        )
        box = (self.store_rows, self.store_cols)
        tma_c, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(self.store_layout(1, 1), (None, None, 0)), box
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
        warpgroup_idx = warp_idx // pipelines.WARPS_PER_WARPGROUP
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_c)

        a_smem, b_smem, c_smem = self.smem_layouts()
        allocator = cutlass.memory.SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * self.stages)
        sA = allocator.allocate_tensor(self.in_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(self.in_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(self.out_dtype, c_smem.outer, 1024, c_smem.inner)

        threads = pipeline.Agent.Thread
        ab = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.hopper_empty_arrivals(tile)),
            tx_count=self.full_bytes,
            cta_layout_vmnk=cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        walk = self.walk(sizes)
        mA, mB, mC = self.coordinate_tensors(sizes)

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        if warpgroup_idx == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == 0:
                self.load(tma_a, tma_b, mA, mB, sA, sB, ab, walk, sizes)
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            self.multiply(tma_c, mC, sA, sB, sC, ab, walk, sizes, args)

    @cute.jit
    def load(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        mA: cute.Tensor,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        walk: Walk,
        sizes: Sizes,
    ) -> None:
        """The load warp: its part of A and B (all of it where no CTA shares it) into the stages."""
        tile = self.tile
        gA = cute.local_tile(mA, (tile.cta_m, tile.k_tile), (None, None, None))  # (cta_m, k_tile, Mt, Kt, l)
        gB = cute.local_tile(mB, (tile.mma_n, tile.k_tile), (None, None, None))  # (mma_n, k_tile, Nt, Kt, l)
        As, Ag = cpasync.tma_partition(
            tma_a, walk.y, cute.make_layout(tile.cluster_n), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        Bs, Bg = cpasync.tma_partition(
            tma_b, walk.x, cute.make_layout(tile.cluster_m), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        self.keep_full(tma_a, As, Ag, tma_b, Bs, Bg, ab, walk, sizes)

    @cute.jit
    def multiply(
        self,
        tma_c: cute.CopyAtom,
        mC: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        sC: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        walk: Walk,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """A consumer warpgroup: main loop on its slabs, then its own part of the store. Never waits for the other."""
        tile = self.tile
        tidx = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        wg_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        mma = self.tiled_mma()
        thr_mma = mma.get_slice(wg_idx * WARPGROUP_THREADS)
        fA = mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, stage)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((tile.cta_m, tile.mma_n)), Float32)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        idx = walk.first
        while idx < walk.num_tiles:
            m_idx, n_idx, l_idx = walk.tile_of(tile, idx)
            warpgroup.fence()
            mma.set(warpgroup.Field.ACCUMULATE, False)
            ab.consumer_wait(read)
            for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            read.advance()
            for _ in cutlass.range(1, walk.k_tiles, unroll=1):
                ab.consumer_wait(read)
                for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                    cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)  # the group before this one has read its stage
                ab.consumer_release(release)
                read.advance()
                release.advance()
            warpgroup.wait_group(0)
            ab.consumer_release(release)
            release.advance()

            gC = cute.local_tile(  # (store_rows, store_cols, row boxes, column boxes) of this CTA's tile
                cute.local_tile(mC, (tile.cta_m, tile.mma_n), (m_idx, n_idx, l_idx)),
                (self.store_rows, self.store_cols),
                (None, None),
            )
            self.store(tma_c, mma, acc, sC, gC, wg_idx, tidx, n_idx * tile.mma_n, sizes.n, args)
            idx += walk.step
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(
        self,
        tma_c: cute.CopyAtom,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        sC: cute.Tensor,
        gC: cute.Tensor,
        wg_idx: Int32,
        tidx: Int32,
        column: Int32,
        n: Int32,
        args: tuple[Any, ...],
    ) -> None:
        """Registers -> epilogue -> smem box -> TMA store, box after box; each goes to the next buffer."""
        enum = LayoutEnum.ROW_MAJOR
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype)
        r2s = cute.make_tiled_copy_S(
            sm90.get_smem_store_op(enum, self.out_dtype, Float32), cute.make_tiled_copy_C_atom(stmatrix, mma)
        )
        thr_r2s = r2s.get_slice(tidx)
        Rs = thr_r2s.partition_D(sC)  # (R2S, R2S_M, R2S_N, stage)
        shape = cute.make_layout(cute.shape(thr_r2s.partition_S(sC))[:3]).shape
        values = cute.make_rmem_tensor(shape, Float32)
        rounded = cute.make_rmem_tensor(shape, self.out_dtype)
        per_box = cutlass.const_expr(cute.size(values))
        runs = fragment_runs(per_box)
        flat = cute.coalesce(r2s.retile(acc))
        sC_box = cute.local_tile(sC, (self.store_rows, self.store_cols), (wg_idx, 0, None))  # this warpgroup's rows
        boxes_n = cutlass.const_expr(self.tile.mma_n // self.store_cols)
        is_store_warp = cute.arch.make_warp_uniform(tidx // 32) % pipelines.WARPS_PER_WARPGROUP == 0
        Cs, Cg = cpasync.tma_partition(  # (TMA, stage), (TMA, row boxes, column boxes)
            tma_c, 0, cute.make_layout(1), cute.group_modes(sC_box, 0, 2), cute.group_modes(gC, 0, 2)
        )
        barrier = STORE_BARRIER + wg_idx
        self.reclaim(is_store_warp, barrier, WARPGROUP_THREADS)
        for box in cutlass.range_constexpr(cute.size(acc) // per_box):
            row_box, col_box = box // boxes_n, box % boxes_n
            for i in cutlass.range_constexpr(per_box):
                values[i] = flat[box * per_box + i]
            self.epilogue.apply(values, runs, column + col_box * self.store_cols + tidx % 4 * 2, n, args)
            rounded.store(values.load().to(self.out_dtype))
            Cg_box = Cg[None, row_box * self.warpgroups + wg_idx, col_box]
            self.publish(r2s, rounded, Rs, tma_c, Cs, Cg_box, box, is_store_warp, barrier, WARPGROUP_THREADS)


def fragment_runs(elements: int) -> tuple[Run, ...]:
    """A wgmma fragment: pairs of columns every 8, for rows r and r + 8 (PTX ISA, wgmma.mma_async, matrix D)."""
    return tuple(Run(8 * j, 2, ((4 * j, 4 * j + 1), (4 * j + 2, 4 * j + 3))) for j in range(elements // 4))
