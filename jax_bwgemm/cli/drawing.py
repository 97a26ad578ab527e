"""Progress bars and tables of commands; plain or none where rich is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(num_done, num_all)`. Draws nothing where rich is not installed, or until there is something."""
    if importlib.util.find_spec("rich") is None:
        yield lambda num_done, num_all: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda num_done, num_all: bar.update(task, completed=num_done, total=num_all, visible=True)


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """The first column is text, the others are aligned to the right."""
    if importlib.util.find_spec("rich") is None:
        print(title, *("  ".join(map(str, row)) for row in [headings, *rows]), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
