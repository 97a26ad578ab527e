"""Which products are left to XLA, because it is expected to be done with them sooner."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import sooner

H200 = by_name("h200")


@pytest.fixture(autouse=True)
def _takes_5_us(monkeypatch):
    _takes(monkeypatch, 5.0)


def _takes(monkeypatch, us):
    monkeypatch.setattr(sooner, "xla_us", lambda problem, arch: us + arch.constants.launch_us)


def test_it_is_compared_with_what_ours_takes_behind_others(monkeypatch):
    """A long product is left to it only if it is far ahead; a short one sooner if it is brief."""
    launch_us, long = H200.constants.launch_us, Problem(4096, 4096, 8192)
    short = Problem(256, 256, 32)
    vector = Problem(1, 3867, 690, a_major="m")
    rows = (
        (short, 4.0, 1.03),
        (short, 5.0, 1.06),
        (vector, 5.0, 1.3),
        (Problem(256, 256, 320), 5.0, 0.98),
        (long, 5.0, 0.92),
    )
    for problem, xla_us, row in rows:
        _takes(monkeypatch, xla_us)
        for us, is_xlas in ((xla_us / row + 0.01, True), (xla_us / row - 0.01, False), (0.0, False)):
            assert (sooner.why_xla(problem, us + launch_us, H200) is not None) == is_xlas


@pytest.mark.parametrize("own_us, is_close", [(9.0, False), (5.2, False), (5.0, True), (4.9, True)])
def test_what_is_said(own_us, is_close):
    """Our time is the predicted one; what it is counted as only where it would not be the larger one."""
    launch_us = H200.constants.launch_us
    said = sooner.why_xla(Problem(256, 256, 32), own_us + launch_us, H200)
    counted_us = own_us * sooner.SHORT_ROW + launch_us
    counted = f" (counted as {counted_us:.1f}, by how far such predictions were off)" if is_close else ""
    assert said == (
        f"XLA is expected to take {5.0 + launch_us:.1f} us for 256 x 256 sums of 32 products, our kernel "
        f"{own_us + launch_us:.1f}{counted}: pass `tile=` for a kernel nevertheless"
    )


def test_of_two_times_the_less_counts():
    """If it is less by more than such times repeat within."""
    problem = Problem(256, 512, 1024)
    assert sooner.why_timed(problem, 10.0, 9.91) is None and sooner.why_timed(problem, 10.0, 10.5) is None
    assert sooner.why_timed(problem, 10.0, 9.89) == (
        "XLA was timed to take 9.9 us for 256 x 512 sums of 1024 products, our kernel 10.0: pass `tile=` for a kernel "
        "nevertheless"
    )


def test_only_plain_products():
    problem = Problem(256, 256, 32)
    assert sooner.why_xla(dataclasses.replace(problem, batch=2, a_batch=2, b_batch=2), math.inf, H200) is None
    assert sooner.why_xla(dataclasses.replace(problem, epilogue=chain(activation="relu")), math.inf, H200) is None


def test_what_xla_may_pad_or_not_is_ours():
    """Where trees alone expect something of it; few rows or columns it reads as they lie."""
    left = [(256, 256, 1004, False), (257, 256, 1008, True), (257, 257, 1008, False), (5, 256, 3204, True)]
    for *sizes, is_xlas in [*left, (255, 256, 999, True)]:
        assert (sooner.why_xla(Problem(*sizes), math.inf, H200) is not None) == is_xlas, sizes


def test_what_is_not_known_is_ours(monkeypatch):
    monkeypatch.setattr(sooner, "xla_us", lambda *_: None)
    assert sooner.why_xla(Problem(256, 256, 32), math.inf, H200) is None


def test_what_was_measured_gives_way_to_no_trees():
    """Of short sums, as long as the formula alone tells something."""
    for k, is_xlas in ((320, False), (32, True)):
        assert (sooner.why_xla(Problem(256, 256, k), math.inf, H200, is_known=True) is not None) == is_xlas
        assert sooner.why_xla(Problem(256, 256, k), math.inf, H200) is not None
