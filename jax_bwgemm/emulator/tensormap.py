"""Tensor maps: what a TMA descriptor says, in plain words or decoded from its 128 bytes; and the boxes it names.

The 128 bytes are also what the driver's cuTensorMapEncodeTiled makes; boxes agree with an H200 (driver 580, 2026-11).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from jax_bwgemm.emulator.errors import LaunchError

ELEMENT_BYTES = {
    "u8": 1,
    "s8": 1,
    "e4m3": 1,
    "e5m2": 1,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "tf32": 4,
    "u64": 8,
    "s64": 8,
    "f64": 8,
}  # the 8-bit types are one to TMA
_CODES = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    9: "f64",
    10: "bf16",
    11: "tf32",
}  # the field's own numbering; CUtensorMapDataType has bf16 at 9
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
MAP_BYTES = 128


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """`dims`, `box` in elements and `strides` in bytes, innermost first; `strides` from dimension 1 on.

    `swizzle` is the span in bytes: 0, 32, 64 or 128; `swizzle_atom_bytes` what moves as a whole, 16 bytes or 32
    (CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B).
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: str = "bf16"
    swizzle: int = 128
    name: str = "map"
    swizzle_atom_bytes: int = 16

    def __post_init__(self) -> None:
        """The driver's rules (CUDA driver API, cuTensorMapEncodeTiled)."""
        rank, inner = len(self.dims), self.box[0] * ELEMENT_BYTES[self.element]
        atom = self.swizzle_atom_bytes
        rules = {
            f"a swizzle of 0, 32, 64 or 128, got {self.swizzle}": self.swizzle in (0, 32, 64, 128),
            f"a swizzle atom of 16, or of 32 with a swizzle of 128, got {atom}": atom == 16
            or (atom == 32 and self.swizzle == 128),
            f"rank 1..5 and as many box extents, got {rank} and {len(self.box)}": 1 <= rank <= 5
            and len(self.box) == rank
            and len(self.strides) == rank - 1,
            f"an address that is a multiple of 16, got {self.address:#x}": self.address % 16 == 0,
            f"strides that are multiples of 16 bytes, got {self.strides}": all(s % 16 == 0 for s in self.strides),
            f"strides below 2^40, got {self.strides}": all(0 < s < 1 << 40 for s in self.strides),
            f"box extents of 1..256, got {self.box}": all(1 <= b <= 256 for b in self.box),
            f"dimensions of 1..2^32, got {self.dims}": all(1 <= size <= 1 << 32 for size in self.dims),
            f"an inner box of a multiple of 16 bytes, got {inner}": inner % 16 == 0,
            f"an inner box within the swizzle span {self.swizzle}, got {inner}": not self.swizzle
            or inner <= self.swizzle,
        }
        for rule, holds in rules.items():
            if not holds:
                raise LaunchError(f"tensor map `{self.name}` requires {rule}")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.element]

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.element_bytes

    @staticmethod
    def decode(data: bytes, name: str = "map") -> TensorMap:
        """From the first 64 of the 128 bytes, as CuTeDSL's host code writes them."""
        words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, 64, 4)]
        flags = words[2]
        rank = (flags >> 4 & 7) + 1
        code, is_tf32 = flags >> 7 & 15, flags >> 16 & 1
        element = "tf32" if is_tf32 else _CODES.get(code)
        if element is None or rank > 5:
            raise LaunchError(f"tensor map `{name}` has an unknown element type or rank, flags {flags:#x}")
        strides = tuple(words[3 + i] * 16 for i in range(rank - 1))
        dims = tuple(words[8 + i] + 1 for i in range(rank))
        box = tuple(data[55 + i] + 1 for i in range(rank))
        address = int.from_bytes(data[:8], "little")
        atom = 32 if flags >> 19 & 1 else 16
        return TensorMap(address, dims, strides, box, element, _SWIZZLES[flags >> 13 & 3], name, atom)

    def view(self, memory: Any) -> np.ndarray:
        """The tensor as a strided NumPy array of raw elements, outermost dimension first."""
        extent = self.element_bytes * self.dims[0] + sum(
            (size - 1) * stride for size, stride in zip(self.dims[1:], self.strides, strict=True)
        )
        buffer, offset, _ = memory.find(self.address, extent)
        strides = (self.element_bytes, *self.strides)[::-1]
        return np.ndarray(self.dims[::-1], f"u{self.element_bytes}", buffer.data, offset, strides)

    def overlap(self, coords: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The part of the box inside the tensor: slices of the tensor and of the box, outermost first."""
        tensor, box = [], []
        for start, extent, size in zip(coords[::-1], self.box[::-1], self.dims[::-1], strict=True):
            low, high = max(start, 0), min(start + extent, size)
            if low >= high:
                return None
            tensor.append(slice(low, high))
            box.append(slice(low - start, high - start))
        return tuple(tensor), tuple(box)

    def load(self, tensor: np.ndarray, coords: tuple[int, ...]) -> np.ndarray:
        """The box as a flat array of 16-byte chunks; outside elements are zero."""
        parts = self.overlap(coords)
        box = np.zeros(self.box[::-1], tensor.dtype)
        if parts is not None:
            box[parts[1]] = to_tf32(tensor[parts[0]]) if self.element == "tf32" else tensor[parts[0]]
        return box.reshape(-1).view(np.complex128)

    def store(
        self, tensor: np.ndarray, coords: tuple[int, ...], chunks: np.ndarray, combine: Any = lambda old, new: new
    ) -> None:
        """Writes the inside elements of a box; `combine` makes them of what is there and what comes."""
        parts = self.overlap(coords)
        if parts is not None:
            new = np.ascontiguousarray(chunks).view(tensor.dtype).reshape(self.box[::-1])[parts[1]]
            tensor[parts[0]] = combine(np.ascontiguousarray(tensor[parts[0]]), np.ascontiguousarray(new))


def to_tf32(words: np.ndarray) -> np.ndarray:
    """What a load makes of float32 bits: 10 bits of fraction, to nearest even, and one NaN (seen on an H200)."""
    rounded = (words + np.uint32(0xFFF) + (words >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where(words & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFE000), rounded)


def swizzled(address: Any, span: int, atom: int = 16) -> Any:
    """Where a byte of a swizzled tile lies: address bits 4-6 are flipped by bits 7-9 (fewer for smaller spans), with
    atoms of 32 bytes bits 5-6 by bits 7-8 (CUTLASS mma_traits_sm100.hpp, Swizzle<2,5,2>)."""
    if atom == 32:
        return address ^ ((address >> 7 & 3) << 5)
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4) if span else address


@functools.lru_cache(maxsize=1024)
def box_chunks(start: int, num_chunks: int, span: int, atom: int = 16) -> np.ndarray:
    """Chunk numbers of a box's 16-byte pieces, for a start within the first 1024 bytes."""
    found: np.ndarray = swizzled(start + 16 * np.arange(num_chunks), span, atom) // 16
    return found
