"""What a GEMM kernel of either family takes at run time, in bundles: docs/architecture.md, kernel parameter block.

A launch integer is a field of `Sizes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute

from jax_bwgemm.kernels.operands import dsl_box


class Maps(NamedTuple):
    """What the operands are moved through: TMA atoms of A, B, the result and a residual, if there is one. Where threads
    store the result, `c` is its address."""

    a: cute.CopyAtom
    b: cute.CopyAtom
    c: Any
    r: cute.CopyAtom | None

    def boxes(self, store: str) -> dict[str, tuple[int, ...]]:
        """Of each operand that TMA moves, what CuTeDSL chose; `store`: how the result leaves."""
        return {
            operand: dsl_box(atom)
            for operand, atom in self._asdict().items()
            if atom is not None and (operand != "c" or store == "tma")
        }


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
