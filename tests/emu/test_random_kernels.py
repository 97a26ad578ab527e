"""Kernels of random epilogues, compiled for them, in the emulator: every element of every result in its interval."""

from __future__ import annotations

from pathlib import Path

import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.variant import why_not_variant
from jax_bwgemm.runtime.artifacts import Manifest
from tests.emu.matmul import poisoned, run_matmul
from tests.expressions import seeded
from tests.fuzz import SEED, fuzz, rounds
from tests.gpu import expressions

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

SHAPE = 72, 144, 96  # more than a tile along m and n; rows of 16 bytes, whatever the majors


@fuzz
@pytest.mark.parametrize("seed", range(SEED % 10**6, SEED % 10**6 + rounds(8)))
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_kernel(target: str, seed: int) -> None:
    product = seeded(seed)
    variant = product.variant(target)
    assert why_not_variant(variant) is None
    operands = product.operands(SHAPE, seed)
    arrays = {role: x[None] if x.ndim == 2 else x for role, x in operands.items()}
    a, b = arrays.pop("a"), arrays.pop("b")
    m, n, _ = SHAPE
    stored = (1, m, n) if variant.c_major == "n" else (1, n, m)
    arrays |= {role: poisoned(stored, variant.out_dtype) for role, _ in variant.seconds}
    out, _ = run_matmul(
        *compiled(variant), a, b, max_clusters=2, schedule=Schedule.standard(seed)[seed % 5], others=arrays,
        scalars=dict(product.epilogue.scalars),
    )  # fmt: skip
    seconds = {role: arrays[role][0] if variant.c_major == "n" else arrays[role][0].T for role, _ in variant.seconds}
    product.check({"out": out[0], **seconds}, operands)


def test_cubins_for_a_machine_without_the_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `tests/gpu/test_random_expressions.py` finds them."""
    assert expressions.main(["build", str(tmp_path), "--count", "2", "--jobs", "0"]) == 0
    assert "2 of 2 random epilogues for sm_90a" in capsys.readouterr().out
    assert expressions.listing([tmp_path / "none", tmp_path]) == expressions.Listing("sm_90a", 2, {})
    assert set(Manifest.load(tmp_path).entries) == {seeded(seed).variant("sm_90a").name for seed in range(2)}
