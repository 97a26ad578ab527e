"""Hopper GEMM: warp-specialised, persistent, TMA + wgmma.

Timetable of a CTA (1 + W warpgroups, W = 1 or 2 consumers):

    warpgroup 0, warp 0   load      TMA of A and B into the stages, for one tile after the other
    warpgroups 1..W       multiply  wgmma on 64-row slabs of every stage, then round and store their own rows

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival and the    one lane of each warp that multiplies the
                                      bytes of A and B                 stage, in every CTA that shares it (multicast)
    store      multiply -> TMA        the warpgroup's 128 threads,     cp.async.bulk.wait_group.read in the
                                      fence, its named barrier         warpgroup's first warp

The load warp runs ahead into the next tile while the consumers store. Where registers hold the sums and a rounded
result (`defers_store`), a tile is only rounded at its end, and its boxes leave one by one during the next tile's main
loop: each behind the wgmmas of a stage, which run meanwhile; the rest after a main loop of fewer stages than boxes.
Where TMA cannot step over the result's rows, each of the consumers' warps stores its own and waits for no other
(`row_store`). How two consumers divide the work:

    cooperative   the slabs of every tile are dealt to them in turn; neither waits for the other
    ping-pong     the tiles are; a warpgroup issues wgmmas for its tile only in its turn, and passes the turn (a named
                  barrier: it arrives, the other waits) once the last are on their way. So one stores while the other
                  multiplies. Consecutive tiles take consecutive stages, so each skips those of the other's tiles. The
                  turn is passed only to a tile that exists: every arrival is waited for

A split along k adds the barriers of `split_k`: once all consumers have read the last stage (`PARTS_BARRIER`) they leave
their accumulators there; the load warp waits for `drained` after each tile. Every warp passes griddepcontrol.wait
before it touches global memory; the load warp releases the next kernel when its last load is on its way. A split
tail adds the flags of `split_tail`, between the last stage of an item and its store.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import pipelines, split_k, split_tail
from jax_bwgemm.kernels.epilogue import fragment_runs
from jax_bwgemm.kernels.gemm import Gemm, Hints, Outlet, Sizes, StoreGroup, Walk, buffer_of
from jax_bwgemm.kernels.operands import dsl_box, layout_enum
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.split_tail import Item, Tail
from jax_bwgemm.tile import EPILOGUE_STAGES, defers_store
from jax_bwgemm.variant import Variant

WARPGROUP_THREADS = 128
SM_REGISTERS = 65536  # CUDA C++ programming guide, technical specifications, 9.0; one CTA has them all
LOAD_REGISTERS = 40
STORE_BARRIER = 1  # named barriers: STORE_BARRIER + w, the threads of consumer warpgroup w; 0 is the CTA's,
TURN_BARRIER = 3  # TURN_BARRIER + w: the other warpgroup arrives, w waits for its turn,
PARTS_BARRIER = 5  # and all consumers, once their accumulators are complete


def multiply_registers(warpgroups: int) -> int:
    """Of a consumer thread, by setmaxnreg: what the load warpgroup leaves, in its steps of 8 and at most 240."""
    rest = SM_REGISTERS // WARPGROUP_THREADS - LOAD_REGISTERS
    return min(240, rest // warpgroups // 8 * 8)


class MmaTf32Op(warpgroup.MmaF8Op):
    """wgmma of k-major TF32, for which the DSL has no class: the one for 8 bits, whose layouts are the same bytes."""

    def __init__(self, shape_mn: tuple[int, int]) -> None:
        dtypes, majors = (cutlass.TFloat32, cutlass.TFloat32, Float32), (OperandMajorMode.K, OperandMajorMode.K)
        super().__init__(*dtypes, (*shape_mn, 8), warpgroup.OperandSource.SMEM, *majors)

    def _verify(self) -> None:
        """The base class would refuse the dtypes."""


class Sm90Gemm(Gemm):
    """One variant. Sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        tile = variant.tile
        self.warpgroups = tile.num_consumer_warpgroups
        self.consumers = self.warpgroups * WARPGROUP_THREADS
        self.side_by_side = 1 if tile.pingpong else self.warpgroups  # warpgroups that multiply one tile
        self.defers_store = defers_store(tile, variant.out_dtype, variant.store, variant.target)
        self.boxes_n = tile.mma_n // self.store_cols
        self.boxes = tile.cta_m // (self.side_by_side * self.store_rows) * self.boxes_n  # of a warpgroup and tile

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def tiled_mma(self, warpgroups: int) -> cute.TiledMma:
        if self.a_dtype is cutlass.TFloat32:
            return cute.make_tiled_mma(cute.make_mma_atom(MmaTf32Op((64, self.tile.mma_n))), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            self.acc_dtype,
            (warpgroups, 1, 1),
            (64, self.tile.mma_n),
        )

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
        tail_parts: Int32,
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
        tail_args = (tail_parts, workspace, token) if cutlass.const_expr(tile.split_tail) else ()
        self.kernel(tma_a, tma_b, out, sizes, hints, tail_args, self.epilogue_args(alpha, bias)).launch(
            grid=self.cluster, block=(self.threads, 1, 1), cluster=self.cluster, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        out: Any,
        sizes: Sizes,
        hints: Hints,
        tail_args: tuple[Any, ...],
        args: tuple[Any, ...],
    ) -> None:
        tile = self.tile
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if cutlass.const_expr(self.store_kind == "tma"):
                cpasync.prefetch_descriptor(out)

        a_smem, b_smem = self.smem_layouts()
        c_smem = self.store_layout(self.store_groups, EPILOGUE_STAGES)
        allocator = cutlass.memory.SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * self.stages)
        written = allocator.allocate_array(Int64, 1)
        drained = allocator.allocate_array(Int64, 1)
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
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        walk = self.walk(sizes, tail_args)
        mA, mB, mC = self.coordinate_tensors(sizes)

        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        cute.arch.griddepcontrol_wait()
        if warp_idx < pipelines.WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == 0:
                self.load(tma_a, tma_b, mA, mB, sA, sB, ab, split, walk, sizes, hints)
        else:
            cute.arch.setmaxregister_increase(multiply_registers(self.warpgroups))
            self.multiply(out, mC, sA, sB, sC, ab, split, walk, sizes, args)

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
        fA = mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, stage)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((tile.cta_m, tile.mma_n)), self.acc_dtype)
        outlet = self.outlet(out, mC, sC, group)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        held = cute.make_rmem_tensor(cute.size(acc) if cutlass.const_expr(self.defers_store) else 1, self.out_dtype)
        held.fill(0)
        held_at, box = (Int32(0), Int32(0), Int32(0)), Int32(self.boxes)  # the next box of `held`: none is left
        phase = Int32(0)
        idx, step = walk.first, walk.step
        if cutlass.const_expr(tile.pingpong):
            idx, step = walk.first + Uint32(group.idx) * walk.step, 2 * walk.step
            if group.idx == 1:
                read.advance(walk.k_count)
        while idx < walk.num_items:
            item = walk.item_of(idx)
            if cutlass.const_expr(tile.cluster_k > 1):
                at = self.first_box(walk, item, group)
                if walk.k_count > 0:
                    read, last, at, box = self.main_loop(
                        acc, fA, fB, ab, read, held, held_at, box, outlet, walk, item, group, sizes
                    )
                    warpgroup.wait_group(0)
                    ab.consumer_release(last)
                cute.arch.barrier(barrier_id=PARTS_BARRIER, number_of_threads=self.consumers)
                self.store_split(acc, outlet, split, phase, at, group, tidx, walk, sizes, args)
                phase = phase ^ 1
            else:
                if cutlass.const_expr(tile.pingpong):  # noqa: SIM102
                    if idx != walk.first:
                        cute.arch.barrier(barrier_id=TURN_BARRIER + group.idx, number_of_threads=self.consumers)
                read, last, at, box = self.main_loop(
                    acc, fA, fB, ab, read, held, held_at, box, outlet, walk, item, group, sizes
                )
                if cutlass.const_expr(tile.pingpong):
                    read.advance(walk.k_count)
                    if idx + walk.step < walk.num_items:
                        other = TURN_BARRIER + 1 - group.idx
                        cute.arch.barrier_arrive(barrier_id=other, number_of_threads=self.consumers)
                warpgroup.wait_group(0)
                ab.consumer_release(last)
                if cutlass.const_expr(self.defers_store):
                    self.store_rest(held, outlet, held_at, box, group, sizes)
                    box = Int32(self.boxes)
                if item.part < item.last:
                    self.leave_part(acc, group, tidx, walk)
                else:
                    self.add_parts(acc, item, group, tidx, walk)
                    if cutlass.const_expr(self.defers_store):
                        self.round(acc, held, at, group, sizes, args)
                        held_at, box = at, Int32(0)
                    else:
                        self.store(acc, outlet, at, group, sizes, args)
            idx += step
        if cutlass.const_expr(self.defers_store):
            self.store_rest(held, outlet, held_at, box, group, sizes)
        self.finish_stores(group)

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
        item: Item,
        group: StoreGroup,
        sizes: Sizes,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState, tuple[Int32, Int32, Int32], Int32]:
        """`acc` = the sum over an item's stages from `read` on, at least one. Returns the state behind them, that of
        the last one, which the last wgmmas still read, the tile's first box, and the next box of `held`."""
        mma = self.tiled_mma(self.side_by_side)
        release = read.clone()
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        read.advance()
        at = self.first_box(walk, item, group)  # its divisions run beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                cute.gemm(mma, acc, fA[None, None, kb, read.index], fB[None, None, kb, read.index], acc)
            warpgroup.commit_group()
            if cutlass.const_expr(self.defers_store):
                box = self.store_held(held, outlet, held_at, box, group, sizes)
            warpgroup.wait_group(1)  # the group before this one has read its stage
            ab.consumer_release(release)
            read.advance()
            release.advance()
        return read, release, at, box

    @cute.jit
    def store(
        self, acc: cute.Tensor, outlet: Outlet, at: Any, group: StoreGroup, sizes: Sizes, args: tuple[Any, ...]
    ) -> None:
        """Registers -> epilogue -> smem box -> the result, box after box from `at` on; each goes to the next buffer."""
        flat = cute.coalesce(acc)
        self.reclaim(group, WARPGROUP_THREADS)
        for box in cutlass.range_constexpr(self.boxes):
            values = self.values_of(flat, box)
            self.finish_box(values, outlet, self.box_at(at, box), buffer_of(box), group, sizes, args)

    @cute.jit
    def store_split(
        self,
        acc: cute.Tensor,
        outlet: Outlet,
        split: KSplit,
        phase: Int32,
        at: Any,
        group: StoreGroup,
        tidx: Int32,
        walk: Walk,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """The same for a part of the sum: of each warpgroup's boxes, every CTA of the split adds and stores some."""
        tile = self.tile
        flat = cute.coalesce(acc)
        for box in cutlass.range_constexpr(self.boxes):
            values = self.values_of(flat, box)
            if walk.k_count == 0:  # not `acc`: a write to it could move before the wait for the wgmmas
                values.fill(0)
            split_k.leave_part(split, values, box, tidx, self.consumers)
        split_k.meet(split, tile, walk.x, phase)
        self.reclaim(group, WARPGROUP_THREADS)
        values = cute.make_rmem_tensor(cute.size(acc) // self.boxes, self.acc_dtype)
        for i in cutlass.range_constexpr(-(-self.boxes // tile.cluster_k)):
            box = i * tile.cluster_k + walk.z
            if box < self.boxes:
                split_k.add_parts(split, values, box, tidx, self.consumers, tile, walk.x)
                self.finish_box(values, outlet, self.box_at(at, box), buffer_of(i), group, sizes, args)
        split_k.part(split, tile, walk.x, phase)

    @cute.jit
    def round(
        self, acc: cute.Tensor, held: cute.Tensor, at: Any, group: StoreGroup, sizes: Sizes, args: tuple[Any, ...]
    ) -> None:
        """Epilogue and rounding of all boxes, which leave later."""
        flat = cute.coalesce(acc)
        count = cutlass.const_expr(cute.size(flat) // self.boxes)
        for box in cutlass.range_constexpr(self.boxes):
            values = self.values_of(flat, box)
            self.apply_epilogue(values, self.box_at(at, box), group, sizes, args)
            cute.make_tensor(held.iterator + box * count, cute.make_layout(count)).store(
                values.load().to(self.out_dtype)
            )

    @cute.jit
    def store_held(
        self, held: cute.Tensor, outlet: Outlet, at: Any, box: Int32, group: StoreGroup, sizes: Sizes
    ) -> Int32:
        """The next box, if one is left. Registers have no run-time index, hence a branch for each."""
        count = cutlass.const_expr(cute.size(held) // self.boxes)
        for i in cutlass.range_constexpr(self.boxes):
            if box == i:
                if cutlass.const_expr(i == 0):
                    self.reclaim(group, WARPGROUP_THREADS)
                rounded = cute.make_tensor(held.iterator + i * count, cute.make_layout(cute.shape(outlet.Rs)[:3]))
                self.publish(outlet, rounded, self.box_at(at, i), buffer_of(i), group, WARPGROUP_THREADS, sizes)
        return box + 1

    @cute.jit
    def store_rest(
        self, held: cute.Tensor, outlet: Outlet, at: Any, box: Int32, group: StoreGroup, sizes: Sizes
    ) -> None:
        """What a main loop of few stages left."""
        while box < self.boxes:
            box = self.store_held(held, outlet, at, box, group, sizes)

    @cute.jit
    def leave_part(self, acc: cute.Tensor, group: StoreGroup, tidx: Int32, walk: Walk) -> None:
        """A part of a tile of the tail that is not the last one: to the workspace."""
        if cutlass.const_expr(self.tile.split_tail):
            slot = self.slot(walk, walk.first)
            split_tail.leave_part(
                self.tail(walk), cute.coalesce(acc), slot, tidx, group, self.warpgroups, self.consumers
            )

    @cute.jit
    def add_parts(self, acc: cute.Tensor, item: Item, group: StoreGroup, tidx: Int32, walk: Walk) -> None:
        """The last part: `acc` += the others', in the order of k."""
        if cutlass.const_expr(self.tile.split_tail):
            for part in cutlass.range(item.last, unroll=1):
                slot = self.slot(walk, walk.first - (item.last - part) * self.tail(walk).tiles)
                split_tail.add_part(
                    self.tail(walk), cute.coalesce(acc), slot, tidx, group, self.warpgroups, self.consumers
                )

    def tail(self, walk: Walk) -> Tail:
        assert walk.tail is not None  # the tile splits it
        return walk.tail

    def slot(self, walk: Walk, cluster: Uint32) -> Int32:
        """Of the workspace: that of the CTA at this one's place in a cluster."""
        return Int32(cluster) * self.tile.cluster_ctas + walk.y * self.tile.cluster_m + walk.x

    @cute.jit
    def finish_box(
        self,
        values: cute.Tensor,
        outlet: Outlet,
        at: Any,
        stage: cutlass.Constexpr,
        group: StoreGroup,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """A box of finished sums: epilogue, rounding, and out."""
        self.apply_epilogue(values, at, group, sizes, args)
        rounded = cute.make_rmem_tensor(
            cute.size(values) if cutlass.const_expr(self.by_rows) else cute.shape(outlet.Rs)[:3], self.out_dtype
        )
        rounded.store(values.load().to(self.out_dtype))
        self.publish(outlet, rounded, at, stage, group, WARPGROUP_THREADS, sizes)

    @cute.jit
    def apply_epilogue(
        self, values: cute.Tensor, at: Any, group: StoreGroup, sizes: Sizes, args: tuple[Any, ...]
    ) -> None:
        column = at[1] * self.store_cols + group.tidx % 4 * 2
        runs = fragment_runs(cute.size(values), 2 if self.store_kind == "tma" else 1)
        self.epilogue.apply(values, runs, column, sizes.n, args)

    def outlet(self, out: Any, mC: cute.Tensor, sC: cute.Tensor, group: StoreGroup) -> Outlet:
        """One warpgroup's way out, box by box; stmatrix where elements have 16 bits and TMA stores them."""
        if cutlass.const_expr(self.by_rows):
            return self.row_outlet(out, mC, sC, group, WARPGROUP_THREADS)
        enum = LayoutEnum.ROW_MAJOR if cutlass.const_expr(self.c_major == "n") else LayoutEnum.COL_MAJOR
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(self.c_major == "m", 4), self.out_dtype)
        r2s = cute.make_tiled_copy_S(
            sm90.get_smem_store_op(enum, self.out_dtype, self.acc_dtype),
            cute.make_tiled_copy_C_atom(stmatrix, self.tiled_mma(1)),
        )
        own = cute.local_tile(sC, (self.store_rows, self.store_cols), (group.idx, 0, None))
        Rs = r2s.get_slice(group.tidx).partition_D(own)  # (R2S, R2S_M, R2S_N, stage)
        return Outlet(r2s, Rs, own, out, mC)

    def store_group(self, tidx: Int32) -> StoreGroup:
        idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        own = tidx % WARPGROUP_THREADS
        return StoreGroup(idx, own, cute.arch.make_warp_uniform(own // 32) == 0, STORE_BARRIER + idx)

    def values_of(self, flat: cute.Tensor, box: int) -> cute.Tensor:
        """A copy of the accumulator's `box`-th box: a thread's pairs of columns, every 8, of rows r and r + 8."""
        count = cute.size(flat) // self.boxes
        values = cute.make_rmem_tensor(count, self.acc_dtype)
        for i in range(count):
            values[i] = flat[box * count + i]
        return values

    def first_box(self, walk: Walk, item: Item, group: StoreGroup) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) in boxes of a warpgroup's first box of a tile; the shuffles keep it where it is called."""
        m_idx, n_idx, l_idx = (cute.arch.make_warp_uniform(i) for i in walk.tile_of(self.tile, item.tile_idx))
        slabs = self.tile.cta_m // self.store_rows
        return m_idx * slabs + group.idx % self.side_by_side, n_idx * self.boxes_n, l_idx

    def box_at(self, at: Any, box: Any) -> Any:
        """(m, n, l) in boxes of a warpgroup's `box`-th box; `at` has its first. Slabs lie side by side in turns."""
        return at[0] + box // self.boxes_n * self.side_by_side, at[1] + box % self.boxes_n, at[2]
