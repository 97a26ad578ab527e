"""Order in global memory: one cluster leaves numbers and raises a flag, another waits for it and adds them up; and what
happens without each of the barriers, the release, the acquire and their scopes that this takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Launch, Memory, Schedule, parse, run
from jax_bwgemm.emulator.errors import UnsupportedInstruction
from tests.emu.snippet import module_text

THREADS, UP = 64, 7
PARTS = {
    "WRITTEN": "bar.sync 0;",
    "RAISE": "st.release.gpu.global.b32 [%d1], %r20;",
    "LOOK": "ld.acquire.gpu.global.b32 %r21, [%d1-4];",
    "FOUND": "bar.sync 0;",
    "READ": "ld.global.b32 %r22, [%d6];",
    "LAST": "",
}
# CTA 0 writes its threads' numbers times 3; each CTA after it reads what the one before wrote, turned around, and adds
# 1. Flag and numbers of CTA i: p0[i], p1[i]. Warp 0 sees to the flags.
BODY = """
 mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.b32 %r20, {UP}; ld.param.b64 %d2, [p0]; ld.param.b64 %d3, [p1];
 setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %r2, 0; mul.lo.s32 %r22, %r1, 3; mul.wide.u32 %d7, %r1, 4;
 mul.wide.u32 %d4, %r2, 4; add.s64 %d1, %d2, %d4; mul.wide.u32 %d4, %r2, 256; add.s64 %d5, %d3, %d4;
 add.s64 %d8, %d5, %d7; @%p2 bra WRITE;
 @!%p1 bra MEET;
 AGAIN: {LOOK} setp.ne.s32 %p3, %r21, {UP}; @%p3 bra AGAIN;
 MEET: {FOUND} sub.s64 %d6, %d5, %d7; add.s64 %d6, %d6, -4; {READ} add.s32 %r22, %r22, 1;
 WRITE: st.global.b32 [%d8], %r22; {WRITTEN}
 elect.sync %r12|%p9, -1; and.pred %p4, %p1, %p9; @!%p4 bra DONE; {RAISE} DONE: {LAST}
"""


def relay(count: int = 2, cluster: int = 1, schedule: Schedule | None = None, **parts: str) -> np.ndarray:
    """What `count` CTAs leave, in clusters of `cluster`. `parts` replace pieces of PTX."""
    flags, numbers = np.zeros(count, np.uint32), np.full((count, THREADS), 999, np.uint32)
    memory = Memory()
    addresses = tuple(memory.register(x, f"p{i}") for i, x in enumerate((flags, numbers)))
    body = BODY.format(UP=UP, **(PARTS | parts))
    launch = Launch((count, 1, 1), (THREADS, 1, 1), addresses, (cluster, 1, 1), 1024)
    run(parse(module_text(body, addresses, THREADS)), launch, memory, schedule, max_instructions=10**6)
    return numbers


def rows(count: int) -> np.ndarray:
    first = 3 * np.arange(THREADS, dtype=np.uint32)
    return np.array([(first[::-1] if i % 2 else first) + i for i in range(count)])


@pytest.mark.parametrize(("count", "cluster"), [(1, 1), (2, 1), (2, 2), (4, 2), (5, 1)])
def test_a_relay(count: int, cluster: int) -> None:
    for schedule in Schedule.standard(count):
        assert (relay(count, cluster, schedule) == rows(count)).all()


RELAXED = PARTS["RAISE"].replace("release", "relaxed"), PARTS["LOOK"].replace("acquire", "relaxed")


@pytest.mark.parametrize(
    "parts",
    [
        {"RAISE": PARTS["RAISE"].replace("gpu", "sys"), "LOOK": PARTS["LOOK"].replace("gpu", "sys")},
        {"RAISE": "fence.acq_rel.gpu;" + RELAXED[0]},
        {"WRITTEN": "bar.sync 0; membar.gl;", "RAISE": "st.volatile.global.b32 [%d1], %r20;"},
        {"LOOK": RELAXED[1], "FOUND": "fence.acq_rel.gpu; bar.sync 0;"},
        {"LOOK": "ld.volatile.global.b32 %r21, [%d1-4];", "FOUND": "fence.sc.sys; bar.sync 0;"},
        {"READ": "ld.relaxed.gpu.global.b32 %r22, [%d6];"},
        {"RAISE": PARTS["RAISE"].replace(".global", ""), "LOOK": PARTS["LOOK"].replace(".global", "")},
    ],
)
def test_other_ways_to_say_so(parts: dict[str, str]) -> None:
    for cluster in (1, 3):
        assert (relay(3, cluster, **parts) == rows(3)).all()


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ({"RAISE": PARTS["RAISE"].replace(".release.gpu", "")}, "race"),
        ({"RAISE": RELAXED[0]}, "race"),
        ({"RAISE": PARTS["RAISE"].replace("gpu", "cluster")}, "missing-gpu-fence"),
        ({"RAISE": PARTS["RAISE"].replace("gpu", "cta")}, "missing-gpu-fence"),
        ({"RAISE": "fence.acq_rel.cluster;" + RELAXED[0]}, "race"),
        ({"RAISE": ""}, "deadlock"),
        ({"LOOK": PARTS["LOOK"].replace(".acquire.gpu", "")}, "race"),
        ({"LOOK": RELAXED[1]}, "race"),
        ({"LOOK": PARTS["LOOK"].replace("gpu", "cluster")}, "missing-gpu-fence"),
        ({"LOOK": PARTS["LOOK"].replace("gpu", "cta")}, "missing-gpu-fence"),
        ({"LOOK": RELAXED[1], "FOUND": "fence.acq_rel.cta; bar.sync 0;"}, "race"),
        ({"LOOK": f"mov.b32 %r21, {UP};"}, "race"),
        ({"WRITTEN": ""}, "race"),
        ({"FOUND": ""}, "race"),
    ],
)
def test_what_it_takes(parts: dict[str, str], rule: str) -> None:
    for schedule in Schedule.standard(3):
        with pytest.raises(Fault) as error:
            relay(2, 1, schedule, **parts)
        assert error.value.rule == rule, error.value


def test_one_look_is_not_enough() -> None:
    """What another cluster stored may not be there yet, though clusters run one after the other."""
    once = {"LOOK": PARTS["LOOK"] + f"mov.b32 %r21, {UP};"}
    for schedule in Schedule.standard(3):
        if schedule.loads == "eager":
            assert (relay(2, 1, schedule, **once) == rows(2)).all()
        else:
            with pytest.raises(Fault, match="a load from `p1` of what was stored without an order in between"):
                relay(2, 1, schedule, **once)


@pytest.mark.parametrize("which", ["RAISE", "LOOK"])
def test_scopes_in_a_cluster(which: str) -> None:
    """Cluster scope is enough between CTAs of one, and CTA scope is not."""
    assert (relay(2, 2, **{which: PARTS[which].replace("gpu", "cluster")}) == rows(2)).all()
    with pytest.raises(Fault, match=r"another CTA requires .cluster scope of both, got .cta") as error:
        relay(2, 2, **{which: PARTS[which].replace("gpu", "cta")})
    assert error.value.rule == "missing-cluster-fence"


@pytest.mark.parametrize(
    ("order", "rule"), [("barrier.cluster.arrive", ""), ("barrier.cluster.arrive.relaxed", "race")]
)
def test_the_cluster_barrier_orders_a_cluster(order: str, rule: str) -> None:
    """A CTA reads what the other wrote without any flag."""
    meet = f"{order}; barrier.cluster.wait;"
    body = (
        """mov.u32 %r1, %ctaid.x; ld.param.b64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
     xor.b32 %r2, %r1, 1; mul.wide.u32 %d2, %r2, 4; add.s64 %d4, %d1, %d2; st.global.b32 [%d3], %r1;"""
        + meet
    )
    body += "ld.global.b32 %r3, [%d4]; barrier.cluster.arrive; barrier.cluster.wait; st.global.b32 [%d3], %r3;"
    assert fault_of(body, 2) == rule


def two_ctas(body: str, cluster: int = 1, **options: Any) -> None:
    """Of one warp each; p0 has 64 words."""
    memory = Memory()
    addresses = (memory.register(np.zeros(64, np.uint32), "p0"),)
    launch = Launch((2, 1, 1), (32, 1, 1), addresses, (cluster, 1, 1))
    run(parse(module_text(body, addresses)), launch, memory, max_instructions=10**6, **options)


def fault_of(body: str, cluster: int = 1) -> str:
    """The rule that is broken, or ""."""
    try:
        two_ctas(body, cluster)
    except Fault as fault:
        return fault.rule
    return ""


AT = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; ld.param.b64 %d1, [p0]; setp.eq.u32 %p1, %r2, 0;"


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("st.global.b32 [%d1], %r2;", "race"),
        ("st.relaxed.gpu.global.b32 [%d1], %r2;", ""),
        ("st.relaxed.cluster.global.b32 [%d1], %r2;", "missing-gpu-fence"),
        ("mul.wide.u32 %d2, %r2, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r1;", ""),
        ("mul.wide.u32 %d2, %r2, 2; add.s64 %d3, %d1, %d2; cvt.u16.u32 %h1, %r1; st.global.b16 [%d3], %h1;", ""),
        ("@%p1 ld.global.b32 %r3, [%d1]; @!%p1 st.global.b32 [%d1], %r1;", "race"),
        ("@%p1 st.global.b32 [%d1+4], %r1; @!%p1 ld.global.v2.b32 {%r3, %r4}, [%d1];", "race"),
        ("@%p1 ld.global.b32 %r3, [%d1+4]; @!%p1 st.global.b32 [%d1], %r1;", ""),
        ("ld.global.b32 %r3, [%d1];", ""),
    ],
)
def test_two_clusters_at_one_place(body: str, rule: str) -> None:
    """Stores over stores, stores over loads, neighbours, and what needs no order."""
    assert fault_of(AT + body) == rule


def test_a_reset_behind_the_acquire() -> None:
    """Whoever has waited for a flag may take it down by a plain store; who has not, may not."""
    reset = "bar.sync 0; mov.b32 %r23, 0; {}%p1 st.global.b32 [%d1-4], %r23;"
    for warp in ("@", "@!"):
        assert (relay(2, 1, FOUND=reset.format(warp)) == rows(2)).all()
        with pytest.raises(Fault, match="a store to `p0` over what was stored without an order") as error:
            relay(2, 1, LOOK=RELAXED[1], READ="", FOUND=reset.format(warp))
        assert error.value.rule == "race"


def test_a_wait_for_a_later_cluster() -> None:
    """Clusters run in the order of the grid, as only the first ones may be resident."""
    wait = "@!%p1 bra GO; AGAIN: ld.acquire.gpu.global.b32 %r3, [%d1]; setp.eq.s32 %p2, %r3, 0; @%p2 bra AGAIN; GO:"
    with pytest.raises(Fault, match="waits for a store to global address 0x7f0000000000; clusters run in the order"):
        two_ctas(AT + wait + "st.release.gpu.global.b32 [%d1], %r2;")


def test_a_wait_within_a_cluster() -> None:
    """A warp that polls gives way to the one that will store, however long that takes."""
    slow = "mov.b32 %r5, 0; SLOW: bar.warp.sync -1; add.s32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 9000; @%p5 bra SLOW;"
    for schedule in Schedule.standard(1):
        assert (relay(2, 2, schedule, WRITTEN=slow + "bar.sync 0;") == rows(2)).all()


@pytest.mark.parametrize("access", ["ld.acquire.global.b32 %r3, [%d1];", "st.gpu.global.b32 [%d1], %r1;"])
def test_a_scope_goes_with_an_order(access: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="requires a scope with .relaxed, .acquire and .release"):
        two_ctas(AT + access)


def test_without_checks() -> None:
    two_ctas(AT + "st.global.b32 [%d1], %r2;", checks=False)


TWO_FLAGS = f"""
 mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.b32 %r20, {UP}; ld.param.b64 %d2, [p0]; ld.param.b64 %d3, [p1];
 setp.eq.u32 %p1, %r2, 2; setp.lt.u32 %p2, %r1, 2; setp.eq.u32 %p3, %r1, 0; add.s32 %r3, %r2, 40;
 @%p1 mov.u32 %r2, %r1; mul.wide.u32 %d4, %r2, 4; add.s64 %d1, %d2, %d4; add.s64 %d5, %d3, %d4;
 @%p1 bra WAIT; @!%p3 bra DONE; st.global.b32 [%d5], %r3; st.release.gpu.global.b32 [%d1], %r20; bra DONE;
 WAIT: @!%p2 bra DONE;
 AGAIN: ld.acquire.gpu.global.b32 %r21, [%d1]; setp.ne.s32 %p4, %r21, {UP}; @%p4 bra AGAIN;
 ld.global.b32 %r22, [%d5]; st.global.b32 [%d5+8], %r22;
 DONE:
"""


def test_one_load_of_several_flags() -> None:
    """Two lanes of one warp look at the flags of two clusters: each finds its own late, or up with what it released."""
    for schedule in Schedule.standard(3):
        flags, numbers = np.zeros(2, np.uint32), np.zeros(4, np.uint32)
        memory = Memory()
        addresses = tuple(memory.register(x, f"p{i}") for i, x in enumerate((flags, numbers)))
        launch = Launch((3, 1, 1), (32, 1, 1), addresses, (1, 1, 1), 1024)
        run(parse(module_text(TWO_FLAGS, addresses, 32)), launch, memory, schedule, max_instructions=10**5)
        assert numbers.tolist() == [40, 41, 40, 41]
