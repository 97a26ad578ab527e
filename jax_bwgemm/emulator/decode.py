"""`syntax.Entry` -> `Program`: every instruction decoded once into a closure.

A handler claims an opcode stem and returns `Pure` (registers in, registers out: `fn(regs)`) or `Effect` (anything
else: `fn(warp)`, which returns None to go on, a target to jump to, or one of the codes below).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_bwgemm.emulator.errors import LaunchError, UnsupportedInstruction
from jax_bwgemm.emulator.flow import basic_blocks, local_slots, named_registers
from jax_bwgemm.emulator.specials import SPECIALS
from jax_bwgemm.emulator.syntax import (
    Entry,
    Imm,
    Instr,
    Mem,
    Missing,
    Modifiers,
    Operand,
    Operands,
    Reg,
    Sink,
    Symbol,
    Vec,
)
from jax_bwgemm.emulator.values import UNDEFINED

BLOCK, EXIT, SPLIT = -1, -2, -3  # the warp must wait here; it has ended; its lanes took different ways

PARAM_BASE = 1 << 44  # generic address of the parameter space
SHARED_BASE = 1 << 45  # generic address of shared memory: base + 32-bit shared address
SHARED_OFFSET = 0x400  # the first KiB of shared memory is reserved on sm_90 and later (CUDA programming guide)


@dataclasses.dataclass(frozen=True)
class Pure:
    """Registers in, registers out; `dests` are (slot, bits)."""

    fn: Callable[[list[Any]], None]
    dests: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Effect:
    """Everything that touches more than registers. Writes registers through `Warp.put` only."""

    fn: Callable[[Any], int | None]
    dests: tuple[tuple[int, int], ...] = ()


def whole_warp(fn: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """For `.aligned` and `.sync` instructions: a split waits until the other lanes of its warp have caught up."""

    def run(warp: Any) -> int | None:
        if warp.split.mask is not None:
            return warp.needs_all_lanes()
        return fn(warp)

    return run


Handler = Callable[["Decoder", Instr, list[str]], "Pure | Effect"]
HANDLERS: dict[str, Handler] = {}


def handles(*stems: str) -> Callable[[Handler], Handler]:
    """Registers a handler for opcode stems, such as `mbarrier.try_wait`."""

    def register(fn: Handler) -> Handler:
        for stem in stems:
            if stem in HANDLERS:
                raise ValueError(f"two handlers claim `{stem}`")
            HANDLERS[stem] = fn
        return fn

    return register


class Decoder:
    """What a handler may ask while it decodes: slots of operands, constants, parameters."""

    def __init__(self, entry: Entry, params: bytes, target: str = "") -> None:
        self.entry = entry
        self.params = params
        self.target = target
        self.num_slots = entry.num_slots
        self.constants: dict[int, Any] = {}
        self.by_value: dict[tuple[type, Any], int] = {}
        self.specials: dict[str, int] = {}
        self.param_at = {p.name: p for p in entry.params}
        self.shared_at, self.dynamic_offset = self._place_shared()
        self.instr: Instr | None = None

    def _place_shared(self) -> tuple[dict[str, int], int]:
        """Static variables first, the dynamic array after them."""
        at, offset = {}, SHARED_OFFSET
        for var in sorted(self.entry.shared, key=lambda v: v.size == 0):
            offset = -(-offset // max(var.align, 1)) * max(var.align, 1)
            at[var.name] = offset
            offset += var.size
        return at, offset

    def unsupported(self, reason: str) -> UnsupportedInstruction:
        assert self.instr is not None
        return UnsupportedInstruction(self.instr.line, self.instr.text, reason)

    def only(self, mods: list[str], *allowed: str) -> None:
        """Refuses a modifier that the handler does not know."""
        for mod in mods:
            if mod not in allowed:
                raise self.unsupported(f"unknown modifier `.{mod}`")

    def not_on(self, what: str, *targets: str) -> None:
        """Refuses what a target of these families lacks."""
        if any(self.target.startswith(target) for target in targets):
            raise self.unsupported(f"{self.target} has no {what}")

    def arity(self, *counts: int) -> None:
        assert self.instr is not None
        if len(self.instr.operands) not in counts:
            raise self.unsupported(f"requires {' or '.join(map(str, counts))} operands")

    def new_slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def constant(self, value: Any) -> int:
        key = (type(value), value)
        if key not in self.by_value:
            self.by_value[key] = self.new_slot()
            self.constants[self.by_value[key]] = value
        return self.by_value[key]

    def src(self, operand: Operand, bits: int, wider: bool = False) -> int:
        """The slot of a source operand; an immediate becomes a constant of `bits` raw bits. Where a register may be
        `wider`, as in st and cvt, the low bits count. None has 8 bits."""
        if isinstance(operand, Reg):
            need = bits if bits == 1 else max(bits, 16)
            if operand.bits != need and not (wider and operand.bits > need > 1):
                raise self.unsupported(f"a register of {need} bits is required, got {operand.name} of {operand.bits}")
            return operand.slot
        if isinstance(operand, Imm):
            return self.constant(bool(operand.value)) if bits == 1 else self.constant(operand.value & ((1 << bits) - 1))
        if isinstance(operand, Symbol):
            return self.symbol(operand.name, bits)
        raise self.unsupported(f"a register or an immediate is required, got {operand}")

    def address(self, operand: Operand) -> int:
        """The slot of an address: a register of 32 or 64 bits, a number or a symbol."""
        return self.src(operand, operand.bits if isinstance(operand, Reg) and operand.bits in (32, 64) else 64)

    def symbol(self, name: str, bits: int) -> int:
        if name in self.param_at and bits == 64:
            return self.constant(PARAM_BASE + self.param_at[name].offset)
        if (name in self.shared_at and bits in (32, 64)) or SPECIALS.get(name) == bits:
            if name not in self.specials:
                self.specials[name] = self.new_slot()
            return self.specials[name]
        raise self.unsupported(f"unknown symbol `{name}` of {bits} bits")

    def dest(self, operand: Operand) -> int:
        """The slot of a destination register; `_` gets a slot that nobody reads."""
        if isinstance(operand, Reg):
            return operand.slot
        if isinstance(operand, Sink):
            return self.new_slot()
        raise self.unsupported(f"a destination register is required, got {operand}")

    def register_bits(self, operand: Operand, bits: int) -> int:
        """Of a destination for `bits`: a register may be wider, and PTX has none of 8 bits."""
        return max(bits, operand.bits if isinstance(operand, Reg) else 16, 16)

    def mem(self, operand: Operand) -> Mem:
        if not isinstance(operand, Mem):
            raise self.unsupported(f"an address in brackets is required, got {operand}")
        return operand

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand; a single operand counts as one."""
        return operand.items if isinstance(operand, Vec) else (operand,)

    def label(self, operand: Operand) -> int:
        if isinstance(operand, Symbol):
            for depth in range(len(operand.scope), 0, -1):
                index = self.entry.labels.get((operand.scope[:depth], operand.name))
                if index is not None:
                    return index
        raise self.unsupported(f"unknown label {operand}")

    def decode(self, instr: Instr) -> Pure | Effect:
        self.instr = instr
        tokens = instr.opcode.split(".")
        for count in range(len(tokens), 0, -1):
            handler = HANDLERS.get(".".join(tokens[:count]))
            if handler:
                try:
                    op = handler(self, instr, Modifiers(tokens[count:]))
                except Missing as missing:
                    raise self.unsupported(str(missing)) from None
                self._check_dests(op)
                return op
        raise self.unsupported("unknown opcode")

    def _check_dests(self, op: Pure | Effect) -> None:
        assert self.instr is not None
        written = dict(op.dests)
        for reg in (reg for operand in self.instr.operands for reg in named_registers(operand)):
            if written.get(reg.slot, reg.bits) != reg.bits:
                need = written[reg.slot]
                raise self.unsupported(f"a register of {need} bits is required, got {reg.name} of {reg.bits}")


@dataclasses.dataclass
class Program:
    """A decoded kernel. Filled on demand: `runs[pc]` is the stretch of pure instructions that starts at pc;
    `local_runs[pc]` its part within one basic block that writes nothing but registers that live in that block."""

    instrs: tuple[Instr, ...]
    pure: list[Callable[[list[Any]], None] | None]
    effects: list[Callable[[Any], int | None] | None]
    dests: list[tuple[tuple[int, int], ...]]
    blocks: list[tuple[int, int]]
    local: list[bool]
    template: list[Any]
    specials: dict[str, int]
    shared_at: dict[str, int]
    dynamic_offset: int
    runs: list[tuple[Callable[[list[Any]], None], ...] | None]
    local_runs: list[tuple[Callable[[list[Any]], None], ...] | None]
    pc_of: dict[int, int]
    waits_for_grid: bool

    def run_at(self, pc: int) -> tuple[Callable[[list[Any]], None], ...]:
        fns: list[Callable[[list[Any]], None]] = []
        while (fn := self.pure[pc + len(fns)]) is not None:
            fns.append(fn)
        run = self.runs[pc] = tuple(fns)
        return run

    def local_run_at(self, pc: int) -> tuple[Callable[[list[Any]], None], ...]:
        fns: list[Callable[[list[Any]], None]] = []
        for at in range(pc, self.blocks[pc][1] + 1):
            fn = self.pure[at]
            if fn is None or not all(self.local[slot] for slot, _ in self.dests[at]):
                break
            fns.append(fn)
        run = self.local_runs[pc] = tuple(fns)
        return run


def decode(entry: Entry, params: bytes, target: str = "") -> Program:
    """Decodes a kernel of a module for `target` for one parameter block (parameters become constants)."""
    need = max((p.offset + p.size for p in entry.params), default=0)
    if len(params) < need:
        raise LaunchError(f"`{entry.name}` requires {need} bytes of parameters, got {len(params)}")
    decoder = Decoder(entry, params, target)
    pure: list[Any] = []
    effects: list[Any] = []
    dests = []
    for instr in entry.body:
        op = decoder.decode(instr)
        if instr.guard is not None and instr.opcode.split(".")[0] not in ("bra", "ret", "exit"):
            op = _guarded(op, instr)
        pure.append(op.fn if isinstance(op, Pure) else None)
        effects.append(op.fn if isinstance(op, Effect) else None)
        dests.append(op.dests)
    pure.append(None)
    effects.append(_fell_off)
    dests.append(())
    blocks = basic_blocks(entry)
    template: list[Any] = [UNDEFINED] * decoder.num_slots
    for slot, value in decoder.constants.items():
        template[slot] = value
    pc_of = {id(fn): pc for pc, fn in enumerate(pure) if fn is not None}
    return Program(
        (*entry.body, Instr(entry.body[-1].line if entry.body else 0, "(end of kernel)", "ret", Operands())),
        pure,
        effects,
        dests,
        blocks,
        local_slots(entry, dests, blocks, decoder.num_slots),
        template,
        decoder.specials,
        decoder.shared_at,
        decoder.dynamic_offset,
        [None] * len(pure),
        [None] * len(pure),
        pc_of,
        any(instr.opcode == "griddepcontrol.wait" for instr in entry.body),
    )


def _fell_off(warp: Any) -> int:
    raise warp.fault("no-exit", "the end of the kernel is reached without ret or exit")


def _guarded(op: Pure | Effect, instr: Instr) -> Effect:
    """Any instruction but a branch under `@p`: lanes whose predicate is false sit it out."""
    assert instr.guard is not None
    slot, negate = instr.guard.slot, instr.guard_not

    def run(warp: Any) -> int | None:
        return warp.under(warp.regs[slot] ^ negate, op)

    return Effect(run, op.dests)
