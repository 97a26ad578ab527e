"""The store of an n-major result whose rows TMA cannot step over: a warp's own rows, mostly 16 bytes at a time.

Rows of the result begin at any element, so an accumulator's pairs of columns have no common alignment. A warp therefore
turns each row segment in shared memory, as a ring, until an element lies there as it does in global memory, modulo 16
bytes. Then 16 bytes (a chunk) of the one are a chunk of the other:

    write   each lane its pairs: all in place, or all one element early where the segment begins at an odd element
    read    each lane a chunk; where all is early, also the last element of the chunk before, from the lane that has it
    store   whole chunks at once; the first and the last one, which neighbours share, element by element

Only the warp itself writes and reads its buffer: it needs no barrier but `sync_warp`. No banks conflict in the writes,
for four lanes always fill one aligned group of 4 pairs, nor in the reads, for 8 lanes read 128 bytes; `Segments.at`
keeps apart what 8 rows write at a time. For a 128x256 tile of 16-bit elements shared memory takes 512 cycles to write,
512 to read and 128 to shuffle, beside the result's own 1024 at 64 bytes a clock.

Where all rows begin on 16 bytes, nothing is turned and no chunk is shared (`store_whole_fragment`): a matrix of 8 rows
is written by one instruction, a chunk is stored as it is read, and there are no ends. Short sums do little but store.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import dsl_user_op

FRAGMENT_ROWS = 16  # of a warp: lane t holds pairs of columns, every 8, of rows t / 4 and t / 4 + 8
WARP_LANES = 32
CHUNK_BYTES = 16
BANKS_BYTES = 128
MATRICES = 4  # of 8 rows of 16 bytes, that one stmatrix writes


@dataclasses.dataclass(frozen=True)
class Segments:
    """What a warp stores at a time: `rows` (8 or 16) of `cols` elements; 32 to 512 bytes a row, a power of two.

    `is_interleaved`: rows r and r + 8 of a fragment are 2 r and 2 r + 1 of the result.
    """

    rows: int
    cols: int
    elem_bytes: int
    is_interleaved: bool = False

    @property
    def row_bytes(self) -> int:
        return self.cols * self.elem_bytes

    @property
    def bytes(self) -> int:
        """A warp's buffer."""
        return self.rows * self.row_bytes

    @property
    def chunks(self) -> int:
        """Of a row."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def chunk_elems(self) -> int:
        return CHUNK_BYTES // self.elem_bytes

    @property
    def group_bytes(self) -> int:
        """What four lanes hold of a row side by side: 4 pairs."""
        return 8 * self.elem_bytes

    @property
    def elem_dtype(self) -> Any:
        return {1: Uint8, 2: Uint16, 4: Uint32}[self.elem_bytes]

    @property
    def pair_dtype(self) -> Any:
        return {1: Uint16, 2: Uint32, 4: Uint64}[self.elem_bytes]

    def result_row(self, row: Any) -> Any:
        """Of a fragment's row."""
        return row % 8 * 2 + row // 8 if self.is_interleaved else row

    def at(self, row: Any, byte: Any) -> Any:
        """Where a byte of a row lies in the buffer: neighbouring rows have their chunks in another order."""
        step = max(CHUNK_BYTES, self.group_bytes)
        turn = row * step // max(1, BANKS_BYTES // self.row_bytes)
        return row * self.row_bytes + (byte ^ (turn & (min(BANKS_BYTES, self.row_bytes) - CHUNK_BYTES)))


class Rows(NamedTuple):
    """Where a warp's fragment belongs: its first element at `address`, its rows `pitch` elements apart; `num_rows` of
    them (none if negative) and `num_cols` of its columns (at least 0) are the result's. `policy`: of the L2 cache, for
    chunks."""

    address: Int64
    pitch: Int32
    num_rows: Int32
    num_cols: Int32
    policy: Int64

    def begin(self, row: Any, seg: Segments) -> tuple[Any, Any]:
        """Address of a row, and by how many elements it lies behind a 16-byte boundary."""
        address = self.address + Int64(row * seg.elem_bytes) * Int64(self.pitch)
        return address, Uint32(address) % CHUNK_BYTES // seg.elem_bytes


@cute.jit
def store_fragment(values: cute.Tensor, buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr) -> None:
    """A warp's 16 rows of `seg.cols` columns, through its `buffer`."""
    for first in cutlass.range_constexpr(0, FRAGMENT_ROWS, seg.rows):
        cute.arch.sync_warp()  # all lanes have read what is in the buffer
        write(values, buffer, rows, seg, first)
        cute.arch.sync_warp()
        store_chunks(buffer, rows, seg, first)
        store_ends(buffer, rows, seg, first, False)
        if rows.num_cols < seg.cols:
            store_ends(buffer, rows, seg, first, True)


@cute.jit
def store_whole_fragment(values: cute.Tensor, buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr) -> None:
    """The same of rows that all begin on 16 bytes, and so have whole chunks alone. No banks conflict: 8 rows of a
    matrix lie in all of them."""
    lane = Uint32(cute.arch.lane_idx())
    chunk = lane % seg.chunks
    for first in cutlass.range_constexpr(0, FRAGMENT_ROWS, seg.rows):
        cute.arch.sync_warp()
        write_whole(values, buffer, seg, first)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(seg.rows * seg.chunks // WARP_LANES):
            row = lane // seg.chunks + i * (WARP_LANES // seg.chunks)
            words = cute.make_rmem_tensor(4, Uint32)
            cute.autovec_copy(within(buffer, seg.at(row, chunk * CHUNK_BYTES), Uint32, 4), words)
            own = Int32(seg.result_row(row + first))
            target = rows.address + Int64(own * seg.elem_bytes) * Int64(rows.pitch) + Int64(chunk * CHUNK_BYTES)
            if own < rows.num_rows and Int32(chunk * seg.chunk_elems) < rows.num_cols:
                put_chunk(words, target, rows.policy)


@cute.jit
def write_whole(values: cute.Tensor, buffer: cute.Pointer, seg: cutlass.Constexpr, first: cutlass.Constexpr) -> None:
    """`seg.rows` rows of the fragment into the buffer, as they are: of elements of 2 bytes, a group of a row is a row
    of a matrix, whose place is known to the lane that stmatrix asks for it."""
    pairs = cute.coalesce(cute.recast_tensor(values, seg.pair_dtype))  # (row half, group)
    lane = Uint32(cute.arch.lane_idx())
    halves, groups = cutlass.const_expr(seg.rows // 8), cutlass.const_expr(seg.row_bytes // seg.group_bytes)
    if cutlass.const_expr(seg.elem_bytes == 2):
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, MATRICES), Uint16)
        side_by_side = cutlass.const_expr(MATRICES // halves)  # groups of one stmatrix
        for i in cutlass.range_constexpr(0, groups, side_by_side):
            four = cute.make_rmem_tensor(MATRICES, Uint32)
            for j in cutlass.range_constexpr(MATRICES):
                four[j] = pairs[2 * (i + j // halves) + j % halves + first // 8]
            place = within(buffer, seg.at(lane % seg.rows, (lane // seg.rows + i) * CHUNK_BYTES), Uint16, 8)
            halfwords = cute.recast_ptr(four.iterator, dtype=Uint16)
            row_of_one = cute.make_layout((8, 1))  # (element, stmatrix)
            cute.copy(stmatrix, cute.make_tensor(halfwords, row_of_one), cute.make_tensor(place.iterator, row_of_one))
    else:
        for i in cutlass.range_constexpr(halves * groups):
            half, group = i // groups, i % groups
            place = seg.at(lane // 4 + 8 * half, lane % 4 * (2 * seg.elem_bytes) + group * seg.group_bytes)
            within(buffer, place, seg.pair_dtype)[0] = pairs[2 * group + half + first // 8]


@cute.jit
def write(
    values: cute.Tensor, buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr
) -> None:
    """`seg.rows` rows of the fragment, from `first` on, into the buffer.

    A lane writes to the same place of every group; where that is a place of the group behind its pair's, it writes the
    pair of the group before, around the ring, so that four lanes write to one group at a time.
    """
    pairs = cute.coalesce(cute.recast_tensor(values, seg.pair_dtype))  # (row half, group)
    groups = cutlass.const_expr(seg.row_bytes // seg.group_bytes)
    lane = Uint32(cute.arch.lane_idx())
    for half in cutlass.range_constexpr(seg.rows // 8):
        row = lane // 4 + 8 * half
        _, shift = rows.begin(seg.result_row(row + first), seg)
        pair = lane % 4 + shift // 2
        late, byte = pair // 4, pair % 4 * (2 * seg.elem_bytes)
        is_late = [late == j for j in range(1, 1 + max(1, CHUNK_BYTES // seg.group_bytes))]
        own = [pairs[2 * i + half + first // 8] for i in range(groups)]
        lines = cutlass.const_expr(max(1, BANKS_BYTES // seg.group_bytes))  # groups of one
        places = [seg.at(row, byte + i * seg.group_bytes) for i in range(min(lines, groups))]
        for i in cutlass.range_constexpr(groups):
            value = own[i]
            for j in cutlass.range_constexpr(len(is_late)):
                value = cutlass.select_(is_late[j], own[(i - j - 1) % groups], value)
            within(buffer, places[i % lines] + i // lines * BANKS_BYTES, seg.pair_dtype)[0] = value


@cute.jit
def store_chunks(buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr) -> None:
    """Of these rows, the chunks that are whole."""
    lane = Uint32(cute.arch.lane_idx())
    chunk = lane % seg.chunks
    before = lane - chunk + (chunk + (seg.chunks - 1)) % seg.chunks
    num_starts = Uint32(cutlass.max(rows.num_cols - (seg.chunk_elems - 1), 0))  # columns where a whole chunk may begin
    for i in cutlass.range_constexpr(seg.rows * seg.chunks // WARP_LANES):
        row = lane // seg.chunks + i * (WARP_LANES // seg.chunks)
        words, turned = cute.make_rmem_tensor(4, Uint32), cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(within(buffer, seg.at(row, chunk * CHUNK_BYTES), Uint32, 4), words)
        begin, shift = rows.begin(seg.result_row(row + first), seg)
        early_bits = shift % 2 * (8 * seg.elem_bytes)
        turned[0] = cute.arch.shf(cute.arch.shuffle_sync(words[3], before), words[0], early_bits, "clamp_left")
        for j in cutlass.range_constexpr(1, 4):
            turned[j] = cute.arch.shf(words[j - 1], words[j], early_bits, "clamp_left")
        column = chunk * seg.chunk_elems - shift  # unsigned: far beyond all others if it is negative
        target = (begin + Int64(chunk * CHUNK_BYTES)) & -CHUNK_BYTES
        if Int32(seg.result_row(row + first)) < rows.num_rows and column < num_starts:
            put_chunk(turned, target, rows.policy)


@cute.jit
def store_ends(
    buffer: cute.Pointer, rows: Rows, seg: cutlass.Constexpr, first: cutlass.Constexpr, is_cut: cutlass.Constexpr
) -> None:
    """Of these rows, the elements of a first and a last chunk that are not whole, a lane for each.

    In the ring both make up one chunk. A row that `is_cut` off by the result's edge ends in another one.
    """
    lane = Uint32(cute.arch.lane_idx())
    place = lane % seg.chunk_elems
    for i in cutlass.range_constexpr(seg.rows * seg.chunk_elems // WARP_LANES):
        row = lane // seg.chunk_elems + i * (WARP_LANES // seg.chunk_elems)
        begin, shift = rows.begin(seg.result_row(row + first), seg)
        if cutlass.const_expr(is_cut):
            chunk = (shift + Uint32(rows.num_cols)) // seg.chunk_elems
            column = chunk * seg.chunk_elems + place - shift
            is_end = chunk > 0 or shift == 0  # else it is the first chunk
        else:
            column = (place - shift) % seg.cols
            is_end = shift > 0
        byte = (column + shift // 2 * 2) % seg.cols * seg.elem_bytes
        source = within(buffer, seg.at(row, byte), seg.elem_dtype)
        target = at_address(begin + Int64(column * seg.elem_bytes), seg.elem_dtype)
        if is_end and Int32(seg.result_row(row + first)) < rows.num_rows and Int32(column) < rows.num_cols:
            target[0] = source[0]


def within(buffer: cute.Pointer, byte: Any, dtype: Any, count: int = 1) -> cute.Tensor:
    """`count` values of the buffer, aligned to all of them."""
    align = count * dtype.width // 8
    pointer = cute.make_ptr(dtype, buffer.toint() + Int32(byte), cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def put_chunk(words: cute.Tensor, address: Int64, policy: Int64) -> None:
    """16 bytes of registers into the result."""
    _put_chunk(address, [words[i] for i in range(4)], policy)


@dsl_user_op
def _put_chunk(address: Int64, words: list[Uint32], policy: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """The DSL's own stores take no policy."""
    at = {"loc": loc, "ip": ip}
    llvm.inline_asm(
        None,
        [address.ir_value(**at), *(word.ir_value(**at) for word in words), policy.ir_value(**at)],
        "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;",
        "l,r,r,r,r,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )


def at_address(address: Int64, dtype: Any, count: int = 1) -> cute.Tensor:
    """`count` values of the result, aligned to all of them."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=count * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))
