"""Draws a result with matplotlib: a roofline, and the ratios to XLA. The same result gives the same SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_bwgemm.bench.report import Result, Row, summary
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.problem import DTYPE_SHORT

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("plots require matplotlib, which is not installed: pip install matplotlib") from error

OURS, PEER, LIMIT = "#1b6ca8", "#e07b39", "#707070"
STYLE = {"svg.hashsalt": "jax_bwgemm", "svg.fonttype": "none", "font.size": 9, "axes.axisbelow": True}
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def draw(result: Result, folder: Path) -> list[Path]:
    """Writes roofline.{svg,png} and ratios.{svg,png} into `folder`, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, figure in (("roofline", _roofline(result)), ("ratios", _ratios(result))):
            for suffix, metadata in METADATA.items():
                paths.append(folder / f"{name}.{suffix}")
                figure.savefig(paths[-1], dpi=150, bbox_inches="tight", metadata=metadata)
    return paths


def _roofline(result: Result) -> Figure:
    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot(xscale="log", yscale="log")
    intensities = [row.case.flops / row.case.min_bytes for row in result.rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    _limits(axes, result, ARCHS[result.arch], low, high)
    for label, color, marker, times_us in (
        ("XLA, best flags", PEER, "x", [row.best[1].us for row in result.rows]),
        ("ours", OURS, "o", [row.ours.us for row in result.rows]),
    ):
        rates = [row.case.flops / us / 1e6 for row, us in zip(result.rows, times_us, strict=True)]
        axes.scatter(intensities, rates, 24, color=color, marker=marker, label=label, zorder=3)
    axes.set(xlim=(low, high), xlabel="FLOP / byte of operands and result", ylabel="TFLOP/s")
    axes.set_title(_title(result))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _limits(axes: Axes, result: Result, arch: Arch, low: float, high: float) -> None:
    """The memory's slope, and the tensor cores' peak for each dtype that was measured."""
    peaks: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(row.case.dtype for row in result.rows):
        peaks.setdefault(arch.num_sms * arch.clock_ghz * arch.flops_per_clk(dtype) / 1e3, []).append(DTYPE_SHORT[dtype])
    slope = arch.memory_tb_per_s
    text: dict[str, Any] = {"textcoords": "offset points", "color": LIMIT}
    for peak, dtypes in sorted(peaks.items()):
        ridge = peak / slope
        places = [min(low, ridge), ridge, max(high, ridge)]
        axes.plot(places, [slope * places[0], peak, peak], color=LIMIT, linewidth=1)
        axes.annotate(f"{', '.join(dtypes)}: {peak:.0f} TFLOP/s", (high, peak), (4, -3), annotation_clip=False, **text)
    axes.annotate(f"{slope} TB/s", (low, slope * low), (4, 40), **text)


def _ratios(result: Result) -> Figure:
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(result.rows)))
    axes = figure.add_subplot()
    places = range(len(result.rows))
    to_default, to_best = [row.to_default for row in result.rows], [row.to_best for row in result.rows]
    found = summary(result.rows)
    axes.barh([y - 0.2 for y in places], to_default, 0.38, color=PEER, label=f"default (mean {found.to_default:.3f})")
    axes.barh([y + 0.2 for y in places], to_best, 0.38, color=OURS, label=f"best flags (mean {found.to_best:.3f})")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(list(places), [_label(row) for row in result.rows])
    axes.set(ylim=(len(result.rows) - 0.5, -0.5), xlabel="XLA's time / ours: above 1 ours is faster")
    axes.set_title(_title(result))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _label(row: Row) -> str:
    return row.shape if row.variant else f"{row.shape} (ours: XLA)"


def _title(result: Result) -> str:
    facts = (result.machine.get(name, "") for name in ("name", "date", "commit"))
    return ", ".join(fact for fact in facts if fact)
