"""A residual in the store of the Hopper GEMM: a warp that carries boxes, and what the consumers do with them.

A warpgroup's store buffers hold the boxes of its next tile's residual, which its residual warp loads during the main
loop (all of them, or the first: `tile.store_buffers`). At a tile's end the warpgroup takes box after box: it adds
what is there, rounds, and writes the result where the residual was. The residual warp stores that, and loads the next
residual into the buffer once its store has read it. So no consumer waits for a store, and a result leaves during the
next tile's main loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.nvgpu import cpasync, warp

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.gemm import Outlet, StoreGroup, Walk
from jax_bwgemm.kernels.sm90_store import Sm90Store


class Handover(NamedTuple):
    """Barriers between a warpgroup and its residual warp, one of each for a buffer."""

    loaded: cute.Pointer
    summed: cute.Pointer


class Addend(NamedTuple):
    """The way of a residual into a thread's registers: `s2r` from Rs, its part of the store buffers."""

    s2r: Any
    Rs: cute.Tensor


class Sm90Residual(Sm90Store):
    """The residual warps, and a store that adds what they have loaded."""

    def init_handovers(self, barriers: cute.Pointer) -> None:
        """By one thread."""
        for i in range(self.store_groups * self.store_buffers):
            cute.arch.mbarrier_init(barriers + 2 * i, 1)
            cute.arch.mbarrier_init(barriers + (2 * i + 1), pipelines.residual_summed_arrivals())

    def handover(self, barriers: cute.Pointer, group_idx: Int32) -> Handover:
        """A warpgroup's own; the barriers of a buffer lie side by side."""
        own = barriers + group_idx * (2 * self.store_buffers)
        return Handover(own, own + 1)

    @cute.jit
    def carry(
        self,
        tma_r: cute.CopyAtom,
        out: cute.CopyAtom,
        mC: cute.Tensor,
        sC: cute.Tensor,
        barriers: cute.Pointer,
        walk: Walk,
        group_idx: Int32,
    ) -> None:
        """The residual warp of a warpgroup: its residual into the buffers, its result out of them."""
        handover = self.handover(barriers, group_idx)
        own = self.own_boxes(sC, group_idx)
        buffers = self.store_buffers
        ahead = pipelines.residual_stores_in_flight(buffers)
        phase = Int32(0)
        idx, step = self.own_items(walk, group_idx)
        idx = self.end_from(walk, idx)
        at = self.first_box(walk, walk.item_of(idx).tile_idx, group_idx)
        if idx < walk.num_items:
            for box in cutlass.range_constexpr(buffers):
                self.load_box(tma_r, mC, own, handover, self.box_at(at, box), box)
        while idx < walk.num_items:
            next_idx = self.end_from(walk, idx + step)
            next_at = self.first_box(walk, walk.item_of(next_idx).tile_idx, group_idx)
            for i in cutlass.range_constexpr(self.boxes + ahead):
                if cutlass.const_expr(i < self.boxes):
                    cute.arch.mbarrier_wait(handover.summed + 2 * (i % buffers), phase ^ (i // buffers % 2))
                    self.store_box(out, mC, own, self.box_at(at, i), i % buffers)
                box = cutlass.const_expr(i - ahead)  # its buffer is next
                if cutlass.const_expr(box >= 0):
                    cute.arch.cp_async_bulk_wait_group(min(ahead, self.boxes - 1 - box), read=True)
                    if cutlass.const_expr(box + buffers < self.boxes):
                        later = self.box_at(at, box + buffers)
                        self.load_box(tma_r, mC, own, handover, later, box % buffers)
                    elif next_idx < walk.num_items:
                        later = self.box_at(next_at, box + buffers - self.boxes)
                        self.load_box(tma_r, mC, own, handover, later, box % buffers)
            phase = phase ^ (self.boxes // buffers % 2)
            idx, at = next_idx, next_at

    @cute.jit
    def end_from(self, walk: Walk, idx: Uint32) -> Uint32:
        """The first item from `idx` on that ends a tile: of a cluster's pieces of a stream, only the first may not."""
        if cutlass.const_expr(self.tile.stream_k):  # noqa: SIM102 (a compile-time condition stands alone)
            if not walk.item_of(idx).is_end:
                idx += walk.step
        return idx

    @cute.jit
    def load_box(
        self,
        tma_r: cute.CopyAtom,
        mC: cute.Tensor,
        own: cute.Tensor,
        handover: Handover,
        at: Any,
        stage: cutlass.Constexpr,
    ) -> None:
        """The residual's box (m, n, l) -> buffer `stage`."""
        barrier = handover.loaded + 2 * stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.residual_bytes)
        Rs, Rg = self.tma_parts(tma_r, mC, own, at)
        cute.copy(tma_r, Rg, Rs[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def store_box(
        self, out: cute.CopyAtom, mC: cute.Tensor, own: cute.Tensor, at: Any, stage: cutlass.Constexpr
    ) -> None:
        """Buffer `stage` -> the result's box (m, n, l)."""
        Cs, Cg = self.tma_parts(out, mC, own, at)
        cute.copy(out, Cs[None, stage], Cg)
        cute.arch.cp_async_bulk_commit_group()

    def tma_parts(self, atom: cute.CopyAtom, mC: cute.Tensor, own: cute.Tensor, at: Any) -> tuple[Any, Any]:
        """All buffers, and the box (m, n, l) in global memory, as the atom moves them."""
        gC = cute.local_tile(mC, (self.store_rows, self.store_cols), at)
        smem, gmem = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(own, 0, 2), cute.group_modes(gC, 0, 2)
        )
        return smem, gmem

    @cute.jit
    def store_sums(
        self,
        acc: cute.Tensor,
        outlet: Outlet,
        addend: Addend,
        handover: Handover,
        phase: Int32,
        loaded: tuple[Any, ...],
        args: tuple[Any, ...],
    ) -> None:
        """Registers -> epilogue, plus the residual -> the box where that was, box after box."""
        flat = cute.coalesce(acc)
        for box in cutlass.range_constexpr(self.boxes):
            stage = cutlass.const_expr(box % self.store_buffers)
            values = self.values_of(flat, box)
            self.epilogue.apply(values, self.runs(), self.own_terms(loaded, box), args)
            cute.arch.mbarrier_wait(handover.loaded + 2 * stage, phase ^ (box // self.store_buffers % 2))
            own = addend.Rs[None, None, None, stage]
            terms = cute.make_rmem_tensor(own.shape, self.out_dtype)
            cute.copy(addend.s2r, own, terms)
            self.add(values, terms)
            rounded = cute.make_rmem_tensor(cute.shape(outlet.Rs)[:3], self.out_dtype)
            rounded.store(values.load().to(self.out_dtype))
            cute.arch.sync_warp()  # every lane has read what others overwrite
            cute.copy(outlet.r2s, rounded, outlet.Rs[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(handover.summed + 2 * stage)

    def addend(self, outlet: Outlet, sC: cute.Tensor, group: StoreGroup) -> Addend:
        """The way in, by the very layout of the way out: ldmatrix where that has stmatrix."""
        if cutlass.const_expr(self.stores_pairs):
            return Addend(outlet.r2s, outlet.Rs)
        op = cute.nvgpu.CopyUniversalOp()
        if cutlass.const_expr(self.out_dtype.width == 16):
            op = warp.LdMatrix8x8x16bOp(self.c_major == "m", 4)
        s2r = cute.make_tiled_copy_S(cute.make_copy_atom(op, self.out_dtype), outlet.r2s)
        return Addend(s2r, s2r.get_slice(group.tidx).partition_S(self.slab(self.own_boxes(sC, group.idx))))
