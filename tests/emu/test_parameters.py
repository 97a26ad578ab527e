"""Parameters whose address is in a register: which one a lane reads is known when it does."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault
from tests.emu.snippet import lanes_of

ADDRESSES = "mov.b64 %d10, p1; mov.b64 %d11, p2; mov.u32 %r1, %tid.x;"
# 1 or 2: the input whose address was read; 0: neither.
WHICH = "setp.eq.u64 %p2, %d13, %d1; selp.b32 %r4, 1, 0, %p2; setp.eq.u64 %p3, %d13, %d2; selp.b32 %r2, 2, %r4, %p3;"


def inputs() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)


@pytest.mark.parametrize(
    ("chosen", "is_second"),
    [
        ("and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 1;", np.arange(32) % 2 == 1),
        ("mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r3, 0;", np.full(32, True)),
        ("mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0;", np.full(32, False)),
    ],
    ids=["by lane", "second", "first"],
)
def test_which_one(chosen: str, is_second: np.ndarray) -> None:
    body = f"{ADDRESSES} {chosen} selp.b64 %d12, %d11, %d10, %p1; ld.param.b64 %d13, [%d12]; {WHICH}"
    np.testing.assert_array_equal(lanes_of(body, "%r2", inputs=inputs()), 1 + is_second)


def test_an_offset_and_a_part() -> None:
    """The upper word of a 64-bit parameter, and both of its words as a vector."""
    words = "ld.param.b64 %d14, [p1]; shr.u64 %d15, %d14, 32; cvt.u32.u64 %r10, %d15; ld.param.b32 %r11, [%d10+4];"
    vector = "ld.param.v2.b32 {%r12, %r13}, [%d10]; sub.s32 %r14, %r10, %r11; sub.s32 %r15, %r10, %r13;"
    body = f"{ADDRESSES} {words} {vector} or.b32 %r2, %r14, %r15;"
    assert lanes_of(body, "%r2", inputs=inputs()).tolist() == [0] * 32


@pytest.mark.parametrize("moved", ["add.s64 %d12, %d11, 8;", "add.s64 %d12, %d10, -16;", "add.s64 %d12, %d10, 4;"])
def test_what_is_no_parameter(moved: str) -> None:
    """Behind the last one, before the first, and across two."""
    with pytest.raises(Fault, match=r"`ld.param` of 8 bytes at -?\d+ is no parameter's") as fault:
        lanes_of(f"{ADDRESSES} {moved} ld.param.b64 %d13, [%d12]; {WHICH}", "%r2", inputs=inputs())
    assert fault.value.rule == "out-of-bounds"
