"""Ways out where TMA cannot step over the result's rows: warps that store rows, threads that store elements."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int64, cute

from jax_bwgemm.kernels import row_store
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.outlets import StoreGroup
from jax_bwgemm.kernels.params import Sizes


@dataclasses.dataclass(frozen=True)
class RowOutlet:
    """An n-major result: each warp stores its own rows, 16 by 16, through its own `buffer` (`row_store`), and waits for
    no other."""

    boxes: Boxes
    group: StoreGroup
    buffer: cute.Pointer
    out: cute.Pointer
    sizes: Sizes

    @property
    def fragment(self) -> int:
        return self.boxes.rows * self.boxes.cols // self.group.threads

    def reclaim(self) -> None:
        """`row_store` waits where it writes."""

    @cute.jit
    def publish(self, rounded: cute.Tensor, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        boxes, sizes = self.boxes, self.sizes
        warp_rows = cutlass.const_expr(boxes.rows * row_store.WARP_LANES // self.group.threads)
        count = cutlass.const_expr(warp_rows // row_store.FRAGMENT_ROWS)
        values = cutlass.const_expr(self.fragment // count)
        warp_idx = cute.arch.make_warp_uniform(self.group.tidx // row_store.WARP_LANES)
        col = at[1] * boxes.cols
        for i in cutlass.range_constexpr(count):
            row = at[0] * boxes.rows + warp_idx * warp_rows + i * row_store.FRAGMENT_ROWS
            start = Int64(at[2]) * (Int64(sizes.m) * Int64(sizes.n)) + Int64(row) * Int64(sizes.n) + Int64(col)
            address = self.out.toint() + start * boxes.segments.elem_bytes
            rows = row_store.Rows(address, sizes.n, sizes.m - row, cutlass.max(sizes.n - col, 0))
            fragment = cute.make_tensor(rounded.iterator + i * values, cute.make_layout(values))
            row_store.store_fragment(fragment, self.buffer, rows, boxes.segments)

    def finish(self) -> None:
        """Only the warp itself reads its buffer."""


def row_outlet(boxes: Boxes, group: StoreGroup, sC: cute.Tensor, out: cute.Pointer, sizes: Sizes) -> RowOutlet:
    """sC: all groups' buffers, of which each warp takes a part, whatever their layout."""
    warps = group.threads // row_store.WARP_LANES
    warp_idx = group.idx * warps + cute.arch.make_warp_uniform(group.tidx // row_store.WARP_LANES)
    buffers = cute.recast_ptr(sC.iterator, swizzle_=None, dtype=cutlass.Uint8)
    return RowOutlet(boxes, group, buffers + warp_idx * boxes.segments.bytes, out, sizes)


@dataclasses.dataclass(frozen=True)
class ElementOutlet:
    """An m-major result of any pitch, which is rare: neighbouring threads store neighbouring rows. r2s, Rs and sC are
    those of a `TmaOutlet`.

    A fragment's pairs lie across such a result, so its parts would have to be turned element by element. A thread
    keeps its row and steps along the columns, so that each element costs one addition.
    """

    boxes: Boxes
    group: StoreGroup
    r2s: Any
    Rs: cute.Tensor
    sC: cute.Tensor
    out: cute.Pointer
    sizes: Sizes

    @property
    def fragment(self) -> Any:
        return cute.shape(self.Rs)[:3]

    def reclaim(self) -> None:
        self.group.meet()

    @cute.jit
    def publish(self, rounded: cute.Tensor, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        cute.copy(self.r2s, rounded, self.Rs[None, None, None, buffer])
        self.group.meet()
        boxes, sizes, threads = self.boxes, self.sizes, self.group.threads
        sC = self.sC[None, None, buffer]
        step = cutlass.const_expr(threads // boxes.rows)
        row, col = self.group.tidx % boxes.rows, self.group.tidx // boxes.rows
        m_idx, n_idx = at[0] * boxes.rows + row, at[1] * boxes.cols + col
        start = Int64(at[2]) * (Int64(sizes.m) * Int64(sizes.n)) + Int64(n_idx) * Int64(sizes.m) + Int64(m_idx)
        if m_idx < sizes.m:
            for i in cutlass.range_constexpr(boxes.rows * boxes.cols // threads):
                if i * step < sizes.n - n_idx:
                    address = self.out + (start + Int64(i * step) * Int64(sizes.m))
                    cute.make_tensor(address, cute.make_layout(1))[0] = sC[row, col + i * step]

    def finish(self) -> None:
        """Whoever reads the buffers has returned."""
