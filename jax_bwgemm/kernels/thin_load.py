"""What the threads of a thin tile load: windows of the matrix, each warp its own, and the vectors, for all of them.
`sm90_thin` says in which order."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint16, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from jax_bwgemm.facts import thin
from jax_bwgemm.facts.resources import CHUNK_BYTES
from jax_bwgemm.kernels.direct_load import ELEMENT_BYTES, WORDS, shared_chunk
from jax_bwgemm.kernels.row_store import at_address

WARP_LANES, THREADS = 32, 32 * thin.WARPS
CHUNK = thin.CHUNK_ELEMS
BLOCK_ELEMS = thin.BLOCK_CHUNKS * CHUNK  # along a line
LINES = WARP_LANES // thin.BLOCK_CHUNKS  # of a block, whose chunks a warp sends on their way at once
TURNS = thin.BLOCK_LINES // LINES


@dataclasses.dataclass(frozen=True)
class Lane:
    """A thread's place: its warp; g and t, the row and the pair of columns of a fragment (PTX ISA); `line` and `chunk`,
    which of a block it is the first to send on its way."""

    tidx: Int32

    @property
    def warp(self) -> Int32:
        return self.tidx // WARP_LANES

    @property
    def g(self) -> Int32:
        return self.tidx % WARP_LANES // 4

    @property
    def t(self) -> Int32:
        return self.tidx % 4

    @property
    def line(self) -> Int32:
        return self.tidx % WARP_LANES // thin.BLOCK_CHUNKS

    @property
    def chunk(self) -> Int32:
        return self.tidx % thin.BLOCK_CHUNKS


@dataclasses.dataclass(frozen=True)
class Vectors:
    """b's columns of this CTA, as many as there are: their terms in shared memory, of all warps.

    `start`: the address of the first one's first term; `step`, `to_next`: bytes from a term to the next, and from a
    column, of a matrix that is smaller than 2^31 bytes.
    """

    is_k_major: bool
    start: Int64
    step: Int32
    to_next: Int32
    cols: Int32
    k: Int32
    smem: Int32
    tidx: Int32

    @property
    def shift(self) -> Int32:
        """2 to its power: the columns, of which there is room for 1, 2, 4 or 8."""
        few = cutlass.select_(self.cols <= 2, Int32(1), cutlass.select_(self.cols <= 4, Int32(2), Int32(3)))
        return cutlass.select_(self.cols <= 1, Int32(0), few)

    @property
    def terms(self) -> Int32:
        return Int32(thin.TERMS["k" if self.is_k_major else "m"]) >> self.shift

    @property
    def pitch(self) -> Int32:
        if self.is_k_major:
            return self.terms + thin.vector_pitch("k", 0)
        return Int32(Uint32(self.terms) // CHUNK) + thin.vector_pitch("m", 0)

    @cute.jit
    def fill(self, first: Int32, count: Int32) -> None:
        """`count` terms from `first` on, of each; those that are outside of k are zeros. A thread has some on their
        way at once, of all columns."""
        shift = self.shift
        for base in cutlass.range(self.tidx, count, Int32(THREADS * thin.FILLS) >> shift, unroll=1):
            own = [(Int32(j) & (1 << shift) - 1, base + (Int32(j) >> shift) * THREADS) for j in range(thin.FILLS)]
            values = [self._term(cutlass.min(col, self.cols - 1), first + i) for col, i in own]
            for (col, i), value in zip(own, values, strict=True):
                if (col < self.cols) & (i < count):
                    place = self.place(col, i)
                    place[0] = value

    def _term(self, col: Int32, term: Int32) -> Uint16:
        there = cutlass.max(cutlass.min(term, self.k - 1), 0)  # no branch keeps loads from each other
        offset = col * self.to_next + there * self.step
        value = at_address(self.start + Int64(Uint32(offset)), Uint16)[0]
        return cutlass.select_(term == there, value, Uint16(0))

    def place(self, col: Int32, i: Int32) -> cute.Tensor:
        """The `i`-th of the terms that are there, of a column: those of the lines of one warp lie side by side."""
        line, row = (0, i) if self.is_k_major else (Int32(Uint32(i) % CHUNK), Int32(Uint32(i) // CHUNK))
        element = (line * self.cols + col) * self.pitch + row
        address = self.smem + element * ELEMENT_BYTES
        pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=ELEMENT_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(1))


@dataclasses.dataclass(frozen=True)
class Windows:
    """A warp's part of a matrix that is smaller than 2^31 bytes. Offsets are bytes from `base`, which is on 16.

    A lane sends chunks on their way for all lanes: 8 lanes have those of 128 bytes of a line, for what fewer lanes have
    on end is brought from the L2 cache in whole sectors nevertheless. `offset`: of the lane's first chunk of window 0;
    `end`: of the matrix's end; `pitch`: from a line to the next. `line`: its first line, of `num_lines`; `place`: of
    that chunk's first element along the line, perhaps before it, of `size`. `skew`: how far behind a chunk the warp's
    lines begin. `ring`: the address of the warp's first block in stage 0.
    """

    is_k_major: bool
    lane: Lane
    base: Int64
    offset: Int32
    end: Int32
    pitch: Int32
    line: Int32
    num_lines: Int32
    place: Int32
    size: Int32
    skew: Int32
    ring: Int32

    @property
    def major(self) -> str:
        return "k" if self.is_k_major else "m"

    @property
    def count(self) -> Int32:
        """Those of k; and where rows begin behind a chunk, of up to 7 terms more."""
        terms = thin.window_terms(self.major)
        k = self.size + (CHUNK - 1) if self.is_k_major else self.num_lines
        return Int32(Uint32(k + (terms - 1)) // terms)

    @cute.jit
    def fill(self, window: Int32, stage: Int32) -> None:
        """Sends a window on its way; cp.async fills with zeros what no line of the matrix has. A block's lines are 8 of
        the matrix's apart, of which a lane has chunks of every fourth; its second block is further along the lines."""
        terms = cutlass.const_expr(thin.window_terms(self.major))
        for i in cutlass.range_constexpr(thin.window_chunks(self.major)):
            block, turn = divmod(i, TURNS)
            along = window * terms if cutlass.const_expr(self.is_k_major) else block * BLOCK_ELEMS
            of_line = turn * LINES * thin.WARPS
            if cutlass.const_expr(not self.is_k_major):
                of_line = of_line + window * terms
            offset = self.offset + of_line * self.pitch + along * ELEMENT_BYTES
            is_inside = (self.line + of_line < self.num_lines) & (self.place + along < self.size)
            count = cutlass.select_(is_inside, cutlass.min(self.end - offset, CHUNK_BYTES), Int32(0))
            place = self._in_ring(stage, block, self.lane.line + turn * LINES, self.lane.chunk)
            _cp_async_of_line(place, self.base + Int64(Uint32(offset)), count)

    def _in_ring(self, stage: Int32, block: int, line: Any, chunk: Any) -> Int32:
        start = self.ring + stage * thin.stage_bytes(self.major) + block * thin.BLOCK_BYTES
        return start + thin.chunk_slot(line, chunk) * CHUNK_BYTES

    def words(self, stage: Int32, block: int, line: Any, chunk: Any) -> cute.Tensor:
        """A chunk of the warp's, in registers."""
        found = cute.make_rmem_tensor(WORDS, Uint32)
        cute.autovec_copy(shared_chunk(self._in_ring(stage, block, line, chunk)), found)
        return found

    @cute.jit
    def row_chunks(self, window: Int32, stage: Int32) -> tuple[cute.Tensor, ...]:
        """Of a window of rows, two chunks of row g of the fragment, and of row g + 8 those below: without what is their
        neighbours'."""
        g, t = self.lane.g, self.lane.t
        found = tuple(self.words(stage, 0, g + row, t + chunk) for row in (0, 8) for chunk in (0, 4))
        first = window * thin.window_terms("k")
        if (first < self.skew) | (first + thin.window_terms("k") > self.size + self.skew):
            for i in cutlass.range_constexpr(len(found)):
                begin = first - self.skew + (t + i % 2 * 4) * CHUNK
                for j in cutlass.range_constexpr(WORDS):
                    low = self._if_inside(begin + 2 * j, 0xFFFF)
                    high = self._if_inside(begin + 2 * j + 1, 0xFFFF0000)
                    found[i][j] = found[i][j] & (low | high)
        return found

    def _if_inside(self, term: Int32, mask: int) -> Uint32:
        return cutlass.select_((term >= 0) & (term < self.size), Uint32(mask), Uint32(0))


@dsl_user_op
def _cp_async_of_line(place: Int32, address: Int64, count: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """The first `count` of 16 bytes to shared memory, zeros behind them; and the 128 around them to the L2 cache, for
    other lanes read these. The DSL's own have no such hint."""
    at = {"loc": loc, "ip": ip}
    llvm.inline_asm(
        None,
        [place.ir_value(**at), address.ir_value(**at), count.ir_value(**at)],
        f"cp.async.cg.shared.global.L2::128B [$0], [$1], {CHUNK_BYTES}, $2;",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )
