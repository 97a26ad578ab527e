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
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.kernels import masks, pipelines
from jax_bwgemm.kernels.epilogue import Epilogue, Run
from jax_bwgemm.kernels.operands import DSL_DTYPES, coordinate_tensor, dsl_box, layout_enum
from jax_bwgemm.kernels.scheduler import TileOrder, tile_coordinates
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import EPILOGUE_STAGES, num_stages, num_threads, store_box
from jax_bwgemm.variant import Variant

WARPGROUP_THREADS = 128
LOAD_REGISTERS = 40  # setmaxnreg: (40 + 2 * 232) * 128 <= 65536, multiples of 8
MULTIPLY_REGISTERS = 232
STORE_BARRIER = 1  # named barriers STORE_BARRIER + w, one a consumer warpgroup; 0 is the CTA's


class Sm90Gemm:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        tile = self.tile = variant.tile
        self.in_dtype = DSL_DTYPES[variant.a_dtype]
        self.out_dtype = DSL_DTYPES[variant.out_dtype]
        self.a_major, self.b_major = variant.a_major, variant.b_major
        self.in_bytes = DTYPE_BYTES[variant.a_dtype]
        self.stages = num_stages(tile, self.in_bytes, ARCHS["h200"].smem_bytes)
        self.threads = num_threads(tile, variant.target)
        self.warpgroups = tile.num_consumer_warpgroups
        self.store_cols, self.store_rows = store_box(tile, variant.out_dtype, variant.target)
        self.epilogue = Epilogue(variant.epilogue)

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
        tile = self.tile
        a_smem, b_smem, _ = self.smem_layouts()
        example = {"alpha": alpha, "bias": bias}
        args = tuple(example[param] for param in self.epilogue.params)
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
        sizes = (m, n, k, batch, a_batch_step, b_batch_step, raster_group, raster_along_n)
        self.kernel(tma_a, tma_b, tma_c, *sizes, args).launch(
            grid=(tile.cluster_m, tile.cluster_n, 1),
            block=(self.threads, 1, 1),
            cluster=(tile.cluster_m, tile.cluster_n, 1),
            min_blocks_per_mp=1,
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
            tx_count=pipelines.full_bytes(tile, self.in_bytes),
            cta_layout_vmnk=cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1)),
            defer_sync=True,
        )
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

        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
        if warpgroup_idx == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == 0:
                self.load(tma_a, tma_b, mA, mB, sA, sB, ab, order, num_tiles, k_tiles, (a_batch_step, b_batch_step))
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            self.multiply(tma_c, mC, sA, sB, sC, ab, order, num_tiles, k_tiles, n, args)

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
        order: TileOrder,
        num_tiles: Uint32,
        k_tiles: Int32,
        batch_steps: tuple[Any, Any],
    ) -> None:
        """The load warp: keeps every stage of the ring full."""
        tile = self.tile
        x, y, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        a_mask = cutlass.Int16(masks.a_mask(tile, x))
        b_mask = cutlass.Int16(masks.b_mask(tile, x, y))
        gA = cute.local_tile(mA, (tile.cta_m, tile.k_tile), (None, None, None))  # (cta_m, k_tile, Mt, Kt, l)
        gB = cute.local_tile(mB, (tile.mma_n, tile.k_tile), (None, None, None))  # (mma_n, k_tile, Nt, Kt, l)
        As, Ag = cpasync.tma_partition(  # (TMA, stage), (TMA, Mt, Kt, l)
            tma_a, y, cute.make_layout(tile.cluster_n), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        Bs, Bg = cpasync.tma_partition(  # (TMA, stage), (TMA, Nt, Kt, l)
            tma_b, x, cute.make_layout(tile.cluster_m), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        idx = Uint32(first)
        while idx < num_tiles:
            tile_m, tile_n, l_idx = tile_coordinates(idx, order, cutlass.min)
            m_idx = Int32(tile_m) * tile.cluster_m + x
            n_idx = Int32(tile_n) * tile.cluster_n + y
            Ag_tile = Ag[None, m_idx, None, Int32(l_idx) * batch_steps[0]]
            Bg_tile = Bg[None, n_idx, None, Int32(l_idx) * batch_steps[1]]
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
                    mcast_mask=b_mask if cutlass.const_expr(tile.cluster_m > 1) else None,
                )
                state.advance()
            idx += Uint32(step)
        ab.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        tma_c: cute.CopyAtom,
        mC: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        sC: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        order: TileOrder,
        num_tiles: Uint32,
        k_tiles: Int32,
        n: Int32,
        args: tuple[Any, ...],
    ) -> None:
        """A consumer warpgroup: main loop on its slabs, then its own part of the store. Never waits for the other."""
        tile = self.tile
        x, y, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        tidx = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        wg_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        mma = self.tiled_mma()
        thr_mma = mma.get_slice(wg_idx * WARPGROUP_THREADS)
        fA = mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, stage)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((tile.cta_m, tile.mma_n)), Float32)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        idx = Uint32(first)
        while idx < num_tiles:
            tile_m, tile_n, l_idx = tile_coordinates(idx, order, cutlass.min)
            warpgroup.fence()
            mma.set(warpgroup.Field.ACCUMULATE, False)
            ab.consumer_wait(read)
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
                ab.consumer_release(release)
                read.advance()
                release.advance()
            warpgroup.wait_group(0)
            ab.consumer_release(release)
            release.advance()

            gC = cute.local_tile(  # (store_rows, store_cols, row boxes, column boxes) of this CTA's tile
                cute.local_tile(
                    mC,
                    (tile.cta_m, tile.mma_n),
                    (Int32(tile_m) * tile.cluster_m + x, Int32(tile_n) * tile.cluster_n + y, Int32(l_idx)),
                ),
                (self.store_rows, self.store_cols),
                (None, None),
            )
            column = (Int32(tile_n) * tile.cluster_n + y) * tile.mma_n
            self.store(tma_c, mma, acc, sC, gC, wg_idx, tidx, column, n, args)
            idx += Uint32(step)
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
        if is_store_warp:  # the last tile's stores have long read their buffers: all are free
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIER + wg_idx, number_of_threads=WARPGROUP_THREADS)
        for box in cutlass.range_constexpr(cute.size(acc) // per_box):
            row_box, col_box = box // boxes_n, box % boxes_n
            for i in cutlass.range_constexpr(per_box):
                values[i] = flat[box * per_box + i]
            self.epilogue.apply(values, runs, column + col_box * self.store_cols + tidx % 4 * 2, n, args)
            rounded.store(values.load().to(self.out_dtype))
            stage = box % EPILOGUE_STAGES
            cute.copy(r2s, rounded, Rs[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            if is_store_warp:  # so that after the barrier the next buffer may be written: its last store has read it
                cute.arch.cp_async_bulk_wait_group(pipelines.stores_in_flight(), read=True)
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg_idx, number_of_threads=WARPGROUP_THREADS)
            if is_store_warp:
                Cs, Cg = cpasync.tma_partition(
                    tma_c,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(sC_box, 0, 2),
                    cute.group_modes(gC, 0, 2),
                )
                cute.copy(tma_c, Cs[None, stage], Cg[None, row_box * self.warpgroups + wg_idx, col_box])
                cute.arch.cp_async_bulk_commit_group()


def fragment_runs(elements: int) -> tuple[Run, ...]:
    """A wgmma fragment: pairs of columns every 8, for rows r and r + 8 (PTX ISA, wgmma.mma_async, matrix D)."""
    return tuple(Run(8 * j, 2, ((4 * j, 4 * j + 1), (4 * j + 2, 4 * j + 3))) for j in range(elements // 4))
