"""Matrices that the epilogue reads, such as a residual, in the store of the Hopper GEMM: a warp that carries boxes, and
what the consumers do with them.

A warpgroup's store buffers hold the boxes of its next tile's matrices, which its residual warp loads during the main
loop (all of them, or the first: `tile.store_buffers`). At a tile's end the warpgroup takes box after box: it reads
what is there, and writes the rounded results where that was. The residual warp stores those, and loads the next
matrices into the buffers once its stores have read them. So no consumer waits for a store, and results leave during the
next tile's main loop. A place has as many buffers side by side as it has matrices or results (`boxes.planes`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warp

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.boxes import TmaParts
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.mirror import Image, images_of
from jax_bwgemm.kernels.outlets import Outlet, TmaOutlet, of_outlet, round_box
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.sm90_deal import Deal, Hand
from jax_bwgemm.kernels.sm90_store import Sums


@dataclasses.dataclass(frozen=True)
class Handover:
    """Barriers between a warpgroup and its residual warp: of each buffer `loaded` and `summed`, side by side."""

    loaded: cute.Pointer
    summed: cute.Pointer


def handover_of(barriers: cute.Pointer, hand: Hand) -> Handover:
    """A warpgroup's own, of `barriers` for all."""
    own = barriers + hand.group_idx * (2 * hand.deal.boxes.buffers)
    return Handover(own, own + 1)


def init_handovers(barriers: cute.Pointer, deal: Deal) -> None:
    """By one thread."""
    for i in range(deal.boxes.groups * deal.boxes.buffers):
        cute.arch.mbarrier_init(barriers + 2 * i, 1)
        cute.arch.mbarrier_init(barriers + (2 * i + 1), pipelines.residual_summed_arrivals())


@dataclasses.dataclass(frozen=True)
class Carrier:
    """What a residual warp moves boxes with, between its warpgroup's buffers and the matrices that are read, and the
    results, of which one may have a mirror image."""

    facts: GemmFacts
    matrices: tuple[TmaParts, ...]
    results: tuple[TmaParts, ...]
    handover: Handover
    images: tuple[Image, ...]

    @cute.jit
    def load(self, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        """The matrices' boxes `at` -> a place's buffers."""
        barrier, boxes = self.handover.loaded + 2 * buffer, self.facts.boxes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.facts.residual_bytes)
        for i in cutlass.range_constexpr(len(self.matrices)):
            self.matrices[i].load(buffer * boxes.planes + i, at, barrier)

    @cute.jit
    def store(self, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        """A place's buffers -> the results' boxes `at`."""
        boxes = self.facts.boxes
        for i in cutlass.range_constexpr(self.facts.moves.results):
            if cutlass.const_expr(len(self.images) == 1 and i == 1):
                self.images[0].send(at, buffer * boxes.planes + i)
            else:
                self.results[i].store(buffer * boxes.planes + i, at)
        cute.arch.cp_async_bulk_commit_group()


@dataclasses.dataclass(frozen=True)
class ResidualRole:
    """The residual warp of a warpgroup."""

    facts: GemmFacts

    @cute.jit
    def run(self, params: Params, sC: cute.Tensor, barriers: cute.Pointer, hand: Hand) -> None:
        """The matrices into the warpgroup's buffers, its results out of them."""
        deal, walk = hand.deal, hand.walk
        handover = handover_of(barriers, hand)
        matrix, policy = self.facts.coordinate_tensors(params.sizes)[2], params.hints.c_policy
        images = images_of(self.facts, params, sC, hand.group_idx)
        outs = params.maps.c[: len(params.maps.c) - len(images)]
        matrices, results = (
            tuple(deal.boxes.tma_parts(atom, sC, hand.group_idx, matrix, policy) for atom in atoms)
            for atoms in (params.maps.r, outs)
        )
        carrier = Carrier(self.facts, matrices, results, handover, images)
        buffers = deal.boxes.buffers
        ahead = pipelines.residual_stores_in_flight(buffers)
        phase = Int32(0)
        idx, step = hand.items()
        idx = hand.end_from(idx)
        at = hand.first_box(walk.item_of(idx).tile_idx)
        if idx < walk.num_items:
            for box in cutlass.range_constexpr(buffers):
                carrier.load(deal.box_at(at, box), box)
        while idx < walk.num_items:
            next_idx = hand.end_from(idx + step)
            next_at = hand.first_box(walk.item_of(next_idx).tile_idx)
            for i in cutlass.range_constexpr(deal.num_boxes + ahead):
                if cutlass.const_expr(i < deal.num_boxes):
                    cute.arch.mbarrier_wait(handover.summed + 2 * (i % buffers), phase ^ (i // buffers % 2))
                    carrier.store(deal.box_at(at, i), i % buffers)
                box = cutlass.const_expr(i - ahead)  # its buffer is next
                if cutlass.const_expr(box >= 0):
                    cute.arch.cp_async_bulk_wait_group(min(ahead, deal.num_boxes - 1 - box), read=True)
                    if cutlass.const_expr(box + buffers < deal.num_boxes):
                        carrier.load(deal.box_at(at, box + buffers), box % buffers)
                    elif next_idx < walk.num_items:
                        carrier.load(deal.box_at(next_at, box + buffers - deal.num_boxes), box % buffers)
            phase = phase ^ (deal.num_boxes // buffers % 2)
            idx, at = next_idx, next_at


@dataclasses.dataclass(frozen=True)
class ResidualStore:
    """What a consumer thread does with matrices. `s2r` takes them from Rs (S2R, S2R_M, S2R_N, buffer), the thread's
    part of the store buffers, by the very layout of the way out: ldmatrix where that has stmatrix. `count`: of them."""

    sums: Sums
    outlets: tuple[TmaOutlet, ...]
    handover: Handover
    s2r: Any
    Rs: cute.Tensor
    count: int

    @cute.jit
    def store(self, acc: cute.Tensor, at: Any, phase: Int32, loaded: tuple[Any, ...]) -> None:
        """Registers -> epilogue, with the matrices -> the boxes where those were, place after place."""
        sums, outlets, deal = self.sums, self.outlets, self.sums.deal
        buffers, planes = deal.boxes.buffers, deal.boxes.planes
        flat = cute.coalesce(acc)
        for box in cutlass.range_constexpr(deal.num_boxes):
            buffer = cutlass.const_expr(box % buffers)
            matrices = functools.partial(self.matrices, buffer, phase ^ (box // buffers % 2))
            results = sums.finish(flat, at, box, loaded, matrices)
            rounded = [round_box(result, outlets[0]) for result in results]
            cute.arch.sync_warp()  # every lane has read what others overwrite
            for i in cutlass.range_constexpr(len(outlets)):
                outlet = outlets[i]
                own = of_outlet(rounded[i % len(rounded)], outlet)
                cute.copy(outlet.r2s, own, outlet.Rs[None, None, None, buffer * planes + i])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.handover.summed + 2 * buffer)

    def matrices(self, buffer: int, phase: Int32) -> tuple[cute.Tensor, ...]:
        """A thread's registers of each, once they are there."""
        boxes = self.sums.deal.boxes
        cute.arch.mbarrier_wait(self.handover.loaded + 2 * buffer, phase)
        found = []
        for i in range(self.count):
            own = self.Rs[None, None, None, buffer * boxes.planes + i]
            terms = cute.make_rmem_tensor(own.shape, boxes.dtype)
            cute.copy(self.s2r, own, terms)
            found.append(terms)
        return tuple(found)


def residual_store(
    sums: Sums, outlets: tuple[Outlet, ...], sC: cute.Tensor, handover: Handover, count: int
) -> ResidualStore:
    """`count`: of the matrices."""
    ways = tuple(outlet for outlet in outlets if isinstance(outlet, TmaOutlet))
    assert len(ways) == len(outlets)  # `legality`: where threads store, XLA adds a residual
    outlet = ways[0]
    boxes, group = outlet.boxes, outlet.group
    if sums.rows.leave_in_pairs:
        return ResidualStore(sums, ways, handover, outlet.r2s, outlet.Rs, count)
    op = warp.LdMatrix8x8x16bOp(boxes.c_major == "m", 4) if boxes.dtype.width == 16 else cute.nvgpu.CopyUniversalOp()
    s2r = cute.make_tiled_copy_S(cute.make_copy_atom(op, boxes.dtype), outlet.r2s)
    own = sums.rows.order(boxes.own(sC, group.idx))
    return ResidualStore(sums, ways, handover, s2r, s2r.get_slice(group.tidx).partition_S(own), count)
