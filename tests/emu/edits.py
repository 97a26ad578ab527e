"""Edits of PTX text that break a kernel in one place. Sites are found by what stands near them, not by line numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

Lines = list[str]
Edit = Callable[[Lines], Lines]

SCRATCH = "%mutant"  # a 32-bit register that `prepared` declares


@dataclasses.dataclass(frozen=True)
class At:
    """Lines that match `what`: all of them, or only the nearest one above the first `before` or below the last `after`.

    `last` counts `before` from the end.
    """

    what: str
    before: str = ""
    after: str = ""
    last: bool = False

    def find(self, lines: Lines) -> list[int]:
        found = [i for i, line in enumerate(lines) if re.search(self.what, line)]
        if self.before:
            anchor = self._anchor(lines, self.before, self.last)
            found = [i for i in found if i < anchor][-1:]
        if self.after:
            anchor = self._anchor(lines, self.after, True)
            found = [i for i in found if i > anchor][:1]
        if not found:
            raise LookupError(f"no line of the kernel is {self}")
        return found

    def _anchor(self, lines: Lines, pattern: str, last: bool) -> int:
        found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
        if not found:
            raise LookupError(f"`{pattern}` is not in the kernel")
        return found[-1 if last else 0]


@dataclasses.dataclass(frozen=True)
class AllButLast(At):
    """Lines that match `what`, except the last one."""

    def find(self, lines: Lines) -> list[int]:
        return super().find(lines)[:-1]


@dataclasses.dataclass(frozen=True)
class Nth(At):
    """Only one of them, by its index."""

    index: int = 0

    def find(self, lines: Lines) -> list[int]:
        found = super().find(lines)
        if not -len(found) <= self.index < len(found):
            raise LookupError(f"{len(found)} lines of the kernel match {self}")
        return [found[self.index]]


@dataclasses.dataclass(frozen=True)
class Near(At):
    """The nearest one above the line that is `to`, or below it."""

    to: At = At("")
    below: bool = False

    def find(self, lines: Lines) -> list[int]:
        (anchor,), found = self.to.find(lines), super().find(lines)
        nearest = [i for i in found if i > anchor][:1] if self.below else [i for i in found if i < anchor][-1:]
        if not nearest:
            raise LookupError(f"no line of the kernel is {self}")
        return nearest


def mutated(text: str, edit: Edit) -> str:
    """The module after an edit of the body of its kernel."""
    declared = re.sub(r"(\.reg \.pred[^;]*;)", rf".reg .b32 {SCRATCH}; \1", text, count=1)
    return "\n".join(edit(declared.split("\n")))


def both(first: Edit, second: Edit) -> Edit:
    return lambda lines: second(first(lines))


def drop(at: At) -> Edit:
    return change(at, r".*", "")


def change(at: At, old: str, new: str | Callable[[re.Match[str]], str]) -> Edit:
    """Replaces the first match of `old` in each of the lines."""

    def edit(lines: Lines) -> Lines:
        lines = list(lines)
        for i in at.find(lines):
            changed = re.sub(old, new, lines[i], count=1)
            if changed == lines[i]:
                raise LookupError(f"`{old}` does not change `{lines[i].strip()}`")
            lines[i] = changed
        return lines

    return edit


def number(at: At, function: Callable[[int], int]) -> Edit:
    """Changes the last number of each line."""
    return change(at, r"\d+(?=[\];]*$)", lambda match: str(function(int(match[0]))))


def operand(at: At, which: str, instruction: str) -> Edit:
    """Replaces a register operand, the first group of `which`, by what `instruction` makes of it: "xor.b32 {}, 1"."""

    def edit(lines: Lines) -> Lines:
        lines = list(lines)
        for i in reversed(at.find(lines)):
            match = re.search(which, lines[i])
            if match is None:
                raise LookupError(f"`{which}` is not in `{lines[i].strip()}`")
            opcode, _, rest = instruction.format(match[1]).partition(" ")
            lines[i] = lines[i][: match.start(1)] + SCRATCH + lines[i][match.end(1) :]
            lines.insert(i, f"{opcode} {SCRATCH}, {rest};")
        return lines

    return edit


def copy(at: At, source: At, what: str) -> Edit:
    """The first match of `what` is what it is in the line `source`."""

    def edit(lines: Lines) -> Lines:
        match = re.search(what, lines[source.find(lines)[0]])
        if match is None:
            raise LookupError(f"`{what}` is not in the line of {source}")
        return change(at, what, match[0])(lines)

    return edit


def move(at: At, above: At, through: str = "") -> Edit:
    """Moves one line, or the lines down to the first that matches `through`, to just above another."""

    def edit(lines: Lines) -> Lines:
        (first,) = at.find(lines)
        last = next(i for i in range(first, len(lines)) if re.search(through, lines[i]))
        rest = lines[:first] + lines[last + 1 :]
        target = above.find(rest)[0]
        return rest[:target] + lines[first : last + 1] + rest[target:]

    return edit
