"""Which registers an instruction names, basic blocks, and the registers that live within one."""

from __future__ import annotations

from jax_bwgemm.emulator.syntax import Entry, Mem, Not, Operand, Pair, Reg, Vec


def basic_blocks(entry: Entry) -> list[tuple[int, int]]:
    """(first, last) pc of the basic block of each pc."""
    leaders = set(entry.labels.values()) | {0}
    for pc, instr in enumerate(entry.body):
        if instr.opcode.split(".")[0] in ("bra", "ret", "exit"):
            leaders.add(pc + 1)
    starts = sorted(leaders | {len(entry.body)})
    blocks = []
    for first, after in zip(starts, [*starts[1:], len(entry.body) + 1], strict=True):
        blocks += [(first, after - 1)] * (after - first)
    return blocks


def registers(operand: Operand | None) -> list[int]:
    """The slots that an operand names."""
    return [reg.slot for reg in named_registers(operand)]


def named_registers(operand: Operand | None) -> list[Reg]:
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Mem):
        return named_registers(operand.base) + [reg for c in operand.coords for reg in named_registers(c)]
    if isinstance(operand, Vec):
        return [reg for item in operand.items for reg in named_registers(item)]
    if isinstance(operand, Pair):
        return named_registers(operand.first) + named_registers(operand.second)
    if isinstance(operand, Not):
        return named_registers(operand.operand)
    return []


def local_slots(
    entry: Entry, dests: list[tuple[tuple[int, int], ...]], blocks: list[tuple[int, int]], num_slots: int
) -> list[bool]:
    """Registers that live within one basic block, written there before they are read: a lane that sits the block out
    never sees them, so a partial mask may overwrite them whole."""
    home: list[int | None] = [None] * num_slots
    local = [True] * num_slots
    for pc, instr in enumerate(entry.body):
        written = {slot for slot, _ in dests[pc]}
        skip = written if instr.operands and not isinstance(instr.operands[0], Mem) else set()
        reads = [s for i, o in enumerate(instr.operands) for s in registers(o) if i or s not in skip]
        reads += registers(instr.guard)
        for slot in reads:
            if home[slot] != blocks[pc][0]:
                local[slot] = False
        for slot in written:
            if home[slot] not in (None, blocks[pc][0]) or instr.guard is not None:
                local[slot] = False
            home[slot] = blocks[pc][0]
    return local
