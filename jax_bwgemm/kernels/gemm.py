"""What both families share: compile-time facts, run-time sizes, the walk over tiles, the load warp, the store."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.kernels import masks, pipelines, row_store
from jax_bwgemm.kernels.epilogue import Epilogue
from jax_bwgemm.kernels.operands import ACC_DTYPES, IN_DTYPES, OUT_DTYPES, coordinate_tensor
from jax_bwgemm.kernels.scheduler import Piece, TileOrder, num_pieces, tile_coordinates
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.stream_k import Stream, item_of, stream_of
from jax_bwgemm.problem import COARSE_DTYPES, INT8_DTYPES
from jax_bwgemm.tile import (
    EPILOGUE_STAGES,
    Tile,
    num_stages,
    num_threads,
    segments,
    store_box,
    store_cols,
    store_groups,
    store_rows,
)
from jax_bwgemm.variant import Variant


class Sizes(NamedTuple):
    """Kernel parameters behind the operands; docs/architecture.md, kernel parameter block."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    a_batch_step: Int32
    b_batch_step: Int32
    raster_group: Int32
    raster_along_n: Int32
    raster_order: Int32


class Hints(NamedTuple):
    """L2 cache policies of the loads."""

    a_policy: Int64
    b_policy: Int64


class Walk(NamedTuple):
    """The work of one cluster, in its order: items `first`, `first + step`, ... below `num_items`. An item is a tile,
    or in a `stream` a piece of one.

    Of each tile's k tiles this CTA multiplies `k_count` from `k_first` on. (x, y, z): its place in the cluster.
    """

    order: TileOrder
    num_items: Uint32
    first: Uint32
    step: Uint32
    k_first: Int32
    k_count: Int32
    x: Int32
    y: Int32
    z: Int32
    stream: Stream | None = None

    def item_of(self, idx: Uint32) -> Piece:
        if self.stream is None:
            return Piece(idx, self.k_first, self.k_count, Boolean(True), Int32(0))
        return item_of(self.stream, idx, self.k_count)

    def tile_of(self, tile: Tile, idx: Uint32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of this CTA's tile, in units of cta_m, mma_n and 1."""
        tile_m, tile_n, l_idx = tile_coordinates(idx, self.order, cutlass.min)
        return Int32(tile_m) * tile.cluster_m + self.x, Int32(tile_n) * tile.cluster_n + self.y, Int32(l_idx)


class StoreGroup(NamedTuple):
    """Warps that store on their own: the `idx`-th group; `tidx` counts its threads."""

    idx: Int32
    tidx: Int32
    is_store_warp: Boolean
    barrier_id: Int32


class Outlet(NamedTuple):
    """The way out of a thread's registers: through `r2s` into Rs, its part of the store buffers, of which sC
    (store_rows, store_cols, stage) are its group's; from there through `out`, a TMA atom or C's address, to mC
    (m, n, l). Where warps store rows, sC is a warp's own part of the buffers, and there is neither r2s nor Rs.
    """

    r2s: Any
    Rs: Any
    sC: Any
    out: Any
    mC: cute.Tensor


class Gemm:
    """One variant. Everything on self is fixed at compile time."""

    def __init__(self, variant: Variant) -> None:
        tile = self.tile = variant.tile
        arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
        self.a_dtype, self.b_dtype = IN_DTYPES[variant.a_dtype], IN_DTYPES[variant.b_dtype]
        self.out_dtype = OUT_DTYPES[variant.out_dtype]
        self.acc_dtype = ACC_DTYPES["int32" if variant.a_dtype in INT8_DTYPES else "float32"]
        self.a_major, self.b_major, self.c_major = variant.a_major, variant.b_major, variant.c_major
        self.store_kind = variant.store
        self.full_bytes = pipelines.full_bytes(tile, variant.a_dtype)
        self.stages = num_stages(tile, variant.a_dtype, variant.out_dtype, arch, variant.has_residual)
        self.drains_stages = pipelines.arrivals_outlive_readers(tile, variant.target)
        self.threads = num_threads(tile, variant.target, variant.has_residual)
        self.store_groups = store_groups(tile, variant.target)
        self.store_rows = store_rows(tile, variant.target)
        self.buffer_cols = store_cols(tile, variant.out_dtype, variant.target)
        self.by_rows = variant.store == "threads" and variant.c_major == "n"
        rows, cols = segments(tile, variant.out_dtype, variant.target)
        self.segments = row_store.Segments(rows, cols, self.out_dtype.width // 8)
        self.store_cols = cols if self.by_rows else self.buffer_cols
        box = store_box(tile, variant.out_dtype, variant.c_major, variant.target)
        self.store_span_bytes = box[0] * self.out_dtype.width // 8
        self.residual_bytes = pipelines.residual_full_bytes(tile, variant.out_dtype, variant.target)
        self.cluster = (tile.cluster_m, tile.cluster_n, tile.cluster_k)
        self.epilogue = Epilogue(variant.epilogue, variant.out_dtype in COARSE_DTYPES)

    def epilogue_args(self, alpha: Any, bias: Any) -> tuple[Any, ...]:
        """Those of the two that this epilogue takes, in kernel order."""
        given = {"alpha": alpha, "bias": bias}
        return tuple(given[param] for param in self.epilogue.params)

    def walk(self, sizes: Sizes, stream_args: tuple[Any, ...] = ()) -> Walk:
        tile = self.tile
        x, y, block_z = cute.arch.block_idx()
        rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
        tiles_m, tiles_n = Uint32((sizes.m + (rows - 1)) // rows), Uint32((sizes.n + (cols - 1)) // cols)
        raster = sizes.raster_group, sizes.raster_along_n, sizes.raster_order
        order = TileOrder(tiles_m, tiles_n, *map(Uint32, raster))
        num_tiles = tiles_m * tiles_n * Uint32(sizes.batch)
        k_tiles = (sizes.k + (tile.k_tile - 1)) // tile.k_tile
        first, step = Uint32(block_z), Uint32(cute.arch.grid_dim()[2])
        if cutlass.const_expr(tile.stream_k):
            stream = stream_of(num_tiles, step, first, k_tiles, *stream_args)
            num_items = stream.base + Uint32(num_pieces(stream.share, k_tiles)) * step
            return Walk(order, num_items, first, step, Int32(0), k_tiles, x, y, Int32(0), stream)
        if cutlass.const_expr(tile.cluster_k == 1):
            return Walk(order, num_tiles, first, step, Int32(0), k_tiles, x, y, Int32(0))
        z = block_z % tile.cluster_k
        part = (k_tiles + (tile.cluster_k - 1)) // tile.cluster_k
        k_first = cutlass.min(z * part, k_tiles)
        k_count = cutlass.min(part, k_tiles - k_first)
        return Walk(order, num_tiles, first // tile.cluster_k, step // tile.cluster_k, k_first, k_count, x, y, z)

    def coordinate_tensors(self, sizes: Sizes) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(m, k, l), (n, k, l), (m, n, l): A, B and C as their tensor maps count them."""
        m, n, k, batch = sizes[:4]
        a = coordinate_tensor(self.a_major == "k", m, k, batch)
        b = coordinate_tensor(self.b_major == "k", n, k, batch)
        return a, b, coordinate_tensor(self.c_major == "n", m, n, batch)

    def store_layout(self, groups: int, stages: int) -> Any:
        """(groups * store_rows, buffer_cols, stages); the rows of one group are contiguous."""
        kind = f"{'K' if self.c_major == 'n' else 'MN'}_SW{self.store_span_bytes}"
        atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, kind), self.out_dtype)
        shape = (groups * self.store_rows, self.buffer_cols, stages)
        return cute.tile_to_shape(atom, shape, order=(0, 1, 2) if self.c_major == "n" else (1, 0, 2))

    def store_atom(self, c: cute.Tensor, box_layout: Any) -> Any:
        """What the kernel stores through: a TMA atom, or C's address."""
        if self.store_kind == "threads":
            return c.iterator
        box = (self.store_rows, self.store_cols)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, box_layout, box)[0]

    @cute.jit
    def keep_full(
        self,
        tma_a: cute.CopyAtom,
        As: cute.Tensor,
        Ag: cute.Tensor,
        tma_b: cute.CopyAtom,
        Bs: cute.Tensor,
        Bg: cute.Tensor,
        ab: Any,
        split: KSplit,
        walk: Walk,
        sizes: Sizes,
        hints: Hints,
    ) -> None:
        """The load warp: fills every stage as soon as it is empty, through all tiles.

        As, Bs: (TMA, stage); Ag: (TMA, m tiles, k tiles, l); Bg: (TMA, n tiles, k tiles, l).
        """
        tile = self.tile
        a_mask = cutlass.Int16(masks.a_mask(tile, walk.x))
        b_mask = cutlass.Int16(masks.b_mask(tile, walk.x, walk.y))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        phase = Int32(0)
        idx = walk.first
        while idx < walk.num_items:
            item = walk.item_of(idx)
            m_idx, n_idx, l_idx = walk.tile_of(tile, item.tile_idx)
            Ag_tile = Ag[None, m_idx // tile.cta_group, None, l_idx * sizes.a_batch_step]
            Bg_tile = Bg[None, n_idx, None, l_idx * sizes.b_batch_step]
            for k_idx in cutlass.range(item.k_count, unroll=1):
                ab.producer_acquire(state)
                barrier = ab.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    Ag_tile[None, item.k_first + k_idx],
                    As[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=a_mask if cutlass.const_expr(tile.cluster_n > 1) else None,
                    cache_policy=hints.a_policy,
                )
                cute.copy(
                    tma_b,
                    Bg_tile[None, item.k_first + k_idx],
                    Bs[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=b_mask if cutlass.const_expr(tile.cluster_m > tile.cta_group) else None,
                    cache_policy=hints.b_policy,
                )
                state.advance()
            if cutlass.const_expr(tile.cluster_k > 1):  # the stages hold parts of the result until all have read them
                split.wait_drained(phase)
                phase = phase ^ 1
            idx += walk.step
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.drains_stages):  # a loop: DSL's producer_tail is as long as there are stages
            for _ in cutlass.range(self.stages, unroll=1):
                ab.sync_object_empty.wait(state.index, state.phase)
                state.advance()

    def add(self, values: cute.Tensor, terms: cute.Tensor) -> None:
        """Element by element, in one order; by fours, for the compiler keeps more bytes than that in local memory."""
        four = cute.make_layout(4)
        for i in range(0, cute.size(values), 4):
            own = cute.make_tensor(values.iterator + i, four)
            own.store(own.load() + cute.make_tensor(terms.iterator + i, four).load().to(self.acc_dtype))

    @cute.jit
    def publish(
        self,
        outlet: Outlet,
        registers: cute.Tensor,
        box: Any,
        stage: cutlass.Constexpr,
        group: StoreGroup,
        threads: cutlass.Constexpr,
        sizes: Sizes,
    ) -> None:
        """Registers -> store buffer `stage` -> the result's `box` (m, n, l), counted in boxes.

        `threads` of the group write the buffer; then its first warp stores it, or all of them do, by elements. Where
        warps store rows, each does so on its own.
        """
        if cutlass.const_expr(self.by_rows):
            self.store_fragments(outlet, registers, box, group, threads, sizes)
        else:
            cute.copy(outlet.r2s, registers, outlet.Rs[None, None, None, stage])
            if cutlass.const_expr(self.store_kind == "tma"):
                cute.arch.fence_proxy("async.shared", space="cta")
                if group.is_store_warp:  # so that after the barrier the next buffer may be written: its store read it
                    cute.arch.cp_async_bulk_wait_group(pipelines.stores_in_flight(), read=True)
            cute.arch.barrier(barrier_id=group.barrier_id, number_of_threads=threads)
            if cutlass.const_expr(self.store_kind == "tma"):
                if group.is_store_warp:
                    gC = cute.local_tile(outlet.mC, (self.store_rows, self.store_cols), box)
                    sC = cute.group_modes(outlet.sC, 0, 2)
                    Cs, Cg = cpasync.tma_partition(outlet.out, 0, cute.make_layout(1), sC, cute.group_modes(gC, 0, 2))
                    cute.copy(outlet.out, Cs[None, stage], Cg)
                    cute.arch.cp_async_bulk_commit_group()
            else:
                self.store_elements(outlet.sC[None, None, stage], outlet.out, box, group.tidx, threads, sizes)

    def row_outlet(self, out: Any, mC: cute.Tensor, sC: cute.Tensor, group: StoreGroup, threads: int) -> Outlet:
        """The way out of a warp that stores rows; it has a part of the buffers to itself."""
        warps = threads // row_store.WARP_LANES
        warp_idx = group.idx * warps + cute.arch.make_warp_uniform(group.tidx // row_store.WARP_LANES)
        buffers = cute.recast_ptr(sC.iterator, swizzle_=None, dtype=cutlass.Uint8)
        return Outlet(None, None, buffers + warp_idx * self.segments.bytes, out, mC)

    @cute.jit
    def store_fragments(
        self,
        outlet: Outlet,
        registers: cute.Tensor,
        box: Any,
        group: StoreGroup,
        threads: cutlass.Constexpr,
        sizes: Sizes,
    ) -> None:
        """A warp's rows of a box, 16 by 16."""
        warp_rows = cutlass.const_expr(self.store_rows * row_store.WARP_LANES // threads)
        count = cutlass.const_expr(warp_rows // row_store.FRAGMENT_ROWS)
        values = cutlass.const_expr(cute.size(registers) // count)
        warp_idx = cute.arch.make_warp_uniform(group.tidx // row_store.WARP_LANES)
        col = box[1] * self.store_cols
        for i in cutlass.range_constexpr(count):
            row = box[0] * self.store_rows + warp_idx * warp_rows + i * row_store.FRAGMENT_ROWS
            start = Int64(box[2]) * (Int64(sizes.m) * Int64(sizes.n)) + Int64(row) * Int64(sizes.n) + Int64(col)
            address = outlet.out.toint() + start * self.segments.elem_bytes
            rows = row_store.Rows(address, sizes.n, sizes.m - row, cutlass.max(sizes.n - col, 0))
            fragment = cute.make_tensor(registers.iterator + i * values, cute.make_layout(values))
            row_store.store_fragment(fragment, outlet.sC, rows, self.segments)

    @cute.jit
    def store_elements(
        self,
        sC: cute.Tensor,
        out: cute.Pointer,
        box: Any,
        tidx: Int32,
        threads: cutlass.Constexpr,
        sizes: Sizes,
    ) -> None:
        """A box of an m-major result of any pitch, which is rare: neighbouring threads store neighbouring rows.

        A fragment's pairs lie across such a result, so its parts would have to be turned element by element. A thread
        keeps its row and steps along the columns, so that each element costs one addition.
        """
        step = cutlass.const_expr(threads // self.store_rows)
        row, col = tidx % self.store_rows, tidx // self.store_rows
        m_idx, n_idx = box[0] * self.store_rows + row, box[1] * self.store_cols + col
        start = Int64(box[2]) * (Int64(sizes.m) * Int64(sizes.n)) + Int64(n_idx) * Int64(sizes.m) + Int64(m_idx)
        if m_idx < sizes.m:
            for i in cutlass.range_constexpr(self.store_rows * self.store_cols // threads):
                if i * step < sizes.n - n_idx:
                    address = out + (start + Int64(i * step) * Int64(sizes.m))
                    cute.make_tensor(address, cute.make_layout(1))[0] = sC[row, col + i * step]

    @cute.jit
    def reclaim(self, group: StoreGroup, threads: cutlass.Constexpr) -> None:
        """Before the first box of a tile: every buffer has been read. Where warps store rows, they see to that."""
        if cutlass.const_expr(self.store_kind == "tma"):  # noqa: SIM102 (a compile-time condition stands alone)
            if group.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(not self.by_rows):
            cute.arch.barrier(barrier_id=group.barrier_id, number_of_threads=threads)

    @cute.jit
    def finish_stores(self, group: StoreGroup) -> None:
        """Before a CTA may go: its shared memory is being read until then."""
        if cutlass.const_expr(self.store_kind == "tma"):  # noqa: SIM102
            if group.is_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def buffer_of(box: int) -> int:
    """The store buffer of a tile's `box`-th box."""
    return box % EPILOGUE_STAGES
