"""Mutants of what came with gated products, several results, and epilogues that read matrices and vectors of rows: two
b into one stage, two halves of an accumulator, a store buffer handed from one result to the next, and the matrices'
pipelines."""

from __future__ import annotations

import re

from jax_bwgemm.facts.epilogue import Epilogue, parse
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import kept, pullback
from jax_bwgemm.facts.variant import Variant
from tests.emu import sites
from tests.emu.edits import At, Edit, Lines, Near, Nth, both, change, copy, drop, move, number
from tests.emu.mutant import Mutant, bits, no_wait


def _variant(target: str, tile: Tile, epilogue: Epilogue, majors: str = "kkn") -> Variant:
    dtypes = ("bfloat16",) * 3
    return Variant(target, *dtypes, *majors[:2], tile, epilogue.out, majors[2], seconds=epilogue.seconds)


SCALED = Epilogue(parse("mul(mul(acc, rows:m), columns:n)"))
KERNELS = {
    "gated pair": _variant(
        "sm_100f", Tile(256, 128, cta_group=2, cluster_m=2, gated=True), kept("silu", is_gated=True)
    ),
    "gated": _variant("sm_100f", Tile(128, 128, gated=True), kept("silu", is_gated=True)),
    "gated hopper": _variant("sm_90a", Tile(128, 256, cluster_m=2, gated=True), kept("silu", is_gated=True)),
    "kept": _variant("sm_100f", Tile(128, 128), kept("silu")),
    "back pair": _variant("sm_100f", Tile(256, 256, cta_group=2, cluster_m=2), pullback("relu")),
    "back": _variant("sm_100f", Tile(128, 128), pullback("silu", is_gated=True)),
}
COMPILED = {  # none ships
    "kept hopper": _variant("sm_90a", Tile(128, 128), kept("silu")),
    "back hopper": _variant("sm_90a", Tile(128, 128), pullback("silu", is_gated=True)),
    "rows": _variant("sm_100f", Tile(128, 64), SCALED),
    "rows hopper": _variant("sm_90a", Tile(128, 64), SCALED),
}
GATED_SM100, GATED_HOPPER = ("gated pair", "gated"), ("gated hopper",)
GATED, ONE_CTA = GATED_SM100 + GATED_HOPPER, GATED_SM100[1:] + GATED_HOPPER
KEPT = (*GATED, "kept", "kept hopper")
SCALES = "rows", "rows hopper"
READS_SM100, READS_HOPPER = ("back pair", "back"), ("back hopper",)
READS, READS_TWO = READS_SM100 + READS_HOPPER, READS_SM100[1:] + READS_HOPPER

LANDS, SIGNALS = r"\[%r\d+(\+\d+)?\], \[%rd", r"\}\], \[(%r\d+)\]"  # of a load: where, and whose barrier it signals
LEAVES = r"\[%r\d+(\+\d+)?\]"  # of a store: from where
READ_BOX, ARRIVE, LANES_MEET = r"ld\.shared\.v4|ldmatrix", r"mbarrier\.arrive\.shared", r"bar\.warp\.sync"
WAIT_LD, GROUP_MEETS, ROW_LOAD = r"tcgen05\.wait::ld", r"bar\.sync\s+%r", r"ld\.global\.b16"
FLIP, COUNT, JUMP, LABEL = r"xor\.b32\s+(%r\d+), \1, 1;", r"mov\.b32", r"@%p\d+ bra", r"^\$L"
MAP = r", %rd\d+;"  # the tensor map that a move is given


def load(index: int) -> At:
    """0: A, 1: the first b, 2: the second b or the first matrix, 3: the second matrix."""
    return Nth(sites.LOAD, index=index)


def store(index: int) -> At:
    """The results of a box in turn."""
    return Nth(sites.STORE, index=index)


def matrix_of(at: At) -> At:
    """Where the tensor map of a move is named."""
    return Near(r"cvta\.param", to=at)


def same_matrix(at: At, source: At) -> Edit:
    return copy(matrix_of(at), matrix_of(source), MAP)


def exchanged(first: At, second: At) -> Edit:
    """Each moves the other's matrix."""

    def edit(lines: Lines) -> Lines:
        after = same_matrix(first, second)(lines)
        own = re.search(MAP, lines[matrix_of(first).find(lines)[0]])
        assert own
        return change(matrix_of(second), MAP, own[0])(after)

    return edit


BOTH_B = [
    Mutant("both b are the first", GATED, same_matrix(load(2), load(1))),
    Mutant("the two b are exchanged", GATED, exchanged(load(1), load(2))),
    Mutant("the second b is not loaded", GATED, drop(load(2))),
    Mutant("the second b lands where the first does", ONE_CTA, copy(load(2), load(1), LANDS)),
    Mutant("the second b signals the stage after", GATED, change(load(2), SIGNALS, r"}], [\1+8]")),
    Mutant("the second b's bytes are not expected", GATED_SM100, number(sites.EXPECTED_BYTES, lambda n: n - 8192)),
    Mutant("the second b's bytes are not expected", GATED_HOPPER, number(sites.EXPECTED_BYTES, lambda n: n - 16384)),
    Mutant("the second b's bytes are expected twice", GATED_SM100, number(sites.EXPECTED_BYTES, lambda n: n + 8192)),
    Mutant("the second b's bytes are expected twice", GATED_HOPPER, number(sites.EXPECTED_BYTES, lambda n: n + 16384)),
    Mutant(
        "the second b reaches its own CTA alone",
        GATED_HOPPER,
        change(load(2), r"\.multicast::cluster(.*), %rs\d+", r"\1"),
    ),
    Mutant("the odd CTA's b signals alone", ("gated pair",), change(load(2), r"\.cta_group::2", "")),
    Mutant("an MMA covers one b", GATED_SM100, bits(sites.INSTRUCTION_DESCRIPTOR, 24 << 17)),
]
HALVES = [
    Mutant(
        "the second half is read from the first",
        GATED_SM100,
        copy(Nth(sites.TMEM_LOAD, index=1), Nth(sites.TMEM_LOAD), LEAVES),
    ),
    Mutant(
        "the second half is loaded behind the wait",
        GATED_SM100,
        both(move(Nth(WAIT_LD), Nth(sites.TMEM_LOAD, index=1)), drop(Nth(WAIT_LD, index=1))),
    ),
    Mutant("one wait for both halves", GATED_SM100, drop(Nth(WAIT_LD))),
    Mutant(
        "the accumulator is released before its second half is read",
        GATED_SM100,
        move(At(r"elect\.sync", before=sites.ARRIVE), Nth(sites.TMEM_LOAD, index=-1), ":$"),
    ),
]
RESULTS = [
    Mutant("the second result goes where the first does", KEPT, same_matrix(store(1), store(0))),
    Mutant("results are exchanged", KEPT, exchanged(store(0), store(1))),
    Mutant("the second result leaves from the first's buffer", KEPT, copy(store(1), store(0), LEAVES)),
    Mutant("no proxy fence before the second result leaves", KEPT, drop(Near(sites.FENCE, to=store(1)))),
    Mutant("no barrier before the second result leaves", KEPT, drop(Near(GROUP_MEETS, to=store(1)))),
    Mutant("the second result is not committed", KEPT, drop(Near(sites.COMMIT_GROUP, to=store(1), below=True))),
    Mutant("a result takes a buffer that is being read", KEPT, drop(Near(sites.WAIT_GROUP, to=store(3)))),
    Mutant("a result waits for one store too few", KEPT, number(Near(sites.WAIT_GROUP, to=store(3)), lambda n: n + 1)),
]
FIRST_READ = Nth(READ_BOX)
SUMMED = Near(ARRIVE, to=Nth(LANES_MEET, index=1), below=True)  # Hopper: a warp has written a place's results
EXPECTED = Near(COUNT, to=Nth(sites.EXPECT, index=1))
READ_COUNT, SUMMED_COUNT = (Near(COUNT, to=At(rf"{sites.INIT}.*\+{at}\]")) for at in (160, 104))
MATRICES = [
    Mutant("matrices are read before they are there", READS, no_wait(Near(sites.WAIT, to=FIRST_READ))),
    Mutant("matrices overwrite what is not read yet", READS_SM100, no_wait(Near(sites.WAIT, to=load(2)))),
    Mutant("the residual warp leaves a buffer behind", READS_SM100, no_wait(Near(sites.WAIT, to=At(sites.ALLOC)))),
    Mutant("half of the matrices' bytes are expected", READS, number(EXPECTED, lambda n: n // 2)),
    Mutant("none of the matrices' bytes are expected", READS, drop(Nth(sites.EXPECT, index=1))),
    Mutant("the second matrix lands where the first does", READS_TWO, copy(load(3), load(2), LANDS)),
    Mutant("the second matrix signals another buffer", READS_TWO, change(load(3), SIGNALS, r"}], [\1+16]")),
    Mutant("both matrices are the first", READS_TWO, same_matrix(load(3), load(2))),
    Mutant("matrices are exchanged", READS_TWO, exchanged(load(2), load(3))),
    Mutant("no proxy fence behind the read", READS_SM100, drop(Near(sites.FENCE, to=Nth(ARRIVE)))),
    Mutant("lanes do not meet behind the read", READS_SM100, drop(Nth(LANES_MEET))),
    Mutant(
        "matrices are given back before they are read",
        READS_SM100,
        move(Near(JUMP, to=Nth(ARRIVE)), FIRST_READ, LABEL),
    ),
    Mutant("matrices are given back by two warps", ("back",), number(READ_COUNT, lambda n: n // 2)),
    Mutant("matrices are given back by eight warps", ("back",), number(READ_COUNT, lambda n: n * 2)),
    Mutant("the residual warp's parity never flips", ("back",), drop(Nth(FLIP))),
    Mutant("the parity of what is read never flips", ("back",), drop(Nth(FLIP, index=-1))),
]
CARRIED = [
    Mutant("results leave before they are there", READS_HOPPER, no_wait(Near(sites.WAIT, to=store(0)))),
    Mutant("matrices overwrite results that have not left", READS_HOPPER, drop(Nth(sites.WAIT_GROUP))),
    Mutant("matrices wait for one store too few", READS_HOPPER, number(Nth(sites.WAIT_GROUP), lambda n: n + 1)),
    Mutant("carried results are not committed", READS_HOPPER, drop(Nth(sites.COMMIT_GROUP))),
    Mutant("carried results are exchanged", READS_HOPPER, exchanged(store(0), store(1))),
    Mutant("both results leave from the first's buffer", READS_HOPPER, copy(store(1), store(0), LEAVES)),
    Mutant("no proxy fence before results are handed over", READS_HOPPER, drop(Near(sites.FENCE, to=SUMMED))),
    Mutant("lanes overwrite what others read", READS_HOPPER, drop(Nth(LANES_MEET))),
    Mutant("lanes do not meet before results are handed over", READS_HOPPER, drop(Nth(LANES_MEET, index=1))),
    Mutant("results are handed over by two warps", READS_HOPPER, number(SUMMED_COUNT, lambda n: n // 2)),
    Mutant("results are handed over by eight warps", READS_HOPPER, number(SUMMED_COUNT, lambda n: n * 2)),
    Mutant(
        "results are handed over before they are written",
        READS_HOPPER,
        move(Near(r"elect\.sync", to=SUMMED), Nth(r"stmatrix"), LABEL),
    ),
]
ROWS = [
    Mutant(
        "rows past the end have a factor",
        SCALES,
        change(Near(r"min\.s32", to=Nth(ROW_LOAD)), r"min\.s32(.*), %r\d+;", r"mov.b32\1;"),
    ),
    Mutant(
        "a row's factor is a column's",
        SCALES,
        copy(Near(r"add\.s64", to=Nth(ROW_LOAD)), Near(r"add\.s64", to=Nth(r"ld\.global\.v")), r", %rd\d+,"),
    ),
]
MUTANTS = [*BOTH_B, *HALVES, *RESULTS, *MATRICES, *CARRIED, *ROWS]
