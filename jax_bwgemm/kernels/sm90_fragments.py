"""How threads pick the fragments of an m-major A out of shared memory, and which row of the product is whose.

`sm90_loop` has the loop around it. A wgmma takes 32 bytes of k; in them (PTX ISA, wgmma.mma_async.m64nNk8 and
m64nNk32, matrix A) lane 4 g + t of a warp has in its four registers:

    register        0             1                 2                 3
    4-byte A        row g, k t    row g + 8, k t    row g, k t + 4    row g + 8, k t + 4
    1-byte A        the same with k 4 t .. 4 t + 3 in place of k t, and 16 + 4 t .. in place of k t + 4

A stage of A is in shared memory as TMA left it: boxes of 128 bytes of m (64 where a CTA has 64 or 192 rows of bytes),
in each of which a k has a row, with its 16-byte chunks `swizzled`. What m a wgmma's row is, is free as long as the
store undoes it: `slab_rows` is chosen such that no two lanes of a load want different words of a bank.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cutlass
from cutlass import Uint16, Uint32, cute
from cutlass.cute.nvgpu import warp

from jax_bwgemm.facts.tile import SWIZZLE_BYTES, Tile
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.outlets import StoreGroup

SLAB_ROWS = 64  # of a wgmma
REGISTERS = 4  # of a fragment
MMA_K_BYTES = 32
STEPS = SWIZZLE_BYTES // MMA_K_BYTES  # of a stage
BANKS_BYTES = 128
CHUNK_BYTES = 16
LOW_FIRST, HIGH_FIRST = (0x6420, 0x7531), (0x2064, 0x3175)  # prmt of two registers: their even bytes, their odd ones


def swizzled(chunk: Any, row: Any, row_bytes: int) -> Any:
    """Where the `chunk`-th 16 bytes of a row lie in it, for a swizzle of a row's width (CUDA driver API)."""
    return chunk ^ (row * row_bytes // BANKS_BYTES % (row_bytes // CHUNK_BYTES))


@dataclasses.dataclass(frozen=True)
class Fragments:
    """`side_by_side` warpgroups are dealt the slabs of a tile in turn."""

    tile: Tile
    stages: int
    side_by_side: int

    @property
    def slabs(self) -> int:
        """Of a warpgroup."""
        return self.tile.cta_m // (SLAB_ROWS * self.side_by_side)


@dataclasses.dataclass(frozen=True)
class WordFragments(Fragments):
    """Of 4 bytes an element: by a plain load for each register.

    The four k of a load move 4 chunks among themselves. Lanes of neighbouring rows, two chunks of them, would meet in
    the same banks there, so a warp's rows are of chunks c and c + 4 at a time, if the store `follows`.
    """

    follows: bool

    def slab_rows(self) -> cute.Layout:
        """Row of a wgmma -> row of the slab that it multiplies."""
        if not self.follows:
            return cute.make_layout(SLAB_ROWS)
        return cute.make_layout((4, 2, 2, 2, 2), stride=(1, 16, 4, 8, 32))

    def sources(self, sA: cute.Tensor, group: StoreGroup) -> tuple[Any, ...]:
        """A thread's elements, for each register: (slab, step of k, stage)."""
        lane, warp_idx = group.tidx % 32, group.tidx // 32
        slab, box_m = SLAB_ROWS * self.tile.k_tile, BANKS_BYTES // 4
        layout = cute.make_layout(
            (self.slabs, STEPS, self.stages),
            stride=(slab * self.side_by_side, box_m * MMA_K_BYTES // 4, self.tile.cta_m * self.tile.k_tile),
        )
        base = cute.recast_ptr(sA.iterator, swizzle_=None) + group.idx % self.side_by_side * slab
        found = []
        for i in range(REGISTERS):
            row = self.slab_rows()(16 * warp_idx + 8 * (i % 2) + lane // 4)
            k = 4 * (i // 2) + lane % 4
            offset = row // box_m * (box_m * self.tile.k_tile) + k * box_m
            offset += swizzled(row % box_m // 4, k, BANKS_BYTES) * 4 + row % 4
            found.append(cute.make_tensor(base + offset, layout))
        return tuple(found)

    def pick(self, fA: cute.Tensor, sources: tuple[Any, ...], slab: int, step: int, stage: Any) -> None:
        """The fragment of a slab and a step of k."""
        for i, source in enumerate(sources):
            fA[i, slab, step] = source[slab, step, stage]


@dataclasses.dataclass(frozen=True)
class ByteFragments(Fragments):
    """Of 1 byte an element: by a transposing ldmatrix, for which two neighbouring m are one element of 16 bits.

    A matrix is 16 m of 8 k, whose rows the lanes name in any order; of it, lane 4 g + t gets m 2 g and 2 g + 1 of its
    k 2 t and 2 t + 1. Two matrices have the four k that the lane needs, and prmt takes them apart: m 2 g is row g of
    the wgmma, m 2 g + 1 row g + 8. Four of them are a warp's 16 rows of a step.

    The k of a matrix differ modulo 8, by which their chunks are swizzled: for t = 0 and 1 it has the first two of the
    four k, for t = 2 and 3 the last two, and its neighbour has the others.

    An n-major store pays for these rows: stmatrix writes every second one, of which two meet in the same banks.
    """

    def slab_rows(self) -> cute.Layout:
        """Row of a wgmma -> row of the slab that it multiplies."""
        return cute.make_layout((8, 2, 4), stride=(2, 1, 16))

    def sources(self, sA: cute.Tensor, group: StoreGroup) -> tuple[Any, ...]:
        """What prmt takes for m 2 g, and for m 2 g + 1. Then for each slab the row of a matrix that the lane names, in
        pairs of m: (8, 1, step of k, stage)."""
        lane, warp_idx = group.tidx % 32, group.tidx // 32
        box_m = math.gcd(BANKS_BYTES, self.tile.cta_m)
        k = matrix_k(lane // 8, lane % 8)
        layout = cute.make_layout(
            (8, 1, STEPS, self.stages), stride=(1, 0, box_m * MMA_K_BYTES // 2, self.tile.cta_m * self.tile.k_tile // 2)
        )
        base = cute.recast_ptr(sA.iterator, swizzle_=None, dtype=Uint16)
        picks = zip(LOW_FIRST, HIGH_FIRST, strict=True)
        found: list[Any] = [cutlass.select_(lane % 4 < 2, Uint32(low), Uint32(high)) for low, high in picks]
        for i in range(self.slabs):
            row = (group.idx % self.side_by_side + i * self.side_by_side) * SLAB_ROWS + 16 * warp_idx
            offset = row // box_m * (box_m * self.tile.k_tile) + k * box_m
            offset += swizzled(row % box_m // CHUNK_BYTES, k, box_m) * CHUNK_BYTES
            found.append(cute.make_tensor((base + offset // 2).align(CHUNK_BYTES), layout))
        return tuple(found)

    def pick(self, fA: cute.Tensor, sources: tuple[Any, ...], slab: int, step: int, stage: Any) -> None:
        """The fragment of a slab and a step of k."""
        even, odd, *rows = sources
        pairs = cute.make_rmem_tensor((8, 1), Uint16)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), Uint16)
        cute.copy(ldmatrix, rows[slab][None, None, step, stage], pairs)
        words, registers = cute.recast_tensor(pairs, Uint32), cute.recast_tensor(fA, Uint32)
        for i in range(0, REGISTERS, 2):
            registers[i, slab, step] = Uint32(cute.arch.prmt(words[i], words[i + 1], even))
            registers[i + 1, slab, step] = Uint32(cute.arch.prmt(words[i], words[i + 1], odd))


def matrix_k(matrix: Any, row: Any) -> Any:
    """Of the 32 k of a step, the one that is the `row`-th of the `matrix`-th matrix: rows 2 t and 2 t + 1 for t."""
    t = row // 2
    return 16 * (matrix // 2) + 4 * t + 2 * (matrix % 2 ^ t // 2) + row % 2


def fragments_of(facts: GemmFacts, side_by_side: int) -> WordFragments | ByteFragments | None:
    """How threads pick A's fragments, if it comes from registers."""
    if not facts.a_in_registers:
        return None
    if facts.a_dtype.width == 8:
        return ByteFragments(facts.tile, facts.stages, side_by_side)
    # row_store and the transposing stmatrix take 8 rows at a time
    boxes = facts.boxes
    follows = not (boxes.by_rows or (boxes.c_major == "m" and boxes.dtype.width < 32))
    return WordFragments(facts.tile, facts.stages, side_by_side, follows)


@dataclasses.dataclass(frozen=True)
class SlabRows:
    """Which row of its slab a row of a wgmma is: what the store must undo. `leave_in_pairs`: rows r and r + 8 are
    neighbours, and leave together in an m-major result."""

    fragments: WordFragments | ByteFragments | None
    leave_in_pairs: bool

    def row(self, row: Any) -> Any:
        return row if self.fragments is None else self.fragments.slab_rows()(row)

    def order(self, own: cute.Tensor) -> cute.Tensor:
        """A warpgroup's store buffers (rows, cols, buffer), in the order of its wgmmas' rows."""
        return own if self.fragments is None else cute.composition(own, (self.fragments.slab_rows(), None, None))


def slab_rows_of(fragments: WordFragments | ByteFragments | None, c_major: str) -> SlabRows:
    return SlabRows(fragments, isinstance(fragments, ByteFragments) and c_major == "m")
