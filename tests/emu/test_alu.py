"""Integer, logic and conversion instructions against Python's own arithmetic, uniform and lane by lane."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emu.snippet import lanes_of, load_lane

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def trunc_div(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


BINARY = {
    "add.s32": lambda x, y: x + y,
    "sub.s32": lambda x, y: x - y,
    "mul.lo.s32": lambda x, y: x * y,
    "mul.hi.u32": lambda x, y: x * y >> 32,
    "mul.hi.s32": lambda x, y: signed(x) * signed(y) >> 32,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, y: x << (y & 63) if (y & 63) < 32 else 0,
    "shr.u32": lambda x, y: x >> (y & 63),
    "shr.s32": lambda x, y: signed(x) >> (y & 63),
    "min.u32": min,
    "max.s32": lambda x, y: max(signed(x), signed(y)),
    "min.s32": lambda x, y: min(signed(x), signed(y)),
    "min.relu.s32": lambda x, y: max(min(signed(x), signed(y)), 0),
    "max.relu.s32": lambda x, y: max(signed(x), signed(y), 0),
    "div.u32": lambda x, y: x // (y | 1),
    "rem.u32": lambda x, y: x % (y | 1),
    "div.s32": lambda x, y: trunc_div(signed(x), signed(y | 1)),
}
WORDS = st.lists(
    st.one_of(st.integers(0, M32), st.sampled_from([0, 1, 31, 32, M32, 1 << 31])), min_size=32, max_size=32
)


@pytest.mark.parametrize("opcode", BINARY)
@settings(max_examples=4, deadline=None)
@given(xs=WORDS, ys=WORDS)
def test_binary(opcode: str, xs: list[int], ys: list[int]) -> None:
    """Vectors of both operands, and the scalar form with lane 0's values as immediates."""
    if opcode.startswith("sh"):
        ys = [y & 63 for y in ys]
    if opcode.startswith(("div", "rem")):
        ys = [y | 1 for y in ys]
    a, b = np.array(xs, np.uint32), np.array(ys, np.uint32)
    body = load_lane("%r1", 1, 32) + load_lane("%r2", 2, 32) + f"{opcode} %r3, %r1, %r2;"
    expected = [BINARY[opcode](x, y) & M32 for x, y in zip(xs, ys, strict=True)]
    assert lanes_of(body, "%r3", 32, (a, b)).tolist() == expected
    scalar = f"mov.b32 %r1, {signed(xs[0])}; {opcode} %r3, %r1, {signed(ys[0])};"
    assert lanes_of(scalar, "%r3")[0] == expected[0]


COMPARE = {"eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "ge": lambda x, y: x >= y}


@pytest.mark.parametrize("comparison", COMPARE)
@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_setp_and_selp(comparison: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 32, (2, 32), dtype=np.uint32)
    b[:8] = a[:8]
    body = load_lane("%r1", 1, 32) + load_lane("%r2", 2, 32)
    body += f"setp.{comparison}.{kind} %p1, %r1, %r2; selp.b32 %r3, 7, %r1, %p1;"
    read = signed if kind == "s32" else int
    expected = [7 if COMPARE[comparison](read(int(x)), read(int(y))) else x for x, y in zip(a, b, strict=True)]
    assert lanes_of(body, "%r3", 32, (a, b)).tolist() == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mul.wide.s32 %d5, %r1, -3;", lambda x: signed(x) * -3 & M64),
        ("mul.wide.u32 %d5, %r1, 5;", lambda x: x * 5),
        ("cvt.s64.s32 %d5, %r1;", lambda x: signed(x) & M64),
        ("cvt.u64.u32 %d5, %r1;", lambda x: x),
        ("mad.lo.s32 %r2, %r1, 3, 11; cvt.u64.u32 %d5, %r2;", lambda x: x * 3 + 11 & M32),
        ("mov.b64 %d5, {%r1, 9};", lambda x: 9 << 32 | x),
        ("mov.b64 %d6, {5, %r1}; mov.b64 {_, %r2}, %d6; cvt.u64.u32 %d5, %r2;", lambda x: x),
        ("cvt.u64.u32 %d6, %r1; shl.b64 %d5, %d6, 7;", lambda x: x << 7),
        ("popc.b32 %r2, %r1; cvt.u64.u32 %d5, %r2;", lambda x: x.bit_count()),
        ("clz.b32 %r2, %r1; cvt.u64.u32 %d5, %r2;", lambda x: 32 - x.bit_length()),
        ("bfe.u32 %r2, %r1, 5, 9; cvt.u64.u32 %d5, %r2;", lambda x: x >> 5 & 511),
        ("prmt.b32 %r2, %r1, 0, 291; cvt.u64.u32 %d5, %r2;", lambda x: int.from_bytes(x.to_bytes(4, "big"), "little")),
        ("lop3.b32 %r2, %r1, 255, 15, 150; cvt.u64.u32 %d5, %r2;", lambda x: x ^ 255 ^ 15),
        ("shf.l.wrap.b32 %r2, %r1, %r1, 8; cvt.u64.u32 %d5, %r2;", lambda x: (x << 8 | x >> 24) & M32),
        ("abs.s32 %r2, %r1; cvt.u64.u32 %d5, %r2;", lambda x: abs(signed(x)) & M32),
        ("neg.s32 %r2, %r1; cvt.u64.u32 %d5, %r2;", lambda x: -x & M32),
        ("cvt.u16.u32 %h1, %r1; cvt.u32.u16 %r2, %h1; cvt.u64.u32 %d5, %r2;", lambda x: x & 0xFFFF),
    ],
)  # fmt: skip
def test_wide_and_rare(body: str, expected: Callable[[int], int]) -> None:
    xs = np.random.default_rng(1).integers(0, 1 << 32, 32, dtype=np.uint32)
    got = lanes_of(load_lane("%r1", 1, 32) + body, "%d5", 64, (xs,))
    assert got.tolist() == [expected(int(x)) for x in xs]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_packing_puts_the_first_operand_into_the_high_half(kind: str) -> None:
    rng = np.random.default_rng(2)
    high, low = (
        (rng.standard_normal(32) * 10.0 ** rng.integers(-4, 5, 32)).astype(np.float32),
        np.float32(rng.random(32)),
    )
    body = load_lane("%r1", 1, 32) + load_lane("%r2", 2, 32) + f"cvt.rn.{kind}x2.f32 %r3, %r1, %r2;"
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    with np.errstate(over="ignore"):
        expected = high.astype(dtype).view(np.uint16).astype(np.uint32) << 16 | low.astype(dtype).view(np.uint16)
    assert lanes_of(body, "%r3", 32, (high, low)).tolist() == expected.tolist()


FLOAT_OPS = {
    "add.f32": np.add, "sub.f32": np.subtract, "mul.f32": np.multiply, "div.rn.f32": np.divide, "max.f32": np.fmax,
    "min.f32": np.fmin,
}  # fmt: skip


@pytest.mark.parametrize("opcode", FLOAT_OPS)
def test_float_arithmetic_is_rounded_once(opcode: str) -> None:
    a, b = np.random.default_rng(3).standard_normal((2, 32)).astype(np.float32)
    body = load_lane("%r1", 1, 32) + load_lane("%r2", 2, 32) + f"{opcode} %r3, %r1, %r2;"
    assert lanes_of(body, "%r3", 32, (a, b)).tolist() == FLOAT_OPS[opcode](a, b).view(np.uint32).tolist()


def test_packed_and_mixed_floats() -> None:
    a, b = np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32)
    body = load_lane("%d5", 1, 64) + load_lane("%d6", 2, 64) + "mul.f32x2 %d7, %d5, %d6;"
    assert lanes_of(body, "%d7", 64, (a, b)).tolist() == (a * b).view(np.uint64).tolist()
    h, c = a[:32].astype(np.float16), b[:32]
    body = load_lane("%h1", 1, 16) + load_lane("%r2", 2, 32) + "add.rn.f32.f16 %r3, %h1, %r2;"
    expected = (h.astype(np.float64) + c).astype(np.float32)
    assert lanes_of(body, "%r3", 32, (h, c)).tolist() == expected.view(np.uint32).tolist()
