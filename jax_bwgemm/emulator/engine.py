"""Asynchronous operations and when they complete: as early, as late, or as oddly as the memory model allows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

from jax_bwgemm.emulator.races import Clock

EAGER, LAZY, RANDOM = "eager", "lazy", "random"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When loads, tensor-core work, commits and stores complete, and how warps take turns.

    `cancels`: requests to cancel clusters are granted while there are any, never, or until one at random is refused.
    `one_cluster` launches a single cluster whatever the grid says: persistent kernels then walk every tile, and their
    pipelines wrap. A non-persistent kernel must not be run so.
    """

    name: str = "lazy"
    loads: str = LAZY
    mmas: str = LAZY
    commits: str = LAZY
    stores: str = LAZY
    seed: int = 0
    one_cluster: bool = False
    cancels: str = EAGER

    @staticmethod
    def standard(seed: int = 0) -> tuple[Schedule, ...]:
        """All eager, all lazy, loads eager, MMAs eager, random."""
        return (
            Schedule("eager", EAGER, EAGER, EAGER, EAGER, seed),
            Schedule("lazy", seed=seed, cancels=LAZY),
            Schedule("loads-eager", loads=EAGER, seed=seed),
            Schedule("mmas-eager", mmas=EAGER, commits=EAGER, seed=seed, cancels=RANDOM),
            Schedule("random", RANDOM, RANDOM, RANDOM, RANDOM, seed, cancels=RANDOM),
        )

    @staticmethod
    def randoms(count: int, first: int = 0) -> tuple[Schedule, ...]:
        """Random ones of `count` seeds: what depends on who comes first shows under some, and rarely under the others
        (a deadlock was seen under 10 of 16). For kernels that run in milliseconds."""
        return tuple(Schedule.standard(seed)[4] for seed in range(first + 1, first + 1 + count))


class Waitable:
    """Something that warps wait for; they look again whenever it changes."""

    def __init__(self) -> None:
        self.waiters: list[Any] = []

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for split in waiters:
            split.blocked = None


class AsyncOp(Waitable):
    """One operation in flight. `clock`: what its issuer knew. `after`: operations that must complete before it.
    `label`: what it moves, for people."""

    __slots__ = ("after", "bit", "clock", "done", "due", "finish", "kind", "label", "targets", "where")

    def __init__(self, kind: str, bit: int, clock: Clock, where: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self.kind, self.bit, self.clock, self.where, self.finish = kind, bit, clock, where, finish
        self.after: list[AsyncOp] = []
        self.done = False
        self.due = 0.0
        self.label = ""

    def ready(self) -> bool:
        self.after = [op for op in self.after if not op.done]
        return not self.after


class Engine:
    """The operations in flight of one cluster."""

    def __init__(self, schedule: Schedule) -> None:
        self.rng = random.Random(schedule.seed)
        self.pending: list[AsyncOp] = []
        self.now = 0
        self.policies = {
            "load": schedule.loads,
            "mma": schedule.mmas,
            "commit": schedule.commits,
            "store": schedule.stores,
        }

    def issue(self, op: AsyncOp, after: Iterable[AsyncOp] = ()) -> None:
        op.after = [earlier for earlier in after if not earlier.done]
        policy = self.policies[op.kind]
        if policy == EAGER and not op.after:
            self._complete(op)
            return
        op.due = self.now + self._delay(policy)
        self.pending.append(op)

    def _delay(self, policy: str) -> float:
        if policy == RANDOM:
            return self.rng.choice((0, 0, 1, 2, 5, 20, float("inf")))
        return 0 if policy == EAGER else float("inf")

    def _complete(self, op: AsyncOp) -> None:
        op.done = True
        op.finish()
        op.wake()

    def tick(self) -> None:
        """One scheduler round has passed."""
        self.now += 1
        if not any(op.due <= self.now for op in self.pending):
            return
        waiting, self.pending = self.pending, []
        for op in waiting:
            if op.due <= self.now and op.ready():
                self._complete(op)
            else:
                self.pending.append(op)

    def force(self) -> bool:
        """All warps wait: completes the earliest operation that may complete (a random one under a random policy)."""
        if RANDOM in self.policies.values():
            ready = [op for op in self.pending if op.ready()]
            op = self.rng.choice(ready) if ready else None
        else:
            op = next((op for op in self.pending if op.ready()), None)
        if op is None:
            return False
        self.pending.remove(op)
        self._complete(op)
        return True

    def drain(self) -> None:
        while self.force():
            pass
