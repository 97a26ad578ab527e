"""The main loop of the Hopper GEMM where wgmma takes A from registers; `sm90` has its kernel and its other main loop.

wgmma reads 4-byte operands from shared memory k-major only. An m-major A lies there as TMA found it, rows of 32 m, and
each thread of a consumer warpgroup picks its elements of the wgmma fragments out of them (LDS). A stage has two halves
of k, each with fragments of its own: the wgmmas of one read theirs while the other's are loaded.

    wgmma     half 0 of stage s            half 1 of stage s            half 0 of stage s + 1
    LDS       half 1 of stage s            half 0 of stage s + 1        ...

Registers that a wgmma reads are written again only behind the `wait_group` for it. A stage is released behind both: the
wgmmas that read its B, and the loads of its A, which the next TMA of the stage must not overtake (proxy fence).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_bwgemm.kernels.gemm import Outlet, Sizes, StoreGroup, Walk
from jax_bwgemm.kernels.sm90_store import Sm90Store
from jax_bwgemm.kernels.split_tail import Item

HALVES = 2


class MmaTf32Op(warpgroup.MmaF8Op):
    """wgmma of TF32, for which the DSL has no class: the one for 8 bits, whose layouts are the same bytes."""

    def __init__(self, shape_mn: tuple[int, int], a_src: warpgroup.OperandSource) -> None:
        dtypes, majors = (cutlass.TFloat32, cutlass.TFloat32, Float32), (OperandMajorMode.K, OperandMajorMode.K)
        super().__init__(*dtypes, (*shape_mn, 8), a_src, *majors)

    def _verify(self) -> None:
        """The base class would refuse the dtypes."""


class Sm90Registers(Sm90Store):
    """What replaces `Sm90Gemm.main_loop` for an m-major A of TF32."""

    def fragment_source(self, mma: cute.TiledMma, sA: cute.Tensor, thread: Any) -> cute.Tensor:
        """A thread's elements of A in shared memory: (MMA, MMA_M, MMA_K, stage)."""
        return mma.get_slice(thread).partition_A(sA)

    @cute.jit
    def main_loop_from_registers(
        self,
        acc: cute.Tensor,
        As: cute.Tensor,
        fB: cute.Tensor,
        ab: pipeline.PipelineTmaAsync,
        read: pipeline.PipelineState,
        held: cute.Tensor,
        held_at: Any,
        box: Int32,
        outlet: Outlet,
        walk: Walk,
        item: Item,
        group: StoreGroup,
        sizes: Sizes,
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState, tuple[Int32, Int32, Int32], Int32]:
        """As `Sm90Gemm.main_loop`; As: a thread's elements of A (`fragment_source`)."""
        mma = self.tiled_mma(self.side_by_side)
        fA = cute.make_rmem_tensor(As[None, None, None, 0].shape, self.a_dtype)
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        for half in cutlass.range_constexpr(HALVES):
            self.multiply_half(mma, acc, As, fA, fB, read, half)
        read.advance()
        at = self.first_box(walk, item, group)  # its divisions run beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            warpgroup.wait_group(1)
            self.multiply_half(mma, acc, As, fA, fB, read, 0)
            if cutlass.const_expr(self.defers_store):
                box = self.store_held(held, outlet, held_at, box, group, sizes)
            warpgroup.wait_group(1)
            cute.arch.fence_proxy("async.shared", space="cta")
            ab.consumer_release(release)
            self.multiply_half(mma, acc, As, fA, fB, read, 1)
            read.advance()
            release.advance()
        cute.arch.fence_proxy("async.shared", space="cta")
        return read, release, at, box

    def multiply_half(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        As: cute.Tensor,
        fA: cute.Tensor,
        fB: cute.Tensor,
        read: pipeline.PipelineState,
        half: int,
    ) -> None:
        """Loads a half's fragments, which nobody reads any more, and issues its wgmmas."""
        steps = cute.size(fA, mode=[2]) // HALVES
        for kb in range(half * steps, (half + 1) * steps):
            cute.autovec_copy(As[None, None, kb, read.index], fA[None, None, kb])
        warpgroup.fence()
        for kb in range(half * steps, (half + 1) * steps):
            cute.gemm(mma, acc, fA[None, None, kb], fB[None, None, kb, read.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
