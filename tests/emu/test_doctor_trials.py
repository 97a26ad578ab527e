"""The products of `doctor`, on the kernels that ship."""

from __future__ import annotations

import pytest

from jax_bwgemm.cli import doctor_trials
from jax_bwgemm.facts.arch import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_every_dtype_has_a_kernel_that_is_right(target: str) -> None:
    findings = {finding.what.partition(" ")[2]: finding for finding in doctor_trials.products(target)}
    without = {"int8", "uint8"} if target == "sm_103a" else set()  # it has no tensor cores for integers
    assert {dtype for dtype, finding in findings.items() if finding.state != "ok"} == without
    assert all(finding.state == "warning" and "XLA" in finding.text for finding in map(findings.get, without))
    assert all(f"right, by {target}_" in findings[dtype].text for dtype in findings.keys() - without)
