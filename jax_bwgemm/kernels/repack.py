"""The repack kernels: pad and transpose, both bound by memory. Plain loads and stores, every family of GPUs alike.

    step       all threads of a CTA
    wait       griddepcontrol.wait, before global memory is touched
    load       a few chunks of 16 bytes each: all loads are on their way before the first is used, and what
               they read leaves the L2 cache first, so that a product finds the result there
    release    griddepcontrol.launch_dependents
    align      a chunk out of the one or two aligned 16 bytes that hold it: by words, then by bytes (prmt)
    exchange   transpose only: 4-byte words of 4/element rows through shared memory, one barrier, 16 bytes back
    store      aligned chunks of 16 bytes, zeros where the source has nothing

A pad may have two sources, each with a result of its own: CTAs from `first_ctas` on are the second one's, and nothing
else of them differs.

Whoever could touch a byte outside the source, a thread of a pad or a CTA of a transpose, loads element by element
instead; only those at the array's two ends can, and the last CTA is the first to start, so that none waits for it.

Shared memory of a transpose: word w of column j, which is rows 4/element * w and on, lies at word w of line j but that
16-byte granules w/4 are exchanged by XOR with the chunk of j, (j / chunk's columns) % 8. The 32 words of a warp's store
are 8 chunks of columns by 4 neighbouring words: granule XOR chunk takes 8 values, so 32 banks, no conflict. Eight lanes
load 8 neighbouring granules of one column, which XOR permutes: 32 banks again. No access has a conflict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, cute

from jax_bwgemm.facts.repack import (
    CHUNK_BYTES,
    NUM_THREADS,
    PAD_CHUNKS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TRANSPOSE_CHUNKS,
    Repack,
)
from jax_bwgemm.kernels.aot.compiled import Compiled

WORDS = CHUNK_BYTES // 4  # of a chunk
ELEMENTS = {1: Uint8, 2: Uint16, 4: Uint32}


class RepackKernel:
    """One repack. Everything on self is fixed at compile time."""

    def __init__(self, repack: Repack) -> None:
        self.kind, self.bytes = repack.kind, repack.element_bytes
        self.chunk = CHUNK_BYTES // self.bytes  # elements
        self.packed = 4 // self.bytes  # rows of a word of a transpose
        self.tile_cols = TILE_ROW_BYTES // self.bytes

    @cute.jit
    def __call__(self, *params: Int64 | Int32) -> None:
        kernel = self.pad if self.kind == "pad" else self.transpose
        kernel(*params).launch(grid=(1, 1, 1), block=(NUM_THREADS, 1, 1))

    @cute.kernel
    def pad(
        self,
        source: Int64,
        out: Int64,
        batch: Int32,
        rows: Int32,
        cols: Int32,
        pitch: Int32,
        second_source: Int64,
        second_out: Int64,
        second_batch: Int32,
        second_rows: Int32,
        second_cols: Int32,
        second_pitch: Int32,
        first_ctas: Int32,
    ) -> None:
        cute.arch.griddepcontrol_wait()
        tidx, cta = cute.arch.thread_idx()[0], cta_idx()
        if cta >= first_ctas:
            source, out, batch, rows = second_source, second_out, second_batch, second_rows
            cols, pitch, cta = second_cols, second_pitch, cta - first_ctas
        row_bytes = Int64(cols) * self.bytes
        row_chunks, whole = Uint32(pitch) // self.chunk, Uint32(cols) // self.chunk
        rest = Int32(Uint32(cols) % self.chunk) * self.bytes
        num_rows = Uint32(batch) * Uint32(rows)
        num_chunks = num_rows * row_chunks
        end = source + Int64(num_rows) * row_bytes
        first = Uint32(cta) * (NUM_THREADS * PAD_CHUNKS)
        addresses, sizes = [], []
        for i in cutlass.range_constexpr(PAD_CHUNKS):
            idx = first + Uint32(i * NUM_THREADS + tidx)
            row, at = divided(idx, row_chunks)
            addresses.append(source + Int64(row) * row_bytes + Int64(at) * CHUNK_BYTES)
            size = cutlass.select_(at < whole, Int32(CHUNK_BYTES), cutlass.select_(at == whole, rest, Int32(0)))
            sizes.append(cutlass.select_(idx < num_chunks, size, Int32(0)))
        begin = addresses[0] - (addresses[0] & (CHUNK_BYTES - 1))  # chunks ascend, but for those of padding: not loaded
        is_inside = (begin >= source) & (addresses[-1] + 2 * CHUNK_BYTES <= end)
        raw, skews = self.load(addresses, sizes, is_inside)
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range_constexpr(PAD_CHUNKS):
            words = self.aligned(raw, i, skews[i], sizes[i])
            idx = first + Uint32(i * NUM_THREADS + tidx)
            if idx < num_chunks:
                cute.autovec_copy(words, chunk_at(out + Int64(idx) * CHUNK_BYTES))

    @cute.kernel
    def transpose(self, source: Int64, out: Int64, batch: Int32, rows: Int32, cols: Int32, pitch: Int32) -> None:
        """Thread t of a tile: chunk t % 8 of rows `packed` * (t / 8) and on, and of those 32 words further, ..."""
        cute.arch.griddepcontrol_wait()
        tidx = cute.arch.thread_idx()[0]
        allocator, num_words = cutlass.memory.SmemAllocator(), TILE_ROWS * TILE_ROW_BYTES // 4
        lines = allocator.allocate_tensor(Uint32, cute.make_layout(num_words), CHUNK_BYTES).iterator
        tiles_c = Uint32((cols + (self.tile_cols - 1)) // self.tile_cols)
        tiles_r = Uint32((pitch + (TILE_ROWS - 1)) // TILE_ROWS)
        above, tile_c = divided(Uint32(cta_idx()), tiles_c)
        l_idx, tile_r = divided(above, tiles_r)
        rows_here = cutlass.select_(l_idx < Uint32(batch), rows, Int32(0))
        pitch_here = cutlass.select_(l_idx < Uint32(batch), pitch, Int32(0))
        row, col = Int32(tile_r) * TILE_ROWS, Int32(tile_c) * self.tile_cols
        row_bytes = Int64(cols) * self.bytes
        matrix = source + Int64(l_idx) * Int64(rows) * row_bytes

        own_col = col + tidx % 8 * self.chunk
        size = Int64(cols - own_col) * self.bytes
        addresses, sizes = [], []
        for i in cutlass.range_constexpr(TRANSPOSE_CHUNKS):
            own_row = row + tidx // 8 * self.packed + row_in_tile(i, self.packed)
            addresses.append(matrix + Int64(own_row) * row_bytes + Int64(own_col) * self.bytes)
            sizes.append(chunk_size(size, own_row < rows_here))
        corner = matrix + Int64(row) * row_bytes + Int64(col) * self.bytes
        last_row = cutlass.min(row + TILE_ROWS, rows) - 1
        last_end = matrix + Int64(last_row) * row_bytes + Int64(col) * self.bytes + TILE_ROW_BYTES + CHUNK_BYTES
        end = source + Int64(batch) * Int64(rows) * row_bytes
        is_inside = (corner - (corner & (CHUNK_BYTES - 1)) >= source) & (last_end <= end)
        raw, skews = self.load(addresses, sizes, is_inside)
        cute.arch.griddepcontrol_launch_dependents()

        line = TILE_ROWS * self.bytes // 4  # words of a column
        own = tidx % 8 * (self.chunk * line) + ((tidx // 32) ^ (tidx % 8)) * 4 + tidx // 8 % 4
        for unit in cutlass.range_constexpr(TRANSPOSE_CHUNKS // self.packed):
            chunks = []
            for i in cutlass.range_constexpr(self.packed):
                at = cutlass.const_expr(unit * self.packed + i)
                chunks.append(self.aligned(raw, at, skews[at], sizes[at]))
            for j, word in enumerate(self.by_column(chunks)):
                cute.make_tensor(lines + (own + (j * line + unit * 32)), cute.make_layout(1))[0] = word
        cute.arch.sync_threads()
        self.store_columns(lines, out, l_idx, row, col, pitch_here, cols, tidx)

    @cute.jit
    def store_columns(
        self,
        lines: cute.Pointer,
        out: Int64,
        l_idx: Uint32,
        row: Int32,
        col: Int32,
        pitch: Int32,
        cols: Int32,
        tidx: Int32,
    ) -> None:
        """From shared memory: neighbouring threads store neighbouring chunks of a row of the result."""
        per_col = cutlass.const_expr(TILE_ROWS // self.chunk)
        words = cute.make_rmem_tensor(WORDS, Uint32)
        for i in cutlass.range_constexpr(TRANSPOSE_CHUNKS):
            own_col, at = (tidx + i * NUM_THREADS) // per_col, (tidx + i * NUM_THREADS) % per_col
            granule = at ^ (own_col // self.chunk)
            place = cute.make_ptr(
                Uint32, (lines + (own_col * per_col + granule) * WORDS).toint(), cute.AddressSpace.smem,
                assumed_align=CHUNK_BYTES,
            )  # fmt: skip
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(WORDS)), words)
            if (col + own_col < cols) & (row + at * self.chunk < pitch):
                line = Int64(l_idx) * Int64(cols) + Int64(col + own_col)
                place_elems = line * Int64(pitch) + Int64(row + at * self.chunk)
                cute.autovec_copy(words, chunk_at(out + place_elems * self.bytes))

    @cute.jit
    def load(self, addresses: Any, sizes: Any, is_inside: Any) -> Any:
        """(raw, skews): for each address the 32 bytes from the chunk boundary at or before it, as far as `sizes` ask
        for them, and its distance from there; or, unless `is_inside`, its elements and 0."""
        once = cute.make_copy_atom(
            cute.nvgpu.CopyG2ROp(),
            Uint32,
            num_bits_per_copy=8 * CHUNK_BYTES,
            load_cache_mode=cute.nvgpu.LoadCacheMode.STREAMING,
        )
        count = cutlass.const_expr(len(addresses))
        raw = cute.make_rmem_tensor((2 * WORDS, count), Uint32)
        skews = cute.make_rmem_tensor(count, Int32)
        raw.fill(0)
        skews.fill(0)
        if is_inside:
            for i in cutlass.range_constexpr(count):
                skew = Int32(addresses[i] & (CHUNK_BYTES - 1))
                base = addresses[i] - Int64(skew)
                skews[i] = skew
                if sizes[i] > 0:
                    cute.copy(once, chunk_at(base), half(raw, 0, i))
                if skew + sizes[i] > CHUNK_BYTES:
                    cute.copy(once, chunk_at(base + CHUNK_BYTES), half(raw, 1, i))
        else:
            for i in cutlass.range_constexpr(count):
                self.load_elements(addresses[i], sizes[i], half(raw, 0, i))
        return raw, skews

    @cute.jit
    def load_elements(self, address: Int64, size: Int32, words: cute.Tensor) -> None:
        for i in cutlass.range_constexpr(self.chunk):
            if i * self.bytes < size:
                place = cute.make_ptr(
                    ELEMENTS[self.bytes], address + i * self.bytes, cute.AddressSpace.gmem, assumed_align=self.bytes
                )
                element = Uint32(cute.make_tensor(place, cute.make_layout(1))[0])
                word = cutlass.const_expr(i // self.packed)
                words[word] = words[word] | (element << (i % self.packed * 8 * self.bytes))

    @cute.jit
    def aligned(self, raw: cute.Tensor, idx: cutlass.Constexpr, skew: Int32, size: Int32) -> cute.Tensor:
        """The chunk that starts `skew` bytes into the idx-th 32 bytes; zeros behind its first `size`."""
        moved = [raw[i, idx] for i in range(2 * WORDS)]
        for step in (2, 1):
            is_moved = (skew & (4 * step)) != 0
            moved = [cutlass.select_(is_moved, moved[i + step], moved[i]) for i in range(len(moved) - step)]
        words = cute.make_rmem_tensor(WORDS, Uint32)
        for i in cutlass.range_constexpr(WORDS):
            words[i] = moved[i] if self.bytes == 4 else permuted(moved[i], moved[i + 1], 0x3210 + (skew & 3) * 0x1111)
        if size < CHUNK_BYTES:
            for i in cutlass.range_constexpr(WORDS):
                bits = cutlass.min(cutlass.max(size - 4 * i, 0), 4) * 8
                words[i] = Uint32(words[i]) & Uint32((Int64(1) << Int64(bits)) - 1)
        return words

    def by_column(self, chunks: list[cute.Tensor]) -> list[Uint32]:
        """The chunks of `packed` rows -> for each column the word that holds its elements of these rows."""
        columns = []
        for i in range(WORDS):
            words = [chunk[i] for chunk in chunks]
            if self.packed == 4:
                pairs = [permuted(x, y, pick) for pick in (0x5140, 0x7362) for x, y in (words[:2], words[2:])]
                columns += [permuted(x, y, pick) for x, y in (pairs[:2], pairs[2:]) for pick in (0x5410, 0x7632)]
            elif self.packed == 2:
                columns += [permuted(words[0], words[1], pick) for pick in (0x5410, 0x7632)]
            else:
                columns += words
        return columns


def cta_idx() -> Any:
    """This CTA's place in the work; the one that starts first has the last, at the end of the array."""
    block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return cutlass.select_(block == 0, grid - 1, block - 1)


def divided(idx: Uint32, by: Uint32) -> tuple[Uint32, Uint32]:
    return idx // by, idx % by


def row_in_tile(idx: int, packed: int) -> int:
    """Of a thread's idx-th chunk: `packed` neighbouring rows make a word, the next one is 32 words further."""
    return idx // packed * 32 * packed + idx % packed


def chunk_size(rest: Int64, is_row: Any) -> Int32:
    """Bytes that the source has of a chunk, `rest` bytes before the end of its row."""
    return cutlass.select_(is_row, Int32(cutlass.max(cutlass.min(rest, Int64(CHUNK_BYTES)), Int64(0))), Int32(0))


def chunk_at(address: Int64) -> cute.Tensor:
    place = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES)
    return cute.make_tensor(place, cute.make_layout(WORDS))


def half(raw: cute.Tensor, which: int, idx: int) -> cute.Tensor:
    """The first or the second 16 of the idx-th 32 bytes."""
    return cute.make_tensor(raw.iterator + (2 * idx + which) * WORDS, cute.make_layout(WORDS))


def permuted(low: Uint32, high: Uint32, pick: Any) -> Uint32:
    return Uint32(cute.arch.prmt(low, high, pick))


def compile_repack(repack: Repack, dump_dir: Path) -> Compiled:
    """Cross-compile one repack; needs no GPU. `dump_dir` must be this call's own: CuTeDSL reuses file names."""
    kernel = RepackKernel(repack)
    getattr(RepackKernel, repack.kind).set_name_prefix(repack.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    options = f"--gpu-arch {repack.target} --keep-ptx --keep-cubin --dump-dir={dump_dir}"
    params = [Int64(1) if size == 8 else Int32(1) for _, size in repack.params]
    compiled = cute.compile(kernel, *params, options=options)
    return Compiled(
        cubin=compiled.artifacts.CUBIN,
        ptx=compiled.artifacts.PTX,
        entry=next(iter(compiled.kernel_info)),
        params=repack.params,
        num_threads=NUM_THREADS,
        smem_bytes=repack.smem_bytes,
    )
