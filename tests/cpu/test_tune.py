"""Tables made of the times of all kernels of a product, and the cost model's regret: on a clock that reads what it is
told to. No time is judged."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_bwgemm.bench import candidates, finals, kernel_times, pool, regret, tune
from jax_bwgemm.bench.candidates import Timed, time_kernels
from jax_bwgemm.bench.cases import LAYERS
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import FEW
from jax_bwgemm.planner import measured, parts
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.runtime.decision import Decision, measurements

H200 = ARCHS["h200"]
PROBLEM = Problem(1024, 512, 256)


def countdown(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
    """The cost model's order is the wrong way round: the k-th kernel takes 100 - k."""
    return [100.0 - i for i in range(len(decisions))]


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
