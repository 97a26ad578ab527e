"""Distributed shared memory: CTAs of a cluster add up what each holds, in rank order, then TMA reuses the memory; and
what happens without each of the arrivals, waits and fences that this takes."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator import Counters, Fault, Launch, Memory, Schedule, TensorMap, parse, run
from tests.emu.snippet import module_text, run_snippet
from tests.snippets.exchange import PARTS, body_of, sums
from tests.snippets.kit import Dim


def exchange(cluster: Dim, schedule: Schedule, **parts: str) -> tuple[np.ndarray, Counters]:
    """What CTA c stores: the sum over all CTAs' numbers and those that TMA brings. `parts` replace pieces of PTX."""
    count = int(np.prod(cluster))
    out, source = np.full((count, 128), np.nan, np.float32), np.arange(128, dtype=np.float32) * 1e5
    memory = Memory()
    addresses = [memory.register(x, f"p{i}") for i, x in enumerate((out, source))]
    params: tuple[int | TensorMap, ...] = (*addresses, TensorMap(addresses[1], (128,), (), (128,), "f32", 0, "s"))
    launch = Launch(cluster, (32, 1, 1), params, cluster, 4096)
    counters = run(parse(module_text(body_of(count, **parts), params)), launch, memory, schedule)
    return out, counters


@pytest.mark.parametrize("cluster", [(2, 1, 1), (1, 1, 4), (2, 1, 4), (4, 4, 1), (2, 2, 4)])
def test_clusters(cluster: Dim) -> None:
    """Up to 16 CTAs, along any dimension of the grid."""
    count = int(np.prod(cluster))
    for schedule in Schedule.standard(7):
        out, counters = exchange(cluster, schedule)
        assert (out == sums(count) + 1e5 * np.arange(128)).all()
        assert counters.dsmem_load_bytes == {cta: 512 * (count - 1) for cta in range(count)}
        assert counters.tma_load_bytes == counters.tma_delivered_bytes == {("s", cta): 512 for cta in range(count)}
        assert counters.waits == dict.fromkeys(range(count), 3) and not counters.dsmem_store_bytes


RELEASE, RELAXED, CTA = ".release.cluster.shared::cluster", ".relaxed.cluster.shared::cluster", ".shared::cluster"


@pytest.mark.parametrize(
    "parts",
    [
        {"WAIT0": PARTS["WAIT0"].replace(".parity", ".parity.acquire.cluster"), "ACQUIRE": ""},
        {"WAIT0": PARTS["WAIT0"].replace(".parity", ".parity.relaxed.cluster")},
        {"WRITTEN": "fence.acq_rel.cluster;" + PARTS["WRITTEN"].replace(RELEASE, RELAXED)},
        {"PUBLISH": "fence.proxy.async;"},
        {"PUBLISH": PARTS["PUBLISH"] + "fence.acq_rel.cluster;", "READ": PARTS["READ"].replace(RELEASE, RELAXED)},
        {"PUBLISH": "", "WAIT8": PARTS["WAIT8"] + "fence.proxy.async.shared::cluster;"},
        {"WRITTEN": "barrier.cluster.arrive; barrier.cluster.wait;", "WAIT0": "", "ACQUIRE": ""},
        {"WRITTEN": "fence.acq_rel.gpu; barrier.cluster.arrive.relaxed; barrier.cluster.wait;", "WAIT0": ""},
    ],
)
def test_other_ways_to_say_so(parts: dict[str, str]) -> None:
    for schedule in Schedule.standard()[:2]:
        exchange((2, 1, 1), schedule, **parts)


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        ({"ACQUIRE": ""}, "missing-cluster-fence"),
        ({"ACQUIRE": "fence.acq_rel.cta;"}, "missing-cluster-fence"),
        ({"WRITTEN": PARTS["WRITTEN"].replace(RELEASE, CTA)}, "missing-cluster-fence"),
        ({"WRITTEN": PARTS["WRITTEN"].replace(RELEASE, RELAXED)}, "race"),
        ({"WAIT0": PARTS["WAIT0"].replace(".parity", ".parity.relaxed.cluster"), "ACQUIRE": ""}, "race"),
        ({"WRITTEN": ""}, "deadlock"),
        ({"WAIT0": ""}, "race uninitialised-read"),
        ({"REUSE": ""}, "missing-cluster-fence"),
        ({"REUSE": "fence.acq_rel.cta;"}, "missing-cluster-fence"),
        ({"PUBLISH": ""}, "missing-proxy-fence"),
        ({"PUBLISH": "fence.proxy.async.shared::cta;"}, "missing-proxy-fence"),
        ({"PUBLISH": "fence.proxy.async.global;"}, "missing-proxy-fence"),
        ({"READ": PARTS["READ"].replace(RELEASE, RELAXED)}, "race missing-proxy-fence"),
        ({"READ": "", "WAIT8": ""}, "race read-before-completion overwrite-in-flight exit-in-flight exited-cta"),
        ({"WRITTEN": "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", "WAIT0": ""}, "race"),
    ],
)
def test_what_it_takes(parts: dict[str, str], rules: str) -> None:
    for schedule in Schedule.standard(3):
        with pytest.raises(Fault) as error:
            exchange((2, 1, 1), schedule, **parts)
        assert error.value.rule in rules.split(), error.value


LANES = """
mov.u32 %r1, %tid.x; mov.b32 %r10, smem; mov.u32 %r30, %cluster_ctarank; ld.param.b64 %d1, [p0];
shl.b32 %r2, %r1, 2; add.s32 %r3, %r10, %r2; and.b32 %r4, %r1, 3; mapa.shared::cluster.u32 %r5, %r3, %r4;
mad.lo.s32 %r6, %r30, 100, %r1; {first}
st.shared::cluster.b32 [%r5+{at}], %r6; barrier.cluster.arrive; barrier.cluster.wait;
ld.shared::cluster.b32 %r7, [%r5+{at}]; mad.lo.s32 %r8, %r30, 32, %r1; mul.wide.u32 %d2, %r8, 4; add.s64 %d3, %d1, %d2;
st.global.b32 [%d3], %r7; {last}
"""
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"


def lanes(out: np.ndarray, first: str = MEET, last: str = MEET) -> None:
    run_snippet("mov.u32 %r30, %cluster_ctarank; mul.lo.s32 %r9, %r30, 128;" + LANES.format(
        first=first + "add.s32 %r5, %r5, %r9;", at=0, last=last), (out,), cluster=4)  # fmt: skip


def test_lanes_reach_several_ctas_at_once() -> None:
    """Lane t stores into CTA t % 4, at a place of its own CTA's, and reads it back."""
    out = np.zeros((4, 32), np.uint32)
    lanes(out)
    assert (out == 100 * np.arange(4)[:, None] + np.arange(32)).all()


def test_a_cta_must_not_end_before_others_have_read() -> None:
    with pytest.raises(Fault) as error:
        lanes(np.zeros((4, 32), np.uint32), last="")
    assert error.value.rule in ("exit-in-flight", "exited-cta")
