"""The store of the Hopper GEMM; `sm90` has its kernel, its main loop and the timetable of its roles.

A consumer warpgroup's way from its accumulators to its own rows of the result, box by box: epilogue, rounding, and
publish (`gemm.Gemm.publish`), at once or, where the store is deferred, from the registers that hold what was rounded.
In a split along k it first leaves its boxes where the other CTAs add them (`split_k`), in a stream-K the sums of a tile
whose end another cluster has (`stream_k`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, Uint32, cute
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.kernels import split_k, stream_k
from jax_bwgemm.kernels.epilogue import Run, fragment_row_runs, fragment_runs
from jax_bwgemm.kernels.gemm import Gemm, Outlet, Sizes, StoreGroup, Walk, buffer_of
from jax_bwgemm.kernels.scheduler import Piece
from jax_bwgemm.kernels.sm90_fragments import CHUNK_BYTES, ByteFragments, WordFragments, swizzled
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.stream_k import Stream
from jax_bwgemm.tile import defers_store, reads_a_from_registers, store_buffers, warpgroup_slabs
from jax_bwgemm.variant import Variant

WARPGROUP_THREADS = 128
STORE_BARRIER = 1  # named barriers: STORE_BARRIER + w, the threads of consumer warpgroup w; 0 is the CTA's,
TURN_BARRIER = 3  # TURN_BARRIER + w: the other warpgroup arrives, w waits for its turn,
PARTS_BARRIER = 5  # and all consumers, once their accumulators are complete


class Sm90Store(Gemm):
    """What a consumer warpgroup does with the sums of a tile, and which of them it has."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        tile = variant.tile
        self.warpgroups = tile.num_consumer_warpgroups
        self.consumers = self.warpgroups * WARPGROUP_THREADS
        self.side_by_side = 1 if tile.pingpong else self.warpgroups  # warpgroups that multiply one tile
        self.fragments = self.fragments_of(variant)
        takes_pairs = isinstance(self.fragments, ByteFragments)
        self.stores_pairs = takes_pairs and self.c_major == "m"
        self.segments = dataclasses.replace(self.segments, is_interleaved=takes_pairs)
        has_fragments = self.fragments is not None
        self.defers_store = defers_store(
            tile, variant.out_dtype, variant.store, variant.target, has_fragments, variant.has_residual
        )
        self.store_buffers = store_buffers(tile, variant.out_dtype, variant.target, variant.has_residual)
        self.boxes_n = tile.mma_n // self.store_cols
        self.boxes = warpgroup_slabs(tile) * self.boxes_n  # of a warpgroup and tile

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        outlet: Outlet,
        at: Any,
        loaded: tuple[Any, ...],
        group: StoreGroup,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """Registers -> epilogue -> smem box -> the result, box after box from `at` on; each goes to the next buffer."""
        flat = cute.coalesce(acc)
        self.reclaim(group, WARPGROUP_THREADS)
        for box in cutlass.range_constexpr(self.boxes):
            values, own = self.values_of(flat, box), self.own_terms(loaded, box)
            self.finish_box(values, outlet, self.box_at(at, box), buffer_of(box), own, group, sizes, args)

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
                own_at = self.box_at(at, box)
                loaded = self.load_terms(own_at, group, sizes, args)
                self.finish_box(values, outlet, own_at, buffer_of(i), loaded, group, sizes, args)
        split_k.part(split, tile, walk.x, phase)

    @cute.jit
    def round(self, acc: cute.Tensor, held: cute.Tensor, loaded: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        """Epilogue and rounding of all boxes, which leave later."""
        flat = cute.coalesce(acc)
        count = cutlass.const_expr(cute.size(flat) // self.boxes)
        for box in cutlass.range_constexpr(self.boxes):
            values = self.values_of(flat, box)
            self.epilogue.apply(values, self.runs(), self.own_terms(loaded, box), args)
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
    ) -> Int32:
        """What a main loop of few stages left; none is left then."""
        if cutlass.const_expr(self.defers_store):
            while box < self.boxes:
                box = self.store_held(held, outlet, at, box, group, sizes)
        return Int32(self.boxes)

    @cute.jit
    def leave_part(self, acc: cute.Tensor, group: StoreGroup, tidx: Int32, walk: Walk) -> None:
        """A piece of a tile whose end it does not have: to the workspace."""
        if cutlass.const_expr(self.tile.stream_k):
            slot = self.slot(walk, self.stream(walk).share.cluster)
            stream_k.leave_part(
                self.stream(walk), cute.coalesce(acc), slot, tidx, group, self.warpgroups, self.consumers
            )

    @cute.jit
    def add_parts(self, acc: cute.Tensor, piece: Piece, group: StoreGroup, tidx: Int32, walk: Walk) -> None:
        """The end of a tile that others have begun: `acc` += their parts, in the order of k."""
        if cutlass.const_expr(self.tile.stream_k):  # noqa: SIM102 (a compile-time condition stands alone)
            if piece.parts > 0:
                first = self.slot(walk, self.stream(walk).share.cluster - piece.parts)
                step = self.tile.cluster_ctas
                stream_k.add_parts(
                    self.stream(walk), cute.coalesce(acc), first, step, piece.parts, tidx, group, self.warpgroups,
                    self.consumers,
                )  # fmt: skip

    def stream(self, walk: Walk) -> Stream:
        assert walk.stream is not None  # the tile has one
        return walk.stream

    def slot(self, walk: Walk, cluster: Int32) -> Int32:
        """Of the workspace: that of the CTA at this one's place in a cluster."""
        return cluster * self.tile.cluster_ctas + walk.y * self.tile.cluster_m + walk.x

    @cute.jit
    def finish_box(
        self,
        values: cute.Tensor,
        outlet: Outlet,
        at: Any,
        stage: cutlass.Constexpr,
        loaded: tuple[Any, ...],
        group: StoreGroup,
        sizes: Sizes,
        args: tuple[Any, ...],
    ) -> None:
        """A box of finished sums: epilogue, rounding, and out."""
        self.epilogue.apply(values, self.runs(), loaded, args)
        rounded = cute.make_rmem_tensor(
            cute.size(values) if cutlass.const_expr(self.by_rows) else cute.shape(outlet.Rs)[:3], self.out_dtype
        )
        rounded.store(values.load().to(self.out_dtype))
        self.publish(outlet, rounded, at, stage, group, WARPGROUP_THREADS, sizes)

    def load_tile(self, at: Any, group: StoreGroup, sizes: Sizes, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the epilogue reads, for each of a tile's boxes that lie side by side; those below have the same. Of an
        m-major result for each of those that lie below each other."""
        boxes = range(self.boxes_n) if self.c_major == "n" else range(0, self.boxes, self.boxes_n)
        return tuple(self.load_terms(self.box_at(at, box), group, sizes, args) for box in boxes)

    def own_terms(self, loaded: tuple[Any, ...], box: int) -> Any:
        """Of what `load_tile` loaded, a box's part."""
        return loaded[box % self.boxes_n if self.c_major == "n" else box // self.boxes_n]

    def load_terms(self, at: Any, group: StoreGroup, sizes: Sizes, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for the box `at` (m, n, l)."""
        if self.c_major == "n":
            first, size = at[1] * self.store_cols + group.tidx % 4 * 2, sizes.n
        else:
            row = self.slab_row(group.tidx // 32 * 16 + group.tidx % 32 // 4)
            first, size = at[0] * self.store_rows + row, sizes.m
        return self.epilogue.load(self.runs(), first, size, args)

    def runs(self) -> tuple[Run, ...]:
        """Where a thread's values of a box lie."""
        elements = self.store_rows * self.store_cols // WARPGROUP_THREADS
        if self.c_major == "n":
            return fragment_runs(elements, 2 if self.store_kind == "tma" else 1)
        return fragment_row_runs(elements, self.slab_row(8) - self.slab_row(0), self.stores_pairs)

    def slab_row(self, row: Any) -> Any:
        """Row of the slab that a wgmma's `row` multiplies."""
        return row if self.fragments is None else self.fragments.slab_rows()(row)

    def outlet(self, out: Any, mC: cute.Tensor, sC: cute.Tensor, mma: cute.TiledMma, group: StoreGroup) -> Outlet:
        """One warpgroup's way out, box by box; stmatrix where elements have 16 bits and TMA stores them. `mma`: of one
        warpgroup."""
        if cutlass.const_expr(self.by_rows):
            return self.row_outlet(out, mC, sC, group, WARPGROUP_THREADS)
        if cutlass.const_expr(self.stores_pairs):
            return self.pair_outlet(out, mC, sC, group)
        enum = LayoutEnum.ROW_MAJOR if cutlass.const_expr(self.c_major == "n") else LayoutEnum.COL_MAJOR
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(self.c_major == "m", 4), self.out_dtype)
        r2s = cute.make_tiled_copy_S(
            sm90.get_smem_store_op(enum, self.out_dtype, self.acc_dtype),
            cute.make_tiled_copy_C_atom(stmatrix, mma),
        )
        own = self.own_boxes(sC, group.idx)
        Rs = r2s.get_slice(group.tidx).partition_D(self.slab(own))  # (R2S, R2S_M, R2S_N, stage)
        return Outlet(r2s, Rs, own, out, mC)

    def own_boxes(self, sC: cute.Tensor, group_idx: Any) -> cute.Tensor:
        """A warpgroup's part of the store buffers: (store_rows, store_cols, stage)."""
        return cute.local_tile(sC, (self.store_rows, self.store_cols), (group_idx, 0, None))

    def slab(self, own: cute.Tensor) -> cute.Tensor:
        """The same in the order of its wgmmas' rows."""
        return own if self.fragments is None else cute.composition(own, (self.fragments.slab_rows(), None, None))

    def fragments_of(self, variant: Variant) -> WordFragments | ByteFragments | None:
        """How threads pick A's fragments, if it comes from registers."""
        if not reads_a_from_registers(variant.a_dtype, variant.a_major, variant.target):
            return None
        if self.a_dtype.width == 8:
            return ByteFragments(self.tile, self.stages, self.side_by_side)
        # row_store and the transposing stmatrix take 8 rows at a time
        follows = not (self.by_rows or (self.c_major == "m" and self.out_dtype.width < 32))
        return WordFragments(self.tile, self.stages, self.side_by_side, follows)

    def pair_outlet(self, out: Any, mC: cute.Tensor, sC: cute.Tensor, group: StoreGroup) -> Outlet:
        """The same where a thread's rows r and r + 8 lie side by side in an m-major result, and leave as one.

        A thread's columns are pairs, every 8, between which no swizzle changes: two registers have all its addresses.
        """
        assert self.fragments is not None  # whose rows these are
        lane, warp_idx = group.tidx % 32, group.tidx // 32
        row, col = self.fragments.slab_rows()(16 * warp_idx + lane // 4), lane % 4 * 2
        elem_bytes, box = self.out_dtype.width // 8, self.store_rows * self.buffer_cols
        span, chunk = self.store_span_bytes // elem_bytes, CHUNK_BYTES // elem_bytes

        def place(col: Any) -> Any:
            first = row // span * (span * self.buffer_cols) + col * span
            return first + swizzled(row % span // chunk, col, self.store_span_bytes) * chunk + row % chunk

        to_next = cute.assume(place(col + 1) - place(col), divby=2)
        layout = cute.make_layout(
            (2, 2, self.store_cols // 8, self.store_buffers), stride=(1, to_next, 8 * span, self.store_groups * box)
        )
        base = cute.recast_ptr(sC.iterator, swizzle_=None) + (group.idx * box + place(col))
        Rs = cute.make_tensor(base.align(2 * elem_bytes), layout)  # (row, column of a pair, pair, stage)
        two = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out_dtype, num_bits_per_copy=16 * elem_bytes)
        return Outlet(two, Rs, self.own_boxes(sC, group.idx), out, mC)

    def store_group(self, tidx: Int32) -> StoreGroup:
        idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        own = tidx % WARPGROUP_THREADS
        return StoreGroup(idx, own, cute.arch.make_warp_uniform(own // 32) == 0, STORE_BARRIER + idx)

    def values_of(self, flat: cute.Tensor, box: int) -> cute.Tensor:
        """A copy of the accumulator's `box`-th box: a thread's pairs of columns, every 8, of rows r and r + 8; of both
        rows first one column and then the other where they leave as one."""
        count = cute.size(flat) // self.boxes
        values = cute.make_rmem_tensor(count, self.acc_dtype)
        for i in range(count):
            values[i] = flat[box * count + (i // 4 * 4 + i % 2 * 2 + i // 2 % 2 if self.stores_pairs else i)]
        return values

    def first_box(self, walk: Walk, tile_idx: Uint32, group_idx: Int32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) in boxes of a warpgroup's first box of a tile; the shuffles keep it where it is called."""
        m_idx, n_idx, l_idx = (cute.arch.make_warp_uniform(i) for i in walk.tile_of(self.tile, tile_idx))
        slabs = self.tile.cta_m // self.store_rows
        return m_idx * slabs + group_idx % self.side_by_side, n_idx * self.boxes_n, l_idx

    def own_items(self, walk: Walk, group_idx: Int32) -> tuple[Uint32, Uint32]:
        """The first item that a warpgroup multiplies, and the step to its next."""
        if cutlass.const_expr(self.tile.pingpong):
            return walk.first + Uint32(group_idx) * walk.step, 2 * walk.step
        return walk.first, walk.step

    def box_at(self, at: Any, box: Any) -> Any:
        """(m, n, l) in boxes of a warpgroup's `box`-th box; `at` has its first. Slabs lie side by side in turns."""
        return at[0] + box // self.boxes_n * self.side_by_side, at[1] + box % self.boxes_n, at[2]
