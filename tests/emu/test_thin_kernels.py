"""Thin tiles of Hopper: a matrix whose lines begin anywhere, times up to 8 vectors; and what each hand-over is for."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts import thin
from jax_bwgemm.facts.epilogue import ACC
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import check_case
from tests.emu.matmul import Facts, facts_of, run_matmul
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402 - needs cutlass
from tests.emu.check_variant import case_of, compiled, run_case  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass

BF16, F16, F32 = ("bfloat16",) * 3, ("float16",) * 3, ("bfloat16", "bfloat16", "float32")


def variant(majors: str, cluster_k: int = 1, dtypes: tuple[str, str, str] = BF16) -> Variant:
    tile = Tile(thin.ROWS[majors[0]], 8, cluster_k=cluster_k, direct=True)
    return Variant("sm_90a", *dtypes, *majors[:2], tile, ACC, majors[2], "threads")


ROWS, COLUMNS = variant("kkn"), variant("mnn")
SPLIT_ROWS, SPLIT_COLUMNS = variant("knn", 2), variant("mkm", 8)
VARIANTS = [
    ROWS, COLUMNS, SPLIT_ROWS, SPLIT_COLUMNS, variant("kkm", 8, F16), variant("mnm", 2, F32), variant("knm", 4),
    variant("mkn", 1, F16),
]  # fmt: skip
SHAPES = [
    (9, 7, 5),  # less than a chunk
    (130, 1, 150),  # a second tile of two rows, or of ten
    (128, 3, 64),  # all lines begin on 16 bytes; one window of terms
    (251, 8, 131),  # all columns, and lines that begin anywhere
    (72, 2, 640),  # more windows of rows than stages
    (245, 5, 1030),  # three parts of each vector of an m-major matrix; more windows of columns than stages
    (121, 1, 4500),  # two parts of one vector, of an m-major matrix
    (67, 9, 300),  # a second tile of one column
    (130, 4, 3001),  # three parts of four vectors, of an m-major matrix
    (9, 8, 2300),  # two parts of eight vectors, of a k-major one
]


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """Six shapes of ten, other ones for the next kernel, each under another schedule."""
    for seed, shape in in_turn(SHAPES, 3 * VARIANTS.index(of), 6):
        for _, schedule in in_turn(Schedule.standard(seed), seed, 1):
            run_case(*kernel(of), case_of(of, *shape), schedule, None, seed)


@pytest.mark.parametrize("of", VARIANTS[:4], ids=lambda of: of.name)
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (3, 3)])
def test_batches(of: Variant, batches: tuple[int, int]) -> None:
    """A matrix that all share, and matrices that begin anywhere."""
    case = case_of(of, 131, 3, 77, *batches)
    run_case(*kernel(of), case, Schedule.standard(1)[batches[0]], None, 1)


@pytest.mark.parametrize("of", VARIANTS[:4], ids=lambda of: of.name)
def test_neighbours_stay_apart(of: Variant) -> None:
    """Rows of NaN between others, whose chunks they share: those alone are NaN."""
    case = case_of(of, 133, 3, 83)
    a, b, _ = case.inputs(5)
    bad = np.arange(133) % 3 == 1
    want = case.reference(a, b, None, None)
    (a if of.a_major == "k" else a.swapaxes(1, 2))[:, bad] = np.nan
    out, _ = run_matmul(*kernel(of), a, b, schedule=Schedule.standard(5)[4])
    assert np.isnan(out[:, bad].astype(np.float32)).all()
    want[:, bad] = 0
    check_case(np.where(bad[None, :, None], np.zeros_like(out), out), want, case)


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_registers(of: Variant) -> None:
    """No local memory, and two CTAs of an SM: 65,536 registers for 512 threads."""
    found = compiled_kernel(of)
    facts = read_cubin(found.cubin)
    assert facts.stack_bytes == 0 and facts.registers <= 128
    assert (found.num_threads, found.num_stages) == (256, 4 if of.a_major == "k" else 3)


WAIT, COMMIT = r"cp\.async\.wait_group\s+[1-9];", r"cp\.async\.commit_group\s*;"
BARRIER = r"(bar|barrier\.cta)\.sync\s+0[^;]*;"
DOCTORED = {
    "copies are not waited for": (WAIT, "", "read-before-completion uninitialised-read"),
    "one group too few is waited for": (r"(cp\.async\.wait_group\s+)(2|1);", None, "read-before-completion"),
    "copies are in no group": (COMMIT, "", "read-before-completion uninitialised-read"),
    "lanes do not meet": (r"bar\.warp\.sync[^;]*;", "", "race read-before-completion"),
    "no barrier": (BARRIER, "", "race uninitialised-read read-before-completion"),
    "operands are read before the kernel before has ended": (r"griddepcontrol\.wait;", "", "before-grid-wait"),
}


@pytest.mark.parametrize("of", [ROWS, COLUMNS], ids=lambda of: of.a_major)
@pytest.mark.parametrize("what", DOCTORED)
def test_doctored(what: str, of: Variant) -> None:
    """What the emulator says of a kernel that hands over too early, under every schedule."""
    pattern, instead, rules = DOCTORED[what]
    found = compiled_kernel(of)
    more = (lambda match: f"{match[1]}{int(match[2]) + 1};") if instead is None else instead
    changed, count = re.subn(pattern, more, found.ptx)
    assert count, f"{pattern} is not in the kernel"
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(parse(changed), facts_of(of, found), case_of(of, 67, 3, 1163), schedule)
        assert fault.value.rule in rules.split(), fault.value


def caught(of: Variant, ptx: str, shape: tuple[int, int, int]) -> set[str]:
    """Rules that a changed kernel breaks, of two schedules under either; "wrong" for a wrong result."""
    rules = set()
    for schedule in Schedule.standard(seed=1)[1::3]:
        try:
            run_case(parse(ptx), facts_of(of, compiled_kernel(of)), case_of(of, *shape), schedule, None)
        except Fault as fault:
            rules.add(fault.rule)
        except AssertionError:
            rules.add("wrong")
    return rules


@pytest.mark.parametrize(("of", "count"), [(ROWS, 4), (COLUMNS, 4), (SPLIT_ROWS, 3), (SPLIT_COLUMNS, 4)])
def test_every_barrier_is_needed(of: Variant, count: int) -> None:
    """Before a part of the vectors, behind it, before the warps' sums, and behind these: to be added, or stored if no
    cluster meets."""
    found = compiled_kernel(of).ptx
    barriers = list(re.finditer(BARRIER, found))
    assert len(barriers) == count
    for barrier in barriers:
        rules = caught(of, found[: barrier.start()] + found[barrier.end() :], (67, 8, 4700))  # parts of 512 terms
        assert rules and rules <= {"race", "uninitialised-read", "read-before-completion", "overwrite-in-flight"}, (
            barrier
        )


@pytest.mark.parametrize("of", [SPLIT_ROWS, SPLIT_COLUMNS], ids=lambda of: of.a_major)
def test_the_cluster_meets_twice(of: Variant) -> None:
    """Before it reads each other's sums, and before one of its CTAs ends, whose sums others may be reading."""
    found = compiled_kernel(of).ptx
    meetings = list(re.finditer(r"barrier\.cluster\.arrive[^;]*;\s*barrier\.cluster\.wait[^;]*;", found))
    assert len(meetings) == 2
    rules = [caught(of, found[: x.start()] + found[x.end() :], (67, 3, 1163)) for x in meetings]
    assert rules[0] and rules[0] <= {"race", "uninitialised-read", "read-before-completion"}
    assert rules[1] == {"exit-in-flight"}


@pytest.mark.parametrize("mask", [65535, -65536])
def test_neighbours_terms_are_masked(mask: int) -> None:
    """Of the words at a row's ends, both halves."""
    found = compiled_kernel(ROWS).ptx
    changed, count = re.subn(rf"(selp\.b32\s+%r\d+, ){mask}, 0,", rf"\g<1>{mask}, {mask},", found)
    assert count == 8  # of 2 chunks of 4 words, whose places rows g and g + 8 have in common
    case = case_of(ROWS, 67, 1, 83)
    a, b, _ = case.inputs(5)
    a[:, ::2] = np.nan
    out, _ = run_matmul(parse(changed), facts_of(ROWS, compiled_kernel(ROWS)), a, b)
    assert np.isnan(out[:, 1::2].astype(np.float32)).any()
