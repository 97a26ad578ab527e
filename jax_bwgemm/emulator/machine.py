"""A warp: 32 lanes in lock step, in several splits while they diverge."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import BLOCK, EXIT, SPLIT, Effect, Program, Pure
from jax_bwgemm.emulator.engine import Waitable
from jax_bwgemm.emulator.errors import Fault, Where
from jax_bwgemm.emulator.flow import registers
from jax_bwgemm.emulator.races import KNOWN, Clock
from jax_bwgemm.emulator.values import ALL_LANES, IN_FLIGHT, NUM_LANES, UNDEFINED, NoValue, Value, select


class Split:
    """Lanes that stand at one pc. `mask` is None for all live lanes. `blocked`: why it cannot move. `token`: what it
    has arrived at, for instructions that arrive and then wait."""

    __slots__ = ("blocked", "mask", "pc", "token")

    def __init__(self, pc: int, mask: np.ndarray | None) -> None:
        self.pc, self.mask = pc, mask
        self.blocked: str | None = None
        self.token: Any = None


class Warp:
    """`index` in its CTA, `gid` in its cluster."""

    def __init__(self, program: Program, cta: Any, index: int, gid: int, num_warps: int, live: int) -> None:
        self.program, self.cta, self.index, self.gid = program, cta, index, gid
        self.regs: list[Any] = list(program.template)
        self.live = np.arange(NUM_LANES) < live
        self.live_lanes = np.arange(live)
        self.splits = [Split(0, None)]
        self.split = self.splits[0]
        self.clock = Clock(num_warps)
        self.clock.rows[KNOWN, gid] = 1
        self.met = 0  # the epoch up to which every lane knows what the others did in shared memory,
        self.met_reads = 0  # and what they read there
        self.wrote = self.read = 0  # a bit for each lane that has done so since
        self.executed = 0
        self.places: dict[int, Where] = {}
        self.exited = False
        self.bulk_open: list[Any] = []  # bulk stores since the last commit_group
        self.bulk_groups: list[list[Any]] = []
        self.copies: Any = None  # by cp.async
        self.mmas: list[Any] = []  # tcgen05 operations not yet known done
        self.wgmma: Any = None
        self.unwaited_load: Where | None = None  # the last tcgen05.ld, until tcgen05.wait::ld
        self.loading: dict[int, np.ndarray] = {}  # slot -> what such a load has on its way to it
        self.unwaited_store: Where | None = None  # the last tcgen05.st, until tcgen05.wait::st
        self.mma_ops = 0  # bits of all tcgen05 MMAs and copies issued
        self.tmem_copies = 0  # bits of the copies
        self.commits: list[Any] = []  # tcgen05.commits not yet known done
        self.commit_ops = 0  # bits of all commits issued
        self.cluster_generation: int | None = None  # of the barrier.cluster.arrive not yet waited for
        self.seen: Clock | None = None  # what relaxed waits saw, until a fence acquires it
        self.released: Clock | None = None  # what the last fence released
        self.unfenced: list[Any] = []  # releases that relaxed loads from global memory saw, until a fence acquires them
        self.fenced: Any = None  # what the last fence released for relaxed stores to global memory
        self.poll: Any = None  # the last strong load from global memory: its place, and the state of memory
        self.num_polls = 0  # how often it came in a row
        self.is_after_grid_wait = not (program.waits_for_grid or cta.cluster.machine.demand_grid_wait)

    # what an effect asks about its lanes

    @property
    def active(self) -> np.ndarray:
        """The indices of the active lanes."""
        if self.split.mask is None:
            return self.live_lanes
        return np.flatnonzero(self.split.mask)

    def uniform(self, slot: int, what: str = "operand") -> int:
        """The one value of a register over the active lanes."""
        value = self.value(slot)
        if not isinstance(value, np.ndarray):
            return value
        lanes = value[self.active]
        if not (lanes == lanes[0]).all():
            raise self.fault("divergent-operand", f"{what} differs between lanes: {lanes.tolist()[:4]}...")
        return lanes[0].item()

    def value(self, slot: int) -> Value:
        value = self.regs[slot]
        if value.__class__ is NoValue:
            raise self._no_value(value)
        return value

    def lanes(self, slot: int) -> np.ndarray:
        """A register's values in the active lanes."""
        value, active = self.value(slot), self.active
        if isinstance(value, np.ndarray):
            return value[active]
        return np.full(len(active), value, np.uint64)

    def put(self, slot: int, value: Value, bits: int) -> None:
        """Writes a register in the active lanes."""
        mask = self.split.mask
        old = self.regs[slot]
        if mask is not None and old is not UNDEFINED:
            value = merge(mask, value, old, bits)
        self.regs[slot] = value

    def spread(self, slot: int, values: np.ndarray, bits: int) -> None:
        """Writes one value for each active lane."""
        active = self.active
        if len(active) < NUM_LANES:
            full = np.zeros(NUM_LANES, values.dtype)
            full[active] = values
            values = full
        self.put(slot, values, bits)

    # control

    @property
    def runnable(self) -> bool:
        for split in self.splits:  # noqa: SIM110 - asked every round; any() costs twice as much
            if split.blocked is None:
                return True
        return False

    def where(self) -> Where:
        pc = self.split.pc
        place = self.places.get(pc)
        if place is None:
            instr = self.program.instrs[pc]
            place = self.places[pc] = Where(instr.line, instr.text, self.cta.rank_in_grid, self.index)
        return place

    def fault(self, rule: str, message: str) -> Fault:
        return Fault(rule, message, self.where())

    def block(self, on: Waitable | None, reason: str) -> int:
        """Waits; the instruction is executed again when `on` has changed (or when lanes have merged, for None)."""
        self.split.blocked = reason
        if on is not None:
            on.waiters.append(self.split)
        return BLOCK

    def check_tmem_wait(self) -> None:
        """Before a release: loads from TMEM and stores to it must have been waited for."""
        if self.unwaited_store is not None:
            raise self.fault("missing-tmem-wait", f"no tcgen05.wait::st since the store at {self.unwaited_store}")
        if self.unwaited_load is not None:
            raise self.fault("missing-tmem-wait", f"no tcgen05.wait::ld since the load at {self.unwaited_load}")

    def meet(self) -> None:
        """From here on every lane knows what the others did in shared memory: bar.warp.sync, barriers of more warps."""
        self.meet_reads()
        self.met = self.cta.cluster.tracker.met[self.gid] = self.met_reads
        self.wrote = 0

    def meet_reads(self) -> None:
        """From here on every lane knows what the others have read: an instruction of the warp uses their registers."""
        self.met_reads = int(self.clock.rows[KNOWN, self.gid])
        self.clock.rows[KNOWN, self.gid] += 1
        self.read = 0

    def touch(self, is_write: bool) -> None:
        """The active lanes access shared memory."""
        if is_write:
            self.wrote |= self._bits()
        else:
            self.read |= self._bits()

    def handed(self) -> Clock:
        """What the active lanes hand on: what other lanes of the warp did since all met is not theirs to release."""
        clock, others = self.clock.copy(), ~self._bits()
        if self.wrote & others:
            clock.limit(self.gid, self.met)
        elif self.read & others:
            clock.limit(self.gid, self.met_reads)
        return clock

    def _bits(self) -> int:
        """A bit for each active lane."""
        mask = self.split.mask
        return ALL_LANES if mask is None else int(np.packbits(mask, bitorder="little").view("<u4")[0])

    def see(self, clock: Clock) -> None:
        """A relaxed operation has observed what `clock` says; a fence may acquire it."""
        if self.seen is None:
            self.seen = clock.copy()
        else:
            self.seen.join(clock)

    def join_released(self, clock: Clock) -> None:
        """What a relaxed operation hands on: what a fence before it released."""
        if self.released is not None:
            clock.join(self.released)

    def check_grid_wait(self) -> None:
        """Before an access to global memory: a griddepcontrol.wait of the CTA must be known, if the kernel has any."""
        if not self.is_after_grid_wait:
            tracker = self.cta.cluster.tracker
            if tracker.enabled and not self.clock.ops & self.cta.grid_waits:
                raise self.fault("before-grid-wait", "global memory is accessed before griddepcontrol.wait")
            self.is_after_grid_wait = True

    def needs_all_lanes(self) -> int:
        """Waits for the other lanes of the warp."""
        return self.block(None, "an instruction of the whole warp, reached by a part of its lanes")

    def branch(self, taken: Value, target: int) -> int | None:
        """Jumps where `taken`."""
        if taken is True:
            return target
        if taken is False:
            return None
        here = self.live if self.split.mask is None else self.split.mask
        jump = here & taken
        stay = here & ~taken
        if not jump.any():
            return None
        if not stay.any():
            return target
        self.splits.remove(self.split)
        self.splits += [Split(self.split.pc + 1, stay), Split(target, jump)]
        self._merge()
        return SPLIT

    def under(self, taken: Value, op: Pure | Effect) -> int | None:
        """Runs one instruction in the lanes where `taken`."""
        if taken is False:
            return None
        here = self.live if self.split.mask is None else self.split.mask
        if taken is True:
            taken = here
        both = here & taken
        if not both.any():
            return None
        if (both == self.live).all():
            return self._once(op)
        saved, self.split.mask = self.split.mask, both
        try:
            return self._once(op)
        finally:
            self.split.mask = saved

    def _once(self, op: Pure | Effect) -> int | None:
        if isinstance(op, Effect):
            return op.fn(self)
        self._masked(op.fn, op.dests, self.split.mask)
        return None

    def leave(self, ends: Value) -> int | None:
        """The active lanes end where `ends`."""
        here = self.live if self.split.mask is None else self.split.mask
        going = here & ends
        staying = here & ~going
        if not going.any():
            return None
        self.live = self.live & ~going
        self.live_lanes = np.flatnonzero(self.live)
        if staying.any():
            self.split.mask = staying
            self.split.pc += 1
        else:
            self.splits.remove(self.split)
        self.exited = not self.splits
        self._merge()
        return EXIT

    def _merge(self) -> None:
        """Splits at one pc become one; a split of all live lanes needs no mask."""
        by_pc: dict[int, Split] = {}
        for split in self.splits:
            other = by_pc.get(split.pc)
            if other is None:
                by_pc[split.pc] = split
            else:
                other.mask = other.mask | split.mask  # type: ignore[operator]
                other.blocked = None
        self.splits = list(by_pc.values())
        if len(self.splits) == 1:
            self.splits[0].mask = None

    # execution

    def run(self, quantum: int) -> None:
        """Runs until it must wait, ends, or has executed `quantum` effects."""
        while quantum > 0 and self.runnable:
            quantum = self._run_whole(quantum) if len(self.splits) == 1 else self._run_part(quantum)

    def _run_whole(self, quantum: int) -> int:
        """All live lanes together."""
        split = self.split = self.splits[0]
        program, regs, pc = self.program, self.regs, split.pc
        runs, effects = program.runs, program.effects
        fn = None
        try:
            while quantum > 0:
                run = runs[pc]
                if run is None:
                    run = program.run_at(pc)
                for fn in run:
                    fn(regs)
                pc += len(run)
                self.executed += len(run) + 1
                quantum -= 1
                split.pc = pc
                fn = None
                jump = effects[pc](self)  # type: ignore[misc]
                if jump is None:
                    pc += 1
                elif jump >= 0:
                    pc = jump
                else:
                    return quantum
        except (TypeError, AttributeError) as error:
            if fn is not None:
                split.pc = program.pc_of[id(fn)]
            raise self._register_fault(error) from error
        split.pc = pc
        return quantum

    def _run_part(self, quantum: int) -> int:
        """The unblocked split that is furthest behind, until it waits or another one is behind it."""
        split = self.split = min((s for s in self.splits if s.blocked is None), key=lambda s: s.pc)
        others = [s for s in self.splits if s is not split]
        stops = {s.pc for s in others}
        limit = min((s.pc for s in others if s.blocked is None), default=len(self.program.pure))
        while quantum > 0 and split.pc not in stops and split.pc <= limit:
            quantum -= 1
            self.executed += 1
            jump = self._step_part(split, stops)
            if jump is not None and jump < 0:
                return quantum
            split.pc = split.pc + 1 if jump is None else jump
        if split.pc in stops:
            self._merge()
        return quantum

    def _step_part(self, split: Split, stops: set[int]) -> int | None:
        """One instruction under a mask, or several that write only what the other lanes never see."""
        program, pc = self.program, split.pc
        fn = program.pure[pc]
        if fn is None:
            try:
                jump: int | None = program.effects[pc](self)  # type: ignore[misc]
            except (TypeError, AttributeError) as error:
                raise self._register_fault(error) from error
            return jump
        first, last = program.blocks[pc]
        alone = not any(first <= stop <= last for stop in stops)
        run = program.local_runs[pc]
        if run is None:
            run = program.local_run_at(pc)
        try:
            if not alone or not run:
                self._masked(fn, program.dests[pc], split.mask)
                return None
            for fn in run:
                fn(self.regs)
        except (TypeError, AttributeError) as error:
            split.pc = program.pc_of[id(fn)]
            raise self._register_fault(error) from error
        self.executed += len(run) - 1
        return pc + len(run)

    def _masked(self, fn: Any, dests: Any, mask: np.ndarray | None) -> None:
        regs = self.regs
        if mask is None:
            fn(regs)
            return
        keep = [(slot, bits, regs[slot]) for slot, bits in dests]
        fn(regs)
        for slot, bits, old in keep:
            if old is IN_FLIGHT:
                raise self._no_value(old)
            if old is not UNDEFINED:
                regs[slot] = merge(mask, regs[slot], old, bits)

    def _register_fault(self, error: Exception) -> Exception:
        """What stands behind an error of Python's while an instruction was executed: a register without a value, or
        else a mistake of this emulator."""
        instr = self.program.instrs[self.split.pc]
        written = {slot for slot, _ in self.program.dests[self.split.pc]}
        first, *rest = (*instr.operands, None)
        slots = [slot for operand in (instr.guard, *rest) for slot in registers(operand)]
        slots += [slot for slot in registers(first) if slot not in written]
        if any(self.regs[slot] is IN_FLIGHT for slot in (*slots, *written)):
            return self._no_value(IN_FLIGHT)
        if any(self.regs[slot] is UNDEFINED for slot in slots):
            return self._no_value(UNDEFINED)
        return error

    def _no_value(self, value: NoValue) -> Fault:
        if value is UNDEFINED:
            return self.fault("uninitialised-register", "a register is read before it is written")
        return self.fault(
            "register-in-flight",
            "a register is used before the asynchronous instruction that fills it was waited for",
        )


def merge(mask: np.ndarray, new: Value, old: Value, bits: int) -> Value:
    """`new` in the lanes of the mask, `old` elsewhere; stays a scalar if they agree."""
    if not isinstance(new, np.ndarray) and not isinstance(old, np.ndarray) and new == old:
        return old
    return select(mask, new, old, bits)
