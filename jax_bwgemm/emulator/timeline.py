"""A launch as a Chrome trace, for https://ui.perfetto.dev: who ran, who waited for what, what was in flight.

One microsecond of the trace is one step of the scheduler: every warp that can move executes one instruction. It says
nothing about a GPU's time. Clusters run one after the other but are drawn side by side, all from 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from jax_bwgemm.emulator.engine import AsyncOp
from jax_bwgemm.emulator.machine import Warp
from jax_bwgemm.emulator.observe import Observer

Event = dict[str, Any]
LANES = {"load": "TMA loads", "store": "TMA stores", "mma": "tensor core", "commit": "commits"}
LANES_OF_A_KIND = 1000  # thread numbers, so that the lanes of a kind stand together, below the warps


@dataclasses.dataclass
class _Stretch:
    """A warp that ran without a pause: rounds `start` to `end`, and what it waits for after them."""

    start: int
    end: int
    executed: int = 0
    line: int = 0
    reason: str = ""


class Timeline(Observer):
    """Pass it to `run(..., observer=)`, then `write` it, also after a fault."""

    quantum = 1

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stretches: dict[tuple[int, int], _Stretch] = {}
        self._flights: list[tuple[AsyncOp, int]] = []
        self._ends: dict[AsyncOp, int] = {}
        self._last = 0

    def turn(self, warp: Warp, executed: int, now: int) -> None:
        cta, index = warp.cta.rank_in_grid, warp.index
        stretch = self._stretches.get((cta, index))
        if stretch is None or stretch.end != now:
            self._close(cta, index, now)
            stretch = self._stretches[cta, index] = _Stretch(now, now)
        stretch.end, stretch.executed = now + 1, stretch.executed + executed
        stretch.line = warp.where().line
        stretch.reason = next((split.blocked for split in warp.splits if split.blocked), "")
        self._last = max(self._last, now + 1)

    def issued(self, op: AsyncOp, now: int) -> None:
        self._flights.append((op, now))

    def completed(self, op: AsyncOp, now: int) -> None:
        self._ends[op] = now

    def events(self) -> list[Event]:
        """Trace events, names of lanes first. A warp's events follow one another; so do those of every other lane."""
        for cta, index in list(self._stretches):
            self._close(cta, index, None)
        events = self._events + self._flight_events()
        return _names(events) + events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON that Perfetto and chrome://tracing open."""
        trace = {"traceEvents": self.events(), "otherData": {"1 us": "one step: an instruction of every warp"}}
        pathlib.Path(path).write_text(json.dumps(trace))

    def _close(self, cta: int, index: int, now: int | None) -> None:
        """Ends the warp's last stretch, and the wait after it at `now`."""
        stretch = self._stretches.pop((cta, index), None)
        if stretch is None:
            return
        facts = {"instructions": stretch.executed, "last PTX line": stretch.line}
        self._events.append(_event("run", "warp", cta, index, stretch.start, stretch.end, facts))
        if now is not None:
            why = {"for": stretch.reason, "PTX line": stretch.line}
            self._events.append(_event("wait", "warp", cta, index, stretch.end, now, why))

    def _flight_events(self) -> list[Event]:
        """Operations in flight at once share no lane: each takes the first of its CTA and kind that is free."""
        events = []
        free: dict[tuple[int, str], list[int]] = {}
        for op, start in self._flights:
            end = max(self._ends.get(op, self._last), start + 1)
            lanes = free.setdefault((op.where.cta, op.kind), [])
            lane = next((i for i, until in enumerate(lanes) if until <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            thread = (1 + list(LANES).index(op.kind)) * LANES_OF_A_KIND + lane
            facts = {"issued by": str(op.where), "completed": op.done}
            events.append(_event(f"{op.kind} {op.label}".strip(), op.kind, op.where.cta, thread, start, end, facts))
        return events


def _event(name: str, category: str, cta: int, thread: int, start: int, end: int, facts: Event) -> Event:
    """A complete event ("X")."""
    span = {"ts": start, "dur": end - start}
    return {"name": name, "cat": category, "ph": "X", "pid": cta, "tid": thread, **span, "args": facts}


def _names(events: list[Event]) -> list[Event]:
    """Metadata events that name the processes (CTAs) and threads (lanes)."""
    named = [("process_name", cta, 0, f"CTA {cta}") for cta in sorted({event["pid"] for event in events})]
    lanes = sorted({(event["pid"], event["tid"], event["cat"]) for event in events})
    named += [("thread_name", cta, thread, _lane_name(thread, category)) for cta, thread, category in lanes]
    return [{"name": n, "ph": "M", "pid": cta, "tid": thread, "args": {"name": text}} for n, cta, thread, text in named]


def _lane_name(thread: int, category: str) -> str:
    return f"{LANES.get(category, 'warp')} {thread % LANES_OF_A_KIND}"
