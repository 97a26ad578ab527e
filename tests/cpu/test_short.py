"""What XLA is expected to take for short and uneven products, against what it took, and where that decides."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import short

H200, H100 = by_name("h200"), by_name("h100")
LIMITS = {name: getattr(short, name) for name in ("SHORT", "UNEVEN", "THIN_TERMS")}


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    for name, limit in LIMITS.items():
        monkeypatch.setattr(short, name, limit)


@pytest.mark.parametrize(
    ("problem", "arch", "us"),
    [
        (Problem(8, 2352, 64), H200, 1.47),
        (Problem(3936, 2880, 96), H100, 14.7),
        (Problem(1808, 5264, 16, b_major="k"), H100, 10.39),
        (Problem(405, 231, 45, a_major="m"), H200, 1.84),
        (Problem(14809, 36, 58, b_major="k"), H100, 3.43),
        (Problem(366, 50, 851, b_major="k"), H100, 7.24),
        (Problem(7, 6207, 216), H100, 4.64),
        (Problem(4, 902, 590, a_major="m"), H100, 4.24),
        (Problem(5175, 2, 683, a_major="m"), H100, 9.02),
        (Problem(1123, 1, 1688), H100, 3.48),
        (Problem(1, 4948, 2253, a_major="m"), H200, 13.99),
    ],
    ids=str,
)
def test_predictions_are_near_what_it_took(problem, arch, us):
    """Device time of XLA's default choice (results/random, results/regret)."""
    predicted = short.xla_us(problem, arch) - arch.constants.launch_us
    assert us / 1.5 < predicted < 1.5 * us


def test_hand_derived_time():
    """24 x 12 of XLA's tiles are 2.18 waves on 132 SMs; (1536 * 768 + 1536 * 64 + 64 * 768) * 2 bytes."""
    us = short.xla_us(Problem(1536, 768, 64), H200)
    moved_us = 2 * (1536 * 768 + 1536 * 64 + 64 * 768) / (H200.memory_tb_per_s * 1e6)
    assert us == pytest.approx(H200.constants.launch_us + 1.34 + 64 * 0.0166 * (288 / 132) ** 0.67 + 1.07 * moved_us)


@pytest.mark.parametrize(
    ("sizes", "is_compared"),
    [
        ((256, 256, 128), True),
        ((256, 256, 136), False),  # XLA multiplies as we do
        ((256, 256, 129), True),
        ((255, 256, 999), True),
        ((255, 256, 1001), False),  # and pads as we do
        ((255, 5, 3199), True),
        ((5, 255, 3201), False),
        ((256, 8, 3200), False),
    ],
)
def test_what_is_compared(sizes, is_compared):
    problem = Problem(*sizes)
    assert (short.xla_us(problem, H200) is not None) == is_compared
    assert (short.why_xla(problem, math.inf, H200) is not None) == is_compared
    assert short.why_xla(problem, 0.0, H200) is None


def test_only_plain_products():
    problem = Problem(256, 256, 32)
    sentence = "XLA is expected to take 3.9 us for 256 x 256 sums of 32 products, our kernel 9.5: pass `tile=`"
    assert short.why_xla(problem, 9.0, H200).startswith(sentence)
    assert short.why_xla(dataclasses.replace(problem, batch=2, a_batch=2, b_batch=2), 9.0, H200) is None
    assert short.why_xla(dataclasses.replace(problem, epilogue=chain(activation="relu")), 9.0, H200) is None
