"""A result as text: table cells, conditions, markdown. Measures nothing; `table` draws the same on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence

from jax_bwgemm.bench.peers import FLAG_SETS
from jax_bwgemm.bench.report import BEHIND, Load, Result, Row, limits_us, summary
from jax_bwgemm.facts.arch import ARCHS

Column = tuple[str, Callable[[Row], str]]
LOAD_HEADINGS = (
    "sustained shape", "product", "burst TFLOP/s", "to default", "sustained TFLOP/s", "to default", "s", "SM MHz", "W",
    "max C",
)  # fmt: skip


def columns(arch: str, peers: Collection[str]) -> Sequence[Column]:
    """(heading, cell) of a result on `arch` in which `peers` were asked for."""
    best: Sequence[Column] = (("best flags us", _best), ("ratio to best", lambda row: f"{row.to_best:.3f}"))
    pallas: Sequence[Column] = (
        ("Pallas us", lambda row: f"{row.peers['pallas'].us:.1f}" if "pallas" in row.peers else "-"),
        ("ratio to Pallas", lambda row: "-" if row.to_pallas is None else f"{row.to_pallas:.3f}"),
    )
    others = [pair for pair, is_asked in ((best, _has_best(peers)), (pallas, "pallas" in peers)) if is_asked]
    return [
        ("shape m x n x k", lambda row: row.shape),
        ("ours us", lambda row: f"{row.ours.us:.1f}" + ("" if row.variant else " (XLA)")),
        ("XLA us", lambda row: f"{row.default.us:.1f}"),
        *(us for us, _ in others),
        ("ratio to default", lambda row: f"{row.to_default:.3f}"),
        *(ratio for _, ratio in others),
        ("rate", lambda row: _rate(row, arch)),
        ("of limit", lambda row: f"{100 * row.of_limit:.0f} %"),
    ]


def lines(result: Result) -> list[tuple[str, ...]]:
    """The headings, then a line a row."""
    table = columns(result.arch, asked(result))
    return [tuple(heading for heading, _ in table), *(cells(row, table) for row in result.rows)]


def asked(result: Result) -> set[str]:
    """The peers that were to be measured."""
    return {name for row in result.rows for name in (*row.peers, *row.unavailable)}


def cells(row: Row, table: Sequence[Column]) -> tuple[str, ...]:
    return tuple(cell(row) for _, cell in table)


def load_lines(result: Result) -> list[tuple[str, ...]]:
    """The headings, then a line a load, beside what its row reached; none if there was none."""
    return [LOAD_HEADINGS, *(_load_cells(load, result) for load in result.sustained)] if result.sustained else []


def _load_cells(load: Load, result: Result) -> tuple[str, ...]:
    burst = ("-", "-")
    for row in result.rows:
        if row.shape == load.shape:
            us = row.ours.us if load.product == "ours" else row.peers[load.product].us
            burst = f"{row.case.flops / us / 1e6:.1f}", f"{row.default.us / us:.3f}"
    default = next(other for other in result.sustained if (other.shape, other.product) == (load.shape, "default"))
    sustained = f"{load.tflops:.1f}", f"{load.tflops / default.tflops:.3f}"
    sampled = (f"{x:.0f}" if load.samples else "-" for x in (load.clock_mhz, load.power_w, load.temperature_c))
    return (load.shape, load.product, *burst, *sustained, f"{load.seconds:.0f}", *sampled)


def markdown(result: Result) -> str:
    """Its tables, with the conditions and the summary under them."""
    tables = [as_markdown(table) for table in (lines(result), load_lines(result)) if table]
    return "\n\n".join([*tables, *notes(result)])


def notes(result: Result) -> list[str]:
    """Paragraphs: how and on what the numbers were taken, errors, what was not available, and last the summary."""
    skipped = [f"Not measured: {shape}: {reason}" for shape, reason in result.skipped.items()]
    return [_conditions(result), _errors(result), *_unavailable(result), *skipped, summary_line(result)]


def summary_line(result: Result) -> str:
    found, peers = summary(result.rows), asked(result)
    means, end = [f"{found.to_default:.3f} to default"], "."
    if _has_best(peers):
        least = min(result.rows, key=lambda row: row.to_best)
        means = [*means, f"{found.to_best:.3f} to best"]
        end = f"; {found.behind_best} below {BEHIND} to best, the least {least.to_best:.3f} ({least.shape})."
    if to_pallas := [row.to_pallas for row in result.rows if row.to_pallas is not None]:
        of = "" if len(to_pallas) == found.rows else f" (of {len(to_pallas)})"
        means.append(f"{statistics.geometric_mean(to_pallas):.3f} to Pallas{of}")
    return f"Geometric mean of {found.rows} rows: {', '.join(means)}{end}"


def _has_best(peers: Collection[str]) -> bool:
    """Whether there is a set of flags to be the best beside the default one."""
    return not FLAG_SETS.keys().isdisjoint({*peers} - {"default"})


def _conditions(result: Result) -> str:
    known = [f"{name} {value}" for name, value in result.machine.items() if name != "name"]
    rounds = sorted({row.rounds for row in result.rows})
    between = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    rests = f" in bursts, each followed by a rest {result.pause:g} times as long" if result.pause else ""
    processes = sorted({row.processes for row in result.rows})
    over = f" in {' to '.join(map(str, processes))} processes" if processes[-1] > 1 else ""
    text = (
        f"{result.machine.get('name', result.arch)}, {', '.join(known)}. {result.method}{rests}, median of {between} "
        f"alternating rounds{over}, standard normal inputs. Ratios: the peer's time over ours; best: of XLA's sets of "
        "flags. Limit: the tensor cores at the highest clock, or every operand once at "
        f"{ARCHS[result.arch].memory_tb_per_s} TB/s, which what mostly reads may pass."
    )
    if fallen := [row.shape for row in result.rows if not row.variant]:
        text += f" (XLA): left to XLA, so both are XLA's: {', '.join(fallen)}."
    if result.handler:
        own, total, calls = (result.handler[name] for name in ("own_us", "total_us", "calls"))
        text += f" Launch handler over {calls:.0f} calls: median {total:.2f} us, {own:.2f} us without cuLaunchKernelEx."
    return text


def _errors(result: Result) -> str:
    worst = max(result.rows, key=lambda row: row.error_ratio)
    return (
        f"Relative errors against float64: at most {worst.error_ratio:.3f} times jnp.dot's "
        f"({worst.shape}: {worst.ours.error:.2e} and {worst.default.error:.2e})."
    )


def _unavailable(result: Result) -> list[str]:
    """Sets of flags that failed, and a peer that no row has. Others' reasons differ from row to row and are in the
    file."""
    measured = {name for row in result.rows for name in row.peers}
    reasons = [
        f"{name} not available: {why}"
        for row in result.rows
        for name, why in row.unavailable.items()
        if name in FLAG_SETS or name not in measured
    ]
    return [f"{reason} (rows: {reasons.count(reason)})." for reason in dict.fromkeys(reasons)]


def _best(row: Row) -> str:
    name, times = row.best
    return f"{times.us:.1f}" + (f" ({name})" if name != "default" else "")


def _rate(row: Row, arch: str) -> str:
    """Of what bounds the case."""
    compute_us, memory_us = limits_us(row.case, ARCHS[arch])
    if compute_us < memory_us:
        return f"{row.case.min_bytes / row.ours.us / 1e6:.2f} TB/s"
    return f"{row.case.flops / row.ours.us / 1e6:.0f} TFLOP/s"


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """Numbers, which stand behind the first column, to the right."""
    headings, *rows = table
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))
