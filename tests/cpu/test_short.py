"""What XLA is expected to take for short sums, against what it took, and where that decides."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import short

H200 = by_name("h200")
LIMITS = dict(short.LIMITS)


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr(short, "LIMITS", LIMITS)


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [(8, 2352, 64, 1.47), (752, 176, 112, 2.33), (243, 10, 487, 4.97), (639, 3357, 102, 7.37), (6577, 10053, 13, 72.0)],
)
def test_predictions_are_near_what_an_h200_took(m, n, k, us):
    """Device time of XLA's default choice (results/random)."""
    predicted = short.xla_us(Problem(m, n, k), H200) - H200.constants.launch_us
    assert us / 1.25 < predicted < 1.25 * us


def test_hand_derived_time():
    """2 x 2 of XLA's tiles are one wave; 128*128*3 elements of 2 bytes."""
    us = short.xla_us(Problem(128, 128, 128), H200)
    moved_us = 128 * 128 * 3 * 2 / (0.56 * H200.memory_tb_per_s * 1e6)
    assert us == pytest.approx(H200.constants.launch_us + 1.2 + 128 * 0.0075 + moved_us)


@pytest.mark.parametrize(
    ("k", "way", "us", "reason"),
    [
        (32, "tma", 0.0, "XLA is faster at sums of up to 32 products, got 32: pass `tile=` for a kernel nevertheless"),
        (33, "tma", 100.0, "XLA is expected to take "),
        (33, "tma", 0.0, None),
        (129, "tma", 100.0, None),
        (32, "padded", 0.0, "with operands that have to be padded, XLA is faster at sums of up to 32 products"),
        (33, "padded", 0.0, None),
        (33, "padded", 100.0, "with operands that have to be padded, XLA is expected to take "),
        (800, "padded", 100.0, "with operands that have to be padded, XLA is expected to take "),
        (801, "padded", 100.0, None),
        (32, "direct", 0.0, "XLA is faster at sums of up to 32 products, got 32"),
        (64, "direct", 0.0, None),
        (64, "direct", 100.0, "XLA is expected to take "),
        (65, "direct", 100.0, None),
        (32, "realigned", 0.0, "with operands that have to be realigned, XLA is faster at sums of up to 32 products"),
        (33, "realigned", 0.0, None),
        (800, "realigned", 100.0, "with operands that have to be realigned, XLA is expected to take "),
        (801, "realigned", 100.0, None),
    ],
)
def test_where_xla_has_the_product(k, way, us, reason):
    found = short.why_xla(Problem(256, 256, k), way, us, H200)
    assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    ("sizes", "way", "is_xlas"),
    [
        ((1, 2791, 1255), "padded", True),
        ((417, 2, 978), "realigned", True),
        ((11560, 5, 2073), "padded", True),
        ((2343, 6, 2073), "padded", False),
        ((3, 3782, 15323), "padded", False),  # more terms than XLA reads well
        ((4096, 4, 4096 - 1032), "padded", False),  # only the few columns' rows are padded
    ],
)
def test_thin_products_of_uneven_rows_are_xlas(sizes, way, is_xlas):
    """As measured (results/random). `us`: whatever ours is predicted to take."""
    reason = short.why_xla(Problem(*sizes), way, 0.0, H200)
    assert (reason is not None) == is_xlas
    assert reason is None or "XLA is faster with up to 5 rows or columns and 3200 products a sum, got " in reason


def test_a_batch_and_an_epilogue_are_left_to_kernels():
    problem = Problem(256, 256, 8)
    assert short.why_xla(problem, "tma", 9.0, H200) is not None
    assert short.why_xla(dataclasses.replace(problem, batch=2, a_batch=2, b_batch=2), "tma", 9.0, H200) is None
    assert short.why_xla(dataclasses.replace(problem, epilogue=chain(activation="relu")), "tma", 9.0, H200) is None
