"""A repack: one pass over an operand that no kernel can read as it lies. What it makes, its name, its launch.

    pad         (l, r, c) -> (l, r, pitch), zeros behind the c elements of a row
    transpose   (l, r, c) -> (l, c, pitch), the same of the transpose

A pad may have two sources: both operands of a product in one launch, since a small pass is little but its launch.

The pitch is a multiple of 16 bytes, which TMA can step over, from the first that holds the row to the end of its last
cache line; `padding` says which. The source may start at any element, the result starts on 16 bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

KINDS = ("pad", "transpose")
ELEMENT_BYTES = (1, 2, 4)
CHUNK_BYTES = 16  # what a thread loads and stores at once, and what the pitch is a multiple of
NUM_THREADS = 256
PAD_CHUNKS = 2  # of a thread; on an H200, four are 2 % slower for large operands, and 20 % for 2 MB, of few CTAs
TILE_ROWS = 128  # of the source, 128 bytes each: what a CTA transposes
TILE_ROW_BYTES = 128
TRANSPOSE_CHUNKS = TILE_ROWS * TILE_ROW_BYTES // CHUNK_BYTES // NUM_THREADS  # of a thread
INT32_MAX = 2**31 - 1
SOURCES = {"pad": 2, "transpose": 1}  # at most
_OF_SOURCE = (("source", 8), ("out", 8), ("batch", 4), ("rows", 4), ("cols", 4), ("pitch", 4))

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
    def params(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of the kernel's parameters, back to back. A pad's second source is behind the first one, in
        zeros if there is none; CTAs from `first_ctas` on are the second one's."""
        if SOURCES[self.kind] == 1:
            return _OF_SOURCE
        second = ((f"second_{name}", size) for name, size in _OF_SOURCE)
        return (*_OF_SOURCE, *second, ("first_ctas", 4))

    def whole_params(self, given: Sequence[int], first_ctas: int) -> tuple[int, ...]:
        """Values of `params`, of which `given` has those of one source or of two."""
        if SOURCES[self.kind] == 1:
            return tuple(given)
        return (*given, *[0] * (len(self.params) - len(given) - 1), first_ctas)

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
