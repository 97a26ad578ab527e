"""A result file as markdown. Measures and draws nothing.

Files of products are drawn by `render`; those of other benchmarks name theirs as `benchmark`. What has neither form is
for another command, or for who reads it (`OTHERS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm.bench import render, report
from jax_bwgemm.bench.peers import FLAG_SETS
from jax_bwgemm.bench.report import Row

Fields = Mapping[str, Any]
Lines = list[tuple[str, ...]]
STEPS = {"forward": "forward", "gradients": "and all gradients", "sums": "summed gradients"}
EVEN, SHORT_K, LONG_US = 8, 128, 10.0  # what random products are told apart by
GROUPS: Mapping[str, Callable[[Row], bool]] = {
    "all": lambda row: True,
    f"multiples of {EVEN}": lambda row: _is_even(row),
    f"k up to {SHORT_K}": lambda row: row.case.k <= SHORT_K,
    f"k above {SHORT_K}, multiples of {EVEN}": lambda row: row.case.k > SHORT_K and _is_even(row),
    f"k above {SHORT_K}, any size": lambda row: row.case.k > SHORT_K and not _is_even(row),
    f"ours takes more than {LONG_US:g} us": lambda row: row.ours.us > LONG_US,
    "k in parts": lambda row: "_f32_" in row.variant and row.case.out_dtype != "float32",
    "thin tiles": lambda row: "x8x64_" in row.variant,
    "left to XLA": lambda row: not row.variant,
}


def markdown(path: Path) -> str:
    """A result file's table, and on what it was measured; of products also what they come to. ValueError for a file
    that `bench` does not write."""
    fields = _read(path)
    kind = fields.get("benchmark")
    if kind is None:
        return render.markdown(report.load(path))
    if kind not in TABLES:
        raise ValueError(f"a result file requires one of the benchmarks {', '.join(TABLES)}, got {kind!r} in {path}")
    headings, of_row = TABLES[kind]
    try:
        table = render.as_markdown([headings, *map(of_row, fields["loads" if kind == "power" else "rows"])])
        return f"{table}\n\n{_conditions(fields['machine'])}"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a result file requires what this version of `bench` writes, got {path}: {error}") from error


def groups(path: Path) -> Lines:
    """Of random products: geometric means over kinds of them."""
    found = report.load(path).rows
    own = {name: [row for row in found if is_of(row)] for name, is_of in GROUPS.items()}
    headings = ("random products", "rows", "ratio to default", "ratio to best")
    return [headings, *((name, str(len(rows)), *_means(rows)) for name, rows in own.items() if rows)]


def samples(directory: Path) -> Lines:
    """A line for each file of random products, the latest first."""
    found = {path.stem: report.load(path) for path in directory.glob("*.json")}
    headings = ("sample", "date", "commit", "rows", "ratio to default", "ratio to best", "under 0.95", "under 0.85")
    order = sorted(found, key=lambda name: (found[name].arch, found[name].machine["date"], name), reverse=True)
    return [headings, *(_sample(name, found[name]) for name in order)]


def behind(path: Path) -> list[str]:
    """A paragraph below the groups of random products: how many lose, and the one that loses most."""
    result = report.load(path)
    least, num = min(result.rows, key=lambda row: row.to_best), len(result.rows)
    counts = [sum(row.to_best < bound for row in result.rows) for bound in (report.BEHIND, 0.95, 0.85)]
    return [
        f"{counts[0]} of the {num} are under {report.BEHIND} to best, {counts[1]} under 0.95, {counts[2]} under 0.85; "
        f"the least is {least.to_best:.3f} ({least.shape}).",
        *render.notes(result)[:1],
    ]


def _read(path: Path) -> Fields:
    try:
        fields: Any = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise ValueError(f"one object is required, got {type(fields).__name__}")
    except (OSError, ValueError) as error:
        raise ValueError(f"a result file requires what this version of `bench` writes, got {path}: {error}") from error
    if "benchmark" in fields or "rows" in fields:
        return fields
    kind = next((kind for has, kind in OTHERS.items() if has <= fields.keys()), "another file")
    raise ValueError(f"`--render` requires a result of products or of {', '.join(TABLES)}, got {path}: {kind}")


def _conditions(known: Mapping[str, str]) -> str:
    names = ("name", "date", "commit", "jax", "driver_version")
    return ", ".join(known[name] if name == "name" else f"{name} {known[name]}" for name in names if known.get(name))


def _us(*times: float) -> tuple[str, ...]:
    return tuple(f"{time:.1f}" for time in times)


def _ratios(ours: float, *others: float) -> tuple[str, ...]:
    return tuple(f"{other / ours:.3f}" for other in others)


def _default_and_best(times: Mapping[str, float]) -> tuple[float, float]:
    return times["default"], min(times[name] for name in FLAG_SETS)


def _mesh(row: Fields) -> tuple[str, ...]:
    return row["name"], *_us(row["ours_us"], row["jnp_us"]), f"{row['ratio']:.3f}"


def _layer(row: Fields) -> tuple[str, ...]:
    layer, times = row["layer"], row["times_us"]
    kind = "gated" if layer["is_gated"] else "biased"
    what = f"{layer['tokens']} x {layer['width']} -> {layer['ffn']}, {kind} {layer['activation']}: {STEPS[row['step']]}"
    accelerated = f"{times['accelerated']:.1f}" if "accelerated" in times else "-"
    xlas = _default_and_best(times)
    return what, *_us(times["ours"]), accelerated, *_us(times["installed"], *xlas), *_ratios(times["ours"], *xlas)


def _block(row: Fields) -> tuple[str, ...]:
    block, times = row["block"], row["times_us"]
    ways = [times.get(name) for name in ("ours", "ours, fused", "ours, accelerated")]
    xlas = _default_and_best(times)
    shown = [f"{way / 1000:.2f}" if way else "-" for way in (*ways, *xlas)]
    least = min(filter(None, ways))
    return f"attention by {block['attention']}", *shown, *_ratios(times["ours"], *xlas), *_ratios(least, *xlas)


def _collective(row: Fields) -> tuple[str, ...]:
    times = row["times_us"]
    fastest, alone = times[row["fastest"]], times["ours, not overlapped"]
    return (
        row["name"],
        *_us(fastest, times["ours, default"], alone, times["jnp"], row["bound_us"]),
        *_ratios(fastest, alone),
    )


def _decode(row: Fields) -> tuple[str, ...]:
    accelerated = f"{row['accelerated_us']:.1f}" if "accelerated_us" in row else "-"
    what = f"{row['form']}, {row['options']}"
    return what, *_us(row["ours_us"]), accelerated, *_us(row["xla_us"]), *_ratios(row["ours_us"], row["xla_us"])


def _gram(row: Fields) -> tuple[str, ...]:
    times, (m, k) = row["times_us"], row["shape"]
    xlas = _default_and_best(times)
    return f"{row['name']} of {m} x {k}", *_us(times["ours"], *xlas), *_ratios(times["ours"], *xlas)


def _load(load: Fields) -> tuple[str, ...]:
    return load["product"], f"{load['tflops']:.1f}", f"{load['pj_per_flop']:.3f}"


def _sample(name: str, result: report.Result) -> tuple[str, ...]:
    rows, machine = result.rows, result.machine
    under = [str(sum(row.to_best < bound for row in rows)) for bound in (0.95, 0.85)]
    return name, machine["date"], machine["commit"][:7], str(len(rows)), *_means(rows), *under


def _means(rows: Sequence[Row]) -> tuple[str, str]:
    found = report.summary(rows)
    return f"{found.to_default:.3f}", f"{found.to_best:.3f}"


def _is_even(row: Row) -> bool:
    return all(math.gcd(size, EVEN) == EVEN for size in (row.case.m, row.case.n, row.case.k))


WAYS = "`install()`", "fused by hand", "`accelerate`"
OURS = WAYS[0], "our fastest"
PEERS = "XLA default", "best flags", "default / ours", "best / ours"
# Files of measurements that are no tables, by keys that all of one kind have.
OTHERS: Mapping[frozenset[str], str] = {
    frozenset({"tiles", "products"}): "times that `--regret` wrote, which `--calibrate`, `--fit` and `--spare` read",
    frozenset({"facts", "products"}): "times that `--orders` wrote, which it has printed a summary of",
    frozenset({"machine", "minutes"}): "findings that `--soak` wrote, which it has printed",
    frozenset({"records"}): "a table of measured times that `--tune` wrote, which the planner reads",
}
TABLES: Mapping[str, tuple[tuple[str, ...], Callable[[Fields], tuple[str, ...]]]] = {
    "layers": (("us", "ours", "`accelerate`", "`install()`", *PEERS), _layer),
    "models": (("ms", *WAYS, *PEERS[:2], *(f"{xla} / {ours}" for ours in OURS for xla in ("default", "best"))), _block),
    "meshes": (("us", "ours", "jnp", "jnp / ours"), _mesh),
    "collectives": (
        ("us", "overlapped", "with default flags", "not overlapped", "jnp", "bound", "not / overlapped"),
        _collective,
    ),
    "decode": (("us", "`install()`", "`accelerate`", "XLA", "XLA / `install()`"), _decode),
    "gram": (("us", "ours", *PEERS), _gram),
    "power": (("8192x8192x8192", "TFLOP/s", "pJ a FLOP"), _load),
}
