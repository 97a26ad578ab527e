"""Happens-before in global memory, between the warps, CTAs and clusters of one launch (PTX ISA, memory model).

Generic loads and stores of the same bytes by two warps, one of which stores, need an order: barriers in a CTA; cluster
scope in a cluster; between clusters a release of gpu (or sys) scope and an acquire of it that reads what it stored. A
release carries all that its warp knew, the writes of other warps before a barrier too; an acquire becomes an operation
known to its warp, which barriers hand on to others. Flags themselves need no order: two accesses that are both relaxed,
acquire, release or volatile, of a scope that holds both warps, are morally strong.

Clusters run one after the other, which this makes up for: an order is demanded, whatever happened to be seen, and a
warp that looks at another cluster's flag finds it as it was before, the first few times, unless loads are eager.
Of each byte the last write and the last read count. What TMA moves is not followed here.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from jax_bwgemm.emulator.engine import EAGER, Waitable
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.races import CLUSTER, KNOWN, Clock

WEAK, CTA_SCOPE, CLUSTER_SCOPE, GPU_SCOPE = 0, 1, 2, 3
SCOPES = {"cta": CTA_SCOPE, "cluster": CLUSTER_SCOPE, "gpu": GPU_SCOPE, "gl": GPU_SCOPE, "sys": GPU_SCOPE}
NAMES = {CTA_SCOPE: "cta", CLUSTER_SCOPE: "cluster", GPU_SCOPE: "gpu"}
MEMBERS = {CTA_SCOPE: "warp", CLUSTER_SCOPE: "CTA", GPU_SCOPE: "cluster"}
LATE_LOOKS = 3  # of a warp, that find what was there before another cluster's store
POLLS = 1000  # of one place by one instruction, while nobody stores anything: a wait

Base = tuple[int, int, int]  # the coordinates of a cluster's first CTA


@dataclasses.dataclass(frozen=True)
class Strength:
    """What a load or store says of order: "weak", "relaxed", "acquire" or "release", at a scope."""

    order: str = "weak"
    scope: int = WEAK


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """What a warp knew when it released at `scope`. `clock`: in terms of its cluster. `known`: of each cluster, the
    epochs of the warps up to which their accesses were known."""

    base: Base
    rank: int
    scope: int
    clock: Clock
    known: dict[Base, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Flag:
    """What a strong store leaves behind: a release, if it carries one; the bytes `before` it by their places; how often
    each warp of other clusters found them."""

    release: Release | None
    before: dict[int, int]
    looks: collections.Counter[tuple[Base, int]] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(slots=True)
class Access:
    """A load or store of the warp `gid` of a cluster, in its CTA `rank`. `scope`: WEAK, or that of a strong one."""

    base: Base
    rank: int
    gid: int
    epoch: int
    scope: int
    where: Any
    flag: Flag | None = None


@dataclasses.dataclass
class _Shadow:
    """The last write and the last read of each byte of a buffer, as numbers of accesses; most are never read."""

    write: np.ndarray
    read: np.ndarray | None = None


class GlobalOrder:
    """The accesses of one launch."""

    def __init__(self, enabled: bool, loads: str) -> None:
        self.enabled, self.is_eager = enabled, loads == EAGER
        self.accesses: list[Any] = [None]  # number 0: never accessed
        self.shadows: dict[int, _Shadow] = {}
        self.heard: dict[Base, list[tuple[int, Release]]] = {}  # a cluster's operations that stand for releases
        self.polls = Waitable()
        self.version = 0  # counts the stores of all warps

    def read(self, w: Any, buffer: np.ndarray, name: str, index: np.ndarray, strength: Strength) -> np.ndarray:
        """The bytes at `index`."""
        found: np.ndarray = buffer[index]
        if not self.enabled:
            return found
        access, shadow = self._access(w, strength.scope), self._shadow(buffer)
        for earlier in self._distinct(shadow.write[index]):
            self._check(w, access, earlier, f"a load from `{name}` of what was stored")
            if earlier.flag is not None and self._comes_late(w, earlier, earlier.flag):
                places = zip(index.ravel().tolist(), found.ravel().tolist(), strict=True)
                old = [earlier.flag.before.get(i, value) for i, value in places]
                found = np.array(old, np.uint8).reshape(index.shape)
            elif earlier.flag is not None and earlier.flag.release is not None:
                self._hear(w, earlier.flag.release, strength)
        if shadow.read is None:
            shadow.read = np.zeros_like(shadow.write)
        shadow.read[index] = self._number(access)
        return found

    def write(
        self, w: Any, buffer: np.ndarray, name: str, index: np.ndarray, strength: Strength, new: np.ndarray
    ) -> None:
        """The bytes `new` are about to be stored at `index`."""
        self.changed()
        if not self.enabled:
            return
        access, shadow = self._access(w, strength.scope), self._shadow(buffer)
        for earlier in self._distinct(shadow.write[index]):
            self._check(w, access, earlier, f"a store to `{name}` over what was stored")
        for earlier in [] if shadow.read is None else self._distinct(shadow.read[index]):
            self._check(w, access, earlier, f"a store to `{name}` over what was loaded")
        if strength.scope:
            release = self.released(w, strength.scope) if strength.order == "release" else w.fenced
            before = dict(zip(index.ravel().tolist(), buffer[index].ravel().tolist(), strict=True))
            same = bool((buffer[index] == new).all())
            access.flag = self._flag_of(shadow.write[index]) if same else Flag(release, before)
        shadow.write[index] = self._number(access)

    def changed(self) -> None:
        """Global memory has changed: whoever polls looks again."""
        self.version += 1
        self.polls.wake()

    def is_stuck(self, w: Any, address: int) -> bool:
        """Whether a warp has polled this place for long, while nobody stored anything."""
        place = w.split.pc, address, self.version
        w.poll, w.num_polls = place, w.num_polls + 1 if w.poll == place else 1
        return bool(w.num_polls > POLLS)

    def _comes_late(self, w: Any, store: Access, flag: Flag) -> bool:
        """Whether a strong store of another cluster, which the warp cannot know of, still hides from it."""
        warp = w.cta.cluster.base, w.gid
        if self.is_eager or warp[0] == store.base or flag.looks[warp] == LATE_LOOKS or self._knows(w, store):
            return False
        flag.looks[warp] += 1
        return True

    # release and acquire

    def released(self, w: Any, scope: int) -> Release:
        """All that the warp knows, for whoever acquires it."""
        if scope > CTA_SCOPE:
            w.clock.release()
        rows, base = w.clock.rows, w.cta.cluster.base
        own_cta = np.arange(rows.shape[1]) // len(w.cta.warps) == w.cta.rank
        known = {base: np.where(own_cta, rows[KNOWN], rows[CLUSTER])}
        for bit, release in self.heard.get(base, ()):
            if w.clock.ops >> bit & 1:
                for other, epochs in release.known.items():
                    known[other] = np.maximum(known[other], epochs) if other in known else epochs
        release = Release(base, w.cta.rank, scope, w.handed(), known)
        rows[KNOWN, w.gid] += 1
        return release

    def _hear(self, w: Any, release: Release, strength: Strength) -> None:
        if strength.order == "acquire":
            self.acquire(w, release, strength.scope)
        elif strength.order == "relaxed":
            w.unfenced.append(release)

    def acquire(self, w: Any, release: Release, scope: int) -> None:
        """The warp knows what a release knew, if both scopes hold the two warps."""
        cluster = w.cta.cluster
        if min(scope, release.scope) < _scope_of(w, release):
            return
        if release.base == cluster.base:
            w.clock.join(release.clock)
            if scope > CTA_SCOPE:
                w.clock.acquire()
            return
        heard = self.heard.setdefault(cluster.base, [])
        bit = next((bit for bit, other in heard if other is release), None)
        if bit is None:
            bit = cluster.tracker.new_op(w.where())
            heard.append((bit, release))
        w.clock.ops |= 1 << bit

    def fence(self, w: Any, scope: int) -> None:
        """A fence acquires what relaxed loads saw, and releases for relaxed stores."""
        if self.enabled:
            for release in w.unfenced:
                self.acquire(w, release, scope)
            w.unfenced = []
            w.fenced = self.released(w, scope)

    # the rules

    def _check(self, w: Any, access: Access, earlier: Access, verb: str) -> None:
        scope = _scope_of(w, earlier)
        if min(access.scope, earlier.scope) >= scope or self._knows(w, earlier):
            return
        rule, message = "race", f"{verb} without an order in between"
        name = NAMES[scope]
        if scope > CTA_SCOPE and min(access.scope, earlier.scope) > WEAK:
            rule = f"missing-{name}-fence"
            found = NAMES[min(access.scope, earlier.scope)]
            message = f"{verb} by another {MEMBERS[scope]} requires .{name} scope of both, got .{found}"
        elif scope == CLUSTER_SCOPE and w.clock.rows[KNOWN, earlier.gid] >= earlier.epoch:
            rule = "missing-cluster-fence"
            message = f"{verb} by another CTA, with an order of CTA scope in between"
        raise Fault(rule, f"{message}\n  earlier access: {earlier.where}", access.where)

    def _knows(self, w: Any, earlier: Access) -> bool:
        base, gid = w.cta.cluster.base, earlier.gid
        if earlier.base == base:
            row = KNOWN if earlier.rank == w.cta.rank else CLUSTER
            return gid == w.gid or bool(w.clock.rows[row, gid] >= earlier.epoch)
        return any(
            w.clock.ops >> bit & 1
            and earlier.base in release.known
            and release.known[earlier.base][gid] >= earlier.epoch
            for bit, release in self.heard.get(base, ())
        )

    # records

    def _flag_of(self, numbers: np.ndarray) -> Flag | None:
        """That of the store which left a value behind: storing it again tells nobody anything, since who finds it may
        have found it as it was."""
        found = self._distinct(numbers)
        return found[0].flag if len(found) == 1 and (numbers != 0).all() else None

    def _distinct(self, numbers: np.ndarray) -> list[Access]:
        """The accesses in a piece of shadow; nearly always none or one."""
        first = int(numbers.flat[0])
        found = [first] if (numbers == first).all() else np.unique(numbers).tolist()
        return [self.accesses[number] for number in found if number]

    def _access(self, w: Any, scope: int) -> Access:
        return Access(w.cta.cluster.base, w.cta.rank, w.gid, int(w.clock.rows[KNOWN, w.gid]), scope, w.where())

    def _number(self, access: Access) -> int:
        self.accesses.append(access)
        return len(self.accesses) - 1

    def _shadow(self, buffer: np.ndarray) -> _Shadow:
        shadow = self.shadows.get(id(buffer))
        if shadow is None:
            shadow = self.shadows[id(buffer)] = _Shadow(np.zeros(buffer.nbytes, np.int32))
        return shadow


def _scope_of(w: Any, other: Access | Release) -> int:
    """The least scope that holds a warp and another one."""
    if other.base != w.cta.cluster.base:
        return GPU_SCOPE
    return CTA_SCOPE if other.rank == w.cta.rank else CLUSTER_SCOPE
