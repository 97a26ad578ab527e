"""Hopper GEMM of a matrix and up to 8 vectors, of any row pitch (`Tile.is_thin`): to read the matrix, once, takes all
the time.

mma.sync takes its fragments from registers, so that lines of the matrix that begin anywhere need not be moved to where
wgmma reads them: each line is read in the aligned chunks of 16 bytes that hold it, and the vectors follow its
alignment. Of 8 warps, warp w has the lines that are w modulo 8, all of which begin `skew` elements behind a chunk.

    k-major    a lane has chunks of 8 terms, of rows g and g + 8 of a fragment. Words 0 and 1 are one mma.sync's, 2 and
               3 another's; the vectors' terms are in that order, too, read `skew` before their place. Chunks at the
               ends of a row hold its neighbours' terms: zeros take their place, for they would meet the vectors'
               zeros, and may be NaN
    m-major    a lane has chunks of 8 rows, of 4 terms, which PRMTs pair into fragments. A warp's rows begin `skew`
               before the CTA's: of the 128 that it has read, a CTA has 120

Timetable of a CTA (8 warps; a warp loads for nobody but itself, so that the inner loop has no barrier):

    wait       griddepcontrol.wait, before global memory is touched
    fill       the first STAGES - 1 windows: cp.async, a group for each
    for each part of the vectors that there is room for
        barrier; the part -> shared memory; barrier
        for each window of the part
            each lane's group has come: cp.async.wait_group, bar.warp.sync; all lanes have read the window before
            fill of the window STAGES - 1 later, into the stage of that one
            the lane's chunks -> registers, mma.sync
    release    griddepcontrol.launch_dependents
    sums       barrier: nobody reads windows any more. Each warp's sums -> the stages; of an m-major matrix: barrier;
               those of all warps, added in their order, -> behind them
    store      barrier, of the cluster where its CTAs divide k: each CTA adds some rows of all of them, in their order,
               and stores these; the cluster's barrier, for others may still be reading. Not of an m-major matrix that
               one CTA has: each thread stores what it has added
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warp

from jax_bwgemm.facts import thin
from jax_bwgemm.facts.problem import COARSE_DTYPES
from jax_bwgemm.facts.resources import CHUNK_BYTES, SWIZZLE_ATOM_BYTES
from jax_bwgemm.facts.tile import THIN_COLS, Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.direct_load import ELEMENT_BYTES, WORDS, aligned
from jax_bwgemm.kernels.expression import epilogue_of
from jax_bwgemm.kernels.operands import IN_DTYPES, OUT_DTYPES
from jax_bwgemm.kernels.params import Hints, Maps, Order, Params, Shares, Sizes
from jax_bwgemm.kernels.row_store import at_address
from jax_bwgemm.kernels.thin_load import CHUNK, THREADS, Lane, Vectors, Windows
from jax_bwgemm.kernels.walk import part_of

LANE_TERMS = 4  # of the 16 of a fragment, those of a lane: so many lines of an m-major matrix
FRAGMENT_SUMS = 4  # of a lane: rows g and g + 8, columns 2t and 2t + 1 of each, PTX ISA, mma.m16n8k16
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words, PTX ISA, prmt


@dataclasses.dataclass(frozen=True)
class Product:
    """A thread's sums, in fragments of rows: one of a k-major matrix, of an m-major one 8, the `q`-th of each half of
    128 rows those that are 2q and 2q + 1 modulo 8."""

    is_k_major: bool
    dtype: Any
    lane: Lane
    windows: Windows
    vectors: Vectors
    sums: cute.Tensor

    def own_column(self) -> Int32:
        """That this lane reads: beyond the last one, whose sums nobody stores, the last."""
        return cutlass.min(self.lane.g, self.vectors.cols - 1)

    def add(self, fragment: int, a: list[Any], b: list[Any]) -> None:
        """mma.sync, of words."""
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))
        sums = cute.make_tensor(self.sums.iterator + fragment * FRAGMENT_SUMS, cute.make_layout((FRAGMENT_SUMS, 1, 1)))
        cute.gemm(atom, sums, self._elements(a), self._elements(b), sums)

    def _elements(self, words: list[Any]) -> cute.Tensor:
        """(values, 1, 1) of a fragment."""
        fragment = cute.make_rmem_tensor((len(words), 1, 1), Uint32)
        for i, word in enumerate(words):
            fragment[i] = word
        return cute.recast_tensor(fragment, self.dtype)

    @cute.jit
    def add_window(self, window: Int32, first: Int32, stage: Int32) -> None:
        """`first`: the window with which the part of the vectors that is there begins."""
        if cutlass.const_expr(self.is_k_major):
            self._add_rows(window, window - first, stage)
        else:
            self._add_columns(window - first, stage)

    def _add_rows(self, window: Int32, own: Int32, stage: Int32) -> None:
        chunks, skew = self.windows.row_chunks(window, stage), self.windows.skew
        terms = self.vectors.smem + self.own_column() * self.vectors.pitch * ELEMENT_BYTES
        behind = (CHUNK - skew) % CHUNK  # a chunk of the vector's terms, of which the first are 8 before the window
        for half in range(2):
            at = own * thin.window_terms("k") + (self.lane.t + 4 * half) * CHUNK + (CHUNK - skew - behind)
            source = terms + at * ELEMENT_BYTES
            b = aligned(source, source + CHUNK_BYTES, behind * ELEMENT_BYTES)
            rows, below = chunks[half], chunks[2 + half]
            for i in range(0, WORDS, 2):
                self.add(0, [rows[i], below[i], rows[i + 1], below[i + 1]], [b[i], b[i + 1]])

    def _add_columns(self, own: Int32, stage: Int32) -> None:
        g, first = self.lane.g, self.lane.t * LANE_TERMS
        chunks = [[self.windows.words(stage, half, first + i, g) for i in range(LANE_TERMS)] for half in range(2)]
        line = own * (thin.window_terms("m") // CHUNK) + first
        row = (self.lane.warp * self.vectors.cols + self.own_column()) * self.vectors.pitch
        address = self.vectors.smem + (row + line) * ELEMENT_BYTES
        pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=8)
        b = cute.make_rmem_tensor(2, Uint32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), b)
        for half in range(2):
            own_lines = chunks[half]
            for q in range(WORDS):
                words = [line[q] for line in own_lines]
                pairs = [
                    Uint32(cute.arch.prmt(words[i], words[i + 1], halves))
                    for i in (0, 2)
                    for halves in (LOW_HALVES, HIGH_HALVES)
                ]
                self.add(half * WORDS + q, pairs, [b[0], b[1]])

    @cute.jit
    def leave(self, sums: cute.Pointer) -> None:
        """In shared memory, the warp's: of a column at `place_of_sum` of its rows, from where the warp's begin on."""
        g, t, warp_idx = self.lane.g, self.lane.t, self.lane.warp
        for i in cutlass.range_constexpr(cute.size(self.sums)):
            fragment, column = i // FRAGMENT_SUMS, 2 * t + i % 2
            second = i % FRAGMENT_SUMS // 2
            if cutlass.const_expr(self.is_k_major):
                place = warp_idx * thin.LINES_APART + 8 * second + g
            else:
                half, q = divmod(fragment, WORDS)
                place = warp_idx * (THIN_COLS * thin.SUMS) + thin.place_of_sum(2 * q + second) + 8 * half + g
            target = cute.make_tensor(sums + (column * thin.SUMS + place), cute.make_layout(1))
            target[0] = self.sums[i]


@dataclasses.dataclass(frozen=True)
class Result:
    """Of a CTA: `rows` by `cols`, the first row and column of matrix `l_idx` being (`m`, `n`)."""

    tile: Tile
    is_row_major: bool
    dtype: Any
    out: cute.Pointer
    sizes: Sizes
    m: Int32
    n: Int32
    l_idx: Int32
    cols: Int32
    tidx: Int32

    @cute.jit
    def add_warps(self, of_warps: cute.Pointer, sums: cute.Pointer, skews: list[Any]) -> None:
        """Of an m-major matrix, whose lines are dealt to the warps; each one's rows begin `skews` before the CTA's."""
        rows = self.tile.cta_m
        for i in cutlass.range(self.tidx, self.cols * rows, THREADS, unroll=1):
            column, row = Uint32(i) // rows, Uint32(i) % rows
            total = Float32(0)
            for w in cutlass.range_constexpr(thin.WARPS):
                at = (w * THIN_COLS + column) * thin.SUMS + thin.place_of_sum(row + skews[w])
                total = total + cute.make_tensor(of_warps + at, cute.make_layout(1))[0]
            place = cute.make_tensor(sums + (column * thin.SUMS + thin.place_of_sum(row)), cute.make_layout(1))
            place[0] = total

    @cute.jit
    def store(self, sums: cute.Pointer, z: Int32) -> None:
        """The CTA's share of the rows, of all CTAs that divide k."""
        split = self.tile.cluster_k
        share = cutlass.const_expr(self.tile.cta_m // split)
        for i in cutlass.range(self.tidx, self.cols * share, THREADS, unroll=1):
            column, row = Uint32(i) // share, Uint32(z * share) + Uint32(i) % share
            at = column * thin.SUMS + thin.place_of_sum(row)
            total = Float32(0)
            for part in cutlass.range_constexpr(split):
                own = cute.arch.map_dsmem_ptr(sums, Int32(part)) if cutlass.const_expr(split > 1) else sums
                loaded = cute.make_rmem_tensor(1, Float32)
                cute.autovec_copy(cute.make_tensor(own + at, cute.make_layout(1)), loaded)
                total = total + loaded[0]
            if self.m + Int32(row) < self.sizes.m:
                rounded = cute.make_rmem_tensor(1, self.dtype)
                rounded[0] = total.to(self.dtype)
                element = self.element(self.m + Int32(row), self.n + Int32(column))
                element[0] = rounded[0]

    def element(self, row: Int32, column: Int32) -> cute.Tensor:
        m, n = Int64(self.sizes.m), Int64(self.sizes.n)
        inner = Int64(row) * n + Int64(column) if self.is_row_major else Int64(column) * m + Int64(row)
        address = self.out.toint() + (Int64(self.l_idx) * (m * n) + inner) * (self.dtype.width // 8)
        return at_address(address, self.dtype)


class Sm90Thin:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        tile = self.tile = variant.tile
        self.a_major, self.b_major, self.c_major = variant.a_major, variant.b_major, variant.c_major
        self.dtype, self.out_dtype = IN_DTYPES[variant.a_dtype], OUT_DTYPES[variant.out_dtype]
        self.stages = thin.num_stages(tile)
        self.epilogue = epilogue_of(variant.steps, variant.c_major, variant.out_dtype in COARSE_DTYPES)
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
        params = Params(Maps(a.iterator, (b.iterator,), (c.iterator,), ()), sizes, None, hints, None, ())
        cluster = (1, 1, self.tile.cluster_k)
        self.kernel(params).launch(
            grid=cluster,
            block=(THREADS, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=thin.CTAS,
            preferred_smem_carveout=100,  # else the DSL asks the driver of a device how much there is
        )

    @cute.kernel
    def kernel(self, params: Params) -> None:
        split, tile = self.tile.cluster_k, self.tile
        allocator = cutlass.memory.SmemAllocator()
        ring = allocator.allocate(thin.RING_BYTES[self.a_major], SWIZZLE_ATOM_BYTES)
        room = allocator.allocate(thin.vector_bytes(self.a_major), CHUNK_BYTES)
        tidx = cute.arch.thread_idx()[0]
        *along, z_idx = cute.arch.block_idx()
        m_idx, n_idx = along if self.c_major == "m" else along[::-1]
        sizes, l_idx, z = params.sizes, z_idx // split, z_idx % split
        first_row, first_col = m_idx * tile.cta_m, n_idx * THIN_COLS
        cute.arch.griddepcontrol_wait()
        lane = Lane(tidx)
        windows = self.windows(params, lane, first_row, l_idx * sizes.a_batch_step, ring)
        vectors = self.vectors(params, first_col, l_idx * sizes.b_batch_step, tidx, room)
        sums = cute.make_rmem_tensor(FRAGMENT_SUMS * (1 if self.a_major == "k" else 2 * WORDS), Float32)
        sums.fill(0)
        product = Product(self.a_major == "k", self.dtype, lane, windows, vectors, sums)
        first, count = part_of(windows.count, z, tile)
        self.multiply(product, first, first + count)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        left = cute.recast_ptr(ring, dtype=Float32)
        product.leave(left)
        out, cols = params.maps.c[0], vectors.cols
        result = Result(tile, self.c_major == "n", self.out_dtype, out, sizes, first_row, first_col, l_idx, cols, tidx)
        own = left
        if cutlass.const_expr(self.a_major == "m"):
            own = left + thin.WARPS * THIN_COLS * thin.SUMS
            cute.arch.sync_threads()
            result.add_warps(left, own, self.skews(sizes, first_row, l_idx * sizes.a_batch_step))
        if cutlass.const_expr(split > 1 or self.a_major == "k"):  # else each thread stores what it has added
            self.meet()
        result.store(own, z)
        if cutlass.const_expr(split > 1):
            self.meet()

    @cute.jit
    def meet(self) -> None:
        """All threads whose sums are added."""
        if cutlass.const_expr(self.tile.cluster_k > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def multiply(self, product: Product, first: Int32, end: Int32) -> None:
        """The windows from `first` to `end`, perhaps none."""
        windows, vectors, ahead = product.windows, product.vectors, cutlass.const_expr(self.stages - 1)
        for i in cutlass.range_constexpr(ahead):
            if first + i < end:
                windows.fill(first + i, Int32(i))
            cute.arch.cp_async_commit_group()
        terms = cutlass.const_expr(thin.window_terms(self.a_major))
        before = cutlass.const_expr(CHUNK if self.a_major == "k" else 0)  # terms of the vectors before a window's
        each = Int32(Uint32(vectors.terms) // terms)
        stage, free = Int32(0), Int32(ahead)
        for begin in cutlass.range(first, end, each, unroll=1):
            stop = cutlass.min(begin + each, end)
            cute.arch.sync_threads()
            vectors.fill(begin * terms - before, (stop - begin) * terms + 2 * before)
            cute.arch.sync_threads()
            for window in cutlass.range(begin, stop, unroll=1):
                cute.arch.cp_async_wait_group(ahead - 1)
                cute.arch.sync_warp()
                if window + ahead < end:
                    windows.fill(window + ahead, free)
                cute.arch.cp_async_commit_group()
                product.add_window(window, begin, stage)
                stage = cutlass.select_(stage == self.stages - 1, Int32(0), stage + 1)
                free = cutlass.select_(free == self.stages - 1, Int32(0), free + 1)

    def windows(self, params: Params, lane: Lane, first_row: Int32, matrix: Int32, ring: cute.Pointer) -> Windows:
        sizes = params.sizes
        is_k_major = self.a_major == "k"
        num_lines, size = (sizes.m, sizes.k) if is_k_major else (sizes.k, sizes.m)
        batch = cutlass.select_(sizes.a_batch_step > 0, sizes.batch, Int32(1))
        line = (first_row if is_k_major else Int32(0)) + lane.warp
        begin = (matrix * num_lines + line) * size + (Int32(0) if is_k_major else first_row)
        skew = begin & (CHUNK - 1)
        lines_on = lane.line * thin.WARPS
        place = (Int32(0) if is_k_major else first_row) - skew + lane.chunk * CHUNK
        return Windows(
            is_k_major=is_k_major,
            lane=lane,
            base=params.maps.a.toint(),
            offset=(begin - skew + lines_on * size + lane.chunk * CHUNK) * ELEMENT_BYTES,
            end=batch * num_lines * size * ELEMENT_BYTES,
            pitch=size * ELEMENT_BYTES,
            line=line + lines_on,
            num_lines=num_lines,
            place=place,
            size=size,
            skew=skew,
            ring=Int32(ring.toint()) + lane.warp * (thin.stage_bytes(self.a_major) // thin.WARPS),
        )

    def skews(self, sizes: Sizes, first_row: Int32, matrix: Int32) -> list[Any]:
        """Of each warp's lines of an m-major matrix."""
        begin = matrix * sizes.k * sizes.m + first_row
        return [Uint32((begin + w * sizes.m) & (CHUNK - 1)) for w in range(thin.WARPS)]

    def vectors(self, params: Params, first_col: Int32, matrix: Int32, tidx: Int32, room: cute.Pointer) -> Vectors:
        k, n = params.sizes.k, params.sizes.n
        step, to_next = (Int32(1), k) if self.b_major == "k" else (n, Int32(1))
        begin = Int64(matrix) * (Int64(k) * n) + Int64(first_col) * to_next
        return Vectors(
            is_k_major=self.a_major == "k",
            start=params.maps.b[0].toint() + begin * ELEMENT_BYTES,
            step=step * ELEMENT_BYTES,
            to_next=to_next * ELEMENT_BYTES,
            cols=cutlass.min(params.sizes.n - first_col, THIN_COLS),
            k=params.sizes.k,
            smem=Int32(room.toint()),
            tidx=tidx,
        )
