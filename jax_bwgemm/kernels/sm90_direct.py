"""Hopper GEMM without TMA: a CTA for each tile, or a cluster of CTAs that divide its k (`Tile.direct`).

For small products, which take as long as their kernel's latencies: descriptors to fetch, barriers to initialise and to
agree upon. Here the first load leaves as soon as its address is known. And for operands whose rows TMA cannot step
over: with few columns, a product is one pass over the larger one, and one that pads it is two more.

Timetable of a CTA (W warpgroups, 1 or 2, each with 64 rows of the tile; all threads do the same):

    wait       griddepcontrol.wait, before global memory is touched
    fill       the first STAGES - 2 k tiles: cp.async, a group of each thread for each k tile (`direct_load`); of a
               short sum whose lines share sectors by way of the L1 cache
    release    griddepcontrol.launch_dependents; what the epilogue reads is loaded
    for each k tile
        its group has come: cp.async.wait_group of the thread's own; lines that start anywhere are realigned
        fence.proxy.async, for wgmma reads what the generic proxy has written
        the wgmmas of the k tile before the last are done: wgmma.wait_group 1
        barrier 0 of all threads: everybody's part of the k tile has come, and nobody reads the stage of the k tile
            before the last
        wgmmas of the k tile but for steps beyond a short k, a group
        fill of the k tile that is STAGES - 2 later, into that stage
    store      epilogue, rounding and store (`FragmentOutlet`); where CTAs divide k, each leaves its sums in its stages,
               and adds up and stores its boxes of all (`split_k`)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from jax_bwgemm.facts.resources import SWIZZLE_ATOM_BYTES, direct_ctas, exchange_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels import split_k
from jax_bwgemm.kernels.box_epilogue import BoxEpilogue
from jax_bwgemm.kernels.direct_load import CHUNK_ELEMS, Loader, lines_of, loader_of
from jax_bwgemm.kernels.gemm import facts_of
from jax_bwgemm.kernels.outlets import store_group
from jax_bwgemm.kernels.params import Hints, Maps, Order, Params, Shares, Sizes
from jax_bwgemm.kernels.row_store import WARP_LANES
from jax_bwgemm.kernels.sm90_deal import STORE_BARRIER, WARPGROUP_THREADS, Deal
from jax_bwgemm.kernels.sm90_fragments import slab_rows_of
from jax_bwgemm.kernels.sm90_store import SplitStore, Sums, WgmmaValues, store_sums
from jax_bwgemm.kernels.sm90_wgmma import Wgmma, wait_for_sums
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.thread_outlets import FragmentOutlet, fragment_outlet
from jax_bwgemm.kernels.walk import part_of

CACHED_TERMS = 128  # of a sum: up to so many, operands whose lines share sectors come by way of the L1 cache
IN_FLIGHT = 2  # k tiles whose stages wgmmas may be reading


@dataclasses.dataclass(frozen=True)
class Part:
    """What a CTA, the `z`-th that divides a tile's k, multiplies: `k_count` k tiles, perhaps none, from `k_first`."""

    k_first: Int32
    k_count: Int32
    z: Int32


def own_part(sizes: Sizes, l_idx: Int32, z: Int32, tile: Tile) -> Part:
    """Of the `l_idx`-th matrix, which may be of a part of k itself, the last one shorter or of none."""
    k_tiles = Int32(Uint32(sizes.k + (tile.k_tile - 1)) // tile.k_tile)
    first = cutlass.min(l_idx * sizes.k_step, k_tiles)
    left = k_tiles - first
    count = cutlass.select_(sizes.k_step > 0, cutlass.min(sizes.k_step, left), left)
    if tile.cluster_k == 1:
        return Part(first, count, Int32(0))
    of_cta, own_count = part_of(count, z, tile)
    return Part(first + of_cta, own_count, z)


class Sm90Direct:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        facts = self.facts = facts_of(variant)
        self.stages, self.epilogue = facts.stages, facts.epilogue
        self.deal = Deal(facts.tile, facts.boxes)
        self.rows = slab_rows_of(None, facts.boxes.c_major)
        self.wgmma = Wgmma(facts, self.deal, None)
        self.a_lines = lines_of(facts.tile, "a", variant.a_major, variant.a_dtype, facts.threads)
        self.b_lines = lines_of(facts.tile, "b", variant.b_major, variant.b_dtype, facts.threads)
        self.tma_boxes: tuple[tuple[int, ...], ...] = ()

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
        """Takes what `Sm90Gemm` takes: only types matter, for our launcher replaces this host code."""
        facts = self.facts
        maps = Maps(a.iterator, (b.iterator,), facts.store_atoms(c), ())
        params = Params(maps, sizes, None, hints, None, facts.epilogue_args(alpha, bias))
        self.kernel(params).launch(
            grid=facts.cluster,
            block=(facts.threads, 1, 1),
            cluster=facts.cluster,
            min_blocks_per_mp=direct_ctas(facts.tile, facts.boxes.c_major),
            preferred_smem_carveout=100,  # else the DSL asks the driver of a device how much there is
        )

    @cute.kernel
    def kernel(self, params: Params) -> None:
        facts, deal, split = self.facts, self.deal, self.facts.tile.cluster_k
        a_smem, b_smem = self.wgmma.smem_layouts()
        parts = self.a_lines.bytes, self.b_lines.bytes, self.a_lines.beside_bytes  # of a stage; and b's of the last
        allocator = cutlass.memory.SmemAllocator()
        stages = allocator.allocate(facts.stages * self.a_lines.stage_bytes, SWIZZLE_ATOM_BYTES)
        sA, sB = self.operand(stages, a_smem, facts.a_dtype), self.operand(stages + parts[0], b_smem, facts.b_dtype)
        beside_a, beside_b = stages + sum(parts[:2]), stages + sum(parts)
        tidx = cute.arch.thread_idx()[0]
        *along, z_idx = cute.arch.block_idx()
        m_idx, n_idx = along if facts.boxes.c_major == "m" else along[::-1]
        written, drained = None, None
        if cutlass.const_expr(split > 1):
            written, drained = allocator.allocate_array(Int64, 1), allocator.allocate_array(Int64, 1)
            if tidx == 0:
                split_k.init_barriers(written, drained, facts.tile, facts.threads // WARP_LANES)
            pipeline.pipeline_init_arrive(cluster_shape_mn=facts.cluster, is_relaxed=True)
        sizes, l_idx = params.sizes, z_idx // split
        part = own_part(sizes, l_idx, z_idx % split, facts.tile)
        tile = m_idx * facts.tile.cta_m, n_idx * facts.tile.mma_n, l_idx
        smem = (sA, beside_a), (sB, beside_b)
        cute.arch.griddepcontrol_wait()
        group = store_group(tidx, WARPGROUP_THREADS, STORE_BARRIER)
        values = WgmmaValues(facts.boxes, self.rows, group)
        sums = Sums(deal, self.rows, BoxEpilogue(facts.epilogue, facts.boxes, values, params))
        slabs = cutlass.const_expr(facts.tile.cta_m // facts.boxes.rows)
        at = m_idx * slabs + group.idx, n_idx * deal.boxes_n, l_idx
        sums_bytes = cutlass.const_expr(exchange_bytes(facts.tile))
        buffers = stages + sums_bytes  # in the stages, which no wgmma reads any more when sums are stored
        outlets = tuple(fragment_outlet(facts.boxes, group, buffers, out, params) for out in params.maps.c)
        operands, store = self.wgmma.operands(sA, sB, group), None
        if cutlass.const_expr(split > 1):
            own = cute.recast_ptr(stages, swizzle_=None, dtype=facts.acc_dtype)
            exchange = KSplit(facts.tile, Int32(0), facts.threads, own, written, drained)
            store = SplitStore(sums, outlets[0], exchange, tidx)
        if self.begins_on_chunks(sizes):
            loaders = self.loaders(params, smem, tile, tidx, True)
            self.compute(loaders, operands, sums, outlets, at, sizes.k, part, store, True)
        else:
            loaders = self.loaders(params, smem, tile, tidx, False)
            self.compute(loaders, operands, sums, outlets, at, sizes.k, part, store, False)

    @cute.jit
    def compute(
        self,
        loaders: tuple[Loader, Loader],
        operands: tuple[Any, Any],
        sums: Sums,
        outlets: tuple[FragmentOutlet, ...],
        at: Any,
        k: Int32,
        part: Part,
        store: Any,
        is_aligned: cutlass.Constexpr[bool],
    ) -> None:
        """Both operands' alignment is known or, for each, asked: two kernels in one, of which the first is short.
        `store`: a `SplitStore` where CTAs divide k."""
        facts, ahead = self.facts, cutlass.const_expr(self.facts.stages - IN_FLIGHT)
        first, k_tiles = part.k_first, part.k_count
        if (k <= CACHED_TERMS) & (loaders[0].is_torn | loaders[1].is_torn):
            self.fill_first(loaders, part, is_aligned, True)
        else:
            self.fill_first(loaders, part, is_aligned, False)
        cute.arch.griddepcontrol_launch_dependents()
        loaded = sums.begin(at) if cutlass.const_expr(store is None) else ()
        acc, mma = self.wgmma.accumulator(), self.wgmma.of_tile()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        acc.fill(0)
        stage, free = Int32(0), Int32(ahead)
        for k_idx in cutlass.range(k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            for i in cutlass.range_constexpr(2):
                loaders[i].realign(first + k_idx, stage, is_aligned)
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup.wait_group(1)
            cute.arch.sync_threads()
            warpgroup.fence()
            self.multiply(mma, acc, operands, stage, k)
            warpgroup.commit_group()
            if k_idx + ahead < k_tiles:
                self.fill(loaders, first + k_idx + ahead, free, is_aligned, False)
            cute.arch.cp_async_commit_group()
            stage = cutlass.select_(stage == facts.stages - 1, Int32(0), stage + 1)
            free = cutlass.select_(free == facts.stages - 1, Int32(0), free + 1)
        wait_for_sums(acc)
        if cutlass.const_expr(store is not None or outlets[0].has_buffers):
            cute.arch.sync_threads()  # no wgmma reads the stages any more
        if cutlass.const_expr(store is None):
            store_sums(sums, outlets, acc, at, loaded)
        else:
            pipeline.pipeline_init_wait(cluster_shape_mn=facts.cluster)  # all barriers are there
            store.store(acc, at, Int32(0), part)

    @cute.jit
    def fill_first(
        self,
        loaders: tuple[Loader, Loader],
        part: Part,
        is_aligned: cutlass.Constexpr[bool],
        is_cached: cutlass.Constexpr[bool],
    ) -> None:
        """The k tiles whose stages nobody has read yet, and a group for each, also for those that are not there."""
        ahead = cutlass.const_expr(self.facts.stages - IN_FLIGHT)
        count = cutlass.min(part.k_count, ahead)
        for k_idx in cutlass.range(count, unroll=1):
            self.fill(loaders, part.k_first + k_idx, k_idx, is_aligned, is_cached)
            cute.arch.cp_async_commit_group()
        for k_idx in cutlass.range_constexpr(ahead):
            if k_idx >= count:
                cute.arch.cp_async_commit_group()

    def fill(
        self, loaders: tuple[Loader, Loader], k_idx: Int32, stage: Int32, is_aligned: bool, is_cached: bool
    ) -> None:
        for loader in loaders:
            loader.fill(k_idx, stage, is_aligned, is_cached)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, acc: cute.Tensor, operands: tuple[Any, Any], stage: Int32, k: Int32) -> None:
        """A k tile's wgmmas, but for those of steps that lie beyond all of a short k: of 4096 x 8192 x 16 they would be
        a tenth of the time (H100)."""
        a, b = operands
        steps = cutlass.const_expr(cute.size(a, mode=[2]))
        for kb in cutlass.range_constexpr(steps):
            if kb * (self.facts.tile.k_tile // steps) < k:
                cute.gemm(mma, acc, a[None, None, kb, stage], b[None, None, kb, stage], acc)

    def operand(self, first: cute.Pointer, layout: Any, dtype: Any) -> cute.Tensor:
        """(m or n, k, stage), its first stage at `first`."""
        of_one = cute.slice_(layout.outer, (None, None, 0))
        to_next = self.a_lines.stage_bytes * 8 // dtype.width
        outer = cute.append(of_one, cute.make_layout(self.facts.stages, stride=to_next))
        return cute.make_tensor(cute.recast_ptr(first, swizzle_=layout.inner, dtype=dtype), outer)

    def begins_on_chunks(self, sizes: Sizes) -> Any:
        """Whether all lines of both operands begin on 16 bytes."""
        of_a = sizes.k if self.a_lines.is_k_major else sizes.m
        of_b = sizes.k if self.b_lines.is_k_major else sizes.n
        return ((of_a | of_b) & (CHUNK_ELEMS - 1)) == 0

    def loaders(
        self, params: Params, smem: Any, tile: tuple[Any, Any, Any], tidx: Int32, is_aligned: bool
    ) -> tuple[Loader, Loader]:
        """Of a and b. `smem`: of each stage 0's boxes, and the place of the chunks beside them; `tile`: its first row
        and column, and its matrix."""
        sizes, (m, n, matrix) = params.sizes, tile
        maps = params.maps.a, params.maps.b[0]
        extents = (sizes.m, sizes.a_batch_step, m), (sizes.n, sizes.b_batch_step, n)
        made = []
        for lines, operand, (boxes, beside), (extent, batch_step, first) in zip(
            (self.a_lines, self.b_lines), maps, smem, extents, strict=True
        ):
            batch = cutlass.select_(batch_step > 0, sizes.batch, Int32(1))
            own = lines, operand, boxes, beside, (matrix * batch_step, first), (extent, sizes.k, batch), tidx
            made.append(loader_of(*own, is_aligned))
        return made[0], made[1]
