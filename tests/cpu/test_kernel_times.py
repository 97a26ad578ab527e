"""Files of measured kernel times: what a launch takes that writes a memory of its own, and which products are drawn."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import jax_bwgemm.bench
from jax_bwgemm.bench import fit, kernel_times, regret
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.problem import Problem

RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
H200 = by_name("h200")


def test_what_a_memory_of_its_own_takes() -> None:
    """The same products and kernels timed both ways: by size, the medians of what the one way takes longer."""
    (facts, shared), (own_facts, own) = (
        kernel_times.load(RESULTS / name) for name in ("h200_third.json", "h200_own_results.json")
    )
    assert "results" not in facts and own_facts["results"] == kernel_times.OWN
    before, pairs = {x.problem: x.times_us for x in shared}, list[tuple[float, float, float]]()
    for product in own:
        times_us = before[product.problem]
        near = [kernel for kernel in product.times_us if times_us[kernel] < 1.5 * min(times_us.values())]
        took = statistics.median(product.times_us[kernel] - times_us[kernel] for kernel in near)
        said = kernel_times.with_own_results(Measured(product.problem, times_us)).times_us
        pairs.append((1e-6 * kernel_times.result_bytes(product.problem), took, said[near[0]] - times_us[near[0]]))
    assert len(pairs) == 114
    for least, most, within_us in ((0, 0.1, 0.03), (0.1, 0.4, 0.03), (0.4, 1.2, 0.03), (1.2, 4, 0.05)):
        some = [pair for pair in pairs if least <= pair[0] < most]
        took, said = (statistics.median(pair[i] for pair in some) for i in (1, 2))
        assert len(some) >= 5 and took == pytest.approx(said, abs=within_us), (least, most, took, said)


def test_times_are_loaded_as_if_each_launch_had_had_its_own(tmp_path: Path) -> None:
    problem = Problem(1000, 500, 64)  # a result of 1 MB
    (tile,) = list(kernel_times.load(RESULTS / "h200_cases.json")[1][0].times_us)[:1]
    for name, facts in (("shared", {}), ("own", {"results": kernel_times.OWN})):
        kernel_times.save([Measured(problem, {tile: 2.0})], tmp_path / name, {"arch": "h200"} | facts)
    (shared,), (own,) = (fit.load(tmp_path / name)[1] for name in ("shared", "own"))
    assert shared.times_us == {tile: pytest.approx(2.0 + kernel_times.OWN_US)} and own.times_us == {tile: 2.0}
    large = kernel_times.with_own_results(Measured(Problem(10000, 10000, 64), {tile: 100.0}))
    assert large.times_us == {tile: 100.0 + kernel_times.MOST_OWN_US}


@pytest.mark.parametrize(
    "name, num", [("h200_cases.json", 380), ("h200_cases_again.json", 400), ("h200_cases_held_out.json", 480)]
)
def test_files_have_the_cases_of_their_seeds(name: str, num: int) -> None:
    """As `bench --random` draws them; the run of the last one was cut off."""
    facts, products = kernel_times.load(RESULTS / name)
    drawn = regret.sample_of_cases(num, facts["seed"], H200)
    asked = [product.problem for product in products]
    assert len(drawn) == num and len(asked) >= 100 and [x for x in drawn if x in set(asked)] == asked
