"""The fastest kernels once more, alone and in every order of tiles: on a clock that reads what it is told to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_bwgemm.bench import candidates, finals, timing
from jax_bwgemm.bench.candidates import time_kernels
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.decision import Decision, kernels

H200 = ARCHS["h200"]
PROBLEM = Problem(1024, 512, 256)


def test_the_fastest_are_timed_again_in_every_order(artifacts_dir: Path) -> None:
    """Alone, the second fastest takes less, in the last of its orders; the fastest is not worth another one."""
    found = time_kernels(PROBLEM, H200, 3, lambda problem, own, arch, rounds: [1.0] * len(own))
    assert found is not None
    found = dataclasses.replace(
        found, times_us=tuple(105.0 + i for i in range(len(found.times_us) - 2)) + (103.0, 100.0)
    )
    *others, second, fastest = range(len(found.times_us))
    asked: list[Decision] = []

    def clock(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
        asked.extend(decisions)
        assert (problem, arch, rounds) == (PROBLEM, H200, 7)
        starts = [i for i, own in enumerate(decisions) if own in (found.decisions[second], found.decisions[fastest])]
        assert len(starts) == 2, "each begins with the planner's order"
        times = [150.0] * len(decisions)
        times[starts[0]], times[starts[0] + 1] = 120.0, 119.9
        times[starts[1]], times[starts[1] + 1] = 125.0, 110.0
        return times

    again = finals.Finals.of(found).run(H200, 7, clock).refined
    assert asked[-1] == finals.XLA
    plans = [own.plan for own in asked if own.plan]
    near = [found.decisions[i].plan for i in (fastest, second, *others[:2])]
    assert [(x.tile, x.swapped) for x in plans] == [
        (own.tile, own.swapped) for own in near if own for _ in finals.in_orders(Decision(own))
    ]
    assert len({(x.tile, x.swapped, x.raster_group, x.raster_along_n) for x in plans}) == len(plans)
    assert again.times_us[fastest] == 120.0 and again.decisions[fastest] == found.decisions[fastest]
    assert again.times_us[second] == 110.0 and again.decisions[second] != found.decisions[second]
    assert again.times_us[others[0]] == 150.0 and again.times_us[others[2]] == pytest.approx(107.0 * 120 / 100)
    first, then = again.record.times[:2]
    best = again.decisions[second].plan
    assert best is not None and first.order == (best.raster_group, best.raster_along_n) and then.order is None
    assert (first.us, then.us) == (110.0, 120.0)


def test_alone_every_launch_has_operands_of_its_own(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of three places, of which the mean counts: the first kernel is lucky in one."""
    launched: list[tuple[int, int]] = []
    places: list[int] = []

    def program(problem: Problem, own: Sequence[Decision], copies: int, in_a_row: int) -> Any:
        launched.append((copies, in_a_row))
        return lambda *operands: 0

    clocks = iter((10.0, 20.0, 40.0, 30.0, 21.0, 40.0, 31.0, 19.0, 40.0))

    def clock(function: Any, num_products: int, *operands: Any) -> timing.Measure:
        us = next(clocks)
        assert num_products == 2 and len(operands[0]) == 2
        places.append(operands[0][0][0].unsafe_buffer_pointer())
        return lambda: us

    monkeypatch.setattr(candidates, "MAX_ROTATION", 2)
    monkeypatch.setattr(finals, "program", program)
    monkeypatch.setattr(timing, "kernel_clock", clock)
    monkeypatch.setattr(ffi, "register", lambda directories: None)
    _, decisions = kernels(PROBLEM, H200)
    assert finals.alone(PROBLEM, decisions[:3], H200, 5) == pytest.approx([71 / 3, 20.0, 40.0])
    assert launched == [(2, 1)] * 3
    assert len(set(places)) == finals.PLACES and places == [place for place in places[::3] for _ in range(3)]


def test_xla_is_timed_beside_them(artifacts_dir: Path) -> None:
    """Once, behind all orders of all kernels."""
    found = time_kernels(PROBLEM, H200, 3, lambda problem, own, arch, rounds: [100.0] * len(own))
    assert found is not None and found.xla_us is None

    def clock(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
        return [90.0 if own == finals.XLA else 100.0 for own in decisions]

    again = finals.Finals.of(found).run(H200, 7, clock).refined
    assert again.xla_us == again.record.xla_us == 90.0 and set(again.times_us) == {100.0}


def test_the_means_of_several_processes_count(artifacts_dir: Path) -> None:
    """The first kernel, and XLA, are lucky in one of three."""
    found = time_kernels(PROBLEM, H200, 3, lambda problem, own, arch, rounds: [100.0] * len(own))
    assert found is not None
    own = finals.Finals.of(found)
    for first_us, xla_us in ((80.0, 99.0), (120.0, 97.0), (118.0, 74.0)):

        def clock(
            problem: Problem, asked: Sequence[Decision], arch: Arch, rounds: int, firsts: float, xlas: float
        ) -> list[float]:
            return [firsts, *[101.0] * (len(asked) - 2), xlas]

        own = own.run(H200, 7, functools.partial(clock, firsts=first_us, xlas=xla_us))
    first, *_ = own.entrants
    again = own.refined
    assert len(own.runs_us) == 3 and again.xla_us == 90.0
    assert again.times_us[first[0]] == 101.0, "in another order: the planner's takes 106"
    others = [us for i, us in enumerate(again.times_us) if i in {j for j, _ in own.entrants[1:]} - {first[0]}]
    assert set(others) == {101.0}


@pytest.mark.parametrize(
    "change",
    [{"epilogue": chain(activation="relu")}, {"symmetric": True, "b_major": "k"}, {"c_major": "m"},
     {"b_dtype": "float16"}, {"a_dtype": "int8", "b_dtype": "int8", "out_dtype": "int32"}],
    ids=str,
)  # fmt: skip
def test_xla_is_not_timed_where_it_computes_something_else(change: dict[str, Any]) -> None:
    assert finals.is_xlas(PROBLEM) and not finals.is_xlas(dataclasses.replace(PROBLEM, **change))


@pytest.mark.parametrize("batches", [(1, 1), (3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("majors", [("k", "n"), ("m", "n"), ("k", "k")], ids=str)
def test_what_xla_multiplies(majors: tuple[str, str], batches: tuple[int, int]) -> None:
    """Each copy, of operands as they lie, without the padding that kernels want."""
    (a_major, b_major), (a_batch, b_batch) = majors, batches
    problem = Problem(
        20, 33, 41, max(batches), out_dtype="float32", a_major=a_major, b_major=b_major, a_batch=a_batch,
        b_batch=b_batch,
    )  # fmt: skip
    a, b, rest = candidates.operands(problem, 2)
    products = jax.jit(finals.xlas(problem, 2))(a, b, rest)
    assert len(products) == 2
    for x, y, product in zip(a, b, products, strict=True):
        own = np.asarray(x[-1], np.float64), np.asarray(y[-1], np.float64)
        rows = own[0].swapaxes(-1, -2) if a_major == "m" else own[0]
        columns = own[1].swapaxes(-1, -2) if b_major == "k" else own[1]
        assert rows.shape[-1] == columns.shape[-2] == 41
        expected = rows @ columns
        np.testing.assert_allclose(np.asarray(product).reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def test_xla_is_compiled_while_nobody_else_measures(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For it times kernels of its own meanwhile; ours need not wait for a turn to be compiled. Operands are copied in
    turns, each place's in one."""
    turns: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        turns.append("taken")
        yield
        turns.append("left")

    def of_the_fastest(measures: dict[str, Any], rounds: int) -> dict[str, float]:
        assert turns[-1] == "left"
        return dict.fromkeys(measures, 1.0)

    monkeypatch.setattr(timing, "turn", turn)
    monkeypatch.setattr(timing, "of_the_fastest", of_the_fastest)
    monkeypatch.setattr(timing, "kernel_clock", lambda *args: lambda: 1.0)
    monkeypatch.setattr(finals, "program", lambda *args: lambda *operands: 0)
    monkeypatch.setattr(ffi, "register", lambda directories: None)
    _, decisions = kernels(PROBLEM, H200)
    assert finals.alone(PROBLEM, decisions[:1], H200, 5) == [1.0]
    assert turns == ["taken", "left"] * finals.PLACES
    turns.clear()
    assert finals.alone(PROBLEM, [*decisions[:1], finals.XLA], H200, 5) == [1.0, 1.0]
    assert turns == ["taken", "left"] * (finals.PLACES + 1)
