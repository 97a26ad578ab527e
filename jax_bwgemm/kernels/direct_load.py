"""How the threads of a direct tile load an operand: into the swizzled boxes that wgmma reads, whatever its row pitch.

Lines are what is contiguous in memory: of a k-major operand a row's part of the k tile, else a part of the tile's rows
for each k. A box has a line of `span` bytes for each of its rows, with its 16-byte chunks `swizzled`, as TMA would
leave it. Chunks are dealt to the threads in turn, so those of a line belong to one warp, always the same:

    aligned   every line starts on 16 bytes, and so do all of its chunks: each is one cp.async to its place
    paired    every line starts on 4 bytes: each chunk is four cp.async
    raw       else cp.async brings the aligned chunks that hold the line, one more than it has, to a place beside the
              stages. Once they are there, the same warp realigns them, by words and then by bytes, into the box

cp.async fills with zeros what lies outside of the operand. In a raw line what follows the operand's end is the next
line: zeros take its place while it is realigned, for it would meet the other operand's zeros, and may be NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from jax_bwgemm.facts.resources import CHUNK_BYTES, direct_stage_bytes, load_box
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.sm90_fragments import swizzled

ELEMENT_BYTES = 2
CHUNK_ELEMS = CHUNK_BYTES // ELEMENT_BYTES
WORD_BYTES = 4  # the least that cp.async moves, PTX ISA
WORDS = CHUNK_BYTES // WORD_BYTES


@dataclasses.dataclass(frozen=True)
class Lines:
    """Those of one stage of an operand: `boxes` of `rows` lines each, of `span` bytes, for so many `threads`;
    `stage_bytes` from a stage to the next."""

    is_k_major: bool
    boxes: int
    rows: int
    span: int
    threads: int
    stage_bytes: int

    @property
    def chunks(self) -> int:
        """Of a line."""
        return self.span // CHUNK_BYTES

    @property
    def total(self) -> int:
        return self.boxes * self.rows

    @property
    def step(self) -> int:
        """From a line of a thread to the next."""
        return self.threads // self.chunks

    @property
    def turns(self) -> int:
        """How many lines a thread has a chunk of."""
        return -(-self.total // self.step)

    @property
    def raw_line(self) -> int:
        return self.span + CHUNK_BYTES

    @property
    def bytes(self) -> int:
        """Of a stage."""
        return self.total * self.span

    @property
    def raw_bytes(self) -> int:
        return self.total * self.raw_line


def lines_of(tile: Tile, operand: str, major: str, in_dtype: str, threads: int) -> Lines:
    """`operand`: "a" or "b"."""
    span, rows = load_box(tile, operand, major, in_dtype)
    extent = tile.cta_m if operand == "a" else tile.mma_n
    boxes = 1 if major == "k" else extent // span
    return Lines(major == "k", boxes, rows, span * ELEMENT_BYTES, threads, direct_stage_bytes(tile, in_dtype))


@dataclasses.dataclass(frozen=True)
class Loader:
    """A thread's part of an operand, which is smaller than 2^31 bytes. Offsets are bytes from `base`, which is on 16.

    `offset`: of the thread's own first chunk of k tile 0; `end`: of the operand's end; `pitch`: from a line to the
    next. `line`: the thread's first line, along the operand's other dimension, of which there are `num_lines`; `place`:
    its chunk's first element along the contiguous dimension, which has `size`. `smem`, `raw`: stage 0, and the place of
    its raw lines.
    """

    lines: Lines
    base: Int64
    offset: Int32
    end: Int32
    pitch: Int32
    line: Int32
    num_lines: Int32
    place: Int32
    size: Int32
    smem: Int32
    raw: Int32
    tidx: Int32
    is_aligned: Boolean
    is_paired: Boolean

    @cute.jit
    def fill(self, k_idx: Int32, stage: Int32, is_aligned: cutlass.Constexpr[bool]) -> None:
        """Sends a k tile on its way into a stage, or its raw lines. `is_aligned`: it is known to be."""
        if cutlass.const_expr(is_aligned):  # noqa: SIM114 (a compile-time condition stands alone)
            self._fill_aligned(k_idx, stage)
        elif self.is_aligned:
            self._fill_aligned(k_idx, stage)
        elif self.is_paired:
            self._fill_paired(k_idx, stage)
        else:
            self._fill_raw(k_idx, stage)

    @cute.jit
    def realign(self, k_idx: Int32, stage: Int32, is_aligned: cutlass.Constexpr[bool]) -> None:
        """Raw lines that have come -> boxes, by the warp that loaded them."""
        if cutlass.const_expr(not is_aligned):  # noqa: SIM102
            if not (self.is_aligned | self.is_paired):
                self._realign(k_idx, stage)

    @cute.jit
    def _fill_aligned(self, k_idx: Int32, stage: Int32) -> None:
        lines = self.lines
        for turn in cutlass.range_constexpr(lines.turns):
            offset, is_line, rest = self._of_turn(turn, k_idx)
            count = cutlass.select_(is_line & (rest > 0), Int32(CHUNK_BYTES), Int32(0))
            place = self._place(turn, stage)
            if cutlass.const_expr(self._has_all(turn)):  # noqa: SIM114
                cp_async(place, self.base, offset, count)
            elif self._has(turn):
                cp_async(place, self.base, offset, count)

    @cute.jit
    def _fill_paired(self, k_idx: Int32, stage: Int32) -> None:
        for turn in cutlass.range_constexpr(self.lines.turns):
            if cutlass.const_expr(self._has_all(turn)):  # noqa: SIM114
                self._fill_pairs(turn, k_idx, stage)
            elif self._has(turn):
                self._fill_pairs(turn, k_idx, stage)

    @cute.jit
    def _fill_pairs(self, turn: cutlass.Constexpr[int], k_idx: Int32, stage: Int32) -> None:
        offset, is_line, rest = self._of_turn(turn, k_idx)
        left, place = cutlass.select_(is_line, rest * ELEMENT_BYTES, Int32(0)), self._place(turn, stage)
        for i in cutlass.range_constexpr(WORDS):
            count = cutlass.max(cutlass.min(left - WORD_BYTES * i, WORD_BYTES), 0)
            cp_async(place + WORD_BYTES * i, self.base, offset + WORD_BYTES * i, count, WORD_BYTES)

    @cute.jit
    def _fill_raw(self, k_idx: Int32, stage: Int32) -> None:
        """A line's last chunk has another one behind it."""
        for turn in cutlass.range_constexpr(self.lines.turns):
            if cutlass.const_expr(self._has_all(turn)):  # noqa: SIM114
                self._fill_raw_line(turn, k_idx, stage)
            elif self._has(turn):
                self._fill_raw_line(turn, k_idx, stage)

    @cute.jit
    def _fill_raw_line(self, turn: cutlass.Constexpr[int], k_idx: Int32, stage: Int32) -> None:
        offset, is_line, rest = self._of_turn(turn, k_idx)
        first, line_end, place = offset & -CHUNK_BYTES, offset + rest * ELEMENT_BYTES, self._raw_place(turn, stage)
        cp_async(place, self.base, first, self._inside(first, line_end, is_line))
        if self.tidx % self.lines.chunks == self.lines.chunks - 1:
            second = first + CHUNK_BYTES
            cp_async(place + CHUNK_BYTES, self.base, second, self._inside(second, line_end, is_line))

    @cute.jit
    def _realign(self, k_idx: Int32, stage: Int32) -> None:
        """All loads from shared memory are on their way before the first chunk is stored there: the compiler would keep
        them in turn, for it cannot know that boxes and raw lines are apart."""
        cute.arch.sync_warp()
        turns, has_all = cutlass.const_expr(self.lines.turns), cutlass.const_expr(self._has_all(self.lines.turns - 1))
        whole = cutlass.const_expr(turns if has_all else turns - 1)
        self._realign_chunks(0, whole, k_idx, stage)
        if cutlass.const_expr(whole < turns):  # noqa: SIM102
            if self._has(whole):
                self._realign_chunks(whole, turns, k_idx, stage)

    @cute.jit
    def _realign_chunks(
        self, first: cutlass.Constexpr[int], end: cutlass.Constexpr[int], k_idx: Int32, stage: Int32
    ) -> None:
        words, rests = [], []
        for turn in cutlass.range_constexpr(first, end):
            offset, _, rest = self._of_turn(turn, k_idx)
            words.append(aligned(self._raw_place(turn, stage), offset & (CHUNK_BYTES - 1)))
            rests.append(rest)
        if cutlass.const_expr(len(rests) > 0):  # noqa: SIM102
            if rests[-1] < CHUNK_ELEMS:  # the least: boxes ascend
                for own, rest in zip(words, rests, strict=True):
                    for i in cutlass.range_constexpr(WORDS):
                        of_one = cutlass.select_(rest > 2 * i, Uint32(0xFFFF), Uint32(0))
                        own[i] = own[i] & cutlass.select_(rest > 2 * i + 1, Uint32(0xFFFFFFFF), of_one)
        for turn in cutlass.range_constexpr(first, end):
            cute.autovec_copy(words[turn - first], shared_chunk(self._place(turn, stage)))

    def _at(self, turn: int) -> tuple[Any, Any]:
        """Of a thread's line: its box, and the lines in that box behind the thread's first."""
        lines = self.lines
        if lines.boxes == 1:
            return 0, turn * lines.step
        if lines.rows % lines.step == 0:
            return turn * lines.step // lines.rows, turn * lines.step % lines.rows
        own = self.tidx // lines.chunks
        line = own + turn * lines.step
        return line // lines.rows, line % lines.rows - own

    def _has_all(self, turn: int) -> bool:
        """Whether every thread has such a line."""
        return (turn + 1) * self.lines.step <= self.lines.total

    def _has(self, turn: int) -> Any:
        return self.tidx // self.lines.chunks + turn * self.lines.step < self.lines.total

    def _of_turn(self, turn: int, k_idx: Int32) -> tuple[Int32, Any, Int32]:
        """Of a thread's chunk of a k tile: its offset, whether the operand has its line, and how many of its elements
        it has from that chunk on, perhaps a negative number."""
        lines = self.lines
        box, behind = self._at(turn)
        elems = lines.span // ELEMENT_BYTES
        if lines.is_k_major:
            offset = self.offset + behind * self.pitch + k_idx * lines.span
            return offset, self.line + behind < self.num_lines, self.size - self.place - k_idx * elems
        line = behind + k_idx * lines.rows
        offset = self.offset + line * self.pitch + box * lines.span
        return offset, self.line + line < self.num_lines, self.size - self.place - box * elems

    def _place(self, turn: int, stage: Int32) -> Int32:
        """Where a thread's chunk belongs."""
        lines, (box, behind) = self.lines, self._at(turn)
        row = self.tidx // lines.chunks + behind
        chunk = swizzled(self.tidx % lines.chunks, row, lines.span)
        return self.smem + stage * lines.stage_bytes + (box * lines.rows + row) * lines.span + chunk * CHUNK_BYTES

    def _raw_place(self, turn: int, stage: Int32) -> Int32:
        lines, (box, behind) = self.lines, self._at(turn)
        row = box * lines.rows + self.tidx // lines.chunks + behind
        return self.raw + stage * lines.stage_bytes + row * lines.raw_line + self.tidx % lines.chunks * CHUNK_BYTES

    def _inside(self, offset: Int32, line_end: Int32, is_line: Any) -> Int32:
        """Bytes of a chunk that are the operand's, or none if it has nothing of the line."""
        left = cutlass.min(self.end - offset, CHUNK_BYTES)
        return cutlass.select_(is_line & (offset < line_end), left, Int32(0))


def aligned(source: Int32, skew: Int32) -> cute.Tensor:
    """The 16 bytes that begin `skew` bytes, an even number, behind `source` in shared memory."""
    both = cute.make_rmem_tensor(2 * WORDS, Uint32)
    for i in range(2):
        half = cute.make_tensor(both.iterator + i * WORDS, cute.make_layout(WORDS))
        cute.autovec_copy(shared_chunk(source + i * CHUNK_BYTES), half)
    moved = [both[i] for i in range(2 * WORDS)]
    for step in (2, 1):
        is_moved = (skew & (4 * step)) != 0
        moved = [cutlass.select_(is_moved, moved[i + step], moved[i]) for i in range(len(moved) - step)]
    words = cute.make_rmem_tensor(WORDS, Uint32)
    for i in range(WORDS):
        words[i] = Uint32(cute.arch.prmt(moved[i], moved[i + 1], 0x3210 + (skew & 2) * 0x1111))
    return words


def shared_chunk(address: Int32) -> cute.Tensor:
    place = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
    return cute.make_tensor(place, cute.make_layout(WORDS))


def cp_async(place: Int32, base: Int64, offset: Int32, count: Int32, size: int = CHUNK_BYTES) -> None:
    """The first `count` of `size` bytes, 4 or 16, from global to shared memory, both at multiples of that, and zeros
    behind them."""
    address = base + Int64(Uint32(offset))
    smem = cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=size)
    gmem = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=size)
    _cp_async(smem, gmem, count, size)


@dsl_user_op
def _cp_async(
    smem: cute.Pointer, gmem: cute.Pointer, count: Int32, size: int, *, loc: Any = None, ip: Any = None
) -> None:
    """The DSL's copy atom has no count. By way of the L1 cache only what is less than a chunk."""
    at = {"loc": loc, "ip": ip}
    kinds = nvvm.LoadCacheModifierKind
    kind = kinds.CG if size == CHUNK_BYTES else kinds.CA
    left = count.ir_value(**at)
    nvvm.cp_async_shared_global(smem.to_llvm_ptr(**at), gmem.to_llvm_ptr(**at), size, kind, cp_size=left, **at)
