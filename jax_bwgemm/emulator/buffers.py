"""Global memory: where buffers lie."""

from __future__ import annotations

import bisect

import numpy as np

from jax_bwgemm.emulator.errors import Fault, LaunchError

GLOBAL_BASE = 0x7F00_0000_0000
GUARD_BYTES = 1 << 20  # unmapped space between buffers, so that a runaway address hits nothing


class Memory:
    """Global memory: NumPy arrays at made-up addresses."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.buffers: list[np.ndarray] = []
        self.names: list[str] = []
        self.next = GLOBAL_BASE

    def register(self, array: np.ndarray, name: str, misalign: int = 0) -> int:
        """Maps a C-contiguous array, which kernels then read and write in place, and returns its address (a multiple
        of 256, plus `misalign` bytes)."""
        if not array.flags.c_contiguous:
            raise LaunchError(f"buffer `{name}` requires a C-contiguous array, got strides {array.strides}")
        address = self.next + misalign
        self.starts.append(address)
        self.buffers.append(array.reshape(-1).view(np.uint8))
        self.names.append(name)
        self.next = -(-(address + array.nbytes + GUARD_BYTES) // 256) * 256
        return address

    def find(self, address: int, size: int) -> tuple[np.ndarray, int, str]:
        """The buffer that holds `size` bytes from `address`, the offset in it, and its name."""
        index = bisect.bisect_right(self.starts, address) - 1
        if index >= 0:
            offset = address - self.starts[index]
            if offset + size <= self.buffers[index].nbytes:
                return self.buffers[index], offset, self.names[index]
        near = (
            f", {self.names[index]} ends at {self.starts[index] + self.buffers[index].nbytes:#x}" if index >= 0 else ""
        )
        raise Fault("out-of-bounds", f"global address {address:#x} ({size} bytes) belongs to no buffer{near}")
