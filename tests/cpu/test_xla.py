"""What XLA is expected to take for a product, against what it took."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from jax_bwgemm.bench import calibrate_xla, report
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.machine import RESULTS
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import sooner, xla
from jax_bwgemm.runtime.attempts import ladder
from jax_bwgemm.runtime.rungs import Asked

H200, H100 = by_name("h200"), by_name("h100")
ROOT = Path(__file__).parent.parent.parent
HELD_OUT = ("h100-515151.json", "short and uneven ones"), ("h100-939393-held-out.json", "others")
# By how much half and nine tenths of the products are off the formula at most, and a tenth or a fifth more.
EXPECTED = {
    "even": (0.12, 0.40),
    "torn": (0.14, 0.43),
    "longer": (0.22, 0.55),
    "short": (0.18, 0.50),
    "uneven": (0.21, 0.65),
    "thin": (0.15, 0.60),
    "vector": (0.19, 0.45),
    "rows": (0.08, 0.13),
    "columns": (0.5, 1.1),
}


@pytest.mark.parametrize(
    ("problem", "arch", "us"),
    [
        (Problem(8, 2352, 64), H200, 1.47),
        (Problem(3936, 2880, 96), H100, 14.7),
        (Problem(1808, 5264, 16, b_major="k"), H100, 10.39),
        (Problem(405, 231, 45, a_major="m"), H200, 1.84),
        (Problem(14809, 36, 58, b_major="k"), H100, 3.43),
        (Problem(366, 50, 851, b_major="k"), H100, 7.24),
        (Problem(7, 6207, 216), H100, 4.64),
        (Problem(4, 902, 590, a_major="m"), H100, 4.24),
        (Problem(5175, 2, 683, a_major="m"), H100, 9.02),
        (Problem(1123, 1, 1688), H100, 3.48),
        (Problem(1, 4948, 2253, a_major="m"), H200, 13.99),
        (Problem(1, 57, 15101, a_major="m"), H200, 4.02),
        (Problem(1572, 1, 4253, a_major="m"), H100, 11.17),
    ],
    ids=str,
)
def test_predictions_are_near_what_it_took(problem, arch, us):
    """Device time of XLA's default choice (results/random, results/regret)."""
    predicted = xla.xla_us(problem, arch) - arch.constants.launch_us
    assert us / 1.5 < xla.formula_us(problem, arch) < 1.5 * us
    assert us / 1.2 < predicted < 1.2 * us


def test_what_the_formula_expects_of_random_products():
    """Against what XLA's default choice took of all that it was fitted to and the held out, where it tells something
    without trees."""
    logs = collections.defaultdict(list)
    for path in sorted(path for name in ("random", "xla", "vectors") for path in (RESULTS / name).glob("*.json")):
        for product in calibrate_xla.load(path)[1]:
            logs[product.kind].append(product.log)
    assert {name for name, kind in xla.KINDS.items() if kind.alone} == EXPECTED.keys()
    assert sum(len(logs[name]) for name in EXPECTED) > 3700
    for name, bounds in EXPECTED.items():
        half, nine_tenths = calibrate_xla.off_by(logs[name])
        assert half < bounds[0] and nine_tenths < bounds[1], (name, len(logs[name]), half, nine_tenths)


@pytest.mark.parametrize(("name", "what"), HELD_OUT)
def test_trees_halve_what_is_off_of_products_that_they_were_not_fitted_to(name, what):
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    fitted = json.loads((xla.SHIPPED / "hopper_xla.json").read_text())["products"]
    arch, products = calibrate_xla.load(RESULTS / "xla" / name)
    assert name not in fitted and sum(fitted.values()) > 5500
    logs = [product.log for product in products]
    left = logs - xla._shipped(arch.family.name).sums(np.array([product.row for product in products]))
    alone, found = calibrate_xla.off_by(logs), calibrate_xla.off_by(left)
    assert found[0] < 0.5 * alone[0] and found[1] < 0.65 * alone[1]
    said = [f"half within {100 * half:.0f} %, nine tenths within {100 * most:.0f} %" for half, most in (alone, found)]
    said = f"{len(products)} {what} (`{name}`) by the formula {said[0]}, with the trees {said[1]}"
    assert said in page, said


def test_hand_derived_time():
    """24 x 12 of XLA's tiles are 2.18 waves on 132 SMs; (1536 * 768 + 1536 * 64 + 64 * 768) * 2 bytes, which are what
    takes longest."""
    problem = Problem(1536, 768, 64)
    moved_us = 2 * (1536 * 768 + 1536 * 64 + 64 * 768) / (H200.memory_tb_per_s * 1e6)
    formula_us = 1.4 + 64 * 0.0106 * (288 / 132) ** 0.63 + 1.27 * moved_us
    assert xla.formula_us(problem, H200) == pytest.approx(formula_us)
    (log,) = xla._shipped("hopper").sums(xla.row(problem, H200)[None])
    assert xla.xla_us(problem, H200) == pytest.approx(H200.constants.launch_us + formula_us * math.exp(log))


def test_features_by_hand():
    """Rows of a and b are 108 bytes apart, so that four begin alike; those of c 48; 54 terms end two alike."""
    found = xla.features(Problem(6, 24, 54, b_major="k"), H100)
    assert xla.names() == tuple(found)
    assert {name: round(x, 3) for name, x in found.items() if "formula" not in name and "device" not in name} == {
        "kind": 3, "m_log": 1.792, "n_log": 3.178, "k_log": 3.989, "result_log": 4.970, "least_log": 1.792,
        "most_log": 3.178, "tiles_log": 0.0, "a_is_k_major": 1, "b_is_k_major": 1, "a_row_step": 4, "b_row_step": 4,
        "c_row_step": 16, "k_step": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "is_known"),
    [
        ((256, 256, 128), True),
        ((256, 256, 136), False),  # XLA multiplies as we do
        ((256, 256, 129), True),
        ((255, 256, 999), True),
        ((255, 256, 1001), False),  # and pads as we do
        ((255, 5, 3199), True),
        ((5, 255, 3201), False),
        ((256, 8, 3200), False),
    ],
)
def test_what_is_known_without_trees(sizes, is_known):
    """As of other families; with them, of all sizes."""
    problem, b200 = Problem(*sizes), by_name("b200")
    formula_us = b200.constants.launch_us + xla.formula_us(problem, b200)
    assert xla.xla_us(problem, b200) == (formula_us if is_known else None)
    assert xla.xla_us(problem, H200) is not None


@pytest.mark.parametrize("change", [{"a_dtype": "float32", "b_dtype": "float32"}, {"out_dtype": "float32"},
                                    {"batch": 2, "a_batch": 2, "b_batch": 2}, {"epilogue": chain(2.0)},
                                    {"symmetric": True, "b_major": "k"}])  # fmt: skip
def test_only_what_was_measured_is_corrected(change):
    """Others have the formula."""
    problem = dataclasses.replace(Problem(256, 256, 64), **change)
    assert xla.xla_us(problem, H200) == H200.constants.launch_us + xla.formula_us(problem, H200)
    assert xla.xla_us(dataclasses.replace(problem, k=640), H200) is None


@pytest.mark.parametrize("change", ["format", "features", "trees", "text", "formula"])
def test_a_damaged_file_is_a_warning_and_the_formula_alone(change, tmp_path, monkeypatch):
    fields = json.loads((xla.SHIPPED / "hopper_xla.json").read_text())
    (tmp_path / "hopper_xla.json").write_text(json.dumps(fields | {change: 7}) if change in fields else "{")
    monkeypatch.setattr(xla, "SHIPPED", tmp_path)
    xla._shipped.cache_clear()
    problem = Problem(256, 256, 64)
    try:
        with pytest.warns(UserWarning, match="by its formula alone: times of XLA's require what `bench --calibrate-xl"):
            us = xla.xla_us(problem, H200)
        assert us == H200.constants.launch_us + xla.formula_us(problem, H200)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert xla.xla_us(problem, H200) == us  # said once
    finally:
        monkeypatch.undo()
        xla._shipped.cache_clear()


def test_other_constants_have_no_trees(monkeypatch):
    monkeypatch.setitem(xla.KINDS, "even", dataclasses.replace(xla.KINDS["even"], start_us=1.5))
    with pytest.raises(ValueError, match="another formula"):
        xla.load(xla.SHIPPED / "hopper_xla.json")


def test_the_command(tmp_path, monkeypatch, capsys):
    """On few products with few trees: what it writes is read, and says what it was fitted to."""
    monkeypatch.setattr(calibrate_xla, "NUM_TREES", 20)
    path, out = RESULTS / "random" / "h200-1123.json", tmp_path / "out.json"
    assert main(["bench", "--calibrate-xla", str(path), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "the formula alone:\n  all: half of 40" in said and "trees of others:\n  all: half of 40" in said
    assert xla.load(out).asked.shape[0] == 20
    assert json.loads(out.read_text())["products"] == {"h200-1123.json": 40}
    assert json.loads(out.read_text())["formula"] == xla.formula()


def test_what_is_not_for_the_fit(tmp_path):
    """Of a result, products that are not plain and of 2 bytes do not count; too few, or devices of two families, are
    refused."""
    for other in ("2*64x64x64", "64x64x64:bias", "64x64x64:f32"):
        assert not xla.is_covered(Case.from_str(other).fused)
    assert xla.is_covered(Case.from_str("64x64x640:f16").fused)
    result = report.load(RESULTS / "random" / "h200-1123.json")
    few, other = tmp_path / "few.json", tmp_path / "other.json"
    report.save(dataclasses.replace(result, rows=result.rows[:3]), few)
    report.save(dataclasses.replace(result, arch="b200"), other)
    with pytest.raises(ValueError, match="requires at least 10 products, got"):
        calibrate_xla.main([few], tmp_path / "out.json", 0)
    with pytest.raises(ValueError, match="requires devices of one family, got hopper and blackwell"):
        calibrate_xla.main([few, other], tmp_path / "out.json", 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "page"), [("h100-20261127.json", "results.md"), ("h100-layers.json", "architecture.md")]
)
def test_what_would_be_left_to_it_by_trees_of_others(name, page, monkeypatch):
    """Of two files that the trees were fitted to: of products other than short and uneven ones, which ours computed."""
    monkeypatch.setattr(calibrate_xla, "FOLDS", 4)  # soon done
    fitted = json.loads((xla.SHIPPED / "hopper_xla.json").read_text())["products"]
    folders = [RESULTS, RESULTS / "random", RESULTS / "xla"]
    paths = {path.name: path for folder in folders for path in folder.glob("*.json")}
    loaded = {own: calibrate_xla.load(paths[own])[1] for own in fitted}
    assert {own: len(products) for own, products in loaded.items()} == fitted
    left = dict(zip(fitted, _split(calibrate_xla.crossed(sum(loaded.values(), []), 1), fitted.values()), strict=True))
    rows = report.load(paths[name]).rows
    found = []
    for row, product, log in zip(rows, loaded[name], left[name], strict=True):
        problem = row.case.problem
        if product.kind in ("other", "rows", "columns"):
            learned = product.log - log if xla.KINDS[product.kind].learned else 0.0
            us = H100.constants.launch_us + xla.formula_us(problem, H100) * math.exp(learned)
            monkeypatch.setattr(sooner, "xla_us", lambda *_, us=us: us)
            is_left = ladder(Asked(problem, "h100")).attempts[0].entry is None
            found.append((is_left, row.to_default, 1.0 if is_left else row.to_default))
    before, after = (sum(x[i] < 0.95 for x in found) for i in (1, 2))
    gain = math.exp(sum(math.log(x[2] / x[1]) for x in found) / len(found))
    assert after < before and gain > 1.0
    said = f"{sum(x[0] for x in found)} of the {len(found)} would be left to XLA, and {after} in place of {before}"
    assert said in " ".join((ROOT / "docs" / page).read_text().split()), said


def _split(values, counts):
    ends = list(itertools.accumulate(counts))
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
