"""Mutants of the hand-overs that came with gated products, several results, matrices and vectors of rows: each is
reported under every schedule by a rule that fits its cause.

`CAUGHT` lists what catches which; `EQUIVALENT` the mutants that compute the same, each with the proof.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.facts.variant import Variant
from tests.emu.edits import Edit, mutated
from tests.emu.expressions import check_expression
from tests.emu.matmul import Facts, facts_of
from tests.emu.mutant import Mutant
from tests.emu.mutants_of_epilogues import COMPILED, KERNELS, MUTANTS
from tests.emu.shipped import facts, ptx, why_missing
from tests.emu.test_mutants import WRONG, points_at_the_cause
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.compile import compile_variant  # noqa: E402 - needs cutlass

SCHEDULES = [Schedule(), Schedule.standard(0)[0], Schedule.standard(1)[4]]

CAUGHT = {
    "both b are the first": WRONG,
    "the two b are exchanged": WRONG,
    "the second b is not loaded": "deadlock",
    "the second b lands where the first does": "overwrite-in-flight",
    "the second b signals the stage after": "deadlock",
    "the second b's bytes are not expected": "read-before-completion uninitialised-read",
    "the second b's bytes are expected twice": "deadlock",
    "the second b reaches its own CTA alone": "deadlock",
    "the odd CTA's b signals alone": "barrier-misuse",
    "an MMA covers one b": "uninitialised-read",
    "the second half is read from the first": WRONG,
    "the second half is loaded behind the wait": "register-in-flight",
    "the accumulator is released before its second half is read": "missing-tmem-wait",
    "the second result goes where the first does": WRONG,
    "results are exchanged": WRONG,
    "the second result leaves from the first's buffer": "overwrite-in-flight",
    "no proxy fence before the second result leaves": "missing-proxy-fence",
    "no barrier before the second result leaves": "race uninitialised-read",
    "the second result is not committed": "overwrite-in-flight",
    "a result takes a buffer that is being read": "overwrite-in-flight",
    "a result waits for one store too few": "overwrite-in-flight",
    "matrices are read before they are there": "read-before-completion",
    "matrices overwrite what is not read yet": "barrier-misuse overwrite-in-flight",
    "half of the matrices' bytes are expected": "deadlock read-before-completion",
    "none of the matrices' bytes are expected": "deadlock",
    "the second matrix lands where the first does": "overwrite-in-flight",
    "the second matrix signals another buffer": "deadlock",
    "both matrices are the first": WRONG,
    "matrices are exchanged": WRONG,
    "no proxy fence behind the read": "missing-proxy-fence",
    "lanes do not meet behind the read": "race",
    "matrices are given back before they are read": "race",
    "matrices are given back by two warps": "barrier-misuse deadlock race",
    "matrices are given back by eight warps": "deadlock",
    "the residual warp's parity never flips": "barrier-misuse overwrite-in-flight",
    "the parity of what is read never flips": "deadlock",
    "results leave before they are there": "read-before-completion",
    "matrices overwrite results that have not left": "overwrite-in-flight",
    "matrices wait for one store too few": "overwrite-in-flight",
    "carried results are not committed": "overwrite-in-flight",
    "carried results are exchanged": WRONG,
    "both results leave from the first's buffer": WRONG,
    "no proxy fence before results are handed over": "missing-proxy-fence",
    "lanes overwrite what others read": "race",
    "lanes do not meet before results are handed over": "race",
    "results are handed over by two warps": "deadlock overwrite-in-flight race read-before-completion",
    "results are handed over by eight warps": "deadlock",
    "results are handed over before they are written": "race",
    "rows past the end have a factor": "out-of-bounds",
    "a row's factor is a column's": f"out-of-bounds {WRONG}",
}  # any of these, separated by blanks
EQUIVALENT = {
    # The other half's wait is a thread's wait for all its loads (PTX ISA, tcgen05.wait); the first is there to keep
    # ptxas from using the first half's registers above it.
    "one wait for both halves",
    # The CTA's own store warps give it back before they end.
    "the residual warp leaves a buffer behind",
}


@functools.cache
def kernel(name: str) -> tuple[Variant, str, Facts]:
    """Its PTX and launch facts."""
    if name in KERNELS:
        variant = KERNELS[name]
        assert (reason := why_missing(variant)) is None, reason
        return variant, ptx(variant.name), facts(variant)
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_variant(COMPILED[name], Path(dump))
    return COMPILED[name], compiled.ptx, facts_of(COMPILED[name], compiled)


def report(name: str, edit: Edit, schedule: Schedule) -> tuple[str, str]:
    """The rule that is broken, or "" for none, and the report: of four tiles of four steps of k, which turn all
    pipelines over."""
    variant, text, known = kernel(name)
    tile, module = variant.tile, parse(mutated(text, edit))
    shape = tile.cluster_m * tile.cta_m - 16, tile.cluster_n * tile.out_n + 16, 4 * tile.k_tile - 56
    try:
        check_expression(variant, module, known, shape, schedule, seed=1, max_clusters=1, max_instructions=10**6)
    except Fault as fault:
        return fault.rule, str(fault)
    except AssertionError as error:
        return WRONG, f"wrong in rows and columns: {error}"
    return "", ""


@pytest.mark.parametrize(
    ("name", "mutant"),
    [pytest.param(name, mutant, id=f"{name}-{mutant.name}") for mutant in MUTANTS for name in mutant.kernels],
)
def test_mutant(name: str, mutant: Mutant) -> None:
    for _, schedule in in_turn(SCHEDULES, MUTANTS.index(mutant), 2):
        rule, words = report(name, mutant.edit, schedule)
        wanted = [""] if mutant.name in EQUIVALENT else CAUGHT[mutant.name].split()
        assert rule in wanted, f"{schedule.name}: {words or 'nothing is reported'}"
        assert points_at_the_cause(rule, words), words


@pytest.mark.parametrize("name", [*KERNELS, *COMPILED])
def test_nothing_is_reported_of_the_kernel_itself(name: str) -> None:
    assert [report(name, list, schedule) for schedule in SCHEDULES] == [("", "")] * len(SCHEDULES)


def test_the_tables_name_the_mutants_that_there_are() -> None:
    assert CAUGHT.keys() | EQUIVALENT == {mutant.name for mutant in MUTANTS}
    assert not CAUGHT.keys() & EQUIVALENT
