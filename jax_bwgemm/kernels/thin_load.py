"""What the threads of a thin tile load: windows of the matrix, each its own chunks, and the vectors, for all of them.
`sm90_thin` says in which order."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Int32, Int64, Uint16, Uint32, cute

from jax_bwgemm.facts import thin
from jax_bwgemm.facts.resources import CHUNK_BYTES
from jax_bwgemm.kernels.direct_load import ELEMENT_BYTES, WORDS, cp_async, shared_chunk
from jax_bwgemm.kernels.row_store import at_address

WARP_LANES, THREADS = 32, 32 * thin.WARPS
CHUNK = thin.CHUNK_ELEMS
FILLS = 4  # elements of the vectors that a thread has on their way at once


@dataclasses.dataclass(frozen=True)
class Lane:
    """A thread's place: its warp, and g and t, the row and the pair of columns of a fragment (PTX ISA)."""

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


@dataclasses.dataclass(frozen=True)
class Vectors:
    """b's columns of this CTA, as many as there are: their terms in shared memory, of all warps.

    `start`: the address of the first one's first term; `step`, `to_next`: bytes from a term to the next, and from a
    column.
    """

    is_k_major: bool
    start: Int64
    step: Int64
    to_next: Int64
    cols: Int32
    k: Int32
    smem: Int32
    tidx: Int32

    @property
    def terms(self) -> Int32:
        least, most = thin.FEWEST_TERMS, thin.TERMS
        few = cutlass.select_(self.cols <= 2, Int32(most // 2), cutlass.select_(self.cols <= 4, most // 4, least))
        return cutlass.select_(self.cols <= 1, Int32(most), few)

    @property
    def pitch(self) -> Int32:
        if self.is_k_major:
            return self.terms + thin.vector_pitch("k", 0)
        return Int32(Uint32(self.terms) // CHUNK) + thin.vector_pitch("m", 0)

    @cute.jit
    def fill(self, first: Int32, count: Int32) -> None:
        """`count` terms from `first` on, of each; those that are outside of k are zeros."""
        for col in cutlass.range(self.cols, unroll=1):
            for i in cutlass.range(self.tidx, count, THREADS, unroll=FILLS):
                term = first + i
                there = cutlass.max(cutlass.min(term, self.k - 1), 0)  # no branch keeps loads from each other
                value = at_address(self.start + col * self.to_next + there * self.step, Uint16)[0]
                place = self.place(col, i)
                place[0] = cutlass.select_(term == there, value, Uint16(0))

    def place(self, col: Int32, i: Int32) -> cute.Tensor:
        """The `i`-th of the terms that are there, of a column: those of the lines of one warp lie side by side."""
        line, row = (0, i) if self.is_k_major else (Int32(Uint32(i) % CHUNK), Int32(Uint32(i) // CHUNK))
        element = (line * self.cols + col) * self.pitch + row
        address = self.smem + element * ELEMENT_BYTES
        pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=ELEMENT_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(1))


@dataclasses.dataclass(frozen=True)
class Windows:
    """A thread's part of a matrix that is smaller than 2^31 bytes. Offsets are bytes from `base`, which is on 16.

    `offset`: of its first chunk of window 0; `end`: of the matrix's end; `pitch`: from a line to the next. `line`: its
    first line, of `num_lines`; `place`: of that chunk's first element along the line, perhaps before it, of `size`.
    `skew`: how far behind a chunk the warp's lines begin. `ring`: the address of its first chunk in stage 0.
    """

    is_k_major: bool
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
        """Sends a window on its way; cp.async fills with zeros what no line of the matrix has."""
        for i in cutlass.range_constexpr(thin.window_chunks(self.major)):
            offset, line, place = self._chunk_at(window, i)
            is_inside = (line < self.num_lines) & (place < self.size)
            count = cutlass.select_(is_inside, cutlass.min(self.end - offset, CHUNK_BYTES), Int32(0))
            cp_async(self._in_ring(stage, i), self.base, offset, count, CHUNK_BYTES, True)

    def _chunk_at(self, window: Int32, i: int) -> tuple[Int32, Int32, Int32]:
        """Of the thread's `i`-th chunk of a window: its offset, its line, and its place there. k-major: two halves of a
        window of row g, then of row g + 8 of the fragment, whose rows the warp has 8 apart. m-major: two halves of 128
        rows of each of 4 lines."""
        if self.is_k_major:
            of_row, chunk = i // 2 * (CHUNK * 8), i % 2 * 4 * CHUNK
            along = window * thin.window_terms("k") + chunk
            offset = self.offset + of_row * self.pitch + along * ELEMENT_BYTES
            return offset, self.line + of_row, self.place + along
        of_line, half = window * thin.window_terms("m") + i // 2 * CHUNK, i % 2 * (thin.WINDOW_ROWS // 2)
        return self.offset + of_line * self.pitch + half * ELEMENT_BYTES, self.line + of_line, self.place + half

    def _in_ring(self, stage: Int32, i: int) -> Int32:
        return self.ring + stage * thin.stage_bytes(self.major) + i * (THREADS * CHUNK_BYTES)

    def words(self, stage: Int32, i: int) -> cute.Tensor:
        """The thread's `i`-th chunk, in registers."""
        found = cute.make_rmem_tensor(WORDS, Uint32)
        cute.autovec_copy(shared_chunk(self._in_ring(stage, i)), found)
        return found

    @cute.jit
    def row_chunks(self, window: Int32, stage: Int32) -> tuple[cute.Tensor, ...]:
        """Those of a window of rows, without what is their neighbours'."""
        found = tuple(self.words(stage, i) for i in range(thin.window_chunks("k")))
        first = window * thin.window_terms("k")
        if (first < self.skew) | (first + thin.window_terms("k") > self.size + self.skew):
            for i in cutlass.range_constexpr(len(found)):
                begin = self._chunk_at(window, i)[2]
                for j in cutlass.range_constexpr(WORDS):
                    low = self._if_inside(begin + 2 * j, 0xFFFF)
                    high = self._if_inside(begin + 2 * j + 1, 0xFFFF0000)
                    found[i][j] = found[i][j] & (low | high)
        return found

    def _if_inside(self, term: Int32, mask: int) -> Uint32:
        return cutlass.select_((term >= 0) & (term < self.size), Uint32(mask), Uint32(0))
