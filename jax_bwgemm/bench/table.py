"""Draws a result on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jax_bwgemm.bench.render import lines, load_lines, notes
from jax_bwgemm.bench.report import Result

MIN_WIDTH = 160  # a log is no terminal: without this its table would be cut at 80 columns


def show(result: Result) -> None:
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(_table(result.machine.get("name", result.arch), lines(result)))
    if loads := load_lines(result):
        console.print(_table("Sustained", loads))
    for note in notes(result):
        console.print(note, highlight=False, markup=False)


def _table(title: str, table: Sequence[Sequence[str]]) -> Table:
    headings, *rows = table
    drawn = Table(title=title)
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == headings[0] else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn
