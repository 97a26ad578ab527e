"""The fastest kernels once more, alone and in every order of tiles: on a clock that reads what it is told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jax_bwgemm.bench import candidates, finals, timing
from jax_bwgemm.bench.candidates import time_kernels
from jax_bwgemm.facts.arch import ARCHS, Arch
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

    again = finals.refined(found, H200, 7, clock)
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
    """In each of three places, of which the median counts: the first kernel was lucky in one."""
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
    assert finals.alone(PROBLEM, decisions[:3], H200, 5) == [30.0, 20.0, 40.0] and launched == [(2, 1)] * 3
    assert len(set(places)) == finals.PLACES and places == [place for place in places[::3] for _ in range(3)]
