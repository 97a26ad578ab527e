"""Happens-before: who may know that an access has been made, or an asynchronous operation has completed.

Each warp has a `Clock`: three vector clocks over the warps of its cluster and the set of asynchronous operations that
it knows complete. Barriers carry clocks from one warp to another. Shared memory and TMEM have a `Shadow`: last write
and the last reads of every granule, as event numbers. An access that does not know the events it conflicts with is a
race, whatever the timing of this run was.

Shared memory of another CTA is reached at cluster scope: what one CTA did there, or there did to another's, is known to
a second CTA only through a release and an acquire of cluster scope (PTX ISA, memory consistency
model, morally strong operations): an arrive and a wait with `.cluster`, or fence.acq_rel.cluster beside those without.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_bwgemm.emulator.errors import Fault

KNOWN, PUBLISHED, INITS = 0, 1, 2  # generic accesses; those that fence.proxy.async covers; mbarrier initialisations
PUBLISHED_REMOTE = 3  # those to other CTAs' shared memory too: not by fence.proxy.async.shared::cta
RELEASED, CLUSTER = 4, 5  # accesses that were released at cluster scope; those that were acquired there as well
ARRIVED = 6  # the number of arrivals at mbarriers, which even relaxed operations show
WHOLE = 7  # accesses of a warp as a whole, which each of its lanes hands on: to TMEM
NUM_ROWS = 8
_ACCESSES = (KNOWN, PUBLISHED, PUBLISHED_REMOTE, RELEASED, CLUSTER)
GRANULE = 16  # bytes of shared memory a shadow entry; two warps that write parts of one are told apart by their extents

Index = Any  # a slice, a tuple of slices, or an array of granule numbers


class Clock:
    """`rows[kind, warp]`: the epoch of that warp up to which its accesses are known. `ops`: a bit an operation."""

    __slots__ = ("ops", "rows")

    def __init__(self, num_warps: int) -> None:
        self.rows = np.zeros((NUM_ROWS, num_warps), np.int32)
        self.ops = 0

    def join(self, other: Clock) -> None:
        np.maximum(self.rows, other.rows, out=self.rows)
        self.ops |= other.ops

    def join_inits(self, other: Clock) -> None:
        np.maximum(self.rows[INITS], other.rows[INITS], out=self.rows[INITS])

    def join_arrivals(self, other: Clock) -> None:
        np.maximum(self.rows[ARRIVED], other.rows[ARRIVED], out=self.rows[ARRIVED])

    def release(self) -> None:
        """All that is known is released at cluster scope."""
        np.maximum(self.rows[RELEASED], self.rows[KNOWN], out=self.rows[RELEASED])

    def acquire(self) -> None:
        """All that came here released at cluster scope is acquired there."""
        np.maximum(self.rows[CLUSTER], self.rows[RELEASED], out=self.rows[CLUSTER])

    def limit(self, warp: int, epoch: int) -> None:
        """What `warp` accessed after `epoch` is not known."""
        rows = self.rows[_ACCESSES, warp]
        self.rows[_ACCESSES, warp] = np.minimum(rows, epoch)

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.rows, clock.ops = self.rows.copy(), self.ops
        return clock


@dataclasses.dataclass(slots=True)
class Event:
    """One access. `op` is the bit of an asynchronous operation, -1 for an access of the warp itself. `key` names the
    in-order pipeline that it belongs to; `extent` the bytes that a small access touched (start offsets, count);
    `remote`: a generic access to another CTA's shared memory; `lanes`: of the extent's starts, None where the warp
    accesses them as a whole."""

    warp: int
    epoch: int
    op: int
    where: Any
    key: Any = None
    extent: tuple[np.ndarray, int] | None = None
    remote: bool = False
    lanes: np.ndarray | None = None


class Shadow:
    """Last accesses of the granules of one memory."""

    def __init__(self, shape: tuple[int, ...], name: str) -> None:
        self.name = name
        self.shape = shape
        self.row = KNOWN if len(shape) == 1 else WHOLE
        self.write = np.zeros(shape, np.int32)
        self.reads: dict[Any, np.ndarray] = {}

    def reader(self, agent: Any) -> np.ndarray:
        """The last reads of one agent; agents read in program order, so the last one stands for all before it."""
        array = self.reads.get(agent)
        if array is None:
            array = self.reads[agent] = np.zeros(self.shape, np.int32)
        return array

    def forget(self, index: Index) -> None:
        """Back to never written: freed TMEM."""
        self.write[index] = 0
        for array in self.reads.values():
            array[index] = 0


def _distinct(ids: np.ndarray) -> list[int]:
    """The event numbers in a piece of shadow; nearly always one."""
    first = int(ids.flat[0])
    if (ids == first).all():
        return [first]
    found: list[int] = np.unique(ids).tolist()
    return found


def _overlap(a: Event, b: Event, in_other_lanes: bool = False) -> bool:
    """Whether they touch the same bytes; `in_other_lanes`: in different lanes of one warp."""
    if a.extent is None or b.extent is None:
        return not in_other_lanes
    starts_a, size_a = a.extent
    starts_b, size_b = b.extent
    gap = starts_a[:, None].astype(np.int64) - starts_b[None, :].astype(np.int64)
    touch = (gap < size_b) & (gap > -size_a)
    if in_other_lanes and a.lanes is not None and b.lanes is not None:
        touch &= a.lanes[:, None] != b.lanes[None, :]
    return bool(touch.any())


class Tracker:
    """The events of one cluster and the rules between them."""

    def __init__(self, num_warps: int, enabled: bool = True, warps_of_a_cta: int | None = None) -> None:
        self.num_warps = num_warps
        self.warps_of_a_cta = warps_of_a_cta or num_warps
        self.enabled = enabled
        self.events: list[Event] = [Event(0, 0, -1, None)]  # number 0: never accessed
        self.met = [0] * num_warps  # the epochs up to which each lane of a warp knows what the others did
        self.op_places: list[Any] = []  # where each asynchronous operation was issued

    def new_op(self, where: Any) -> int:
        self.op_places.append(where)
        return len(self.op_places) - 1

    def event(
        self,
        warp: int,
        epoch: int,
        op: int,
        where: Any,
        key: Any = None,
        extent: Any = None,
        remote: bool = False,
        lanes: Any = None,
    ) -> int:
        self.events.append(Event(warp, epoch, op, where, key, extent, remote, lanes))
        return len(self.events) - 1

    def whole_event(self, w: Any) -> int:
        """An access of a warp as a whole."""
        epoch = int(w.clock.rows[KNOWN, w.gid])
        w.clock.rows[WHOLE, w.gid] = epoch
        return self.event(w.gid, epoch, -1, w.where())

    def read(self, shadow: Shadow, index: Index, number: int, clock: Clock, agent: Any, proxy: bool) -> None:
        """An access reads; `proxy`: through the async proxy, where generic writes must have been published."""
        if not self.enabled:
            return
        for earlier in _distinct(shadow.write[index]):
            if earlier == 0:
                self._fault("uninitialised-read", shadow, index, number, 0, "nobody wrote what is read")
            self._check(shadow, index, number, earlier, clock, proxy, "read of", "written")
        shadow.reader(agent)[index] = number

    def write(self, shadow: Shadow, index: Index, number: int, clock: Clock, proxy: bool) -> None:
        """An access writes: after every earlier write and read of the same bytes."""
        if not self.enabled:
            return
        for earlier in _distinct(shadow.write[index]):
            if earlier:
                self._check(shadow, index, number, earlier, clock, proxy, "overwrite of", "written")
        for array in shadow.reads.values():
            ids = array[index]
            if ids.any():
                for earlier in _distinct(ids):
                    if earlier:
                        self._check(shadow, index, number, earlier, clock, proxy, "overwrite of", "read")
                array[index] = 0
        shadow.write[index] = number

    def _check(
        self, shadow: Shadow, index: Index, number: int, earlier: int, clock: Clock, proxy: bool, verb: str, did: str
    ) -> None:
        event, current = self.events[earlier], self.events[number]
        if event.op >= 0:
            if clock.ops >> event.op & 1 or (event.key is not None and event.key == current.key):
                return
            if not _overlap(event, current):
                return
            rule = "read-before-completion" if verb == "read of" else "overwrite-in-flight"
            message = f"{verb} {shadow.name} {did} by an asynchronous operation that is not known to be complete"
            self._fault(rule, shadow, index, number, earlier, message)
        if event.warp == current.warp and current.op < 0:
            if event.epoch > self.met[event.warp] and _overlap(event, current, in_other_lanes=True):
                message = f"{verb} {shadow.name} {did} by another lane of the warp, without bar.warp.sync in between"
                self._fault("race", shadow, index, number, earlier, message)
            return
        known = clock.rows[shadow.row, event.warp] >= event.epoch
        fence = PUBLISHED_REMOTE if event.remote else PUBLISHED
        across = (event.remote or current.remote) and self._cta(event) != self._cta(current)
        rows = ([fence] if proxy else []) + ([CLUSTER] if across else [])
        if known and all(clock.rows[row, event.warp] >= event.epoch for row in rows):
            return
        if not _overlap(event, current):
            return
        if known and proxy and clock.rows[fence, event.warp] < event.epoch:
            form = "fence.proxy.async.shared::cluster" if event.remote else "fence.proxy.async"
            message = f"{verb} {shadow.name} {did} by the generic proxy without a {form} in between"
            self._fault("missing-proxy-fence", shadow, index, number, earlier, message)
        if known:
            message = (
                f"{verb} {shadow.name} {did} by another CTA, with an order of CTA scope in between: it requires "
                "arrive.release.cluster and wait.acquire.cluster, or fence.acq_rel.cluster beside them"
            )
            self._fault("missing-cluster-fence", shadow, index, number, earlier, message)
        self._fault("race", shadow, index, number, earlier, f"{verb} {shadow.name} {did} without an order in between")

    def _cta(self, event: Event) -> int:
        return event.warp // self.warps_of_a_cta

    def _fault(self, rule: str, shadow: Shadow, index: Index, number: int, earlier: int, message: str) -> None:
        current = self.events[number]
        places = np.arange(int(np.prod(shadow.shape))).reshape(shadow.shape)[index]
        hit = places.ravel()
        if earlier == 0:
            hit = hit[shadow.write.ravel()[hit] == 0]
        else:
            masks = [array.ravel()[hit] == earlier for array in (shadow.write, *shadow.reads.values())]
            hit = hit[np.logical_or.reduce(masks)]
        place = shadow_place(shadow, int(hit[0])) if hit.size else "an unknown place"
        by = f"\n  earlier access: {self.events[earlier].where}" if earlier else ""
        raise Fault(rule, f"{message}, at {place}{by}", current.where)


def shadow_place(shadow: Shadow, flat: int) -> str:
    """A granule in words."""
    if len(shadow.shape) == 1:
        return f"{shadow.name} offset {flat * GRANULE:#x}"
    group, column = divmod(flat, shadow.shape[1])
    return f"{shadow.name} lanes {16 * group}..{16 * group + 15} column {column}"
