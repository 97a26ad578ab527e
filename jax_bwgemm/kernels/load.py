"""The load role of both families: keeps the stages full, through all tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from jax_bwgemm.kernels import masks
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.start import enter
from jax_bwgemm.kernels.walk import Walk

Ends = tuple[cute.Tensor, cute.Tensor]  # in shared and in global memory


@dataclasses.dataclass(frozen=True)
class Feed:
    """The way of one operand into the stages: `atom` moves from `gmem` (TMA, tiles, k tiles, l) to `smem` (TMA, stage),
    with L2 `policy`, and to other CTAs if there is a `mask` of them."""

    atom: cute.CopyAtom
    smem: cute.Tensor
    gmem: cute.Tensor
    mask: Any
    batch_step: Int32
    policy: Int64

    def of_tile(self, tile_idx: Any, l_idx: Int32) -> cute.Tensor:
        """(TMA, k tiles)"""
        return self.gmem[None, tile_idx, None, l_idx * self.batch_step]

    def fill(self, of_tile: cute.Tensor, k_idx: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        cute.copy(
            self.atom,
            of_tile[None, k_idx],
            self.smem[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask,
            cache_policy=self.policy,
        )


def feeds(params: Params, walk: Walk, a: Ends, bs: Sequence[Ends]) -> tuple[Feed, ...]:
    """Of A and every B. `a`, `bs`: as their atoms move them."""
    tile, maps, sizes, hints = walk.tile, params.maps, params.sizes, params.hints
    a_mask = cutlass.Int16(masks.a_mask(tile, walk.x)) if tile.cluster_n > 1 else None
    b_mask = cutlass.Int16(masks.b_mask(tile, walk.x, walk.y)) if tile.cluster_m > tile.cta_group else None
    feed_a = Feed(maps.a, *a, a_mask, sizes.a_batch_step, hints.a_policy)
    ways = zip(maps.b, bs, strict=True)
    return feed_a, *(Feed(atom, *b, b_mask, sizes.b_batch_step, hints.b_policy) for atom, b in ways)


@cute.jit
def keep_full(feeds: tuple[Feed, ...], ab: Any, facts: GemmFacts, walk: Walk, split: KSplit) -> None:
    """The load warp: fills every stage as soon as it is empty, through all items of the walk. `ab`: their pipeline.

    It works out where the first item lies, some 50 instructions of which each needs the one before, while another warp
    makes the barriers, and where the next lies when the last load of one has left: a short product takes 0.1 us less.
    Without the vote on it, which changes nothing, the compiler moves that behind the meeting.
    """
    a, *bs = feeds
    tile = facts.tile
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, facts.stages)
    phase = Int32(0)
    idx = walk.first
    place = tuple(cute.arch.make_warp_uniform(x) for x in walk.place_of(idx))
    enter(facts.cluster)
    while idx < walk.num_items:
        m_idx, n_idx, l_idx, first, k_count = place
        a_tile, b_tiles = a.of_tile(m_idx // tile.cta_group, l_idx), [b.of_tile(n_idx, l_idx) for b in bs]
        k_first = first + l_idx * walk.k_step  # beyond all of k, TMA fills boxes with zeros
        for k_idx in cutlass.range(k_count, unroll=1):
            ab.producer_acquire(state)
            barrier = ab.producer_get_barrier(state)
            a.fill(a_tile, k_first + k_idx, state.index, barrier)
            for i in cutlass.range_constexpr(len(bs)):
                if cutlass.const_expr(tile.gated and tile.cta_group == 2):
                    if walk.x % tile.cta_group == i:  # each CTA of a pair has the columns of one b
                        bs[i].fill(b_tiles[i], k_first + k_idx, state.index, barrier)
                elif cutlass.const_expr(facts.b_loaders < tile.cluster_m // tile.cta_group):
                    if walk.x < facts.b_loaders:  # the others get all from these
                        bs[i].fill(b_tiles[i], k_first + k_idx, state.index, barrier)
                else:
                    bs[i].fill(b_tiles[i], k_first + k_idx, state.index, barrier)
            state.advance()
        if cutlass.const_expr(tile.cluster_k > 1):  # the stages hold parts of the result until all have read them
            split.wait_drained(phase)
            phase = phase ^ 1
        idx += walk.step
        place = walk.place_of(idx)
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(facts.drains_stages):  # a loop: DSL's producer_tail is as long as there are stages
        for _ in cutlass.range(facts.stages, unroll=1):
            ab.sync_object_empty.wait(state.index, state.phase)
            state.advance()
