"""What a GEMM kernel of either family takes at run time, in bundles: docs/architecture.md, kernel parameter block.

A launch integer is a field of `Sizes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute

from jax_bwgemm.kernels.operands import dsl_box


class Maps(NamedTuple):
    """What the operands are moved through: TMA atoms of A, of every B, of the results and of the matrices that the
    epilogue reads. Where threads store a result, its address."""

    a: cute.CopyAtom
    b: tuple[cute.CopyAtom, ...]
    c: tuple[Any, ...]
    r: tuple[cute.CopyAtom, ...]

    def moved(self, store: str) -> tuple[cute.CopyAtom, ...]:
        """All that TMA moves; `store`: how the results leave."""
        return self.a, *self.b, *(self.c if store == "tma" else ()), *self.r

    def boxes(self, store: str) -> tuple[tuple[int, ...], ...]:
        """Of each what CuTeDSL chose."""
        return tuple(map(dsl_box, self.moved(store)))


class Sizes(NamedTuple):
    """Kernel parameters behind the operands; docs/architecture.md, kernel parameter block."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    a_batch_step: Int32
    b_batch_step: Int32
    raster_group: Int32
    raster_along_n: Int32
    raster_order: Int32


class Hints(NamedTuple):
    """L2 cache policies of the loads."""

    a_policy: Int64
    b_policy: Int64


class StreamParams(NamedTuple):
    """Kernel parameters behind the hints. `tiles` of the last tiles, and as many of the first clusters as share them;
    `workspace`: flags, then parts."""

    tiles: Int32
    clusters: Int32
    workspace: cute.Pointer
    token: Int64


class Params(NamedTuple):
    """All parameters of a kernel, in its order. `stream`: if it is a stream-K; `epilogue`: what that takes."""

    maps: Maps
    sizes: Sizes
    hints: Hints
    stream: StreamParams | None
    epilogue: tuple[Any, ...]
