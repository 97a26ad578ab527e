"""Access to global memory: not before griddepcontrol.wait, with known L2 policies, by small and guarded stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_bwgemm.emulator import Counters, Fault, TensorMap
from tests.emu.snippet import run_snippet

BEGIN = """
mov.u32 %r1, %tid.x; mov.b32 %r10, smem; ld.param.b64 %d1, [p0]; mov.b64 %d2, p1; cvta.param.u64 %d3, %d2;
elect.sync %r12|%p9, -1; mov.b32 %r11, 1; mov.b32 %r13, 128; mul.wide.u32 %d4, %r1, 4; add.s64 %d5, %d1, %d4;
setp.lt.u32 %p1, %r1, 32; and.pred %p2, %p1, %p9; @%p2 mbarrier.init.shared.b64 [%r10], %r11;
fence.mbarrier_init.release.cluster;
"""
WAIT = "griddepcontrol.wait;"
TMA = """
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], %r13;
@%p2 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} [%r10+1024], [%d3, {{0}}],
 [%r10]{policy};
W: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0; @%p3 bra OK; bra W; OK:
"""
LOAD = TMA.format(hint="", policy="")
STORE = """
shl.b32 %r20, %r1, 2; add.s32 %r21, %r10, %r20; st.shared.b32 [%r21+1024], %r1; fence.proxy.async.shared::cta;
bar.sync 0; @!%p1 bra END; cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d3, {0}], [%r10+1024];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; END:
"""


def go(body: str, threads: int = 32, **options: Any) -> tuple[np.ndarray, Counters]:
    words = np.arange(64, dtype=np.uint32)

    def maps(addresses: tuple[int, ...]) -> list[TensorMap]:
        return [TensorMap(addresses[0], (64,), (), (32,), "u32", 0, "s")]

    counters = run_snippet(BEGIN + body, (words,), maps, threads=threads, **options)
    return words, counters


@pytest.mark.parametrize("access", [LOAD, STORE, "ld.global.b32 %r2, [%d5];", "st.global.b32 [%d5], %r1;"])
def test_every_access_comes_after_the_wait(access: str) -> None:
    go(WAIT + access)
    go(access)  # a kernel without any wait may be launched without the attribute
    for body, options in ((access + WAIT, {}), (access, {"demand_grid_wait": True})):
        with pytest.raises(Fault, match="global memory is accessed before griddepcontrol.wait") as error:
            go(body, **options)
        assert error.value.rule == "before-grid-wait"


def test_another_warp_may_have_waited() -> None:
    """Warp 1 waits, warp 0 loads: a barrier in between is enough, and takes part."""
    waits = "@%p1 bra OTHER; griddepcontrol.wait; OTHER: {} griddepcontrol.launch_dependents; @!%p1 bra END0;"
    go(waits.format("bar.sync 0;") + "ld.global.b32 %r2, [%d5]; END0:", threads=64)
    with pytest.raises(Fault) as error:
        go(waits.format("") + "ld.global.b32 %r2, [%d5]; END0:", threads=64)
    assert error.value.rule == "before-grid-wait"


@pytest.mark.parametrize("policy", [0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000])
def test_policies(policy: int) -> None:
    hinted = f"mov.b64 %d20, {policy};" + TMA.format(hint=".L2::cache_hint", policy=", %d20")
    go(hinted)
    go(hinted.replace(f"mov.b64 %d20, {policy};", "mov.b64 %d20, 0;"))  # what CuTeDSL says where there is none
    go(f"mov.b64 %d20, {policy}; st.global.L2::cache_hint.b32 [%d5], %r1, %d20;")


@pytest.mark.parametrize("value", ["1", "0x1000000000000001", "sum"])
def test_unknown_policies(value: str) -> None:
    """Among them a zero that the kernel got from outside: a parameter that nobody filled in."""
    given = "sub.s64 %d20, %d1, %d1;" if value == "sum" else f"mov.b64 %d20, {value};"
    stored = "st.global.L2::cache_hint.b32 [%d5], %r1, %d20;"
    for body in (TMA.format(hint=".L2::cache_hint", policy=", %d20"), stored):
        with pytest.raises(Fault, match="an L2 cache policy requires one of 0x1000000000000000") as error:
            go(given + body)
        assert error.value.rule == "cache-policy"


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_small_guarded_stores(bits: int) -> None:
    """Lanes 3 to 20 store their number times 0x01010101, cut to size, through 16- and 32-bit registers."""
    size = bits // 8
    body = f"""
    mul.lo.s32 %r2, %r1, 16843009; cvt.u16.u32 %h1, %r2; mul.wide.u32 %d6, %r1, {size}; add.s64 %d7, %d1, %d6;
    setp.gt.u32 %p4, %r1, 2; setp.lt.u32 %p5, %r1, 21; and.pred %p6, %p4, %p5;
    @%p6 st.global.b{bits} [%d7], {"%r2" if bits == 32 else "%h1"};
    """
    got, _ = go(body)
    want = np.arange(64, dtype=np.uint32)
    cut = (np.arange(3, 21, dtype=np.uint32) * np.uint32(0x01010101)).astype(f"u{size}")
    want.view(f"u{size}")[3:21] = cut
    assert (got == want).all()


def test_small_loads_from_shared_memory() -> None:
    body = """
    shl.b32 %r2, %r1, 2; add.s32 %r3, %r10, %r2; add.s32 %r4, %r1, 305419776; st.shared.b32 [%r3+1024], %r4;
    bar.warp.sync -1; xor.b32 %r5, %r2, 4; add.s32 %r5, %r5, %r10; ld.shared.b16 %h1, [%r5+1024];
    ld.shared.b8 %h2, [%r5+1027]; cvt.u32.u16 %r6, %h1; cvt.u32.u16 %r7, %h2; shl.b32 %r7, %r7, 16;
    or.b32 %r6, %r6, %r7; st.global.b32 [%d5], %r6;
    """
    got, _ = go(body)
    words = 305419776 + (np.arange(32) ^ 1)
    assert (got[:32] == (words & 0xFFFF | words >> 24 << 16)).all()
