"""What corrects the cost model's times: what ships, and what it is worth on products that it was not fitted
to."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest

import jax_bwgemm.bench
from jax_bwgemm.bench import calibrate, forest, regret, spare
from jax_bwgemm.bench.fit import load, lost_by
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.cli import explain_choices
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.padding import why_not_padded
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner import calibration, measured
from jax_bwgemm.planner.calibration import row
from jax_bwgemm.planner.cost import cost, roofline_us
from jax_bwgemm.planner.features import features, names
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.planner.streams import idle
from jax_bwgemm.planner.trees import Trees

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
HELD_OUT = {
    # The oldest: kernels and orders of before, of which less is learned (1.6 and 5.0 % until h200_sampled.json).
    "h200_held_out.json": (0.017, 0.052, 0.35),
    "h100_held_out.json": (0.015, 0.05, 0.3),
    "h100_wide_held_out.json": (0.02, 0.055, 0.3),
    "h200_many_held_out.json": (0.015, 0.05, 0.3),
    "h200_random_held_out.json": (0.015, 0.05, 0.3),
    "h200_orders_held_out.json": (0.015, 0.05, 0.3),
    "h200_fused.json": (0.015, 0.05, 0.3),
    "h200_explored.json": (0.02, 0.065, 0.4),
    "h200_forms_held_out.json": (0.02, 0.066, 0.3),
    "h200_any_held_out.json": (0.015, 0.05, 0.4),
    "h200_any_again_held_out.json": (0.015, 0.05, 0.55),
    "h200_any_sooner_held_out.json": (0.015, 0.05, 0.5),
    "h200_cases_held_out.json": (0.015, 0.05, 0.4),
    "h200_trial_held_out.json": (0.015, 0.055, 0.4),
}  # {file: what the choices lose, in the mean and of one in ten, and in times of what the model alone loses}
LATEST = ("h200_any_sooner_held_out.json", "h200_cases_held_out.json")
H200 = by_name("h200")


def test_what_ships_belongs_to_the_constants() -> None:
    """Whoever refits them calibrates again: `python -m jax_bwgemm bench --calibrate`."""
    assert calibration.of(H200) is not None
    assert calibration.of(by_name("h100")) is calibration.of(H200)
    assert calibration.of(by_name("b200")) is None
    other = dataclasses.replace(H200, constants=dataclasses.replace(H200.constants, latency=0.2))
    assert calibration.of(other) is None


@pytest.mark.parametrize(
    "name, most",
    [pytest.param(*item, marks=[] if item[0] in LATEST else [pytest.mark.long]) for item in HELD_OUT.items()],
)
def test_it_cuts_what_the_planner_loses_on_products_that_it_was_not_fitted_to(
    name: str, most: tuple[float, float, float]
) -> None:
    path = RESULTS / name
    shipped = json.loads((calibration.SHIPPED / "hopper.json").read_text())
    assert path.name not in shipped["products"] and sum(shipped["products"].values()) > 1000
    arch, products = load(path)
    products = [spare.of_what_ships(product, arch.target) for product in products]
    alone, found = (_said(arch, products, is_calibrated) for is_calibrated in (False, True))
    assert found["mean"] < most[0] and found["90th percentile"] < most[1] and found["median"] == 0.0
    assert found["mean"] < most[2] * alone["mean"]
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    means, p90s = ([f"{100 * x[name]:.1f}" for x in (alone, found)] for name in ("mean", "90th percentile"))
    said = f"lose {means[0]} % with the model alone, and {means[1]} % with the correction "
    said += f"(90th percentile {p90s[0]} and {p90s[1]} %), at most {100 * found['max']:.1f} %"
    assert said in page, said


@pytest.mark.long
def test_what_it_loses_of_many_rows() -> None:
    """Few of which it was fitted to; less, since their transposes are candidates."""
    assert "h200_tall.json" not in json.loads((calibration.SHIPPED / "hopper.json").read_text())["products"]
    arch, products = load(RESULTS / "h200_tall.json")
    products = [spare.of_what_ships(product, arch.target) for product in products]
    alone, found = (_said(arch, products, is_calibrated) for is_calibrated in (False, True))
    before = []
    for product in products:
        as_given = {(tile, flips): us for (tile, flips), us in product.times_us.items() if not flips}
        whole, own = (
            calibrate.kernels(dataclasses.replace(product, times_us=x), arch) for x in (product.times_us, as_given)
        )
        lost = own.lost(calibration.of(arch).trees.sums(own.rows))
        before.append((1 + lost) * own.wholes_us.min() / whole.wholes_us.min() - 1)
    assert found["mean"] < 0.03 and float(np.mean(before)) > found["mean"]
    means = [f"{100 * x:.1f}" for x in (alone["mean"], found["mean"], float(np.mean(before)))]
    said = (
        f"Of {len(products)} products of more than 4,096 rows (`h200_tall.json`), of which these files have few, they "
        f"lose {means[0]} % with the model alone, and {means[1]} % with the correction (90th percentile "
        f"{100 * found['90th percentile']:.1f} %, at most {100 * found['max']:.1f} %), where it was {means[2]} % "
        "without their transposes"
    )
    assert said in " ".join((ROOT / "docs" / "architecture.md").read_text().split()), said


@pytest.mark.long
def test_where_rows_begin_tells_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products that the shipped correction was not fitted to, with a quarter of its trees: what is lost with the
    steps of rows, and with zeros in their place."""
    monkeypatch.setattr(calibrate, "NUM_TREES", 100)
    monkeypatch.setattr(calibrate, "RATE", 4 * calibrate.RATE)
    steps = [i for i, name in enumerate(names()) if name.endswith("_row_step")]
    fitted = json.loads((calibration.SHIPPED / "hopper.json").read_text())["products"]
    known, unseen = (
        [
            calibrate.kernels(product if name in fitted else spare.of_what_ships(product, arch.target), arch, weight)
            for name in files
            for arch, products in [load(RESULTS / name)]
            for weight in [calibrate._weight(RESULTS / name)]
            for product in products
        ]
        for files in (fitted, HELD_OUT)
    )

    def lost(blanked: list[int]) -> float:
        def seen(product: calibrate.Kernels) -> calibrate.Kernels:
            rows = product.rows.copy()
            rows[:, blanked] = 0.0
            return dataclasses.replace(product, rows=rows)

        trees = Trees.of(calibrate.grown([seen(product) for product in known], 0), len(names()))
        return float(np.mean([product.lost(trees.sums(seen(product).rows)) for product in unseen]))

    assert len(steps) == 3 and lost([]) < 0.85 * lost(steps)


def test_it_holds_for_an_h100() -> None:
    """Over the products of 2-byte operands alone of a table of before, to none of which it was fitted."""
    arch = by_name("h100")
    records = measured.load(RESULTS / "h100_table.json").records
    asked = [case.problem for case in explain_choices.cases() if case.dtype in ("bfloat16", "float16")]
    products = [
        spare.of_what_ships(
            Measured(p, {(Tile.from_str(t.tile), t.swapped): t.us for t in records[measured.key(p)].times}), arch.target
        )
        for p in dict.fromkeys(asked)
        if measured.key(p) in records and why_not_padded(p) is None
    ]
    alone, found = (_said(arch, products, is_calibrated)["mean"] for is_calibrated in (False, True))
    said = f"Of {len(products)} products of an H100 they lose {100 * alone:.1f} and {100 * found:.1f} %"
    assert found < 0.8 * alone and said in " ".join((ROOT / "docs" / "architecture.md").read_text().split()), said


def test_it_holds_for_parts_of_long_sums() -> None:
    """Of which it has seen none, with kernels of float32 results."""
    loaded = [load(RESULTS / name) for name in ("h200_parts.json", "h200_parts_held_out.json")]
    products = [spare.of_what_ships(product, arch.target) for arch, found in loaded for product in found]
    assert all(product.problem.whole_k for product in products)
    alone, found = (_said(H200, products, is_calibrated)["mean"] for is_calibrated in (False, True))
    said = f"Of {len(products)} parts of long sums of an H200 they lose {100 * alone:.1f} and {100 * found:.1f} %"
    assert found < 0.4 * alone and said in " ".join((ROOT / "docs" / "architecture.md").read_text().split()), said


def test_what_was_lost_of_many_matrices() -> None:
    """By the choices of before the correction had learned from them, which the file has."""
    many = [product for product in load(RESULTS / "h200_batched.json")[1] if product.problem.batch > 1]
    times = [(x.problem, list(x.times_us.values())[x.modelled or 0], min(x.times_us.values())) for x in many]
    lost = float(np.mean([chosen / least - 1 for _, chosen, least in times]))
    ((chosen, least),) = [x[1:] for x in times if (x[0].batch, x[0].m, x[0].k) == (128, 2048, 128)]
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    assert f"the choices lost {100 * lost:.1f} % of {len(times)} of these" in page
    assert f"(128*2048x2048x128:nt took {chosen:.0f} us by one tile, and {least:.0f} by another)" in page


def _said(arch: Arch, products: list[Measured], is_calibrated: bool) -> dict[str, float]:
    return regret.statistics([lost_by(product, arch, is_calibrated) for product in products])


def test_a_plan_has_the_corrected_times() -> None:
    problem = Problem(300, 11008, 4096)
    found = plan(problem, H200)
    alone = {(c.tile, c.swapped): c.cost for c in plan(problem, H200, is_calibrated=False).candidates}
    legal = [c for c in found.candidates if c.cost]
    times = [c.cost.us for c in legal if c.cost and c.reason is None]
    assert found.tile == legal[0].tile and times == sorted(times)
    least = min(known.us for known in alone.values() if known)
    known = calibration.of(H200)
    assert known is not None
    for c in legal:
        before = alone[c.tile, c.swapped]
        assert before is not None and c.cost is not None
        assert math.isclose(c.cost.us * c.cost.utilisation, before.us * before.utilisation)
        if before.us <= calibration.NEAR * least:
            log = known.trees.sums(row(c.tile, c.problem, before, H200)[None])[0]
            launch_us = H200.constants.launch_us
            expected_us = max((before.us - launch_us) * math.exp(log), roofline_us(problem, H200))
            assert math.isclose(c.cost.us, expected_us + launch_us)


def test_other_kinds_of_kernels_are_not_corrected() -> None:
    problem = Problem(1024, 1024, 1024, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn", b_major="k")
    found, alone = plan(problem, H200), plan(problem, H200, is_calibrated=False)
    assert found == alone and not calibration.is_covered(Tile(128, 128, gated=True), Problem(64, 64, 64))


def test_features_are_numbers_that_tell_kernels_apart() -> None:
    rows = []
    for tile in (Tile(128, 256), Tile(128, 256, cluster_m=2), Tile(64, 64, stream_k=True), Tile(64, 16, direct=True)):
        for problem in (Problem(64, 64, 64), Problem(1000, 520, 4096), Problem(8, 8, 16384, 3)):
            found = features(tile, problem, H200, cost(tile, problem, H200))
            assert tuple(found) == names() and all(math.isfinite(x) for x in found.values())
            rows.append(tuple(found.values()))
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("change", ["format", "features", "trees", "text", "constants"])
def test_a_damaged_file_is_a_warning_and_no_calibration(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = json.loads((calibration.SHIPPED / "hopper.json").read_text())
    text = json.dumps(fields | {change: 7}) if change in fields else "{"
    (tmp_path / "hopper.json").write_text(text)
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path)
    calibration._shipped.cache_clear()
    try:
        with pytest.warns(UserWarning, match="the cost model is not calibrated: a calibration requires what `bench"):
            assert calibration.of(H200) is None
        problem = Problem(300, 11008, 4096)
        assert plan(problem, H200) == plan(problem, H200, is_calibrated=False)
    finally:
        monkeypatch.undo()
        calibration._shipped.cache_clear()


def _some(tmp_path: Path, num: int) -> Path:
    """The first products of a file."""
    head, *lines = (RESULTS / "h200_random.json").read_text().splitlines()
    path = tmp_path / "some.json"
    path.write_text("\n".join([head, *(line.rstrip(",") + "," for line in lines[: num - 1]), lines[num], "]}"]))
    path.write_text(path.read_text().replace(",\n]}", "\n]}"))
    return path


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On few products with few trees: what it writes is read, and says what it was fitted to."""
    monkeypatch.setattr(calibrate, "NUM_TREES", 8)
    path, out = _some(tmp_path, 20), tmp_path / "out.json"
    assert calibrate.main([path], out, 0) == 0
    said = capsys.readouterr().out
    assert "the model alone: mean" in said and "calibrated by other products: mean" in said and f"wrote {out}" in said
    found = calibration.load(out)
    assert found.trees.asked.shape[0] == 8 and found.constants == H200.constants
    assert json.loads(out.read_text())["products"] == {"some.json": 20}
    products = [calibrate.kernels(product, H200) for product in load(path)[1]]
    before = [np.abs(p.logs).mean() for p in products]
    after = [np.abs(p.logs - found.trees.sums(p.rows)).mean() for p in products]
    assert np.mean(after) < np.mean(before)


def test_times_of_two_devices_of_a_family(tmp_path: Path) -> None:
    """Each product has the features of its own device; other families, or other constants, are refused."""
    path, other = _some(tmp_path, 6), tmp_path / "other.json"
    other.write_text(path.read_text().replace('"arch": "h200"', '"arch": "h100"'))
    assert calibrate.main([path, other], tmp_path / "out.json", 0) == 0
    assert json.loads((tmp_path / "out.json").read_text())["products"] == {"some.json": 6, "other.json": 6}
    other.write_text(path.read_text().replace('"arch": "h200"', '"arch": "b200"'))
    with pytest.raises(ValueError, match="requires devices of one family and its constants, got h200 and b200"):
        calibrate.main([path, other], tmp_path / "out.json", 0)


def test_a_file_may_say_that_its_products_count_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose facts have no weight, beside its copy at a quarter: so are the weights of all kernels."""
    path, other = _some(tmp_path, 6), tmp_path / "other.json"
    other.write_text(path.read_text().replace('"arch": "h200"', '"arch": "h200", "weight": 0.25'))
    given = list[np.ndarray]()
    dataset = lightgbm.Dataset

    def seen(rows: np.ndarray, logs: np.ndarray, weight: np.ndarray) -> Any:
        given.append(weight)
        return dataset(rows, logs, weight=weight)

    monkeypatch.setattr(lightgbm, "Dataset", seen)
    monkeypatch.setattr(calibrate, "NUM_TREES", 2)
    assert calibrate.main([path, other], tmp_path / "out.json", 0) == 0
    assert len(given) == calibrate.FOLDS + 1  # the last is of all products
    whole, less = np.split(given[-1], 2)
    assert whole.max() == 1.0
    np.testing.assert_allclose(less, whole / 4)


def test_kernels_of_before_count_half() -> None:
    """Of what the shipped correction is fitted to, as docs/architecture.md says."""
    fitted = json.loads((calibration.SHIPPED / "hopper.json").read_text())["products"]
    weights = {name: calibrate._weight(RESULTS / name) for name in fitted}
    before = [name for name, weight in weights.items() if weight < 1.0]
    ship, batched, latest = ([name for name, weight in weights.items() if weight == own] for own in (2.0, 3.0, 5.0))
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    said = f"half of their weight, of {sum(fitted[x] for x in before)} longer ones of before (`{'`, `'.join(before)}`)"
    assert {weights[name] for name in before} == {0.5} and set(weights.values()) == {0.5, 1.0, 2.0, 3.0, 5.0}
    assert f"with twice, of {sum(fitted[x] for x in ship):,} of H100s and H200s with the kernels that ship" in page
    (name,) = batched
    many = sum(product.problem.batch > 1 for product in load(RESULTS / name)[1])
    assert f"with three times, of {fitted[name]} of an H200, {many} of them of many matrices (`{name}`)" in page
    assert said in page, said
    assert f"with five times, of {sum(fitted[x] for x in latest):,} of an H200 (`{'`, `'.join(latest)}`)" in page


def test_what_all_kernels_of_a_product_are_off_by_may_count_less() -> None:
    """Of two products of three and two kernels: with nothing of it, a product's labels may all be others."""
    rng = np.random.default_rng(0)
    groups, found, logs, weights = np.array([0, 0, 0, 1, 1]), *rng.random((3, 5))

    def slopes(labels: np.ndarray, shared: float) -> np.ndarray:
        data = lightgbm.Dataset(np.zeros((5, 1)), labels, weight=weights).construct()
        return forest._slopes(found, data, groups, shared)[0]

    moved = logs + np.array([1.0, 1.0, 1.0, -2.0, -2.0])
    np.testing.assert_allclose(slopes(moved, 0.0), slopes(logs, 0.0), atol=1e-5)
    np.testing.assert_allclose(np.bincount(groups, slopes(logs, 0.0)), 0.0, atol=1e-6)
    np.testing.assert_allclose(slopes(logs, 1.0), weights * (found - logs), atol=1e-6)
    np.testing.assert_allclose(slopes(logs, 0.3), 0.7 * slopes(logs, 0.0) + 0.3 * slopes(logs, 1.0), atol=1e-6)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="requires at least 5 measured products, got 4"):
        calibrate.main([_some(tmp_path, 4)], tmp_path / "out.json", 0)
    said = r"requires LightGBM \(pip install lightgbm\), which loads gcc's libgomp, got none: "
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ValueError, match=said):
        calibrate.main([_some(tmp_path, 6)], tmp_path / "out.json", 0)
    monkeypatch.delitem(sys.modules, "lightgbm")
    (tmp_path / "lightgbm.py").write_text('raise OSError("libgomp.so.1: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said + "libgomp.so.1: cannot open"):
        calibrate.main([_some(tmp_path, 6)], tmp_path / "out.json", 0)


def _lost(name: str) -> list[float]:
    """By the positions of the correction's choices in the file, which were made before it was fitted to any of it."""
    arch, products = load(RESULTS / name)
    losses = []
    for product in products:
        assert product.modelled is not None
        wholes_us = [
            us + cost(tile, product.problem.transposed if is_swapped else product.problem, arch).padding_us
            for (tile, is_swapped), us in product.times_us.items()
        ]
        losses.append(wholes_us[product.modelled] / min(wholes_us) - 1)
    return losses


@pytest.mark.long
def test_what_the_correction_lost_on_products_that_it_then_learned_from() -> None:
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    said = f"these chose kernels that lost {100 * statistics.mean(_lost('h200_odd.json')):.1f} %"
    assert said in page, said
    cases = _lost("h200_cases.json") + _lost("h200_cases_again.json")
    said = f"and {len(cases)} of their products are drawn as `bench --random` draws, of which the choices had lost "
    said += f"{100 * statistics.mean(cases):.1f} %"
    assert said in page, said
    held_out = _lost("h200_cases_held_out.json")
    said = f"where the choices of before lost {100 * statistics.mean(held_out):.1f} % "
    said += f"(90th percentile {100 * np.percentile(held_out, 90):.1f} %)"
    assert said in page, said


def test_a_stream_of_nothing_takes_longer() -> None:
    """In pairs of kernels that differ in nothing else, as `streams.idle` says."""
    ratios = []
    for name in ("h100_wide.json", "h200_odd.json"):
        arch, products = load(RESULTS / name)
        for product in products:
            for (tile, is_swapped), us in product.times_us.items():
                without = idle(tile, product.problem.transposed if is_swapped else product.problem, arch)
                if without and (other := product.times_us.get((without, is_swapped))):
                    ratios.append(us / other)
    assert f"{len(ratios):,}" in " ".join((idle.__doc__ or "").split())
    quarter, half, _ = statistics.quantiles(ratios, n=4)
    assert quarter > 1.0 and f"{100 * (half - 1):.0f} %" == "2 %"
