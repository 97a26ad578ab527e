"""`bench --fill`: the tables of a page anew, each from the result file that the comment before it names:

    <!-- table of layers/h200.json -->
    ...
    <!-- end -->

In the place of `table` it may be `loads` (sustained ones), `mean` (of a file's products), `groups` (of random products)
or `samples` (of a directory of such).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from jax_bwgemm.bench import render, report, tables
from jax_bwgemm.bench.machine import RESULTS

BLOCK = re.compile(r"<!-- (?P<view>\w+) of (?P<name>\S+) -->\n(?:(?!<!-- ).*\n)*<!-- end -->")
VIEWS: Mapping[str, Callable[[Path], list[str]]] = {
    "table": lambda path: [tables.markdown(path)],
    "loads": lambda path: [render.as_markdown(render.load_lines(report.load(path)))],
    "mean": lambda path: [render.summary_line(report.load(path))],
    "groups": lambda path: [render.as_markdown(tables.groups(path)), *tables.behind(path)],
    "samples": lambda path: [render.as_markdown(tables.samples(path))],
}


def main(path: Path) -> int:
    """Rewrites `path`. ValueError if it has no such comments, or one names what is none."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(
            f"`--fill` requires a page that can be read, got {path}: {error.strerror}; name one such as docs/results.md"
        ) from None
    path.write_text(filled(text, path))
    print(f"filled {len(BLOCK.findall(text))} places of {path}")
    return 0


def filled(text: str, path: Path, results: Path = RESULTS) -> str:
    """`text`, which is that of `path`, with what `results` have."""
    if not BLOCK.search(text):
        raise ValueError(f"`--fill` requires a page with comments such as `<!-- table of h200.json -->`, got {path}")
    return BLOCK.sub(lambda found: _block(found["view"], found["name"], results), text)


def _block(view: str, name: str, results: Path) -> str:
    if view not in VIEWS:
        raise ValueError(f"what a page shows of a result requires one of {', '.join(VIEWS)}, got {view!r} of {name}")
    shown = "\n\n".join(VIEWS[view](results / name))
    return f"<!-- {view} of {name} -->\n{shown}\n<!-- end -->"
