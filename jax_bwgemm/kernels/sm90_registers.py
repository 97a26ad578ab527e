"""The main loop of the Hopper GEMM where wgmma takes A from registers; `sm90` has its kernel and its other main loop.

wgmma reads operands of 4 bytes and of 1 from shared memory k-major only. An m-major A lies there as TMA left it, and
the threads of a consumer warpgroup pick their fragments out of it (`sm90_fragments`). A stage is two halves of k, each
with registers of its own: the wgmmas of one read theirs while the other's are loaded.

    wgmma     half 0 of stage s      half 1 of stage s          half 0 of stage s + 1
    loads     half 1 of stage s      half 0 of stage s + 1      ...

Who has what: registers that a wgmma reads are loaded again behind the `wait_group` for it. A stage is empty when the
wgmmas that read its B are done, and its A is loaded and a proxy fence passed, behind which TMA may overwrite it. A
promoted tile waits for all wgmmas of a stage, whose sums it adds to its own; there the other warpgroup's fill the gap.

By arithmetic there is no room for twice the time: of a 128x256 k tile's 1024 cycles of wgmma, at 128 bytes a clock,
shared memory spends 512 on reading B for two warpgroups, 384 on what TMA writes, and 128 on these loads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_bwgemm.kernels.gemm import Outlet, Sizes, StoreGroup, Walk
from jax_bwgemm.kernels.scheduler import Piece
from jax_bwgemm.kernels.sm90_residual import Sm90Residual

HALVES = 2  # of a stage's k


class MmaTf32Op(warpgroup.MmaF8Op):
    """wgmma of TF32, for which the DSL has no class: the one for 8 bits, whose layouts are the same bytes."""

    def __init__(self, shape_mn: tuple[int, int], a_src: warpgroup.OperandSource) -> None:
        dtypes, majors = (cutlass.TFloat32, cutlass.TFloat32, Float32), (OperandMajorMode.K, OperandMajorMode.K)
        super().__init__(*dtypes, (*shape_mn, 8), a_src, *majors)

    def _verify(self) -> None:
        """The base class would refuse the dtypes."""


class Sm90Registers(Sm90Residual):
    """Where wgmma has its A from, and what an A from registers has in place of `Sm90Gemm.main_loop`."""

    def tiled_mma(self, warpgroups: int) -> cute.TiledMma:
        source = warpgroup.OperandSource.RMEM if self.fragments else warpgroup.OperandSource.SMEM
        if self.a_dtype is cutlass.TFloat32:
            return cute.make_tiled_mma(MmaTf32Op((64, self.tile.mma_n), source), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            OperandMajorMode.K if self.fragments or self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            self.acc_dtype,
            (warpgroups, 1, 1),
            (64, self.tile.mma_n),
            source,
        )

    def fragment_sources(self, sA: cute.Tensor, group: StoreGroup) -> tuple[Any, ...]:
        """What a thread's fragments are picked from."""
        assert self.fragments is not None  # the caller has such an A
        return self.fragments.sources(sA, group)

    @cute.jit
    def main_loop_from_registers(
        self,
        acc: cute.Tensor,
        As: tuple[Any, ...],
        fB: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        read: pipeline.PipelineState,
        held: cute.Tensor,
        held_at: Any,
        box: Int32,
        outlet: Outlet,
        walk: Walk,
        item: Piece,
        group: StoreGroup,
        sizes: Sizes,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState, tuple[Int32, Int32, Int32], Int32]:
        """What `Sm90Gemm.main_loop` does. As: `fragment_sources`."""
        mma = self.tiled_mma(self.side_by_side)
        promoted = cutlass.const_expr(self.tile.promoted)
        sums = cute.make_rmem_tensor(acc.shape, self.acc_dtype) if promoted else acc  # of one stage, or of all
        fA = mma.make_fragment_A(mma.partition_shape_A((self.tile.cta_m, self.tile.k_tile)))
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        self.multiply_half(mma, sums, As, fA, fB, read, 0)
        self.multiply_half(mma, sums, As, fA, fB, read, 1)
        if cutlass.const_expr(promoted):
            warpgroup.wait_group(0)
            acc.store(sums.load())
        read.advance()
        at = self.first_box(walk, item.tile_idx, group.idx)  # its divisions run beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            if cutlass.const_expr(promoted):
                mma.set(warpgroup.Field.ACCUMULATE, False)
            else:
                warpgroup.wait_group(1)
            self.multiply_half(mma, sums, As, fA, fB, read, 0)
            cute.arch.fence_proxy("async.shared", space="cta")  # for the stage before: here, where nothing waits for it
            if cutlass.const_expr(not promoted):
                warpgroup.wait_group(1)
            ab.consumer_release(release)
            self.multiply_half(mma, sums, As, fA, fB, read, 1)
            if cutlass.const_expr(self.defers_store):  # between the halves, ptxas would wait for each wgmma alone
                box = self.store_held(held, outlet, held_at, box, group, sizes)
            if cutlass.const_expr(promoted):
                warpgroup.wait_group(0)
                acc.store(acc.load() + sums.load())
            read.advance()
            release.advance()
        cute.arch.fence_proxy("async.shared", space="cta")
        return read, release, at, box

    def multiply_half(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        As: tuple[Any, ...],
        fA: cute.Tensor,
        fB: cute.Tensor,
        read: pipeline.PipelineState,
        half: int,
    ) -> None:
        """Loads a half's fragments, which no wgmma reads any more, and issues its wgmmas."""
        assert self.fragments is not None  # the caller has such an A
        steps = cute.size(fA, mode=[2]) // HALVES
        for kb in range(half * steps, (half + 1) * steps):
            for slab in range(cute.size(fA, mode=[1])):
                self.fragments.pick(fA, As, slab, kb, read.index)
        warpgroup.fence()
        for kb in range(half * steps, (half + 1) * steps):
            cute.gemm(mma, acc, fA[None, None, kb], fB[None, None, kb, read.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
