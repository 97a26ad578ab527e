"""The store roles of the Blackwell GEMM; `sm100` has its other roles, its kernel and the timetable of all of them.

The four store warps take a tile's accumulators box by box from TMEM into registers, apply the epilogue, round, and
publish (`gemm.Gemm.publish`). In a split along k they leave their boxes where the other CTAs add them (`split_k`), and
store those that are theirs to add. The residual warp loads ahead of them, in the same order of boxes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import pipelines, row_store, split_k
from jax_bwgemm.kernels.epilogue import Run, fragment_row_runs, fragment_runs
from jax_bwgemm.kernels.gemm import Gemm, Outlet, Sizes, StoreGroup, Walk, buffer_of
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.tile import EPILOGUE_STAGES, TMEM_LANES, acc_cols, acc_stages
from jax_bwgemm.variant import Variant

STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS
ALL_STORE_BARRIER = 1  # named barriers: the store warps among themselves,
TMEM_BARRIER = 2  # the store warps with the multiply warp, once the TMEM address is known,
GROUP_BARRIER = 3  # and GROUP_BARRIER + g, the warps of one store group
LANE_STRIDE = 1 << 16  # of a TMEM address, PTX ISA, tensor memory addressing


class Sm100Store(Gemm):
    """What the store warps and the residual warp do, and what they hold."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        self.acc_stages = acc_stages(self.tile)
        self.group_threads = STORE_THREADS // self.store_groups
        self.group_cols = self.tile.mma_n // self.store_groups
        self.boxes = self.group_cols // self.store_cols

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

    @cute.jit
    def take(self, t2r: cute.TiledCopy, Tt: cute.Tensor, values: cute.Tensor) -> None:
        """A box of an accumulator, from TMEM into registers."""
        cute.copy(t2r, Tt, values)
        cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld

    @cute.jit
    def apply_epilogue(self, values: cute.Tensor, at: Any, tidx: Int32, sizes: Sizes, args: tuple[Any, ...]) -> None:
        runs = self.runs(cute.size(values))
        if cutlass.const_expr(self.c_major == "n"):
            first, size = at[1] * self.store_cols + self.lane_col(tidx), sizes.n
        else:
            first, size = at[0] * self.store_rows + self.lane_row(tidx), sizes.m
        self.epilogue.apply(values, runs, self.epilogue.load(runs, first, size, args), args)

    @cute.jit
    def add_residual(self, values: cute.Tensor, Rt: cute.Tensor, stage: Int32) -> None:
        """Rt: this thread's elements (T2R, T2R_M, T2R_N, stage). All lanes have read when the warp meets."""
        own = Rt[None, None, None, stage]
        loaded = cute.make_rmem_tensor(own.shape, self.out_dtype)
        cute.autovec_copy(own, loaded)
        self.add(values, loaded)
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

    def store_group(self, tidx: Int32) -> StoreGroup:
        idx = cute.arch.make_warp_uniform(tidx // self.group_threads)
        own = tidx % self.group_threads
        return StoreGroup(idx, own, cute.arch.make_warp_uniform(own // 32) == 0, GROUP_BARRIER + idx)

    def first_box(self, m_idx: Any, n_idx: Any, group_idx: Any) -> tuple[Any, Any]:
        """(row, column) of a store group's first box of a CTA's tile, in boxes."""
        tile = self.tile
        row = (m_idx // tile.cta_group * tile.num_accs) * tile.cta_group + m_idx % tile.cta_group
        return row, (n_idx * self.store_groups + group_idx) * self.boxes

    # Which values of a box a thread holds: one row of 32 lanes' each, or wgmma-like fragments of 16 rows a warp.

    def has_row_per_lane(self) -> bool:
        return self.store_rows * self.store_groups == TMEM_LANES and not self.by_rows

    def tmem_load_op(self) -> Any:
        if self.has_row_per_lane():
            return tcgen05.Ld32x32bOp(tcgen05.Repetition(self.store_cols))
        return tcgen05.Ld16x256bOp(tcgen05.Repetition(self.store_cols // 8))

    def runs(self, elements: int) -> tuple[Run, ...]:
        if self.c_major == "m":
            if self.has_row_per_lane():
                return (Run(0, 1, tuple((i,) for i in range(elements))),)
            return fragment_row_runs(elements, 8)
        if not self.has_row_per_lane():
            count = self.store_rows * self.store_groups // (row_store.FRAGMENT_ROWS * pipelines.EPILOGUE_WARPS)
            return fragment_runs(elements, 2 if self.store_kind == "tma" else 1, count)
        return row_runs(elements, 16 * 8 // self.out_dtype.width if self.store_kind == "tma" else 1)

    def lane_col(self, tidx: Int32) -> Any:
        """A thread's first column of a box."""
        return 0 if self.has_row_per_lane() else tidx % 4 * 2

    def lane_row(self, tidx: Int32) -> Any:
        """A thread's first row of a box."""
        return tidx % self.group_threads if self.has_row_per_lane() else tidx // 32 * 16 + tidx % 32 // 4


def row_runs(elements: int, width: int) -> tuple[Run, ...]:
    """A 32x32b TMEM load: thread t holds row t; register j is column j. `width`: elements of one load of a bias."""
    return tuple(Run(j, width, (tuple(range(j, j + width)),)) for j in range(0, elements, width))
