"""Watching a launch: warps and engines that report what they do. Without an observer none of this runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax_bwgemm.emulator.engine import AsyncOp, Engine, Schedule
from jax_bwgemm.emulator.machine import Split, Warp


class Observer:
    """What can be watched; nothing is, by default. `quantum`: instructions of a warp's turn, None for the schedule's.

    Time is the scheduler's: rounds of the cluster, in each of which every warp that can move takes one turn.
    """

    quantum: int | None = None

    def step(self, warp: Warp) -> None:
        """`warp` is about to execute the instruction at `warp.where()`."""

    def turn(self, warp: Warp, executed: int, now: int) -> None:
        """`warp` has executed some instructions in round `now`."""

    def issued(self, op: AsyncOp, now: int) -> None:
        """An asynchronous operation starts."""

    def completed(self, op: AsyncOp, now: int) -> None:
        """It has taken effect."""


class ObservedWarp(Warp):
    """Executes one instruction at a time."""

    def run(self, quantum: int) -> None:
        cluster, first = self.cta.cluster, self.executed
        while quantum > 0 and self.runnable:
            quantum = self._run_part(quantum)
        cluster.machine.observer.turn(self, self.executed - first, cluster.engine.now)

    def _step_part(self, split: Split, stops: set[int]) -> int | None:
        self.cta.cluster.machine.observer.step(self)
        return super()._step_part(split, stops)


class ObservedEngine(Engine):
    """Tells when operations start and end."""

    def __init__(self, schedule: Schedule, observer: Observer) -> None:
        super().__init__(schedule)
        self.observer = observer

    def issue(self, op: AsyncOp, after: Iterable[AsyncOp] = ()) -> None:
        self.observer.issued(op, self.now)
        super().issue(op, after)

    def _complete(self, op: AsyncOp) -> None:
        super()._complete(op)
        self.observer.completed(op, self.now)


class Trace(Observer):
    """Hands each instruction that one warp of one CTA executes to `write`, as a line of text, and what it waits for."""

    def __init__(self, cta: int, warp: int, write: Callable[[str], Any]) -> None:
        self.cta, self.warp, self.write = cta, warp, write

    def step(self, warp: Warp) -> None:
        if self._watches(warp):
            where = warp.where()
            self.write(f"{where.line:6d} {len(warp.active):2d} lanes  {where.text}")

    def turn(self, warp: Warp, executed: int, now: int) -> None:
        for split in warp.splits if self._watches(warp) else ():
            if split.blocked:
                self.write(f"{'':17} waits for {split.blocked}")

    def _watches(self, warp: Warp) -> bool:
        return (warp.cta.rank_in_grid, warp.index) == (self.cta, self.warp)
