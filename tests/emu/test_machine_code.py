"""Gates on what is built that the emulator does not see, or sees as it understands it: the whole catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts
from tests.emu.machine_code import Instruction, disassemble, early_readers, unfenced_stores
from tests.emu.shipped import ptx, variants, why_missing

pytestmark = pytest.mark.long

BLACKWELL = ("sm_100f", "sm_100a")
TARGETS = ("sm_90a", *BLACKWELL)
BATCH = 50  # kernels that nvdisasm is started for


def built(target: str) -> list[Variant]:
    found = [variant for variant in variants(target) if why_missing(variant) is None]
    if not found:
        pytest.skip(f"no kernel of {target} is built")
    return found


def code(target: str) -> Iterator[tuple[Variant, list[Instruction]]]:
    """Of each kernel. That of all at once would take gigabytes."""
    kernels = built(target)
    for start in range(0, len(kernels), BATCH):
        batch = kernels[start : start + BATCH]
        found = [(variant, artifacts.find_ptx(variant)) for variant in batch]
        cubins = [(path.parent / f"{of.name}.cubin").read_bytes() for of, path in found if not isinstance(path, str)]
        yield from zip(batch, disassemble(cubins, target), strict=True)


def descriptor(variant: Variant) -> int:
    """PTX ISA, tcgen05 instruction descriptor: from bit 4 on the type of D, from 7 and 10 on those of A and B, at 15
    and 16 whether they are MN-major, from 17 on N / 8, from 24 on M / 16; at 3, integers saturate."""
    code_of = {"float16": 0, "bfloat16": 1, "float32": 2, "float8_e4m3fn": 0, "float8_e5m2": 1, "uint8": 0, "int8": 1}
    is_integer = variant.a_dtype in ("int8", "uint8")
    fields = {
        3: int(is_integer),
        4: 2 if is_integer else 1,
        7: code_of[variant.a_dtype],
        10: code_of[variant.b_dtype],
        15: int(variant.a_major == "m"),
        16: int(variant.b_major == "n"),
        17: variant.tile.mma_n // 8,
        24: variant.tile.mma_m // 16,
    }
    return sum(value << at for at, value in fields.items())


def descriptors(text: str) -> set[int]:
    """Those of the MMAs of a kernel, each a constant."""
    names = re.findall(r"tcgen05\.mma\S*\s+\[[^\]]*\], *[^,]+, *[^,]+, *(%r\d+)", text)
    found = set()
    for name in set(names):
        values = re.findall(rf"mov\.b32\s+{re.escape(name)}, (-?\d+);", text)
        assert len(values) == 1, f"{name} is set {len(values)} times"
        found.add(int(values[0]) & 0xFFFFFFFF)
    return found


@pytest.mark.parametrize("target", BLACKWELL)
def test_instruction_descriptors(target: str) -> None:
    wrong = {}
    for variant in built(target):
        found = descriptors(ptx(variant.name))
        if found != {descriptor(variant)}:
            wrong[variant.name] = [hex(bits) for bits in found], hex(descriptor(variant))
    assert not wrong, list(wrong.items())[:5]


@pytest.mark.parametrize("target", TARGETS)
def test_waits_and_fences(target: str) -> None:
    """TMEM loads are waited for by the scoreboard that they hold: the machine has no other wait for them. A proxy fence
    stands before TMA stores."""
    early, unfenced = {}, {}
    for variant, kernel in code(target):
        opcodes = {instruction.opcode.partition(".")[0] for instruction in kernel}
        assert target not in BLACKWELL or "LDTM" in opcodes, variant.name
        assert variant.store != "tma" or "UTMASTG" in opcodes, variant.name
        early |= {variant.name: found} if (found := early_readers(kernel)) else {}
        unfenced |= {variant.name: found} if (found := unfenced_stores(kernel)) else {}
    assert not early, list(early.items())[:5]
    assert not unfenced, list(unfenced.items())[:5]


LOAD = Instruction("LDTM.x2", " R4, tmem[UR30] ", 1 << 46)
USE, WAIT = Instruction("FADD", " R9, R5, R8 ", 7 << 46), Instruction("NOP", " ", 7 << 46 | 2 << 52)
STORE, FENCE = Instruction("STS.128", " [R41], R8 ", 0), Instruction("FENCE.VIEW.ASYNC.S", " ", 0)
TMA = Instruction("UTMASTG.3D", " [UR16], [UR24] ", 0)


def test_the_gates_refuse() -> None:
    """One instruction taken away from what is right."""
    assert not early_readers([LOAD, WAIT, USE])
    assert not early_readers([LOAD, Instruction("FADD", USE.operands, WAIT.upper)])
    assert not early_readers([LOAD, Instruction("FADD", " R9, R6, R3 ", 0), WAIT])
    assert early_readers([LOAD, USE, WAIT]) and early_readers([LOAD])
    early = Instruction("LDTM.x2", " R10, tmem[UR30+0x2] ", 7 << 46)
    assert not early_readers([early, LOAD, WAIT, USE]) and early_readers([LOAD, early, WAIT, USE])
    assert not unfenced_stores([STORE, FENCE, TMA]) and not unfenced_stores([TMA, STORE])
    assert unfenced_stores([STORE, TMA]) and unfenced_stores([FENCE, STORE, TMA])
