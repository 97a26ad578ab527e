"""Branches, exits and warp-wide exchanges. The exchanges were checked on an H200 (driver 580, 2026-11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, Pure, handles, whole_warp
from jax_bwgemm.emulator.syntax import Imm, Instr, Pair, Sink
from jax_bwgemm.emulator.values import ALL_LANES, LANES, NUM_LANES, Value, vec


@handles("bra")
def _bra(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(1)
    d.only(mods, "uni")
    target = d.label(instr.operands[0])
    if instr.guard is None:
        return Effect(lambda w: target)
    slot, negate = instr.guard.slot, instr.guard_not
    return Effect(lambda w: w.branch(w.regs[slot] ^ negate, target))


@handles("ret", "exit")
def _exit(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "uni")
    if instr.guard is None:
        return Effect(lambda w: w.leave(True))
    slot, negate = instr.guard.slot, instr.guard_not
    return Effect(lambda w: w.leave(w.regs[slot] ^ negate))


@handles("trap")
def _trap(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    def run(w: Any) -> None:
        raise w.fault("trap", "the kernel executed trap")

    return Effect(run)


@handles("setmaxnreg")
def _setmaxnreg(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Releases registers to the CTA's pool, or waits until the pool has them."""
    d.only(mods, "inc", "dec", "sync", "aligned", "u32")
    operand = instr.operands[0]
    if not isinstance(operand, Imm) or operand.value % 8 or not 24 <= operand.value <= 256:
        raise d.unsupported("requires a register count that is a multiple of 8 in 24..256")
    count = operand.value

    @whole_warp
    def run(w: Any) -> int | None:
        pool = w.cta.registers
        if pool.resize(w.index, count):
            return None
        return w.block(pool, f"{count} registers a thread; {pool.free} are free in the CTA's pool")

    return Effect(run)


NO_EFFECT: dict[str, tuple[str, ...]] = {
    "griddepcontrol.launch_dependents": (),
    "prefetch.tensormap": (),
    "nanosleep": ("u32",),
    "nop": (),
    "cp.async.bulk.prefetch.tensor": ("1d", "2d", "3d", "4d", "5d", "L2", "global", "tile", "L2::cache_hint"),
    "tcgen05.fence::before_thread_sync": (),
    "tcgen05.fence::after_thread_sync": (),
}  # stem -> modifiers


@handles(*NO_EFFECT)
def _no_effect(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Grids are not overlapped, caches are not modelled, and mbarrier waits alone order tcgen05 here."""
    d.only(mods, *NO_EFFECT[instr.opcode.removesuffix("".join(f".{mod}" for mod in mods))])
    return Effect(lambda w: None)


@handles("griddepcontrol.wait")
def _grid_wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Grids are not overlapped: it returns at once. Who may touch global memory has to know of one of these."""
    d.only(mods)

    def run(w: Any) -> None:
        bit = 1 << w.cta.cluster.tracker.new_op(w.where())
        w.cta.grid_waits |= bit
        w.clock.ops |= bit

    return Effect(run)


# lanes


@handles("elect.sync")
def _elect(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """The lowest active lane is elected (the PTX ISA leaves it open)."""
    d.arity(2)
    d.only(mods)
    pair = instr.operands[0]
    if not isinstance(pair, Pair):
        raise d.unsupported("requires d|p")
    leader, chosen = d.dest(pair.first), d.dest(pair.second)
    first_only = LANES == 0

    @whole_warp
    def run(w: Any) -> int | None:
        lane = 0 if w.live[0] else int(w.active[0])
        w.put(leader, lane, 32)
        w.put(chosen, first_only if lane == 0 else lane == LANES, 1)
        return None

    return Effect(run, ((leader, 32), (chosen, 1)))


@handles("shfl.sync")
def _shfl(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`shfl.sync.mode.b32 d[|p], a, b, c, membermask`."""
    d.arity(5)
    d.only(mods, "idx", "bfly", "up", "down", "b32")
    mode = mods[0]
    out = instr.operands[0]
    dest = d.dest(out.first if isinstance(out, Pair) else out)
    valid = d.dest(out.second if isinstance(out, Pair) else Sink())
    a, b, c, _ = (d.src(o, 32) for o in instr.operands[1:])

    @whole_warp
    def run(w: Any) -> int | None:
        value, lane = w.value(a), w.value(b)
        if not isinstance(value, np.ndarray) and mode == "idx" and not isinstance(out, Pair):
            w.put(dest, value, 32)
            return None
        source, inside = _shfl_source(mode, lane, w.uniform(c, "shfl clamp"))
        picked = vec(value, 32)[source]
        same = mode == "idx" and (source == source[0]).all()
        w.put(dest, int(picked[0]) if same else picked, 32)
        w.put(valid, inside, 1)
        return None

    return Effect(run, ((dest, 32), (valid, 1)))


def _shfl_source(mode: str, lane: Value, control: int) -> tuple[np.ndarray, np.ndarray]:
    """Source lanes and whether each was in range (PTX ISA, shfl.sync)."""
    own = LANES.astype(np.int64)
    clamp, segment = control & 31, control >> 8 & 31
    low = own & segment
    high = low | (clamp & ~segment)
    offset = np.asarray(lane, np.int64) & 31
    source = {
        "idx": low | (offset & ~segment),
        "bfly": own ^ offset,
        "up": own - offset,
        "down": own + offset,
    }[mode]
    inside = source >= high if mode == "up" else source <= high
    return np.where(inside, source, own), np.broadcast_to(inside, NUM_LANES)


@handles("vote.sync")
def _vote(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(3)
    d.only(mods, "all", "any", "uni", "ballot", "pred", "b32")
    p, dest = d.src(instr.operands[1], 1), d.dest(instr.operands[0])
    bits = 32 if mods[0] == "ballot" else 1

    @whole_warp
    def run(w: Any) -> int | None:
        votes = w.lanes(p).astype(bool)
        ballot = int((np.left_shift(np.uint64(1), w.active.astype(np.uint64)) * votes).sum())
        results: dict[str, Any] = {
            "all": bool(votes.all()),
            "any": bool(votes.any()),
            "ballot": ballot,
            "uni": bool(votes.all() or not votes.any()),
        }
        w.put(dest, results[mods[0]], bits)
        return None

    return Effect(run, ((dest, bits),))


@handles("activemask")
def _activemask(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "b32")
    dest = d.dest(instr.operands[0])
    return Effect(lambda w: w.put(dest, sum(1 << int(i) for i in w.active), 32), ((dest, 32),))


@handles("redux.sync")
def _redux(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(3)
    d.only(mods, "add", "min", "max", "and", "or", "xor", "u32", "b32")
    fold: Callable[..., Any] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[mods[0]].reduce
    dest, source = d.dest(instr.operands[0]), d.src(instr.operands[1], 32)

    @whole_warp
    def run(w: Any) -> int | None:
        w.put(dest, int(fold(w.lanes(source).astype(np.uint32))), 32)
        return None

    return Effect(run, ((dest, 32),))


@handles("bar.warp.sync")
def _warp_sync(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods)
    mask = instr.operands[0]
    if not isinstance(mask, Imm) or mask.value & ALL_LANES != ALL_LANES:
        raise d.unsupported("requires the mask of all lanes")
    return Effect(whole_warp(lambda w: w.meet()))


@handles("mapa")
def _mapa(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """The same offset in another CTA of the cluster. One that does not exist is an error only when it is used."""
    d.arity(3)
    d.only(mods, "shared::cluster", "u32", "u64")
    if len(mods) != 2 or mods[0] != "shared::cluster":
        raise d.unsupported("generic addresses are not modelled here")
    bits = {"u32": 32, "u64": 64}.get(mods[1], 0)
    dest, a, rank = d.dest(instr.operands[0]), d.src(instr.operands[1], bits), d.src(instr.operands[2], 32)

    def run(r: list[Any]) -> None:
        r[dest] = (r[a] & 0xFFFFFF) | ((r[rank] & 0xFF) << 24)

    return Pure(run, ((dest, bits),))
