"""The store and residual roles of the Blackwell GEMM; `sm100` has the other roles and the timetable of all of them.

The four store warps take a tile's accumulators box by box from TMEM into registers, apply the epilogue, round, and
publish (`outlets`). In a split along k they leave their boxes where the other CTAs add them (`split_k`), and store
those that are theirs to add. The residual warp loads ahead of them, in the same order of boxes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.box_epilogue import BoxEpilogue, no_matrices
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.mirror import images_of, mirror_outlet
from jax_bwgemm.kernels.outlets import Outlet, StoreGroup, TmaOutlet, round_box, rounded_for, store_group
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.sm100_tmem import Tmem, TmemValues, wait_for_loads
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.thread_outlets import ElementOutlet, row_outlet
from jax_bwgemm.kernels.walk import Walk

STORE_THREADS = 32 * pipelines.EPILOGUE_WARPS


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the roles meet in: stages, store buffers, the matrices' buffers and pipeline if there are any, and the other
    pipelines of the timetable."""

    sA: cute.Tensor
    sB: cute.Tensor
    sC: cute.Tensor
    sRs: tuple[cute.Tensor, ...]
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
        return self.tile.out_n // self.boxes.groups // self.boxes.cols

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
    `sums`, registers of one box of each b, between whose there are `in_acc` boxes. The matrices that the epilogue reads
    are in `Rts`, (T2R, T2R_M, T2R_N, buffer)."""

    t2r: cute.TiledCopy
    Tt: cute.Tensor
    sums: tuple[cute.Tensor, ...]
    in_acc: int
    Rts: tuple[cute.Tensor, ...]

    @cute.jit
    def take(self, acc_idx: Any, box: Any, stage: Int32) -> None:
        """A box of each b."""
        for i in cutlass.range_constexpr(len(self.sums)):
            at = box + i * self.in_acc
            cute.copy(self.t2r, self.Tt[None, None, None, at, acc_idx, stage], self.sums[i])
        for i in cutlass.range_constexpr(len(self.sums)):
            wait_for_loads(self.sums[i])

    def matrices(self, pipe: Any, state: Any) -> tuple[cute.Tensor, ...]:
        """A thread's registers of each, once they are there."""
        pipe.consumer_wait(state)
        found = []
        for Rt in self.Rts:
            own = Rt[None, None, None, state.index]
            terms = cute.make_rmem_tensor(own.shape, Rt.element_type)
            cute.autovec_copy(own, terms)
            found.append(terms)
        return tuple(found)


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
        drain = self.drain(tC, shared.sRs, values)
        outlets = self.outlets(params, shared.sC, drain.t2r, tidx, group)
        outlet = outlets[0]
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
                    matrices = no_matrices
                    if cutlass.const_expr(facts.moves.matrices):
                        matrices = functools.partial(drain.matrices, residual, add)
                    results = epilogue.apply(drain.sums, epilogue.begin(at), at, matrices)
                    if cutlass.const_expr(facts.moves.matrices):
                        cute.arch.fence_proxy("async.shared", space="cta")  # the next load overwrites what was read
                        cute.arch.sync_warp()  # all lanes have read
                        residual.consumer_release(add)
                        add.advance()
                    for i in cutlass.range_constexpr(len(outlets)):
                        buffer = cutlass.const_expr(facts.boxes.buffer_of(j * len(outlets) + i))
                        outlets[i].publish(rounded_for(results, outlets, i), at, buffer)
            else:
                (sums,) = drain.sums  # no gated tile is split
                for i in cutlass.range_constexpr(places.count):
                    if walk.k_count > 0:
                        drain.take(0, i, read.index)
                    else:
                        sums.fill(0)
                    split.leave(sums, i, tidx)
                with cute.arch.elect_one():
                    acc.consumer_release(read)
                split.meet(phase)
                for j in cutlass.range_constexpr(-(-places.count // tile.cluster_k)):
                    box_idx = j * tile.cluster_k + walk.z
                    if box_idx < places.count:
                        split.add(sums, box_idx, tidx)
                        at = (first[0], first[1] + box_idx, first[2])
                        (result,) = epilogue.apply((sums,), epilogue.begin(at), at)
                        outlet.publish(round_box(result, outlet), at, facts.boxes.buffer_of(j))
                split.part(phase)
                phase = phase ^ 1
            read.advance()
            idx += walk.step
        outlet.finish()

    def drain(self, tC: cute.Tensor, sRs: tuple[cute.Tensor, ...], values: TmemValues) -> Drain:
        """tC: `Tmem.lane_layout`."""
        boxes = self.facts.boxes
        box = (boxes.rows * boxes.groups, boxes.cols)  # of all groups, below each other
        tC_boxes = cute.flat_divide(tC, box)  # (rows, cols, 1, boxes, accumulator, acc stage)
        t2r = tcgen05.make_tmem_copy(
            cute.make_copy_atom(values.load_op(), self.facts.acc_dtype), tC_boxes[None, None, 0, 0, 0, 0]
        )
        thread = t2r.get_slice(values.tidx)
        Tt = thread.partition_S(tC_boxes)[None, None, None, 0, None, None, None]
        shape = thread.partition_D(cute.make_identity_tensor(box)).shape  # one row, cols columns; or parts of two rows
        tile = self.facts.tile
        registers = tuple(cute.make_rmem_tensor(shape, self.facts.acc_dtype) for _ in range(tile.num_bs))
        by_element = cute.make_tiled_copy_D(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), boxes.dtype), t2r)
        own = by_element.get_slice(values.tidx)
        in_acc = TileBoxes(tile, boxes).in_acc
        return Drain(t2r, Tt, registers, in_acc, tuple(own.partition_D(sR) for sR in sRs))

    def outlets(
        self, params: Params, sC: cute.Tensor, t2r: cute.TiledCopy, tidx: Int32, group: StoreGroup
    ) -> tuple[Outlet, ...]:
        """One store group's way out, box by box, for each result and its mirror image."""
        boxes, outs = self.facts.boxes, params.maps.c
        if boxes.by_rows:
            return tuple(row_outlet(boxes, group, sC.iterator, out, params, False) for out in outs)
        r2s, Rs = self.way_into(boxes, sC, t2r, tidx)
        own = boxes.own(sC, group.idx)
        if boxes.store == "threads":
            return tuple(ElementOutlet(boxes, group, r2s, Rs, own, out, params.sizes) for out in outs)
        mC = self.facts.coordinate_tensors(params.sizes)[2]
        images = images_of(self.facts, params, sC, group.idx)
        plain = outs[: len(outs) - len(images)]
        parts = (boxes.tma_parts(out, sC, group.idx, mC, params.hints.c_policy) for out in plain)
        found = tuple(TmaOutlet(boxes, group, r2s, Rs, way) for way in parts)
        ways = (self.way_into(image.boxes, image.boxes.over(sC), t2r, tidx) for image in images)
        return found + tuple(mirror_outlet(image, group, *way) for image, way in zip(images, ways, strict=True))

    def way_into(self, boxes: Boxes, sC: cute.Tensor, t2r: cute.TiledCopy, tidx: Int32) -> tuple[Any, cute.Tensor]:
        """(r2s, Rs) of an outlet."""
        enum = LayoutEnum.ROW_MAJOR if boxes.c_major == "n" else LayoutEnum.COL_MAJOR
        r2s = cute.make_tiled_copy_D(sm100.get_smem_store_op(enum, boxes.dtype, self.facts.acc_dtype, t2r), t2r)
        return r2s, r2s.get_slice(tidx).partition_D(sC)


@dataclasses.dataclass(frozen=True)
class ResidualRole:
    """The residual warp: of every matrix, box after box of all store groups, in the order of the store warps."""

    facts: GemmFacts

    @cute.jit
    def run(self, params: Params, shared: Shared, walk: Walk) -> None:
        boxes, residual = self.facts.boxes, shared.residual
        places = TileBoxes(self.facts.tile, boxes)
        mR = self.facts.coordinate_tensors(params.sizes)[2]
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, boxes.buffers)
        ways, policy = list(zip(params.maps.r, shared.sRs, strict=True)), params.hints.c_policy
        parts = [[boxes.tma_parts(atom, sR, i, mR, policy) for atom, sR in ways] for i in range(boxes.groups)]
        idx = walk.first
        while idx < walk.num_items:
            tile_at = walk.tile_of(idx)
            for j in cutlass.range_constexpr(places.count):
                residual.producer_acquire(state)
                barrier = residual.producer_get_barrier(state)
                for group_idx in cutlass.range_constexpr(boxes.groups):
                    at = places.at(places.first(tile_at, group_idx), j)
                    for i in cutlass.range_constexpr(self.facts.moves.matrices):
                        parts[group_idx][i].load(state.index, at, barrier)
                state.advance()
            idx += walk.step
        residual.producer_tail(state)
