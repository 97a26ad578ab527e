"""Runs kernels of symmetric products in the emulator, against float64 and against their own transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator import Counters
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.variant import Variant
from tests.cases import BOUNDS, DTYPES, has, relative_error
from tests.emu.matmul import Facts, run_matmul

SCALARS = {"alpha": 0.5, "beta": -2.0}


def inputs(variant: Variant, m: int, k: int, batch: int, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """a as stored, and a residual, if there is one: numbers only in the cluster tiles that a kernel computes."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((batch, *((m, k) if variant.a_major == "k" else (k, m)))).astype(DTYPES[variant.a_dtype])
    if not has(variant, "residual"):
        return a, None
    residual = rng.standard_normal((batch, m, m)).astype(DTYPES[variant.out_dtype])
    residual = np.tril(residual) + np.tril(residual, -1).swapaxes(1, 2)
    rows, cols = np.indices((m, m)) // variant.tile.span[0]
    return a, np.where(rows < cols, np.nan, residual).astype(residual.dtype)


def reference(variant: Variant, a: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """In float64."""
    wide = a.astype(np.float64) if variant.a_major == "k" else a.astype(np.float64).swapaxes(1, 2)
    out = wide @ wide.swapaxes(1, 2) * (SCALARS["alpha"] if has(variant, "alpha") else 1.0)
    if residual is None:
        return out
    lower = np.tril(np.nan_to_num(residual.astype(np.float64)))
    symmetric = lower + np.tril(lower, -1).swapaxes(1, 2)
    return out + symmetric * (SCALARS["beta"] if has(variant, "beta") else 1.0)


def run_symmetric(
    variant: Variant, module: Module, facts: Facts, a: np.ndarray, residual: np.ndarray | None = None, **options: Any
) -> tuple[np.ndarray, Counters]:
    """The result, which starts poisoned; a is the only operand."""
    scalars = {role: value for role, value in SCALARS.items() if has(variant, role)}
    return run_matmul(module, facts, a, a, 1.0, None, residual, scalars=scalars, **options)


def check_symmetric(
    variant: Variant, module: Module, facts: Facts, sizes: tuple[int, int, int], seed: int = 0, **options: Any
) -> Counters:
    """`sizes`: m, k and the batch."""
    a, residual = inputs(variant, *sizes, seed)
    out, counters = run_symmetric(variant, module, facts, a, residual, **options)
    bits = out.view(f"u{out.itemsize}")
    assert np.array_equal(bits, bits.swapaxes(1, 2))
    error = relative_error(out, reference(variant, a, residual))
    assert error <= BOUNDS[variant.out_dtype], error
    return counters
