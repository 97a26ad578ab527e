"""What lanes of a warp exchange: shuffles, votes, elections, reductions; and branches that part and rejoin them."""

from __future__ import annotations

import numpy as np

from tests.snippets.kit import Snippet
from tests.snippets.lanewise import Op, lanewise

LANES = np.arange(32)


def shuffles() -> list[Snippet]:
    x = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint32)
    lane = np.random.default_rng(1).integers(0, 64, 32, dtype=np.uint32)
    ops = []
    for mode, clamps in (("idx", (31, 0x1C1F, 0x101F, 7)), ("bfly", (31, 0x181F, 0x1C03)), ("up", (0, 0x1800, 5)),
                         ("down", (31, 0x181F, 20))):  # fmt: skip
        for clamp in clamps:
            for by in ("%r2", "1", "3", "13"):
                form = f"shfl.sync.{mode}.b32 %r9|%p1, %r1, {by}, {clamp}, -1;"
                form += " selp.b32 %r8, 1, 0, %p1; xor.b32 %r9, %r9, %r8;"
                ops.append(Op(f"{mode} {by} {clamp:#x}", form, "%r9", 32))
    straight = {"idx %r2 0x1f": x[lane % 32], "bfly 3 0x1f": x[LANES ^ 3], "idx 13 0x1f": np.full(32, x[13])}
    ops = [Op(o.label, o.lines, o.result, o.bits, straight[o.label] ^ 1 if o.label in straight else None) for o in ops]
    return lanewise("shuffles", ops, (x, lane))[:1]


def votes() -> list[Snippet]:
    x = np.random.default_rng(2).integers(0, 100, 32, dtype=np.uint32)
    ops = []
    for limit in (0, 50, 100):
        test = f"setp.lt.u32 %p1, %r1, {limit};"
        ballot = np.full(32, int(sum(1 << int(i) for i in np.flatnonzero(x < limit))), np.uint32)
        ops.append(Op(f"ballot {limit}", f"{test} vote.sync.ballot.b32 %r9, %p1, -1;", "%r9", 32, ballot))
        for kind in ("all", "any", "uni"):
            ops.append(
                Op(f"{kind} {limit}", f"{test} vote.sync.{kind}.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;", "%r9", 32)
            )
    ops.append(Op("elect", "elect.sync %r8|%p1, -1; selp.b32 %r9, 64, 0, %p1; add.s32 %r9, %r9, %r8;", "%r9", 32))
    reductions = {"add.u32": np.add, "min.u32": np.minimum, "max.u32": np.maximum, "and.b32": np.bitwise_and,
                  "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor}  # fmt: skip
    for name, fold in reductions.items():
        expected = np.full(32, fold.reduce(x), np.uint32)
        ops.append(Op(f"redux.{name}", f"redux.sync.{name} %r9, %r1, -1;", "%r9", 32, expected))
    return lanewise("votes", ops, (x,))[:1]


def branches() -> list[Snippet]:
    """A loop of as many turns as the lane says, a branch inside it, guards, and an early exit after the last store."""
    x = np.random.default_rng(3).integers(0, 20, 32, dtype=np.uint32)
    loop = """
    mov.b32 %r2, 0; mov.b32 %r9, 0;
    AGAIN: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.s32 %r2, %r2, 1; and.b32 %r3, %r2, 3; setp.eq.u32 %p2, %r3, 0;
    @%p2 bra FOURTH; add.s32 %r9, %r9, %r2; bra AGAIN; FOURTH: xor.b32 %r9, %r9, 0x55; bra AGAIN; DONE:
    bar.warp.sync -1; shfl.sync.bfly.b32 %r4, %r9, 1, 31, -1; @%p1 add.s32 %r9, %r9, %r4; @!%p1 mov.b32 %r9, 0;
    """
    value = np.zeros(32, np.uint32)
    for i, turns in enumerate(x.tolist()):
        for turn in range(1, turns + 1):
            value[i] = value[i] ^ 0x55 if turn % 4 == 0 else value[i] + turn
    expected = value + value[LANES ^ 1]
    return lanewise("branches", [Op("loop", loop, "%r9", 32, expected)], (x,))[:1]


def snippets() -> list[Snippet]:
    return [*shuffles(), *votes(), *branches()]
