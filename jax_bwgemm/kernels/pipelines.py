"""Arrival and byte counts of every barrier: one function each, so that a count is never typed twice.

Pure Python on a Tile: tests pin hand-derived values without a GPU and without CuTeDSL.
"""

from __future__ import annotations

from jax_bwgemm.tile import EPILOGUE_STAGES, Tile, stage_bytes

WARPS_PER_WARPGROUP = 4
EPILOGUE_WARPS = 4  # Blackwell: tcgen05.ld lets warp i read TMEM lanes 32i..32i+31 only, so four warps or none


def sharing_issuers(tile: Tile) -> int:
    """CTAs (or CTA pairs) whose MMAs read what one multicast load filled: a row and a column of the cluster."""
    return tile.cluster_m // tile.cta_group + tile.cluster_n - 1


def hopper_empty_arrivals(tile: Tile) -> int:
    """A stage is free when every consumer warp of every CTA that shares it has arrived once."""
    return sharing_issuers(tile) * tile.num_consumer_warpgroups * WARPS_PER_WARPGROUP


def blackwell_empty_arrivals(tile: Tile) -> int:
    """A stage is free when the tcgen05.commit of every MMA issuer that shares it has arrived."""
    return sharing_issuers(tile)


def full_bytes(tile: Tile, in_bytes: int) -> int:
    """Bytes that complete a full barrier: A and B of this CTA, or of both CTAs of the pair (the leader's barrier)."""
    return stage_bytes(tile, in_bytes) * tile.cta_group


def acc_empty_arrivals(tile: Tile) -> int:
    """An accumulator is free when one lane of each epilogue warp, of both CTAs of a pair, has arrived."""
    return EPILOGUE_WARPS * tile.cta_group


def stores_in_flight() -> int:
    """TMA stores that may still read their buffers when the warps meet after writing box i into buffer i % S.

    After the meeting they write box i + 1 where store i + 1 - S was read from: of the stores before i, all but S - 2
    must be done.
    """
    return EPILOGUE_STAGES - 2
