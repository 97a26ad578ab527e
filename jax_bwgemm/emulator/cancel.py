"""clusterlaunchcontrol: a running cluster asks to cancel one that has not started, and does its work itself.

A request is granted, refused although clusters wait, or refused at some request, as the schedule says (`cancels`): more
urgent grids may take the place of those that wait (CUDA programming guide, cluster launch control). Who has seen a
refusal must not ask again. The 16 bytes of a response arrive as those of a TMA load do; what a refusal has in place of
coordinates is garbage.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, Pure, handles
from jax_bwgemm.emulator.engine import EAGER, LAZY
from jax_bwgemm.emulator.mbarrier import barrier_in, check_async_init, complete_async
from jax_bwgemm.emulator.memory import address_slot
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.values import lifted

RESPONSE_BYTES = 16
_GRANTED, _GARBAGE = 1 << 127, (1 << 96) - 1
_QUERY = "clusterlaunchcontrol.query_cancel"
_AXES = ("x", "y", "z")


def _grant(cluster: Any) -> tuple[int, int, int] | None:
    """The first CTA of a cluster that will not start, or None."""
    policy = cluster.machine.schedule.cancels
    if cluster.refused or policy == LAZY or (policy != EAGER and cluster.rng.random() < 0.3):
        return None
    found: tuple[int, int, int] | None = next(cluster.machine.waiting, None)
    return found


@handles("clusterlaunchcontrol.try_cancel.async")
def _try_cancel(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[response], [mbar]`; with multicast to every CTA of the cluster, at the same offsets."""
    d.arity(2)
    d.not_on("clusterlaunchcontrol", "sm_90")
    d.only(mods, "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128")
    if "mbarrier::complete_tx::bytes" not in mods or mods[-1] != "b128":
        raise d.unsupported("requires .mbarrier::complete_tx::bytes and .b128")
    multicast = "multicast::cluster::all" in mods
    slot, offset = address_slot(d, instr.operands[0])
    bar_slot, bar_offset = address_slot(d, instr.operands[1])

    def run(w: Any) -> None:
        cluster = w.cta.cluster
        if len(w.active) != 1:
            raise w.fault("multiple-issue", f"{len(w.active)} lanes ask to cancel a cluster each: elect one")
        if w.clock.ops & cluster.refused:
            raise w.fault("cancel-after-refusal", "a request that follows a refusal which the warp has seen")
        home, at = cluster.cta_of(w.uniform(slot) + offset, w)
        bar_home, bar_at = cluster.cta_of(w.uniform(bar_slot) + bar_offset, w)
        if home is not w.cta or bar_home is not w.cta:
            raise w.fault("out-of-bounds", "a response and its mbarrier lie in the shared memory of the own CTA")
        if at % RESPONSE_BYTES or at + RESPONSE_BYTES > w.cta.limit:
            raise w.fault("misaligned", f"a response requires a multiple of 16 inside shared memory, got {at:#x}")
        granted = _grant(cluster)
        for cta in cluster.ctas if multicast else [w.cta]:
            bit = _respond(w, cta, at, barrier_in(cta, bar_at, w.where()), granted)
            cluster.refused |= 0 if granted else 1 << bit

    return Effect(run)


def _respond(w: Any, cta: Any, at: int, barrier: Any, granted: tuple[int, int, int] | None) -> int:
    """One CTA's response, and the bit of the operation that brings it."""
    cluster, tracker = w.cta.cluster, w.cta.cluster.tracker
    x, y, z = granted or (0, 0, 0)
    value = x | y << 32 | z << 64 | _GRANTED if granted else _GARBAGE

    def finish() -> None:
        cta.smem[at : at + RESPONSE_BYTES] = np.frombuffer(value.to_bytes(RESPONSE_BYTES, "little"), np.uint8)
        cta.version += 1
        complete_async(op, barrier, RESPONSE_BYTES, 0)

    for other in cta.barriers:
        if at < other + 8 and other < at + RESPONSE_BYTES:
            raise w.fault("barrier-misuse", f"a response at {at:#x} covers the live mbarrier at {other:#x}")
    op = cluster.new_op(w, "load", finish, {cta}, "response")
    check_async_init(op, barrier)
    number = tracker.event(w.gid, 0, op.bit, op.where)
    tracker.write(cta.shadow, slice(at // 16, at // 16 + 1), number, op.clock, True)
    cta.smem[at : at + RESPONSE_BYTES] = 0xFF
    cta.version += 1
    cluster.engine.issue(op)
    return int(op.bit)


def _field(at: int, bits: int, response: int) -> int:
    return response >> at & ((1 << bits) - 1)


@handles(f"{_QUERY}.is_canceled")
def _is_canceled(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(2)
    if mods != ["pred", "b128"]:
        raise d.unsupported("requires .pred.b128")
    return _query(d, instr, [(d.dest(instr.operands[0]), 1, 127)])


@handles(f"{_QUERY}.get_first_ctaid", *(f"{_QUERY}.get_first_ctaid::{axis}" for axis in _AXES))
def _first_ctaid(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """`.v4.b32.b128 {x, y, z, _}, response`, or with an axis `.b32.b128 d, response`."""
    d.arity(2)
    axis = instr.opcode.partition("get_first_ctaid")[2].partition(".")[0].strip(":")
    if mods != (["b32", "b128"] if axis else ["v4", "b32", "b128"]):
        raise d.unsupported("requires .v4.b32.b128, or an axis and .b32.b128")
    items = d.items(instr.operands[0])
    if len(items) != (1 if axis else 4):
        raise d.unsupported("requires a register for the axis, or four")
    places = [_AXES.index(axis)] if axis else range(4)
    return _query(d, instr, [(d.dest(item), 32, 32 * i) for item, i in zip(items, places, strict=True)])


def _query(d: Decoder, instr: Instr, fields: list[tuple[int, int, int]]) -> Pure:
    """`fields`: slot, bits and place in the response."""
    source = d.src(instr.operands[1], 128)

    def run(r: list[Any]) -> None:
        for slot, bits, at in fields:
            found = lifted(functools.partial(_field, at, bits), bits, r[source])
            r[slot] = bool(found) if bits == 1 and isinstance(found, int) else found

    return Pure(run, tuple((slot, bits) for slot, bits, _ in fields))
