"""gelu and silu in the kernels: element by element, of arguments of any magnitude, and of no number."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import ACTIVATIONS, DTYPES, activation_of, fused, gate_error, has
from tests.emu.matmul import Facts, run_matmul
from tests.emu.test_hopper import kernel as compiled_kernel

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.aot.sass import disassemble  # noqa: E402 - needs cutlass
from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

BF16, F16, F32, E4M3 = "bfloat16", "float16", "float32", "float8_e4m3fn"
PAIR = Tile(256, 128, cta_group=2, cluster_m=2)
HALF_ULP = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24, E4M3: 2.0**-4}
SUBNORMAL = {BF16: 0.0, F16: 2.0**-25, F32: 0.0, E4M3: 2.0**-10}  # half of the smallest one


def variant(target: str, tile: Tile, epilogue: str, dtype: str, out: str | None = None, store: str = "tma") -> Variant:
    return Variant(target, dtype, dtype, out or dtype, "k", "k", tile, fused(epilogue), "n", store)


FORMS = [
    variant("sm_90a", Tile(128, 64), "bias_gelu", BF16),
    variant("sm_90a", Tile(128, 64, cluster_m=2, pingpong=True), "silu", F16),
    variant("sm_90a", Tile(64, 64, k_tile=k_tile(F32)), "gelu", F32),
    variant("sm_90a", Tile(64, 64, cluster_k=2), "silu", BF16, E4M3),
    variant("sm_90a", Tile(64, 64), "bias_silu", BF16, store="threads"),
    variant("sm_100f", PAIR, "bias_gelu", BF16),
    variant("sm_100f", Tile(128, 64), "silu", BF16),
    variant("sm_100f", PAIR, "gelu", F16),
    variant("sm_100f", Tile(64, 64), "bias_silu", BF16, F32),
]


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


def operands(of: Variant, m: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A product of one term, which is exact: magnitudes from next to nothing to what float16 still holds."""
    rng = np.random.default_rng(seed)
    a, b = np.zeros((1, m, 24)), np.zeros((1, n, 24))
    a[0, :, 17] = rng.standard_normal(m) * 2.0 ** rng.integers(-12, 12, m)
    b[0, :, 17] = rng.uniform(0.5, 2.0, n) * rng.choice((-1, 1), n)
    a, b = (x.astype(DTYPES[BF16]).astype(DTYPES[of.a_dtype]) for x in (a, b))  # TF32 has its bits, too
    return a, b, rng.standard_normal(n).astype(DTYPES[of.out_dtype]) if has(of, "bias") else None


@pytest.mark.long
@pytest.mark.parametrize("of", FORMS, ids=lambda of: of.name)
def test_every_element(of: Variant) -> None:
    m, n = 2 * of.tile.cta_m + 19, of.tile.mma_n + (9 if of.store == "threads" else 16)
    a, b, bias = operands(of, m, n, seed=len(of.name))
    x = a.astype(np.float64) @ b.astype(np.float64).swapaxes(1, 2)
    x, sum_error = (x, 0.0) if bias is None else (x + bias.astype(np.float64), 2.0**-23 * (np.abs(x) + np.abs(bias)))
    activation = activation_of(of)
    assert activation is not None
    want = ACTIVATIONS[activation](x)
    if of.out_dtype == E4M3:
        want = np.clip(want, -448, 448)
    exact = HALF_ULP[of.out_dtype] * np.abs(want) + SUBNORMAL[of.out_dtype]
    bound = exact + (1 + HALF_ULP[of.out_dtype]) * (gate_error(x, activation, of.out_dtype) + sum_error)
    for schedule in Schedule.standard(1)[::2]:
        got, _ = run_matmul(*kernel(of), a, b, 1.0, bias, schedule=schedule)
        wrong = ~(np.abs(got.astype(np.float64) - want) <= bound)
        assert not wrong.any(), [(x[i], got[i], want[i]) for i in map(tuple, np.argwhere(wrong)[:4])]


@pytest.mark.parametrize("of", FORMS[1:4] + FORMS[6:8], ids=lambda of: of.name)
def test_the_largest_and_no_number(of: Variant) -> None:
    """As jax.nn has it: no overflow on the way to a large argument's result, and an infinity times no slope is NaN."""
    big = 60000.0 if of.a_dtype == F16 else 2.0**127
    column = np.array([big, -big, np.inf, -np.inf, np.nan, 0.0])
    a, b = np.zeros((1, len(column), 8)), np.ones((1, 32, 8))
    a[0, :, 0] = column
    a, b = (x.astype(DTYPES[of.a_dtype]) for x in (a, b))
    largest = 448.0 if of.out_dtype == E4M3 else np.inf
    want = np.array([min(float(a[0, 0, 0]), largest), 0.0, largest, np.nan, np.nan, 0.0])
    got, _ = run_matmul(*kernel(of), a, b)
    np.testing.assert_array_equal(got[0].astype(np.float64), np.tile(want[:, None], 32))


@pytest.mark.parametrize("epilogue", ["gelu", "bias_silu"])
def test_a_pingpong_releases_its_last_stage_before_the_gate(epilogue: str) -> None:
    """Else the load warp, and with it the other warpgroup, waits for a gate that it should hide."""
    tile = Tile(128, 128, cluster_m=2, pingpong=True)
    cubin = compiled_kernel(variant("sm_90a", tile, epilogue, BF16)).cubin
    (opcodes,) = disassemble([read_cubin(cubin).text], "sm_90a")
    gates = [i for i, opcode in enumerate(opcodes) if opcode == "MUFU.TANH"]
    releases = [i for i, opcode in enumerate(opcodes) if opcode.startswith("SYNCS.ARRIVE")]
    assert len(gates) == 128 and releases[-1] < gates[0]
