"""The Hopper loops in the emulator: the same work, counted, and what of it overlaps. `hopper.py` prints the table."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from _cli import counts
from _common import BOUND, emulate, operands, relative_error, rung_of

from jax_bwgemm.emulator import Observer, Schedule

SHAPE = (512, 512, 512)  # 8 CTA tiles, 8 steps of k
LAZY = Schedule.standard()[
    1
]  # an operation completes when somebody waits for it, so what is in flight may be in flight


class Overlap(Observer):
    """Of CTA 0. Each warp multiplies a step of k as one group of wgmmas; the first that does is watched.

    `ahead`: the most steps whose loads were issued before their wgmmas. `groups`: the most groups in flight.
    `overlapped` of `steps`: those whose wgmmas were issued while a load was in flight.
    """

    def __init__(self) -> None:
        self.ahead = self.groups = self.overlapped = self.steps = self.loaded = 0
        self.warp: int | None = None
        self.in_flight: collections.Counter[str] = collections.Counter()

    def issued(self, op: Any, now: int) -> None:
        if not self._is_watched(op):
            return
        if op.kind == "mma":
            self.steps += 1
            self.overlapped += self.in_flight["load"] > 0
        elif op.label.startswith("a"):
            self.loaded += 1
        self.in_flight[op.kind] += 1
        self.ahead = max(self.ahead, self.loaded - self.steps)
        self.groups = max(self.groups, self.in_flight["mma"])

    def completed(self, op: Any, now: int) -> None:
        if self._is_watched(op):
            self.in_flight[op.kind] -= 1

    def _is_watched(self, op: Any) -> bool:
        if op.where.cta != 0 or op.kind not in ("mma", "load"):
            return False
        if op.kind == "mma" and self.warp is None:
            self.warp = op.where.warp
        return op.kind == "load" or op.where.warp == self.warp


def seen(name: str, kind: str = "integers") -> tuple[dict[str, int], Overlap]:
    """What one rung moved and issued, and how it overlapped; its product must come out."""
    rung, overlap = rung_of(name), Overlap()
    a, b = operands(kind, SHAPE)
    c, counters = emulate(rung, a, b, LAZY, overlap)
    if not relative_error(c, a, b) <= BOUND:
        raise SystemExit(f"{name}: the product is wrong")
    return counts(rung, SHAPE, counters), overlap


def row(name: str) -> list[str]:
    found, overlap = seen(name)
    both = found["bytes of A"] + found["bytes of B"]
    work = [f"{both:,}", f"{found['MMA instructions']}", f"{found['barrier waits']}"]
    return [f"`{name}`", *work, f"{overlap.ahead}", f"{overlap.groups}", f"{overlap.overlapped} of {overlap.steps}"]


def table(rungs: Sequence[str]) -> str:
    """Markdown."""
    work = ["A and B, bytes", "MMAs", "barrier waits"]
    headings = ["loop", *work, "steps loaded ahead", "groups in flight", "steps multiplied beside a load"]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *map(row, rungs)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
