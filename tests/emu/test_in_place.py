"""A kernel whose result is stored over the matrix that it adds: each tile is read before it is stored, by whoever has
it, whichever warps and copies are late."""

from __future__ import annotations

import zlib

import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.variant import Variant
from tests.cases import check_case
from tests.emu.matmul import run_matmul
from tests.emu.shipped import facts, module, variants, why_missing
from tests.emu.test_catalogue import even, odd
from tests.fuzz import in_turn

ADDED = "residual", "scale_residual"
KERNELS = [v for target in ("sm_90a", "sm_100f") for v in variants(target) if v.steps.kind in ADDED]


def for_sums() -> list[Variant]:
    """All that ship for gradients of weights, and one of each other tile."""
    found = [variant for variant in KERNELS if (variant.a_major, variant.b_major) == ("m", "n")]
    tiles = {(variant.target, variant.tile, variant.c_major) for variant in found}
    others = {(x.target, x.tile, x.c_major): x for x in KERNELS}
    return [*found, *(variant for key, variant in others.items() if key not in tiles)]


@pytest.mark.parametrize("variant", for_sums(), ids=lambda variant: variant.name)
def test_over_what_is_added(variant: Variant) -> None:
    if reason := why_missing(variant):
        pytest.skip(reason)
    seed = zlib.crc32(variant.name.encode()) % 1000 + 1
    for shape, (i, schedule) in zip((even, odd), in_turn(Schedule.standard(seed), seed, 2), strict=True):
        case = shape(variant)
        (a, b, bias), residual = case.inputs(seed), case.residual(seed)
        kernel = module(variant.name), facts(variant)
        clusters = {"max_clusters": (1, None)[i % 2], "schedule": schedule}
        out, _ = run_matmul(*kernel, a, b, case.alpha, bias, residual, in_place=True, **clusters)
        check_case(out, case.reference(a, b, bias, residual), case)
