"""Kernels of random epilogues on a GPU, against float64: every element of every result in its interval. The cubins are
built before, on any machine (`tests/gpu/expressions.py`)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.runtime import artifacts
from jax_bwgemm.runtime.decision import target_arch
from tests.expressions import seeded
from tests.gpu import expressions
from tests.gpu.forced import all_forced

ARCH = target_arch(None)
LISTING = expressions.listing(artifacts.artifact_dirs())
SHAPES = [(72, 144, 96), (8, 8, 16), (200, 328, 264)]


def why_not() -> str | None:
    if LISTING is None:
        return "no random epilogues are built: `python -m tests.gpu.expressions build DIR`, JAX_BWGEMM_ARTIFACTS=DIR"
    if isinstance(ARCH, Arch) and ARCH.target != LISTING.target:
        return f"the random epilogues are built for {LISTING.target}, and this GPU is {ARCH.target}"
    return None


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def test_nearly_all_are_built() -> None:
    assert LISTING is not None
    assert LISTING.count >= 300 and len(LISTING.refused) <= expressions.MOST_REFUSED * LISTING.count


@pytest.mark.parametrize("seed", range(LISTING.count if LISTING else 1))
def test_kernel(seed: int, arch: Arch) -> None:
    assert LISTING is not None
    if reason := LISTING.refused.get(str(seed)):
        pytest.skip(reason)
    product = seeded(seed)
    variant = product.variant(arch.target)
    entry = artifacts.find(variant)
    assert not isinstance(entry, str), entry
    for shape in SHAPES:
        operands = product.operands(shape, seed)
        problem = Problem(
            *shape, a_dtype=variant.a_dtype, b_dtype=variant.b_dtype, out_dtype=variant.out_dtype,
            a_major=variant.a_major, b_major=variant.b_major, epilogue=product.epilogue, c_major=variant.c_major,
        )  # fmt: skip
        arrays = [jax.numpy.asarray(x[None] if x.ndim == 2 else x) for x in operands.values()]
        found = jax.jit(all_forced(entry, problem, arch))(*arrays)
        results = [np.asarray(x)[0] if variant.c_major == "n" else np.asarray(x)[0].T for x in found]
        product.check(dict(zip(dict(product.epilogue.results), results, strict=True)), operands)
