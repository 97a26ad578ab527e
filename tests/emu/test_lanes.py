"""Lanes: divergence, elections, exchanges, and instructions that need the whole warp."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault
from tests.emu.snippet import lanes_of, run_snippet

LANES = np.arange(32, dtype=np.uint32)


def test_elect_chooses_one_lane() -> None:
    body = "elect.sync %r1|%p1, -1; selp.b32 %r2, 1, 0, %p1; mov.u32 %r3, %laneid; add.s32 %r2, %r2, %r1;"
    assert lanes_of(body, "%r2").tolist() == [1] + [0] * 31


def test_branches_reconverge_and_keep_both_sides() -> None:
    body = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; mov.b32 %r2, 5;
    @%p1 bra LEFT;
    add.s32 %r3, %r1, 100; mov.b32 %r2, %r3; bra JOIN;
    LEFT: add.s32 %r3, %r1, 200; mov.b32 %r2, %r3;
    JOIN: shfl.sync.idx.b32 %r4, %r2, 3, 31, -1;
    add.s32 %r2, %r2, %r4;
    """
    expected = np.where(LANES < 7, LANES + 200, LANES + 100) + 203
    assert lanes_of(body, "%r2").tolist() == expected.tolist()


def test_a_loop_of_as_many_turns_as_the_lane_says() -> None:
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, 0; mov.b32 %r3, 0;
    AGAIN: setp.ge.u32 %p1, %r3, %r1; @%p1 bra DONE;
    add.s32 %r3, %r3, 1; add.s32 %r2, %r2, %r3; bra AGAIN;
    DONE: add.s32 %r2, %r2, 0;
    """
    assert lanes_of(body, "%r2").tolist() == (LANES * (LANES + 1) // 2).tolist()


def test_guards_on_any_instruction() -> None:
    body = (
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 4; mov.b32 %r2, 1; @%p1 mov.b32 %r2, 9; @!%p1 add.s32 %r2, %r2, 1;"
    )
    assert lanes_of(body, "%r2").tolist() == np.where(LANES == 4, 9, 2).tolist()


SHUFFLES = {
    "idx.b32 %r2, %r1, 5, 31": np.full(32, 5),
    "bfly.b32 %r2, %r1, 3, 31": LANES ^ 3,
    "up.b32 %r2, %r1, 2, 0": np.where(LANES >= 2, LANES.astype(int) - 2, LANES),
    "down.b32 %r2, %r1, 2, 31": np.where(LANES < 30, LANES + 2, LANES),
    "idx.b32 %r2, %r1, 1, 7199": (LANES & ~np.uint32(3)) + 1,  # 0x1c1f: segments of 4 lanes
}


@pytest.mark.parametrize("form", SHUFFLES)
def test_shfl(form: str) -> None:
    body = f"mov.u32 %r1, %laneid; shfl.sync.{form}, -1;"
    assert lanes_of(body, "%r2").tolist() == SHUFFLES[form].tolist()


def test_votes() -> None:
    body = """
    mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 3;
    vote.sync.ballot.b32 %r2, %p1, -1; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;
    selp.b32 %r3, 16, 0, %p2; selp.b32 %r4, 32, 0, %p3; add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r4;
    """
    assert lanes_of(body, "%r2").tolist() == [7 + 16] * 32


def test_scoped_registers_and_labels() -> None:
    block = (
        "{ .reg .pred P1; .reg .b32 t; mov.b32 t, %r1; setp.eq.b32 P1, t, 0; @P1 bra DONE; add.s32 %r2, %r2, t; DONE: }"
    )
    assert lanes_of(f"mov.b32 %r2, 0; mov.b32 %r1, 3; {block} mov.b32 %r1, 4; {block}", "%r2").tolist() == [7] * 32


def test_aligned_instruction_in_a_divergent_branch_is_reported() -> None:
    with pytest.raises(Fault, match="whole warp") as error:
        run_snippet("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 bra A; bar.sync 1, 32; ret; A: bar.sync 2, 32;")
    assert error.value.rule == "divergent-aligned"


def test_uninitialised_register_is_reported() -> None:
    with pytest.raises(Fault, match="before it is written") as error:
        run_snippet("mov.b32 %r1, 1; add.s32 %r2, %r1, %r3;")
    assert error.value.rule == "uninitialised-register"
    assert error.value.where is not None and "add.s32" in error.value.where.text


def test_endless_kernel_is_stopped() -> None:
    with pytest.raises(Fault, match="more than 5000 instructions"):
        run_snippet("AGAIN: bra AGAIN;", max_instructions=5000)


# 16 bytes a lane: of its own at %r3, of the next lane at %r4.
PLACES = """
mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 31; mov.b32 %r10, smem; shl.b32 %r2, %r1, 4; add.s32 %r3, %r10, %r2;
add.s32 %r4, %r1, 1; and.b32 %r4, %r4, 31; shl.b32 %r4, %r4, 4; add.s32 %r4, %r10, %r4;
"""
MEET = "bar.warp.sync -1;"
WRITE, READ_OWN, READ_OTHER = "st.shared.b32 [%r3], %r1;", "ld.shared.b32 %r5, [%r3];", "ld.shared.b32 %r5, [%r4];"
ONE_WRITES, ALL_READ = "@%p1 st.shared.b32 [%r10], %r1;", "ld.shared.b32 %r5, [%r10];"
MATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r3];"
WHOLE = "st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};"


@pytest.mark.parametrize(
    ("body", "is_ordered"),
    [
        (WRITE + READ_OWN, True),
        (WRITE + READ_OTHER, False),
        (WRITE + MEET + READ_OTHER, True),
        (MEET + WRITE + READ_OTHER, False),
        (WRITE + MEET + READ_OTHER + WRITE, False),
        (WRITE + MEET + READ_OTHER + MEET + WRITE, True),
        (ONE_WRITES + ALL_READ, False),
        (ONE_WRITES + MEET + ALL_READ, True),
        (ONE_WRITES + "bar.sync 0;" + ALL_READ, True),
        (ONE_WRITES + "barrier.cluster.arrive; barrier.cluster.wait;" + ALL_READ, True),
        (ONE_WRITES + "barrier.cluster.arrive.relaxed; barrier.cluster.wait;" + ALL_READ, False),
        (ONE_WRITES + "shfl.sync.idx.b32 %r6, %r1, 0, 31, -1;" + ALL_READ, False),
        (ONE_WRITES + "@%p1 " + ALL_READ, True),
        (WHOLE + MATRIX, False),
        (WHOLE + MEET + MATRIX, True),
        (WHOLE + MEET + MATRIX + WHOLE, False),
        (WHOLE + MEET + MATRIX + MEET + WHOLE, True),
    ],
)
def test_lanes_share_memory_where_they_have_met(body: str, is_ordered: bool) -> None:
    """However close to each other a warp's lanes run: bar.warp.sync orders them, and the barriers of more warps do."""
    text = PLACES + "setp.eq.u32 %p1, %r1, 0;" + body
    if is_ordered:
        run_snippet(text)
        return
    with pytest.raises(Fault, match=r"by another lane of the warp, without bar\.warp\.sync") as error:
        run_snippet(text)
    assert error.value.rule == "race"


@pytest.mark.parametrize(("meet", "is_ordered"), [("", False), (MEET, True)])
@pytest.mark.parametrize("arrive", ["mbarrier.arrive.shared.b64 _, [%r10+1024];", "fence.acq_rel.cluster; RELAXED"])
def test_a_lane_hands_on_what_it_knows(arrive: str, meet: str, is_ordered: bool) -> None:
    """One lane of the first warp arrives, for what all of them wrote; the second warp reads it."""
    relaxed = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r10+1024];"
    guarded = "; ".join(f"@%p1 {part}" for part in arrive.replace("RELAXED", relaxed).rstrip(";").split("; ")) + ";"
    wait = "try_wait.parity.relaxed.cluster" if "fence" in arrive else "try_wait.parity"
    body = (
        PLACES
        + f"""
    mov.b32 %r20, 1; mov.u32 %r21, %tid.x; setp.eq.u32 %p1, %r21, 0; setp.ge.u32 %p2, %r21, 32;
    @%p1 mbarrier.init.shared.b64 [%r10+1024], %r20; bar.sync 0;
    @%p2 bra READER;
    {WRITE} {meet} {guarded} bra END;
    READER: mbarrier.{wait}.shared.b64 %p3, [%r10+1024], 0; @!%p3 bra READER; fence.acq_rel.cluster;
    {READ_OWN}
    END:
    """
    )
    if is_ordered:
        run_snippet(body, threads=64)
        return
    with pytest.raises(Fault, match="without an order in between") as error:
        run_snippet(body, threads=64)
    assert error.value.rule == "race"
