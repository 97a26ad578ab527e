"""The store of the Hopper GEMM: a consumer warpgroup's way from its sums of a tile to its own rows of the result.

Box by box: epilogue, rounding, and publish (`outlets`), at once or, where the store is deferred, from the registers
that hold what was rounded. In a split along k it first leaves its boxes where the other CTAs add them (`split_k`).
`sm90_residual` has the store that adds a residual.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels.box_epilogue import BoxEpilogue, no_matrices
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.epilogue import FRAGMENT_LANES, Matrices, Run, fragment_row_runs, fragment_runs
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.mirror import images_of, mirror_outlet
from jax_bwgemm.kernels.outlets import Outlet, StoreGroup, TmaOutlet, of_outlet, round_box
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.sm90_deal import WARPGROUP_THREADS, Deal
from jax_bwgemm.kernels.sm90_fragments import CHUNK_BYTES, SlabRows, swizzled
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.thread_outlets import ElementOutlet, row_outlet


@dataclasses.dataclass(frozen=True)
class WgmmaValues:
    """Which values of a box a thread of a warpgroup holds: a fragment of 16 rows a warp (PTX ISA, wgmma.mma_async,
    matrix D)."""

    boxes: Boxes
    rows: SlabRows
    group: StoreGroup

    def runs(self) -> tuple[Run, ...]:
        elements = self.boxes.rows * self.boxes.cols // WARPGROUP_THREADS
        to_second = self.rows.row(8) - self.rows.row(0)
        if self.boxes.c_major == "n":
            return fragment_runs(elements, 2 if self.boxes.store == "tma" else 1, to_second)
        return fragment_row_runs(elements, to_second, self.rows.leave_in_pairs)

    def first_row(self) -> Any:
        return self.rows.row(self.group.tidx // 32 * 16 + self.group.tidx % 32 // 4)

    def first_col(self) -> Any:
        return self.group.tidx % 4 * 2

    def row_lanes(self) -> tuple[int, ...]:
        return FRAGMENT_LANES[0]

    def col_lanes(self) -> tuple[int, ...]:
        return FRAGMENT_LANES[1]

    def warp(self) -> Any:
        return self.group.tidx // 32


@dataclasses.dataclass(frozen=True)
class Sums:
    """A thread's accumulator at the end of a tile: taken apart into boxes, and finished."""

    deal: Deal
    rows: SlabRows
    epilogue: BoxEpilogue

    def values_of(self, flat: cute.Tensor, box: int) -> tuple[cute.Tensor, ...]:
        """Copies of the accumulator's `box`-th box of each b, whose columns lie side by side: a thread's pairs of
        columns, every 8, of rows r and r + 8; of both rows first one column and then the other where they leave as
        one."""
        deal, num_bs = self.deal, self.deal.tile.num_bs
        slab, column = divmod(box, deal.boxes_n)
        return tuple(self._values_at(flat, (slab * num_bs + b) * deal.boxes_n + column) for b in range(num_bs))

    def _values_at(self, flat: cute.Tensor, box: int) -> cute.Tensor:
        count = cute.size(flat) // (self.deal.num_boxes * self.deal.tile.num_bs)
        values = cute.make_rmem_tensor(count, flat.element_type)
        for i in range(count):
            place = i // 4 * 4 + i % 2 * 2 + i // 2 % 2 if self.rows.leave_in_pairs else i
            values[i] = flat[box * count + place]
        return values

    def begin(self, at: Any) -> tuple[Any, ...]:
        """What the epilogue reads of a tile, whose first box is `at`: for each of the boxes that lie side by side;
        those below have the same. Of an m-major result for each of those that lie below each other."""
        deal = self.deal
        is_n_major = deal.boxes.c_major == "n"
        boxes = range(deal.boxes_n) if is_n_major else range(0, deal.num_boxes, deal.boxes_n)
        return tuple(self.epilogue.begin(deal.box_at(at, box)) for box in boxes)

    def finish(
        self, flat: cute.Tensor, at: Any, box: int, loaded: tuple[Any, ...], matrices: Matrices = no_matrices
    ) -> tuple[cute.Tensor, ...]:
        """The results of the `box`-th box of a tile whose first is `at`; `loaded`: by `begin`."""
        deal = self.deal
        own = box % deal.boxes_n if deal.boxes.c_major == "n" else box // deal.boxes_n
        return self.epilogue.apply(self.values_of(flat, box), loaded[own], deal.box_at(at, box), matrices)


@cute.jit
def store_sums(sums: Sums, outlets: tuple[Outlet, ...], acc: cute.Tensor, at: Any, loaded: tuple[Any, ...]) -> None:
    """At once, box after box from `at` on, of every result; each goes through the next buffer."""
    deal = sums.deal
    flat = cute.coalesce(acc)
    outlets[0].reclaim()
    for box in cutlass.range_constexpr(deal.num_boxes):
        if cutlass.const_expr(len(outlets) == 1):  # noqa: SIM114 (a compile-time condition stands alone)
            publish_box(sums, outlets, flat, at, box, loaded)
        elif at[0] >= 0:  # always: ptxas begins no box before the one before it is gone, for which it lacks registers
            publish_box(sums, outlets, flat, at, box, loaded)


@cute.jit
def publish_box(
    sums: Sums, outlets: tuple[Outlet, ...], flat: cute.Tensor, at: Any, box: cutlass.Constexpr[int], loaded: Any
) -> None:
    rounded = [round_box(result, outlets[0]) for result in sums.finish(flat, at, box, loaded)]
    for i in cutlass.range_constexpr(len(outlets)):
        buffer = cutlass.const_expr(sums.deal.boxes.buffer_of(box * len(outlets) + i))
        own = of_outlet(rounded[i % len(rounded)], outlets[i])
        outlets[i].publish(own, sums.deal.box_at(at, box), buffer)


@dataclasses.dataclass(frozen=True)
class Backlog:
    """Rounded boxes of a tile, `held` in registers, that leave later, one by one; none ever where that is None."""

    deal: Deal
    outlets: tuple[Outlet, ...]
    held: Any

    @cute.jit
    def hold(self, sums: Sums, acc: cute.Tensor, at: Any, loaded: tuple[Any, ...]) -> None:
        """Epilogue and rounding of all boxes."""
        flat = cute.coalesce(acc)
        count = cutlass.const_expr(cute.size(self.held) // self.deal.num_boxes)
        for box in cutlass.range_constexpr(self.deal.num_boxes):
            (values,) = sums.finish(flat, at, box, loaded)
            rounded = cute.make_tensor(self.held.iterator + box * count, cute.make_layout(count))
            rounded.store(values.load().to(self.held.element_type))

    @cute.jit
    def store_next(self, at: Any, box: Int32) -> Int32:
        """The next box, if one is left of the tile that begins `at`. Registers have no run-time index, hence a branch
        for each."""
        if cutlass.const_expr(self.held is not None):
            deal, outlets = self.deal, self.outlets
            count = cutlass.const_expr(cute.size(self.held) // deal.num_boxes)
            for i in cutlass.range_constexpr(deal.num_boxes):
                if box == i:
                    if cutlass.const_expr(i == 0):
                        outlets[0].reclaim()
                    for j in cutlass.range_constexpr(len(outlets)):
                        rounded = cute.make_tensor(
                            self.held.iterator + i * count, cute.make_layout(outlets[j].fragment)
                        )
                        outlets[j].publish(rounded, deal.box_at(at, i), deal.boxes.buffer_of(i * len(outlets) + j))
            box = box + 1
        return box

    @cute.jit
    def store_rest(self, at: Any, box: Int32) -> Int32:
        """What a main loop of few stages left; none is left then."""
        if cutlass.const_expr(self.held is not None):
            while box < self.deal.num_boxes:
                box = self.store_next(at, box)
        return Int32(self.deal.num_boxes)


@dataclasses.dataclass(frozen=True)
class SplitStore:
    """Where a CTA has a part of the sum: of each warpgroup's boxes, every CTA of the split adds and stores some."""

    sums: Sums
    outlet: Outlet
    split: KSplit
    tidx: Int32

    @cute.jit
    def store(self, acc: cute.Tensor, at: Any, phase: Int32, walk: Any) -> None:
        """`walk`: of which k the part is."""
        sums, outlet, split = self.sums, self.outlet, self.split
        deal, cluster_k = sums.deal, sums.deal.tile.cluster_k
        flat = cute.coalesce(acc)
        for box in cutlass.range_constexpr(deal.num_boxes):
            (values,) = sums.values_of(flat, box)
            if walk.k_count == 0:  # not `acc`: a write to it could move before the wait for the wgmmas
                values.fill(0)
            split.leave(values, box, self.tidx)
        split.meet(phase)
        outlet.reclaim()
        values = cute.make_rmem_tensor(cute.size(acc) // deal.num_boxes, acc.element_type)
        for i in cutlass.range_constexpr(-(-deal.num_boxes // cluster_k)):
            box = i * cluster_k + walk.z
            if box < deal.num_boxes:
                split.add(values, box, self.tidx)
                own_at = deal.box_at(at, box)
                (result,) = sums.epilogue.apply((values,), sums.epilogue.begin(own_at), own_at)
                outlet.publish(round_box(result, outlet), own_at, deal.boxes.buffer_of(i))
        split.part(phase)


@dataclasses.dataclass(frozen=True)
class WayOut:
    """What a warpgroup's outlet is made from."""

    facts: GemmFacts
    rows: SlabRows

    def outlets(self, params: Params, sC: cute.Tensor, mma: cute.TiledMma, group: StoreGroup) -> tuple[Outlet, ...]:
        """Of each result, and of its mirror image: stmatrix where elements have 16 bits and TMA stores them. `mma`: of
        one warpgroup."""
        boxes, outs = self.facts.boxes, params.maps.c
        if boxes.by_rows:
            may_be_whole = cutlass.const_expr(boxes.segments.elem_bytes > 1)
            return tuple(row_outlet(boxes, group, sC.iterator, out, params, may_be_whole) for out in outs)
        r2s, Rs, own = self.pairs(sC, group) if self.rows.leave_in_pairs else self.fragments(boxes, sC, mma, group)
        if boxes.store == "threads":
            return tuple(ElementOutlet(boxes, group, r2s, Rs, own, out, params.sizes) for out in outs)
        mC = self.facts.coordinate_tensors(params.sizes)[2]
        images = images_of(self.facts, params, sC, group.idx)
        plain = outs[: len(outs) - len(images)]
        parts = (boxes.tma_parts(out, sC, group.idx, mC, params.hints.c_policy) for out in plain)
        found = tuple(TmaOutlet(boxes, group, r2s, Rs, way) for way in parts)
        ways = (self.fragments(image.boxes, image.boxes.over(sC), mma, group)[:2] for image in images)
        return found + tuple(mirror_outlet(image, group, *way) for image, way in zip(images, ways, strict=True))

    def fragments(
        self, boxes: Boxes, sC: cute.Tensor, mma: cute.TiledMma, group: StoreGroup
    ) -> tuple[Any, cute.Tensor, cute.Tensor]:
        """(r2s, Rs, sC) of an outlet."""
        enum = LayoutEnum.ROW_MAJOR if boxes.c_major == "n" else LayoutEnum.COL_MAJOR
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(boxes.c_major == "m", 4), boxes.dtype)
        r2s = cute.make_tiled_copy_S(
            sm90.get_smem_store_op(enum, boxes.dtype, self.facts.acc_dtype),
            cute.make_tiled_copy_C_atom(stmatrix, mma),
        )
        own = boxes.own(sC, group.idx)
        return r2s, r2s.get_slice(group.tidx).partition_D(self.rows.order(own)), own

    def pairs(self, sC: cute.Tensor, group: StoreGroup) -> tuple[Any, cute.Tensor, cute.Tensor]:
        """The same where a thread's rows r and r + 8 lie side by side in an m-major result, and leave as one.

        A thread's columns are pairs, every 8, between which no swizzle changes: two registers have all its addresses.
        """
        boxes = self.facts.boxes
        lane, warp_idx = group.tidx % 32, group.tidx // 32
        row, col = self.rows.row(16 * warp_idx + lane // 4), lane % 4 * 2
        elem_bytes, box = boxes.dtype.width // 8, boxes.rows * boxes.buffer_cols
        span, chunk = boxes.span_bytes // elem_bytes, CHUNK_BYTES // elem_bytes

        def place(col: Any) -> Any:
            first = row // span * (span * boxes.buffer_cols) + col * span
            return first + swizzled(row % span // chunk, col, boxes.span_bytes) * chunk + row % chunk

        to_next = cute.assume(place(col + 1) - place(col), divby=2)
        layout = cute.make_layout(
            (2, 2, boxes.cols // 8, boxes.buffers), stride=(1, to_next, 8 * span, boxes.groups * box)
        )
        base = cute.recast_ptr(sC.iterator, swizzle_=None) + (group.idx * box + place(col))
        Rs = cute.make_tensor(base.align(2 * elem_bytes), layout)  # (row, column of a pair, pair, buffer)
        two = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), boxes.dtype, num_bits_per_copy=16 * elem_bytes)
        return two, Rs, boxes.own(sC, group.idx)
