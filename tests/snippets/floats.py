"""Float arithmetic, comparisons and conversions: rounding, ties, subnormals, infinities, signed zeros and NaN."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np

from tests.snippets.kit import Snippet, Tolerance
from tests.snippets.lanewise import Op, lanewise, pairs
from tests.snippets.rounding import BF16, F16, F32, Format, exactly

SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
     0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FC12345, 0x7F800001, 0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x3F800001,
     0x3F7FFFFF, 0x4B800000, 0x4B800001, 0x33800000, 0x3DCCCCCD, 0xBE99999A, 0x7F000000, 0x0DA24260, 0x40490FDB,
     0xC02DF854, 0x477FE000, 0x477FF000],
    np.uint32,
)  # fmt: skip


def some(count: int, seed: int, spread: int = 20) -> np.ndarray:
    """Random floats over many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-spread, spread, count)).astype(np.float32)


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def arithmetic() -> list[Snippet]:
    x, y = (floats(v) for v in pairs(SPECIAL))
    rounded = {"add.f32": lambda a, b: a + b, "sub.f32": lambda a, b: a - b, "mul.f32": lambda a, b: a * b}
    ops = [Op(name, f"{name} %r9, %r1, %r2;", "%r9", 32, exactly(fn, F32, x, y)) for name, fn in rounded.items()]
    ops.append(Op("div.rn.f32", "div.rn.f32 %r9, %r1, %r2;", "%r9", 32, quotients(x, y)))
    for name in ("min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32"):
        best = extremes(x, y, name.startswith("max"), "NaN" in name)
        ops.append(Op(name, f"{name} %r9, %r1, %r2;", "%r9", 32, best))
    ops += [Op(n, f"{n} %r9, %r1, %r2;", "%r9", 32) for n in ("add.ftz.f32", "mul.ftz.f32", "max.ftz.f32")]
    ops += [Op(n, f"{n} %r9, %r1, %r2;", "%r9", 32) for n in ("copysign.f32", "add.sat.f32")]
    ops += [Op(n, f"{n} %r9, %r1;", "%r9", 32) for n in ("neg.f32", "abs.f32", "sqrt.rn.f32", "rcp.rn.f32")]
    return lanewise("float-special", ops, (x, y))


def quotients(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """0 / 0 and the like by float64, the rest exactly."""
    with np.errstate(all="ignore"):
        return exactly(lambda a, b: np.divide(a, b) if isinstance(a, np.float64) else a / b, F32, x, y)


def extremes(x: np.ndarray, y: np.ndarray, largest: bool, keeps_nan: bool) -> np.ndarray:
    """One NaN loses against a number, but with .NaN wins, two give the one NaN, and -0 < +0 (PTX ISA, min and max)."""

    def key(v: np.floating) -> tuple[float, bool]:
        return float(v), not np.signbit(v)

    out = []
    for a, b in zip(x, y, strict=True):
        numbers = [v for v in (a, b) if not np.isnan(v)]
        is_number = len(numbers) == 2 if keeps_nan else bool(numbers)
        best = (max if largest else min)(numbers, key=key) if is_number else None
        out.append(0x7FFFFFFF if best is None else int(best.view(np.uint32)))
    return np.array(out, np.uint32)


def fused() -> list[Snippet]:
    """fma rounds once: random operands, and sums a hair away from a tie, which an intermediate rounding would hide."""
    x, y, z = (some(512, seed) for seed in (1, 2, 3))
    steps = np.arange(512)
    tiny = 2.0 ** -(12 + steps % 12)
    x = np.concatenate([x, (1 + tiny) * 2.0**-24]).astype(np.float32)
    y = np.concatenate([y, 1 - tiny]).astype(np.float32)
    z = np.concatenate([z, 1 + steps * 2.0**-23]).astype(np.float32)
    fma = Op(
        "fma.rn.f32", "fma.rn.f32 %r9, %r1, %r2, %r3;", "%r9", 32, exactly(lambda a, b, c: a * b + c, F32, x, y, z)
    )
    special = floats(SPECIAL)
    u, v, w = special.repeat(32), np.tile(special, 32), np.roll(np.tile(special, 32), 7)
    again = Op(
        "fma.rn.f32", "fma.rn.f32 %r9, %r1, %r2, %r3;", "%r9", 32, exactly(lambda a, b, c: a * b + c, F32, u, v, w)
    )
    return lanewise("fma", [fma], (x, y, z)) + lanewise("fma-special", [again], (u, v, w))


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def comparisons() -> list[Snippet]:
    x, y = (floats(v) for v in pairs(SPECIAL))
    ops = []
    for name in COMPARISONS:
        ops.append(Op(name, f"setp.{name}.f32 %p1, %r1, %r2; selp.f32 %r9, %r1, %r2, %p1;", "%r9", 32))
    ops.append(Op("and", "setp.eq.f32 %p2, %r1, %r1; setp.lt.and.f32 %p1|%p3, %r1, %r2, %p2;"
                  " selp.b32 %r9, 1, 0, %p1; selp.b32 %r8, 2, 0, %p3; or.b32 %r9, %r9, %r8;", "%r9", 32))  # fmt: skip
    return lanewise("float-compare", ops, (x, y))


def narrowing_inputs() -> np.ndarray:
    """Specials, ties and near-ties of bf16 and f16 in both parities, their overflow edges and subnormals."""
    grid = np.arange(64, dtype=np.uint32) << 13
    near = np.concatenate([0x3F800000 + grid, 0x3F80FFFF + grid, 0x38000000 + grid * 3, 0x33000000 + (grid << 2)])
    edges = np.array([0x7F7F7FFF, 0x7F7F8000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x43E80000, 0x43E7FFFF,
                      0x00008000, 0x00007FFF, 0x00018000, 0x80008000], np.uint32)  # fmt: skip
    wide = np.concatenate([SPECIAL, near, near + 1, near - 1, edges, some(204, 5, 60).view(np.uint32)]).astype(
        np.uint32
    )
    return np.resize(np.concatenate([wide, wide ^ 0x80000000]), 1024).view(np.float32)


def narrow(x: np.ndarray, to: Format, relu: bool = False, clamp: bool = False) -> np.ndarray:
    if not clamp:
        return exactly(
            lambda v: max(v, type(v)(0)) if relu and v == v else v, to, np.where(x == 0, abs(x), x) if relu else x
        )
    finite = np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    return np.array(
        [to.nan if v != v else to.encode(Fraction(float(v)), bool(np.signbit(v)), True) for v in finite], "u2"
    )


def narrowing() -> list[Snippet]:
    x = narrowing_inputs()
    y = np.roll(x, 37)
    ops = []
    for kind, to in (("bf16", BF16), ("f16", F16)):
        high, low = narrow(x, to).astype(np.uint32), narrow(y, to).astype(np.uint32)
        ops.append(Op(f"{kind}x2", f"cvt.rn.{kind}x2.f32 %r9, %r1, %r2;", "%r9", 32, high << 16 | low))
        ops.append(Op(kind, f"cvt.rn.{kind}.f32 %h9, %r1;", "%h9", 16, narrow(x, to)))
        high, low = narrow(x, to, True).astype(np.uint32), narrow(y, to, True).astype(np.uint32)
        ops.append(Op(f"relu.{kind}x2", f"cvt.rn.relu.{kind}x2.f32 %r9, %r1, %r2;", "%r9", 32, high << 16 | low))
    for kind in ("e4m3", "e5m2"):
        both = octets(x, kind).astype(np.uint16) << 8 | octets(y, kind)
        ops.append(Op(kind, f"cvt.rn.satfinite.{kind}x2.f32 %h9, %r1, %r2;", "%h9", 16, both))
    return lanewise("narrowing", ops, (x, y))


def halves() -> list[Snippet]:
    """Pairs of f16 to pairs of bytes: all 65536 patterns would need 32 blocks."""
    bits = np.unique(np.concatenate([np.arange(0, 1 << 16, 71), SPECIAL & 0xFFFF, SPECIAL >> 16]))[:1022]
    low, high = (np.resize(bits, 1024).astype(np.uint16), np.resize(bits[::-1], 1024).astype(np.uint16))
    ops = []
    for kind in ("e4m3", "e5m2"):
        parts = [octets(h.view(np.float16).astype(np.float32), kind).astype(np.uint16) for h in (low, high)]
        name = f"cvt.rn.satfinite.{kind}x2.f16x2"
        ops.append(Op(name, f"{name} %h9, %r1;", "%h9", 16, parts[1] << 8 | parts[0]))
    return lanewise("halves-to-bytes", ops, (high.astype(np.uint32) << 16 | low,))


def octets(x: np.ndarray, kind: str) -> np.ndarray:
    """To the nearest of the finite numbers, which follow one another as their codes do; ties to the even code; too
    large ones to the largest; NaN to 0x7F."""
    bias, digits, count = {"e4m3": (7, 3, 0x7F), "e5m2": (15, 2, 0x7C)}[kind]
    fraction = 1 << digits
    exponents = [max(code >> digits, 1) - bias - digits for code in range(count)]
    units = [code % fraction + (fraction if code >> digits else 0) for code in range(count)]
    numbers = [Fraction(u) * Fraction(2) ** e for u, e in zip(units, exponents, strict=True)]
    out = []
    for v in x:
        if np.isnan(v):
            out.append(0x7F)
            continue
        size = min(Fraction(abs(float(v))) if np.isfinite(v) else numbers[-1], numbers[-1])
        above = bisect.bisect_left(numbers, size)
        code = min((max(above - 1, 0), above), key=lambda c: (abs(numbers[c] - size), c % 2))
        out.append(code | bool(np.signbit(v)) << 7)
    return np.array(out, np.uint8)


def to_tf32() -> list[Snippet]:
    """11 significant digits; numbers only."""
    x = narrowing_inputs()
    x = np.where(np.isnan(x), np.float32(1), x)
    ops = []
    for mode in ("rn", "rna"):
        words = np.array([tf32(v, mode == "rna") for v in x], np.uint32)
        ops.append(Op(f"cvt.{mode}.tf32.f32", f"cvt.{mode}.tf32.f32 %r9, %r1;", "%r9", 32, words))
    return lanewise("to-tf32", ops, (x,))


def tf32(v: np.floating, away: bool) -> int:
    """To nearest; ties to even, or away from zero."""
    if np.isinf(v):
        return int(v.view(np.uint32))
    _, exponent = math.frexp(abs(float(v)))
    unit = Fraction(2) ** (max(exponent, -125) - 11)
    units = Fraction(abs(float(v))) / unit
    rounded = float((math.floor(units + Fraction(1, 2)) if away else round(units)) * unit)
    with np.errstate(over="ignore"):
        return int(np.copysign(np.float32(rounded), v).view(np.uint32))


def widening() -> list[Snippet]:
    """All 65536 would need 64 blocks: every 64th pattern, and all around the edges of subnormals and infinity."""
    edges = [base + i for base in (0, 0x3FF, 0x7C00, 0x7F80, 0x7E00, 0x7FC0) for i in range(-8, 12)]
    bits = np.unique(np.array(edges + [e + 0x8000 for e in edges] + list(range(0, 1 << 16, 97))) & 0xFFFF)[:1024]
    h = np.resize(bits.astype(np.uint16), 1024)
    small = (
        Op("e4m3x2", "cvt.rn.f16x2.e4m3x2 %r9, %h1;", "%r9", 32),
        Op("e5m2x2", "cvt.rn.f16x2.e5m2x2 %r9, %h1;", "%r9", 32),
    )
    ops = [Op("f16", "cvt.f32.f16 %r9, %h1;", "%r9", 32), Op("bf16", "cvt.f32.bf16 %r9, %h1;", "%r9", 32,
           h.astype(np.uint32) << 16)]  # fmt: skip
    return lanewise("widening", [*ops, *small], (h,))


def to_and_from_integers() -> list[Snippet]:
    x = np.resize(np.concatenate([floats(SPECIAL), np.arange(-8, 8, 0.25, np.float32), some(160, 7, 40)]), 256)
    modes = [f"cvt.{mode}.{to}.f32" for mode in ("rni", "rzi", "rmi", "rpi") for to in ("s32", "u32")]
    ops = [Op(m, f"{m} %r9, %r1;", "%r9", 32) for m in modes]
    ops += [Op(m, f"{m} %d9, %r1;", "%d9", 64) for m in ("cvt.rzi.s64.f32", "cvt.rni.u64.f32")]
    ops += [Op(m, f"{m} %r9, %r1;", "%r9", 32) for m in ("cvt.rni.f32.f32", "cvt.rzi.f32.f32", "cvt.rmi.f32.f32")]
    rng = np.random.default_rng(8)
    wide = np.concatenate([rng.integers(0, 1 << 64, 96, np.uint64) >> rng.integers(0, 64, 96, np.uint64),
                           np.uint64(1 << 63) >> np.arange(32, dtype=np.uint64) ], dtype=np.uint64)  # fmt: skip
    words = wide.astype(np.uint32)
    back = [Op(f"{t}->f32", f"cvt.rn.f32.{t} %r9, %r1;", "%r9", 32) for t in ("s32", "u32")]
    back += [Op(f"{t}->f32", f"cvt.rn.f32.{t} %r9, %d12;", "%r9", 32) for t in ("s64", "u64")]
    return lanewise("float-to-int", ops, (x,)) + lanewise("int-to-float", back, (words, wide))


def packed() -> list[Snippet]:
    """f16, bf16 and their pairs: add, mul, min, max and fma, in one rounding."""
    rng = np.random.default_rng(9)
    special = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7F7F,
                        0x7F80, 0xFF80, 0x7FC0, 0xFFFF], np.uint16)  # fmt: skip
    words = [
        np.concatenate([rng.choice(special, 512), rng.integers(0, 1 << 16, 512).astype(np.uint16)]) for _ in range(6)
    ]
    operands = tuple(words[2 * i].astype(np.uint32) << 16 | words[2 * i + 1] for i in range(3))
    out = []
    for kind in ("f16", "bf16"):
        names = [f"{op}.{kind}x2" for op in ("add", "mul", "min", "max")]
        ops = [Op(n, f"{n} %r9, %r1, %r2;", "%r9", 32) for n in names]
        ops += [Op(n, f"{n} %r9, %r1, %r2, %r3;", "%r9", 32) for n in (f"fma.rn.{kind}x2", f"fma.rn.relu.{kind}x2")]
        out += lanewise(f"packed-{kind}", ops, operands)
    return out


def _approximate(name: str, relative: float, absolute: float = 0.0) -> Op:
    operands = "%r1, %r2" if name.startswith("div") else "%r1"
    return Op(name, f"{name} %r9, {operands};", "%r9", 32, None, Tolerance("f32", relative, absolute))


def approximations() -> list[Snippet]:
    """The bounds are those of the PTX ISA's tables, plus the emulator's own half unit."""
    half = 2.0**-24
    near = np.concatenate([floats(SPECIAL), some(480, 11, 6)])
    ops = [
        _approximate("ex2.approx.f32", 2.0**-22 + half), _approximate("ex2.approx.ftz.f32", 2.0**-22 + half),
        _approximate("rcp.approx.f32", 2.0**-23 + half), _approximate("rcp.approx.ftz.f32", 2.0**-23 + half),
        _approximate("rsqrt.approx.f32", 2.0**-22.9 + half), _approximate("sqrt.approx.f32", 2.0**-22 + half),
        _approximate("tanh.approx.f32", 2.0**-10.9), _approximate("lg2.approx.f32", 2.0**-22, 2.0**-22),
    ]  # fmt: skip
    ranged = np.random.default_rng(12).uniform(-np.pi, np.pi, 512).astype(np.float32)
    trig = [_approximate(f"{f}.approx.f32", 0.0, 2.0**-20.5) for f in ("sin", "cos")]
    x, y = some(512, 13), some(512, 14)
    div = [_approximate("div.full.f32", 2.0**-22), _approximate("div.approx.f32", 2.0**-22)]
    return (
        lanewise("approximations", ops, (near,))
        + lanewise("trigonometry", trig, (ranged,))
        + lanewise("division", div, (x, y))
    )


def snippets() -> list[Snippet]:
    groups = (arithmetic, fused, comparisons, narrowing, halves, to_tf32, widening, to_and_from_integers, packed)
    return [snippet for group in (*groups, approximations) for snippet in group()]
