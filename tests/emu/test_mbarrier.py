"""mbarriers: the phase machine against a model, parities, misuse, and the words of a deadlock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.emulator import Fault
from tests.emu.snippet import lanes_of, run_snippet

INIT = "mov.b32 %r10, smem; mov.u32 %r1, %tid.x; elect.sync %r11|%p1, -1;"


def model(count: int, steps: list[tuple[str, int]]) -> list[int]:
    """The phase number after each step: `arrive` n, `expect` bytes with one arrival, `tx` bytes expected."""
    pending, tx, phase, phases = count, 0, 0, []
    for kind, amount in steps:
        if kind == "arrive":
            pending -= amount
        else:
            tx += amount
            pending -= kind == "expect"
        if pending == 0 and tx == 0 and kind != "tx":
            phase, pending = phase + 1, count
        phases.append(phase)
    return phases


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_phases_follow_the_arrivals(count: int, arrivals: list[int]) -> None:
    """Both parities are asked for after every arrival; arrivals never exceed what is pending."""
    pending, steps = count, []
    for wanted in arrivals:
        number = min(wanted, pending)
        steps.append(("arrive", number))
        pending = pending - number or count
    body = INIT + f"mov.b32 %r2, {count}; mbarrier.init.shared.b64 [%r10], %r2; mov.b32 %r3, 0;\n"
    for _, number in steps:
        body += f"mov.b32 %r4, {number}; @%p1 mbarrier.arrive.shared.b64 _, [%r10], %r4;\n"
        for parity in (0, 1):
            body += f"mbarrier.try_wait.parity.shared.b64 %p2, [%r10], {parity}; selp.b32 %r5, 1, 0, %p2;"
            body += "shl.b32 %r3, %r3, 1; or.b32 %r3, %r3, %r5;\n"
    expected = 0
    for phase in model(count, steps):
        for parity in (0, 1):
            expected = expected << 1 | ((phase & 1) != parity)
    body = body.replace("mbarrier.init", "@%p1 mbarrier.init")
    assert lanes_of(body, "%r3")[0] == expected & 0xFFFFFFFF


def test_a_whole_warp_arrives_32_times() -> None:
    body = (
        INIT
        + """
    mov.b32 %r2, 32; @%p1 mbarrier.init.shared.b64 [%r10], %r2; mbarrier.arrive.shared.b64 %d1, [%r10];
    mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; selp.b32 %r3, 1, 0, %p2;
    """
    )
    assert lanes_of(body, "%r3").tolist() == [1] * 32


def test_expected_bytes_keep_the_phase_open() -> None:
    body = (
        INIT
        + """
    mov.b32 %r2, 1; mov.b32 %r4, 64; @%p1 mbarrier.init.shared.b64 [%r10], %r2;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r4;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; @%p2 bra OK; bra WAIT; OK:
    """
    )
    with pytest.raises(Fault) as error:
        run_snippet(body)
    assert error.value.rule == "deadlock"
    for words in ("CTA 0 warp 0", "parity 0 of mbarrier 0x400", "0 of 1 arrivals and 64 bytes pending", "try_wait"):
        assert words in error.value.message


def test_a_peek_is_not_a_wait() -> None:
    """The same try_wait is asked in vain again and again, while another warp gets there."""
    out = np.zeros(1, np.uint32)
    body = (
        INIT
        + """
    ld.param.b64 %d1, [p0]; mov.b32 %r2, 1; shr.u32 %r5, %r1, 5; setp.ne.b32 %p3, %r5, 0;
    setp.eq.b32 %p4, %r1, 0; @%p4 mbarrier.init.shared.b64 [%r10], %r2; bar.sync 0; @%p3 bra OTHER;
    mov.b32 %r6, 0;
    LOOP: add.s32 %r6, %r6, 1; mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; setp.gt.u32 %p5, %r6, 500;
    or.pred %p5, %p5, %p2; not.pred %p6, %p5; @%p6 bra LOOP;
    selp.b32 %r7, 1, 0, %p2; st.global.b32 [%d1], %r7; ret;
    OTHER: mov.b32 %r8, 0; TURN: add.s32 %r8, %r8, 1; setp.lt.u32 %p7, %r8, 50; @%p7 bra TURN;
    elect.sync %r11|%p1, -1; @%p1 mbarrier.arrive.shared.b64 _, [%r10];
    """
    )
    run_snippet(body, (out,), threads=64)
    assert out[0] == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("@%p1 mbarrier.arrive.shared.b64 _, [%r10];", "no mbarrier was initialised at 0x400"),
        ("@%p1 mbarrier.init.shared.b64 [%r10], %r2; mbarrier.arrive.shared.b64 _, [%r10];", "32 more arrivals"),
        ("@%p1 mbarrier.init.shared.b64 [%r10], %r2; @%p1 mbarrier.init.shared.b64 [%r10], %r2;", "of a live barrier"),
        ("@%p1 mbarrier.init.shared.b64 [%r10], 0;", "with a count of 0"),
    ],
)
def test_misuse(body: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as error:
        run_snippet(INIT + "mov.b32 %r2, 1;" + body)
    assert error.value.rule == "barrier-misuse"


def test_another_warp_must_know_the_initialisation() -> None:
    body = (
        INIT
        + """
    mov.b32 %r2, 1; setp.eq.b32 %p4, %r1, 0; @%p4 mbarrier.init.shared.b64 [%r10], %r2; {sync}
    setp.eq.b32 %p5, %r1, 32; @%p5 mbarrier.arrive.shared.b64 _, [%r10];
    """
    )
    run_snippet(body.format(sync="bar.sync 0;"), threads=64)
    with pytest.raises(Fault) as error:
        run_snippet(body.format(sync=""), threads=64)
    assert error.value.rule == "unpublished-init"


CLUSTER = (
    INIT
    + """
mov.b32 %r2, 2; @%p1 mbarrier.init.shared.b64 [%r10], %r2; {fence}
barrier.cluster.arrive.relaxed; barrier.cluster.wait;
and.b32 %r3, %r1, 1; mapa.shared::cluster.u32 %r4, %r10, %r3; setp.lt.u32 %p2, %r1, 2;
@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r4];
{wait}
"""
)
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0; @%p3 bra OK; bra WAIT; OK:"


def test_lanes_arrive_in_several_ctas() -> None:
    run_snippet(CLUSTER.format(fence="fence.mbarrier_init.release.cluster;", wait=WAIT), cluster=2)


def test_a_relaxed_cluster_barrier_publishes_nothing_by_itself() -> None:
    with pytest.raises(Fault) as error:
        run_snippet(CLUSTER.format(fence="", wait=WAIT), cluster=2)
    assert error.value.rule == "unpublished-init"


def test_a_cta_must_not_end_before_remote_arrivals() -> None:
    with pytest.raises(Fault) as error:
        run_snippet(CLUSTER.format(fence="fence.mbarrier_init.release.cluster;", wait=""), cluster=2)
    assert error.value.rule in ("exit-in-flight", "exited-cta")


def test_named_barriers() -> None:
    body = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.b32 %p1, %r2, 0; @%p1 bra OUT; bar.sync 1, 96; OUT:"
    with pytest.raises(Fault, match="bar.sync 1: 64 of 96 threads have arrived"):
        run_snippet(body, threads=96)
    run_snippet(body.replace("96;", "64;"), threads=96)


@pytest.mark.parametrize("guard", ["", "@%p3 "])
def test_one_thread_initialises_a_barrier(guard: str) -> None:
    body = INIT + f"mov.b32 %r2, 1; setp.lt.u32 %p3, %r1, 2; {guard}mbarrier.init.shared.b64 [%r10], %r2;"
    with pytest.raises(Fault, match="live barrier") as error:
        run_snippet(body)
    assert error.value.rule == "barrier-misuse"


def test_lanes_initialise_barriers_of_their_own() -> None:
    body = (
        INIT
        + """
    mov.b32 %r2, 1; shl.b32 %r3, %r1, 3; add.s32 %r3, %r3, %r10; mbarrier.init.shared.b64 [%r3], %r2; bar.warp.sync -1;
    mbarrier.arrive.shared.b64 _, [%r3]; mbarrier.try_wait.parity.shared.b64 %p2, [%r10+248], 0;
    selp.b32 %r4, 1, 0, %p2; bar.warp.sync -1; mbarrier.inval.shared.b64 [%r3];
    """
    )
    assert lanes_of(body, "%r4").tolist() == [1] * 32
