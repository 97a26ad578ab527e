"""The catalogue: names, tiles, repacks, and what other tests want of it."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.arch import TARGETS
from jax_bwgemm.facts.shipped import BUILT_TILES
from jax_bwgemm.kernels.aot.catalog import catalogue, repacks
from tests.emu import mutant, mutants_of_epilogues, test_summation


def test_catalogue_has_one_name_per_variant_and_every_shipped_tile() -> None:
    variants = catalogue(TARGETS)
    assert len({v.name for v in variants}) == len(variants)
    shipped = {tile for table in BUILT_TILES for tiles in table.values() for tile in tiles}
    built = {dataclasses.replace(v.tile, k_tile=64) for v in variants}
    assert shipped == built  # and none that no plan could choose


def test_the_kernels_that_long_tests_name_ship() -> None:
    """What takes them out of the catalogue is told here, not by the long tests."""
    mutated = {*mutant.KERNELS.values(), *mutants_of_epilogues.KERNELS.values()}
    summed = {*test_summation.ALIKE, test_summation.SPLIT, test_summation.STREAMED}
    assert not (mutated | summed) - set(catalogue(TARGETS))


def test_every_target_has_every_repack() -> None:
    names = [repack.name for repack in repacks(TARGETS)]
    assert len(set(names)) == 12 and not set(names) & {v.name for v in catalogue(TARGETS)}
    assert "sm_100f_pad_32bit" in names and "sm_90a_transpose_8bit" in names
