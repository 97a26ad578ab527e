"""`bench --spare`: which kernels measured products would hardly miss; and what they miss of all that was ever timed."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

import jax_bwgemm.bench
from jax_bwgemm.bench import spare
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant

RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
ROOT = Path(__file__).parents[2]
A, B, C = (Variant("sm_90a", *("bfloat16",) * 3, "k", "n", Tile(64, n)) for n in (64, 128, 256))


def test_what_is_worth_least_goes_first() -> None:
    """`B` is worth 5 % of one product, `C` 10 % of another; without both, the products need `A`, which stays."""
    products = [{A: 1.0, B: 2.0, C: 2.0}, {A: 1.05, B: 1.0, C: 1.1}, {A: 1.1, B: 1.2, C: 1.0}]
    found = list(spare.spared(products))
    assert [own for own, *_ in found] == [B, C] and [num for _, num, _ in found] == [3, 3]
    assert [loss for *_, loss in found] == pytest.approx([1.05 ** (1 / 3) - 1, (1.05 * 1.1) ** (1 / 3) - 1])


def test_what_the_others_make_do_with_is_worth_more() -> None:
    """B and C are level: one of them may go for nothing, and the other is worth 20 % then."""
    found = list(spare.spared([{A: 1.2, B: 1.0, C: 1.0}, {A: 1.0}]))
    assert [own for own, *_ in found] == [B, C]
    assert [loss for *_, loss in found] == pytest.approx([0.0, 1.2**0.5 - 1])


def test_one_product_does_not_keep_a_kernel_and_a_product_keeps_its_last() -> None:
    found = list(spare.spared([{A: 1.0, B: 100.0}, {B: 1.0}]))
    assert [own for own, *_ in found] == [A] and found[0][2] == pytest.approx(math.exp(spare.MOST / 2) - 1)


def test_what_few_have_timed_counts_as_if_all_had() -> None:
    """`C` spares 2 % of the one product that timed it, and `B` 3 % of two of four."""
    products = [{A: 1.03, B: 1.0}, {A: 1.0, B: 1.0}, {A: 1.0, B: 1.1}, {A: 1.02, B: 2.0, C: 1.0}]
    assert [own for own, *_ in spare.spared(products)][0] == B


def test_only_what_ships_counts() -> None:
    """A tile of the transposed product is the variant of that."""
    problem = Problem(64, 4096, 4096)
    times_us = {(Tile(64, 16, stream_k=True), True): 1.0, (Tile(64, 16, stream_k=True), False): 2.0}
    found = spare.of_what_ships(Measured(problem, times_us | {(Tile(64, 24), False): 0.5}), "sm_90a")
    assert found.times_us == times_us
    assert {(own.c_major, us) for own, us in spare.by_variant(found, "sm_90a").items()} == {("m", 1.0), ("n", 2.0)}


@pytest.mark.parametrize("name", ["h100_held_out", "h100_wide_held_out", "h200_held_out"])
def test_the_catalogue_has_what_measured_products_want(name: str) -> None:
    """Of products that the calibration has not seen: to the best of all kernels that were ever timed for them."""
    arch, products = load(RESULTS / f"{name}.json")
    lost = [
        min(spare.of_what_ships(product, arch.target).times_us.values()) / min(product.times_us.values()) - 1
        for product in products
    ]
    assert statistics.fmean(lost) < 0.003 and max(lost) < 0.07


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--spare", str(RESULTS / "h100_wide_held_out.json")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("201 products, ") and "kernels of sm_90a that ship" in head
    assert len(lines) > 100 and all(" % sm_90a_" in line and line.endswith(" have timed") for line in lines)


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "--spare", str(tmp_path / "other.json")]) != 0
    assert "requires a file that `--regret --json` wrote" in capsys.readouterr().err
