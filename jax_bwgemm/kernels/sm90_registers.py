"""The main loop of the Hopper GEMM where wgmma takes A from registers; `sm90` has its kernel and its other main loop.

wgmma reads 4-byte operands from shared memory k-major only. An m-major A lies there as TMA found it, and each thread of
a consumer warpgroup picks the elements of its fragments (PTX ISA, wgmma.mma_async.m64nNk8, matrix A) out of it: lane
4 g + t has rows g and g + 8 of its warp, k t and t + 4. A stage is two halves of k, each with registers of its own: the
wgmmas of one read theirs while the other's are loaded.

    wgmma     half 0 of stage s      half 1 of stage s          half 0 of stage s + 1
    LDS       half 1 of stage s      half 0 of stage s + 1      ...

Who has what: registers that a wgmma reads are loaded again behind the `wait_group` for it. A stage is empty when the
wgmmas that read its B are done, and its A is loaded and a proxy fence passed, behind which TMA may overwrite it.

Row k of A in shared memory is 128 bytes, 32 m; its 16-byte chunks are swizzled by k % 8 (TMA, 128-byte swizzle), so the
four k of a load move 4 chunks among themselves. Lanes of neighbouring rows, two chunks of them, would meet there in the
same banks: `slab_rows` gives a warp's rows another order, chunks c and c + 4 at a time, and no two lanes meet. By
arithmetic there is no room for twice the time: of a 128x256 k tile's 1024 cycles of wgmma, at 128 bytes a clock, shared
memory spends 512 on reading B for two warpgroups, 384 on what TMA writes, and 128 on these loads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_bwgemm.kernels.gemm import Outlet, Sizes, StoreGroup, Walk
from jax_bwgemm.kernels.scheduler import Piece
from jax_bwgemm.kernels.sm90_store import Sm90Store

HALVES = 2  # of a stage's k
FRAGMENT = 4  # elements of a thread: rows g and g + 8 for k t, then for k t + 4
MMA_K = 8
BOX_M = 32  # rows of a TMA box and of a swizzle: 128 bytes
CHUNK = 4  # elements that a swizzle moves as a whole: 16 bytes


class MmaTf32Op(warpgroup.MmaF8Op):
    """wgmma of TF32, for which the DSL has no class: the one for 8 bits, whose layouts are the same bytes."""

    def __init__(self, shape_mn: tuple[int, int], a_src: warpgroup.OperandSource) -> None:
        dtypes, majors = (cutlass.TFloat32, cutlass.TFloat32, Float32), (OperandMajorMode.K, OperandMajorMode.K)
        super().__init__(*dtypes, (*shape_mn, MMA_K), a_src, *majors)

    def _verify(self) -> None:
        """The base class would refuse the dtypes."""


class Sm90Registers(Sm90Store):
    """Where wgmma has its A from, and what an m-major TF32 A has in place of `Sm90Gemm.main_loop`."""

    def tiled_mma(self, warpgroups: int) -> cute.TiledMma:
        if self.a_dtype is cutlass.TFloat32:
            source = warpgroup.OperandSource.RMEM if self.a_in_registers else warpgroup.OperandSource.SMEM
            return cute.make_tiled_mma(MmaTf32Op((64, self.tile.mma_n), source), (warpgroups, 1, 1))
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            OperandMajorMode.K if self.a_major == "k" else OperandMajorMode.MN,
            OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN,
            self.acc_dtype,
            (warpgroups, 1, 1),
            (64, self.tile.mma_n),
        )

    def fragment_sources(self, sA: cute.Tensor, group: StoreGroup) -> tuple[cute.Tensor, ...]:
        """A thread's elements of A in shared memory, for each of its FRAGMENT: (slab, step of k, stage)."""
        lane, warp = group.tidx % 32, group.tidx // 32
        slab = 64 * self.tile.k_tile
        steps = self.tile.k_tile // MMA_K
        slabs = self.tile.cta_m // (64 * self.side_by_side)
        layout = cute.make_layout(
            (slabs, steps, self.stages),
            stride=(slab * self.side_by_side, BOX_M * MMA_K, self.tile.cta_m * self.tile.k_tile),
        )
        base = cute.recast_ptr(sA.iterator, swizzle_=None) + group.idx % self.side_by_side * slab
        found = []
        for i in range(FRAGMENT):
            row = self.slab_rows(16 * warp + 8 * (i % 2) + lane // 4)
            k = 4 * (i // 2) + lane % 4
            chunk = (row % BOX_M // CHUNK) ^ k
            offset = row // BOX_M * (BOX_M * self.tile.k_tile) + k * BOX_M + chunk * CHUNK + row % CHUNK
            found.append(cute.make_tensor(base + offset, layout))
        return tuple(found)

    @cute.jit
    def main_loop_from_registers(
        self,
        acc: cute.Tensor,
        As: tuple[cute.Tensor, ...],
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
        fA = cute.make_rmem_tensor(mma.partition_shape_A((self.tile.cta_m, self.tile.k_tile)), self.a_dtype)
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        self.multiply_half(mma, acc, As, fA, fB, read, 0)
        self.multiply_half(mma, acc, As, fA, fB, read, 1)
        read.advance()
        at = self.first_box(walk, item, group)  # its divisions run beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            warpgroup.wait_group(1)
            self.multiply_half(mma, acc, As, fA, fB, read, 0)
            cute.arch.fence_proxy("async.shared", space="cta")  # for the stage before: here, where nothing waits for it
            warpgroup.wait_group(1)
            ab.consumer_release(release)
            self.multiply_half(mma, acc, As, fA, fB, read, 1)
            if cutlass.const_expr(self.defers_store):  # between the halves, ptxas would wait for each wgmma alone
                box = self.store_held(held, outlet, held_at, box, group, sizes)
            read.advance()
            release.advance()
        cute.arch.fence_proxy("async.shared", space="cta")
        return read, release, at, box

    def multiply_half(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        As: tuple[cute.Tensor, ...],
        fA: cute.Tensor,
        fB: cute.Tensor,
        read: pipeline.PipelineState,
        half: int,
    ) -> None:
        """Loads a half's fragments, which no wgmma reads any more, and issues its wgmmas."""
        steps = cute.size(fA, mode=[2]) // HALVES
        for kb in range(half * steps, (half + 1) * steps):
            for slab in range(cute.size(fA, mode=[1])):
                for i, source in enumerate(As):
                    fA[i, slab, kb] = source[slab, kb, read.index]
        warpgroup.fence()
        for kb in range(half * steps, (half + 1) * steps):
            cute.gemm(mma, acc, fA[None, None, kb], fB[None, None, kb, read.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
