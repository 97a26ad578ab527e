"""`bench --spare`: which kernels measured products would hardly miss; and what they miss of all that was ever timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
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
from jax_bwgemm.kernels.aot.catalog import catalogue

RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
ROOT = Path(__file__).parents[2]
WORDS = ("none", "one", "two", "three", "four", "five", "six")
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


def test_what_the_tiles_gain_that_few_ctas_load_for_all() -> None:
    """With those that came beside them: of random products, that of docs/hopper.md."""
    tiles = {
        "knn": "64x192 4x1_streamk, 128x224 4x1",
        "kkn": "64x192 4x1_streamk, 64x112 4x1_pingpong",
        "mnn": "64x192 4x1_streamk",
        "mkm": "64x80 4x1_pingpong, 64x80 4x2_pingpong, 64x160 4x2_pingpong, 128x80 4x1_pingpong, "
        "128x112 4x1_pingpong, 128x224 2x1",
        "kkm": "64x80 4x2_pingpong, 64x112 4x1_streamk, 128x80 4x1_pingpong, 128x112 4x1_pingpong, "
        "128x128 4x1_pingpong, 128x224 2x1",
        "mnm": "128x224 2x1",
    }
    names = _names(tiles)
    arch, products = load(RESULTS / "h200_shared.json")
    gains = []
    for product in products:
        times_us = spare.by_variant(spare.of_what_ships(product, arch.target), arch.target)
        others, own = ([us for v, us in times_us.items() if (v.name in names) == is_new] for is_new in (False, True))
        gains += [min(others) / min(own) - 1] if others and own and min(own) < min(others) else []
    said = f"of the {len(products)} random ones of `bench/results/regret/h200_shared.json` {WORDS[len(gains)]} gain, "
    said += f"{100 * min(gains):.0f} to {100 * max(gains):.0f} %"
    assert said in " ".join((ROOT / "docs" / "hopper.md").read_text().split()), said


def test_what_the_tiles_gain_that_were_tried_for_random_products() -> None:
    """What shipped before and what ships since, to the fastest of all that were timed: those of docs/hopper.md."""
    tiles = {
        "knn": "64x16 1x2_streamk, 64x16 2x1_streamk",
        "kkn": "128x160 4x2_pingpong, 64x96 1x4_pingpong, 64x144 4x1_pingpong, 64x48 1x1_pingpong, "
        "64x32 1x2_pingpong, 64x16 4x1_streamk",
        "mnn": "128x160 4x2, 64x32 1x4_pingpong, 64x16 1x2_streamk, 64x16 4x1_pingpong",
        "mkm": "64x16 1x1_pingpong, 64x16 1x2_streamk, 64x16 4x1_streamk, 64x32 1x2_streamk, 64x64 4x1_pingpong, "
        "64x256 1x1, 128x80 2x4_pingpong, 128x112 4x2_pingpong",
        "kkm": "64x16 1x1_pingpong, 64x16 1x2_streamk, 64x112 4x1_pingpong, 64x144 2x4_pingpong, "
        "128x80 4x2_pingpong, 128x240 4x1, 256x160 1x2",
        "mnm": "64x16 1x2_streamk, 64x16 2x2_streamk, 128x16 4x1_streamk, 64x192 4x1_streamk, "
        "64x192 2x4_pingpong, 192x192 1x1",
    }
    names = _names(tiles)
    lost: dict[str, list[float]] = {"before": [], "since": []}
    for name in ("h200_trial", "h200_trial_again", "h200_trial_held_out"):
        arch, products = load(RESULTS / f"{name}.json")
        for product in products:
            least_us = min(product.times_us.values())
            ships = spare.by_variant(spare.of_what_ships(product, arch.target), arch.target)
            lost["since"].append(min(ships.values()) / least_us - 1)
            lost["before"].append(min(us for own, us in ships.items() if own.name not in names) / least_us - 1)
    means = {when: 100 * statistics.fmean(losses) for when, losses in lost.items()}
    large = {when: 1000 * statistics.fmean(loss > 0.04 for loss in losses) for when, losses in lost.items()}
    page = " ".join((ROOT / "docs" / "hopper.md").read_text().split())
    said = f"was {means['before']:.1f} % behind the fastest of all, over 4 % for {large['before']:.0f} in a thousand"
    assert said in page, said
    said = f"{len(names)} of them ship since, and {means['since']:.1f} % is left, over 4 % for {large['since']:.0f} in"
    assert said in page, said


def _names(tiles: Mapping[str, str]) -> set[str]:
    """Of plain bfloat16 kernels that ship, given by majors: size, cluster and ways."""
    names = {
        f"sm_90a_bf16_bf16_bf16_{majors}_{size}x64_cta1_cluster{ways}_identity"
        for majors, text in tiles.items()
        for size, ways in (tile.split() for tile in text.split(", "))
    }
    assert names <= {variant.name for variant in catalogue(["sm_90a"])}
    return names
