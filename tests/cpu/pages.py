"""The pages of the documentation, and what is quoted in them: code, commands, messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOT_RUN = "# needs a GPU"  # how a block begins that nothing runs here, for readers too
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
_COMMAND = re.compile(r"(?:\.venv/bin/)?python -m jax_bwgemm((?: +[^`\n#|]+)?)")


@dataclasses.dataclass(frozen=True)
class Block:
    """Between two fences. `line`: where it begins; `output`: the text block right behind it, which it prints."""

    language: str
    text: str
    line: int
    output: str | None = None

    @property
    def is_run(self) -> bool:
        return not self.text.startswith(NOT_RUN)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """All fenced ones, in order."""
    text, found = page.read_text(), []
    matches = list(_FENCE.finditer(text))
    for i, match in enumerate(matches):
        line = text.count("\n", 0, match.start()) + 2
        after = matches[i + 1] if i + 1 < len(matches) else None
        is_output = after and after[2] == "text" and not text[match.end() : after.start()].strip()
        indent = len(match[1])
        own = "\n".join(row[indent:] for row in match[3].splitlines()) + "\n"
        found.append(Block(match[2].partition(" ")[0], own, line, after[3] if after and is_output else None))
    return found


def commands(page: Path) -> Iterator[str]:
    """The arguments of every `python -m jax_bwgemm`, wherever it stands."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    return (match[1].strip() for match in _COMMAND.finditer(text))


def messages(page: Path) -> list[str]:
    """What headings quote, `...` for what differs."""
    return [match[2] for match in re.finditer(r"^#{2,4} (`+) ?(.+?) ?\1$", page.read_text(), re.M)]
