"""How A and B reach the tensor cores of Hopper: by descriptors of shared memory, or A through registers.

wgmma reads operands of 4 bytes and of 1 from shared memory k-major only. An m-major A lies there as TMA left it, and
the threads of a consumer warpgroup pick their fragments out of it (`sm90_fragments`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.operands import layout_enum
from jax_bwgemm.kernels.outlets import StoreGroup
from jax_bwgemm.kernels.sm90_deal import WARPGROUP_THREADS, Deal
from jax_bwgemm.kernels.sm90_fragments import ByteFragments, WordFragments
from jax_bwgemm.kernels.waits import wait_for_registers


class MmaTf32Op(warpgroup.MmaF8Op):
    """wgmma of TF32, for which the DSL has no class: the one for 8 bits, whose layouts are the same bytes."""

    def __init__(self, shape_mn: tuple[int, int], a_src: warpgroup.OperandSource) -> None:
        dtypes, majors = (cutlass.TFloat32, cutlass.TFloat32, Float32), (OperandMajorMode.K, OperandMajorMode.K)
        super().__init__(*dtypes, (*shape_mn, 8), a_src, *majors)

    def _verify(self) -> None:
        """The base class would refuse the dtypes."""


@dataclasses.dataclass(frozen=True)
class Wgmma:
    """`fragments`: how threads pick those of A, if it comes from registers."""

    facts: GemmFacts
    deal: Deal
    fragments: WordFragments | ByteFragments | None

    def smem_layouts(self) -> tuple[Any, Any]:
        """A: (cta_m, k_tile, stages); B: (mma_n, k_tile, stages)."""
        facts, tile = self.facts, self.facts.tile
        tiler = (tile.cta_m, tile.mma_n, tile.k_tile)
        a = sm90.make_smem_layout_a(layout_enum(facts.a_major), tiler, facts.a_dtype, facts.stages)
        return a, sm90.make_smem_layout_b(layout_enum(facts.b_major), tiler, facts.b_dtype, facts.stages)

    def b_stage_layout(self) -> Any:
        """One B's part of a stage: (out_n, k_tile)."""
        facts, tile = self.facts, self.facts.tile
        tiler = (tile.cta_m, tile.out_n, tile.k_tile)
        b = sm90.make_smem_layout_b(layout_enum(facts.b_major), tiler, facts.b_dtype, 1)
        return cute.slice_(b, (None, None, 0))

    def b_parts(self, sB: cute.Tensor) -> tuple[cute.Tensor, ...]:
        """Of each B, (out_n, k_tile, stages)."""
        tile = self.facts.tile
        if not tile.gated:
            return (sB,)
        return tuple(cute.local_tile(sB, (tile.out_n, tile.k_tile), (i, 0, None)) for i in range(tile.num_bs))

    def tiled(self, warpgroups: int) -> cute.TiledMma:
        """Of slabs of 64 rows, one for each of the warpgroups."""
        facts = self.facts
        shape = (64, facts.tile.mma_n)
        source = warpgroup.OperandSource.RMEM if self.fragments else warpgroup.OperandSource.SMEM
        if facts.a_dtype is cutlass.TFloat32:
            return cute.make_tiled_mma(MmaTf32Op(shape, source), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            facts.a_dtype,
            facts.b_dtype,
            OperandMajorMode.K if self.fragments or facts.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if facts.b_major == "k" else OperandMajorMode.MN,
            facts.acc_dtype,
            (warpgroups, 1, 1),
            shape,
            source,
        )

    def of_tile(self) -> cute.TiledMma:
        """All warpgroups' that multiply one tile. `set` changes it: who does gets one of his own."""
        return self.tiled(self.deal.side_by_side)

    def operands(self, sA: cute.Tensor, sB: cute.Tensor, group: StoreGroup) -> tuple[Any, Any]:
        """Of a warpgroup, for all stages: A as (MMA, MMA_M, MMA_K, stage) descriptors, or what a thread picks its
        fragments from; B as (MMA, MMA_N, MMA_K, stage) descriptors."""
        mma = self.of_tile()
        own = mma.get_slice(group.idx % self.deal.side_by_side * WARPGROUP_THREADS)
        if self.fragments is not None:
            return self.fragments.sources(sA, group), mma.make_fragment_B(own.partition_B(sB))
        return mma.make_fragment_A(own.partition_A(sA)), mma.make_fragment_B(own.partition_B(sB))

    def accumulator(self) -> cute.Tensor:
        """A thread's part of a tile's sums."""
        tile = self.facts.tile
        return cute.make_rmem_tensor(self.of_tile().partition_shape_C((tile.cta_m, tile.mma_n)), self.facts.acc_dtype)

    def a_registers(self) -> cute.Tensor:
        """A thread's fragments of one stage: (MMA, MMA_M, MMA_K)."""
        mma = self.of_tile()
        return mma.make_fragment_A(mma.partition_shape_A((self.facts.tile.cta_m, self.facts.tile.k_tile)))


def wait_for_sums(acc: cute.Tensor) -> None:
    """Behind all wgmmas: behind a loop over all k tiles, the compiler would round their sums before it."""
    wait_for_registers("wgmma.wait_group.sync.aligned 0;", cute.coalesce(acc))
