"""What a CTA of a thin tile has: a matrix that is read once, in registers, times up to 8 vectors (`kernels.sm90_thin`).

Lengths are in elements, of 2 bytes. A window is what the CTA's threads read at a time: of each row 64 terms, of a
k-major matrix, or of 128 terms 128 rows. It is read in aligned chunks of 16 bytes, wherever its lines begin. A warp's
part of it is one block, or two, of 16 lines (rows, or terms) with 8 chunks each.
"""

from __future__ import annotations

from typing import Any

from jax_bwgemm.facts.tile import THIN_COLS, Tile

WARPS = 8  # as many as a chunk has elements: of the lines that are w modulo 8, which warp w has, each begins alike
CHUNK_ELEMS = 8
ROWS = {"k": 128, "m": 120}  # of a tile; lines that begin within a chunk take up to 7 of the 128 rows of a window
WINDOW_ROWS = 128
RING_BYTES = {"k": 64 << 10, "m": 96 << 10}  # of all stages
CTAS = 2  # of an SM, at least: the compiler is held to it
BLOCK_LINES, BLOCK_CHUNKS = 16, 8
BLOCK_BYTES = BLOCK_LINES * BLOCK_CHUNKS * CHUNK_ELEMS * 2
TERMS = {"k": 16384, "m": 4096}  # of one vector, in shared memory at a time; of 2 half as many each, and so on
FILLS = 16  # of the vectors' terms, that a thread has on their way at once
SUMS = 164  # floats for a column's 128 sums: `place_of_sum` of the last, and so that two columns are 8 banks apart
LINES_APART = 20  # of sums of neighbouring rows: so that 8 by 4 of them are in 32 banks


def a_major_of(tile: Tile) -> str:
    """Which matrices a thin tile reads, by its rows."""
    return "k" if tile.cta_m == ROWS["k"] else "m"


def window_terms(a_major: str) -> int:
    return 64 if a_major == "k" else 128


def window_chunks(a_major: str) -> int:
    """Of a thread."""
    return WINDOW_ROWS * window_terms(a_major) // (CHUNK_ELEMS * 32 * WARPS)


def stage_bytes(a_major: str) -> int:
    return WINDOW_ROWS * window_terms(a_major) * 2


def num_stages(tile: Tile) -> int:
    major = a_major_of(tile)
    return RING_BYTES[major] // stage_bytes(major)


def chunk_slot(line: Any, chunk: Any) -> Any:
    """Where in a block, by chunks, so that what 8 lanes write or read at a time is in different banks: the chunks of a
    line; four chunks of an even line and of the next; or two chunks of four lines that are 4 apart."""
    return line * BLOCK_CHUNKS + (chunk ^ (line & 1) * 4 ^ (line >> 2 & 3) * 2)


def vector_pitch(a_major: str, terms: int) -> int:
    """Elements from a vector to the next in shared memory, of so many `terms` each; so that what lanes read at a time
    lies in different banks. For an m-major matrix, from every 8th term of a vector to those of the next."""
    return terms + 8 * CHUNK_ELEMS + 32 if a_major == "k" else terms // CHUNK_ELEMS + 16


def vector_bytes(a_major: str) -> int:
    """Room for the vectors, however many there are: for the most."""
    lines = 1 if a_major == "k" else CHUNK_ELEMS
    counts = (1, 2, 4, THIN_COLS)
    return 2 * lines * max(count * vector_pitch(a_major, TERMS[a_major] // count) for count in counts)


def smem_bytes(tile: Tile) -> int:
    major = a_major_of(tile)
    return RING_BYTES[major] + vector_bytes(major)


def place_of_sum(row: int) -> int:
    """Of 128 sums of a column, in shared memory."""
    return row % CHUNK_ELEMS * LINES_APART + row // CHUNK_ELEMS
