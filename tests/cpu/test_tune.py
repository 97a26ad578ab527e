"""Timing all kernels of a product, tables made of it, and the cost model's regret: on a clock that reads what it is
told to. No time is judged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_bwgemm.bench import candidates, finals, kernel_times, pool, regret, timing, tune
from jax_bwgemm.bench.candidates import Timed, burst, launch_order, operands, program, time_kernels
from jax_bwgemm.bench.cases import LAYERS, MAX_ROTATION
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import FEW, Tile
from jax_bwgemm.facts.units import unit
from jax_bwgemm.planner import measured, parts
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.decision import Decision, kernels, measurements
from jax_bwgemm.runtime.launch import request

H200 = ARCHS["h200"]
PROBLEM = Problem(1024, 512, 256)


def countdown(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
    """The cost model's order is the wrong way round: the k-th kernel takes 100 - k."""
    return [100.0 - i for i in range(len(decisions))]


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
    assert burst(23, least_us) == kernels_and_rows


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


def timed(problem: Problem = PROBLEM) -> Timed:
    found = time_kernels(problem, H200, 3, countdown)
    assert found is not None
    return found


def test_a_record_is_what_was_timed(artifacts_dir: Path) -> None:
    found = timed()
    assert found.fastest == len(found.decisions) - 1
    choice = found.decisions[found.modelled_idx].plan
    assert choice is not None and choice.tile == found.modelled.tile
    best_us = 101.0 - len(found.decisions)
    assert found.regret == pytest.approx((100.0 - found.modelled_idx) / best_us - 1)
    record = found.record
    assert record.problem == measured.key(PROBLEM)
    assert [time.us for time in record.times] == sorted(found.times_us)
    assert record.times[0].tile == found.name(found.fastest)


def test_without_a_kernel_nothing_is_timed(no_artifacts: Path) -> None:
    assert time_kernels(PROBLEM, H200, 3, countdown) is None


def test_tuning_writes_what_the_planner_follows(
    artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path))
    path, none = measured.user_path("h200"), Problem(64, 64, 64, a_dtype="float32", b_dtype="float32")
    seen: list[tuple[int, int]] = []
    found = tune.tune([PROBLEM, none], H200, 3, path, {"name": "x"}, lambda *done: seen.append(done), countdown)
    assert [each.problem for each in found] == [PROBLEM] and seen == [(1, 2), (2, 2)]
    saved = measurements(PROBLEM, H200)
    assert saved is not None and saved.times[0].tile == found[0].name(found[0].fastest)
    assert measured.load(path).machine == {"name": "x"}
    assert found[0].regret > 0 and tune.line(found[0])[0] == measured.key(PROBLEM)


def by_process(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
    """All kernels take 100, and in the finals 100 and the process's number."""
    is_final = finals.XLA in decisions
    return [float(100 + os.getpid()) if is_final and own != finals.XLA else 100.0 for own in decisions]


def test_finals_are_run_by_several_processes(
    artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each product by RUNS different ones, of whose times the table has the means; one without a kernel is asked
    for once."""
    none = Problem(64, 64, 64, a_dtype="float32", b_dtype="float32")
    problems = [PROBLEM, none, Problem(2048, 512, 256)]
    kept: list[finals.Finals] = []
    run = pool.each

    def each(function: Any, asked: Sequence[Any], num_processes: int) -> Any:
        kept[:] = [x for x in asked if isinstance(x, finals.Finals)]
        for i, own in run(function, asked, num_processes):
            kept.extend([own] if own else [])
            yield i, own

    monkeypatch.setattr(pool, "each", each)
    seen: list[tuple[int, int]] = []
    path = tmp_path / "table.json"
    found = tune.tune(problems, H200, 3, path, {}, lambda *done: seen.append(done), by_process, num_processes=2)
    assert [x.problem for x in found] == [problems[0], problems[2]]
    assert sorted(seen)[-1] == (9, 9) and len(seen) == 3 + 2 + 2
    for timed, whole in zip(found, sorted(kept[2:], key=lambda x: x.timed.problem.m), strict=True):
        assert len(whole.runs_us) == tune.RUNS and whole.refined == timed
        firsts = [us[0] for us in whole.runs_us]
        assert len(set(firsts)) == tune.RUNS
        assert min(timed.times_us) == pytest.approx(sum(firsts) / tune.RUNS) and timed.xla_us == 100.0
    saved = measured.load(path).records[measured.key(PROBLEM)].times  # by nanoseconds
    assert [x.us for x in saved] == pytest.approx(sorted(found[0].times_us), abs=1e-3)


def test_what_is_predicted_to_take_long_is_not_timed(
    artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a product's kernels, by the times that are predicted of them."""

    def tuned(slowest: float) -> set[float]:
        monkeypatch.setattr(tune, "SLOWEST", slowest)
        (found,) = tune.tune([PROBLEM], H200, 3, tmp_path / f"{slowest}.json", {}, clock=countdown)
        return {c.cost.us for d in found.decisions if d.plan for c in d.plan.candidates if c.cost}

    everything = tuned(math.inf)
    limit = 1.001 * sorted(everything)[1] / min(everything)
    assert len(everything) > 2 and tuned(limit) == {us for us in everything if us <= limit * min(everything)}


def test_an_end_of_any_kind_keeps_what_was_timed(artifacts_dir: Path, tmp_path: Path) -> None:
    """It is in the file before the next product is timed: a signal may leave no time to write."""
    path = tmp_path / "h200.json"

    def interrupted(problem: Problem, *rest: Any) -> list[float]:
        if problem != PROBLEM:
            assert list(measured.load(path).records) == [measured.key(PROBLEM)]
            raise KeyboardInterrupt
        return countdown(problem, *rest)

    with pytest.raises(KeyboardInterrupt):
        tune.tune([PROBLEM, Problem(64, 64, 64)], H200, 3, path, {}, clock=interrupted)
    assert list(measured.load(path).records) == [measured.key(PROBLEM)]


def test_random_products_are_what_was_said() -> None:
    problems = regret.sample(400, 1, H200)
    assert problems == regret.sample(400, 1, H200) != regret.sample(400, 2, H200)
    assert problems[:10] == regret.sample(10, 1, H200)
    for problem in problems:
        assert roofline_us(problem, H200) <= regret.MAX_ROOFLINE_US
        assert all(1 <= size <= regret.LARGEST for size in (problem.m, problem.n, problem.k))
    few = sum(problem.m <= FEW for problem in problems)
    odd = sum(problem.n % 8 != 0 or problem.k % 8 != 0 for problem in problems)
    assert few > 0.25 * len(problems) and 0.15 * len(problems) < odd < 0.35 * len(problems)
    assert {(problem.a_major, problem.b_major) for problem in problems} == set(regret.FORMS)
    assert {(problem.a_dtype, problem.out_dtype) for problem in problems} == {kind[:2] for kind in regret.DTYPES}
    large = [np.log2(problem.n) for problem in problems]
    assert 5 < np.median(large) < 9  # log-uniform: the median of 2^0 to 2^14


def test_products_of_layers_are_what_was_said() -> None:
    problems = regret.sample_of_layers(300, 1, H200)
    assert len(set(problems)) == 300 and problems[:10] == regret.sample_of_layers(10, 1, H200)
    assert problems != regret.sample_of_layers(300, 2, H200)
    layers = {frozenset(layer) for layer in LAYERS}
    for problem in problems:
        assert roofline_us(problem, H200) <= regret.MAX_LAYER_US and measured.shipped("h200", problem) is None
        m, n, k = problem.m, problem.n, problem.k
        of_weights, rows = ((m, n), k) if problem.a_major == "m" else ((n, k), m)
        assert rows in regret.ROWS and (frozenset(of_weights) in layers or m == n == k)
    assert {(problem.a_major, problem.b_major) for problem in problems} == set(regret.FORMS)


def test_a_sample_of_many_rows() -> None:
    problems = regret.sample_of_tall(60, 1, H200)
    assert problems[:10] == regret.sample_of_tall(10, 1, H200) and problems != regret.sample_of_tall(60, 2, H200)
    assert all(4096 <= x.m <= 16384 and x.k >= 128 and roofline_us(x, H200) <= regret.MAX_TALL_US for x in problems)
    assert 10 < sum(x.n < 256 for x in problems) < 50 and 30 < sum(x.m % 8 == 0 for x in problems) < 60


def test_products_of_parts_are_some_that_are_looked_at() -> None:
    problems = regret.sample_of_parts(60, 1, H200)
    assert problems[:10] == regret.sample_of_parts(10, 1, H200) and problems != regret.sample_of_parts(60, 2, H200)
    for problem in problems:
        asked = dataclasses.replace(parts.whole(problem), out_dtype="bfloat16")
        assert problem.batch in parts.counts(asked, H200, regret.MAX_ROOFLINE_US)
        assert problem == parts.divided(asked, problem.batch)
    assert {(problem.a_major, problem.b_major) for problem in problems} == set(regret.FORMS)
    assert 0 < sum(problem.whole_k % 8 != 0 for problem in problems) < 30


def test_what_is_expected_to_be_slow_is_not_timed(artifacts_dir: Path) -> None:
    problem = Problem(4096, 4096, 4096)
    every, some = time_kernels(problem, H200, 3, countdown), time_kernels(problem, H200, 3, countdown, 1.5)
    assert every is not None and some is not None and some.modelled == every.modelled
    expected = [decision.plan.candidates[0].cost.us for decision in every.decisions]
    assert [found.plan.candidates[0].cost.us for found in some.decisions] == [
        us for us in expected if us <= 1.5 * min(expected)
    ]
    assert 1 < len(some.decisions) < len(every.decisions)


def test_statistics_of_regrets() -> None:
    found = regret.statistics([0.0] * 9 + [1.0])
    assert found == pytest.approx({"mean": 0.1, "median": 0.0, "90th percentile": 0.1, "max": 1.0})


def test_the_whole_pass_on_a_fake_clock(artifacts_dir: Path, tmp_path: Path) -> None:
    none = Problem(64, 64, 64, a_dtype="float32", b_dtype="float32")
    kept: list[int] = []
    problems = [PROBLEM, none, Problem(4096, 4096, 4096)]
    found = regret.measure(problems, H200, 3, clock=countdown, keep=lambda timed: kept.append(len(timed)))
    assert kept == [1, 2]  # a run that is cut off loses no time that it has
    assert [each.problem for each in found] == [PROBLEM, Problem(4096, 4096, 4096)]
    text = regret.text(found, 3)
    assert f"max {100 * max(each.regret for each in found):.1f} %" in text
    assert "fastest itself in 0 of 2 products (1 without a kernel)" in text
    assert f"{100 * regret.lost(found):.1f} % of their time" in text
    kernel_times.save(map(regret.saved, found), tmp_path / "new" / "out.json", {"arch": "h200", "seed": 0})
    facts, (first, _) = kernel_times.load(tmp_path / "new" / "out.json")
    assert facts == {"arch": "h200", "seed": 0} and first.problem == PROBLEM
    for i, ((tile, is_swapped), us) in enumerate(first.times_us.items()):
        made = found[0].decisions[i].plan
        assert made is not None and (made.tile, made.swapped) == (tile, is_swapped) and us == 100.0 - i
    assert first.modelled is not None
    assert list(first.times_us)[first.modelled] == (found[0].modelled.tile, found[0].modelled.swapped)


@pytest.mark.parametrize("what", [["--tune"], ["--regret", "3"]])
def test_a_machine_without_a_gpu_is_one_sentence(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *what]) == 2
    assert f"`bench {what[0]}` requires a Hopper or Blackwell GPU, got none" in capsys.readouterr().err


def test_commands_with_a_fake_clock(
    artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(candidates, "gpu_clock", countdown)
    monkeypatch.setattr(finals, "alone", countdown)
    for room in (tune, regret):
        monkeypatch.setattr(room, "gpu_arch", lambda who: H200)
    table, out = tmp_path / "table.json", tmp_path / "out.json"
    assert main(["bench", "--tune", "--shapes", "1024x512x256", "--table", str(table)]) == 0
    (record,) = measured.load(table).records.values()
    assert record.problem == measured.key(PROBLEM)
    assert main(["bench", "--regret", "4", "--seed", "3", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())["products"]) == 4
    said = capsys.readouterr().out
    tuned = next(line for line in said.splitlines() if line.startswith(record.problem))
    assert f"  {record.times[0].tile}  {record.times[0].us:.1f}  " in tuned
    assert record.xla_us is not None and tuned.endswith(f" %  {record.xla_us:.1f}")
    assert f"wrote {table}" in said and f"wrote {out}" in said and "where the planner loses most" in said
    assert main(["bench", "--regret", "0"]) == main(["bench", "--tune", "--rounds", "0"]) == 2
    assert "`--rounds` requires at least 1, got 0" in capsys.readouterr().err


def test_commands_without_kernels_say_why(
    no_artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in (tune, regret):
        monkeypatch.setattr(room, "gpu_arch", lambda who: H200)
    assert main(["bench", "--tune", "--shapes", "64x64x64"]) == 1
    assert f"identity: no cubins: {no_artifacts}" in capsys.readouterr().out
    assert main(["bench", "--regret", "2"]) == 2
    assert f"requires kernels, got none: no cubins: {no_artifacts}" in capsys.readouterr().err
