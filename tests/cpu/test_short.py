"""Which products are left to XLA because it is expected to be done with them sooner."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import short, xla

H200 = by_name("h200")


@pytest.fixture(autouse=True)
def _takes_5_us(monkeypatch):
    monkeypatch.setattr(short, "xla_us", lambda problem, arch: 5.0 + arch.constants.launch_us)


def test_it_is_compared_with_what_ours_takes_behind_others():
    launch_us, problem = H200.constants.launch_us, Problem(256, 256, 32)
    for us, is_xlas in ((5.0 / short.ROW + 0.01, True), (5.0 / short.ROW - 0.01, False), (0.0, False)):
        assert (short.why_xla(problem, us + launch_us, H200) is not None) == is_xlas


def test_what_is_said():
    said = short.why_xla(Problem(256, 256, 32), 9.0 + H200.constants.launch_us, H200)
    xla_us, us = (x + H200.constants.launch_us for x in (5.0, 9.0 * short.ROW))
    assert said == (
        f"XLA is expected to take {xla_us:.1f} us for 256 x 256 sums of 32 products, our kernel {us:.1f}: pass "
        "`tile=` for a kernel nevertheless"
    )


def test_only_plain_products():
    problem = Problem(256, 256, 32)
    assert short.why_xla(dataclasses.replace(problem, batch=2, a_batch=2, b_batch=2), math.inf, H200) is None
    assert short.why_xla(dataclasses.replace(problem, epilogue=chain(activation="relu")), math.inf, H200) is None


def test_what_is_not_known_is_ours(monkeypatch):
    monkeypatch.setattr(short, "xla_us", lambda *_: None)
    assert short.why_xla(Problem(256, 256, 32), math.inf, H200) is None
    assert xla.xla_us(Problem(256, 256, 256), H200) is None
