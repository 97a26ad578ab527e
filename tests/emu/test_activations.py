"""Activations that no shipped kernel has, in kernels compiled for them, element by element against float64."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.epilogue import ACTIVATIONS as NAMES
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import ACTIVATIONS, DTYPES, SHIPPED_ACTIVATIONS, fused

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import case_of, compiled  # noqa: E402 - needs cutlass
from tests.emu.matmul import run_matmul  # noqa: E402 - needs cutlass

BF16, F32, E4M3 = "bfloat16", "float32", "float8_e4m3fn"
HALF_ULP = {BF16: 2.0**-8, F32: 2.0**-24, E4M3: 2.0**-4}
SUBNORMAL = {BF16: 0.0, F32: 0.0, E4M3: 2.0**-10}  # half of the smallest one
COARSE, FINE = 2.0**-11, 2.0**-18  # of the result, and of a bounded function's 1: what a kernel may be wrong by


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SHIPPED_ACTIVATIONS])
@pytest.mark.parametrize(
    "target, tile, dtype, out, store",
    [
        ("sm_90a", Tile(128, 64), BF16, BF16, "tma"),
        ("sm_90a", Tile(64, 64), BF16, F32, "threads"),
        ("sm_90a", Tile(64, 64), E4M3, E4M3, "tma"),
        ("sm_100f", Tile(256, 128, cta_group=2, cluster_m=2), BF16, BF16, "tma"),
        ("sm_100f", Tile(128, 64), BF16, F32, "tma"),
    ],
)
def test_every_element(target: str, tile: Tile, dtype: str, out: str, store: str, name: str) -> None:
    own = Tile(**vars(tile) | {"k_tile": k_tile(dtype)})
    variant = Variant(target, dtype, dtype, out, "k", "k", own, fused(f"bias_{name}"), store=store)
    module, facts = compiled(variant)
    case = case_of(variant, 70, 69 if store == "threads" else 80, 48)
    a, b, bias = case.inputs()
    got, _ = run_matmul(module, facts, a, b, 1.0, bias, None, 1, 2, 0, Schedule.standard(0)[0])
    before = dataclasses.replace(case, activation=None).reference(a, b, bias)
    want = ACTIVATIONS[name](before)
    sums = 2.0**-13 * (np.abs(before) + 8)  # the tensor cores truncate
    steepest = np.maximum(1.2, 2 * np.abs(before)) if name == "squared_relu" else 1.2
    loss = (COARSE if out in (BF16, E4M3) else FINE) * (1 + np.abs(before)) + sums * steepest
    bound = HALF_ULP[out] * (np.abs(want) + loss) + SUBNORMAL[out] + loss
    largest = float(ml_dtypes.finfo(DTYPES[out]).max)
    assert (np.abs(got.astype(np.float64) - np.clip(want, -largest, largest)) <= bound).all()
