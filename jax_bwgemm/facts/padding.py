"""THE rule of padding: which rows of an operand are too odd for TMA, with how many zeros behind them a kernel gets
them, and where that is not worth it."""

from __future__ import annotations

import math

from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import FEW, Tile

TMA_ALIGN_BYTES = 16  # of addresses and row pitches, CUDA driver API, cuTensorMapEncodeTiled
LINE_BYTES = 128  # of the L2 cache
SECTOR_BYTES = 32  # of a line: what device memory reads and writes
TOGETHER_BYTES = 8 << 20  # of both operands, padded; assumed: beyond, a launch is little of what passes take


def padding(problem: Problem, operand: str) -> int:
    """Elements by which the contiguous dimension of operand "a" or "b" must grow before TMA can step over its rows; 0
    if it can.

    To whole lines of the L2 cache, since each 128 bytes of a TMA box are then one line, which else lie in two; but only
    to whole 16 bytes where lines made a row more than an eighth longer.
    """
    element_bytes = _element_bytes(problem, operand)
    row_bytes = contiguous(problem, operand) * element_bytes
    to_align, to_line = -row_bytes % TMA_ALIGN_BYTES, -row_bytes % LINE_BYTES
    if to_align == 0:
        return 0
    return (to_line if 8 * to_line <= row_bytes else to_align) // element_bytes


def padded_shape(problem: Problem, operand: str) -> tuple[int, int, int]:
    """Of operand "a" or "b" as a kernel gets it: batch, rows and, with their padding, the elements of a row."""
    p = problem
    batch, extent, major = (p.a_batch, p.m, p.a_major) if operand == "a" else (p.b_batch, p.n, p.b_major)
    batch, k = (1, p.whole_k) if p.whole_k else (batch, p.k)
    return batch, extent if major == "k" else k, contiguous(p, operand) + padding(p, operand)


def is_padded_together(problem: Problem) -> bool:
    """Whether one launch pads both operands, as long as that saves more than it risks: apart, a pass over weights could
    be made once for many products."""
    if not (padding(problem, "a") and padding(problem, "b")):
        return False
    return sum(math.prod(padded_shape(problem, x)) * _element_bytes(problem, x) for x in "ab") <= TOGETHER_BYTES


def why_not_padded(problem: Problem) -> str | None:
    """One sentence if XLA computes the product sooner than a pass pads its larger operand, else None.

    With few rows or columns a product is little more than one pass over that operand, and padding it takes two before
    it. On an H200, bfloat16, ours with that pass against XLA's: 16x50257x768 62 us and 32, 64x4097x4096 27 and 24,
    16x1001x1024 6.5 and 4.4, 4097x16x4096 of an m-major a 36 and 19; but 256x4097x4096 36 and 51, and where both
    operands are odd 16x4097x4093 29 and 42. Of elements of other sizes nothing is measured.
    """
    large, other = ("b", "a") if problem.m <= problem.n else ("a", "b")
    if min(problem.m, problem.n) > FEW or padding(problem, other) or not padding(problem, large):
        return None
    element_bytes = _element_bytes(problem, large)
    if element_bytes != 2:
        return None
    few, row = f"{problem.m} rows" if large == "b" else f"{problem.n} columns", contiguous(problem, large)
    return (
        f"with {few}, XLA is done before a pass has padded {large}, whose rows of {row * element_bytes} bytes are no "
        f"multiple of {TMA_ALIGN_BYTES}: store it padded, or pass `tile=` for a kernel nevertheless"
    )


def is_torn(problem: Problem, operand: str) -> bool:
    """Whether rows of an operand, padded if need be, start anywhere in a line of the L2 cache."""
    return padded_shape(problem, operand)[2] * _element_bytes(problem, operand) % LINE_BYTES != 0


def contiguous(problem: Problem, operand: str) -> int:
    """The size of the dimension of operand "a" or "b" that is contiguous in memory."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.whole_k or problem.k}
    return sizes[problem.a_major if operand == "a" else problem.b_major]


def _element_bytes(problem: Problem, operand: str) -> int:
    return DTYPE_BYTES[problem.a_dtype if operand == "a" else problem.b_dtype]


def is_tma_storable(problem: Problem) -> bool:
    """Whether TMA can step over the result's rows."""
    return _result_row_bytes(problem) % TMA_ALIGN_BYTES == 0


def ends_within_sectors(problem: Problem) -> bool:
    """Whether rows of the result begin and end within sectors, which are then written in part."""
    return _result_row_bytes(problem) % SECTOR_BYTES != 0


def store_of(tile: Tile, problem: Problem) -> str:
    """How a result leaves: "tma", or by "threads" where TMA cannot step over its rows or the tile leaves it out."""
    return "tma" if is_tma_storable(problem) and not (tile.direct or tile.by_rows) else "threads"


def _result_row_bytes(problem: Problem) -> int:
    return (problem.n if problem.c_major == "n" else problem.m) * DTYPE_BYTES[problem.out_dtype]
