"""Some tiles and their kernels, for tests of what runs where these are all that is at hand (`have`)."""

from __future__ import annotations

import dataclasses

from fake_artifacts import fake_entry

from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused

BEST, SMALL, NARROW = Tile(128, 256, cluster_m=2), Tile(128, 128), Tile(64, 64, stream_k=True)
BF16 = ("bfloat16",) * 3


def entry(tile, epilogue="identity", dtypes=BF16):
    return fake_entry(Variant("sm_90a", *dtypes, "k", "n", tile, fused(epilogue)))


def with_epilogue(problem, **steps):
    return dataclasses.replace(problem, epilogue=chain(**steps))
