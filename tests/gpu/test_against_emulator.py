"""Shipped sm_90a kernels on the GPU, through the handler, and their PTX in the emulator, on the same inputs.

Small integers make every sum exact: bit for bit, but for what a gate's approximations add. Random inputs agree within a
unit in the last place of the result, plus these, plus what the tensor cores lose when they truncate partial sums.
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import DTYPE_BYTES, FP8_DTYPES, Problem
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts
from jax_bwgemm.runtime.decision import target_arch
from tests.cases import GATES, Case, activation_of, gate_error
from tests.emu.matmul import case_of, run_matmul
from tests.emu.shipped import facts as facts_of
from tests.emu.shipped import module, variants, why_missing
from tests.gpu.forced import forced

ARCH = target_arch(None)
MMA_K_BYTES, MMA_ROUNDING, FP8_MMA_ROUNDING = 32, 2.0**-22, 2.0**-13  # as in test_variants


def chosen() -> list[Variant]:
    """The whole catalogue of the target, where this GPU is a Hopper and the PTX came with the cubins."""
    if not isinstance(ARCH, Arch) or ARCH.target != "sm_90a":
        return []
    return [v for v in variants("sm_90a") if not why_missing(v) and not isinstance(artifacts.find_ptx(v), str)]


VARIANTS = chosen()


def shape_of(v: Variant) -> tuple[int, int, int]:
    """m, n, k: no multiple of any tile, several tiles of most; rows that TMA can step over, if it needs them."""
    return (208, 272, 144) if v.store == "tma" else (203, 269, 139)


def on_gpu(v: Variant, case: Case, *operands: np.ndarray | None) -> np.ndarray:
    entry = artifacts.find(v)
    assert not isinstance(entry, str) and isinstance(ARCH, Arch)
    problem = Problem(
        case.m,
        case.n,
        case.k,
        1,
        v.a_dtype,
        v.b_dtype,
        v.out_dtype,
        v.a_major,
        v.b_major,
        1,
        1,
        case.epilogue,
        v.c_major,
    )
    out = np.asarray(jax.jit(forced(entry, problem, ARCH))(*(x for x in operands if x is not None)))
    return out if v.c_major == "n" else out.swapaxes(1, 2)


def integers(x: np.ndarray | None) -> np.ndarray | None:
    return (
        None
        if x is None
        else np.clip(np.rint(x.astype(np.float32) * 2), 0 if x.dtype == np.uint8 else -4, 4).astype(x.dtype)
    )


def ulp(x: np.ndarray) -> np.ndarray:
    """The spacing of the dtype at each value."""
    facts = ml_dtypes.finfo(x.dtype)
    magnitude = np.maximum(np.abs(x.astype(np.float64)), float(facts.tiny))
    return float(facts.eps) * 2.0 ** np.floor(np.log2(magnitude))


@pytest.mark.skipif(not VARIANTS, reason="needs a Hopper GPU and its cubins")
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_hardware_and_emulator_agree(v: Variant) -> None:
    kernel, launch = module(v.name), facts_of(v)
    case = case_of(v, *shape_of(v))
    inputs = (*case.inputs(seed=len(v.name)), case.residual())
    whole = [integers(x) for x in inputs]
    hardware = on_gpu(v, case, *whole)
    emulator, _ = run_matmul(kernel, launch, whole[0], whole[1], case.alpha, whole[2], whole[3], 1)
    is_gated = activation_of(v) in GATES
    assert is_gated or np.array_equal(_bytes(hardware), _bytes(emulator))
    if v.out_dtype == "int32":
        return

    hardware = on_gpu(v, case, *inputs)
    emulator, _ = run_matmul(kernel, launch, inputs[0], inputs[1], case.alpha, inputs[2], inputs[3], 2, 2, 1)
    rounding = FP8_MMA_ROUNDING if v.a_dtype in FP8_DTYPES else MMA_ROUNDING
    steps = -(-case.k * DTYPE_BYTES[v.a_dtype] // MMA_K_BYTES)
    largest = np.max(np.abs(case.reference(*inputs)))
    loss = steps * rounding * largest
    if is_gated:  # whose argument may be about as far below zero as above
        loss += 2 * float(gate_error(largest, activation_of(v), v.out_dtype))
    apart = np.abs(hardware.astype(np.float64) - emulator.astype(np.float64))
    worst = float(np.max(apart / (np.maximum(ulp(hardware), ulp(emulator)) + loss)))
    assert worst <= 1.0, f"{worst:.2f} times the bound"


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)
