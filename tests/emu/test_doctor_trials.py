"""The products of `doctor`, on the kernels that ship."""

from __future__ import annotations

import pytest

from jax_bwgemm.cli import doctor_trials
from jax_bwgemm.facts.arch import TARGETS


@pytest.mark.parametrize(
    "target", [target if target == "sm_100a" else pytest.param(target, marks=pytest.mark.long) for target in TARGETS]
)
def test_every_dtype_has_a_kernel_that_is_right(target: str) -> None:
    findings = {finding.what.partition(" ")[2]: finding for finding in doctor_trials.products(target)}
    of_integers, of_others = ("sm_90a", "sm_90a") if target == "sm_90a" else ("sm_100a", "sm_100f")
    for dtype, finding in findings.items():
        by = of_integers if dtype in ("int8", "uint8") else of_others
        assert finding.state == "ok" and f"right, by {by}_" in finding.text
