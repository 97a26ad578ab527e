"""clusterlaunchcontrol under every answer: granted, refused though clusters wait, and refused late."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, UnsupportedInstruction
from tests.snippets import cancel
from tests.snippets.kit import Snippet, emulate

SNIPPETS = cancel.snippets()


def run(snippet: Snippet, schedule: Schedule, **parts: str) -> tuple[np.ndarray, ...]:
    body = cancel.body_of(snippet.cluster[0], **parts)
    return emulate(dataclasses.replace(snippet, body=body), schedule)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.name)
def test_every_cluster_is_worked_on_once(snippet: Snippet) -> None:
    """By its own CTAs, or by those that cancelled it: the workers of a cluster are those of one that ran."""
    size = snippet.cluster[0]
    numbers = []
    for schedule in (*Schedule.standard(), *Schedule.randoms(16)):
        count, who = run(snippet, schedule)
        assert (count == 1).all() and (who.reshape(6, size, 32) % size == np.arange(size)[:, None]).all()
        numbers.append(len(np.unique(who)) // size)
    eager, lazy, loads_eager, *random = numbers
    assert (eager, lazy, loads_eager) == (1, 6, 1) and {2, 3} < set(random)


def test_one_cluster_alone_is_refused() -> None:
    count, _ = run(SNIPPETS[0], Schedule(one_cluster=True))
    assert count[:, 0].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("axes", ["xyz"])
def test_an_axis_at_a_time(axes: str) -> None:
    load = "ld.shared.v2.b64 {%d20, %d21}, [%r10]; mov.b128 %q2, {%d20, %d21}; mov.b64 {%r40, %r41}, %d20;"
    load += "mov.b128 {%d22, %d23}, %q2; mov.b128 %q1, {%d22, %d23}; st.shared.b128 [%r10+32], %q1;"
    load += "bar.warp.sync -1; ld.shared.b128 %q1, [%r10+32];"
    for i, axis in enumerate(axes):
        load += f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %r{43 + i}, %q1;"
    again = "@%p2 add.s32 %r46, %r43, %r44; @%p2 add.s32 %r46, %r46, %r45; @%p2 setp.ne.u32 %p4, %r46, %r20;"
    again += "@!%p2 bra END; @!%p4 bra NEXT; trap; END:"
    count, _ = run(SNIPPETS[0], Schedule.standard()[0], LOAD=load, AGAIN=again)
    assert (count == 1).all()


REQUEST = cancel.ASK.format("")


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        ({"AGAIN": "bra NEXT;"}, "cancel-after-refusal"),
        ({"WAIT": ""}, "read-before-completion"),
        ({"PUBLISH": ""}, "missing-proxy-fence"),
        ({"ASK": REQUEST}, "multiple-issue"),
        ({"ASK": "@%p3 " + REQUEST.replace("[%r10],", "[%r10+8],")}, "misaligned"),
        ({"ASK": "@%p3 " + REQUEST.replace("[%r10],", "[%r10+16],")}, "barrier-misuse"),
        ({"ASK": "@%p3 " + REQUEST.replace("[%r10+16]", "[%r10+64]")}, "barrier-misuse"),
        ({"ASK": "@%p3 " + REQUEST.replace("[%r10],", "[%r10+16384],")}, "misaligned out-of-bounds"),
        ({"ASK": ""}, "deadlock"),
        ({"ASK": f"@%p3 {REQUEST} @%p3 {REQUEST}"}, "overwrite-in-flight"),
    ],
)
def test_what_it_takes(parts: dict[str, str], rules: str) -> None:
    for schedule in Schedule.standard()[::2][:2]:
        with pytest.raises(Fault) as error:
            run(SNIPPETS[0], schedule, **parts)
        assert error.value.rule in rules.split(), error.value


def test_of_a_pair_both_must_have_read() -> None:
    """The next request overwrites the responses of both."""
    for turn, rule in (
        ("", "race"),  # nor do the lanes of one
        ("bar.warp.sync -1;", "overwrite-in-flight"),
        ("bar.warp.sync -1; barrier.cluster.arrive.relaxed; barrier.cluster.wait;", "overwrite-in-flight"),
    ):
        with pytest.raises(Fault) as error:
            run(SNIPPETS[1], Schedule.standard()[0], TURN=turn)
        assert error.value.rule == rule


def test_hopper_has_none() -> None:
    with pytest.raises(UnsupportedInstruction, match="sm_90a has no clusterlaunchcontrol"):
        emulate(dataclasses.replace(SNIPPETS[0], target="sm_90a"))
