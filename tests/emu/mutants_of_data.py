"""Mutants that break what is moved and multiplied: TMEM, descriptors, boxes, registers."""

from __future__ import annotations

from tests.emu import sites
from tests.emu.edits import At, change, drop, move, number, operand
from tests.emu.mutant import ALL, BLACKWELL, CLUSTERS, FEW_STAGES, HOPPER, PAIR, TWO_LOAD, Mutant, bits

TENSOR_MEMORY = [
    Mutant("TMEM is never freed", BLACKWELL, drop(At(sites.DEALLOC))),
    Mutant("half of the TMEM is freed", BLACKWELL, number(At(r"mov\.b32", before=sites.DEALLOC), lambda n: n // 2)),
    Mutant("half of the TMEM is allocated", BLACKWELL, number(At(r"mov\.b32", before=sites.ALLOC), lambda n: n // 2)),
    Mutant("TMEM is freed before all store warps have read", BLACKWELL, drop(At(r"bar\.sync", before=sites.DEALLOC))),
    Mutant("the MMA warp does not wait for the TMEM address", BLACKWELL, drop(At(r"bar\.sync\s+2", before=sites.MMA))),
    Mutant("the TMEM address is read before it is known", BLACKWELL, number(At(r"bar\.sync\s+2"), lambda n: n - 128)),
    Mutant("the right to allocate is kept", BLACKWELL, drop(At(r"relinquish"))),
    Mutant(
        "accumulators overlap", BLACKWELL, number(At(r"shl\.b32.*, [78];", before=r"mov\.pred.*, 0;"), lambda n: n - 1)
    ),
    Mutant(
        "a load of TMEM starts 16 columns late",
        BLACKWELL,
        operand(At(sites.TMEM_LOAD, before=sites.STORE), r"\[(%r\d+)\]", "add.u32 {}, 16"),
    ),
    Mutant(
        "a load of TMEM leaves the allocation",
        BLACKWELL,
        operand(At(sites.TMEM_LOAD, before=sites.STORE), r"\[(%r\d+)\]", "add.u32 {}, 512"),
    ),
    Mutant("store warps read the lanes of others", BLACKWELL, number(At(r"shl\.b32.*, 21;"), lambda n: n - 1)),
]
DESCRIPTORS = [
    Mutant("A has another layout", ALL, bits(sites.A_DESCRIPTOR, 3 << 62)),
    Mutant("a descriptor has no version", BLACKWELL, bits(sites.A_DESCRIPTOR, 1 << 46)),
    Mutant("A's groups of 8 rows lie twice as far apart", ALL, bits(sites.A_DESCRIPTOR, 3 << 38)),
    Mutant("B's groups of 8 rows of k lie twice as far apart", ALL, bits(sites.B_DESCRIPTOR, 3 << 38)),
    Mutant("B's second half of columns is read from the first", ALL, bits(sites.B_DESCRIPTOR, 512 << 16)),
    Mutant("A has another leading offset", ALL, bits(sites.A_DESCRIPTOR, 512 << 16)),
    Mutant("B starts 16 bytes late", ALL, bits(sites.B_DESCRIPTOR, 1)),
    Mutant("B is read as K-major", BLACKWELL, bits(sites.INSTRUCTION_DESCRIPTOR, 1 << 16)),
    Mutant("operands are read as float16", BLACKWELL, bits(sites.INSTRUCTION_DESCRIPTOR, 9 << 7)),
    Mutant("an MMA covers another N", BLACKWELL, bits(sites.INSTRUCTION_DESCRIPTOR, 3 << 21)),
    Mutant("an MMA covers another M", BLACKWELL, bits(sites.INSTRUCTION_DESCRIPTOR, 3 << 27)),
    Mutant("A is negated", BLACKWELL, bits(sites.INSTRUCTION_DESCRIPTOR, 1 << 13)),
    Mutant("MMAs take stages for half as large", ALL, number(At(r"shl\.b32.*, 10;"), lambda n: n - 1)),
    Mutant("two steps of k read the same A", ALL, change(At(r"(add\.s32|or\.b32).*, 2;"), r", 2;", ", 0;")),
    Mutant("the first MMA adds to what is there", BLACKWELL, change(At(r"mov\.pred.*, 0;"), ", 0;", ", -1;")),
    Mutant("commits are those of a single CTA", PAIR, change(At(sites.COMMIT), "cta_group::2", "cta_group::1")),
    Mutant("every lane issues the MMA", BLACKWELL, drop(At("bra", before=sites.MMA))),
    Mutant("the odd CTA of the pair issues", PAIR, change(At(r"setp\.ne", before=r"bar\.sync\s+2"), "ne", "eq")),
]
LOADS = [
    Mutant(
        "the CTAs' halves of A are swapped", CLUSTERS, operand(At(sites.LOAD_A), r"\{%r\d+, (%r\d+)", "xor.b32 {}, 128")
    ),
    Mutant("the CTAs' halves of B are swapped", PAIR, operand(At(sites.LOAD_B), r"\{(%r\d+), ", "xor.b32 {}, 128")),
    Mutant(
        "the CTAs' parts of a multicast B are swapped",
        HOPPER,
        operand(At(sites.LOAD_B), r"\{%r\d+, (%r\d+)", "xor.b32 {}, 32"),
    ),
    Mutant(
        "a box of B lands on the next one",
        ALL,
        change(At(sites.LOAD_B), r"\+(\d+)", lambda match: f"+{int(match[1]) + 8192}"),
    ),
    Mutant("steps of k overlap", ALL, number(At(r"add\.s32.*, 64;", after=sites.LOAD), lambda n: n // 2)),
    Mutant("stages overlap", BLACKWELL, number(At(r"shl\.b32", before=sites.LOAD_A), lambda n: n - 1)),
    Mutant("the loader uses one stage less", ALL, number(At(r"setp\.eq", after=sites.LOAD), lambda n: n - 1)),
    Mutant("the MMA warp uses one stage less", BLACKWELL, number(At(r"setp\.eq", after=sites.MMA), lambda n: n - 1)),
    Mutant("a load signals the stage after", ALL, change(At(sites.LOAD_A), r"\[(%r\d+)\], (%rd\d+);", r"[\1+8], \2;")),
    Mutant("a load is not aligned", ALL, change(At(sites.LOAD_A), r"\+1024", "+1040")),
    Mutant("every lane loads", ALL, drop(At("bra", before=sites.LOAD_A))),
    Mutant("CTAs whose part is loaded for them load, too", TWO_LOAD, number(sites.LOADERS, lambda _: 3)),
    Mutant("only one CTA loads its part for all", TWO_LOAD, number(sites.LOADERS, lambda _: 0)),
    Mutant("the odd CTA's load signals alone", PAIR, change(At(sites.LOAD_A), r"\.cta_group::2", "")),
]
_WAIT_FOR_STAGE = r"wgmma\.wait_group.*1;"
REGISTERS = [
    Mutant("no wgmma.fence", HOPPER, drop(At(r"wgmma\.fence"))),
    Mutant("wgmmas are not committed", HOPPER, drop(At(r"wgmma\.commit_group"))),
    Mutant(
        "one wgmma group too many stays in flight",
        HOPPER + FEW_STAGES,
        number(At(_WAIT_FOR_STAGE), lambda n: n + 1),
    ),
    Mutant(
        "a stage is released before its wgmmas are waited for",
        FEW_STAGES,
        move(At(r"\w", after=_WAIT_FOR_STAGE), At(_WAIT_FOR_STAGE), through=sites.ARRIVE),
    ),
    Mutant("accumulators are used before their wgmmas are done", HOPPER, drop(At(r"wgmma\.wait_group.*0;"))),
    Mutant("B is read as K-major by wgmma", HOPPER, change(At(sites.WGMMA), r"1;", "0;")),
    Mutant("the loader keeps its registers", HOPPER, drop(At(r"setmaxnreg\.dec"))),
    Mutant("the consumers want more registers than there are", HOPPER, number(At(r"setmaxnreg\.inc"), lambda n: n + 8)),
    Mutant("the consumers take no registers", HOPPER, drop(At(r"setmaxnreg\.inc"))),
]
