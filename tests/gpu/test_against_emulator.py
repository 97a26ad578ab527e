"""Shipped sm_90a kernels on the GPU, through the handler, and their PTX in the emulator, on the same inputs.

Small integers make every sum exact: bit for bit. Random inputs agree within a unit in the last place of the result,
plus what the tensor cores lose when they truncate partial sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.arch import Arch
from jax_bwgemm.decision import target_arch
from jax_bwgemm.primitive import fused_product
from jax_bwgemm.variant import Variant
from tests.cases import Case
from tests.emu.matmul import run_matmul
from tests.emu.shipped import facts as facts_of
from tests.emu.shipped import module, variants, why_missing

ARCH = target_arch(None)
MMA_K, MMA_ROUNDING = 16, 2.0**-22  # as in test_variants
SHAPE = (200, 264, 136)  # m, n, k: no multiple of any tile, several tiles of most


def chosen() -> list[Variant]:
    """The whole catalogue of the target, where this GPU is a Hopper."""
    if not isinstance(ARCH, Arch) or ARCH.target != "sm_90a":
        return []
    return [v for v in variants("sm_90a") if not why_missing(v)]


VARIANTS = chosen()


def case_of(v: Variant) -> Case:
    kind = v.epilogue.split("_")
    alpha, activation = 0.5 if "scale" in kind else 1.0, "relu" if "relu" in kind else None
    return Case(*SHAPE, 1, v.a_dtype, v.out_dtype, v.a_major, v.b_major, 1, 1, alpha, "bias" in kind, activation)


def on_gpu(v: Variant, case: Case, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    run = functools.partial(
        fused_product, a_major=case.a_major, b_major=case.b_major, out_dtype=jnp.dtype(case.out_dtype),
        alpha=case.alpha, activation=case.activation, tile=v.tile, on_fallback="error", device=None,
        emulate="off",
    )  # fmt: skip
    return np.asarray(jax.jit(run)(a, b, bias))


def integers(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else np.clip(np.rint(x.astype(np.float32) * 2), -4, 4).astype(x.dtype)


def ulp(x: np.ndarray) -> np.ndarray:
    """The spacing of the dtype at each value."""
    facts = ml_dtypes.finfo(x.dtype)
    magnitude = np.maximum(np.abs(x.astype(np.float64)), float(facts.tiny))
    return float(facts.eps) * 2.0 ** np.floor(np.log2(magnitude))


@pytest.mark.skipif(not VARIANTS, reason="needs a Hopper GPU and its cubins")
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_hardware_and_emulator_agree(v: Variant) -> None:
    kernel, launch = module(v.name), facts_of(v)
    case = case_of(v)
    inputs = case.inputs(seed=len(v.name))
    whole = [integers(x) for x in inputs]
    hardware = on_gpu(v, case, *whole)
    emulator, _ = run_matmul(kernel, launch, whole[0], whole[1], case.alpha, whole[2], 1)
    assert np.array_equal(hardware.view(np.uint8), emulator.view(np.uint8))

    hardware = on_gpu(v, case, *inputs)
    emulator, _ = run_matmul(kernel, launch, inputs[0], inputs[1], case.alpha, inputs[2], 2, 2, 1)
    loss = -(-case.k // MMA_K) * MMA_ROUNDING * np.max(np.abs(case.reference(*inputs)))
    apart = np.abs(hardware.astype(np.float64) - emulator.astype(np.float64))
    worst = float(np.max(apart / (np.maximum(ulp(hardware), ulp(emulator)) + loss)))
    assert worst <= 1.0, f"{worst:.2f} times the bound"
