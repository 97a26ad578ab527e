"""The store and residual roles of the Blackwell GEMM; `sm100` has the other roles and the timetable of all of them.

The four store warps take a tile's accumulators box by box from TMEM into registers, apply the epilogue, round, and
publish (`outlets`). In a split along k they leave their boxes where the other CTAs add them (`split_k`), and store
those that are theirs to add. The residual warp loads ahead of them, in the same order of boxes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.box_epilogue import BoxEpilogue, add_terms
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.outlets import Outlet, StoreGroup, TmaOutlet, round_box, store_group
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.sm100_tmem import Tmem, TmemValues, wait_for_loads
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.thread_outlets import ElementOutlet, row_outlet
from jax_bwgemm.kernels.walk import Walk

STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the roles meet in: stages, store buffers, a residual's buffers and pipeline if there is one, and the other
    pipelines of the timetable."""

    sA: cute.Tensor
    sB: cute.Tensor
    sC: cute.Tensor
    sR: Any
    ab: pipeline.PipelineTmaUmma
    acc: pipeline.PipelineUmmaAsync
    residual: Any
    split: KSplit


@dataclasses.dataclass(frozen=True)
class TileBoxes:
    """Where a store group's boxes of a tile are in the result; it has `in_acc` of each of the tile's accumulators."""

    tile: Tile
    boxes: Boxes

    @property
    def in_acc(self) -> int:
        return self.tile.mma_n // self.boxes.groups // self.boxes.cols

    @property
    def count(self) -> int:
        return self.tile.num_accs * self.in_acc

    def first(self, tile_at: tuple[Any, Any, Any], group_idx: Any) -> tuple[Any, Any, Any]:
        """(m, n, l) in boxes of the first box of a tile, of which `Walk.tile_of` says where it is."""
        tile = self.tile
        m_idx, n_idx, l_idx = tile_at
        row = (m_idx // tile.cta_group * tile.num_accs) * tile.cta_group + m_idx % tile.cta_group
        return row, (n_idx * self.boxes.groups + group_idx) * self.in_acc, l_idx

    def at(self, first: Any, box: int) -> tuple[Any, Any, Any]:
        """Of the `box`-th: those of an accumulator lie side by side."""
        return first[0] + box // self.in_acc * self.tile.cta_group, first[1] + box % self.in_acc, first[2]


@dataclasses.dataclass(frozen=True)
class Drain:
    """A thread's part of the accumulators, `Tt` (T2R, T2R_M, T2R_N, box, accumulator, acc stage), by `t2r` into
    `sums`, registers of one box. A residual is in `Rt`, if there is one, (T2R, T2R_M, T2R_N, buffer)."""

    t2r: cute.TiledCopy
    Tt: cute.Tensor
    sums: cute.Tensor
    Rt: Any

    @cute.jit
    def take(self, acc_idx: Any, box: Any, stage: Int32) -> None:
        cute.copy(self.t2r, self.Tt[None, None, None, box, acc_idx, stage], self.sums)
        wait_for_loads(self.sums)

    @cute.jit
    def add_residual(self, buffer: Int32) -> None:
        """All lanes have read when the warp meets."""
        own = self.Rt[None, None, None, buffer]
        terms = cute.make_rmem_tensor(own.shape, self.Rt.element_type)
        cute.autovec_copy(own, terms)
        add_terms(self.sums, terms)
        cute.arch.fence_proxy("async.shared", space="cta")  # the next load overwrites what was read
        cute.arch.sync_warp()


@dataclasses.dataclass(frozen=True)
class StoreRole:
    """The four store warps. Their groups have named barriers from `first_barrier` on."""

    facts: GemmFacts
    tmem: Tmem
    first_barrier: int

    @cute.jit
    def run(self, params: Params, shared: Shared, tC: cute.Tensor, walk: Walk) -> None:
        """TMEM -> registers -> epilogue -> smem box -> the result, box after box."""
        facts, tile = self.facts, self.facts.tile
        tidx = cute.arch.thread_idx()[0]
        group = store_group(tidx, STORE_THREADS // facts.boxes.groups, self.first_barrier)
        values = TmemValues(facts.boxes, group, tidx)
        drain = self.drain(tC, shared.sR, values)
        outlet = self.outlet(params, shared.sC, drain.t2r, tidx, group)
        epilogue = BoxEpilogue(facts.epilogue, facts.boxes, values, params)
        places = TileBoxes(tile, facts.boxes)
        acc, residual, split = shared.acc, shared.residual, shared.split

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.tmem.stages)
        add = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, facts.boxes.buffers)
        phase = Int32(0)
        idx = walk.first
        while idx < walk.num_items:
            first = places.first(walk.tile_of(idx), group.idx)
            outlet.reclaim()
            acc.consumer_wait(read)
            if cutlass.const_expr(tile.cluster_k == 1):
                for j in cutlass.range_constexpr(places.count):
                    drain.take(j // places.in_acc, j % places.in_acc, read.index)
                    if cutlass.const_expr(j == places.count - 1):
                        with cute.arch.elect_one():  # everything has been read: the MMAs may have it back
                            acc.consumer_release(read)
                    at = places.at(first, j)
                    epilogue.apply(drain.sums, epilogue.begin(at))
                    if cutlass.const_expr(facts.epilogue.has_residual):
                        residual.consumer_wait(add)
                        drain.add_residual(add.index)
                        residual.consumer_release(add)
                        add.advance()
                    outlet.publish(round_box(drain.sums, outlet), at, facts.boxes.buffer_of(j))
            else:
                for i in cutlass.range_constexpr(places.count):
                    if walk.k_count > 0:
                        drain.take(0, i, read.index)
                    else:
                        drain.sums.fill(0)
                    split.leave(drain.sums, i, tidx)
                with cute.arch.elect_one():
                    acc.consumer_release(read)
                split.meet(phase)
                for j in cutlass.range_constexpr(-(-places.count // tile.cluster_k)):
                    box_idx = j * tile.cluster_k + walk.z
                    if box_idx < places.count:
                        split.add(drain.sums, box_idx, tidx)
                        at = (first[0], first[1] + box_idx, first[2])
                        epilogue.apply(drain.sums, epilogue.begin(at))
                        outlet.publish(round_box(drain.sums, outlet), at, facts.boxes.buffer_of(j))
                split.part(phase)
                phase = phase ^ 1
            read.advance()
            idx += walk.step
        outlet.finish()

    def drain(self, tC: cute.Tensor, sR: cute.Tensor | None, values: TmemValues) -> Drain:
        """tC: `Tmem.lane_layout`."""
        boxes = self.facts.boxes
        box = (boxes.rows * boxes.groups, boxes.cols)  # of all groups, below each other
        tC_boxes = cute.flat_divide(tC, box)  # (rows, cols, 1, boxes, accumulator, acc stage)
        t2r = tcgen05.make_tmem_copy(
            cute.make_copy_atom(values.load_op(), self.facts.acc_dtype), tC_boxes[None, None, 0, 0, 0, 0]
        )
        thread = t2r.get_slice(values.tidx)
        Tt = thread.partition_S(tC_boxes)[None, None, None, 0, None, None, None]
        registers = cute.make_rmem_tensor(  # one row, cols columns; or parts of two rows
            thread.partition_D(cute.make_identity_tensor(box)).shape, self.facts.acc_dtype
        )
        if sR is None:
            return Drain(t2r, Tt, registers, None)
        by_element = cute.make_tiled_copy_D(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), boxes.dtype), t2r)
        return Drain(t2r, Tt, registers, by_element.get_slice(values.tidx).partition_D(sR))

    def outlet(self, params: Params, sC: cute.Tensor, t2r: cute.TiledCopy, tidx: Int32, group: StoreGroup) -> Outlet:
        """One store group's way out, box by box."""
        boxes, out = self.facts.boxes, params.maps.c
        if boxes.by_rows:
            return row_outlet(boxes, group, sC, out, params.sizes)
        enum = LayoutEnum.ROW_MAJOR if boxes.c_major == "n" else LayoutEnum.COL_MAJOR
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(enum, boxes.dtype, self.facts.acc_dtype, t2r), t2r)
        Rs = r2s.get_slice(tidx).partition_D(sC)
        own = boxes.own(sC, group.idx)
        if boxes.store == "threads":
            return ElementOutlet(boxes, group, r2s, Rs, own, out, params.sizes)
        return TmaOutlet(boxes, group, r2s, Rs, own, out, self.facts.coordinate_tensors(params.sizes)[2])


@dataclasses.dataclass(frozen=True)
class ResidualRole:
    """The residual warp: box after box of all store groups, in the order of the store warps."""

    facts: GemmFacts

    @cute.jit
    def run(self, params: Params, shared: Shared, walk: Walk) -> None:
        boxes, residual, tma_r = self.facts.boxes, shared.residual, params.maps.r
        places = TileBoxes(self.facts.tile, boxes)
        mR = self.facts.coordinate_tensors(params.sizes)[2]
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, boxes.buffers)
        idx = walk.first
        while idx < walk.num_items:
            tile_at = walk.tile_of(idx)
            for j in cutlass.range_constexpr(places.count):
                residual.producer_acquire(state)
                barrier = residual.producer_get_barrier(state)
                for group_idx in cutlass.range_constexpr(boxes.groups):
                    at = places.at(places.first(tile_at, group_idx), j)
                    Rs, Rg = boxes.tma_parts(tma_r, boxes.own(shared.sR, group_idx), mR, at)
                    cute.copy(tma_r, Rg, Rs[None, state.index], tma_bar_ptr=barrier)
                state.advance()
            idx += walk.step
        residual.producer_tail(state)
