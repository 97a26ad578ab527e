"""Mutation score: every mutant of a shipped kernel is reported by a rule that fits its cause, under two of three
schedules in turn (`make test-every`: under every one).

`CAUGHT` lists what catches which; `EQUIVALENT` the mutants that compute the same, each with the proof.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from tests.cases import BOUNDS, Case, relative_error
from tests.emu.edits import mutated
from tests.emu.matmul import run_matmul
from tests.emu.mutant import ALL, BLACKWELL, HOPPER, KERNELS, SINGLE, Mutant
from tests.emu.mutants_of_data import DESCRIPTORS, LOADS, REGISTERS, TENSOR_MEMORY
from tests.emu.mutants_of_order import ARRIVALS, COMMITS, SETUP, STORES, WAITS
from tests.emu.shipped import facts, ptx, why_missing
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

MUTANTS = [*WAITS, *COMMITS, *STORES, *ARRIVALS, *SETUP, *TENSOR_MEMORY, *DESCRIPTORS, *LOADS, *REGISTERS]
CASES = {
    "pair": Case(248, 776, 200),
    "single": Case(120, 392, 200),
    "hopper": Case(248, 776, 200),
    "few stages": Case(760, 384, 200),
    "two load": Case(504, 216, 200, b_major="k"),
}
SCHEDULES = [Schedule(), Schedule.standard(0)[0], Schedule.standard(1)[4]]
WRONG = "wrong-result"  # no rule is broken, only the numbers are wrong

CAUGHT = {
    "stages are filled without waiting until they are free": "barrier-misuse overwrite-in-flight",
    "MMAs do not wait for their operands": "read-before-completion uninitialised-read",
    "MMAs do not wait for a free accumulator": "race read-before-completion",
    "the accumulator is read without a wait": "read-before-completion uninitialised-read",
    "the loader leaves one stage behind": "exit-in-flight",
    "TMEM is freed without waiting for the peer": "exit-in-flight",
    "no tcgen05.wait::ld": "register-in-flight",
    "loads wait for the other parity": "deadlock",
    "MMAs wait for the other parity": "deadlock read-before-completion uninitialised-read",
    "the wait for a free accumulator has the other parity": "deadlock",
    "the wait for the accumulator has the other parity": "deadlock read-before-completion uninitialised-read",
    "the wait for the peer has the other parity": "deadlock",
    "the loader's parity never flips": "barrier-misuse deadlock overwrite-in-flight",
    "the MMA warp's parity never flips": "deadlock overwrite-in-flight read-before-completion",
    "the store warps' parity never flips": "deadlock read-before-completion",
    "MMAs wait for the next stage": "read-before-completion",
    "stages are never released": "deadlock",
    "accumulators are never published": "deadlock",
    "stages are released before their MMAs": "overwrite-in-flight",
    "accumulators are published with every step": "deadlock read-before-completion",
    "another stage is released": "deadlock",
    "another accumulator is published": "deadlock",
    "stages are released in the leader only": "deadlock",
    "accumulators are published in the leader only": "deadlock",
    "accumulators are published in the peer only": "deadlock",
    "a commit names a third CTA": "out-of-bounds",
    "a multicast load leaves the peer out": "deadlock",
    "a multicast load names four CTAs": "out-of-bounds",
    "CTAs whose part is loaded for them load, too": "barrier-misuse overwrite-in-flight",
    "only one CTA loads its part for all": "deadlock",
    "store buffers are rewritten without a wait": "overwrite-in-flight",
    "one store too many stays in flight": "overwrite-in-flight",
    "no store buffer is waited for": "overwrite-in-flight",
    "two boxes use one store buffer": "overwrite-in-flight race",
    "stores are not committed": "overwrite-in-flight",
    "the kernel ends without waiting for its stores": "exit-in-flight",
    "no fence.proxy.async": "missing-proxy-fence",
    "store warps fence before they write": "missing-proxy-fence",
    "a box is stored before all warps have written it": "race uninitialised-read",
    "a store reads the next buffer": "race uninitialised-read",
    "a box is written without its swizzle": "uninitialised-read",
    "the CTAs' halves of C are swapped": "wrong-result",
    "no bytes are expected": "deadlock",
    "too few bytes are expected": "deadlock read-before-completion uninitialised-read",
    "too many bytes are expected": "deadlock",
    "every lane expects the bytes": "barrier-misuse",
    "the other CTA of the pair expects the bytes": "deadlock",
    "each CTA of the pair signals its own barrier": "deadlock",
    "accumulators are never released": "deadlock",
    "an accumulator is released before its last read": "race",
    "the peer is never told that TMEM is free": "deadlock",
    "stages are released to the first CTA only": "barrier-misuse deadlock overwrite-in-flight",
    "stages are released in no CTA": "deadlock",
    "full barriers expect two arrivals": "deadlock",
    "empty barriers expect twice the arrivals": "deadlock",
    "empty barriers expect half the arrivals": "barrier-misuse deadlock overwrite-in-flight",
    "accumulators wait for half of the store warps": "deadlock race read-before-completion",
    "accumulators wait for twice the store warps": "deadlock",
    "the peer's barrier expects two arrivals": "deadlock",
    "a barrier is not initialised": "barrier-misuse",
    "no fence.mbarrier_init": "unpublished-init",
    "fence.mbarrier_init after the arrive": "unpublished-init",
    "no barrier after the initialisation": "barrier-misuse unpublished-init",
    "no arrive before the cluster barrier": "barrier-misuse",
    "TMEM is never freed": "tmem-leak",
    "half of the TMEM is freed": "tmem",
    "half of the TMEM is allocated": "tmem",
    "the MMA warp does not wait for the TMEM address": "race uninitialised-read",
    "the TMEM address is read before it is known": "race uninitialised-read",
    "accumulators overlap": "overwrite-in-flight",
    "a load of TMEM starts 16 columns late": "wrong-result",
    "a load of TMEM leaves the allocation": "tmem",
    "store warps read the lanes of others": "tmem",
    "A has another layout": "wrong-result",
    "a descriptor has no version": "descriptor",
    "A's groups of 8 rows lie twice as far apart": "read-before-completion",
    "B's groups of 8 rows of k lie twice as far apart": "read-before-completion",
    "B's second half of columns is read from the first": "wrong-result",
    "B starts 16 bytes late": "read-before-completion",
    "B is read as K-major": "wrong-result",
    "operands are read as float16": "wrong-result",
    "an MMA covers another N": "read-before-completion uninitialised-read",
    "an MMA covers another M": "descriptor uninitialised-read",
    "A is negated": "wrong-result",
    "MMAs take stages for half as large": "overwrite-in-flight read-before-completion",
    "two steps of k read the same A": "wrong-result",
    "the first MMA adds to what is there": "uninitialised-read",
    "commits are those of a single CTA": "tmem",
    "every lane issues the MMA": "multiple-issue",
    "the odd CTA of the pair issues": "deadlock",
    "the CTAs' halves of A are swapped": "wrong-result",
    "the CTAs' halves of B are swapped": "wrong-result",
    "the CTAs' parts of a multicast B are swapped": "wrong-result",
    "a box of B lands on the next one": "overwrite-in-flight",
    "steps of k overlap": "wrong-result",
    "stages overlap": "overwrite-in-flight",
    "the loader uses one stage less": "deadlock",
    "the MMA warp uses one stage less": "deadlock",
    "a load signals the stage after": "deadlock",
    "a load is not aligned": "misaligned",
    "every lane loads": "multiple-issue",
    "the odd CTA's load signals alone": "barrier-misuse",
    "no wgmma.fence": "missing-wgmma-fence",
    "wgmmas are not committed": "register-in-flight",
    "one wgmma group too many stays in flight": "overwrite-in-flight",
    "a stage is released before its wgmmas are waited for": "overwrite-in-flight",
    "a tile does not wait for the stores of the one before": "overwrite-in-flight",
    "accumulators are used before their wgmmas are done": "register-in-flight",
    "B is read as K-major by wgmma": "read-before-completion",
    "the loader keeps its registers": "deadlock",
    "the consumers want more registers than there are": "deadlock",
}  # any of these, separated by blanks

EQUIVALENT = {
    # The CTA's own store warps release it before they end; the peer's before their CTA says that it has read,
    # which this CTA waits for.
    "the MMA warp leaves an accumulator behind": BLACKWELL,
    # The MMA warp's commits arrive in order: who has waited for the accumulator's, as both CTAs' store warps have,
    # knows that those before it have arrived.
    "the loader leaves one stage behind": BLACKWELL,
    # A tile has no more boxes than there are buffers, and the wait at its start has freed them all.
    "store buffers are rewritten without a wait": SINGLE,
    # As above.
    "one store too many stays in flight": SINGLE,
    # Boxes of a tile fill the buffers evenly: the box before the one that reuses a buffer has waited for its store.
    # (Not so for tiles of 192 columns, nor where two boxes leave together through the only two buffers.)
    "a tile does not wait for the stores of the one before": ALL,
    # A proxy fence orders all that came before it in causality order, the writes of other threads too (PTX ISA,
    # memory consistency model, proxy-preserved base causality order); the barrier put them there.
    "only the storing warp fences": ALL,
    # Every warp passes the barrier of the last box after it has read the accumulator.
    "TMEM is freed before all store warps have read": BLACKWELL,
    # No other CTA shares the SM: shared memory is full. Nobody waits for the permit.
    "the right to allocate is kept": BLACKWELL,
    # A swizzled K-major operand has no leading offset (PTX ISA, matrix descriptor).
    "A has another leading offset": ALL,
    # Registers of PTX are virtual: ptxas would fit the consumers into what they were launched with.
    "the consumers take no registers": HOPPER,
}


@functools.cache
def problem(kernel: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, b and the result: four tiles of four steps of k, which turn all pipelines over."""
    case = CASES[kernel]
    a, b, _ = case.inputs(seed=1)
    return a, b, case.reference(a, b, None)


def report(kernel: str, text: str, schedule: Schedule) -> tuple[str, str]:
    """The rule that is broken, or "" for none, and the report."""
    a, b, want = problem(kernel)
    known = facts(KERNELS[kernel])
    try:
        out, _ = run_matmul(parse(text), known, a, b, max_clusters=1, schedule=schedule, max_instructions=10**6)
    except Fault as fault:
        return fault.rule, str(fault)
    if relative_error(out, want) <= BOUNDS["bfloat16"]:
        return "", ""
    wrong = np.argwhere(~(np.abs(out.astype(np.float64) - want) < 0.05 * np.abs(want).max()))[:, 1:]
    return WRONG, f"wrong in rows and columns {wrong.min(0).tolist()} to {wrong.max(0).tolist()}"


def expected(kernel: str, mutant: Mutant) -> str:
    return "" if kernel in EQUIVALENT.get(mutant.name, ()) else CAUGHT[mutant.name]


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    [pytest.param(kernel, mutant, id=f"{kernel}-{mutant.name}") for mutant in MUTANTS for kernel in mutant.kernels],
)
def test_mutant(kernel: str, mutant: Mutant) -> None:
    if reason := why_missing(KERNELS[kernel]):
        pytest.skip(reason)
    text = mutated(ptx(KERNELS[kernel].name), mutant.edit)
    for _, schedule in in_turn(SCHEDULES, MUTANTS.index(mutant), 2):
        rule, words = report(kernel, text, schedule)
        assert rule in (expected(kernel, mutant).split() or [""]), f"{schedule.name}: {words or 'nothing is reported'}"
        assert points_at_the_cause(rule, words), words


def points_at_the_cause(rule: str, words: str) -> bool:
    """Names an instruction of a warp of a CTA; of a wrong result, the rows and columns."""
    return rule == "" or bool(re.search(r"wrong in rows|CTA \d+ warp \d+, PTX line \d+: `\w+", words))


def test_the_score() -> None:
    """The table names the mutants that there are; at least 40 of each kind of machine are caught."""
    assert set(CAUGHT) | set(EQUIVALENT) == {mutant.name for mutant in MUTANTS}
    for kernel in ALL:
        mine = [mutant for mutant in MUTANTS if kernel in mutant.kernels]
        assert sum(expected(kernel, mutant) != "" for mutant in mine) >= 40
