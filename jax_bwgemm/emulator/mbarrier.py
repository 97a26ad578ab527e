"""mbarrier objects in shared memory: phases, arrival counts, transaction counts.

Agrees with an H200 (driver 580, 2026-11) but for one thing: there, a try_wait that waits does not hold its own warp's
next instructions back, and an arrival after it in the program can be what it sees.
"""

from __future__ import annotations

import collections
from typing import Any

from jax_bwgemm.emulator.decode import Decoder, Effect, handles
from jax_bwgemm.emulator.engine import AsyncOp, Waitable
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.memory import address_slot
from jax_bwgemm.emulator.races import ARRIVED, INITS, KNOWN, PUBLISHED, Clock
from jax_bwgemm.emulator.syntax import Instr, Not, Reg, Sink

MAX_COUNT = (1 << 20) - 1  # arrivals and bytes alike (PTX ISA, mbarrier contents)


class MBarrier(Waitable):
    """The phase completes when `pending` arrivals and `tx` bytes are both zero; then `pending` starts over."""

    def __init__(self, cta: Any, offset: int, count: int, warp: Any) -> None:
        super().__init__()
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.tx = self.phase = 0
        self.gathering, self.clock = Clock(cta.cluster.tracker.num_warps), Clock(cta.cluster.tracker.num_warps)
        self.init_warp, self.init_epoch = warp.gid, int(warp.clock.rows[KNOWN, warp.gid])

    def __str__(self) -> str:
        return (
            f"mbarrier {self.offset:#x} of CTA {self.cta.rank_in_grid} (phase {self.phase}, "
            f"{self.pending} of {self.count} arrivals and {self.tx} bytes pending)"
        )

    def check_init(self, clock: Clock, rows: tuple[int, ...], where: Any) -> None:
        """The user must know the initialisation."""
        if self.cta.cluster.tracker.enabled and not any(
            clock.rows[row, self.init_warp] >= self.init_epoch for row in rows
        ):
            raise Fault(
                "unpublished-init",
                f"{self} is used without knowing its initialisation (mbarrier.init, "
                "fence.mbarrier_init, then a barrier)",
                where,
            )

    def arrive(self, number: int, where: Any) -> None:
        if number > self.pending:
            raise Fault("barrier-misuse", f"{number} more arrivals at {self}", where)
        self.pending -= number
        self.settle()

    def expect(self, size: int, where: Any) -> None:
        self.tx += size
        if abs(self.tx) > MAX_COUNT:
            raise Fault("barrier-misuse", f"transaction count out of range at {self}", where)

    def complete_tx(self, size: int, where: Any) -> None:
        self.expect(-size, where)
        self.settle()

    def settle(self) -> None:
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.count
        self.clock, self.gathering = self.gathering, Clock(self.gathering.rows.shape[1])
        self.wake()


def barrier_at(w: Any, address: int) -> MBarrier:
    """The live barrier at a shared address."""
    cta, offset = w.cta.cluster.cta_of(address, w)
    return barrier_in(cta, offset, w.where())


def barrier_in(cta: Any, offset: int, where: Any) -> MBarrier:
    barrier: MBarrier | None = cta.barriers.get(offset)
    if barrier is None:
        raise Fault("barrier-misuse", f"no mbarrier was initialised at {offset:#x} of CTA {cta.rank_in_grid}", where)
    if cta.exited:
        raise Fault("exited-cta", f"an arrival or transaction reaches {barrier} after its CTA ended", where)
    return barrier


def complete_async(op: AsyncOp, barrier: MBarrier, size: int, arrivals: int) -> None:
    """An asynchronous operation signals: it and all that its issuer knew become known to those who wait."""
    barrier.gathering.join(op.clock)
    barrier.gathering.ops |= 1 << op.bit
    if size:
        barrier.complete_tx(size, op.where)
    if arrivals:
        barrier.arrive(arrivals, op.where)


def check_async_init(op: AsyncOp, barrier: MBarrier) -> None:
    barrier.check_init(op.clock, (INITS, PUBLISHED), op.where)


_SPACES = ("shared", "shared::cta", "shared::cluster", "b64")


@handles("mbarrier.init")
def _init(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    d.only(mods, *_SPACES)
    slot, offset = address_slot(d, instr.operands[0])
    count = d.src(instr.operands[1], 32)

    def run(w: Any) -> None:
        for address, number in zip(w.lanes(slot).tolist(), w.lanes(count).tolist(), strict=True):
            initialise(w, address + offset, number)

    def initialise(w: Any, address: int, number: int) -> None:
        cta, at = w.cta.cluster.cta_of(address, w)
        if at % 8 or at + 8 > cta.limit:
            raise w.fault("misaligned", f"an mbarrier requires a multiple of 8 inside shared memory, got {at:#x}")
        if cta is not w.cta or not 1 <= number <= MAX_COUNT:
            raise w.fault("barrier-misuse", f"mbarrier.init of CTA {cta.rank_in_grid} with a count of {number}")
        if at in cta.barriers:
            raise w.fault(
                "barrier-misuse", f"mbarrier.init of a live barrier (by {len(w.active)} lanes): {cta.barriers[at]}"
            )
        cta.barriers[at] = MBarrier(cta, at, number, w)

    return Effect(run)


@handles("mbarrier.inval")
def _inval(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(1)
    d.only(mods, *_SPACES)
    slot, offset = address_slot(d, instr.operands[0])

    def run(w: Any) -> None:
        for address in w.lanes(slot).tolist():
            barrier = barrier_at(w, address + offset)
            barrier.check_init(w.clock, (KNOWN, INITS), w.where())
            del barrier.cta.barriers[barrier.offset]

    return Effect(run)


@handles("mbarrier.arrive", "mbarrier.arrive.expect_tx", "mbarrier.expect_tx")
def _arrive(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`mbarrier.arrive state|_, [bar]{, count}`, `.expect_tx` with bytes; remote arrivals have no state."""
    d.only(mods, *_SPACES, "release", "relaxed", "cta", "cluster", "noComplete")
    operands = list(instr.operands)
    state = d.dest(operands.pop(0)) if isinstance(operands[0], Reg | Sink) else None
    slot, offset = address_slot(d, operands[0])
    extra = d.src(operands[1], 32) if len(operands) > 1 else d.constant(1)
    has_bytes, arrives = "expect_tx" in instr.opcode, instr.opcode.startswith("mbarrier.arrive")
    is_relaxed, at_cluster_scope = "relaxed" in mods, "cluster" in mods and "relaxed" not in mods
    if has_bytes and len(operands) < 2:
        raise d.unsupported("requires a byte count")

    def run(w: Any) -> None:
        where = w.where()
        w.check_tmem_wait()
        w.clock.rows[ARRIVED, w.gid] += 1
        clock = w.handed()
        if at_cluster_scope:
            clock.release()
        w.clock.rows[KNOWN, w.gid] += 1
        counted = collections.Counter(zip(w.lanes(slot).tolist(), w.lanes(extra).tolist(), strict=True))
        for (address, amount), lanes in counted.items():
            barrier = barrier_at(w, address + offset)
            barrier.check_init(w.clock, (KNOWN, INITS), where)
            if barrier.cta is not w.cta:
                barrier.cta.arrivals[w.gid] = int(clock.rows[ARRIVED, w.gid])
            if has_bytes:
                barrier.expect(lanes * amount, where)
            if arrives:
                if is_relaxed:
                    w.join_released(barrier.gathering)
                    barrier.gathering.join_arrivals(clock)
                else:
                    barrier.gathering.join(clock)
                barrier.arrive(lanes if has_bytes else lanes * amount, where)
        if state is not None:
            w.put(state, barrier.phase, 64)

    return Effect(run, ((state, 64),) if state is not None else ())


def _is_spin_loop(d: Decoder, instr: Instr, dest: int) -> bool:
    """`try_wait p` whose failure leads straight back to it: a wait, not a peek."""
    body = d.entry.body
    pc = next(i for i, other in enumerate(body) if other is instr)
    follow = body[pc + 1 : pc + 3]
    for step, other in enumerate(follow):
        if other.opcode.split(".")[0] != "bra":
            break
        back = pc - 4 <= d.label(other.operands[0]) <= pc
        guarded = other.guard is not None and other.guard.slot == dest
        if back and ((guarded and other.guard_not) or (step == 1 and other.guard is None)):
            return True
        if not guarded or back:
            break
    return False


@handles("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`try_wait.parity p, [bar], parity{, hint}`: true if the phase of that parity has completed."""
    d.arity(3, 4)
    d.only(mods, *_SPACES, "parity", "acquire", "relaxed", "cta", "cluster")
    if "parity" not in mods:
        raise d.unsupported("requires .parity")
    if isinstance(instr.operands[0], Not):
        raise d.unsupported("requires a predicate")
    dest = d.dest(instr.operands[0])
    slot, offset = address_slot(d, instr.operands[1])
    parity = d.src(instr.operands[2], 32)
    spins = _is_spin_loop(d, instr, dest)
    is_relaxed, at_cluster_scope = "relaxed" in mods, "cluster" in mods and "relaxed" not in mods

    def run(w: Any) -> int | None:
        barrier = barrier_at(w, w.uniform(slot, "barrier address") + offset)
        if barrier.cta is not w.cta:
            raise w.fault("barrier-misuse", f"a wait on a barrier of another CTA: {barrier}")
        barrier.check_init(w.clock, (KNOWN, INITS), w.where())
        wanted = w.uniform(parity, "parity") & 1
        if barrier.phase & 1 != wanted:
            if is_relaxed:
                w.clock.join_arrivals(barrier.clock)
                w.see(barrier.clock)
            else:
                w.clock.join(barrier.clock)
            if at_cluster_scope:
                w.clock.acquire()
            w.cta.cluster.machine.counters.wait(w.cta.rank_in_grid)
            w.put(dest, True, 1)
            return None
        if spins:
            return w.block(barrier, f"parity {wanted} of {barrier}")
        w.put(dest, False, 1)
        return None

    return Effect(run, ((dest, 1),))
