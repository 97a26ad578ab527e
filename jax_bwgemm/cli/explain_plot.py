"""What `explain --plot` draws: a product's tiles, the waves in which they run and their order; or what share of a
function's time each of its products takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jax_bwgemm.bench.plots import METADATA, STYLE  # which says what is missing without matplotlib
from jax_bwgemm.explain import Explanation, FunctionExplanation
from jax_bwgemm.facts.geometry import ceil_div, cluster_tiles, concurrent_clusters, num_tiles
from jax_bwgemm.kernels.scheduler import Arithmetic, tile_coordinates, tile_order
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.planner.plan import Plan

import matplotlib  # isort: skip
from matplotlib.axes import Axes  # isort: skip
from matplotlib.figure import Figure  # isort: skip
from matplotlib.ticker import MaxNLocator  # isort: skip

MOST_TILES = 2**22  # a second and 100 MB
MOST_PATH = 2000  # tiles; of more, the colours alone show the order
MOST_BARS = 500
MOST_TEXT = 120  # characters
ON_ARRAYS = Arithmetic(np.minimum, np.where, lambda x, y: x * y >> 32)  # of so few tiles no product passes int64
OURS, SHARED = "#1b6ca8", "#e07b39"


def product(explanation: Explanation, path: Path) -> None:
    """The first result of the batch in cluster tiles, coloured by wave, with a line along their order; and how many
    clusters each wave keeps busy. ValueError where XLA computes it, or of too many tiles."""
    plan = explanation.plan
    if plan is None or plan.tile is None or explanation.variant is None:
        raise ValueError(f"`--plot` requires a product that a kernel computes, got XLA's: {explanation.reason}")
    tiles_m, tiles_n = cluster_tiles(plan.tile, plan.problem)
    if tiles_m * tiles_n > MOST_TILES:
        raise ValueError(f"`--plot` requires at most {MOST_TILES} cluster tiles, got {tiles_m * tiles_n}")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.5), layout="constrained")
        tiles, waves = figure.subplots(1, 2, width_ratios=(3, 2))
        _tiles(tiles, plan)
        _waves(waves, plan)
        figure.suptitle(f"{explanation.problem} on {plan.arch.name}\n{explanation.variant}")
        _save(figure, path)


def _tiles(axes: Axes, plan: Plan) -> None:
    assert plan.tile is not None  # the caller has one
    size = cluster_tiles(plan.tile, plan.problem)
    along_n, is_snake = plan.raster_along_n, RASTER_ORDERS.index(plan.raster_order)
    order = tile_order(*size, plan.raster_group, along_n, is_snake)
    m, n, _ = tile_coordinates(np.arange(size[0] * size[1]), order, ON_ARRAYS)
    rows, cols = (n, m) if plan.swapped else (m, n)  # of the caller's result
    clusters, whole = concurrent_clusters(plan.tile, plan.arch), num_tiles(plan.tile, plan.problem) - plan.stream.tiles
    wave = np.empty(size[::-1] if plan.swapped else size)
    wave[rows, cols] = np.minimum(np.arange(rows.size), whole) // clusters
    axes.imshow(wave, aspect="auto", cmap="viridis", interpolation="nearest")
    if rows.size <= MOST_PATH:
        axes.plot(cols, rows, color="white", linewidth=0.8, alpha=0.8)
        axes.plot(cols[0], rows[0], "o", color="white", markersize=4)
    if whole < rows.size:
        axes.plot(cols[whole:], rows[whole:], "x", color=SHARED, markersize=4, label="divided along k")
        axes.legend(loc="lower right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    height, width = plan.tile.cluster_m * plan.tile.cta_m, plan.tile.cluster_n * plan.tile.mma_n
    tall, wide = (width, height) if plan.swapped else (height, width)
    axes.set(xlabel=f"cluster tiles of {wide} columns", ylabel=f"cluster tiles of {tall} rows")
    axes.set_title("coloured by wave; a line along their order" + (", as C^T" if plan.swapped else ""))


def _waves(axes: Axes, plan: Plan) -> None:
    """Of the whole batch; a stream comes last, between the clusters that share it."""
    assert plan.tile is not None and plan.chosen is not None
    clusters, whole = concurrent_clusters(plan.tile, plan.arch), num_tiles(plan.tile, plan.problem) - plan.stream.tiles
    num = ceil_div(whole, clusters)
    shown = np.unique(np.linspace(0, num - 1, min(num, MOST_BARS)).astype(int))
    axes.bar(shown, np.minimum(clusters, whole - shown * clusters), width=0.95 * max(1.0, num / MOST_BARS), color=OURS)
    if plan.stream.tiles:
        text = f"{plan.stream.tiles} tiles, divided along k"
        axes.bar(num, plan.stream.clusters, width=0.95, color=SHARED, label=text)
        axes.legend(loc="lower right")
    axes.axhline(clusters, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="wave", ylabel="clusters at work", ylim=(0, 1.1 * clusters))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{clusters} clusters of {plan.tile.cluster_ctas} CTAs run at once\n{_time(plan.chosen)}")


def _time(chosen: Candidate) -> str:
    if chosen.measured_us is not None:
        return f"measured {chosen.measured_us:.1f} us"
    return f"predicted {chosen.cost.us:.1f} us" if chosen.cost else "of unknown time"


def function(explanation: FunctionExplanation, path: Path) -> None:
    """A bar a product, as long as its share of the predicted time; XLA's, of which nobody predicts it, have none."""
    products = explanation.products
    if not products:
        raise ValueError("`--plot` requires a function with products, got none")
    total = sum(product.us for product in products)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.5 + 0.45 * len(products)), layout="constrained")
        axes = figure.subplots()
        for i, product in enumerate(products):
            share = 100 * product.us / total if total else 0.0
            text = f"{product.us:.1f} us, {product.kernel}" if product.kernel else f"XLA's, because {product.reason}"
            axes.barh(i, share, color=OURS)
            is_inside = share > 50
            at, color, side = (share - 1, "white", "right") if is_inside else (share + 1, "black", "left")
            axes.text(at, i, text[:MOST_TEXT], va="center", ha=side, color=color, fontsize=7)
        labels = [f"{product.where.rpartition('/')[2]}\n{product.problem.partition(' ')[0]}" for product in products]
        axes.set_yticks(range(len(products)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="% of the predicted time of our kernels", xlim=(0, 100))
        axes.set_title(f"{len(products)} products, predicted to take {total:.1f} us")
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata=METADATA.get(path.suffix[1:]))
