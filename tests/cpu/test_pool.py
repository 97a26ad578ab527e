"""Several processes that share the work, and take turns where it is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jax_bwgemm.bench import pool, regret, timing
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import Problem

HOLDS_S = 0.05


def double(x: int) -> tuple[int, int]:
    if x < 0:
        raise ValueError(f"a size requires at least 0, got {x}")
    return 2 * x, os.getpid()


def hold(place: Path) -> tuple[float, float]:
    (place / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(place.iterdir())) < 2:  # both are here before the first begins
        assert time.monotonic() < deadline, "the other process never came"
        time.sleep(0.001)
    with timing._turn():
        start = time.monotonic()
        time.sleep(HOLDS_S)
        return start, time.monotonic()


def count(problem, decisions, arch, rounds) -> list[float]:
    return [float(problem.m + i) for i in range(len(decisions))]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_is_found_once_and_by_its_position(num_processes: int) -> None:
    found = dict(pool.each(double, [5, 7, 9], num_processes))
    assert {i: x for i, (x, _) in found.items()} == {0: 10, 1: 14, 2: 18}
    assert (os.getpid() in {process for _, process in found.values()}) == (num_processes == 1)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_errors_are_raised_here(num_processes: int) -> None:
    with pytest.raises(ValueError, match="requires at least 0, got -1"):
        list(pool.each(double, [1, -1], num_processes))


def test_processes_that_measure_take_turns(tmp_path: Path) -> None:
    (first, second) = sorted(dict(pool.each(hold, [tmp_path, tmp_path], 2)).values())
    assert first[1] <= second[0]


def test_memory_is_shared_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    pool.share_memory(1)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    pool.share_memory(2)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_products_are_timed_by_several(artifacts_dir: Path) -> None:
    """What they send each other is whole, and in the order of the products."""
    problems = [Problem(512, 512, 512), Problem(64, 512, 512), Problem(256, 1024, 512)]
    found = regret.measure(problems, ARCHS["h200"], 15, clock=count, num_processes=2)
    assert [timed.problem for timed in found] == problems
    for timed in found:
        assert timed.times_us == tuple(count(timed.problem, timed.decisions, ARCHS["h200"], 15))
        assert len(timed.decisions) > 1 and all(decision.entry and decision.plan for decision in timed.decisions)
