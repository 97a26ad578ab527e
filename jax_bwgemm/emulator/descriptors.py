"""Shared-memory matrix descriptors of wgmma (sm_90) and tcgen05 (sm_100): which 16-byte chunks an operand spans."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jax_bwgemm.emulator.tensormap import swizzled
from jax_bwgemm.emulator.values import FLOAT

K_BYTES = 32  # one MMA spans 32 bytes of K, whatever the element
_LAYOUT_SM90 = {0: 0, 1: 128, 2: 64, 3: 32}
_LAYOUT_SM100 = {0: 0, 1: 128, 2: 128, 4: 64, 6: 32}
_ATOMS_OF_32 = 1  # the layout of sm_100 whose swizzle moves 32 bytes as a whole: 32-bit elements, MN-major


def operand_chunks(
    w: Any,
    cta: Any,
    descriptor: int,
    rows: int,
    element_bytes: int,
    mn_major: bool,
    sm100: bool,
    k_bytes: int = K_BYTES,
) -> np.ndarray:
    """Chunk numbers of `rows` x 32 bytes: (rows, 2) if K-major, (k, chunks of rows) if MN-major."""
    chunks, end = _operand(descriptor, rows, element_bytes, mn_major, sm100, k_bytes)
    if isinstance(chunks, str):
        raise w.fault("descriptor", f"descriptor {descriptor:#x}: {chunks}")
    if end > cta.limit:
        raise w.fault(
            "out-of-bounds", f"descriptor {descriptor:#x} reaches {end - 16:#x}, the launch has {cta.limit:#x}"
        )
    return chunks


@functools.lru_cache(maxsize=4096)
def _operand(
    descriptor: int, rows: int, element_bytes: int, mn_major: bool, sm100: bool, k_bytes: int
) -> tuple[np.ndarray | str, int]:
    """The chunks, or what is wrong with the descriptor, and the byte after the last chunk."""
    start = (descriptor & 0x3FFF) << 4
    lbo, sbo = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        return "a base offset is not modelled", 0
    if sm100 and (descriptor >> 46 & 7 != 1 or descriptor >> 52 & 1):
        return "bits 46-48 must be 1 and bit 52 zero", 0
    span = _LAYOUT_SM100.get(descriptor >> 61 & 7) if sm100 else _LAYOUT_SM90.get(descriptor >> 62 & 3)
    if span is None:
        return "unknown layout", 0
    atoms_of_32 = sm100 and descriptor >> 61 == _ATOMS_OF_32
    if atoms_of_32 != (sm100 and mn_major and element_bytes == 4):
        return "32-byte swizzle atoms are the only layout of MN-major 32-bit elements, and no other's", 0
    low = start % 1024
    atom = 32 if atoms_of_32 else 16
    chunks = _chunks(low, lbo, sbo, span, atom, rows, element_bytes, mn_major, k_bytes) + (start - low) // 16
    return chunks, int(chunks.max()) * 16 + 16


@functools.lru_cache(maxsize=4096)
def _chunks(
    start: int, lbo: int, sbo: int, span: int, atom: int, rows: int, element_bytes: int, mn_major: bool, k_bytes: int
) -> np.ndarray:
    """The PTX ISA's canonical layouts, with offsets in bytes from a start below 1024; that of 32-byte atoms repeats
    every 4 lines instead of 8 (CUTLASS mma_traits_sm100.hpp, make_umma_desc)."""
    lines = 4 if atom == 32 else 8
    if mn_major:
        k = np.arange(k_bytes // element_bytes)[:, None]
        b = np.arange(0, rows * element_bytes, 16)[None, :]
        if span:
            offset = b % span + b // span * lbo + k % lines * span + k // lines * sbo
        else:
            offset = b // 16 * sbo + k % 8 * 16 + k // 8 * lbo
    else:
        r = np.arange(rows)[:, None]
        half = np.arange(k_bytes // 16)[None, :]
        row, step = (span, 16) if span else (16, lbo)
        offset = r % 8 * row + r // 8 * sbo + half * step
    found: np.ndarray = swizzled(start + offset, span, atom) // 16
    return found


_TABLES = {kind: np.arange(256, dtype=np.uint8).view(FLOAT[kind]).astype(np.float32) for kind in ("e4m3", "e5m2")}
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def operand_matrix(chunks: np.ndarray, kind: str, mn_major: bool) -> np.ndarray:
    """Gathered chunks as a float32 matrix (rows, k). All these types are exact in float32."""
    octets = chunks.view(np.uint8)
    if kind == "bf16":
        matrix = (octets.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif kind == "f16":
        matrix = octets.view(np.float16).astype(np.float32)
    elif kind == "tf32":
        matrix = (octets.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # the low 13 bits are dropped
    elif kind in _TABLES:
        matrix = _TABLES[kind][octets]
    else:
        matrix = octets.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    return matrix.T if mn_major else matrix


def sums_of_products(a: np.ndarray, b: np.ndarray, is_integer: bool) -> np.ndarray:
    """(rows of a, rows of b) over their common k: float32, or float64 of integers.

    In float64, which has every product and all but the smallest parts of their sums, and rounded once: BLAS adds in an
    order that depends on the CPU and on where an element lies, and float32 sums would show it. An MMA has one order.
    """
    sums: np.ndarray = a.astype(np.float64) @ b.astype(np.float64, copy=False).T
    if is_integer:
        return sums
    with np.errstate(over="ignore"):  # an infinity, as in float32
        return sums.astype(np.float32)
