"""A repack: one pass over an operand that no kernel can read as it lies. What it makes, its name, its launch.

    pad         (l, r, c) -> (l, r, pitch), zeros behind the c elements of a row
    transpose   (l, r, c) -> (l, c, pitch), the same of the transpose

The pitch is a multiple of 16 bytes, which TMA can step over, from the first that holds the row to the end of its last
cache line; `padding` says which. The source may start at any element, the result starts on 16 bytes.
"""

from __future__ import annotations

import dataclasses
import math

KINDS = ("pad", "transpose")
ELEMENT_BYTES = (1, 2, 4)
CHUNK_BYTES = 16  # what a thread loads and stores at once, and what the pitch is a multiple of
NUM_THREADS = 256
PAD_CHUNKS = 2  # of a thread; on an H200, four are 2 % slower for large operands, and 20 % for 2 MB, of few CTAs
TILE_ROWS = 128  # of the source, 128 bytes each: what a CTA transposes
TILE_ROW_BYTES = 128
TRANSPOSE_CHUNKS = TILE_ROWS * TILE_ROW_BYTES // CHUNK_BYTES // NUM_THREADS  # of a thread
INT32_MAX = 2**31 - 1
PARAMS = (("source", 8), ("out", 8), ("batch", 4), ("rows", 4), ("cols", 4), ("pitch", 4))  # leaves, back to back

Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Repack:
    """One cubin: it serves every shape, and every dtype of `element_bytes`."""

    target: str
    kind: str
    element_bytes: int

    @property
    def name(self) -> str:
        return f"{self.target}_{self.kind}_{8 * self.element_bytes}bit"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch: the tile of a transpose."""
        return TILE_ROWS * TILE_ROW_BYTES if self.kind == "transpose" else 0

    def num_ctas(self, out_shape: Shape) -> int:
        """CTAs that make a result of `out_shape`: a CTA pads NUM_THREADS * PAD_CHUNKS chunks or transposes a tile."""
        if self.kind == "pad":
            return -(-self._num_chunks(out_shape) // (NUM_THREADS * PAD_CHUNKS))
        batch, cols, pitch = out_shape
        return batch * -(-pitch // TILE_ROWS) * -(-cols * self.element_bytes // TILE_ROW_BYTES)

    def why_not(self, out_shape: Shape) -> str | None:
        """None if the kernel can count what it does to make a result of `out_shape`, else one sentence."""
        if self.kind not in KINDS or self.element_bytes not in ELEMENT_BYTES:
            return f"a repack requires one of {KINDS} of {ELEMENT_BYTES} bytes, got {self.kind!r}, {self.element_bytes}"
        if min(out_shape) < 1 or max(out_shape) > INT32_MAX - TILE_ROWS or self._num_chunks(out_shape) > INT32_MAX:
            rule = f"sizes of 1..{INT32_MAX - TILE_ROWS} and at most {INT32_MAX} chunks of {CHUNK_BYTES} bytes"
            return f"a repack requires {rule}, got {out_shape}"
        return None

    def _num_chunks(self, out_shape: Shape) -> int:
        return math.prod(out_shape) * self.element_bytes // CHUNK_BYTES
