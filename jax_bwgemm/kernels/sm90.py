"""Hopper GEMM: warp-specialised, persistent, TMA + wgmma.

Timetable of a CTA (1 + W warpgroups, W = 1 to 3 consumers):

    warpgroup 0, warp 3   load      TMA of A and B into the stages, for one tile after the other
    its first W warps     residual  with a residual, one for each consumer: TMA of its boxes into the store buffers,
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

Where the rows of B cannot be dealt to all CTAs that share it, the first of a column load it for all (`b_loaders`); the
others expect the same bytes, and empty their stages for the same ones.

The load warp runs ahead into the next tile while the consumers store. Where registers hold the sums and a rounded
result (`defers_store`), a tile is only rounded at its end, and its boxes leave one by one during the next tile's main
loop: each behind the wgmmas of a stage, which run meanwhile; the rest after a main loop of fewer stages than boxes.
Where TMA cannot step over the result's rows, each of the consumers' warps stores its own and waits for no other
(`row_store`). What the epilogue reads of a thread's columns, or of its rows where the result is m-major (a bias), is
loaded beside the last wgmmas, in the registers of held boxes: the rest of these leaves before. A stream-K loads it once
the other parts are added, which need those registers; a split along k for each box that it adds.

With a residual, `loaded` and `summed` are in the place of `store` (`sm90_residual`): the buffers hold the residual of
the next tile, or the first of its boxes, when its sums are done. Nothing is held in registers then.

How several consumers divide the work:

    cooperative   the slabs of every tile are dealt to them in turn; neither waits for the other
    ping-pong     the tiles are, to two; one issues wgmmas for its tile only in its turn, and passes the turn (a named
                  barrier: it arrives, the other waits) once the last are on their way. So one stores while the other
                  multiplies. Consecutive tiles take consecutive stages, so each skips those of the other's tiles. The
                  turn is passed only to a tile that exists: every arrival is waited for

A split along k adds the barriers of `split_k`: once all consumers have read the last stage (`PARTS_BARRIER`) they leave
their accumulators there; the load warp waits for `drained` after each tile. Every warp passes griddepcontrol.wait
before it touches global memory; the load warp releases the next kernel when its last load is on its way. Stream-K
adds the flags of `stream_k`, between the last stage of a piece and its store.

Here is the kernel, with its load role and its multiply role. That one calls the parts in one direction: the main loops
of `sm90_loop` on the operands of `sm90_wgmma`, then a store of `sm90_store` or of `sm90_residual`, which has the
residual role, too. Which tiles and boxes are whose, `sm90_deal` says; what leaves, leaves by an outlet.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels import pipelines, split_k
from jax_bwgemm.kernels.box_epilogue import BoxEpilogue
from jax_bwgemm.kernels.gemm import facts_of
from jax_bwgemm.kernels.load import feeds, keep_full
from jax_bwgemm.kernels.outlets import store_group
from jax_bwgemm.kernels.params import Hints, Maps, Order, Params, Shares, Sizes, StreamParams
from jax_bwgemm.kernels.sm90_deal import PARTS_BARRIER, STORE_BARRIER, WARPGROUP_THREADS, Deal, Hand
from jax_bwgemm.kernels.sm90_fragments import fragments_of, slab_rows_of
from jax_bwgemm.kernels.sm90_loop import DescriptorLoop, RegisterLoop
from jax_bwgemm.kernels.sm90_residual import ResidualRole, handover_of, init_handovers, residual_store
from jax_bwgemm.kernels.sm90_store import Backlog, SplitStore, Sums, WayOut, WgmmaValues, store_sums
from jax_bwgemm.kernels.sm90_wgmma import Wgmma
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.start import enter
from jax_bwgemm.kernels.stream_k import Exchange
from jax_bwgemm.kernels.walk import Walk, walk_of

LOAD_WARP = 3  # of warpgroup 0; its warp 0 makes the barriers
SM_REGISTERS = 65536  # CUDA C++ programming guide, technical specifications, 9.0; one CTA has them all


def load_registers(warpgroups: int) -> int:
    """Of a thread of the load warpgroup, by setmaxnreg, beside so many consumers."""
    return 40 if warpgroups <= 2 else 32


def multiply_registers(warpgroups: int) -> int:
    """Of a consumer thread, by setmaxnreg: what the load warpgroup leaves, in its steps of 8 and at most 240."""
    rest = SM_REGISTERS // WARPGROUP_THREADS - load_registers(warpgroups)
    return min(240, rest // warpgroups // 8 * 8)


def load_atom(operand: cute.Tensor, one_stage: Any, box: tuple[int, int], sharing: int) -> cute.CopyAtom:
    """What A or B is loaded through, a part of each box by each of so many CTAs that share it."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharing > 1 else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, operand, one_stage, box, num_multicast=sharing)[0]


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the roles meet in: stages, store buffers, and the barriers of the timetable. `residual`: those between
    residual and multiply, if there is one."""

    sA: cute.Tensor
    sB: cute.Tensor
    sC: cute.Tensor
    ab: pipeline.PipelineTmaAsync
    residual: Any
    split: KSplit


class Sm90Gemm:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        facts = self.facts = facts_of(variant)
        self.stages, self.epilogue = facts.stages, facts.epilogue
        self.deal = Deal(facts.tile, facts.boxes)
        fragments = fragments_of(facts, self.deal.side_by_side)
        self.rows = slab_rows_of(fragments, facts.boxes.c_major)
        self.wgmma = Wgmma(facts, self.deal, fragments)
        self.way_out = WayOut(facts, self.rows)
        self.residual = ResidualRole(facts)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        sizes: Sizes,
        order: Order,
        hints: Hints,
        shares: Shares,
        workspace: cute.Pointer,
        token: Int64,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Makes TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces this
        host code; a test compares what both pack. Flat, for the DSL's C header takes no tuple of several types."""
        facts, tile = self.facts, self.facts.tile
        a_smem = cute.slice_(self.wgmma.smem_layouts()[0], (None, None, 0))
        tma_a = load_atom(a, a_smem, (tile.cta_m, tile.k_tile), tile.cluster_n)
        b_box = (tile.out_n, tile.k_tile)
        tma_bs = [load_atom(b, self.wgmma.b_stage_layout(), b_box, facts.b_loaders) for _ in range(tile.num_bs)]
        matrices = [facts.boxes.load_atom(c) for _ in range(facts.moves.matrices)]
        maps = Maps(tma_a, tuple(tma_bs), facts.store_atoms(c), tuple(matrices))
        self.tma_boxes = maps.boxes(facts.boxes.store)
        stream = None
        if cutlass.const_expr(tile.stream_k):
            stream = StreamParams(shares, workspace, token)
        params = Params(maps, sizes, order, hints, stream, facts.epilogue_args(alpha, bias))
        self.kernel(params).launch(
            grid=facts.cluster, block=(facts.threads, 1, 1), cluster=facts.cluster, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, params: Params) -> None:
        facts, tile, deal, maps = self.facts, self.facts.tile, self.deal, params.maps
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for atom in maps.moved(facts.boxes.store):
                cpasync.prefetch_descriptor(atom)

        a_smem, b_smem = self.wgmma.smem_layouts()
        c_smem = facts.boxes.layout(facts.boxes.groups, facts.boxes.buffers * facts.boxes.planes)
        allocator = cutlass.memory.SmemAllocator()
        barriers = allocator.allocate_array(Int64, 2 * facts.stages)
        written = allocator.allocate_array(Int64, 1)
        drained = allocator.allocate_array(Int64, 1)
        residual_barriers = None
        if cutlass.const_expr(facts.moves.matrices):
            residual_barriers = allocator.allocate_array(Int64, 2 * facts.boxes.groups * facts.boxes.buffers)
        sA = allocator.allocate_tensor(facts.a_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(facts.b_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(facts.boxes.dtype, c_smem.outer, 1024, c_smem.inner)
        parts = cute.recast_ptr(sA.iterator, swizzle_=None, dtype=facts.acc_dtype)

        threads = pipeline.Agent.Thread
        ab = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=facts.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.hopper_empty_arrivals(tile)),
            tx_count=facts.full_bytes,
            cta_layout_vmnk=cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1)),
            defer_sync=True,
        )
        if cutlass.const_expr(tile.cluster_k > 1):  # noqa: SIM102 (a compile-time condition stands alone)
            if warp_idx == 0:
                with cute.arch.elect_one():
                    split_k.init_barriers(written, drained, tile, deal.warpgroups * pipelines.WARPS_PER_WARPGROUP)
        if cutlass.const_expr(facts.moves.matrices):  # noqa: SIM102
            if warp_idx == 0:
                with cute.arch.elect_one():
                    init_handovers(residual_barriers, deal)
        pipeline.pipeline_init_arrive(cluster_shape_mn=facts.cluster, is_relaxed=True)
        walk = walk_of(tile, params)
        split = KSplit(tile, walk.x, deal.threads, parts, written, drained)
        shared = Shared(sA, sB, sC, ab, residual_barriers, split)

        if warp_idx < pipelines.WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(load_registers(deal.warpgroups))
            if warp_idx == LOAD_WARP:
                self.load(params, shared, walk)
            else:
                enter(facts.cluster)
                if cutlass.const_expr(facts.moves.matrices):  # noqa: SIM102
                    if warp_idx < deal.warpgroups:
                        self.residual.run(params, sC, residual_barriers, Hand(deal, walk, warp_idx))
        else:
            enter(facts.cluster)
            cute.arch.setmaxregister_increase(multiply_registers(deal.warpgroups))
            self.multiply(params, shared, walk)

    @cute.jit
    def load(self, params: Params, shared: Shared, walk: Walk) -> None:
        """The load warp: its part of A and B (all of it where no CTA shares it) into the stages."""
        tile, maps, loaders = self.facts.tile, params.maps, self.facts.b_loaders
        mA, mB, _ = self.facts.coordinate_tensors(params.sizes)
        gA = cute.local_tile(mA, (tile.cta_m, tile.k_tile), (None, None, None))  # (cta_m, k_tile, Mt, Kt, l)
        gB = cute.local_tile(mB, (tile.out_n, tile.k_tile), (None, None, None))  # (out_n, k_tile, Nt, Kt, l)
        sA = cute.group_modes(shared.sA, 0, 2)
        As, Ag = cpasync.tma_partition(
            maps.a, walk.y, cute.make_layout(tile.cluster_n), sA, cute.group_modes(gA, 0, 2)
        )  # (TMA, stage), (TMA, m tiles, k tiles, l)
        parts, columns = cute.make_layout(loaders), cute.group_modes(gB, 0, 2)
        part = walk.x % loaders if cutlass.const_expr(loaders < tile.cluster_m) else walk.x
        bs = [
            cpasync.tma_partition(atom, part, parts, cute.group_modes(sB, 0, 2), columns)
            for atom, sB in zip(maps.b, self.wgmma.b_parts(shared.sB), strict=True)
        ]  # of each: (TMA, stage), (TMA, n tiles, k tiles, l)
        keep_full(feeds(params, walk, (As, Ag), bs), shared.ab, self.facts, walk, shared.split)

    @cute.jit
    def multiply(self, params: Params, shared: Shared, walk: Walk) -> None:
        """A consumer warpgroup: main loop on its slabs of its tiles, then its own part of the store."""
        facts, tile, deal = self.facts, self.facts.tile, self.deal
        tidx = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        group = store_group(tidx, WARPGROUP_THREADS, STORE_BARRIER)
        hand = Hand(deal, walk, group.idx)
        a, b = self.wgmma.operands(shared.sA, shared.sB, group)
        acc = self.wgmma.accumulator()
        values = WgmmaValues(facts.boxes, self.rows, group)
        sums = Sums(deal, self.rows, BoxEpilogue(facts.epilogue, facts.boxes, values, params))
        outlets = self.way_out.outlets(params, shared.sC, self.wgmma.tiled(1), group)
        outlet = outlets[0]
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, facts.stages)
        held = None
        if cutlass.const_expr(facts.defers_store):
            held = cute.make_rmem_tensor(cute.size(acc) // tile.num_bs, facts.boxes.dtype)
            held.fill(0)
        backlog = Backlog(deal, outlets, held)
        exchange = Exchange(walk, group, deal.warpgroups, tidx)
        make_loop = RegisterLoop if cutlass.const_expr(facts.a_in_registers) else DescriptorLoop
        loop = make_loop(facts, self.wgmma, a, b, shared.ab, hand, backlog)
        held_at, box = (Int32(0), Int32(0), Int32(0)), Int32(deal.num_boxes)  # the next of the backlog: none is left
        phase = Int32(0)
        idx, step = hand.items()
        if cutlass.const_expr(tile.pingpong):  # noqa: SIM102
            if group.idx == 1:
                read.advance(walk.k_count)
        while idx < walk.num_items:
            item = walk.item_of(idx)
            if cutlass.const_expr(tile.cluster_k > 1):
                at = hand.first_box(item.tile_idx)
                if walk.k_count > 0:
                    read, last, at, box = loop.run(acc, read, item, held_at, box)
                    loop.finish_sums(last, read)
                cute.arch.barrier(barrier_id=PARTS_BARRIER, number_of_threads=deal.threads)
                SplitStore(sums, outlet, shared.split, tidx).store(acc, at, phase, walk)
                phase = phase ^ 1
            else:
                hand.take_turn(idx)
                read, last, at, box = loop.run(acc, read, item, held_at, box)
                hand.pass_turn(idx)
                early = cutlass.const_expr(facts.epilogue.reads and not tile.stream_k)
                if cutlass.const_expr(early):
                    box = backlog.store_rest(held_at, box)
                loaded = sums.begin(at) if early else ()
                loop.finish_sums(last, read)
                if cutlass.const_expr(tile.pingpong):
                    read.advance(walk.k_count)  # past the other's stages
                box = backlog.store_rest(held_at, box)
                if not item.is_end:
                    exchange.leave(acc)
                else:
                    exchange.add(acc, item.parts)
                    terms = loaded if early else sums.begin(at)
                    if cutlass.const_expr(facts.moves.matrices):
                        handover = handover_of(shared.residual, hand)
                        store = residual_store(sums, outlets, shared.sC, handover, facts.moves.matrices)
                        store.store(acc, at, phase, terms)
                        phase = phase ^ (deal.num_boxes // facts.boxes.buffers % 2)
                    elif cutlass.const_expr(facts.defers_store):
                        backlog.hold(sums, acc, at, terms)
                        held_at, box = at, Int32(0)
                    else:
                        store_sums(sums, outlets, acc, at, terms)
            idx += step
        backlog.store_rest(held_at, box)
        outlet.finish()
