"""The main loops of the Hopper GEMM: one where wgmma reads A from shared memory, one where it takes A from registers.

In the first, a stage is released behind the wgmmas of the next one, beside which its own have ended. Where there are
few stages, already behind those of the next one's first step along k, which the tensor cores do until the threads have
issued the others: TMA fills it that much sooner, and that is a large part of the time that its load may take.

In the latter, a stage is two halves of k, each with registers of its own: the wgmmas of one read theirs while the
other's are loaded.

    wgmma     half 0 of stage s      half 1 of stage s          half 0 of stage s + 1
    loads     half 1 of stage s      half 0 of stage s + 1      ...

Who has what: registers that a wgmma reads are loaded again behind the `wait_group` for it. A stage is empty when the
wgmmas that read its B are done, and its A is loaded and a proxy fence passed, behind which TMA may overwrite it. A
promoted tile waits for all wgmmas of a stage, whose sums it adds to its own; there the other warpgroup's fill the gap.

By arithmetic there is no room for twice the time: of a 128x256 k tile's 1024 cycles of wgmma, at 128 bytes a clock,
shared memory spends 512 on reading B for two warpgroups, 384 on what TMA writes, and 128 on these loads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState as State

from jax_bwgemm.facts.families import HOPPER
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.scheduler import Piece
from jax_bwgemm.kernels.sm90_deal import Hand
from jax_bwgemm.kernels.sm90_store import Backlog
from jax_bwgemm.kernels.sm90_wgmma import Wgmma

HALVES = 2  # of a stage's k
FIRST = 1  # of its steps along k: enough for the tensor cores while the stage before is released


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """A consumer warpgroup's. `a`, `b`: `Wgmma.operands`; `backlog`: what is stored beside the wgmmas."""

    facts: GemmFacts
    wgmma: Wgmma
    a: Any
    b: cute.Tensor
    ab: pipeline.PipelineTmaAsync
    hand: Hand
    backlog: Backlog

    @cute.jit
    def finish_sums(self, last: State, read: State) -> None:
        """Waits for the last wgmmas and releases the stages from `last` to `read`: that is one.

        In a ping-pong, a loop of one pass: ptxas moves nothing into it, and out of straight code it would take the
        release to below the epilogue's arithmetic, for which the load warp, and with it the other warpgroup, then
        waits. Beside other such loops, as those that wait for a residual's boxes and keep the arithmetic where it is,
        ptxas would wait for each wgmma alone.
        """
        facts = self.facts
        if cutlass.const_expr(facts.tile.pingpong and not (facts.boxes.by_rows or facts.moves.matrices)):
            while last.index != read.index:
                warpgroup.wait_group(0)
                self.ab.consumer_release(last)
                last.advance()
        else:
            warpgroup.wait_group(0)
            self.ab.consumer_release(last)


class DescriptorLoop(MainLoop):
    """wgmma reads both operands from shared memory."""

    @cute.jit
    def run(
        self, acc: cute.Tensor, read: State, item: Piece, held_at: Any, box: Int32
    ) -> tuple[State, State, tuple[Int32, Int32, Int32], Int32]:
        """`acc` = the sum over an item's stages from `read` on, at least one. Returns the state behind them, that of
        the last one, which the last wgmmas still read, the tile's first box, and the next box of the backlog, whose
        tile is at `held_at`."""
        mma, ab = self.wgmma.of_tile(), self.ab
        promoted = cutlass.const_expr(self.facts.tile.promoted)
        is_early = cutlass.const_expr(self.facts.stages <= HOPPER.few_stages and not promoted)
        sums = cute.make_rmem_tensor(acc.shape, acc.element_type) if promoted else acc  # of one stage, or of all
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        self.multiply(mma, sums, read)
        if cutlass.const_expr(promoted):
            warpgroup.wait_group(0)
            acc.store(sums.load())
        read.advance()
        at = self.hand.first_box(item.tile_idx)  # where that is, is worked out beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            if cutlass.const_expr(promoted):
                mma.set(warpgroup.Field.ACCUMULATE, False)
            if cutlass.const_expr(is_early):
                self.multiply(mma, sums, read, last=FIRST)
                warpgroup.wait_group(1)  # all groups before this one have read their stages
                ab.consumer_release(release)
            self.multiply(mma, sums, read, first=FIRST if is_early else 0)
            box = self.backlog.store_next(held_at, box)
            if cutlass.const_expr(promoted):
                warpgroup.wait_group(0)
                acc.store(acc.load() + sums.load())
            elif cutlass.const_expr(not is_early):
                warpgroup.wait_group(1)  # the group before this one has read its stage
            if cutlass.const_expr(not is_early):
                ab.consumer_release(release)
            read.advance()
            release.advance()
        return read, release, at, box

    def multiply(
        self, mma: cute.TiledMma, sums: cute.Tensor, read: State, first: int = 0, last: int | None = None
    ) -> None:
        """Issues a stage's wgmmas, or those of its steps along k from `first` to before `last`, as a group."""
        warpgroup.fence()
        for kb in range(cute.size(self.a, mode=[2]))[first:last]:
            cute.gemm(mma, sums, self.a[None, None, kb, read.index], self.b[None, None, kb, read.index], sums)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()


class RegisterLoop(MainLoop):
    """Threads pick A's fragments; wgmma reads B from shared memory."""

    @cute.jit
    def run(
        self, acc: cute.Tensor, read: State, item: Piece, held_at: Any, box: Int32
    ) -> tuple[State, State, tuple[Int32, Int32, Int32], Int32]:
        """What `DescriptorLoop.run` does."""
        mma, ab = self.wgmma.of_tile(), self.ab
        promoted = cutlass.const_expr(self.facts.tile.promoted)
        sums = cute.make_rmem_tensor(acc.shape, acc.element_type) if promoted else acc  # of one stage, or of all
        fA = self.wgmma.a_registers()
        release = read.clone()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(read)
        self.multiply_half(mma, sums, fA, read, 0)
        self.multiply_half(mma, sums, fA, read, 1)
        if cutlass.const_expr(promoted):
            warpgroup.wait_group(0)
            acc.store(sums.load())
        read.advance()
        at = self.hand.first_box(item.tile_idx)  # where that is, is worked out beside the first wgmmas
        for _ in cutlass.range(1, item.k_count, unroll=1):
            ab.consumer_wait(read)
            if cutlass.const_expr(promoted):
                mma.set(warpgroup.Field.ACCUMULATE, False)
            else:
                warpgroup.wait_group(1)
            self.multiply_half(mma, sums, fA, read, 0)
            cute.arch.fence_proxy("async.shared", space="cta")  # for the stage before: here, where nothing waits for it
            if cutlass.const_expr(not promoted):
                warpgroup.wait_group(1)
            ab.consumer_release(release)
            self.multiply_half(mma, sums, fA, read, 1)
            box = self.backlog.store_next(held_at, box)  # between the halves, ptxas would wait for each wgmma alone
            if cutlass.const_expr(promoted):
                warpgroup.wait_group(0)
                acc.store(acc.load() + sums.load())
            read.advance()
            release.advance()
        cute.arch.fence_proxy("async.shared", space="cta")
        return read, release, at, box

    def multiply_half(self, mma: cute.TiledMma, sums: cute.Tensor, fA: cute.Tensor, read: State, half: int) -> None:
        """Loads a half's fragments, which no wgmma reads any more, and issues its wgmmas."""
        fragments = self.wgmma.fragments
        assert fragments is not None  # the caller has such an A
        steps = cute.size(fA, mode=[2]) // HALVES
        for kb in range(half * steps, (half + 1) * steps):
            for slab in range(cute.size(fA, mode=[1])):
                fragments.pick(fA, self.a, slab, kb, read.index)
        warpgroup.fence()
        for kb in range(half * steps, (half + 1) * steps):
            cute.gemm(mma, sums, fA[None, None, kb], self.b[None, None, kb, read.index], sums)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
