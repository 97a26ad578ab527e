"""Arrival and byte counts of every barrier: one function each, so that a count is never typed twice.

Pure Python on a Tile: tests pin hand-derived values without a GPU and without CuTeDSL.
"""

from __future__ import annotations

from jax_bwgemm.facts.arch import family_of
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.resources import WARPS_PER_WARPGROUP, stage_bytes, store_box_bytes, store_groups
from jax_bwgemm.facts.tile import Tile

EPILOGUE_WARPS = 4  # Blackwell: tcgen05.ld lets warp i read TMEM lanes 32i..32i+31 only, so four warps or none


def sharing_issuers(tile: Tile) -> int:
    """CTAs (or CTA pairs) whose MMAs read what one multicast load filled: a row and a column of the cluster."""
    return tile.cluster_m // tile.cta_group + tile.cluster_n - 1


def hopper_empty_arrivals(tile: Tile) -> int:
    """A stage is free when every warp that multiplies it, of every CTA that shares it, has arrived once: all consumers,
    or the one warpgroup whose tile it belongs to in a ping-pong."""
    warpgroups = 1 if tile.pingpong else tile.num_consumer_warpgroups
    return sharing_issuers(tile) * warpgroups * WARPS_PER_WARPGROUP


def arrivals_outlive_readers(tile: Tile, target: str) -> bool:
    """Whether arrivals that free a stage may be on their way when the CTA has nothing left to do: from other CTAs, or
    from commits. Its shared memory must live until then."""
    return family_of(target).commits or sharing_issuers(tile) > 1


def blackwell_empty_arrivals(tile: Tile) -> int:
    """A stage is free when the tcgen05.commit of every MMA issuer that shares it has arrived."""
    return sharing_issuers(tile)


def full_bytes(tile: Tile, in_dtype: str) -> int:
    """Bytes that complete a full barrier: A and B of this CTA, or of both CTAs of the pair (the leader's barrier)."""
    return stage_bytes(tile, in_dtype) * tile.cta_group


def acc_empty_arrivals(tile: Tile) -> int:
    """An accumulator is free when one lane of each epilogue warp, of both CTAs of a pair, has arrived."""
    return EPILOGUE_WARPS * tile.cta_group


def residual_full_bytes(tile: Tile, out_dtype: str, target: str, moves: Moves) -> int:
    """Bytes that complete a matrices' full barrier: all store groups' boxes, or those of one group, into whose store
    buffers they are loaded."""
    groups = store_groups(tile, target) if family_of(target).residual_buffers else 1
    return moves.matrices * store_box_bytes(tile, out_dtype, target) // groups


def residual_empty_arrivals() -> int:
    """A residual's buffer is free when one lane of each epilogue warp has arrived."""
    return EPILOGUE_WARPS


def residual_summed_arrivals() -> int:
    """Hopper: a residual's box has become the result's when one lane of each warp of its warpgroup has arrived."""
    return WARPS_PER_WARPGROUP


def residual_stores_in_flight(buffers: int) -> int:
    """Hopper: TMA stores that may still read their buffers when the residual warp has issued store i.

    It loads the residual of box i + buffers - these into a buffer, which must come before that box's store.
    """
    return min(2, buffers - 1)


def stores_in_flight(buffers: int) -> int:
    """TMA stores that may still read their buffers when the warps meet after writing box i into buffer i % S of S.

    After the meeting they write box i + 1 where store i + 1 - S was read from: of the stores before i, all but S - 2
    must be done.
    """
    return buffers - 2


def wide_stores_in_flight(buffers: int, boxes_a_store: int) -> int:
    """The same when they are about to write the first of a store's boxes: all may but the one that reads its buffers,
    which is the oldest."""
    return buffers // boxes_a_store - 1


def split_arrivals(tile: Tile, storing_warps: int) -> int:
    """Barriers of a split along k: every storing warp of every CTA that has a part of the same tile, its own too."""
    return tile.cluster_k * storing_warps
