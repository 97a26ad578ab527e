"""Hopper GEMM: warp-specialised, persistent, TMA + wgmma.

Timetable of a CTA (1 + W warpgroups, W = 1 or 2 consumers):

    warpgroup 0, warp 0   load      TMA of A and B into the stages, for one tile after the other
    its last W warps      residual  with a residual, one for each consumer: TMA of its boxes into the store buffers,
                                    and of the result out of them
    warpgroups 1..W       multiply  wgmma on 64-row slabs of every stage, then round and store their own rows

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival and the    one lane of each warp that multiplies the
                                      bytes of A and B                 stage, in every CTA that shares it (multicast)
    store      multiply -> TMA        the warpgroup's 128 threads,     cp.async.bulk.wait_group.read in the
                                      fence, its named barrier         warpgroup's first warp
    loaded     residual -> multiply   one expect_tx arrival and the    `summed`, in the same buffer
                                      bytes of a warpgroup's box
    summed     multiply -> residual   one lane of each warp of the     cp.async.bulk.wait_group.read in the residual
                                      warpgroup, fence                 warp, which then loads the next box there

The load warp runs ahead into the next tile while the consumers store. Where registers hold the sums and a rounded
result (`defers_store`), a tile is only rounded at its end, and its boxes leave one by one during the next tile's main
loop: each behind the wgmmas of a stage, which run meanwhile; the rest after a main loop of fewer stages than boxes.
Where TMA cannot step over the result's rows, each of the consumers' warps stores its own and waits for no other
(`row_store`). What the epilogue reads of a thread's columns, or of its rows where the result is m-major (a bias), is
loaded beside the last wgmmas, in the registers of held boxes: the rest of these leaves before. A stream-K loads it once
the other parts are added, which need those registers; a split along k for each box that it adds.

With a residual, `loaded` and `summed` are in the place of `store` (`sm90_residual`): the buffers hold the residual of
the next tile, or the first of its boxes, when its sums are done. Nothing is held in registers then.

How two consumers divide the work:

    cooperative   the slabs of every tile are dealt to them in turn; neither waits for the other
    ping-pong     the tiles are; a warpgroup issues wgmmas for its tile only in its turn, and passes the turn (a named
                  barrier: it arrives, the other waits) once the last are on their way. So one stores while the other
                  multiplies. Consecutive tiles take consecutive stages, so each skips those of the other's tiles. The
                  turn is passed only to a tile that exists: every arrival is waited for

A split along k adds the barriers of `split_k`: once all consumers have read the last stage (`PARTS_BARRIER`) they leave
their accumulators there; the load warp waits for `drained` after each tile. Every warp passes griddepcontrol.wait
before it touches global memory; the load warp releases the next kernel when its last load is on its way. Stream-K
adds the flags of `stream_k`, between the last stage of a piece and its store.

Here are the kernel, the load role and the main loop; that of an A from registers is in `sm90_registers`, what follows
a tile's sums in `sm90_store`, and with a residual in `sm90_residual`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_bwgemm.kernels import pipelines, split_k
from jax_bwgemm.kernels.gemm import Hints, Outlet, Sizes, StoreGroup, Walk
from jax_bwgemm.kernels.operands import dsl_box, layout_enum
from jax_bwgemm.kernels.scheduler import Piece
from jax_bwgemm.kernels.sm90_registers import Sm90Registers
from jax_bwgemm.kernels.sm90_store import PARTS_BARRIER, TURN_BARRIER, WARPGROUP_THREADS
from jax_bwgemm.kernels.split_k import KSplit

SM_REGISTERS = 65536  # CUDA C++ programming guide, technical specifications, 9.0; one CTA has them all
LOAD_REGISTERS = 40


def multiply_registers(warpgroups: int) -> int:
    """Of a consumer thread, by setmaxnreg: what the load warpgroup leaves, in its steps of 8 and at most 240."""
    rest = SM_REGISTERS // WARPGROUP_THREADS - LOAD_REGISTERS
    return min(240, rest // warpgroups // 8 * 8)


class Sm90Gemm(Sm90Registers):
    """One variant. Sizes are run-time parameters."""

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def smem_layouts(self) -> tuple[Any, Any]:
        """A: (cta_m, k_tile, stages); B: (mma_n, k_tile, stages)."""
        tiler = (self.tile.cta_m, self.tile.mma_n, self.tile.k_tile)
        a = sm90.make_smem_layout_a(layout_enum(self.a_major), tiler, self.a_dtype, self.stages)
        return a, sm90.make_smem_layout_b(layout_enum(self.b_major), tiler, self.b_dtype, self.stages)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        sizes: Sizes,
        hints: Hints,
        stream_tiles: Int32,
        stream_clusters: Int32,
        workspace: cute.Pointer,
        token: Int64,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Make the TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces
        this host code; a test compares what both pack."""
        tile = self.tile
        a_smem, b_smem = self.smem_layouts()
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
        out = self.store_atom(c, cute.slice_(self.store_layout(1, 1), (None, None, 0)))
        self.tma_boxes = {"a": dsl_box(tma_a), "b": dsl_box(tma_b)}
        if cutlass.const_expr(self.store_kind == "tma"):
            self.tma_boxes["c"] = dsl_box(out)
        tma_r = None
        if cutlass.const_expr(self.epilogue.has_residual):
            box_layout = cute.slice_(self.store_layout(1, 1), (None, None, 0))
            tma_r, _ = cpasync.make_tiled_tma_atom(load, c, box_layout, (self.store_rows, self.store_cols))
            self.tma_boxes["r"] = dsl_box(tma_r)
        stream_args = (stream_tiles, stream_clusters, workspace, token) if cutlass.const_expr(tile.stream_k) else ()
        self.kernel(tma_a, tma_b, out, tma_r, sizes, hints, stream_args, self.epilogue_args(alpha, bias)).launch(
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
        stream_args: tuple[Any, ...],
        args: tuple[Any, ...],
    ) -> None:
        tile = self.tile
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if cutlass.const_expr(self.store_kind == "tma"):
                cpasync.prefetch_descriptor(out)
            if cutlass.const_expr(self.epilogue.has_residual):
                cpasync.prefetch_descriptor(tma_r)

        a_smem, b_smem = self.smem_layouts()
        c_smem = self.store_layout(self.store_groups, self.store_buffers)
        allocator = cutlass.memory.SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * self.stages)
        written = allocator.allocate_array(Int64, 1)
        drained = allocator.allocate_array(Int64, 1)
        residual_barriers = None
        if cutlass.const_expr(self.epilogue.has_residual):
            residual_barriers = allocator.allocate_array(Int64, 2 * self.store_groups * self.store_buffers)
        sA = allocator.allocate_tensor(self.a_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(self.b_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(self.out_dtype, c_smem.outer, 1024, c_smem.inner)
        parts = cute.recast_ptr(sA.iterator, swizzle_=None, dtype=self.acc_dtype)
        split = KSplit(parts, written, drained)

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
        if cutlass.const_expr(tile.cluster_k > 1):  # noqa: SIM102 (a compile-time condition stands alone)
            if warp_idx == 0:
                with cute.arch.elect_one():
                    split_k.init_barriers(split, tile, self.warpgroups * pipelines.WARPS_PER_WARPGROUP)
        if cutlass.const_expr(self.epilogue.has_residual):  # noqa: SIM102
            if warp_idx == 0:
                with cute.arch.elect_one():
                    self.init_handovers(residual_barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        walk = self.walk(sizes, stream_args)
        mA, mB, mC = self.coordinate_tensors(sizes)

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        cute.arch.griddepcontrol_wait()
        if warp_idx < pipelines.WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == 0:
                self.load(tma_a, tma_b, mA, mB, sA, sB, ab, split, walk, sizes, hints)
            if cutlass.const_expr(self.epilogue.has_residual):
                first = cutlass.const_expr(pipelines.WARPS_PER_WARPGROUP - self.warpgroups)
                if warp_idx >= first:
                    self.carry(tma_r, out, mC, sC, residual_barriers, walk, warp_idx - first)
        else:
            cute.arch.setmaxregister_increase(multiply_registers(self.warpgroups))
            self.multiply(out, mC, sA, sB, sC, ab, residual_barriers, split, walk, sizes, args)

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
        split: KSplit,
        walk: Walk,
        sizes: Sizes,
        hints: Hints,
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
        self.keep_full(tma_a, As, Ag, tma_b, Bs, Bg, ab, split, walk, sizes, hints)

    @cute.jit
    def multiply(
        self,
        out: Any,
        mC: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        sC: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        residual_barriers: cute.Pointer | None,
        split: KSplit,
        walk: Walk,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """A consumer warpgroup: main loop on its slabs of its tiles, then its own part of the store."""
        tile = self.tile
        tidx = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        group = self.store_group(tidx)
        mma = self.tiled_mma(self.side_by_side)
        thr_mma = mma.get_slice(group.idx % self.side_by_side * WARPGROUP_THREADS)
        if cutlass.const_expr(self.fragments is not None):
            main_loop = self.main_loop_from_registers
            fA = self.fragment_sources(sA, group)
        else:
            main_loop = self.main_loop
            fA = mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, stage)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((tile.cta_m, tile.mma_n)), self.acc_dtype)
        outlet = self.outlet(out, mC, sC, self.tiled_mma(1), group)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        held = cute.make_rmem_tensor(cute.size(acc) if cutlass.const_expr(self.defers_store) else 1, self.out_dtype)
        held.fill(0)
        held_at, box = (Int32(0), Int32(0), Int32(0)), Int32(self.boxes)  # the next box of `held`: none is left
        phase = Int32(0)
        idx, step = self.own_items(walk, group.idx)
        if cutlass.const_expr(tile.pingpong):  # noqa: SIM102
            if group.idx == 1:
                read.advance(walk.k_count)
        while idx < walk.num_items:
            item = walk.item_of(idx)
            if cutlass.const_expr(tile.cluster_k > 1):
                at = self.first_box(walk, item.tile_idx, group.idx)
                if walk.k_count > 0:
                    read, last, at, box = main_loop(
                        acc, fA, fB, ab, read, held, held_at, box, outlet, walk, item, group, sizes
                    )
                    self.finish_sums(ab, last, read)
                cute.arch.barrier(barrier_id=PARTS_BARRIER, number_of_threads=self.consumers)
                self.store_split(acc, outlet, split, phase, at, group, tidx, walk, sizes, args)
                phase = phase ^ 1
            else:
                if cutlass.const_expr(tile.pingpong):  # noqa: SIM102
                    if idx != walk.first:
                        cute.arch.barrier(barrier_id=TURN_BARRIER + group.idx, number_of_threads=self.consumers)
                read, last, at, box = main_loop(
                    acc, fA, fB, ab, read, held, held_at, box, outlet, walk, item, group, sizes
                )
                if cutlass.const_expr(tile.pingpong):  # noqa: SIM102
                    if idx + walk.step < walk.num_items:
                        other = TURN_BARRIER + 1 - group.idx
                        cute.arch.barrier_arrive(barrier_id=other, number_of_threads=self.consumers)
                early = cutlass.const_expr(self.epilogue.reads and not tile.stream_k)
                if cutlass.const_expr(early):
                    box = self.store_rest(held, outlet, held_at, box, group, sizes)
                loaded = self.load_tile(at, group, sizes, args) if early else ()
                self.finish_sums(ab, last, read)
                if cutlass.const_expr(tile.pingpong):
                    read.advance(walk.k_count)
                box = self.store_rest(held, outlet, held_at, box, group, sizes)
                if not item.is_end:
                    self.leave_part(acc, group, tidx, walk)
                else:
                    self.add_parts(acc, item, group, tidx, walk)
                    columns = loaded if early else self.load_tile(at, group, sizes, args)
                    if cutlass.const_expr(self.epilogue.has_residual):
                        addend = self.addend(outlet, sC, group)
                        handover = self.handover(residual_barriers, group.idx)
                        self.store_sums(acc, outlet, addend, handover, phase, columns, args)
                        phase = phase ^ (self.boxes // self.store_buffers % 2)
                    elif cutlass.const_expr(self.defers_store):
                        self.round(acc, held, columns, args)
                        held_at, box = at, Int32(0)
                    else:
                        self.store(acc, outlet, at, columns, group, sizes, args)
            idx += step
        self.store_rest(held, outlet, held_at, box, group, sizes)
        self.finish_stores(group)

    @cute.jit
    def finish_sums(
        self, ab: pipeline.PipelineTmaAsync, last: pipeline.PipelineState, read: pipeline.PipelineState
    ) -> None:
        """Waits for the last wgmmas and releases the stages from `last` to `read`: that is one.

        In a ping-pong, a loop of one pass: ptxas moves nothing into it, and out of straight code it would take the
        release to below the epilogue's arithmetic, for which the load warp, and with it the other warpgroup, then
        waits. Beside other such loops, as those that wait for a residual's boxes and keep the arithmetic where it is,
        ptxas would wait for each wgmma alone.
        """
        if cutlass.const_expr(self.tile.pingpong and not (self.by_rows or self.epilogue.has_residual)):
            while last.index != read.index:
                warpgroup.wait_group(0)
                ab.consumer_release(last)
                last.advance()
        else:
            warpgroup.wait_group(0)
            ab.consumer_release(last)

    @cute.jit
    def main_loop(
        self,
        acc: cute.Tensor,
        fA: cute.Tensor,
        fB: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        read: pipeline.PipelineState,
        held: cute.Tensor,
        held_at: Any,
        box: Int32,
        outlet: Outlet,
        walk: Walk,
        item: Piece,
        group: StoreGroup,
        sizes: Sizes,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState, tuple[Int32, Int32, Int32], Int32]:
        """`acc` = the sum over an item's stages from `read` on, at least one. Returns the state behind them, that of
        the last one, which the last wgmmas still read, the tile's first box, and the next box of `held`."""
        mma = self.tiled_mma(self.side_by_side)
        promoted = cutlass.const_expr(self.tile.promoted)
        sums = cute.make_rmem_tensor(acc.shape, self.acc_dtype) if promoted else acc  # of one stage, or of all
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            cute.gemm(mma, sums, fA[None, None, kb, read.index], fB[None, None, kb, read.index], sums)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        if cutlass.const_expr(promoted):
            warpgroup.wait_group(0)
            acc.store(sums.load())
        read.advance()
        at = self.first_box(walk, item.tile_idx, group.idx)  # its divisions run beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            warpgroup.fence()
            if cutlass.const_expr(promoted):
                mma.set(warpgroup.Field.ACCUMULATE, False)
            for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                cute.gemm(mma, sums, fA[None, None, kb, read.index], fB[None, None, kb, read.index], sums)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if cutlass.const_expr(self.defers_store):
                box = self.store_held(held, outlet, held_at, box, group, sizes)
            if cutlass.const_expr(promoted):
                warpgroup.wait_group(0)
                acc.store(acc.load() + sums.load())
            else:
                warpgroup.wait_group(1)  # the group before this one has read its stage
            ab.consumer_release(release)
            read.advance()
            release.advance()
        return read, release, at, box
