"""The benchmark's clocks and rounds, with clocks that are made up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from jax_bwgemm.bench import timing


def test_summary_is_median_and_middle_half() -> None:
    assert timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0]) == timing.Sample(3.0, 2.0, 4.0, 5)


def recorders(names: str) -> tuple[list[str], dict[str, timing.Measure]]:
    order: list[str] = []

    def measure(name: str) -> timing.Measure:
        def call() -> float:
            order.append(name)
            return float(len(order))

        return call

    return order, {name: measure(name) for name in names}


def test_rounds_alternate_and_swap_who_goes_first() -> None:
    order, measures = recorders("op")
    samples = timing.alternate(measures, 15)
    assert order[:4] == ["p", "o", "o", "p"]
    assert order.count("o") == order.count("p") == samples["o"].rounds == samples["p"].rounds == 15


def test_everyone_goes_first_and_last() -> None:
    order, measures = recorders("abcd")
    timing.alternate(measures, 16)
    rounds = ["".join(order[i : i + 4]) for i in range(0, 64, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    for at in (0, 3):
        assert [sum(names[at] == name for names in rounds) for name in "abcd"] == [4, 4, 4, 4]


@pytest.mark.parametrize(("tick", "rounds"), [(3.0, 15), (0.5, 18), (1e-4, timing.MAX_ROUNDS)])
def test_rounds_go_on_until_the_seconds_have_passed(tick: float, rounds: int) -> None:
    """The clock ticks when it is read: at the start, and after each round once there are 15."""
    clock = itertools.count()
    order, measures = recorders("ab")
    samples = timing.alternate(measures, 15, 2.0, lambda: next(clock) * tick)
    assert samples["a"].rounds == samples["b"].rounds == rounds == len(order) / 2


def test_what_three_rounds_show_to_be_slower_is_measured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.03 times the fastest is in, more is not; a first round that was slow counts as one of three."""
    times = {"a": [150.0, *[100.0] * 9], "b": [103.0] * 10, "c": [104.0] * 10}
    calls = {name: iter(values) for name, values in times.items()}
    turns: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        turns.append("taken")
        yield
        turns.append("passed")

    monkeypatch.setattr(timing, "_turn", turn)
    measures = {name: functools.partial(next, own) for name, own in calls.items()}
    assert timing.of_the_fastest(measures, 10) == {"a": 100.0, "b": 103.0, "c": 104.0}
    assert [len(list(own)) for own in calls.values()] == [0, 0, 7] and turns == ["taken", "passed"]


def test_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="`--rounds` requires at least 15, got 14"):
        timing.alternate({}, 14)


def test_the_gpu_rests_for_some_times_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    timing.rest(11_000.0)
    assert slept == pytest.approx([0.055])


def test_thehost_clock_rests_behind_all_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock ticks once a call of the function, by 40 us."""
    calls, rested = itertools.count(1), []
    last = [0]

    def function() -> Any:
        last[0] = next(calls)
        return jnp.zeros(1)

    monkeypatch.setattr(timing, "rest", rested.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 40e-6 * last[0])
    assert timing.host_clock(function, 2)() == pytest.approx(20.0)
    assert rested == pytest.approx([40.0 * timing.HOST_BATCH])


def test_without_cupti_thehost_clock_is_named_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "rest", lambda work_us: None)
    method, clock = timing.choose_clock()
    assert method.startswith("host time of 20 calls, launches included")
    assert clock is timing.host_clock


def test_cupti_times_are_summed_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [("gemm", 0.25), ("reduce", 0.05), ("gemm", 0.26), ("reduce", 0.04)]
    profiler = types.SimpleNamespace(measure=lambda function, aggregate: lambda *args: (None, kernels))
    package = types.SimpleNamespace(profiler=profiler)
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", package)
    rested: list[float] = []
    monkeypatch.setattr(timing, "rest", rested.append)
    assert timing.kernel_clock(None, 2)() == pytest.approx(300.0)
    assert rested == pytest.approx([600.0])  # all of the call's work
    with pytest.raises(RuntimeError, match="CUPTI requires a kernel for each of 5 products, got 4"):
        timing.kernel_clock(None, 5)()
