"""Several processes that share the work, and take turns where it is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jax_bwgemm.bench import pool, timing

HOLDS_S = 0.05


def double(x: int) -> int:
    if x < 0:
        raise ValueError(f"a size requires at least 0, got {x}")
    return 2 * x


def own_process(x: int) -> int:
    time.sleep(HOLDS_S)  # for the others to come
    return os.getpid()


def hold(place: Path) -> tuple[float, float]:
    (place / str(os.getpid())).touch()
    while len(list(place.iterdir())) < 2:  # both are here before the first begins
        time.sleep(0.001)
    with timing._turn():
        start = time.monotonic()
        time.sleep(HOLDS_S)
        return start, time.monotonic()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_is_found_once_and_by_its_position(num_processes: int) -> None:
    found = list(pool.each(double, [5, 7, 9], num_processes))
    assert sorted(found) == [(0, 10), (1, 14), (2, 18)]


def test_one_process_is_this_one() -> None:
    assert dict(pool.each(own_process, [0], 1)) == {0: os.getpid()}
    several = set(dict(pool.each(own_process, range(6), 2)).values())
    assert os.getpid() not in several and len(several) <= 2


@pytest.mark.parametrize("num_processes", [1, 2])
def test_errors_are_raised_here(num_processes: int) -> None:
    with pytest.raises(ValueError, match="requires at least 0, got -1"):
        list(pool.each(double, [1, -1], num_processes))


def test_processes_that_measure_take_turns(tmp_path: Path) -> None:
    (first, second) = sorted(dict(pool.each(hold, [tmp_path, tmp_path], 2)).values())
    assert first[1] <= second[0]


def test_no_process() -> None:
    with pytest.raises(ValueError, match="`--processes` requires at least 1, got 0"):
        list(pool.each(double, [1], 0))


def test_memory_is_shared_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    pool.share_memory(1)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    pool.share_memory(2)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
