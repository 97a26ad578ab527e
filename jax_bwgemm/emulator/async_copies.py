"""cp.async: copies of a thread from global to shared memory, in groups of the thread (PTX ISA, cp.async).

A copy may happen at any time until the thread has waited for its group. Nobody may touch the bytes until then. Behind
the wait they are as if that thread had stored them through the generic proxy: other lanes and warps see them behind a
barrier, and wgmma and TMA behind a fence.proxy.async.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles
from jax_bwgemm.emulator.engine import AsyncOp
from jax_bwgemm.emulator.global_order import WEAK, Strength
from jax_bwgemm.emulator.memory import address_slot, find_global, lane_addresses, note_write, shared_place
from jax_bwgemm.emulator.races import GRANULE, KNOWN
from jax_bwgemm.emulator.syntax import Imm, Instr
from jax_bwgemm.emulator.values import NUM_LANES

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}
_NO_GROUP = np.iinfo(np.int64).max


@dataclasses.dataclass
class _Copy:
    """One instruction's copies: of each lane its place and its group, counted by the lane. `event`: its number."""

    op: AsyncOp
    event: int
    size: int
    lanes: np.ndarray
    offsets: np.ndarray
    groups: np.ndarray


class Copies:
    """What a warp has under way, and how many groups each lane has committed."""

    def __init__(self) -> None:
        self.pending: list[_Copy] = []
        self.committed = np.zeros(NUM_LANES, np.int64)


def _state(w: Any) -> Copies:
    if w.copies is None:
        w.copies = Copies()
    found: Copies = w.copies
    return found


@handles("cp.async")
def _copy(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[dst], [src], cp-size{, src-size}`: bytes beyond src-size become zeros, and are not read."""
    d.only(mods, "ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B")
    kind = next((m for m in mods if m in _SIZES), "")
    if not kind or "global" not in mods or not {"shared", "shared::cta"} & set(mods):
        raise d.unsupported("requires .ca or .cg, .shared and .global")
    operands = instr.operands
    if len(operands) not in (3, 4) or not isinstance(operands[2], Imm) or operands[2].value not in _SIZES[kind]:
        raise d.unsupported(f"requires a size of {_SIZES[kind]} bytes, and perhaps one of the source")
    size = operands[2].value
    dst, src = address_slot(d, operands[0]), address_slot(d, operands[1])
    count_slot = d.src(operands[3], 32) if len(operands) == 4 else None

    def run(w: Any) -> None:
        w.check_grid_wait()
        lanes = w.active
        shared, source = (np.broadcast_to(lane_addresses(w, *at), len(lanes)) for at in (dst, src))
        counts = np.full(len(lanes), size, np.int64) if count_slot is None else w.lanes(count_slot).astype(np.int64)
        if (counts > size).any():
            raise w.fault("out-of-bounds", f"a source of {int(counts.max())} bytes for a copy of {size}")
        low, high = int(shared.min()), int(shared.max())
        cta, offsets = shared_place(w, shared, size, low, high)
        if cta is not w.cta:
            raise w.fault("out-of-bounds", "cp.async writes to the shared memory of its own CTA only")
        parts = _sources(w, source, counts, size)
        note_write(w, cta, offsets, size, lanes)  # of what it overwrites all must be known, as by a store

        def finish() -> None:
            data = np.zeros((len(lanes), size), np.uint8)
            for rows, buffer, index in parts:
                data[rows, : index.shape[1]] = buffer[index]
            cta.smem[offsets[:, None] + np.arange(size)] = data
            cta.version += 1

        cluster, tracker = cta.cluster, cta.cluster.tracker
        op = cluster.new_op(w, "load", finish, {cta}, "cp.async")
        event = tracker.event(w.gid, 0, op.bit, op.where, None, (offsets, size))
        if tracker.enabled:
            cta.shadow.write[_granules(offsets, size)] = event
        cta.smem[offsets[:, None] + np.arange(size)] = 0xFF
        cta.version += 1
        state = _state(w)
        state.pending.append(_Copy(op, event, size, lanes, offsets, state.committed[lanes]))
        cluster.engine.issue(op)

    return Effect(run)


def _sources(w: Any, addresses: np.ndarray, counts: np.ndarray, size: int) -> list[Any]:
    """(lanes, buffer, places) of what is read, all lanes of one count together; the address of none may be any."""
    order, found = w.cta.cluster.machine.order, []
    for count in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == count)
        own = addresses[rows]
        if (own % size).any():
            bad = int(own[own % size != 0][0])
            raise w.fault("misaligned", f"global address {bad:#x} is not a multiple of {size}")
        buffer, start, name = find_global(w, own, int(count))
        index = (start[:, None] + np.arange(count)).astype(np.intp)
        order.read(w, buffer, name, index, Strength("weak", WEAK))
        found.append((rows, buffer, index))
    return found


def _granules(offsets: np.ndarray, size: int) -> np.ndarray:
    first: np.ndarray = offsets // GRANULE
    return first


@handles("cp.async.commit_group")
def _commit(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(0)
    d.only(mods)

    def run(w: Any) -> None:
        _state(w).committed[w.active] += 1

    return Effect(run)


@handles("cp.async.wait_group")
def _wait_group(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Waits until all but the thread's newest N groups are complete."""
    d.arity(1)
    d.only(mods)
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise d.unsupported("requires a number")
    keep = operand.value
    return Effect(lambda w: _wait(w, _state(w).committed - keep))


@handles("cp.async.wait_all")
def _wait_all(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Waits for all copies of the thread, committed or not."""
    d.arity(0)
    d.only(mods)
    return Effect(lambda w: _wait(w, np.full(NUM_LANES, _NO_GROUP)))


def _wait(w: Any, ends: np.ndarray) -> int | None:
    """Until the groups before `ends`, of each lane, are complete."""
    is_active = np.zeros(NUM_LANES, bool)
    is_active[w.active] = True
    waited = [(copy, is_active[copy.lanes] & (copy.groups < ends[copy.lanes])) for copy in _state(w).pending]
    for copy, mine in waited:
        if mine.any() and not copy.op.done:
            blocked: int = w.block(copy.op, f"the copy issued at {copy.op.where}")
            return blocked
    rest = []
    for copy, mine in waited:
        if mine.any():
            _hand_over(w, copy, mine)
        if not mine.all():
            others = ~mine
            parts = (x[others] for x in (copy.lanes, copy.offsets, copy.groups))
            rest.append(_Copy(copy.op, copy.event, copy.size, *parts))
        else:
            w.cta.ops &= ~(1 << copy.op.bit)  # the CTA may end
    _state(w).pending = rest
    return None


def _hand_over(w: Any, copy: _Copy, mine: np.ndarray) -> None:
    """From here on these lanes have stored what the copy brought, unless somebody has stored over it."""
    tracker, shadow = w.cta.cluster.tracker, w.cta.shadow
    if not tracker.enabled:
        return
    w.touch(is_write=True)
    offsets, lanes = copy.offsets[mine], copy.lanes[mine]
    epoch = int(w.clock.rows[KNOWN, w.gid])
    event = tracker.event(w.gid, epoch, -1, copy.op.where, None, (offsets, copy.size), False, lanes)
    granules = _granules(offsets, copy.size)
    own = granules[shadow.write[granules] == copy.event]
    shadow.write[own] = event
