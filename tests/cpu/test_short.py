"""What XLA is expected to take for short and uneven products, against what it took, and where that decides."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from jax_bwgemm.bench import report
from jax_bwgemm.bench.run import RESULTS
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import short

H200, H100 = by_name("h200"), by_name("h100")
LIMITS = {name: getattr(short, name) for name in ("SHORT", "UNEVEN", "THIN_TERMS", "VECTOR_BYTES")}
# By how much half and nine tenths of the products are off at most, and a tenth or a fifth more.
EXPECTED = {
    "EVEN_KIND": (0.12, 0.40),
    "TORN_KIND": (0.14, 0.45),
    "LONGER_KIND": (0.17, 0.62),
    "SHORT_KIND": (0.19, 0.48),
    "UNEVEN_KIND": (0.21, 0.65),
    "THIN_KIND": (0.12, 0.30),
    "VECTOR_KIND": (0.16, 0.60),
    "ROWS_KIND": (0.08, 0.12),
}


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


def _half_and_nine_tenths(logs):
    """What is expected of so many products is up to 1 + these times what they took, or what they took that of it."""
    tenths = statistics.quantiles(map(abs, logs), n=10, method="inclusive")
    return math.expm1(tenths[4]), math.expm1(tenths[8])


def test_what_is_expected_of_random_products():
    """Against what XLA's default choice took of all products of results/random, and of vectors that were named, for
    which a time is expected."""
    logs = {name: [] for name in EXPECTED}
    names = {getattr(short, name): name for name in EXPECTED}
    for path in sorted([*(RESULTS / "random").glob("*.json"), RESULTS / "vectors" / "h100.json"]):
        result = report.load(path)
        arch = by_name(result.arch)
        for row in result.rows:
            problem = row.case.problem
            if kind := short._kind(problem):
                us = short.xla_us(problem, arch) - arch.constants.launch_us
                logs[names[kind]].append(math.log(us / row.default.us))
    assert sum(map(len, logs.values())) >= 395
    for name, bounds in EXPECTED.items():
        half, nine_tenths = _half_and_nine_tenths(logs[name])
        assert half < bounds[0] and nine_tenths < bounds[1], (name, len(logs[name]), half, nine_tenths)
    sums = [x for name in ("EVEN_KIND", "TORN_KIND", "LONGER_KIND", "SHORT_KIND") for x in logs[name]]
    half, nine_tenths = _half_and_nine_tenths(sums)
    assert half < 0.15 and nine_tenths < 0.45, (len(sums), half, nine_tenths)


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
