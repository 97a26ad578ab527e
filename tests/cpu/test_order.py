"""Orders of tiles and what the L2 cache is asked, by hand and by measured times."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
from plan_cases import B200, H200, LARGE, PAIR

import jax_bwgemm.bench
from jax_bwgemm.bench import orders, regret
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.geometry import cluster_tiles, concurrent_clusters, num_waves
from jax_bwgemm.facts.padding import padding
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.scheduler import tile_coordinates, tile_order
from jax_bwgemm.planner import measured, order
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.order import l2_hints, raster, result_hint, walked
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime.decision import decide

RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results"
PAGE = (Path(__file__).parents[2] / "docs/hopper.md").read_text()
TEXT = " ".join(PAGE.split())


def batched(batch, *sizes):
    return Problem(*sizes, batch, a_batch=batch, b_batch=batch)


@pytest.mark.parametrize("m, n", [(64, 65536), (65536, 64), (8192, 8192), (1, 8), (300, 300)])
@pytest.mark.parametrize("arch", (H200, B200), ids=lambda a: a.name)
def test_raster(m, n, arch):
    problem = Problem(m, n, 512)
    for candidate in candidates(problem, arch):
        tile, seen = candidate.tile, candidate.problem
        group, along_n = raster(tile, seen, arch)
        rows = -(-seen.m // (tile.cluster_m * tile.num_accs * tile.mma_m // tile.cta_group))
        tiles = -(-seen.n // (tile.cluster_n * tile.mma_n)) if along_n else rows
        if arch is B200 or seen.m * seen.n > 1e6:
            assert along_n == (seen.n > seen.m)  # k is short: both operands stay in the cache
        assert 1 <= group <= tiles


def test_raster_squares_what_runs_at_once():
    """The nearest power of two to the rows of a square wave: of 18 clusters of 512x512, sqrt(18); and so on."""
    assert raster(dataclasses.replace(PAIR, cluster_m=4, cluster_n=2), LARGE, B200) == (4, 0)
    assert raster(PAIR, LARGE, B200) == (8, 0)  # sqrt(74)
    assert raster(dataclasses.replace(PAIR, num_accs=2), LARGE, B200) == (8, 0)  # sqrt(74 / 2): 512x256 each
    assert raster(Tile(128, 128, cluster_k=4), LARGE, B200) == (8, 0)  # sqrt(37) of 128x128
    assert raster(Tile(128, 128), LARGE, B200) == (16, 0)  # sqrt(148)
    tall = dataclasses.replace(PAIR, cluster_m=8)  # 1024x256: sqrt(18 / 4)
    assert raster(tall, LARGE, B200) == (2, 0)
    assert raster(tall, Problem(8192, 16384, 1024), B200) == (8, 1)  # in columns: sqrt(18 * 4)
    assert raster(dataclasses.replace(tall, num_accs=2), LARGE, B200) == (2, 0)  # 2048x256: sqrt(18 / 8)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(8192, 8192, 64), (1, 0)),  # 134 MB are written, 2 read
        (Problem(8192, 8192, 64, c_major="m"), (1, 1)),
        (Problem(8192, 8192, 128), (1, 0)),
        (Problem(8192, 8192, 136), (2, 0)),  # MMAs take longer than the store
        (Problem(8192, 1032, 64), (2, 0)),  # 17 MB stay in the L2 cache
    ],
    ids=str,
)
def test_what_is_little_but_a_large_result_is_written_along_it(problem, expected):
    assert raster(Tile(128, 128, cluster_m=2), problem, H200) == expected


@pytest.mark.parametrize(
    ("problem", "tile", "expected"),
    [
        (Problem(11008, 192, 4096), Tile(256, 64), (1, 0)),  # 129 tiles, of which three have the same 256 rows of a
        (Problem(192, 11008, 4096), Tile(64, 256), (1, 1)),  # of b
        (Problem(2112, 896, 7776), Tile(128, 128), (4, 1)),  # 17x7: 16 tiles of a GPC are 4x4
        (Problem(4784, 48, 568), Tile(128, 32, cluster_m=4, pingpong=True), (8, 0)),  # the same rows 8 clusters apart
        (Problem(1024, 64, 8192), Tile(128, 32, cluster_k=4), (8, 0)),
        (Problem(8192, 8192, 512), Tile(128, 256), (2, 0)),  # 16 waves: b stays in the L2 cache
        (Problem(8192, 8192, 8192), Tile(128, 256), (16, 0)),  # 134 MB do not
        (Problem(1280, 1280, 1280), Tile(64, 224, cluster_m=4, cluster_n=2), (4, 0)),  # eight CTAs: of any GPC
        (Problem(8192, 8192, 512, symmetric=True, b_major="k"), Tile(128, 256, symmetric=True), (16, 0)),
        (batched(4, 4096, 4096, 512), Tile(128, 256), (16, 0)),
    ],
    ids=str,
)
def test_tiles_of_a_gpc_share_what_they_read(problem, tile, expected):
    assert raster(tile, problem, H200) == expected


@pytest.mark.parametrize("batch", [{}, dict(batch=3, a_batch=3)], ids=str)
@pytest.mark.parametrize(("group", "along_n"), [(1, 0), (4, 0), (3, 1), (8, 1)])
@pytest.mark.parametrize("arch", [H200, B200], ids=lambda arch: arch.name)
def test_tiles_are_counted_as_kernels_walk(arch, group, along_n, batch):
    problem, tile = Problem(1100, 900, 64, **batch), Tile(128, 128, cluster_m=2)
    rows, cols = 5, 8
    walk = tile_order(rows, cols, group, along_n)._replace(is_snake=int(arch is H200))
    m, n = walked(tile, problem, arch, group, along_n)
    expected = [tile_coordinates(i, walk) for i in range(len(m))]
    own = bool(batch)
    assert len(m) == min(rows * cols * problem.batch, 2 * concurrent_clusters(tile, arch))
    assert list(zip(m, n, strict=True)) == [(m + rows * matrix * own, n) for m, n, matrix in expected]


def test_nobody_knows_who_should_run_side_by_side_on_blackwell():
    assert raster(Tile(128, 64), Problem(11008, 192, 4096), H200) == (1, 0)
    assert raster(Tile(128, 64), Problem(11008, 192, 4096), B200) == (8, 0)


@pytest.mark.parametrize(
    "m, n, k, along_n",
    [
        (4096, 128256, 4096, 0),  # MB: a 34, b 1051; in 2 groups of rows 34 + 2 * 1051, in 63 of columns 1051 + 63 * 34
        (8192, 14336, 4096, 0),  # a 67, b 117; 67 + 4 * 117 = 537, 117 + 7 * 67 = 587
        (8192, 50264, 768, 1),  # a, 13 MB, stays in the cache: 13 + 77
        (14336, 8192, 4096, 1),  # 117 + 7 * 67 rows, 67 + 4 * 117 columns
    ],
)
def test_groups_run_where_they_read_least(m, n, k, along_n):
    assert raster(Tile(128, 256, cluster_m=2), Problem(m, n, k), H200)[1] == along_n


def test_a_snake_on_hopper():
    """Measured on an H200 only."""
    assert plan(LARGE, H200).raster_order == "snake"
    assert plan(LARGE, B200).raster_order == "groups"


@pytest.mark.parametrize(
    "problem, tile, hints",
    [
        (Problem(128, 28672, 8192), Tile(128, 256), ("normal", "evict_first")),  # weights are read once
        (Problem(28672, 128, 8192), Tile(128, 128), ("evict_first", "normal")),
        (LARGE, PAIR, ("normal", "normal")),  # as many bytes of each
        (Problem(16, 2048, 4096), Tile(128, 128), ("normal", "normal")),  # 17 MB stay in the L2 cache
        (Problem(11549, 1, 6291), Tile(120, 8, direct=True), ("normal", "normal")),  # threads load
        (Problem(65536, 512, 512), Tile(128, 128), ("normal", "normal")),  # the result is as large
        (Problem(128, 1024, 4096, 64, b_batch=64), Tile(128, 128), ("normal", "evict_first")),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [H200, B200], ids=lambda arch: arch.name)
def test_a_stream_is_let_go_first(problem, tile, hints, arch):
    assert l2_hints(tile, problem, arch) == hints


@pytest.mark.parametrize(
    ("problem", "tile", "arch", "hint"),
    [
        (Problem(8192, 8192, 512), Tile(128, 256), H200, "evict_first"),  # 134 MB
        (Problem(8192, 3584, 512), Tile(128, 256), H200, "normal"),  # 59 MB
        (Problem(8192, 3584, 512), Tile(128, 256), ARCHS["h100"], "evict_first"),  # whose cache is smaller
        (Problem(8192, 2048, 512, out_dtype="float32"), Tile(128, 256), H200, "evict_first"),
        (batched(128, 2048, 2048, 128), Tile(128, 256), H200, "evict_first"),
        (Problem(8192, 8192, 512), Tile(128, 256), B200, "normal"),  # not measured
        (Problem(8192, 8192, 64), Tile(64, 256, direct=True), H200, "evict_first"),
        (Problem(8192, 8191, 64), Tile(64, 256, direct=True), H200, "normal"),  # tiles share 16 bytes of a row
        (Problem(8192, 8191, 64), Tile(128, 256), H200, "evict_first"),
        (Problem(8191, 8192, 64, c_major="m"), Tile(64, 256, direct=True), H200, "normal"),
    ],
)
def test_a_result_that_does_not_fit_is_let_go(problem, tile, arch, hint):
    assert result_hint(tile, problem, arch) == hint


@pytest.mark.parametrize(
    ("name", "is_then", "num", "bounds"),
    [
        ("h200", False, 38, (0.006, 0.013, 0.035)),
        ("h200_before", False, 114, (0.012, 0.028, 0.1)),
        ("h200_before", True, 114, (0.017, 0.042, 0.13)),
    ],
)
def test_measured_orders(name: str, is_then: bool, num: int, bounds: tuple[float, float, float]) -> None:
    """The mean, what one of ten loses, and the most, against the best order: of products that the rule had not seen,
    of those that it was made with, and of these with the orders of before."""
    arch, products = orders.load(RESULTS / f"orders/{name}.json")
    losses = []
    for tile, problem, said in products:
        chosen = said["chosen"]["orders"] if is_then else orders.order_name(*raster(tile, problem, arch))
        if chosen in said["orders"]:  # groups of 32 tiles or fewer were timed
            losses.append(orders.lost(said["orders"], chosen))
    found = regret.statistics(losses)
    assert len(losses) == num
    for value, bound in zip((found["mean"], found["90th percentile"], found["max"]), bounds, strict=True):
        assert 0.6 * bound < value < bound, found
    assert is_then or found["median"] < 0.005


def test_measured_hints() -> None:
    """What is let go first takes less so, each; of the others few would, and hardly on average."""
    arch, products = orders.load(RESULTS / "orders/h200.json")
    gains = dict[str, list[float]](normal=[], evict_first=[])
    for tile, problem, said in products:
        hints = said["hints"]
        gains[orders.hint_name(*l2_hints(tile, problem, arch))].append(hints["normal"] / hints["evict_first"] - 1)
    assert len(gains["evict_first"]) == 7 and min(gains["evict_first"]) > 0.005
    others = gains["normal"]
    assert f"the others would gain {100 * sum(others) / len(others):.1f} %" in TEXT
    assert sum(gain > 0.02 for gain in others) == 2


def test_times_follow_what_gpcs_read() -> None:
    arch, products = orders.load(RESULTS / "orders/h200_before.json")
    few = [x for x in products if num_waves(*x[:2], arch) <= order.FEW_WAVES]
    correlations, gained = [], []
    for tile, problem, said in few:
        times = said["orders"]
        ways = {way: order._gpc_bytes(tile, problem, arch, *way) for way in _ways(tile, problem)}
        ways = {way: size for way, size in ways.items() if orders.order_name(*way) in times}
        us = [times[orders.order_name(*way)] for way in ways]
        if tile.cluster_ctas > order.SPREAD_CTAS:
            least = min(ways, key=lambda way: ways[way])
            then = said["chosen"]["orders"]
            gained.append(orders.lost(times, then) - orders.lost(times, orders.order_name(*least)))
        elif max(times.values()) > 1.05 * min(times.values()):
            sizes = list(ways.values())
            correlations.append(statistics.correlation(sizes, us) if len(set(sizes)) > 1 else 0.0)
    median = statistics.median(correlations)
    assert f"Of {len(correlations)} products whose orders differ by more than 5 %" in TEXT
    assert f"a correlation of {median:.2f} or more for half" in TEXT
    assert f"of {len(gained)} such products the rule gains {100 * statistics.mean(gained):.1f} %" in TEXT


def _ways(tile: Tile, problem: Problem) -> list[tuple[int, int]]:
    """Those of the longer side first, as `raster` looks at them, and those of all tiles of a side."""
    longer = int(problem.n > problem.m)
    sizes = {*order.GROUPS, *cluster_tiles(tile, problem)}
    return [(group, side) for side in (longer, 1 - longer) for group in sorted(sizes)]


def test_the_page_has_the_losses() -> None:
    _, before = orders.load(RESULTS / "orders/h200_before.json")
    arch, drawn = orders.load(RESULTS / "orders/h200.json")
    chosen = [(said["orders"], orders.order_name(*raster(tile, x, arch))) for tile, x, said in (*before, *drawn)]
    losses = [orders.lost(times, name) if name in times else None for times, name in chosen]
    then, now, new = (
        [f"{100 * regret.statistics(of)[name]:.1f}" for name in ("mean", "90th percentile", "max")]
        for of in (
            [orders.lost(said["orders"], said["chosen"]["orders"]) for *_, said in before],
            [x for x in losses[: len(before)] if x is not None],
            [x for x in losses[len(before) :] if x is not None],
        )
    )
    assert f"{len(before)} products, random ones and ones of models' layers" in TEXT
    assert f"lost {then[0]} % on average to the best of up to twelve, {then[1]} % and more in one of ten" in TEXT
    assert f"and {then[2]} % at most; the rule, which was made with these products, loses {now[0]}, {now[1]}" in TEXT
    assert f"and {now[2]} %. Of {len(drawn)} random ones that it had not seen it loses {new[0]}, {new[1]}" in TEXT
    assert f"and {new[2]} % (`python -m jax_bwgemm bench --orders 100" in TEXT
    _, fused = orders.load(RESULTS / "orders/h200_fused.json")
    lost = regret.statistics([orders.lost(said["orders"], said["chosen"]["orders"]) for *_, said in fused])
    assert f"Of {len(fused)} layers of models with an epilogue it loses {100 * lost['mean']:.1f} %" in TEXT


def test_the_page_has_the_orders_of_the_table() -> None:
    """Of the fastest kernels."""
    records = measured.load(measured.shipped_path("h200")).records.values()
    found = {record.problem: record.times[0].order for record in records if record.times[0].order}
    name = "1*4096x8192x1024 a:1:bf16:k b:1:bf16:n c:bf16:n"
    assert (found[f"{name} bias_gelu"], found[f"{name} bias_silu_residual"]) == ((16, 1), (32, 1))
    assert "4096x8192x1024:bias+gelu, by 16 columns, and 4096x8192x1024:bias+silu+residual, by 32." in TEXT


def test_the_page_has_the_times() -> None:
    _, before = orders.load(RESULTS / "orders/h200_before.json")
    lines, rows = set(PAGE.split("\n")), 0
    for tile, _, found in before:
        asked, times = found["problem"], found["orders"]
        form = {"kn": "", "kk": ":nt", "mn": ":tn"}[asked["a_major"] + asked["b_major"]]
        names = [f"{group} along {side}" for side in "mn" for group in (1, 2, 8)]
        cells = [f"{times[x]:.1f}" if x in times else "" for x in names]
        shape = f"| {asked['m']}x{asked['n']}x{asked['k']}{form}, {tile.cta_m}x{tile.mma_n}"
        own = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines if line.startswith(shape)]
        rows += cells in own
    assert rows == 7


def test_the_page_has_the_gains() -> None:
    arch, drawn = orders.load(RESULTS / "orders/h200.json")
    first = [said["hints"] for tile, x, said in drawn if "evict_first" in l2_hints(tile, x, arch)]
    gains = [times["normal"] / times["evict_first"] - 1 for times in first]
    least, most, mean = (f"{100 * x:.1f}" for x in (min(gains), max(gains), sum(gains) / len(gains)))
    assert f"and take {least} to {most} % less with it, {mean} % on average" in TEXT
    wide = next(said["hints"] for _, x, said in drawn if (x.m, x.n) == (13128, 13680))
    assert f"13128x13680x528:tn takes {100 * (wide['evict_first'] / wide['normal'] - 1):.1f} % longer" in TEXT


class TestBench:
    """Of two clocks: one that says what it is told, and none."""

    def test_times_of_orders_and_hints(self, artifacts_dir, monkeypatch, tmp_path, capsys):
        asked = []

        def clock(problem, decisions, arch, rounds, most):
            asked.append((problem, most))
            plans = [decision.plan for decision in decisions]
            return [100.0 + plan.raster_group - 5 * ("evict_first" in (plan.a_l2, plan.b_l2)) for plan in plans]

        monkeypatch.setattr(orders, "gpu_arch", lambda who: H200)
        monkeypatch.setattr(orders, "gpu_clock", clock)
        monkeypatch.setattr(orders, "decide", lambda problem, *_: decide(problem, "h200", None))
        path = tmp_path / "orders.json"
        assert orders.main(6, 3, 15, path, "") == 0
        arch, products = orders.load(path)
        assert arch is H200 and len(products) == len(asked) / 2 and all(most == 1 for _, most in asked)

        def is_stream(tile, problem):
            return "evict_first" in l2_hints(tile, problem, H200)

        for tile, problem, said in products:
            assert said["chosen"]["orders"] == orders.order_name(*raster(tile, problem, H200))
            assert said["chosen"]["orders"] in said["orders"] and set(said["hints"]) == {"normal", "evict_first"}
            assert all(
                us == 100.0 + int(name.split()[0]) - 5 * is_stream(tile, problem) for name, us in said["orders"].items()
            )
            assert said["hints"]["normal"] == said["hints"]["evict_first"] + 5
        assert "the planner's orders lose, against the best: mean" in capsys.readouterr().out

    def test_without_kernels(self, monkeypatch, tmp_path):
        monkeypatch.setattr(orders, "gpu_arch", lambda who: H200)
        monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
        with pytest.raises(ValueError, match="`--orders` requires kernels, got none: "):
            orders.main(2, 0, 15, tmp_path / "x.json", "")
        with pytest.raises(ValueError, match="`--orders` requires bfloat16 products .*, got none of `--of parts`"):
            orders.main(3, 0, 5, tmp_path / "x.json", "", "parts")
        with pytest.raises(ValueError, match="`--orders` requires at least 1, got 0"):
            orders.main(0, 0, 15, tmp_path / "x.json", "")

    def test_a_sample_is_of_products_that_several_tiles_share(self):
        drawn = orders.sample(20, 1, H200)
        assert drawn == orders.sample(20, 1, H200) and 10 < len(drawn) <= 20
        assert all(min(x.m, x.n) >= 64 and x.k >= 256 and x.out_dtype == "bfloat16" for x in drawn)
        assert not any(padding(x, operand) for x in drawn for operand in "ab")


def test_what_a_cluster_costs_is_as_the_table_says():
    """By stream-K tiles of 128x256, alone and in 2x1: products of whole lines, and one of torn ones."""
    ways = [f"128x256x64_cta1_cluster{cluster}_streamk" for cluster in ("1x1", "2x1")]
    ratios = []
    for record in measured.load(measured.shipped_path("h200")).records.values():
        us = {time.tile: time.us for time in record.times if not time.swapped}
        m, n, k = (int(size) for size in record.problem.split()[0].split("*")[1].split("x"))
        if all(way in us for way in ways) and 2 * m * n * k > 200e9:
            alone_us, shared_us = (us[way] for way in ways)
            if (m, n, k) == (5000, 5000, 5000):
                assert f"takes {alone_us:.1f} us alone and {shared_us:.1f} in 2x1" in TEXT
            else:
                ratios.append(1 - alone_us / shared_us)
    low, middle, high = (100 * pick(ratios) for pick in (min, statistics.median, max))
    assert f"table's {len(ratios)} products of more than 200 GFLOP" in TEXT
    assert f"alone takes {low:.1f} to {high:.1f} % less (the median is {middle:.0f} %)" in TEXT
