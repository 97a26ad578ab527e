"""Shared-memory images of matrix operands, element by element, from the drawings in the PTX ISA's chapter on matrix
descriptors: 8x8 core matrices (8 rows of 16 bytes) placed by two strides, swizzled by the line number.

With 32-byte swizzle atoms (32-bit elements, MN-major) the pattern spans 4 lines of 128 bytes instead of 8."""

from __future__ import annotations

import numpy as np


def place(r: int, k: int, size: int, span: int, mn_major: bool, lbo: int, sbo: int, atom: int = 16) -> int:
    """Byte offset of element (r, k), `size` bytes wide, before the swizzle."""
    lines = 128 // atom
    inner, outer = (r, k) if mn_major else (k, r)  # inner runs along the contiguous direction
    byte = inner * size
    if span == 0:
        core = (byte // 16 * sbo + outer // 8 * lbo) if mn_major else (byte // 16 * lbo + outer // 8 * sbo)
        return core + outer % 8 * 16 + byte % 16
    return byte // span * lbo + outer // lines * sbo + outer % lines * span + byte % span


def image(
    matrix: np.ndarray, span: int, mn_major: bool, lbo: int, sbo: int, start: int, total: int, atom: int = 16
) -> np.ndarray:
    """Bytes from shared address `start` on, of a (rows, k) matrix of raw elements; the rest is 0xFF."""
    out = np.full(total, 0xFF, np.uint8)
    size = matrix.itemsize
    octets = matrix.view(np.uint8).reshape(*matrix.shape, size)
    for r in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            at = start + place(r, k, size, span, mn_major, lbo, sbo, atom)
            if span:
                line, chunk = at // 128, at % 128 // atom
                at = line * 128 + (chunk ^ line % (span // atom)) * atom + at % atom
            out[at - start : at - start + size] = octets[r, k]
    return out


def strides(rows: int, size: int, span: int, mn_major: bool, atom: int = 16) -> tuple[int, int, int]:
    """A legal (lbo, sbo, total bytes) for `rows` x 32 bytes of K."""
    k = 32 // size
    if span == 0:
        cores_r, cores_k = (-(-rows * size // 16), k // 8) if mn_major else (rows // 8, 2)
        if mn_major:
            return 128 * cores_r, 128, 128 * cores_r * max(cores_k, 1)
        return 128 * cores_r, 128, 128 * cores_r * cores_k
    if mn_major:
        spans = -(-rows * size // span)
        return span * k, span * (128 // atom), span * k * spans
    return 16, span * 8, span * rows
