"""tcgen05 instructions that allocate, load and store TMEM."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles, whole_warp
from jax_bwgemm.emulator.memory import address_slot, shared_store
from jax_bwgemm.emulator.syntax import Imm, Instr
from jax_bwgemm.emulator.tmem import LANE_GRANULE, NUM_COLS, Meeting
from jax_bwgemm.emulator.values import IN_FLIGHT

CTA_GROUPS = ("cta_group::1", "cta_group::2")


def cta_group(d: Decoder, mods: list[str]) -> int:
    found = [m for m in mods if m in CTA_GROUPS]
    if len(found) != 1:
        raise d.unsupported("requires .cta_group::1 or .cta_group::2")
    return int(found[0][-1])


def use_group(w: Any, group: int) -> None:
    """All tcgen05 instructions of a kernel use one cta_group (PTX ISA, tcgen05 CTA pair)."""
    machine = w.cta.cluster.machine
    if machine.cta_group not in (None, group):
        raise w.fault("tmem", f"cta_group::{group} in a kernel that uses cta_group::{machine.cta_group}")
    machine.cta_group = group
    if group == 2 and w.cta.rank ^ 1 >= len(w.cta.cluster.ctas):
        raise w.fault("tmem", "cta_group::2 requires the other CTA of the pair in the cluster")


def _meet(w: Any, kind: str, together: Callable[[], None] | None = None) -> int | None:
    """Waits for the warp of the other CTA; None once both are here. The later one does what happens to both at once."""
    meeting = w.cta.cluster.meetings.setdefault((kind, w.cta.rank >> 1), Meeting())
    if w.split.token is None:
        if w.cta.rank in meeting.present:
            raise w.fault("tmem", f"two warps of one CTA execute a collective {kind}")
        w.split.token = meeting.generation
        if meeting.attend(w.cta.rank) and together:
            together()
    if meeting.generation == w.split.token:
        return w.block(meeting, f"the other CTA of the pair at its {kind}")
    return None


@handles("tcgen05.alloc")
def _alloc(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    d.only(mods, *CTA_GROUPS, "sync", "aligned", "shared::cta", "b32")
    group = cta_group(d, mods)
    slot, offset = address_slot(d, instr.operands[0])
    cols_slot = d.src(instr.operands[1], 32)

    @whole_warp
    def run(w: Any) -> int | None:
        use_group(w, group)
        cols = w.uniform(cols_slot)
        if group == 2 and (wait := _meet(w, "tcgen05.alloc", lambda: _reserve_pair(w, cols))) is not None:
            return wait
        column = w.cta.tmem.take(w, cols)
        if column is None:
            return w.block(w.cta.tmem, "free TMEM columns")
        w.split.token = None
        shared_store(w, np.array([w.uniform(slot) + offset], np.int64), 32, np.array([[column]], np.uint32))
        return None

    return Effect(run)


def _reserve_pair(w: Any, cols: int) -> None:
    """A collective allocation: once one CTA has its columns, MMAs may write those of the other."""
    first = w.cta.rank & ~1
    for cta in w.cta.cluster.ctas[first : first + 2]:
        cta.tmem.reserve(w, cols)


@handles("tcgen05.dealloc")
def _dealloc(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    d.only(mods, *CTA_GROUPS, "sync", "aligned", "b32")
    group = cta_group(d, mods)
    address, cols = d.src(instr.operands[0], 32), d.src(instr.operands[1], 32)

    @whole_warp
    def run(w: Any) -> int | None:
        use_group(w, group)
        if group == 2 and (wait := _meet(w, "tcgen05.dealloc")) is not None:
            return wait
        w.split.token = None
        w.cta.tmem.free(w, w.uniform(address), w.uniform(cols))
        return None

    return Effect(run)


@handles("tcgen05.relinquish_alloc_permit")
def _relinquish(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, *CTA_GROUPS, "sync", "aligned")
    group = cta_group(d, mods)

    @whole_warp
    def run(w: Any) -> int | None:
        use_group(w, group)
        w.cta.tmem.relinquished = True
        return None

    return Effect(run)


@dataclasses.dataclass(frozen=True)
class _Shape:
    lanes: int
    columns: int  # of 32 bits, each repetition
    registers: int  # each repetition


_SHAPES = {
    "32x32b": _Shape(32, 1, 1),
    "16x32bx2": _Shape(16, 1, 1),  # twice: threads 16..31 start as many columns further as an immediate says
    "16x64b": _Shape(16, 2, 1),
    "16x128b": _Shape(16, 4, 2),
    "16x256b": _Shape(16, 8, 4),
}
_REPEATS = (1, 2, 4, 8, 16, 32, 64, 128)


def _fragment(shape: str, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """(registers, threads) -> lane and column, relative to the address (PTX ISA, matrix fragments of the data movement
    shapes; CUTLASS copy_traits_sm100.hpp states them as layouts)."""
    t, j = np.arange(32)[None, :], np.arange(_SHAPES[shape].registers * repeat)[:, None]
    zero = np.zeros_like(t + j)
    if shape == "32x32b":
        return t + zero, j + zero
    if shape == "16x32bx2":
        return t % 16 + zero, j + zero
    if shape == "16x64b":
        return t // 4 + 8 * (t % 2) + zero, 2 * j + (t // 2) % 2 + zero
    if shape == "16x128b":
        return t // 4 + 8 * (j % 2) + zero, 4 * (j // 2) + t % 4 + zero
    return t // 4 + 8 * (j % 4 // 2) + zero, 8 * (j // 4) + 2 * (t % 4) + j % 2 + zero


@dataclasses.dataclass(frozen=True)
class _Access:
    """A decoded tcgen05.ld or .st. `split`: columns from the first half's to the second half's, of .16x32bx2."""

    shape: str
    repeat: int
    packed: bool
    split: int
    slot: int
    offset: int

    @functools.cached_property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """(registers, threads) -> lane and column of the register's cell, if packed of the first of its two cells."""
        lanes, columns = _fragment(self.shape, self.repeat)
        return lanes, columns * (2 if self.packed else 1) + self.split * (np.arange(32) >= 16)

    @property
    def columns(self) -> int:
        """That one half spans."""
        return _SHAPES[self.shape].columns * self.repeat * (2 if self.packed else 1)

    def place(self, w: Any) -> tuple[int, int, list[tuple[Any, ...]]]:
        """Lane and column of the address, and the shadows of what is touched. A warp reaches its quarter of the
        lanes."""
        address = w.uniform(self.slot) + self.offset
        lane, column, count = address >> 16, address & 0xFFFF, _SHAPES[self.shape].lanes
        if lane // 32 != w.index % 4 or lane % count:
            raise w.fault(
                "tmem",
                f"warp {w.index} accesses lanes {lane}..{lane + count - 1}; it may reach "
                f"{32 * (w.index % 4)}..{32 * (w.index % 4) + 31}",
            )
        groups = slice(lane // LANE_GRANULE, (lane + count) // LANE_GRANULE)
        starts = {column, column + self.split}
        for start in starts:
            w.cta.tmem.check(w, start, self.columns)
        return lane, column, [(groups, slice(start, start + self.columns)) for start in sorted(starts)]


def _tmem_access(d: Decoder, instr: Instr, mods: list[str], pack: str, address: int, data: int) -> _Access:
    """`address`, `data`: which operand they are, of two; .16x32bx2 has an immediate behind the address."""
    shape = next((m for m in mods if m in _SHAPES), None)
    repeat = next((int(m[1:]) for m in mods if m[0] == "x" and m[1:].isdigit()), 0)
    d.only(mods, *_SHAPES, "sync", "aligned", f"x{repeat}", "b32", pack)
    if shape is None:
        raise d.unsupported(f"requires one of .{', .'.join(_SHAPES)}")
    halves = shape == "16x32bx2"
    d.arity(2 + halves)
    if not halves:
        split = 0
    elif isinstance(number := instr.operands[2 if address else 1], Imm) and 0 <= number.value < NUM_COLS:
        split = number.value
    else:
        raise d.unsupported(f"requires the second half's columns as a number of 0..{NUM_COLS - 1}")
    regs, count = len(d.items(instr.operands[data])), _SHAPES[shape].registers * repeat
    if repeat not in _REPEATS or count > 128 or regs != count:
        raise d.unsupported(f"requires .x1 to .x128 and at most 128 registers, {count} for .x{repeat}, got {regs}")
    slot, offset = address_slot(d, instr.operands[address])
    return _Access(shape, repeat, pack in mods, split, slot, offset)


@handles("tcgen05.ld")
def _tmem_load(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    access = _tmem_access(d, instr, mods, "pack::16b", 1, 0)
    dests = [d.dest(o) for o in d.items(instr.operands[0])]
    lanes, cols = access.cells

    @whole_warp
    def run(w: Any) -> int | None:
        lane, column, touched = access.place(w)
        tmem, tracker = w.cta.tmem, w.cta.cluster.tracker
        if tracker.enabled:
            number = tracker.whole_event(w)
            for part in touched:
                tracker.read(tmem.shadow, part, number, w.clock, w.gid, False)
        if access.packed:
            low, high = (tmem.data[lane + lanes, column + cols + i] & np.uint32(0xFFFF) for i in (0, 1))
            values = low | high << np.uint32(16)
        else:
            values = tmem.data[lane + lanes, column + cols]
        w.unwaited_load = w.where()
        if w.cta.cluster.machine.tmem_scoreboard:
            _deliver(w, dict(zip(dests, values, strict=True)))
            return None
        if not w.loading.keys().isdisjoint(dests):
            raise w.fault("register-in-flight", "a register is loaded again before tcgen05.wait::ld")
        for dest, value in zip(dests, values, strict=True):
            w.loading[dest], w.regs[dest] = value, IN_FLIGHT
        return None

    return Effect(run, tuple((dest, 32) for dest in dests))


def _deliver(w: Any, values: dict[int, np.ndarray]) -> None:
    for slot, value in values.items():
        w.regs[slot] = value


@handles("tcgen05.st")
def _tmem_store(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """With .unpack::16b the two halves go to the low halves of two neighbouring cells. What the high halves then hold
    the ISA does not say: all ones here."""
    halves = "16x32bx2" in mods
    access = _tmem_access(d, instr, mods, "unpack::16b", 0, 1 + halves)
    if halves and access.split < access.columns:
        raise d.unsupported("two halves that overlap are not modelled")
    sources = [d.src(o, 32) for o in d.items(instr.operands[1 + halves])]
    lanes, cols = access.cells

    @whole_warp
    def run(w: Any) -> int | None:
        lane, column, touched = access.place(w)
        tmem, tracker = w.cta.tmem, w.cta.cluster.tracker
        number = tracker.whole_event(w)
        for part in touched:
            tracker.write(tmem.shadow, part, number, w.clock, False)
        for j, source in enumerate(sources):
            value = w.value(source)
            if access.packed:
                tmem.data[lane + lanes[j], column + cols[j]] = value & 0xFFFF | 0xFFFF0000
                tmem.data[lane + lanes[j], column + cols[j] + 1] = value >> 16 | 0xFFFF0000
            else:
                tmem.data[lane + lanes[j], column + cols[j]] = value
        w.unwaited_store = w.where()
        return None

    return Effect(run)


@handles("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(0)
    d.only(mods, "sync", "aligned")
    loads = instr.opcode.startswith("tcgen05.wait::ld")

    @whole_warp
    def run(w: Any) -> int | None:
        if loads:
            if any(w.regs[slot] is not IN_FLIGHT for slot in w.loading):
                raise w.fault("register-in-flight", f"a register was written while {w.unwaited_load} was filling it")
            _deliver(w, w.loading)
            w.unwaited_load, w.loading = None, {}
        else:
            w.unwaited_store = None
        return None

    return Effect(run)
