"""How the threads of a direct tile load an operand: into the swizzled boxes that wgmma reads, whatever its row pitch.

Lines are what is contiguous in memory: of a k-major operand a row's part of the k tile, else a part of the tile's rows
for each k. A box has a line of `span` bytes for each of its rows, with its 16-byte chunks `swizzled`, as TMA would
leave it. What is dealt to the threads in turn are

    chunks    of 16 bytes, if every line starts on such: each is one cp.async to its place
    words     of 4 bytes, else, if every line starts on such: the same, so that 32 lanes copy 128 bytes side by side
    chunks    else: cp.async brings the aligned ones that hold the line, one more than it has, to their places, and the
              one behind them to a place beside the boxes. Once they are there, the same warp, which has all of a line,
              realigns them by words and then by bytes where they are

cp.async fills with zeros what lies outside of the operand. Before a line is realigned, what follows the operand's end
is the next line: zeros take its place then, for it would meet the other operand's zeros, and may be NaN.
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
UNITS = CHUNK_BYTES, WORD_BYTES
LINE_BYTES = 128  # of the L1 cache
IN_FLIGHT = 2  # lines that a thread realigns at a time: of more, it would lack registers


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
    def total(self) -> int:
        return self.boxes * self.rows

    def units(self, size: int) -> int:
        """Of so many bytes in a line."""
        return self.span // size

    def step(self, size: int) -> int:
        """From a line of a thread to the next, if so many bytes are dealt."""
        return self.threads // self.units(size)

    def turns(self, size: int) -> int:
        """How many lines a thread has a part of."""
        return -(-self.total // self.step(size))

    @property
    def bytes(self) -> int:
        """Of the boxes of a stage."""
        return self.total * self.span

    @property
    def beside_bytes(self) -> int:
        """A chunk for each line."""
        return self.total * CHUNK_BYTES


def lines_of(tile: Tile, operand: str, major: str, in_dtype: str, threads: int) -> Lines:
    """`operand`: "a" or "b"."""
    span, rows = load_box(tile, operand, major, in_dtype)
    extent = tile.cta_m if operand == "a" else tile.mma_n
    boxes = 1 if major == "k" else extent // span
    return Lines(major == "k", boxes, rows, span * ELEMENT_BYTES, threads, direct_stage_bytes(tile, in_dtype))


@dataclasses.dataclass(frozen=True)
class Loader:
    """A thread's part of an operand, which is smaller than 2^31 bytes. Offsets are bytes from `base`, which is on 16.

    `offset`: of the thread's own first chunk, or word, of k tile 0; `end`: of the operand's end; `pitch`: from a line
    to the next. `line`: the thread's first line, along the operand's other dimension, of which there are `num_lines`;
    `place`: its first element along the contiguous dimension, which has `size`. `smem`, `beside`: stage 0, and the
    place of the chunks beside its boxes.
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
    beside: Int32
    tidx: Int32
    has_chunks: Boolean
    has_words: Boolean

    @property
    def is_torn(self) -> Any:
        """Whether lines begin within lines of the cache."""
        return (self.size & (LINE_BYTES // ELEMENT_BYTES - 1)) != 0

    @cute.jit
    def fill(
        self,
        k_idx: Int32,
        stage: Int32,
        is_aligned: cutlass.Constexpr[bool],
        is_cached: cutlass.Constexpr[bool],
    ) -> None:
        """Sends a k tile on its way into a stage. `is_aligned`: lines are known to start on chunks; `is_cached`: these
        come by way of the L1 cache."""
        if cutlass.const_expr(is_aligned):  # noqa: SIM114 (a compile-time condition stands alone)
            self._fill_whole(k_idx, stage, CHUNK_BYTES, is_cached)
        elif self.has_chunks:
            self._fill_whole(k_idx, stage, CHUNK_BYTES, is_cached)
        elif self.has_words:
            self._fill_whole(k_idx, stage, WORD_BYTES, True)
        else:
            self._fill_raw(k_idx, stage, is_cached)

    @cute.jit
    def realign(self, k_idx: Int32, stage: Int32, is_aligned: cutlass.Constexpr[bool]) -> None:
        """What has come, where lines start anywhere, by the warp that loaded it."""
        if cutlass.const_expr(not is_aligned):  # noqa: SIM102
            if not (self.has_chunks | self.has_words):
                self._realign(k_idx, stage)

    def _fill_whole(self, k_idx: Int32, stage: Int32, size: int, is_cached: bool) -> None:
        """Chunks, or words, that are the operand's as a whole, or not at all."""
        for turn in range(self.lines.turns(size)):
            self._fill_line(turn, k_idx, stage, size, is_cached)

    @cute.jit
    def _fill_line(
        self,
        turn: cutlass.Constexpr[int],
        k_idx: Int32,
        stage: Int32,
        size: cutlass.Constexpr[int],
        is_cached: cutlass.Constexpr[bool],
    ) -> None:
        offset, lines, rest = self._of_turn(turn, k_idx, size)
        count = cutlass.select_(cutlass.min(lines, rest) > 0, Int32(size), Int32(0))
        place = self._place(turn, stage, size)
        if cutlass.const_expr(self._has_all(turn, size)):  # noqa: SIM114
            cp_async(place, self.base, offset, count, size, is_cached)
        elif self._has(turn, size):
            cp_async(place, self.base, offset, count, size, is_cached)

    @cute.jit
    def _fill_raw(self, k_idx: Int32, stage: Int32, is_cached: cutlass.Constexpr[bool]) -> None:
        for turn in cutlass.range_constexpr(self.lines.turns(CHUNK_BYTES)):
            if cutlass.const_expr(self._has_all(turn, CHUNK_BYTES)):  # noqa: SIM114
                self._fill_raw_line(turn, k_idx, stage, is_cached)
            elif self._has(turn, CHUNK_BYTES):
                self._fill_raw_line(turn, k_idx, stage, is_cached)

    @cute.jit
    def _fill_raw_line(
        self, turn: cutlass.Constexpr[int], k_idx: Int32, stage: Int32, is_cached: cutlass.Constexpr[bool]
    ) -> None:
        """A line's last chunk has another one behind it."""
        offset, lines, rest = self._of_turn(turn, k_idx, CHUNK_BYTES)
        is_line = lines > 0
        first, line_end = offset & -CHUNK_BYTES, offset + rest * ELEMENT_BYTES
        own = self._inside(first, line_end, is_line)
        cp_async(self._place(turn, stage, CHUNK_BYTES), self.base, first, own, CHUNK_BYTES, is_cached)
        if self._is_last():
            second = first + CHUNK_BYTES
            rest = self._inside(second, line_end, is_line)
            cp_async(self._beside(turn, stage), self.base, second, rest, CHUNK_BYTES, is_cached)

    @cute.jit
    def _realign(self, k_idx: Int32, stage: Int32) -> None:
        """Of IN_FLIGHT lines, all loads from shared memory are on their way before the first chunk is stored there."""
        cute.arch.sync_warp()
        turns = cutlass.const_expr(self.lines.turns(CHUNK_BYTES))
        whole = cutlass.const_expr(turns if self._has_all(turns - 1, CHUNK_BYTES) else turns - 1)
        for first in cutlass.range_constexpr(0, whole, IN_FLIGHT):
            self._realign_chunks(first, min(first + IN_FLIGHT, whole), k_idx, stage)
        if cutlass.const_expr(whole < turns):  # noqa: SIM102
            if self._has(whole, CHUNK_BYTES):  # all lanes of a warp or none
                self._realign_chunks(whole, turns, k_idx, stage)

    @cute.jit
    def _realign_chunks(
        self, first: cutlass.Constexpr[int], end: cutlass.Constexpr[int], k_idx: Int32, stage: Int32
    ) -> None:
        words, rests = [], []
        for turn in cutlass.range_constexpr(first, end):
            offset, _, rest = self._of_turn(turn, k_idx, CHUNK_BYTES)
            place = self._place(turn, stage, CHUNK_BYTES)
            words.append(aligned(place, self._behind(turn, stage), offset & (CHUNK_BYTES - 1)))
            rests.append(rest)
        if cutlass.const_expr(len(rests) > 0):
            if rests[-1] < CHUNK_ELEMS:  # the least: boxes ascend
                for own, rest in zip(words, rests, strict=True):
                    for i in cutlass.range_constexpr(WORDS):
                        of_one = cutlass.select_(rest > 2 * i, Uint32(0xFFFF), Uint32(0))
                        own[i] = own[i] & cutlass.select_(rest > 2 * i + 1, Uint32(0xFFFFFFFF), of_one)
            cute.arch.sync_warp()  # everybody has read what others now write
        for turn in cutlass.range_constexpr(first, end):
            cute.autovec_copy(words[turn - first], shared_chunk(self._place(turn, stage, CHUNK_BYTES)))

    def _at(self, turn: int, size: int) -> tuple[Any, Any]:
        """Of a thread's line: its box, and the lines in that box behind the thread's first."""
        lines, step = self.lines, self.lines.step(size)
        if lines.boxes == 1:
            return 0, turn * step
        if lines.rows % step == 0:
            return turn * step // lines.rows, turn * step % lines.rows
        own = self.tidx // lines.units(size)
        line = own + turn * step
        return line // lines.rows, line % lines.rows - own

    def _has_all(self, turn: int, size: int) -> bool:
        """Whether every thread has such a line."""
        return (turn + 1) * self.lines.step(size) <= self.lines.total

    def _has(self, turn: int, size: int) -> Any:
        return self.tidx // self.lines.units(size) + turn * self.lines.step(size) < self.lines.total

    def _of_turn(self, turn: int, k_idx: Int32, size: int) -> tuple[Int32, Int32, Int32]:
        """Of a thread's part of a k tile: its offset, and how many lines the operand has from its own on, and elements
        of a line from its first on, both perhaps negative numbers."""
        lines = self.lines
        box, behind = self._at(turn, size)
        elems = lines.span // ELEMENT_BYTES
        if lines.is_k_major:
            offset = self.offset + behind * self.pitch + k_idx * lines.span
            return offset, self.num_lines - self.line - behind, self.size - self.place - k_idx * elems
        line = behind + k_idx * lines.rows
        offset = self.offset + line * self.pitch + box * lines.span
        return offset, self.num_lines - self.line - line, self.size - self.place - box * elems

    def _row(self, turn: int, size: int) -> tuple[Any, Any]:
        """The box of a thread's line, and its row there."""
        box, behind = self._at(turn, size)
        return box, self.tidx // self.lines.units(size) + behind

    def _place(self, turn: int, stage: Int32, size: int) -> Int32:
        """Where a thread's part belongs."""
        byte = self.tidx % self.lines.units(size) * size
        return self._of_chunk(turn, stage, size, byte // CHUNK_BYTES) + byte % CHUNK_BYTES

    def _behind(self, turn: int, stage: Int32) -> Int32:
        """Where the chunk is that follows the thread's."""
        chunk = (self.tidx + 1) % self.lines.units(CHUNK_BYTES)
        inside = self._of_chunk(turn, stage, CHUNK_BYTES, chunk)
        return cutlass.select_(self._is_last(), self._beside(turn, stage), inside)

    def _is_last(self) -> Any:
        chunks = self.lines.units(CHUNK_BYTES)
        return self.tidx % chunks == chunks - 1

    def _of_chunk(self, turn: int, stage: Int32, size: int, chunk: Any) -> Int32:
        lines, (box, row) = self.lines, self._row(turn, size)
        start = self.smem + stage * lines.stage_bytes + (box * lines.rows + row) * lines.span
        return start + swizzled(chunk, row, lines.span) * CHUNK_BYTES

    def _beside(self, turn: int, stage: Int32) -> Int32:
        """Of lines of 128 bytes in the banks that the 7 others which are read with it leave free: the first chunk's.
        Of shorter ones, of which several are read at a time, two of 8 such chunks meet others in their banks."""
        lines, (box, row) = self.lines, self._row(turn, CHUNK_BYTES)
        return self.beside + stage * lines.stage_bytes + (box * lines.rows + row) * CHUNK_BYTES

    def _inside(self, offset: Int32, line_end: Int32, is_line: Any) -> Int32:
        """Bytes of a chunk that are the operand's, or none if it has nothing of the line."""
        left = cutlass.min(self.end - offset, CHUNK_BYTES)
        return cutlass.select_(is_line & (offset < line_end), left, Int32(0))


def loader_of(
    lines: Lines,
    operand: cute.Pointer,
    boxes: cute.Tensor,
    beside: cute.Pointer,
    tile: tuple[Any, Any],
    sizes: tuple[Any, Any, Any],
    tidx: Int32,
    is_aligned: bool,
) -> Loader:
    """`tile`: (matrix, first row or column); `sizes`: (m or n, k, batch) of the operand."""
    extent, k, batch = sizes
    num_lines, size = (extent, k) if lines.is_k_major else (k, extent)
    has_chunks, has_words = [is_aligned or size * ELEMENT_BYTES % unit == 0 for unit in UNITS]
    of_line = [(tidx // lines.units(unit), tidx % lines.units(unit) * (unit // ELEMENT_BYTES)) for unit in UNITS]
    own, chunk = of_line[0]
    if not is_aligned:
        deals_words = has_words & (size * ELEMENT_BYTES % CHUNK_BYTES != 0)
        own, chunk = (cutlass.select_(deals_words, word, chunk) for chunk, word in zip(*of_line, strict=True))
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
        smem=Int32(cute.recast_ptr(boxes.iterator, swizzle_=None).toint()),
        beside=Int32(beside.toint()),
        tidx=tidx,
        has_chunks=Boolean(has_chunks),
        has_words=Boolean(has_words),
    )


def aligned(source: Int32, behind: Int32, skew: Int32) -> cute.Tensor:
    """The 16 bytes that begin `skew` bytes, an even number, behind `source`, of two chunks in shared memory."""
    both = cute.make_rmem_tensor(2 * WORDS, Uint32)
    for i, chunk in enumerate((source, behind)):
        half = cute.make_tensor(both.iterator + i * WORDS, cute.make_layout(WORDS))
        cute.autovec_copy(shared_chunk(chunk), half)
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


def cp_async(place: Int32, base: Int64, offset: Int32, count: Int32, size: int, is_cached: bool) -> None:
    """The first `count` of `size` bytes, 4 or 16, from global to shared memory, both at multiples of that, and zeros
    behind them."""
    address = base + Int64(Uint32(offset))
    smem = cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=size)
    gmem = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=size)
    _cp_async(smem, gmem, count, size, is_cached)


@dsl_user_op
def _cp_async(
    smem: cute.Pointer, gmem: cute.Pointer, count: Int32, size: int, is_cached: bool, *, loc: Any = None, ip: Any = None
) -> None:
    """The DSL's copy atom has no count. `is_cached`: by way of the L1 cache, as all that is less than a chunk."""
    at = {"loc": loc, "ip": ip}
    kinds = nvvm.LoadCacheModifierKind
    kind = kinds.CA if is_cached else kinds.CG
    left = count.ir_value(**at)
    nvvm.cp_async_shared_global(smem.to_llvm_ptr(**at), gmem.to_llvm_ptr(**at), size, kind, cp_size=left, **at)
