"""mbarriers: phases, parities, counts and bytes; named barriers; clusters, mapa, remote arrivals and shared memory."""

from __future__ import annotations

import numpy as np

from tests.snippets.kit import BEGIN, Dim, MapOf, Result, Snippet, wait
from tests.snippets.tma import LOAD, map_of, tensor_of

ELECT = BEGIN + "elect.sync %r12|%p1, -1; mov.b32 %r9, 0; ld.param.b64 %d1, [p0];\n"


def peek(parity: int, wait_kind: str = "test_wait") -> str:
    """Appends one bit to %r9: whether the phase of this parity has completed."""
    return (
        f"mbarrier.{wait_kind}.parity.shared.b64 %p2, [%r10], {parity}; selp.b32 %r8, 1, 0, %p2;"
        " shl.b32 %r9, %r9, 1; or.b32 %r9, %r9, %r8;\n"
    )


PEEKS = peek(0) + peek(1)
FINISH = "mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r9;\n"


def init(count: int, at: int = 0) -> str:
    return f"mov.b32 %r11, {count}; @%p1 mbarrier.init.shared.b64 [%r10+{at}], %r11;"


def bits_of(
    name: str,
    body: str,
    states: list[tuple[int, bool]],
    maps: tuple[MapOf, ...] = (),
    inputs: tuple[np.ndarray, ...] = (),
) -> Snippet:
    """`states`: the parity of the running phase at each pair of peeks (the phase of the other parity is complete)."""
    value = 0
    for phase, _ in states:
        for parity in (0, 1):
            value = value << 1 | (phase % 2 != parity)
    expected = np.full(32, value, np.uint32)
    return Snippet(name, ELECT + body + FINISH, (Result("bits", np.zeros(32, np.uint32), expected),), inputs, maps)


READY = "fence.mbarrier_init.release.cluster; bar.warp.sync -1;\n"
ARRIVE = "@%p1 mbarrier.arrive.shared.b64 _, [%r10]; bar.warp.sync -1;\n"


def phases() -> list[Snippet]:
    def at(*numbers: int) -> list[tuple[int, bool]]:
        return [(n, True) for n in numbers]

    out = [bits_of("mbarrier-fresh", init(1) + READY + PEEKS, at(0))]
    out.append(bits_of("mbarrier-five-phases", init(1) + READY + PEEKS + 5 * (ARRIVE + PEEKS), at(0, 1, 2, 3, 4, 5)))
    out.append(bits_of("mbarrier-count-3", init(3) + READY + 7 * (ARRIVE + PEEKS), at(0, 0, 1, 1, 1, 2, 2)))
    many = "@%p1 mbarrier.arrive.shared.b64 _, [%r10], {}; bar.warp.sync -1;\n" + PEEKS
    out.append(
        bits_of(
            "mbarrier-arrive-count",
            init(5) + READY + many.format(2) + many.format(3) + many.format(4) + many.format(1),
            at(0, 1, 1, 2),
        )
    )
    whole = "mbarrier.arrive.shared.b64 _, [%r10]; bar.warp.sync -1;\n" + PEEKS
    out.append(bits_of("mbarrier-32-lanes", init(64) + READY + whole + whole + whole, at(0, 1, 1)))
    half = "setp.lt.u32 %p3, %r1, 16; @%p3 mbarrier.arrive.shared.b64 _, [%r10]; bar.warp.sync -1;\n" + PEEKS
    out.append(bits_of("mbarrier-16-lanes", init(16) + READY + half + half, at(1, 2)))
    again = "bar.warp.sync -1; @%p1 mbarrier.inval.shared.b64 [%r10]; bar.warp.sync -1;" + init(2) + READY + PEEKS
    out.append(
        bits_of(
            "mbarrier-init-again",
            init(1) + READY + ARRIVE + PEEKS + again + ARRIVE + PEEKS + ARRIVE + PEEKS,
            at(1, 0, 0, 1),
        )
    )
    # Hardware goes on while a try_wait waits: without the shuffle the arrival below would answer the peek before it.
    settled = "shfl.sync.idx.b32 %r7, %r9, 0, 31, -1; setp.ne.u32 %p4, %r7, 77; and.pred %p1, %p1, %p4;\n"
    peeks = peek(0, "try_wait") + peek(1, "try_wait") + settled
    out.append(bits_of("mbarrier-try-wait-peeks", init(1) + READY + peeks + ARRIVE + peeks, at(0, 1)))
    return out


def bytes_expected() -> list[Snippet]:
    """1024 bytes by TMA: expected before, after and apart from the arrival. The phase needs arrivals and bytes."""
    tensor = tensor_of((8, 64), "u16")
    copy = f"@%p1 {LOAD.format(rank=2)} [%r10+1024], [%d6, {{0, 0}}], [%r10];\n"
    maps = (map_of(1, tensor, (64, 8), "u16", 0),)
    lead = "mov.b64 %d5, p2; cvta.param.u64 %d6, %d5; mov.b32 %r13, 1024;\n"
    expect = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13; bar.warp.sync -1;\n"
    only = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r10], %r13; bar.warp.sync -1;\n"
    bodies = {
        "before": (init(1) + READY + expect + PEEKS + copy + wait("%r10", 0, "W") + PEEKS, (0, 1)),
        "apart": (init(1) + READY + only + ARRIVE + PEEKS + copy + wait("%r10", 0, "W") + PEEKS, (0, 1)),
        "arrival-last": (init(2) + READY + expect + copy + "nanosleep.u32 20000;" + PEEKS + ARRIVE
                         + wait("%r10", 0, "W") + PEEKS, (0, 1)),
        "twice": (init(1) + READY + (expect + copy + wait("%r10", 0, "W") + PEEKS)
                  + (expect + PEEKS + copy + wait("%r10", 1, "X") + PEEKS), (1, 1, 2)),
        "after": (init(1) + READY + copy + "nanosleep.u32 20000;" + PEEKS + expect + wait("%r10", 0, "W") + PEEKS,
                  (0, 1)),
    }  # fmt: skip
    return [
        bits_of(f"mbarrier-bytes-{name}", lead + body, [(s, True) for s in states], maps, (tensor,))
        for name, (body, states) in bodies.items()
    ]


def ring() -> Snippet:
    """Two warps, two slots: the producer writes 9 numbers a lane, the consumer sums what it reads, weighted by turn."""
    body = ELECT + """
    setp.lt.u32 %p4, %r1, 32; and.b32 %r2, %r1, 31; shl.b32 %r3, %r2, 2;
    setp.eq.u32 %p5, %r1, 0; mov.b32 %r11, 32;
    @%p5 mbarrier.init.shared.b64 [%r10], %r11; @%p5 mbarrier.init.shared.b64 [%r10+8], %r11;
    @%p5 mbarrier.init.shared.b64 [%r10+16], %r11; @%p5 mbarrier.init.shared.b64 [%r10+24], %r11;
    bar.sync 0; mov.b32 %r4, 0;
    TURN: and.b32 %r5, %r4, 1; shr.u32 %r6, %r4, 1; and.b32 %r6, %r6, 1; xor.b32 %r7, %r6, 1;
    shl.b32 %r13, %r5, 3; add.s32 %r14, %r10, %r13; shl.b32 %r15, %r5, 7; add.s32 %r16, %r15, %r3;
    add.s32 %r16, %r16, %r10; @!%p4 bra CONSUME;
    """ + wait("%r14+16", "%r7", "EMPTY") + """
    mad.lo.s32 %r17, %r4, 1000, %r2; st.shared.b32 [%r16+256], %r17; mbarrier.arrive.shared.b64 _, [%r14]; bra NEXT;
    CONSUME:
    """ + wait("%r14", "%r6", "FULL") + """
    ld.shared.b32 %r18, [%r16+256]; mbarrier.arrive.shared.b64 _, [%r14+16]; mad.lo.s32 %r9, %r9, 3, %r18;
    NEXT: add.s32 %r4, %r4, 1; setp.lt.u32 %p6, %r4, 9; @%p6 bra TURN;
    """ + FINISH  # fmt: skip
    total = np.zeros(64, np.uint32)
    for turn in range(9):
        total[32:] = total[32:] * 3 + 1000 * turn + np.arange(32)
    return Snippet("mbarrier-ring", body, (Result("sums", np.full(64, 7, np.uint32), total),), threads=64)


def named() -> Snippet:
    """Warp 0 writes and arrives at barrier 1, warp 1 waits there and reads; all three meet at barrier 2."""
    body = ELECT + """
    shr.u32 %r2, %r1, 5; shl.b32 %r3, %r1, 2; add.s32 %r4, %r10, %r3; setp.eq.u32 %p2, %r2, 0; setp.eq.u32 %p3, %r2, 1;
    add.s32 %r5, %r1, 500; @!%p2 bra ONE; st.shared.b32 [%r4], %r5; bar.arrive 1, 64; bra ALL;
    ONE: @!%p3 bra ALL; bar.sync 1, 64; ld.shared.b32 %r6, [%r4+-128]; add.s32 %r6, %r6, 1; st.shared.b32 [%r4], %r6;
    ALL: bar.sync 2, 96; @%p2 bra END; ld.shared.b32 %r9, [%r10+200];
    END: add.s32 %r9, %r9, %r2;
    """ + FINISH  # fmt: skip
    expected = np.repeat(np.array([0, 519 + 1, 519 + 2], np.uint32), 32)
    return Snippet("named-barriers", body, (Result("values", np.zeros(96, np.uint32), expected),), threads=96)


TRIPLES = ("ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
PLACES = (*(f"%{name}.{axis}" for name in TRIPLES for axis in "xyz"), "%cluster_ctarank", "%cluster_nctarank")
OWN_PLACE = """
mov.u32 %r20, %ctaid.x; mov.u32 %r21, %ctaid.y; mov.u32 %r22, %ctaid.z; mov.u32 %r23, %nctaid.x;
mov.u32 %r24, %nctaid.y;
mad.lo.s32 %r25, %r22, %r24, %r21; mad.lo.s32 %r25, %r25, %r23, %r20;
"""  # %r25: the CTA's number in the grid


def places(grid: Dim, cluster: Dim) -> Snippet:
    """Who am I: every special register of every CTA."""
    reads = "".join(
        f"mov.u32 %r{40 + i}, {name}; st.global.b32 [%d3+{4 * i}], %r{40 + i};" for i, name in enumerate(PLACES)
    )
    size = 4 * len(PLACES)
    body = BEGIN + OWN_PLACE + f"ld.param.b64 %d1, [p0]; mul.wide.u32 %d2, %r25, {size}; add.s64 %d3, %d1, %d2;" + reads
    rows = []
    for z, y, x in np.ndindex(grid[::-1]):
        own = (x, y, z)
        inside = [o % c for o, c in zip(own, cluster, strict=True)]
        clusters = [o // c for o, c in zip(own, cluster, strict=True)]
        count = [g // c for g, c in zip(grid, cluster, strict=True)]
        rank = inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2])
        rows.append([*own, *grid, *inside, *cluster, *clusters, *count, rank, int(np.prod(cluster))])
    expected = np.array(rows, np.uint32)
    name = "special-registers-" + "x".join(map(str, cluster))
    return Snippet(name, body, (Result("registers", expected * 0, expected),), grid=grid, cluster=cluster)


def addresses() -> Snippet:
    """The bits of shared addresses: of an own variable, by mapa for each CTA (also beyond the cluster), and back."""
    body = (
        BEGIN
        + """
    ld.param.b64 %d1, [p0]; mul.wide.u32 %d2, %r30, 32; add.s64 %d3, %d1, %d2; add.s32 %r2, %r10, 40;
    mapa.shared::cluster.u32 %r3, %r2, 0; mapa.shared::cluster.u32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r2, 3;
    and.b32 %r6, %r5, 0xFEFFFFFF; mapa.shared::cluster.u32 %r7, %r5, %r30;
    cvt.u64.u32 %d4, %r2; cvta.shared.u64 %d5, %d4; cvta.to.shared::cluster.u64 %d6, %d5; cvt.u32.u64 %r8, %d6;
    cvta.to.shared.u64 %d7, %d5; cvt.u32.u64 %r9, %d7;
    st.global.v4.b32 [%d3], {%r10, %r3, %r4, %r5}; st.global.v4.b32 [%d3+16], {%r6, %r7, %r8, %r9};
    """
    )
    words = np.zeros((4, 8), np.uint32)
    return Snippet("shared-addresses", body, (Result("addresses", words),), grid=(4, 1, 1), cluster=(4, 1, 1))


def remote_arrivals(cluster: Dim) -> Snippet:
    """Lane i arrives in CTA i, three times over; each CTA waits for all and says which parities it saw complete."""
    count = int(np.prod(cluster))
    body = (
        ELECT
        + init(count)
        + "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    )
    body += f"setp.lt.u32 %p5, %r1, {count}; and.b32 %r2, %r1, {count - 1}; mapa.shared::cluster.u32 %r3, %r10, %r2;\n"
    for phase in range(3):
        body += "@%p5 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];\n" + wait(
            "%r10", phase % 2, f"W{phase}"
        )
        body += "shl.b32 %r9, %r9, 2; add.s32 %r9, %r9, 1;"
        body += (
            "barrier.cluster.arrive; barrier.cluster.wait;\n"
            + PEEKS
            + "barrier.cluster.arrive; barrier.cluster.wait;\n"
        )
    body += f"mul.wide.u32 %d4, %r30, 128; add.s64 %d1, %d1, %d4; {FINISH}"
    value = 0
    for phase in range(3):
        value = (value << 2) + 1
        value = value << 2 | (0b10 if phase % 2 == 0 else 0b01)
    expected = np.full((count, 32), value, np.uint32)
    return Snippet(
        f"remote-arrivals-{count}", body, (Result("bits", expected * 0, expected),), grid=cluster, cluster=cluster
    )


def remote_bytes() -> Snippet:
    """CTA 0 posts bytes at CTA 1's barrier and multicasts to both; each waits for its own."""
    tensor = tensor_of((8, 64), "u16")
    body = ELECT + init(1) + f"""
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
    mov.b32 %r13, 1024; mov.b64 %d5, p2; cvta.param.u64 %d6, %d5; mov.b16 %h1, 3;
    setp.ne.u32 %p4, %r30, 0; @%p4 bra MINE;
    setp.lt.u32 %p5, %r1, 2; mapa.shared::cluster.u32 %r3, %r10, %r1;
    @%p5 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r3], %r13; bar.warp.sync -1;
    @%p1 {LOAD.format(rank=2)}.multicast::cluster [%r10+1024], [%d6, {{0, 0}}], [%r10], %h1;
    MINE: {wait('%r10', 0, 'FULL')} shl.b32 %r2, %r1, 2; add.s32 %r4, %r10, %r2; ld.shared.b32 %r9, [%r4+1024];
    mul.wide.u32 %d4, %r30, 128; add.s64 %d1, %d1, %d4; {FINISH} barrier.cluster.arrive; barrier.cluster.wait;
    """  # fmt: skip
    expected = np.tile(tensor.reshape(-1)[:64].view(np.uint32), (2, 1))
    return Snippet("remote-bytes", body, (Result("words", expected * 0, expected),), (tensor,),
                   (map_of(1, tensor, (64, 8), "u16", 0),), grid=(2, 1, 1), cluster=(2, 1, 1))  # fmt: skip


def remote_memory() -> Snippet:
    """Each CTA stores into its neighbour's shared memory, then reads that of the one opposite."""
    body = (
        BEGIN
        + """
    ld.param.b64 %d1, [p0]; shl.b32 %r2, %r1, 2; add.s32 %r3, %r10, %r2; add.s32 %r4, %r30, 1; and.b32 %r4, %r4, 3;
    xor.b32 %r5, %r30, 2; mapa.shared::cluster.u32 %r6, %r3, %r4; mapa.shared::cluster.u32 %r7, %r3, %r5;
    mad.lo.s32 %r8, %r30, 100, %r1; barrier.cluster.arrive; barrier.cluster.wait;
    st.shared::cluster.b32 [%r6], %r8; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    ld.shared::cluster.b32 %r9, [%r7]; ld.shared.b32 %r11, [%r3]; mad.lo.s32 %r9, %r9, 1000, %r11;
    mad.lo.s32 %r12, %r30, 32, %r1; mul.wide.u32 %d2, %r12, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r9;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    rank, lane = np.arange(4)[:, None], np.arange(32)[None, :]
    own = (rank + 3) % 4 * 100 + lane
    expected = (((rank ^ 2) + 3) % 4 * 100 + lane) * 1000 + own
    start = np.zeros((4, 32), np.uint32)
    return Snippet(
        "remote-memory", body, (Result("words", start, expected.astype(np.uint32)),), grid=(4, 1, 1), cluster=(4, 1, 1)
    )


def snippets() -> list[Snippet]:
    shapes: list[tuple[Dim, Dim]] = [
        ((3, 2, 2), (1, 1, 1)),
        ((4, 2, 2), (2, 1, 1)),
        ((4, 4, 1), (2, 2, 1)),
        ((2, 2, 4), (1, 2, 2)),
    ]
    places_ = [places(grid, cluster) for grid, cluster in shapes]
    remote = [remote_arrivals((2, 1, 1)), remote_arrivals((2, 2, 1)), remote_bytes(), remote_memory(), addresses()]
    return [*phases(), *bytes_expected(), ring(), named(), *places_, *remote]
