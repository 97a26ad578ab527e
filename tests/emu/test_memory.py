"""Loads, stores, matrices, and what is out of bounds, misaligned or never written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.emulator import Fault, UnsupportedInstruction
from tests.emu.snippet import lanes_of, load_lane, run_snippet

POINTER = "ld.param.b64 %d1, [p0]; mov.b32 %r10, smem; mov.u32 %r1, %tid.x;"


def test_vectors_through_shared_memory() -> None:
    """Each lane writes 16 bytes; lane t reads those of lane 31 - t in pieces of 8."""
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r10, smem; shl.b32 %r2, %r1, 4; add.s32 %r3, %r10, %r2;
    add.s32 %r4, %r1, 100; add.s32 %r5, %r1, 200; add.s32 %r6, %r1, 300;
    st.shared.v4.b32 [%r3], {%r1, %r4, %r5, %r6}; bar.warp.sync -1;
    sub.s32 %r7, 31, %r1; shl.b32 %r7, %r7, 4; add.s32 %r8, %r10, %r7;
    ld.shared.v2.b64 {%d5, %d6}, [%r8]; mov.b64 {_, %r9}, %d6;
    """
    assert lanes_of(body, "%r9").tolist() == (300 + np.arange(32)[::-1]).tolist()


def test_generic_and_cluster_addresses_name_the_same_bytes() -> None:
    body = """
    mov.b32 %r10, smem; cvt.u64.u32 %d1, %r10; cvta.shared.u64 %d2, %d1; cvta.to.shared::cluster.u64 %d3, %d2;
    cvt.u32.u64 %r11, %d3; mov.b32 %r1, 77; st.shared.b32 [%r10+4], %r1; bar.warp.sync -1;
    ld.shared::cluster.b32 %r2, [%r11+4]; ld.b32 %r3, [%d2+4]; add.s32 %r2, %r2, %r3;
    """
    assert lanes_of(body, "%r2").tolist() == [154] * 32


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 31), min_size=32, max_size=32, unique=True), st.booleans())
def test_stmatrix_and_ldmatrix(order: list[int], transposed: bool) -> None:
    """Element (i, j) of matrix q is half i*8+j of its fragment; the rows lie where the lanes say."""
    out = np.zeros(1024, np.uint16)
    rows = np.array(order, np.uint32) * 16
    trans = ".trans" if transposed else ""
    body = (
        load_lane("%r1", 1, 32).replace("%d1", "%d1")
        + f"""
    mov.b32 %r10, smem; add.s32 %r2, %r10, %r1; mov.u32 %r3, %tid.x; shl.b32 %r4, %r3, 17; shl.b32 %r5, %r3, 1;
    or.b32 %r4, %r4, %r5; add.s32 %r4, %r4, 65536;
    add.s32 %r6, %r4, 16777472; add.s32 %r7, %r6, 16777472; add.s32 %r8, %r7, 16777472;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r4, %r6, %r7, %r8}}; bar.warp.sync -1;
    shl.b32 %r20, %r3, 4; add.s32 %r21, %r10, %r20; ld.shared.v2.b64 {{%d5, %d6}}, [%r21];
    mul.wide.u32 %d7, %r3, 16; add.s64 %d8, %d9, %d7; st.global.v2.b64 [%d8], {{%d5, %d6}};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r30, %r31, %r32, %r33}}, [%r2];
    xor.b32 %r34, %r30, %r4; xor.b32 %r35, %r33, %r8; or.b32 %r34, %r34, %r35;
    mul.wide.u32 %d10, %r3, 4; add.s64 %d11, %d9, %d10; st.global.b32 [%d11+512], %r34;
    """
    )
    run_snippet("ld.param.b64 %d9, [p0]; ld.param.b64 %d1, [p1];" + body, (out, rows))
    for matrix in range(4):
        for i in range(8):
            for j in range(8):
                row, column = (j, i) if transposed else (i, j)
                place = order[8 * matrix + row] * 8 + column
                lane, half = divmod(8 * i + j, 2)
                assert out[place] == 2 * lane + 256 * matrix + half
    assert not out[256:320].any(), "ldmatrix gives back what stmatrix took"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int) -> None:
    """16x8 bytes a register, stored column by column where the lanes say: byte v of lane t is element
    (t/4 + 8*(v/2), 2*(t%4) + v%2) (PTX ISA, stmatrix, .m16n8)."""
    out = np.zeros(512, np.uint8)
    values = np.random.default_rng(count).integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    order = np.random.default_rng(9).permutation(32).astype(np.uint32)
    regs = ", ".join(f"%r{20 + i}" for i in range(count))
    body = load_lane("%r1", 2, 32) + "shl.b32 %r2, %r1, 4; mov.b32 %r10, smem; add.s32 %r3, %r10, %r2;"
    body += "".join(f"ld.global.b32 %r{20 + i}, [%d42+{128 * i}];" for i in range(count))
    body += f"""
    mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 4; add.s32 %r6, %r10, %r5;
    st.shared.v4.b32 [%r6], {{%r7, %r7, %r7, %r7}}; bar.warp.sync -1;
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r3], {{{regs}}}; bar.warp.sync -1;
    ld.shared.v2.b64 {{%d5, %d6}}, [%r6]; mul.wide.u32 %d7, %r4, 16; add.s64 %d8, %d9, %d7;
    st.global.v2.b64 [%d8], {{%d5, %d6}};
    """
    head = "ld.param.b64 %d9, [p0]; ld.param.b64 %d1, [p1]; ld.param.b64 %d2, [p2]; mov.u32 %r4, %tid.x;"
    head += "mul.wide.u32 %d41, %r4, 4; add.s64 %d42, %d1, %d41; mov.b32 %r7, 0;"
    run_snippet(head + body.replace("%d41", "%d43").replace("%d40", "%d44"), (out, values, order))
    want = np.zeros((32, 16), np.uint8)
    for q in range(count):
        for t in range(32):
            for v in range(4):
                column, row = 2 * (t % 4) + v % 2, t // 4 + 8 * (v // 2)
                want[order[8 * q + column], row] = values[q, t] >> 8 * v & 0xFF
    assert (out.reshape(32, 16) == want).all()
    for target, form in (("sm_90a", ".trans"), ("sm_100a", "")):
        with pytest.raises(UnsupportedInstruction):
            run_snippet(f"stmatrix.sync.aligned.m16n8.x1{form}.shared.b8 [%r3], {{%r20}};", target=target)


@pytest.mark.parametrize(
    ("body", "rule", "words"),
    [
        ("st.global.b32 [%d1+128], %r1;", "out-of-bounds", "belongs to no buffer, p0 ends at"),
        ("st.global.b32 [%d1+2], %r1;", "misaligned", "not a multiple of 4"),
        ("ld.shared.b32 %r2, [%r10+4096];", "out-of-bounds", "the launch has"),
        ("ld.shared.b64 %d2, [%r10+4];", "misaligned", "not a multiple of 8"),
        ("ld.shared.b32 %r2, [%r10];", "uninitialised-read", "nobody wrote"),
        ("mov.b32 %r3, 16777216; ld.shared::cluster.b32 %r2, [%r3];", "out-of-bounds", "CTA 1 of a cluster of 1"),
        ("mov.b32 %r2, 1; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r10], %r2; st.shared.b32 [%r10], 1;",
         "barrier-misuse",
         "live mbarrier"),
    ],
)  # fmt: skip
def test_faults(body: str, rule: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as error:
        run_snippet(POINTER + body, (np.zeros(32, np.uint32),), smem_bytes=4096)
    assert error.value.rule == rule
    assert error.value.where is not None and error.value.where.line > 7


def test_two_warps_race_for_one_word() -> None:
    body = POINTER + "st.shared.b32 [%r10], %r1;"
    with pytest.raises(Fault, match="overwrite of shared memory of CTA 0") as error:
        run_snippet(body, (np.zeros(1, np.uint32),), threads=64)
    assert error.value.rule == "race"


def test_warps_may_share_a_granule() -> None:
    """64 lanes write neighbouring bytes: no race although the shadow's granules are coarser."""
    out = np.zeros(64, np.uint32)
    body = """
    ld.param.b64 %d1, [p0]; mov.b32 %r10, smem; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 1; xor.b32 %r2, %r2, 62;
    add.s32 %r3, %r10, %r2; cvt.u16.u32 %h1, %r1; st.shared.b16 [%r3], %h1; bar.sync 0;
    shl.b32 %r4, %r1, 1; add.s32 %r5, %r10, %r4; ld.shared.b16 %h2, [%r5]; cvt.u32.u16 %r6, %h2;
    mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; st.global.b32 [%d3], %r6;
    """
    run_snippet(body, (out,), threads=64)
    assert sorted(out.tolist()) == list(range(64))
