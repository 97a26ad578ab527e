"""Hopper GEMM of small products: no TMA, no barrier in memory, no cluster, a CTA for each tile (`Tile.direct`).

Such a product takes as long as its kernel's latencies: descriptors to fetch, barriers to initialise and to agree upon,
a result's way through shared memory. Here the first load leaves as soon as its address is known.

Timetable of a CTA (W warpgroups, 1 or 2, each with 64 rows of the tile; all threads do the same):

    wait       griddepcontrol.wait, before global memory is touched
    fill       the first STAGES - 2 k tiles: cp.async, a group of each thread for each k tile (`direct_load`)
    release    griddepcontrol.launch_dependents; what the epilogue reads is loaded
    for each k tile
        its group has come: cp.async.wait_group of the thread's own; raw lines are realigned
        fence.proxy.async, for wgmma reads what the generic proxy has written
        the wgmmas of the k tile before the last are done: wgmma.wait_group 1
        barrier 0 of all threads: everybody's part of the k tile has come, and nobody reads the stage of the k tile
            before the last
        wgmmas of the k tile, a group
        fill of the k tile that is STAGES - 2 later, into that stage
    store      epilogue, rounding and store, all from registers (`FragmentOutlet`)
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_bwgemm.facts.resources import CHUNK_BYTES, SWIZZLE_ATOM_BYTES
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.box_epilogue import BoxEpilogue
from jax_bwgemm.kernels.direct_load import ELEMENT_BYTES, WORD_BYTES, Loader, lines_of
from jax_bwgemm.kernels.gemm import facts_of
from jax_bwgemm.kernels.outlets import store_group
from jax_bwgemm.kernels.params import Hints, Maps, Params, Sizes
from jax_bwgemm.kernels.sm90_deal import STORE_BARRIER, WARPGROUP_THREADS, Deal
from jax_bwgemm.kernels.sm90_fragments import slab_rows_of
from jax_bwgemm.kernels.sm90_store import Sums, WgmmaValues, store_sums
from jax_bwgemm.kernels.sm90_wgmma import Wgmma, wait_for_sums
from jax_bwgemm.kernels.thread_outlets import FragmentOutlet, row_outlet

IN_FLIGHT = 2  # k tiles whose stages wgmmas may be reading


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
        hints: Hints,
        stream_tiles: Int32,
        stream_clusters: Int32,
        workspace: cute.Pointer,
        token: Int64,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Takes what `Sm90Gemm` takes: only types matter, for our launcher replaces this host code."""
        facts = self.facts
        maps = Maps(a.iterator, (b.iterator,), facts.store_atoms(c), ())
        params = Params(maps, sizes, hints, None, facts.epilogue_args(alpha, bias))
        self.kernel(params).launch(grid=(1, 1, 1), block=(facts.threads, 1, 1), min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, params: Params) -> None:
        facts, deal = self.facts, self.deal
        a_smem, b_smem = self.wgmma.smem_layouts()
        parts = self.a_lines.bytes, self.b_lines.bytes, self.a_lines.raw_bytes  # of a stage; and b's raw lines
        stages = cutlass.memory.SmemAllocator().allocate(facts.stages * self.a_lines.stage_bytes, SWIZZLE_ATOM_BYTES)
        sA, sB = self.operand(stages, a_smem, facts.a_dtype), self.operand(stages + parts[0], b_smem, facts.b_dtype)
        raw_a, raw_b = stages + sum(parts[:2]), stages + sum(parts)
        tidx = cute.arch.thread_idx()[0]
        m_idx, n_idx, l_idx = cute.arch.block_idx()
        sizes = params.sizes
        a_tile = l_idx * sizes.a_batch_step, m_idx * facts.tile.cta_m
        b_tile = l_idx * sizes.b_batch_step, n_idx * facts.tile.mma_n
        a_sizes = sizes.m, sizes.k, cutlass.select_(sizes.a_batch_step > 0, sizes.batch, Int32(1))
        b_sizes = sizes.n, sizes.k, cutlass.select_(sizes.b_batch_step > 0, sizes.batch, Int32(1))
        loaders = (
            self.loader(self.a_lines, params.maps.a, sA, raw_a, a_tile, a_sizes, tidx),
            self.loader(self.b_lines, params.maps.b[0], sB, raw_b, b_tile, b_sizes, tidx),
        )
        cute.arch.griddepcontrol_wait()
        group = store_group(tidx, WARPGROUP_THREADS, STORE_BARRIER)
        values = WgmmaValues(facts.boxes, self.rows, group)
        sums = Sums(deal, self.rows, BoxEpilogue(facts.epilogue, facts.boxes, values, params))
        slabs = cutlass.const_expr(facts.tile.cta_m // facts.boxes.rows)
        at = m_idx * slabs + group.idx, n_idx * deal.boxes_n, l_idx
        outlets = tuple(self.outlet(group, stages, out, sizes) for out in params.maps.c)
        operands = self.wgmma.operands(sA, sB, group)
        if loaders[0].is_aligned & loaders[1].is_aligned:
            self.compute(loaders, operands, sums, outlets, at, sizes.k, True)
        else:
            self.compute(loaders, operands, sums, outlets, at, sizes.k, False)

    @cute.jit
    def compute(
        self,
        loaders: tuple[Loader, Loader],
        operands: tuple[Any, Any],
        sums: Sums,
        outlets: tuple[FragmentOutlet, ...],
        at: Any,
        k: Int32,
        is_aligned: cutlass.Constexpr[bool],
    ) -> None:
        """Both operands' alignment is known or, for each, asked: two kernels in one, of which the first is short."""
        facts, ahead = self.facts, cutlass.const_expr(self.facts.stages - IN_FLIGHT)
        k_tiles = Int32(Uint32(k + (facts.tile.k_tile - 1)) // facts.tile.k_tile)
        for k_idx in cutlass.range(ahead, unroll=1):
            if k_idx < k_tiles:
                for i in cutlass.range_constexpr(2):
                    loaders[i].fill(k_idx, k_idx, is_aligned)
            cute.arch.cp_async_commit_group()
        cute.arch.griddepcontrol_launch_dependents()
        loaded = sums.begin(at)
        a, b = operands
        acc, mma = self.wgmma.accumulator(), self.wgmma.of_tile()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        acc.fill(0)
        stage, free = Int32(0), Int32(ahead)
        for k_idx in cutlass.range(k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            for i in cutlass.range_constexpr(2):
                loaders[i].realign(k_idx, stage, is_aligned)
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup.wait_group(1)
            cute.arch.sync_threads()
            warpgroup.fence()
            for kb in cutlass.range_constexpr(cute.size(a, mode=[2])):
                cute.gemm(mma, acc, a[None, None, kb, stage], b[None, None, kb, stage], acc)
            warpgroup.commit_group()
            if k_idx + ahead < k_tiles:
                for i in cutlass.range_constexpr(2):
                    loaders[i].fill(k_idx + ahead, free, is_aligned)
            cute.arch.cp_async_commit_group()
            stage = cutlass.select_(stage == facts.stages - 1, Int32(0), stage + 1)
            free = cutlass.select_(free == facts.stages - 1, Int32(0), free + 1)
        wait_for_sums(acc)
        store_sums(sums, outlets, acc, at, loaded)

    def operand(self, first: cute.Pointer, layout: Any, dtype: Any) -> cute.Tensor:
        """(m or n, k, stage), its first stage at `first`."""
        of_one = cute.slice_(layout.outer, (None, None, 0))
        to_next = self.a_lines.stage_bytes * 8 // dtype.width
        outer = cute.append(of_one, cute.make_layout(self.facts.stages, stride=to_next))
        return cute.make_tensor(cute.recast_ptr(first, swizzle_=layout.inner, dtype=dtype), outer)

    def outlet(self, group: Any, stages: cute.Pointer, out: cute.Pointer, sizes: Sizes) -> FragmentOutlet:
        """Rows go through the first stage, which no wgmma reads any more when sums are stored."""
        boxes = self.facts.boxes
        rows = row_outlet(boxes, group, stages, out, sizes) if boxes.by_rows else None
        return FragmentOutlet(boxes, group, out, sizes, rows)

    def loader(
        self,
        lines: Any,
        operand: cute.Pointer,
        stages: cute.Tensor,
        raw: cute.Pointer,
        tile: tuple[Any, Any],
        sizes: tuple[Any, Any, Any],
        tidx: Int32,
    ) -> Loader:
        """`tile`: (matrix, first row or column); `sizes`: (m or n, k, batch) of the operand."""
        extent, k, batch = sizes
        num_lines, size = (extent, k) if lines.is_k_major else (k, extent)
        own, chunk = tidx // lines.chunks, tidx % lines.chunks * (CHUNK_BYTES // ELEMENT_BYTES)
        line, place = (tile[1] + own, chunk) if lines.is_k_major else (own, tile[1] + chunk)
        return Loader(
            lines=lines,
            base=operand.toint(),
            offset=((tile[0] * num_lines + line) * size + place) * ELEMENT_BYTES,
            end=batch * num_lines * size * ELEMENT_BYTES,
            pitch=size * ELEMENT_BYTES,
            line=line,
            num_lines=num_lines,
            place=place,
            size=size,
            smem=Int32(cute.recast_ptr(stages.iterator, swizzle_=None).toint()),
            raw=Int32(raw.toint()),
            tidx=tidx,
            is_aligned=size * ELEMENT_BYTES % CHUNK_BYTES == 0,
            is_paired=size * ELEMENT_BYTES % WORD_BYTES == 0,
        )
