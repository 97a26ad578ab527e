"""The boxes in which results leave, and matrices come: their sizes, their place in shared memory, what moves them.

Box (m, n, l) of a matrix has rows m * rows on and columns n * cols on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from jax_bwgemm.facts.arch import family_of
from jax_bwgemm.facts.resources import (
    boxes_a_store,
    segments,
    store_box,
    store_buffers,
    store_cols,
    store_groups,
    store_rows,
    warp_rows,
)
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.row_store import Segments


@dataclasses.dataclass(frozen=True)
class TmaParts:
    """A group's buffers (TMA, buffer) and the boxes of a matrix (TMA, box along m, along n, l), as `atom` moves them:
    boxes of a store; with the L2 `policy` of stores. Made once: it costs the compiler more than the copies do."""

    atom: cute.CopyAtom
    smem: cute.Tensor
    gmem: cute.Tensor
    policy: Int64

    def store(self, buffer: int, at: Any) -> None:
        """A buffer -> box `at`."""
        cute.copy(self.atom, self.smem[None, buffer], self.gmem[None, *at], cache_policy=self.policy)

    def load(self, buffer: Any, at: Any, barrier: Any) -> None:
        """Box `at` -> a buffer."""
        cute.copy(self.atom, self.gmem[None, *at], self.smem[None, buffer], tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """`groups` of warps store on their own, each box of `rows` by `cols` through one of its `buffers`.

    A buffer has `rows` and `buffer_cols`: other than `cols` only where warps store rows, for which all of a warp's
    buffers are one piece of memory (`segments`). `a_store`: buffers side by side, whose rows are one piece of memory,
    and which leave by one TMA store. `span_bytes`: of the contiguous dimension of these, their swizzle's. `store`:
    "tma" or "threads". `planes`: so many times the buffers, those of a place side by side. `warp_rows`: a warp's.
    """

    dtype: Any
    c_major: str
    store: str
    groups: int
    buffers: int
    rows: int
    cols: int
    buffer_cols: int
    a_store: int
    span_bytes: int
    segments: Segments
    planes: int
    warp_rows: int

    @property
    def by_rows(self) -> bool:
        """Whether warps store rows."""
        return self.store == "threads" and self.c_major == "n"

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def store_shape(self) -> tuple[int, int]:
        """Of what leaves, or comes, at once."""
        return self.rows, self.cols * self.a_store

    def buffer_of(self, box: int) -> int:
        """Of a tile's `box`-th box."""
        return box % self.buffers

    def layout(self, groups: int, buffers: int) -> Any:
        """(groups * rows, buffer_cols of a store, stores' buffers) of so many `buffers`; the rows of one group are
        contiguous."""
        kind = f"{'K' if self.c_major == 'n' else 'MN'}_SW{self.span_bytes}"
        atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, kind), self.dtype)
        shape = (groups * self.rows, self.buffer_cols * self.a_store, buffers // self.a_store)
        return cute.tile_to_shape(atom, shape, order=(0, 1, 2) if self.c_major == "n" else (1, 0, 2))

    def over(self, buffers: cute.Tensor) -> cute.Tensor:
        """The memory of all groups' `buffers`, which other boxes of the same size share, in this layout."""
        layout = self.layout(self.groups, cute.size(buffers, mode=[2]))
        return cute.make_tensor(cute.recast_ptr(buffers.iterator, layout.inner, self.dtype), layout.outer)

    def own(self, buffers: cute.Tensor, group_idx: Any) -> cute.Tensor:
        """A group's part of all groups' buffers: (rows, cols, buffer)."""
        if self.a_store == 1:
            return cute.local_tile(buffers, self.shape, (group_idx, 0, None))
        return cute.group_modes(cute.local_tile(buffers, self.shape, (group_idx, None, None)), 2, 4)

    def own_stores(self, buffers: cute.Tensor, group_idx: Any) -> cute.Tensor:
        """The same as TMA moves it: (rows, cols of a store, store's buffer)."""
        return cute.local_tile(buffers, self.store_shape, (group_idx, 0, None))

    def store_atom(self, c: cute.Tensor) -> Any:
        """What the kernel stores through: a TMA atom, or C's address."""
        if self.store == "threads":
            return c.iterator
        return self._atom(cpasync.CopyBulkTensorTileS2GOp(), c)

    def load_atom(self, r: cute.Tensor) -> cute.CopyAtom:
        """What a matrix is loaded through."""
        return self._atom(cpasync.CopyBulkTensorTileG2SOp(), r)

    def _atom(self, op: Any, matrix: cute.Tensor) -> cute.CopyAtom:
        one = cute.slice_(self.layout(1, self.a_store), (None, None, 0))
        return cpasync.make_tiled_tma_atom(op, matrix, one, self.store_shape)[0]

    def tma_parts(
        self, atom: cute.CopyAtom, buffers: cute.Tensor, group_idx: Any, matrix: cute.Tensor, policy: Int64
    ) -> TmaParts:
        """A group's of all groups' `buffers`; `matrix`: (m, n, l)."""
        own = self.own_stores(buffers, group_idx)
        stores = cute.local_tile(matrix, self.store_shape, (None, None, None))  # (rows, cols, along m, along n, l)
        smem, gmem = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(own, 0, 2), cute.group_modes(stores, 0, 2)
        )
        return TmaParts(atom, smem, gmem, policy)


def boxes_of(variant: Variant, dtype: Any, has_interleaved_rows: bool) -> Boxes:
    """`has_interleaved_rows`: where a warp's fragment has rows r and r + 8, the result has neighbours."""
    tile, target, out_dtype = variant.tile, variant.target, variant.out_dtype
    buffer_cols = store_cols(tile, out_dtype, target)
    rows, cols = segments(tile, out_dtype, target)
    by_rows = variant.store == "threads" and variant.c_major == "n"
    of = tile, out_dtype, variant.c_major, target, variant.store, variant.moves
    return Boxes(
        dtype=dtype,
        c_major=variant.c_major,
        store=variant.store,
        groups=store_groups(tile, target),
        buffers=store_buffers(tile, out_dtype, target, variant.moves),
        rows=store_rows(tile, target),
        cols=cols if by_rows else buffer_cols,
        buffer_cols=buffer_cols,
        a_store=boxes_a_store(*of),
        span_bytes=store_box(*of)[0] * dtype.width // 8,
        segments=Segments(rows, cols, dtype.width // 8, has_interleaved_rows),
        planes=variant.moves.planes if family_of(target).residual_buffers else 1,
        warp_rows=warp_rows(tile, target),
    )
