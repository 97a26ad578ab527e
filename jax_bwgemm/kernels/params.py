"""What a GEMM kernel of either family takes at run time, in bundles: docs/architecture.md, kernel parameter block.

A launch integer is a field of `Sizes`, `Order` or `Shares`, whose name says where it comes from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, Uint32, cute

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
    """Kernel parameters behind the operands; docs/architecture.md, kernel parameter block. `k_step`: k tiles from a
    matrix of the batch to the next, where these are of parts of k; else 0."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    a_batch_step: Int32
    b_batch_step: Int32
    k_step: Int32


class Order(NamedTuple):
    """Kernel parameters behind the sizes: a `scheduler.TileOrder`, all `tiles` of the batch, the k tiles of each."""

    tiles: Uint32
    k_tiles: Uint32
    matrix: Uint32
    matrix_multiplier: Uint32
    matrix_shift: Uint32
    group: Uint32
    group_multiplier: Uint32
    group_shift: Uint32
    rows: Uint32
    rows_multiplier: Uint32
    rows_shift: Uint32
    last_rows: Uint32
    last_rows_multiplier: Uint32
    last_rows_shift: Uint32
    last_group: Uint32
    across: Uint32
    raster_along_n: Uint32
    raster_order: Uint32


class Hints(NamedTuple):
    """L2 cache policies of the loads, and of what leaves by TMA or in chunks of 16 bytes."""

    a_policy: Int64
    b_policy: Int64
    c_policy: Int64


class Shares(NamedTuple):
    """Kernel parameters behind the hints: a `scheduler.Stream`. `clusters` are the grid's."""

    k_tiles_multiplier: Uint32
    k_tiles_shift: Uint32
    clusters: Uint32
    clusters_multiplier: Uint32
    clusters_shift: Uint32
    stream_first: Uint32
    stream_end: Uint32
    stream_clusters: Uint32
    stream_long: Uint32
    stream_long_multiplier: Uint32
    stream_long_shift: Uint32
    stream_short: Uint32
    stream_short_multiplier: Uint32
    stream_short_shift: Uint32
    stream_longer: Uint32


class StreamParams(NamedTuple):
    """Kernel parameters of a stream-K. `workspace`: flags, then parts."""

    shares: Shares
    workspace: cute.Pointer
    token: Int64


class Params(NamedTuple):
    """All parameters of a kernel, in its order. `order`: unless each CTA has the tile at its place in the grid;
    `stream`: if it is a stream-K; `epilogue`: what that takes."""

    maps: Maps
    sizes: Sizes
    order: Order | None
    hints: Hints
    stream: StreamParams | None
    epilogue: tuple[Any, ...]
