"""cp.async: which bytes it brings, whom it makes wait, and what happens without a wait, a barrier or a commit."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule
from tests.emu.snippet import run_snippet

START = """
ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x; mov.b32 %r10, smem;
mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3; cvt.u32.u64 %r2, %d3; add.s32 %r3, %r10, %r2;
"""
COMMIT, ALL = "cp.async.commit_group;", "cp.async.wait_group 0;"
COPY = "cp.async.cg.shared.global [%r3], [%d5], 16;"
ANOTHER = "add.s64 %d6, %d5, 512; cp.async.cg.shared.global [%r3+512], [%d6], 16;"
STORE = "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3]; st.global.v4.b32 [%d4], {%r20, %r21, %r22, %r23};"
STORE_OTHER = STORE.replace("[%r3]", "[%r3+512]")
STORE_NEXT = "xor.b32 %r4, %r2, 16; add.s32 %r4, %r10, %r4;" + STORE.replace("[%r3]", "[%r4]")
RANDOM = np.random.default_rng(0).integers(0, 256, (64, 16), np.uint8)


def copied(body: str, source: np.ndarray = RANDOM, threads: int = 32, schedule: Schedule | None = None) -> np.ndarray:
    """16 bytes of each thread, of `source`'s 16 for each thread, as `body` brings and stores them."""
    out = np.full((threads, 16), 0xEE, np.uint8)
    run_snippet(START + body, (out, source), threads=threads, schedule=schedule)
    return out


@pytest.mark.parametrize(("kind", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@pytest.mark.parametrize("state", ["shared", "shared::cta"])
def test_sizes(kind: str, size: int, state: str) -> None:
    parts = "".join(
        f"cp.async.{kind}.{state}.global [%r3+{at}], [%d7], {size}; add.s64 %d7, %d7, {size};"
        for at in range(0, 16, size)
    )
    for schedule in Schedule.standard(1):
        assert (copied(f"mov.b64 %d7, %d5; {parts}{COMMIT}{ALL}{STORE}", schedule=schedule) == RANDOM[:32]).all()


def test_what_the_source_lacks_becomes_zeros() -> None:
    """Lane i has i / 2 bytes of its source, and nothing of what is behind them is read: the array ends there."""
    counts = np.arange(32) // 2
    ends = RANDOM[:32].copy()
    got = copied(f"shr.u32 %r5, %r1, 1; cp.async.cg.shared.global [%r3], [%d5], 16, %r5; {COMMIT}{ALL}{STORE}", ends)
    assert (got == np.where(np.arange(16) < counts[:, None], ends, 0)).all()
    short = RANDOM.reshape(-1)[: 31 * 16 + 15]
    got = copied(f"shr.u32 %r5, %r1, 1; cp.async.cg.shared.global [%r3], [%d5], 16, %r5; {COMMIT}{ALL}{STORE}", short)
    assert (got[31, :15] == short[-15:]).all()


def test_an_empty_source_may_be_anywhere() -> None:
    body = f"mov.b64 %d5, 24; mov.b32 %r5, 0; cp.async.cg.shared.global [%r3], [%d5], 16, %r5; {COMMIT}{ALL}{STORE}"
    assert not copied(body).any()


def test_groups_of_a_lane() -> None:
    """wait_group 1 leaves the newest; wait_all needs no commit; a lane waits for its own groups only."""
    for schedule in Schedule.standard(2):
        got = copied(f"{COPY}{COMMIT}{ANOTHER}{COMMIT} cp.async.wait_group 1; {STORE}{ALL}", schedule=schedule)
        assert (got == RANDOM[:32]).all()
        got = copied(f"{COPY}{ANOTHER} cp.async.wait_all; {STORE_OTHER}", schedule=schedule)
        assert (got == RANDOM[32:]).all()
        got = copied(f"{COPY}{COMMIT}{ALL} bar.warp.sync -1; {STORE_NEXT}", schedule=schedule)
        assert (got == RANDOM[:32][np.arange(32) ^ 1]).all()


WARPS = f"{COPY}{COMMIT}{ALL} bar.sync 0; xor.b32 %r4, %r2, 512; add.s32 %r4, %r10, %r4;" + STORE.replace("%r3", "%r4")


def test_other_warps_read_behind_a_barrier() -> None:
    for schedule in Schedule.standard(3):
        assert (copied(WARPS, threads=64, schedule=schedule) == RANDOM[np.arange(64) ^ 32]).all()
        with pytest.raises(Fault) as error:
            copied(WARPS.replace("bar.sync 0;", ""), threads=64, schedule=schedule)
        assert error.value.rule in ("race", "read-before-completion", "uninitialised-read"), error.value


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        (f"{COPY}{COMMIT}{STORE}{ALL}", "read-before-completion"),
        (f"{COPY}{ALL}{STORE}{COMMIT}{ALL}", "read-before-completion"),
        (f"{COPY}{COMMIT}{ANOTHER}{COMMIT} cp.async.wait_group 1; {STORE_OTHER}{ALL}", "read-before-completion"),
        (f"{COPY}{COMMIT}{ALL}{STORE_NEXT}", "race"),
        (f"{COPY}{COMMIT} st.shared.b32 [%r3], %r1; {ALL}", "overwrite-in-flight"),
        (f"{COPY}{COPY}{COMMIT}{ALL}", "overwrite-in-flight"),
        (f"{COPY}{COMMIT}", "exit-in-flight"),
        (f"add.s64 %d5, %d5, 8; {COPY}{COMMIT}{ALL}", "misaligned"),
        (f"add.s32 %r3, %r3, 8; {COPY}{COMMIT}{ALL}", "misaligned"),
        (f"add.s64 %d5, %d5, 1024; {COPY}{COMMIT}{ALL}", "out-of-bounds"),
        (f"add.s32 %r3, %r3, 65536; {COPY}{COMMIT}{ALL}", "out-of-bounds"),
        (f"mov.b32 %r5, 17; cp.async.cg.shared.global [%r3], [%d5], 16, %r5; {COMMIT}{ALL}", "out-of-bounds"),
    ],
)
def test_what_it_takes(body: str, rules: str) -> None:
    for schedule in Schedule.standard(4):
        with pytest.raises(Fault) as error:
            copied(body, schedule=schedule)
        assert error.value.rule in rules.split(), error.value


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.cg.shared.global [%r3], [%d5], 8;",
        "cp.async.shared.global [%r3], [%d5], 16;",
        "cp.async.cg.global [%r3], [%d5], 16;",
        "cp.async.ca.shared.global [%r3], [%d5], %r1;",
        "cp.async.wait_group %r1;",
        "cp.async.cg.shared.global.L2::cache_hint [%r3], [%d5], 16, %d1;",
    ],
)
def test_what_it_does_not_run(text: str) -> None:
    with pytest.raises(Exception, match=r"cp\.async"):
        copied(text)
