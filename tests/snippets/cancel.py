"""clusterlaunchcontrol: clusters that do the work of those they cancel. For sm_100a alone.

Each CTA adds 1 to its 32 numbers, asks for another cluster meanwhile, and goes on with that one's until it is refused.
Its pieces have names, so that tests can take them away.
"""

from __future__ import annotations

import numpy as np

from tests.snippets.kit import BEGIN, Dim, Result, Snippet, wait

TARGET = "sm_100a"
WORK = BEGIN + """
.reg .b128 %q<4>; elect.sync %r12|%p1, -1; mov.b32 %r11, 1; mov.b32 %r13, 16; mov.b32 %r21, 0;
@%p1 mbarrier.init.shared.b64 [%r10+16], %r11; fence.mbarrier_init.release.cluster;
setp.eq.u32 %p3, %r30, 0; and.pred %p3, %p3, %p1; MEET
mov.u32 %r20, %ctaid.x; mov.u32 %r24, %smid; ld.param.b64 %d1, [p0]; ld.param.b64 %d5, [p1];
NEXT: @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10+16], %r13;
ASK
mad.lo.s32 %r25, %r20, 32, %r1; mul.wide.u32 %d2, %r25, 4; add.s64 %d3, %d1, %d2; add.s64 %d6, %d5, %d2;
ld.global.b32 %r26, [%d3]; add.s32 %r26, %r26, 1; st.global.b32 [%d3], %r26; st.global.b32 [%d6], %r24;
WAIT
LOAD
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r20, %r22, %r23, _}, %q1; add.s32 %r20, %r20, %r30;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1; xor.b32 %r21, %r21, 1;
PUBLISH
TURN
AGAIN
"""  # fmt: skip
ASK = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [%r10], [%r10+16];"
PARTS = {
    "WAIT": wait("%r10+16", "%r21", "ANSWER"),
    "LOAD": "ld.shared.b128 %q1, [%r10];",
    "PUBLISH": "fence.proxy.async.shared::cta;",
    "AGAIN": "@%p2 bra NEXT;",
}


def body_of(cluster: int, **parts: str) -> str:
    """`parts` replace pieces of the kernel."""
    multicast = ".multicast::cluster::all" if cluster > 1 else ""
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" if cluster > 1 else "bar.warp.sync -1;"
    body = WORK
    for name, text in (PARTS | {"ASK": "@%p3 " + ASK.format(multicast), "MEET": meet, "TURN": meet} | parts).items():
        body = body.replace(name, text)
    return body


def snippets() -> list[Snippet]:
    """Of 6 clusters of 1 CTA and of 2; results: how often each was worked on, and by whom."""
    found = []
    for cluster in (1, 2):
        grid: Dim = (6 * cluster, 1, 1)
        count, who = np.zeros((6 * cluster, 32), np.uint32), np.full((6 * cluster, 32), 99, np.uint32)
        results = Result("count", count, np.ones_like(count)), Result("who", who)
        found.append(Snippet(f"cancel-{cluster}", body_of(cluster), results, grid=grid, cluster=(cluster, 1, 1),
                             target=TARGET))  # fmt: skip
    return found
