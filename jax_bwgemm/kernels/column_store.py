"""The store of an m-major result whose columns all begin on 16 bytes: a warp's own rows, 16 bytes at a time.

A fragment has 16 rows (PTX ISA, wgmma.mma_async, matrix D), which are 32 bytes of each column of 2-byte elements. Its
pairs lie across them, so a warp turns matrices of 8 by 8 in shared memory:

    write   stmatrix.trans, four matrices: both halves of the rows by 16 columns
    read    each lane a half of a column, 16 bytes
    store   these, so that two lanes side by side store a column

Only the warp itself writes and reads its buffer: it needs no barrier but `sync_warp`. Each half has its columns in a
piece of its own; the second has each four in turn the other way round, so that the 8 lanes that read four columns at a
time meet no bank twice, nor do the 8 rows of a matrix.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int64, Uint16, Uint32, cute
from cutlass.cute.nvgpu import warp

from jax_bwgemm.kernels.row_store import CHUNK_BYTES, FRAGMENT_ROWS, MATRICES, WARP_LANES, Rows, put_chunk, within

ELEM_BYTES = 2
HALVES = FRAGMENT_ROWS * ELEM_BYTES // CHUNK_BYTES  # of a column of a fragment
MATRIX_COLS = 8


def buffer_bytes(cols: int) -> int:
    """A warp's, for a fragment of so many columns."""
    return FRAGMENT_ROWS * cols * ELEM_BYTES


def place(col: Any, half: Any, cols: int) -> Any:
    """Where a half of a column lies in the buffer."""
    return (half * cols + (col ^ (half * 4))) * CHUNK_BYTES


@cute.jit
def store_whole_columns(values: cute.Tensor, buffer: cute.Pointer, columns: Rows, cols: cutlass.Constexpr[int]) -> None:
    """A warp's 16 rows of `cols` columns (a multiple of 16), through its `buffer`. `columns`: `Rows` of the transposed
    result."""
    pairs = cute.coalesce(cute.recast_tensor(values, Uint32))  # (half, 8 columns)
    lane = Uint32(cute.arch.lane_idx())
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, MATRICES), Uint16)
    of_one = cute.make_layout((8, 1))  # (element, stmatrix)
    cute.arch.sync_warp()  # all lanes have read what is in the buffer
    for first in cutlass.range_constexpr(0, cols, MATRICES // HALVES * MATRIX_COLS):
        four = cute.make_rmem_tensor(MATRICES, Uint32)
        for j in cutlass.range_constexpr(MATRICES):
            four[j] = pairs[HALVES * (first // MATRIX_COLS) + j]
        matrix, own = lane // MATRIX_COLS, lane % MATRIX_COLS  # that the lane is asked for a place of
        col = first + matrix // HALVES * MATRIX_COLS + own
        target = within(buffer, place(col, matrix % HALVES, cols), Uint16, 8)
        halfwords = cute.recast_ptr(four.iterator, dtype=Uint16)
        cute.copy(stmatrix, cute.make_tensor(halfwords, of_one), cute.make_tensor(target.iterator, of_one))
    cute.arch.sync_warp()
    half = lane % HALVES
    for first in cutlass.range_constexpr(0, cols, WARP_LANES // HALVES):
        col = first + lane // HALVES
        words = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(within(buffer, place(col, half, cols), Uint32, 4), words)
        start = columns.address + Int64(col * ELEM_BYTES) * Int64(columns.pitch) + Int64(half * CHUNK_BYTES)
        if cutlass.Int32(col) < columns.num_rows and cutlass.Int32(half * 8) < columns.num_cols:
            put_chunk(words, start, columns.policy)
