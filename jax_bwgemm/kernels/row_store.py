"""The store of an n-major result whose rows TMA cannot step over: a warp's own rows, mostly 16 bytes at a time.

Rows of the result begin at any element, so an accumulator's pairs of columns have no common alignment. A warp therefore
turns every row segment in shared memory, as a ring, until an element lies there as it does in global memory, modulo 16
bytes. Then 16 bytes (a chunk) of the one are a chunk of the other:

    write   each lane its pairs: all in place, or all one element early where the segment begins at an odd element
    read    each lane a chunk; where all is early, also the last element of the chunk before, from the lane that has it
    store   whole chunks at once; the first and the last one, which neighbours share, element by element

Only the warp itself writes and reads its buffer: it needs no barrier but `sync_warp`. No banks conflict in the writes,
for four lanes always fill one aligned group of 4 pairs, nor in the reads, for 8 lanes read 128 bytes; `Segments.at`
keeps apart what 8 rows write at a time. For a 128x256 tile of 16-bit elements shared memory takes 512 cycles to write,
512 to read and 128 to shuffle, beside the result's own 1024 at 64 bytes a clock.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute

FRAGMENT_ROWS = 16  # of a warp: lane t holds pairs of columns, every 8, of rows t / 4 and t / 4 + 8
CHUNK_BYTES = 16
BANKS_BYTES = 128
WARP_LANES = 32
ELEMENTS = {1: Uint8, 2: Uint16, 4: Uint32}
PAIRS = {1: Uint16, 2: Uint32, 4: Uint64}


@dataclasses.dataclass(frozen=True)
class Segments:
    """What a warp stores at a time: `rows` (8 or 16) of `cols` elements; 32 to 512 bytes a row, a power of two."""

    rows: int
    cols: int
    elem_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.cols * self.elem_bytes

    @property
    def chunks(self) -> int:
        return self.row_bytes // CHUNK_BYTES

    @property
    def chunk_elems(self) -> int:
        return CHUNK_BYTES // self.elem_bytes

    @property
    def group_bytes(self) -> int:
        """What four lanes hold of a row side by side: 4 pairs."""
        return 8 * self.elem_bytes

    def at(self, row: Any, byte: Any) -> Any:
        """Where a byte of a row lies in the buffer: neighbouring rows have their groups in another order."""
        step = max(CHUNK_BYTES, self.group_bytes)
        turn = row * step // max(1, BANKS_BYTES // self.row_bytes)
        return row * self.row_bytes + (byte ^ (turn & (min(BANKS_BYTES, self.row_bytes) - CHUNK_BYTES)))


class Rows(NamedTuple):
    """Where a warp's fragment belongs: its element (row, column) is the `start` + row * `pitch` + column-th of the
    result, if it is one of `num_rows` rows and `num_cols` columns."""

    out: cute.Pointer
    start: Int64
    pitch: Int32
    num_rows: Int32
    num_cols: Int32

    def shift(self, row: Any, seg: Segments) -> Any:
        """Elements between the 16-byte boundary at or before a row's begin, and that."""
        return (Uint32(self.start) + Uint32(row) * Uint32(self.pitch)) % seg.chunk_elems

    def address(self, row: Any, column: Any, dtype: Any, align: int) -> Any:
        elem = self.start + Int64(row) * Int64(self.pitch) + Int64(column)
        byte = elem * (self.out.dtype.width // 8)
        return cute.make_ptr(dtype, self.out.toint() + byte, cute.AddressSpace.gmem, assumed_align=align)


@cute.jit
def store_fragment(values: cute.Tensor, buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr) -> None:
    """A warp's 16 rows of `seg.cols` columns through its `buffer`, of `seg.rows` * `seg.row_bytes` bytes."""
    if rows.num_rows > 0 and rows.num_cols > 0:
        for first in cutlass.range_constexpr(0, FRAGMENT_ROWS, seg.rows):
            cute.arch.sync_warp()  # all lanes have read what is in the buffer
            write(values, buffer, rows, seg, first)
            cute.arch.sync_warp()
            store_chunks(buffer, rows, seg, first)
            store_edges(buffer, rows, seg, first)


@cute.jit
def write(
    values: cute.Tensor, buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr
) -> None:
    """`seg.rows` rows of the fragment, from `first` on, into the buffer."""
    dtype = PAIRS[seg.elem_bytes]
    pairs = cute.coalesce(cute.recast_tensor(values, dtype))
    groups = cutlass.const_expr(seg.row_bytes // seg.group_bytes)
    lane = Uint32(cute.arch.lane_idx())
    for half in cutlass.range_constexpr(seg.rows // 8):
        row = lane // 4 + 8 * half
        pair = lane % 4 + rows.shift(row + first, seg) // 2
        late, byte = pair // 4, pair % 4 * (2 * seg.elem_bytes)
        for i in cutlass.range_constexpr(groups):
            value = pairs[2 * i + half + first // 8]
            for j in cutlass.range_constexpr(1, 1 + max(1, CHUNK_BYTES // seg.group_bytes)):
                value = pairs[2 * ((i - j) % groups) + half + first // 8] if late == j else value
            within(buffer, seg.at(row, byte + i * seg.group_bytes), dtype)[0] = value


@cute.jit
def store_chunks(buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr) -> None:
    """Of these rows, the chunks that are whole."""
    lane = Uint32(cute.arch.lane_idx())
    chunk = lane % seg.chunks
    before = lane - chunk + (chunk + (seg.chunks - 1)) % seg.chunks
    for i in cutlass.range_constexpr(seg.rows * seg.chunks // WARP_LANES):
        row = lane // seg.chunks + i * (WARP_LANES // seg.chunks)
        words, turned = cute.make_rmem_tensor(4, Uint32), cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(within(buffer, seg.at(row, chunk * CHUNK_BYTES), Uint32, 4), words)
        shift = rows.shift(row + first, seg)
        early_bits = shift % 2 * (8 * seg.elem_bytes)
        turned[0] = cute.arch.shf(cute.arch.shuffle_sync(words[3], before), words[0], early_bits, "clamp_left")
        for j in cutlass.range_constexpr(1, 4):
            turned[j] = cute.arch.shf(words[j - 1], words[j], early_bits, "clamp_left")
        column = Int32(chunk * seg.chunk_elems) - Int32(shift)
        if Int32(row + first) < rows.num_rows and column >= 0 and column + seg.chunk_elems <= rows.num_cols:
            address = rows.address(row + first, column, Uint32, CHUNK_BYTES)
            cute.autovec_copy(turned, cute.make_tensor(address, cute.make_layout(4)))


@cute.jit
def store_edges(buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr) -> None:
    """Of these rows, the elements of a first and a last chunk that are not whole: a lane for each."""
    dtype = ELEMENTS[seg.elem_bytes]
    lanes = cutlass.const_expr(2 * seg.chunk_elems)
    lane = Uint32(cute.arch.lane_idx())
    num_cols = Uint32(cutlass.min(rows.num_cols, seg.cols))
    is_last, place = lane % lanes // seg.chunk_elems, lane % seg.chunk_elems
    for i in cutlass.range_constexpr(seg.rows * lanes // WARP_LANES):
        row = lane // lanes + i * (WARP_LANES // lanes)
        shift = rows.shift(row + first, seg)
        chunk = (shift + num_cols) // seg.chunk_elems * is_last
        column = Int32(chunk * seg.chunk_elems + place) - Int32(shift)
        is_edge = chunk > 0 or (is_last == 0 and (shift > 0 or num_cols < seg.chunk_elems))
        is_inside = Int32(row + first) < rows.num_rows and column >= 0 and column < rows.num_cols
        if is_edge and is_inside and column < seg.cols:
            turned = (chunk * seg.chunk_elems + place + (seg.cols - shift % 2)) % seg.cols
            value = within(buffer, seg.at(row, turned * seg.elem_bytes), dtype)[0]
            address = rows.address(row + first, column, dtype, seg.elem_bytes)
            cute.make_tensor(address, cute.make_layout(1))[0] = value


def within(buffer: cute.Pointer, byte: Any, dtype: Any, count: int = 1) -> cute.Tensor:
    """`count` values of the buffer, aligned to all of them."""
    align = count * dtype.width // 8
    address = cute.make_ptr(dtype, buffer.toint() + Int32(byte), cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(address, cute.make_layout(count))
