"""TMEM of a Blackwell CTA: where accumulators are, as the MMAs write them and as the store warps read them, and who has
it."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from jax_bwgemm.facts.families import TMEM_LANES
from jax_bwgemm.facts.resources import acc_cols, acc_stages, tmem_cols
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines, row_store
from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.epilogue import FRAGMENT_LANES, Run, fragment_row_runs, fragment_runs
from jax_bwgemm.kernels.outlets import StoreGroup
from jax_bwgemm.kernels.waits import wait_for_registers

LANE_STRIDE = 1 << 16  # of a TMEM address, PTX ISA, tensor memory addressing


@dataclasses.dataclass(frozen=True)
class Tmem:
    """`stages` accumulators of a tile, side by side."""

    tile: Tile
    boxes: Boxes

    @property
    def stages(self) -> int:
        return acc_stages(self.tile)

    @property
    def is_of_pair(self) -> bool:
        return self.tile.cta_group == 2

    @property
    def group_cols(self) -> int:
        """Columns of the result that a store group has."""
        return self.tile.mma_n // self.boxes.groups

    def mma_layout(self, mma: cute.TiledMma) -> Any:
        """(MMA, accumulators, 1, acc stages) of TMEM addresses, as the MMAs write them."""
        shape = (self.tile.num_accs * self.tile.mma_m, self.tile.mma_n)
        one = mma.make_fragment_C(mma.partition_shape_C(shape)).layout
        return cute.append(one, cute.make_layout(self.stages, stride=acc_cols(self.tile)))

    def lane_layout(self) -> Any:
        """(lanes, columns of a store group, accumulators, acc stages) of TMEM addresses, as the store warps read them.

        A lane is a row; with two store groups, lanes 64..127 are the second half of the columns of rows 0..63; where an
        MMA has 64 rows in one CTA, each warp's first 16 lanes have 16 of them (PTX ISA, tcgen05 data path layouts).
        """
        lanes: Any = (TMEM_LANES, LANE_STRIDE)
        if self.boxes.rows * self.boxes.groups == 64:
            lanes = ((16, 4), (LANE_STRIDE, 32 * LANE_STRIDE))
        shape = (lanes[0], self.group_cols, self.tile.num_accs, self.stages)
        stride = (lanes[1], 1, self.group_cols, acc_cols(self.tile))
        return cute.make_layout(shape, stride=stride)

    def allocate(self, address: cute.Pointer) -> None:
        """By warp 0; then all meet."""
        cute.arch.alloc_tmem(tmem_cols(self.tile), address, is_two_cta=self.is_of_pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.is_of_pair)

    @cute.jit
    def free(self, address: cute.Pointer, freed: cute.Pointer) -> None:
        """Warp 0 of each CTA. In a pair, first tell the other CTA that this one has read, and wait to be told."""
        if cutlass.const_expr(self.is_of_pair):
            peer = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(freed, peer)
            cute.arch.mbarrier_wait(freed, 0)
        cute.arch.dealloc_tmem(address, tmem_cols(self.tile), is_two_cta=self.is_of_pair)


@dataclasses.dataclass(frozen=True)
class TmemValues:
    """Which values of a box a thread takes out of TMEM: one row of 32 lanes' each, or wgmma-like fragments of 16 rows a
    warp."""

    boxes: Boxes
    group: StoreGroup
    tidx: Any

    def has_row_per_lane(self) -> bool:
        return self.boxes.rows * self.boxes.groups == TMEM_LANES and not self.boxes.by_rows

    def load_op(self) -> Any:
        if self.has_row_per_lane():
            return tcgen05.Ld32x32bOp(tcgen05.Repetition(self.boxes.cols))
        return tcgen05.Ld16x256bOp(tcgen05.Repetition(self.boxes.cols // 8))

    def runs(self) -> tuple[Run, ...]:
        boxes = self.boxes
        elements = boxes.rows * boxes.cols // self.group.threads
        if boxes.c_major == "m":
            if self.has_row_per_lane():
                return (Run(0, 1, tuple((i,) for i in range(elements)), tuple(range(elements))),)
            return fragment_row_runs(elements, 8)
        if not self.has_row_per_lane():
            return fragment_runs(elements, 2 if boxes.store == "tma" else 1, count=self.fragments())
        return row_runs(elements, 16 * 8 // boxes.dtype.width if boxes.store == "tma" else 1)

    def fragments(self) -> int:
        """Of 16 rows, that a warp has below each other."""
        return self.boxes.rows * self.boxes.groups // (row_store.FRAGMENT_ROWS * pipelines.EPILOGUE_WARPS)

    def first_col(self) -> Any:
        return 0 if self.has_row_per_lane() else self.tidx % 4 * 2

    def row_lanes(self) -> tuple[int, ...]:
        return (16, 8, 4, 2, 1) if self.has_row_per_lane() else FRAGMENT_LANES[0]

    def col_lanes(self) -> tuple[int, ...]:
        return () if self.has_row_per_lane() else FRAGMENT_LANES[1]

    def warp(self) -> Any:
        return self.group.tidx // 32

    def first_row(self) -> Any:
        if self.has_row_per_lane():
            return self.tidx % self.group.threads
        warp_rows = row_store.FRAGMENT_ROWS * self.fragments()
        return self.group.tidx // 32 * warp_rows + self.tidx % 32 // 4


def row_runs(elements: int, width: int) -> tuple[Run, ...]:
    """A 32x32b TMEM load: thread t holds row t; register j is column j. `width`: elements of one load of a bias."""
    return tuple(Run(j, width, (tuple(range(j, j + width)),), (0,)) for j in range(0, elements, width))


def wait_for_loads(values: cute.Tensor) -> None:
    """Behind the loads of TMEM that fill `values`, registers of 32 bits."""
    wait_for_registers("tcgen05.wait::ld.sync.aligned;", values)
