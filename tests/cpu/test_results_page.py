"""What docs/results.md says of speeds is what the committed result files hold."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, ROOT

from jax_bwgemm.bench import render, report
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.run import RESULTS
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import sooner
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.planner.xla import KINDS, kind_of, xla_us

PAGE = (DOCS / "results.md").read_text().splitlines()
Fields = dict[str, Any]


def rows(name: str) -> list[Fields]:
    found: list[Fields] = json.loads((RESULTS / name).read_text())["rows"]
    return found


def us(*times: float) -> str:
    return " | ".join(f"{time:.1f}" for time in times)


@pytest.mark.parametrize("name", ["h200.json", "h200_listed.json", "h200_pallas.json", "h200_thin.json"])
def test_tables_of_products_are_as_rendered(name: str) -> None:
    text = render.markdown(report.load(RESULTS / name)).splitlines()
    wanted = [line for line in text if line.startswith(("| ", "Geometric mean"))]
    start = PAGE.index(wanted[2]) - 2  # its first product; tables have one head
    places = [PAGE.index(line, start) for line in wanted if not line.startswith("| ---")]
    assert places == sorted(places) and places[len(places) - 2] - places[0] < len(text) + 2


def test_loads_are_those_of_their_file() -> None:
    text = render.markdown(report.load(RESULTS / "h200_sustained.json")).splitlines()
    head = next(i for i, line in enumerate(text) if line.startswith("| sustained"))
    wanted = [line for line in text[head:] if line.startswith("| ")]
    assert len(wanted) == 4
    first = PAGE.index(wanted[0])
    assert PAGE[first : first + 5] == [*wanted, ""]


def test_the_conditions_are_said() -> None:
    """Of the first table, whose machine all others have."""
    text = render.markdown(report.load(RESULTS / "h200.json"))
    (conditions,) = [line for line in text.splitlines() if line.startswith("NVIDIA")]
    assert conditions in PAGE


def _mesh(row: Fields) -> str:
    return f"| {row['name']} | {us(row['ours_us'], row['jnp_us'])} | {row['ratio']:.3f} |"


def _layer(row: Fields) -> str:
    layer, times = row["layer"], row["times_us"]
    kind = "gated" if layer["is_gated"] else "biased"
    step = {"forward": "forward", "gradients": "and all gradients", "sums": "summed gradients"}[row["step"]]
    what = f"{layer['tokens']} x {layer['width']} -> {layer['ffn']}, {kind} {layer['activation']}: {step}"
    best = min(times[name] for name in ("default", "cublaslt", "no-triton"))
    ratios = " | ".join(f"{x / times['ours']:.3f}" for x in (times["default"], best))
    return f"| {what} | {us(times['ours'], times['installed'], times['default'], best)} | {ratios} |"


def _collective(row: Fields) -> str:
    times = row["times_us"]
    fastest, alone = times[row["fastest"]], times["ours, not overlapped"]
    shown = us(fastest, times["ours, default"], alone, times["jnp"], row["bound_us"])
    return f"| {row['name']} | {shown} | {alone / fastest:.3f} |"


def _decode(row: Fields) -> str:
    times = row["ours_us"], row["xla_us"]
    return f"| {row['form']} | {row['options']} | {us(*times)} | {times[1] / times[0]:.3f} |"


def _gram(row: Fields) -> str:
    times, (m, k) = row["times_us"], row["shape"]
    best = min(times[name] for name in ("default", "cublaslt", "no-triton"))
    ratios = " | ".join(f"{x / times['ours']:.3f}" for x in (times["default"], best))
    return f"| {row['name']} of {m} x {k} | {us(times['ours'], times['default'], best)} | {ratios} |"


@pytest.mark.parametrize(
    "name, line",
    [
        ("gram/h200.json", _gram),
        ("gram/h100.json", _gram),
        ("meshes/h200x2.json", _mesh),
        ("meshes/h100x2.json", _mesh),
        ("layers/h200.json", _layer),
        ("layers/h100.json", _layer),
        ("collectives/h200x2.json", _collective),
        ("decode/h200.json", _decode),
    ],
)
def test_other_tables_are_those_of_their_files(name: str, line: Callable[[Fields], str]) -> None:
    wanted = [line(row) for row in rows(name)]
    assert f"`jax_bwgemm/bench/results/{name}`" in "\n".join(PAGE)
    first = PAGE.index(wanted[0])
    assert PAGE[first : first + len(wanted) + 1] == [*wanted, ""]


def _means(found: Sequence[report.Row]) -> str:
    """To the default and to the best, as a table has them."""
    logs = [[math.log(getattr(row, name)) for row in found] for name in ("to_default", "to_best")]
    return " | ".join(f"{math.exp(sum(own) / len(own)):.3f}" for own in logs)


def _check_random_table(found: Sequence[report.Row]) -> None:
    def is_even(row: report.Row) -> bool:
        return all(size % 8 == 0 for size in (row.case.m, row.case.n, row.case.k))

    groups = {
        "all": found,
        "k up to 128": [row for row in found if row.case.k <= 128],
        "k above 128, multiples of 8": [row for row in found if row.case.k > 128 and is_even(row)],
        "k above 128, any size": [row for row in found if row.case.k > 128 and not is_even(row)],
        "ours takes more than 10 us": [row for row in found if row.ours.us > 10],
    }
    for name, own in groups.items():
        assert f"| {name} | {len(own)} | {_means(own)} |" in PAGE, (name, len(own))


def test_random_products_of_an_h100() -> None:
    found, text = report.load(RESULTS / "random/h100-20261127.json").rows, " ".join(PAGE)
    _check_random_table(found)
    assert f"ahead, and that far behind on {sum(row.to_best < 0.97 for row in found)} of {len(found)}." in text
    assert f"{sum(bool(row.fallback) for row in found)} are XLA's." in text
    behind, some, far = (sum(row.to_best < bound for row in found) for bound in (0.97, 0.95, 0.85))
    least = min(found, key=lambda row: row.to_best)
    said = f"{behind} of the {len(found)} are more than 3 % behind, {some} under 0.95, {far} under 0.85; the least is "
    assert f"{said}{least.to_best:.3f} ({least.shape})" in text
    short = [row for row in found if KINDS[kind_of(row.case.problem)].alone]
    others = [row for row in found if row not in short]
    under = [sum(row.to_best < 0.95 for row in own) for own in (short, others)]
    said = (
        f"Of the {len(short)} short and uneven ones {under[0]} are under 0.95, of the {len(others)} others {under[1]}"
    )
    assert f"{said}, which were all ours" in text and all(row.variant for row in others)
    once = report.load(RESULTS / "random/h100-60607.json").rows
    under = [sum(row.to_best < bound for row in once) for bound in (0.95, 0.85)]
    said = f"{len(once)} products of seed 60607 had {_means(once).replace(' | ', ' and ')} (`h100-60607.json`"
    assert f"{said}, commit f9f3a96; {under[0]} under 0.95, {under[1]} under 0.85)" in text
    assert f"The least of them, {min(row.to_best for row in once):.3f} (6052x4x13568:tn)" in text
    starts = {80911: "Before these changes {} products of seed", 70423: "{} of seed", 30241: "and {} of seed"}
    for seed, start in starts.items():
        own = report.load(RESULTS / f"random/h100-{seed}.json").rows
        said = f"{start.format(len(own))} {seed} {'had ' if seed == 80911 else ''}{_means(own).replace(' | ', ' and ')}"
        assert f"{said} (`h100-{seed}.json`" in text, said
        under = [sum(row.to_best < bound for row in own) for bound in (0.95, 0.85)]
        assert f"{under[0]} under 0.95, {under[1]} under 0.85)" in text or f"; {under[0]} and {under[1]})" in text
    before = report.load(RESULTS / "random/h100-51881.json").rows
    short = [row for row in before if row.case.k <= 128]
    means = [_means(own).replace(" | ", " and ") for own in (before, short)]
    assert f"{len(before)} products of another H100 had {means[0]} before that" in text
    assert f"in its {len(short)} sums of up to 128 terms {means[1]}" in text
    first, second = (report.summary(report.load(RESULTS / f"random/h100-{seed}.json").rows) for seed in (6173, 7717))
    assert f"had {first.to_best:.3f} (`h100-6173.json`, {first.rows} products" in text
    assert f"and {second.to_best:.3f} (`h100-7717.json`, {second.rows} products" in text


def test_random_products_are_those_of_their_file() -> None:
    found = report.load(RESULTS / "random/h200-291301.json").rows
    _check_random_table(found)
    for name, what in (("k in parts", "_f32_"), ("thin tiles", "x8x64_")):
        own = [row for row in found if row.variant and what in row.variant]
        assert f"| {name} | {len(own)} | {_means(own)} |" in PAGE
    for name, commit, start in (
        ("h200-281401", "03c3144", "{} products of three other seeds"),
        ("h200-291201", "80037b3", "{} products of another seed"),
        ("h200-281128", "8f48dce", "{} products of five seeds"),
        ("h200-291103", "22ffb4f", "{} products of three more seeds"),
        ("h200-281211", "1a894b8", "{} products of three other seeds"),
        ("h200-281201", "a28d563", "{} products of two seeds more"),
        ("h200-281221", "65baa08", "{} products of seed 281221"),
        ("h200-350113", "f7218f3", "{} products of seed 350113"),
    ):
        own = report.load(RESULTS / f"random/{name}.json").rows
        under = [sum(row.to_best < bound for row in own) for bound in (0.95, 0.85)]
        said = f"{start.format(len(own))} had {_means(own).replace(' | ', ' and ')} (`{name}.json`, commit {commit}; "
        assert f"{said}{under[0]} under 0.95, {under[1]} under 0.85)" in " ".join(PAGE), said
    first = report.load(RESULTS / "random/h200-90127.json").rows
    under = [sum(row.to_best < bound for row in first) for bound in (0.95, 0.85)]
    said = f"{len(first)} products of seed 90127 had {_means(first).replace(' | ', ' and ')} (`h200-90127.json`, "
    assert f"{said}commit 7fce2cd; {under[0]} under 0.95, {under[1]} under 0.85)" in " ".join(PAGE)
    even = [row for row in found if all(size % 8 == 0 for size in (row.case.m, row.case.n, row.case.k))]
    assert f"| multiples of 8 | {len(even)} | {_means(even)} |" in PAGE
    more = report.summary(report.load(RESULTS / "random/h200-88211.json").rows)
    said = f"{more.rows} products of seed 88211 had {more.to_default:.3f} and {more.to_best:.3f}"
    assert said in " ".join(PAGE)
    last = report.summary(report.load(RESULTS / "random/h200-9241.json").rows)
    said = f"{last.rows} products of seed 9241 had {last.to_default:.3f} and {last.to_best:.3f}"
    assert said in " ".join(PAGE)
    taught = report.summary(report.load(RESULTS / "random/h200-60317.json").rows)
    said = f"{taught.rows} products of seed 60317, also of before, had {taught.to_default:.3f} and {taught.to_best:.3f}"
    assert said in " ".join(PAGE)
    before = report.summary(report.load(RESULTS / "random/h200-1123.json").rows)
    assert f"had {before.to_best:.3f} of best over its {before.rows} products" in " ".join(PAGE)
    rule = report.summary(report.load(RESULTS / "random/h200-4057.json").rows)
    assert f"{rule.rows} products of seed 4057, which had {rule.to_best:.3f} of best" in " ".join(PAGE)
    worst, text = min(found, key=lambda row: row.to_best), " ".join(PAGE)
    behind, some, far = (sum(row.to_best < bound for row in found) for bound in (0.97, 0.95, 0.85))
    assert f"more than 3 % behind on {behind} of {len(found)}" in text
    assert f"{sum(bool(row.fallback) for row in found)} are XLA's: the planner" in text
    said = f"{behind} of the {len(found)} are more than 3 % behind, {some} under 0.95, {far} under 0.85: the least is "
    assert f"{said}{worst.to_best:.3f} ({worst.shape})" in text
    assert all(f"{x.shape} ({x.to_best:.3f})" in text for x in found if x.to_best < 0.85 and x is not worst)
    before = {row.shape: row.to_best for row in report.load(RESULTS / "random/h200-281128.json").rows}
    assert all(f"{before[x]:.3f} ({x})" in text for x in ("11860x259x5761:nt", "32x16288x944:tn"))


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
    assert behind == [5, 3]
    assert f"{len(own)} of the {len(found)} would be left to XLA, three of these five" in text


def test_products_in_parts_are_those_of_their_file() -> None:
    found = report.load(RESULTS / "h200_parts.json").rows
    own = [row for row in found if row.variant and "_f32_" in row.variant and row.case.out_dtype == "bfloat16"]
    text = " ".join(PAGE)
    assert f"of {len(found)} products that XLA had led most" in text and f"the {len(own)} whose k is in parts:" in text
    for row in own:
        times = row.ours.us, row.peers["default"].us, row.best[1].us
        said = " | ".join([*(f"{us:.1f}" for us in times), f"{row.to_default:.3f}", f"{row.to_best:.3f}"])
        assert f"| {row.shape} | {said} |" in PAGE


def test_the_steps_of_a_transformer_block_are_those_of_their_files() -> None:
    text = " ".join(PAGE)
    one, *_ = [row["times_us"] for row in rows("models/h200x1.json")]
    best = min(one["default"], one["cublaslt"], one["no-triton"])
    for time in (one["ours"], one["ours, fused"], one["default"], best):
        assert f"{time / 1000:.2f} ms" in text
    own, *xlas = (
        rows("models/h200x1.json")[0]["products_us"][name] / 1000 for name in ("ours", "default", "no-triton")
    )
    assert f"products alone take {own:.2f} ms, XLA's {xlas[0]:.2f} and {xlas[1]:.2f}" in text
    one, *_ = [row["times_us"] for row in rows("models/h100x1.json")]
    best = min(one["default"], one["cublaslt"], one["no-triton"])
    said = [f"{time / 1000:.2f}" for time in (one["ours"], one["ours, fused"], one["default"], best)]
    assert f"On one H100 {', '.join(said[:3])} and {said[3]} ms" in text
    ((two),) = [row["times_us"] for row in rows("models/h200x2.json")]
    best = min(two["default"], two["cublaslt"], two["no-triton"])
    assert f"{two['ours'] / 1000:.2f} ms, {two['default'] / two['ours']:.3f} times as fast" in text
    assert f"and {best / two['ours']:.3f} of its best flags" in text


def test_a_decoding_step_of_an_h100() -> None:
    row, text = rows("decode/h100.json")[0], " ".join(PAGE)
    said = [f"{row[name]:.0f}" for name in ("ours_us", "accelerated_us", "xla_us")]
    assert f"{said[0]} us by `install()`, {said[1]} by `accelerate`, and {said[2]} by XLA" in text


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
    low = [row for row in report.load(RESULTS / "random/h200-291301.json").rows if row.to_best < 0.95]
    num = sum(row.best[1].us >= 0.95 * fastest[row.case.problem] for row in low)
    assert f"Of the {len(low)}, {num} would be above 0.95 by the fastest of the kernels that ship" in text
    assert f"{sum(row.case.m > 4096 for row in low)} of them have more than 4,096 rows" in text


def test_what_the_fastest_kernel_would_do_for_random_products() -> None:
    """All kernels that ship were timed for some of the random products, too."""
    fastest = _fastest("h200_odd.json")
    found = report.load(RESULTS / "random/h200-350113.json").rows
    ratios = {row.shape: row.best[1].us / fastest[row.case.problem] for row in found if row.case.problem in fastest}
    text, num = " ".join(PAGE), sum(ratio < 0.95 for ratio in ratios.values())
    assert f"were timed for {len(ratios)} of these" in text
    assert f"and for {len(fastest) - len(ratios)} products more" in text
    assert f"{num} of the {len(ratios)} would still be more than 5 % behind" in text
    of_one = next(row for row in found if row.shape == "3504x200x4760:nt")
    ours, best, xla = of_one.ours.us, fastest[of_one.case.problem], of_one.best[1].us
    assert f"takes {ours:.1f} us, by our fastest {best:.1f}, and XLA {xla:.1f}" in text


def test_a_later_run_on_two_gpus() -> None:
    """With two products of a gradient left to XLA."""
    ratios = {row["name"]: row["ratio"] for row in rows("meshes/h200x2_left.json")}
    least = min(ratios, key=lambda name: ratios[name])
    text, same = " ".join(PAGE), [f"{ratios[f'{kind}: m-sharded']:.3f}" for kind in ("jit", "shard_map")]
    said = f"it had {ratios['jit: k-sharded']:.3f}, and the least was {least}, {ratios[least]:.3f}, beside "
    assert f"{said}{' and '.join(same)} of the same kernel" in text
    own = [ratio for name, ratio in ratios.items() if name.endswith("MLP, gradient")]
    assert f"The MLP's gradients had {min(own):.3f} to {max(own):.3f} there" in text


def test_readme_says_the_means() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    products, found = report.load(RESULTS / "h200.json").rows, report.load(RESULTS / "random/h200-291301.json").rows
    means = report.summary(products)
    assert (
        f"XLA takes {means.to_default:.3f} times as long as our kernels by default, and {means.to_best:.3f}" in readme
    )
    assert f"(geometric means of {len(products)} products" in readme
    alone = report.summary(report.load(RESULTS / "h200_model.json").rows)
    assert alone.rows == len(products)
    had = f"had {alone.to_default:.3f} and {alone.to_best:.3f} (one"
    said = f"By the cost model's choices alone the same {alone.rows} products {had}"
    assert said in " ".join(PAGE)
    own = report.summary(found)
    assert f"Of {len(found)} random products that nobody tuned, XLA takes {own.to_default:.3f} times as long" in readme
    assert f"and {own.to_best:.3f} times with the best of three sets of flags" in readme


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
