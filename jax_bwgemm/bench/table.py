"""Draws a result on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jax_bwgemm.bench.report import HEADINGS, Result, cells, conditions

MIN_WIDTH = 110  # a log is no terminal: without this its table would be cut at 80 columns


def show(result: Result) -> None:
    table = Table(title=result.machine.get("name", result.arch))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*cells(row))
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)
    console.print(conditions(result))
    for shape, reason in result.skipped.items():
        console.print(f"not measured: {shape}: {reason}")
