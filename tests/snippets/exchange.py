"""Distributed shared memory: CTAs of a cluster add up what each holds, in rank order, then TMA reuses the memory.

Its pieces have names, so that tests can take them away.
"""

from __future__ import annotations

import numpy as np

from tests.snippets.kit import Dim, MapOf, Result, Snippet

EXCHANGE = """
mov.u32 %r1, %tid.x; mov.b32 %r10, smem; mov.u32 %r30, %cluster_ctarank; ld.param.b64 %d1, [p0];
elect.sync %r12|%p1, -1; mov.b32 %r11, COUNT; mov.b32 %r13, 1; mov.b32 %r14, 512;
@%p1 mbarrier.init.shared.b64 [%r10], %r11; @%p1 mbarrier.init.shared.b64 [%r10+8], %r11;
@%p1 mbarrier.init.shared.b64 [%r10+16], %r13; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed; barrier.cluster.wait;
mul.lo.s32 %r20, %r30, 1000; shl.b32 %r21, %r1, 2; add.s32 %r20, %r20, %r21;
VALUES
shl.b32 %r22, %r1, 4; add.s32 %r23, %r10, %r22; st.shared.v4.f32 [%r23+1024], {%r40, %r41, %r42, %r43};
bar.warp.sync -1; setp.lt.u32 %p5, %r1, COUNT; mapa.shared::cluster.u32 %r3, %r10, %r1;
WRITTEN
WAIT0
ACQUIRE
SUMS
PUBLISH
bar.warp.sync -1;
READ
WAIT8
REUSE
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10+16], %r14; mov.b64 %d2, p2; cvta.param.u64 %d3, %d2;
@%p1 cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r10+1024], [%d3, {0}], [%r10+16];
WAIT16
ld.shared.v4.f32 {%r50, %r51, %r52, %r53}, [%r23+1024];
mad.lo.s32 %r31, %r30, 512, %r22; cvt.u64.u32 %d4, %r31; add.s64 %d5, %d1, %d4;
st.global.v4.b32 [%d5], {%r44, %r45, %r46, %r47}; FINAL
"""
PARTS = {
    "VALUES": "".join(f"add.s32 %r24, %r20, {j}; cvt.rn.f32.u32 %r{40 + j}, %r24; mov.b32 %r{44 + j}, 0f00000000;"
                      for j in range(4)),
    "WRITTEN": "@%p5 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];",
    "ACQUIRE": "fence.acq_rel.cluster;",
    "REUSE": "fence.acq_rel.cluster;",
    "PUBLISH": "fence.proxy.async.shared::cluster;",
    "READ": "@%p5 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3+8];",
    "FINAL": "add.f32 %r44, %r44, %r50; add.f32 %r45, %r45, %r51; add.f32 %r46, %r46, %r52; add.f32 %r47, %r47, %r53;"
             "st.global.v4.b32 [%d5], {%r44, %r45, %r46, %r47};",
} | {
    f"WAIT{at}": f"W{at}: mbarrier.try_wait.parity.shared.b64 %p3, [%r10+{at}], 0; @%p3 bra OK{at}; bra W{at}; OK{at}:"
    for at in (0, 8, 16)
}  # fmt: skip
ADD = (
    "mapa.shared::cluster.u32 %r4, %r23, {rank}; ld.shared::cluster.v4.f32 {{%r50, %r51, %r52, %r53}}, [%r4+1024];"
    "add.f32 %r44, %r44, %r50; add.f32 %r45, %r45, %r51; add.f32 %r46, %r46, %r52; add.f32 %r47, %r47, %r53;\n"
)


def body_of(count: int, **parts: str) -> str:
    """The kernel for clusters of `count`; `parts` replace pieces of it. Parameters: result, numbers, a map of them."""
    body = EXCHANGE
    for name, text in (PARTS | {"SUMS": "".join(ADD.format(rank=rank) for rank in range(count))} | parts).items():
        body = body.replace(name, text)
    return body.replace("COUNT", str(count))


def sums(count: int) -> np.ndarray:
    """What the CTAs hold, added up: 1000 times the rank and the number's place."""
    return sum((1000 * rank + np.arange(128) for rank in range(count)), np.zeros(128, int)).astype(np.float32)


def exchange(cluster: Dim) -> Snippet:
    count = int(np.prod(cluster))
    numbers = np.arange(128, dtype=np.float32) * 1e5
    expected = np.tile(sums(count) + numbers, (count, 1)).view(np.uint32)
    name = "dsmem-exchange-" + "x".join(map(str, cluster))
    result, box = Result("sums", np.zeros((count, 128), np.uint32), expected), MapOf(1, (128,), (), (128,), "f32")
    return Snippet(name, body_of(count), (result,), (numbers.view(np.uint32),), (box,), grid=cluster, cluster=cluster)


def snippets() -> list[Snippet]:
    return [exchange(cluster) for cluster in ((2, 1, 1), (1, 1, 4), (2, 2, 2))]
