"""Ways out where TMA cannot step over the result's rows: warps that store rows, threads that store elements."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int64, cute

from jax_bwgemm.kernels import column_store, row_store
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.outlets import StoreGroup
from jax_bwgemm.kernels.params import Params, Sizes

SHORT_ROW_BYTES = 32  # of a direct tile: on an H100 3 % slower by way of shared memory, and 64 up to 8 % faster


def rows_begin_on(unit_bytes: int, out: cute.Pointer, sizes: Sizes, elem_bytes: int) -> Any:
    """Whether all rows of an n-major result do."""
    return (out.toint() | Int64(sizes.n * elem_bytes)) % unit_bytes == 0


def columns_begin_on(unit_bytes: int, out: cute.Pointer, sizes: Sizes, elem_bytes: int) -> Any:
    """The same of the columns of an m-major one."""
    return (out.toint() | Int64(sizes.m * elem_bytes)) % unit_bytes == 0


@dataclasses.dataclass(frozen=True)
class RowOutlet:
    """An n-major result: each warp stores its own rows, 16 by 16, through its own `buffer` (`row_store`), and waits for
    no other. `may_be_whole`: of results, too, whose rows all begin on 16 bytes."""

    boxes: Boxes
    group: StoreGroup
    buffer: cute.Pointer
    out: cute.Pointer
    sizes: Sizes
    policy: Int64
    may_be_whole: bool

    @property
    def fragment(self) -> int:
        return self.boxes.rows * self.boxes.cols // self.group.threads

    def reclaim(self) -> None:
        """`row_store` waits where it writes."""

    @property
    def is_whole(self) -> Any:
        """Whether all rows begin on 16 bytes."""
        return rows_begin_on(row_store.CHUNK_BYTES, self.out, self.sizes, self.boxes.segments.elem_bytes)

    @cute.jit
    def publish(self, rounded: cute.Tensor, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        if cutlass.const_expr(not self.may_be_whole):  # noqa: SIM114 (a compile-time condition stands alone)
            self.store(rounded, at, row_store.store_fragment)
        elif self.is_whole:
            self.store(rounded, at, row_store.store_whole_fragment)
        else:
            self.store(rounded, at, row_store.store_fragment)

    @cute.jit
    def store(self, rounded: cute.Tensor, at: Any, store_fragment: cutlass.Constexpr[Any]) -> None:
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
            rows = row_store.Rows(address, sizes.n, sizes.m - row, cutlass.max(sizes.n - col, 0), self.policy)
            fragment = cute.make_tensor(rounded.iterator + i * values, cute.make_layout(values))
            store_fragment(fragment, self.buffer, rows, boxes.segments)

    def finish(self) -> None:
        """Only the warp itself reads its buffer."""


def row_outlet(
    boxes: Boxes, group: StoreGroup, smem: cute.Pointer, out: cute.Pointer, params: Params, may_be_whole: bool
) -> RowOutlet:
    """`smem`: all groups' buffers, of which each warp takes a part."""
    buffer = _own_buffer(group, smem, boxes.segments.bytes)
    return RowOutlet(boxes, group, buffer, out, params.sizes, params.hints.c_policy, may_be_whole)


def _own_buffer(group: StoreGroup, smem: cute.Pointer, num_bytes: int) -> cute.Pointer:
    """A warp's of all groups' buffers."""
    warps = group.threads // row_store.WARP_LANES
    warp_idx = group.idx * warps + cute.arch.make_warp_uniform(group.tidx // row_store.WARP_LANES)
    buffers = cute.recast_ptr(smem, swizzle_=None, dtype=cutlass.Uint8)
    return buffers + warp_idx * num_bytes


def fragment_outlet(
    boxes: Boxes, group: StoreGroup, smem: cute.Pointer, out: cute.Pointer, params: Params
) -> FragmentOutlet:
    """`smem`: all groups' buffers, if rows or columns go through any."""
    sizes, policy = params.sizes, params.hints.c_policy
    if boxes.by_rows:
        rows = row_outlet(boxes, group, smem, out, params, True)
        return FragmentOutlet(boxes, group, out, sizes, policy, rows, None)
    is_turned = boxes.segments.elem_bytes == column_store.ELEM_BYTES
    buffer = _own_buffer(group, smem, column_store.buffer_bytes(boxes.cols)) if is_turned else None
    return FragmentOutlet(boxes, group, out, sizes, policy, None, buffer)


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


@dataclasses.dataclass(frozen=True)
class FragmentOutlet:
    """Any result of a small product. Columns of an m-major one leave by `column_store`, if they all begin on 16 bytes,
    else out of registers as they are: eight lanes store 16 or 32 contiguous bytes. Rows leave by `rows`, for that, four
    lanes store a few bytes of eight rows each at a time; but not the shortest ones, as long as they begin with a pair
    of columns: the way through shared memory takes longer. `rows`: a `RowOutlet`, of an n-major result; `buffer`: a
    warp's own for columns, of an m-major one of 2-byte elements."""

    boxes: Boxes
    group: StoreGroup
    out: cute.Pointer
    sizes: Sizes
    policy: Int64
    rows: Any
    buffer: Any

    @property
    def fragment(self) -> int:
        return self.boxes.rows * self.boxes.cols // self.group.threads

    @property
    def has_buffers(self) -> bool:
        """Whether results go through shared memory."""
        return self.rows is not None or self.buffer is not None

    @property
    def may_store_pairs(self) -> bool:
        return self.boxes.cols * self.elem_bytes <= SHORT_ROW_BYTES

    @property
    def has_pairs(self) -> Any:
        """Whether all rows begin with a pair of columns that can be stored as one."""
        return rows_begin_on(2 * self.elem_bytes, self.out, self.sizes, self.elem_bytes)

    def reclaim(self) -> None:
        """`rows` waits where it writes."""

    @cute.jit
    def publish(self, rounded: cute.Tensor, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        boxes, lane = self.boxes, self.group.tidx % row_store.WARP_LANES
        warp_row = at[0] * boxes.rows + self.group.tidx // row_store.WARP_LANES * row_store.FRAGMENT_ROWS
        row, col = warp_row + lane // 4, at[1] * boxes.cols + lane % 4 * 2
        if cutlass.const_expr(self.rows is None):
            if cutlass.const_expr(self.buffer is None):
                self.store_columns(rounded, row, col, at[2])
            elif columns_begin_on(row_store.CHUNK_BYTES, self.out, self.sizes, self.elem_bytes):
                self.turn_columns(rounded, warp_row, at[1] * boxes.cols, at[2])
            else:
                self.store_columns(rounded, row, col, at[2])
        elif cutlass.const_expr(not self.may_store_pairs):  # noqa: SIM114 (a compile-time condition stands alone)
            self.rows.publish(rounded, at, buffer)
        elif self.has_pairs:
            self.store_pairs(rounded, row, col, at[2])
        else:
            self.rows.publish(rounded, at, buffer)

    @cute.jit
    def store_pairs(self, rounded: cute.Tensor, row: Any, col: Any, l_idx: Any) -> None:
        """Rows r and r + 8, of each a pair of columns every 8: a store for each pair."""
        pairs = cute.coalesce(cute.recast_tensor(rounded, self.boxes.segments.pair_dtype))
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < self.sizes.m:
                start = self.place(row + 8 * half, col, l_idx)
                for i in cutlass.range_constexpr(self.boxes.cols // 8):
                    if col + 8 * i < self.sizes.n:
                        target = row_store.at_address(start + 8 * i * self.elem_bytes, pairs.element_type)
                        target[0] = pairs[2 * i + half]

    @cute.jit
    def turn_columns(self, rounded: cute.Tensor, warp_row: Any, first_col: Any, l_idx: Any) -> None:
        """An m-major result whose columns begin on 16 bytes."""
        start, num_rows = self.place(warp_row, first_col, l_idx), cutlass.max(self.sizes.m - warp_row, 0)
        columns = row_store.Rows(start, self.sizes.m, self.sizes.n - first_col, num_rows, self.policy)
        column_store.store_whole_columns(rounded, self.buffer, columns, self.boxes.cols)

    @cute.jit
    def store_columns(self, rounded: cute.Tensor, row: Any, col: Any, l_idx: Any) -> None:
        """An m-major result."""
        first, pitch = self.place(row, col, l_idx), Int64(self.sizes.m) * self.elem_bytes
        for i in cutlass.range_constexpr(self.boxes.cols // 8):
            for j in cutlass.range_constexpr(2):
                if col + 8 * i + j < self.sizes.n:
                    start = first + (8 * i + j) * pitch
                    for half in cutlass.range_constexpr(2):
                        if row + 8 * half < self.sizes.m:
                            self.put(start + 8 * half * self.elem_bytes, rounded[4 * i + 2 * half + j])

    @property
    def elem_bytes(self) -> int:
        return self.boxes.segments.elem_bytes

    def put(self, address: Int64, value: Any) -> None:
        row_store.at_address(address, self.boxes.dtype)[0] = value

    def place(self, row: Any, col: Any, l_idx: Any) -> Int64:
        """Address of an element."""
        m, n = Int64(self.sizes.m), Int64(self.sizes.n)
        inner = Int64(row) * n + Int64(col) if self.boxes.c_major == "n" else Int64(col) * m + Int64(row)
        return self.out.toint() + (Int64(l_idx) * (m * n) + inner) * self.elem_bytes

    def finish(self) -> None:
        """Stores of a thread need nothing of the CTA."""
