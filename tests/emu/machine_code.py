"""The machine code of cubins, with the control bits of each instruction; needs nvdisasm.

ptxas writes into each instruction's 128 bits how it is scheduled: the upper word has, from bit 46 on, the scoreboard
that counts until the instruction's registers are written (7: none), and from bit 52 on a mask of the scoreboards for
which it waits (as public disassemblers of sm_70 and later have it).
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jax_bwgemm.kernels.aot.cubin import read_cubin
from jax_bwgemm.kernels.aot.sass import find_nvdisasm

ALIGN_BYTES = 128
NO_SCOREBOARD = 7
_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][\w.]*)([^;]*);"
    r"\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`upper`: the second of its two words."""

    opcode: str
    operands: str
    upper: int

    @property
    def scoreboard(self) -> int:
        return self.upper >> 46 & 7

    @property
    def waits_for(self) -> int:
        return self.upper >> 52 & 0x3F

    @property
    def registers(self) -> set[int]:
        """Those that it names; of a wide one the first."""
        return {int(number) for number in re.findall(r"(?<![UP])\bR(\d+)", self.operands)}


def disassemble(cubins: Sequence[bytes], target: str) -> list[list[Instruction]]:
    """The instructions of each kernel; nvdisasm starts once for all."""
    image, starts = bytearray(), []
    for cubin in cubins:
        starts.append(len(image))
        code = read_cubin(cubin).text
        image += code + bytes(-len(code) % ALIGN_BYTES)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "code.bin"
        path.write_bytes(image)
        sm = target.replace("sm_", "SM")
        command = [find_nvdisasm(), "--binary", sm, "--no-dataflow", "-hex", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels: list[list[Instruction]] = [[] for _ in cubins]
    at = 0
    for offset, opcode, operands, upper in _LINE.findall(text):
        while at + 1 < len(starts) and int(offset, 16) >= starts[at + 1]:
            at += 1
        kernels[at].append(Instruction(opcode, operands, int(upper, 16)))
    return kernels


def loaded_registers(load: Instruction) -> range:
    """The registers that an LDTM fills: `.x8` means 8, of the shape `.16dp256bit` four times as many."""
    (repeat,) = re.findall(r"\.x(\d+)", load.opcode) or ("1",)
    first = int(re.findall(r"\bR(\d+)", load.operands)[0])
    return range(first, first + int(repeat) * (4 if "16dp256bit" in load.opcode else 1))


def early_readers(code: Sequence[Instruction]) -> list[str]:
    """Uses of what an LDTM loads before an instruction waits for its scoreboard, in the order of the code. One without
    a scoreboard leans on the LDTM behind it: they come back in order."""
    found = []
    for i, load in enumerate(code):
        if not load.opcode.startswith("LDTM"):
            continue
        registers, scoreboard = set(loaded_registers(load)), load.scoreboard
        for user in code[i + 1 :]:
            if scoreboard != NO_SCOREBOARD and user.waits_for >> scoreboard & 1:
                break
            if user.registers & registers:
                found.append(f"{user.opcode}{user.operands}behind {load.opcode}{load.operands}")
                break
            if scoreboard == NO_SCOREBOARD and user.opcode.startswith("LDTM"):
                scoreboard = user.scoreboard
        else:
            found.append(f"nobody waits for {load.opcode}{load.operands}")
    return found


def unfenced_stores(code: Sequence[Instruction]) -> list[str]:
    """TMA stores before which the last store to shared memory has no proxy fence behind it, in the code's order."""
    found, pending = [], ""
    for instruction in code:
        base = instruction.opcode.partition(".")[0]
        if base in ("STS", "STSM"):
            pending = f"{instruction.opcode}{instruction.operands}"
        elif instruction.opcode.startswith("FENCE.VIEW.ASYNC"):
            pending = ""
        elif base in ("UTMASTG", "UTMAREDG") and pending:
            found.append(f"{instruction.opcode} behind {pending}")
    return found
