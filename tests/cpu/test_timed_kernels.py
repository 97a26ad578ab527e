"""Programs that launch all kernels of a product, and what CUPTI tells of them: on times that are told."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_bwgemm.bench import candidates, timing
from jax_bwgemm.bench.candidates import burst, launch_order, operands, program, time_kernels
from jax_bwgemm.bench.cases import MAX_ROTATION
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import unit
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.decision import Decision, kernels
from jax_bwgemm.runtime.launch import request

H200 = ARCHS["h200"]
PROBLEM = Problem(1024, 512, 256)


def test_copies_leave_the_cache_behind() -> None:
    l2_bytes = 60 * 2**20
    assert candidates.num_copies(Problem(8192, 8192, 8192), l2_bytes) == 1
    assert candidates.num_copies(Problem(1024, 1024, 1024), l2_bytes) == 20  # 6 MiB each
    assert candidates.num_copies(Problem(64, 64, 64), l2_bytes) == MAX_ROTATION


@pytest.mark.parametrize("num_kernels", [1, 2, 9, 15, 23])
@pytest.mark.parametrize("copies", [1, 2, 10, 32])
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_every_kernel_is_launched_and_no_copy_comes_back_early(num_kernels: int, copies: int, in_a_row: int) -> None:
    launches = launch_order(num_kernels, copies, in_a_row)
    assert len(launches) % copies == 0, "the next call begins with the first copy"
    rows = [(kernel, len(list(row))) for kernel, row in itertools.groupby(launches)]
    assert [kernel for kernel, _ in rows] == list(range(num_kernels))
    assert all(length == in_a_row for _, length in rows[:-1]) and in_a_row <= rows[-1][1] < in_a_row + copies


@pytest.mark.parametrize(
    "least_us, kernels_and_rows",
    [
        (2.0, (23, 8)),
        (16.0, (7, 8)),
        (64.0, (1, 8)),
        (128.0, (1, 7)),
        (233.0, (1, 4)),
        (513.5, (1, 1)),
        (8217.0, (1, 1)),
    ],
)
def test_launches_in_a_row_and_kernels_at_a_stretch(least_us: float, kernels_and_rows: tuple[int, int]) -> None:
    """1024^3, 2048^3, 8192x8192x512, 4096^3, 5000^3, float8 8192^3 and 16384^3 on an H200: 7 * 8 * 16 us = 896 us."""
    assert burst(23, least_us, 1) == kernels_and_rows


def test_results_of_a_stretch_are_no_more_than_fit() -> None:
    """2 MiB each, 64, 512 and 2048."""
    sizes = (2**21, 2**26, 2**29, 2**31)
    assert [burst(100, 2.0, size) for size in sizes] == [(62, 8), (2, 8), (1, 2), (1, 1)]


def lowered(problem: Problem, copies: int) -> tuple[list[Decision], list[str]]:
    """The kernels, and the lines of the custom calls that launch them."""
    _, decisions = kernels(problem, H200)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(problem, copies))
    text = jax.jit(program(problem, decisions, copies, 2)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return decisions, [_resolved(line, text) for line in text.splitlines() if ffi.TARGET_NAME in line]


def _resolved(values: str, text: str) -> str:
    """Each value that a barrier of the program passes on is what it was before."""
    passed: dict[str, str] = {}
    for name, before in re.findall(r"(%\d+):\d+ = stablehlo.optimization_barrier ([^:]*) :", text):
        passed |= {f"{name}#{i}": passed.get(value, value) for i, value in enumerate(before.split(", "))}
    return re.sub(r"%\d+#\d+", lambda found: passed.get(found[0], found[0]), values)


def test_the_program_launches_each_kernel_as_planned(artifacts_dir: Path) -> None:
    decisions, lines = lowered(PROBLEM, 2)
    assert len(decisions) > 10 and len(lines) == 2 * len(decisions)
    for decision, line in zip(decisions, lines[::2], strict=True):
        assert decision.entry is not None and decision.plan is not None
        assert f'variant = "{decision.entry.name}"' in line
        assert f"raster_group = {decision.plan.raster_group} : i32" in line
        assert "has_side_effect = true" in line and "pdl = 0 : i32" in line
        types = "(tensor<1x1024x256xbf16>, tensor<1x256x512xbf16>) -> tensor<1x1024x512xbf16>"
        if unread := request(decision.plan, decision.entry).results[1:]:
            (size,) = unread[0].shape
            types = types.replace("-> tensor<1x1024x512xbf16>", f"-> (tensor<1x1024x512xbf16>, tensor<{size}xui8>)")
        assert line.endswith(types)
    arguments = [re.findall(r"%arg\d+", line) for line in lines]
    assert arguments[0] == ["%arg0", "%arg2"] and arguments[1] == ["%arg1", "%arg3"] and arguments[2] == arguments[0]


def test_launches_are_in_order_and_their_results_stay(artifacts_dir: Path) -> None:
    """What was dropped would be overwritten by the next launch, in the L2 cache."""
    _, decisions = kernels(PROBLEM, H200)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(PROBLEM, 3))
    traced = jax.jit(program(PROBLEM, decisions, 3, 2)).trace(*shapes)
    assert [x.shape for x in jax.tree.leaves(traced.out_info)] == [(1, 1024, 512)] * 3 * -(-2 * len(decisions) // 3)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    operand = {name: value for name, value in re.findall(rf"(%\d+).* @{ffi.TARGET_NAME}\(([^,]*),", text)}
    waits = [name for name in operand if "#" in operand[name]]
    assert len(waits) == len(operand) - 1 and len(operand) >= 2 * len(decisions)
    launches = list(operand)
    for i, name in enumerate(launches[1:], 1):
        (values,) = re.findall(rf"{operand[name].partition('#')[0]}:\d+ = stablehlo.optimization_barrier (.*) :", text)
        assert launches[i - 1] in [value.partition("#")[0] for value in _resolved(values, text).split(", ")]


def test_a_gated_kernel_gets_both_matrices_of_a_copy(layers_on_h200: None) -> None:
    decisions, lines = lowered(Problem(512, 512, 256, epilogue=unit("silu", is_gated=True)), 2)
    assert decisions and len(lines) == 2 * len(decisions)
    arguments = [re.findall(r"%arg\d+", line) for line in lines]  # a, a, gate, gate, up, up
    assert arguments[:2] == [["%arg0", "%arg2", "%arg4"], ["%arg1", "%arg3", "%arg5"]]


def test_operands_are_as_stored_and_padded() -> None:
    a, b, rest = operands(Problem(5, 7, 3, 2, a_major="m", b_major="k", a_batch=2), 3)
    forms = [[x.shape for x in copy] for copy in (*a, *b)]
    assert forms == [[(2, 3, 8), (2, 3, 5)]] * 3 + [[(1, 7, 8), (1, 7, 3)]] * 3
    assert rest == []
    values = [np.asarray(x, np.float32) for copy in (*a, *b) for x in copy]
    assert len({x.tobytes() for x in values}) == 12 and all(x.std() > 0.5 for x in values)
    epilogue = chain(1.0, True, "relu", True)
    _, _, rest = operands(Problem(5, 7, 3, 2, out_dtype="float32", a_batch=2, b_batch=2, epilogue=epilogue), 1)
    assert [(x.shape, str(x.dtype)) for x in rest] == [((7,), "float32"), ((2, 5, 7), "float32")]
    a, _, _ = operands(Problem(64, 64, 64, a_dtype="int8", b_dtype="uint8", out_dtype="int32"), 1)
    assert np.asarray(a[0][0]).min() < -100 and a[0][0].dtype == np.int8


def test_a_swapped_kernel_gets_b_first(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {"hopper": (Tile(128, 128),)}  # of which the fake catalogue has the m-major variants
    lists = narrow, narrow, narrow, *[{"hopper": ()}] * 4
    monkeypatch.setattr("jax_bwgemm.planner.candidates.candidates.__defaults__", lists)
    decisions, lines = lowered(Problem(16, 512, 250), 1)
    assert {d.plan.swapped for d in decisions if d.plan} == {False, True}
    for decision, line in zip(decisions, lines[::2], strict=True):
        assert decision.plan is not None
        types = ["tensor<1x16x256xbf16>", "tensor<1x250x512xbf16>"][:: -1 if decision.plan.swapped else 1]
        assert line.endswith(f"({', '.join(types)}) -> tensor<1x16x512xbf16>")


def fake_cupti(monkeypatch: pytest.MonkeyPatch, launches: list[tuple[str, float]]) -> None:
    """A profiler that has seen `launches` (milliseconds) in every call."""

    def measure(function: Any, aggregate: bool, iterations: int = 1) -> Any:
        assert not aggregate
        return lambda *args: (function, [launches] * iterations if iterations > 1 else launches)

    package, profiler = types.ModuleType("gpu"), types.ModuleType("profiler")
    vars(profiler)["measure"] = measure
    vars(package)["profiler"] = profiler
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", package)
    monkeypatch.setattr(ffi, "status", lambda: None)
    monkeypatch.setattr(ffi, "register", lambda directories: None)


@pytest.mark.parametrize("rounds", [1, 3])
def test_times_are_told_apart_by_symbol(rounds: int, artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, decisions = kernels(PROBLEM, H200)
    pair = [Decision(d.plan, d.entry and _renamed(d.entry, f"symbol_{i}")) for i, d in enumerate(decisions[:2])]
    first = [("symbol_0", 0.5), ("fill", 9.0), *[("symbol_0", us / 1000) for us in (10, 15, 17)]]
    then = [("symbol_1", 0.5), *[("symbol_1", us / 1000) for us in (40, 90, 30)]]
    fake_cupti(monkeypatch, first + then)
    monkeypatch.setattr(candidates, "num_copies", lambda problem, l2_bytes: 4)
    monkeypatch.setattr(candidates, "MAX_IN_A_ROW", 4)
    monkeypatch.setattr(candidates, "program", lambda *args: lambda *operands: 0)
    assert candidates.gpu_clock(PROBLEM, pair, H200, rounds) == pytest.approx([16.0, 60.0]), "a row's first half drops"
    fake_cupti(monkeypatch, first + then[1:])
    with pytest.raises(RuntimeError, match=f"CUPTI requires {4 * rounds} launches of symbol_1, got "):
        candidates.gpu_clock(PROBLEM, pair, H200, rounds)


def test_the_gpu_rests_behind_each_round_of_a_part(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of one kernel, so two parts: one round of both, two more of the fast one. One part needs no rest."""
    monkeypatch.setattr(candidates, "MAX_IN_A_ROW", 2)
    _, decisions = kernels(PROBLEM, H200)
    pair = [Decision(d.plan, d.entry and _renamed(d.entry, f"symbol_{i}")) for i, d in enumerate(decisions[:2])]
    fake_cupti(monkeypatch, [("symbol_0", 0.02), ("symbol_0", 0.01), ("symbol_1", 0.04), ("symbol_1", 0.03)])
    rested: list[float] = []
    monkeypatch.setattr(timing, "rest", rested.append)
    monkeypatch.setattr(candidates, "num_copies", lambda problem, l2_bytes: 1)
    monkeypatch.setattr(candidates, "program", lambda *args: lambda *operands: 0)
    assert candidates.gpu_clock(PROBLEM, pair, H200, 2) == pytest.approx([10.0, 30.0]) and not rested
    monkeypatch.setattr(candidates, "BURST_US", 3 * roofline_us(PROBLEM, H200))
    assert candidates.gpu_clock(PROBLEM, pair, H200, 2) == pytest.approx([10.0, 30.0])
    assert rested == pytest.approx([100.0] * 4)


def _renamed(entry: Any, symbol: str) -> Any:
    return dataclasses.replace(entry, entry=symbol)


def test_without_cupti_or_library_it_is_one_sentence(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "status", lambda: "no library")
    with pytest.raises(ValueError, match="requires the library that launches them: no library"):
        time_kernels(PROBLEM, H200, 3)
    monkeypatch.setattr(ffi, "status", lambda: None)
    monkeypatch.setattr(ffi, "register", lambda directories: None)
    monkeypatch.setattr(candidates, "program", lambda *args: lambda *operands: 0)
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", None)
    with pytest.raises(ValueError, match="timing single kernels requires CUPTI"):
        time_kernels(PROBLEM, H200, 3)
