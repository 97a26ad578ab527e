"""What docs/results.md says of speeds is what the committed result files hold."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, ROOT

from jax_bwgemm.bench import page, report, tables
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.machine import RESULTS
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import sooner
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.planner.xla import xla_us

TEXT = (DOCS / "results.md").read_text()
PAGE = TEXT.splitlines()
LATEST = 303001  # seed of random products: the sample of an H200 that the page shows
BEFORE = 291301, 291801, 292201, 292301, 301401, 301601, 301701, 302301  # and of others, the last before
Fields = dict[str, Any]


def test_tables_are_those_of_their_files(tmp_path: Path) -> None:
    """Every table, and what stands below it; `bench --fill` mends it."""
    path = tmp_path / "results.md"
    path.write_text(TEXT)
    assert main(["bench", "--fill", str(path)]) == 0
    assert path.read_text() == TEXT, "python -m jax_bwgemm bench --fill docs/results.md"
    with_table = [found for found in page.BLOCK.finditer(TEXT) if found["view"] != "mean"]
    assert len(with_table) > 20 and TEXT.count("| --- |") == len(with_table) + 1  # that of long runs


def test_each_benchmark_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in tables.TABLES:
        for path in (RESULTS / kind).glob("*.json"):
            assert main(["bench", "--render", str(path)]) == 0
            table, conditions = capsys.readouterr().out.rstrip().split("\n\n")
            headings, rule, *rows = table.splitlines()
            assert rows and all(line.count(" | ") == headings.count(" | ") for line in (rule, *rows))
            assert conditions.startswith("NVIDIA H")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("# A page\n", "requires a page with comments such as `<!-- table of h200.json -->`, got"),
        (
            "<!-- chart of h200.json -->\n<!-- end -->",
            "requires one of table, loads, mean, groups, samples, got 'chart'",
        ),
        (
            "<!-- table of h201.json -->\n<!-- end -->",
            "a result file requires what this version of `bench` writes, got",
        ),
    ],
)
def test_a_page_that_cannot_be_filled(text: str, match: str, tmp_path: Path) -> None:
    """Is left as it was."""
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        page.main(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("regret/h200_drawn.json", "times that `--regret` wrote, which `--calibrate`, `--fit` and `--spare` read"),
        ("orders/h200.json", "times that `--orders` wrote"),
        ("soak/h200_products.json", "findings that `--soak` wrote"),
        ("regret/h100_table.json", "a table of measured times"),
        ("soak/h100_sanitized.json", "another file"),
    ],
)
def test_what_has_no_table(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--render", str(RESULTS / name)]) == 2
    error = capsys.readouterr().err
    assert f"got {RESULTS / name}: {kind}" in error and error.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", '{"benchmark": "gram", "rows": []}', '{"benchmark": "gram", "rows": [1]}'])
def test_a_file_that_is_no_result(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    assert main(["bench", "--render", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert "a result file requires what this version of `bench` writes, got" in error and error.count("\n") == 1


def test_what_is_left_to_xla_of_thin_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With today's constants, which are not those of the results."""
    monkeypatch.setattr(sooner, "xla_us", xla_us)
    arch, text = by_name("h200"), " ".join(PAGE)

    def left(found: Sequence[report.Row]) -> list[report.Row]:
        priced = [(row, plan(row.case.problem, arch).chosen) for row in found]
        costs = [(row, chosen.cost.us) for row, chosen in priced if chosen and chosen.cost]
        return [row for row, us in costs if sooner.why_xla(row.case.problem, us, arch)]

    found = report.load(RESULTS / "h200_thin.json").rows
    own = [row for row in left(found) if row.variant]
    behind = [sum(row.to_best < 0.85 for row in rows) for rows in (found, own)]
    assert behind == [5, 4]
    assert f"{len(own)} of the {len(found)} would be left to XLA, four of these five" in text


def _fastest(name: str) -> dict[Problem, float]:
    """Of all kernels that were timed for a product, with what pads their operands."""
    arch, timed = load(RESULTS / "regret" / name)
    return {
        product.problem: min(
            us + cost(tile, product.problem.transposed if is_swapped else product.problem, arch).padding_us
            for (tile, is_swapped), us in product.times_us.items()
        )
        for product in timed
    }


def test_what_the_fastest_kernel_would_do_for_those_that_lose() -> None:
    fastest, text = _fastest("h200_losing.json"), " ".join(PAGE)
    low = [row for row in random_rows(BEFORE[0]) if row.to_best < 0.95]
    num = sum(row.best[1].us >= 0.95 * fastest[row.case.problem] for row in low)
    said = (
        f"Of the {len(low)} of h200-291301 that are under 0.95, {num} would be above it by the fastest of the kernels"
    )
    assert said in text, said


def random_rows(*seeds: int) -> list[report.Row]:
    return [row for seed in seeds for row in report.load(RESULTS / f"random/h200-{seed}.json").rows]


def test_readme_says_the_means() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    products, found = report.load(RESULTS / "h200.json").rows, random_rows(LATEST)
    means = report.summary(products)
    assert (
        f"XLA takes {means.to_default:.3f} times as long as our kernels by default, and {means.to_best:.3f}" in readme
    )
    assert f"(geometric means of {len(products)} products" in readme
    alone = report.summary(report.load(RESULTS / "h200_model.json").rows)
    assert f"by the cost model alone {alone.to_default:.3f} and {alone.to_best:.3f})" in readme
    own = report.summary(found)
    assert f"Of {len(found)} random products that nobody tuned, XLA takes {own.to_default:.3f} times as long" in readme
    ratios = [row.to_best for row in found]
    said = f"and {own.to_best:.3f} times with the best of three sets of flags "
    said += f"({sum(ratio < 0.95 for ratio in ratios)} under 0.95, the least {min(ratios):.3f})"
    assert said in readme, said
    before = report.summary(random_rows(*BEFORE))
    said = f"of {before.rows} others, before, {before.to_default:.3f} and {before.to_best:.3f} times"
    assert said in readme, said


def test_the_pictures_are_drawn_from_the_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from jax_bwgemm.bench import plots

    plots.draw(report.load(RESULTS / "h200.json"), tmp_path)
    for name in ("ratios.svg", "roofline.svg"):
        remedy = f"python -m jax_bwgemm bench --render {RESULTS.relative_to(ROOT)}/h200.json --plots DIR"
        assert (DOCS / "images" / name).read_bytes() == (tmp_path / name).read_bytes(), remedy


def test_random_products_against_float64() -> None:
    fields = json.loads((RESULTS / "soak" / "h200_products.json").read_text())
    found, page = fields["products"], " ".join(PAGE)
    assert f"{found['programs']:,} random products of all dtypes" in page and fields["findings"] == []
    assert (
        f"{found['wrong']} wrong, {found['errors']} errors" in page and f"commit {fields['machine']['commit']}" in page
    )
    assert f"the largest error {found['worst_share_of_bound']:.3f} times its bound" in page


def soak(name: str) -> Fields:
    found: Fields = json.loads((RESULTS / "soak" / name).read_text())
    return found


@pytest.mark.parametrize(("name", "peer"), [("ours", "ours"), ("`jnp.matmul`", "xla")])
def test_long_runs(name: str, peer: str) -> None:
    found = soak("h100x2.json")
    own = found[peer]
    hosts = ", ".join(f"{own['rounds'][i]['host_bytes'] / 1e9:.2f}" for i in (0, -1))
    kept = own["rounds"][-1]["device_bytes"]
    counts = " | ".join(str(own[key]) for key in ("programs", "executions", "wrong", "errors"))
    assert f"| {name} | {counts} | {hosts} | {kept} |" in PAGE
    assert found["findings"] == [] and found["minutes"] == 15 and len(found["faults"]["exceptions"]) == 2


def test_cases_of_batch_invariance() -> None:
    parts = [soak(f"h100_batch_{first}.json") for first in (0, 7010)]
    assert [part["cases"] for part in parts] == [[0, 7010], [7010, 10000]]
    counts = collections.Counter[str]()
    for kind in (kind for part in parts for kind in part["kinds"].values()):
        counts.update(kind)
    assert counts.keys() == {"same", "refused"}
    assert f"{counts['same']} with the same bits, 0 with others, {counts['refused']} refused," in " ".join(PAGE)


def test_sanitized_kernels() -> None:
    found = soak("h100_sanitized.json")
    assert len(found["variants"]) == 24 and found["seed"] == 5
    assert all(tool["ran"] == 24 and tool["errors"] == 0 for tool in found["tools"].values())


def test_how_many_of_the_last_random_products_lose() -> None:
    found = random_rows(LATEST, *BEFORE)
    behind = sum(row.to_best < 0.95 for row in found)
    said = f"of the last {len(found)} XLA's best flags lead by more than 5 % on {behind}."
    assert said in " ".join(TEXT.split())


def test_a_block_over_two_gpus_before_its_kernels_gave_way() -> None:
    (row,) = json.loads((RESULTS / "models" / "h200x2_before.json").read_text())["rows"]
    ours, xla = (row["times_us"][name] / 1000 for name in ("ours", "default"))
    page = " ".join((DOCS / "architecture.md").read_text().split())
    assert f"over two H200s took {ours:.2f} ms, and XLA's {xla:.2f} (`bench/results/models/h200x2_before.json`)" in page
