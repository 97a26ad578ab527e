"""Mutants of a stream-K: what a kernel does wrong whose parts do not quite meet, and what catches each.

Two launches on one workspace: flags that stay up are found by the second. A result is right if its bits are.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.facts.resources import FLAG_BYTES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import Case
from tests.emu.edits import At, Edit, both, change, drop, move, mutated
from tests.emu.matmul import TOKEN, Facts, facts_of, poisoned_workspace, run_matmul

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.compile import compile_variant  # noqa: E402 - needs cutlass

TILE = Tile(128, 32, stream_k=True)  # two groups
CASE = Case(248, 32, 64 * 6, out_dtype="float32")
CLUSTERS, STREAM = 7, (2, 6)  # two tiles in six equal pieces
SLOT_BYTES = 4 * 128 * 32
SCHEDULES = [Schedule(), Schedule.standard(1)[4], Schedule.standard(0)[3]]
WRONG = "wrong-result"

RAISE, LOOK, RESET = r"st\.release", r"ld\.acquire", r"st\.global\.b64"
LEAVE, FETCH, BARRIER = r"st\.global\.v4", r"ld\.global\.v4", r"bar\.sync"


def next_slot(what: str) -> Edit:
    return change(At(what), r"\+(\d+)\]", lambda match: f"+{int(match[1]) + SLOT_BYTES}]")


def last_first(lines: list[str]) -> list[str]:
    """Part i is min(i, last); now it is max(last - i, 0)."""
    lines = list(lines)
    for i in At(r"min\.s32").find(lines):  # of parts alone: what the launcher counts is unsigned
        lines[i] = re.sub(r"min\.s32\s+(%r\d+), (%r\d+), (%r\d+);", r"sub.s32 \1, \3, \2; max.s32 \1, \1, 0;", lines[i])
    return lines


CAUGHT: dict[str, tuple[Edit, str]] = {
    "the flag goes up by a plain store": (change(At(RAISE), r"\.release\.gpu", ""), "race"),
    "the flag goes up by a relaxed store": (change(At(RAISE), "release", "relaxed"), "race"),
    "the release has cluster scope": (change(At(RAISE), "gpu", "cluster"), "missing-gpu-fence"),
    "the release has CTA scope": (change(At(RAISE), "gpu", "cta"), "missing-gpu-fence"),
    "the flag never goes up": (drop(At(RAISE)), "deadlock"),
    "the flag has another value": (change(At(RAISE), r"\], %rd\d+", "], 1"), "deadlock"),
    "the flag goes up before all warps have left their parts": (drop(At(BARRIER, before=RAISE)), "race"),
    "parts are left behind the barrier": (move(At(BARRIER, before=RAISE), At(LEAVE)), "race"),
    "plain loads look at the flag": (change(At(LOOK), r"\.acquire\.gpu", ""), "race"),
    "relaxed loads look at the flag": (change(At(LOOK), "acquire", "relaxed"), "race"),
    "the acquire has cluster scope": (change(At(LOOK), "gpu", "cluster"), "missing-gpu-fence"),
    "the acquire has CTA scope": (change(At(LOOK), "gpu", "cta"), "missing-gpu-fence"),
    "the flag is not waited for": (drop(At(r"@%p\d+ bra", after=LOOK)), "race"),
    "the other warps do not wait": (drop(At(BARRIER, before=FETCH)), "race"),
    "another group's flag is waited for": (change(At(LOOK), r"\]", "+8]"), "race deadlock"),
    "another CTA's flag is waited for": (change(At(LOOK), r"\]", "+16]"), "race deadlock"),
    "a part is left in the next slot": (next_slot(LEAVE), f"race {WRONG}"),
    "a part is fetched from the next slot": (next_slot(FETCH), f"race {WRONG}"),
    "the flag stays up": (drop(At(RESET)), "race"),
    "the flag is taken down before it is up": (
        change(At(LOOK), r"(.*\[(%rd\d+)\].*)", "st.global.b64 [\\2], 0;\n\\1"),
        "race",
    ),
    "parts are added in another order": (last_first, WRONG),
}
EQUIVALENT: dict[str, Edit] = {
    # One instruction of one warp stores one value in one place, 32 times.
    "every lane raises the flag": drop(At(r"bra", before=RAISE)),
    # The last slots are those of the clusters with the last parts, which leave nothing there.
    "parts lie in the next slots": both(next_slot(LEAVE), next_slot(FETCH)),
}


@functools.cache
def kernel() -> tuple[str, Facts]:
    variant = Variant("sm_90a", "bfloat16", "bfloat16", "float32", "k", "n", TILE)
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_variant(variant, Path(dump))
    return compiled.ptx, facts_of(variant, compiled)


def twice(text: str, schedule: Schedule, flags: int | None = None) -> np.ndarray:
    """The results of both launches; `flags`: what the workspace has in place of flags at first."""
    a, b, _ = CASE.inputs(1)
    module, workspace = parse(text), poisoned_workspace(TILE, CLUSTERS)
    if flags is not None:
        workspace.view(np.uint64)[: FLAG_BYTES // 8] = flags
    options = {"max_clusters": CLUSTERS, "stream": STREAM, "schedule": schedule, "workspace": workspace}
    return np.stack([run_matmul(module, kernel()[1], a, b, max_instructions=10**6, **options)[0] for _ in range(2)])


@functools.cache
def right() -> np.ndarray:
    return twice(kernel()[0], Schedule())


def report(edit: Edit, schedule: Schedule) -> tuple[str, str]:
    """The rule that is broken, or "" for none, and the report."""
    try:
        out = twice(mutated(kernel()[0], edit), schedule)
    except Fault as fault:
        return fault.rule, str(fault)
    return ("", "") if np.array_equal(out, right()) else (WRONG, "other bits")


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name: str) -> None:
    edit, rules = CAUGHT[name]
    for schedule in SCHEDULES:
        rule, words = report(edit, schedule)
        assert rule in rules.split(), f"{schedule.name}: {words or 'nothing is reported'}"
        assert rule == WRONG or re.search(r"PTX line \d+: `\w+", words), words


@pytest.mark.parametrize("schedule", Schedule.standard(1), ids=lambda s: s.name)
def test_a_stale_flag_that_equals_the_token(schedule: Schedule) -> None:
    """Who finds it cannot tell whether the part behind it is this launch's."""
    with pytest.raises(Fault) as error:
        twice(kernel()[0], schedule, TOKEN)
    assert error.value.rule == "race"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_equivalent(name: str) -> None:
    for schedule in SCHEDULES:
        assert report(EQUIVALENT[name], schedule) == ("", ""), schedule.name
