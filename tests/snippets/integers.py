"""Integer, logic and bit instructions against Python's own arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from tests.snippets.kit import Snippet
from tests.snippets.lanewise import Op, lanewise, pairs

EDGES = (0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF)


def operands(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of 32 values: edges of every width, and random ones."""
    edges = [e & ((1 << bits) - 1) for e in (*EDGES, 1 << (bits - 1), (1 << (bits - 1)) - 1, -1, -2)]
    more = np.random.default_rng(bits).integers(0, 1 << bits, 32 - len(edges), dtype=np.uint64).tolist()
    return pairs(np.array(edges + more, np.uint64).astype(f"u{bits // 8}"))


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def each(fn: Callable[..., int], bits: int, *arrays: np.ndarray) -> np.ndarray:
    values = [fn(*lane) & ((1 << bits) - 1) for lane in zip(*(a.tolist() for a in arrays), strict=True)]
    return np.array(values, np.uint64).astype(f"u{bits // 8}")


def quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def width(bits: int) -> list[Snippet]:
    """Two operands of one width."""
    x, y = operands(bits)
    a, b, d = {16: ("%h1", "%h2", "%h9"), 32: ("%r1", "%r2", "%r9"), 64: ("%d11", "%d12", "%d9")}[bits]

    def s(v: int) -> int:
        return signed(v, bits)

    forms: dict[str, Callable[[int, int], int]] = {
        f"add.s{bits}": lambda p, q: p + q, f"sub.s{bits}": lambda p, q: p - q, f"mul.lo.s{bits}": lambda p, q: p * q,
        f"mul.hi.u{bits}": lambda p, q: p * q >> bits, f"mul.hi.s{bits}": lambda p, q: s(p) * s(q) >> bits,
        f"and.b{bits}": lambda p, q: p & q, f"or.b{bits}": lambda p, q: p | q, f"xor.b{bits}": lambda p, q: p ^ q,
        f"min.u{bits}": min, f"max.u{bits}": max, f"min.s{bits}": lambda p, q: min(s(p), s(q)),
        f"max.s{bits}": lambda p, q: max(s(p), s(q)),
    }  # fmt: skip
    ops = [Op(name, f"{name} {d}, {a}, {b};", d, bits, each(fn, bits, x, y)) for name, fn in forms.items()]
    safe = f"or.b{bits} {b}, {b}, 1;"
    ops.append(Op("not", f"not.b{bits} {d}, {a};", d, bits, ~x))
    ops += [Op(f"{n}.s{bits}", f"{n}.s{bits} {d}, {a};", d, bits, each(f, bits, x)) for n, f in
            (("neg", lambda p: -p), ("abs", lambda p: abs(s(p))))]  # fmt: skip
    y1 = y | y.dtype.type(1)
    divisions = {f"div.u{bits}": lambda p, q: p // q, f"rem.u{bits}": lambda p, q: p % q,
                 f"div.s{bits}": lambda p, q: quotient(s(p), s(q)),
                 f"rem.s{bits}": lambda p, q: s(p) - s(q) * quotient(s(p), s(q))}  # fmt: skip
    for name, fn in divisions.items():
        ops.append(Op(name, f"{safe} {name} {d}, {a}, {b};", d, bits, each(fn, bits, x, y1)))
    return lanewise(f"integers-{bits}", ops, (x, y))


def comparisons(bits: int) -> list[Snippet]:
    x, y = operands(bits)
    a, b = {16: ("%h1", "%h2"), 32: ("%r1", "%r2"), 64: ("%d11", "%d12")}[bits]
    ops = []
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"):
        for kind in "u" if name in ("lo", "ls", "hi", "hs") else "us":
            ops.append(
                Op(
                    f"{name}.{kind}{bits}",
                    f"setp.{name}.{kind}{bits} %p1, {a}, {b}; selp.b32 %r9, 1, 0, %p1;",
                    "%r9",
                    32,
                )
            )
    return lanewise(f"compare-{bits}", ops, (x, y))


def shifts() -> list[Snippet]:
    """Amounts beyond the width shift everything out; the amount is 32 bits wide whatever is shifted."""
    out = []
    for bits, a, d in ((16, "%h1", "%h9"), (32, "%r1", "%r9"), (64, "%d11", "%d9")):
        x = operands(bits)[0]
        amounts = np.tile(
            np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1 << 20, (1 << 31) + 3, -1]) & 0xFFFFFFFF, 64
        )
        amounts = amounts.astype(np.uint32)
        forms: dict[str, Callable[[int, int], int]] = {
            f"shl.b{bits}": lambda p, q, n=bits: p << min(q, n), f"shr.u{bits}": lambda p, q, n=bits: p >> min(q, n),
            f"shr.s{bits}": lambda p, q, n=bits: signed(p, n) >> min(q, n),
        }  # fmt: skip
        ops = [Op(n, f"{n} {d}, {a}, %r2;", d, bits, each(f, bits, x, amounts)) for n, f in forms.items()]
        out += lanewise(f"shifts-{bits}", ops, (x, amounts))
    return out


def wide() -> list[Snippet]:
    """Products of twice the width, and multiply-add."""
    x, y = operands(32)
    z = np.roll(x, 11)

    def s(v: int) -> int:
        return signed(v, 32)

    ops = [
        Op("mul.wide.u32", "mul.wide.u32 %d9, %r1, %r2;", "%d9", 64, each(lambda p, q: p * q, 64, x, y)),
        Op("mul.wide.s32", "mul.wide.s32 %d9, %r1, %r2;", "%d9", 64, each(lambda p, q: s(p) * s(q), 64, x, y)),
        Op("mad.lo", "mad.lo.s32 %r9, %r1, %r2, %r3;", "%r9", 32, each(lambda p, q, r: p * q + r, 32, x, y, z)),
        Op("mad.hi.u", "mad.hi.u32 %r9, %r1, %r2, %r3;", "%r9", 32,
           each(lambda p, q, r: (p * q >> 32) + r, 32, x, y, z)),
        Op("mad.hi.s", "mad.hi.s32 %r9, %r1, %r2, %r3;", "%r9", 32,
           each(lambda p, q, r: (s(p) * s(q) >> 32) + r, 32, x, y, z)),
        Op("mad.wide.s", "cvt.u64.u32 %d8, %r3; mad.wide.s32 %d9, %r1, %r2, %d8;", "%d9", 64,
           each(lambda p, q, r: s(p) * s(q) + r, 64, x, y, z)),
        Op("mad.wide.u", "cvt.u64.u32 %d8, %r3; mad.wide.u32 %d9, %r1, %r2, %d8;", "%d9", 64,
           each(lambda p, q, r: p * q + r, 64, x, y, z)),
    ]  # fmt: skip
    h, g = operands(16)
    short = [
        Op("mul.wide.u16", "mul.wide.u16 %r9, %h1, %h2;", "%r9", 32, each(lambda p, q: p * q, 32, h, g)),
        Op("mul.wide.s16", "mul.wide.s16 %r9, %h1, %h2;", "%r9", 32,
           each(lambda p, q: signed(p, 16) * signed(q, 16), 32, h, g)),
        Op("mad.wide.s16", "cvt.u32.u16 %r8, %h2; mad.wide.s16 %r9, %h1, %h2, %r8;", "%r9", 32,
           each(lambda p, q: signed(p, 16) * signed(q, 16) + q, 32, h, g)),
        Op("mad.lo.s16", "mad.lo.s16 %h9, %h1, %h2, %h1;", "%h9", 16, each(lambda p, q: p * q + p, 16, h, g)),
    ]  # fmt: skip
    return lanewise("products", ops, (x, y, z)) + lanewise("products-16", short, (h, g))


def funnel(x: int, y: int, z: int, left: bool, wrap: bool) -> int:
    amount = z % 32 if wrap else min(z, 32)
    return ((y << 32 | x) << amount) >> 32 if left else (y << 32 | x) >> amount


def field(x: int, at: int, count: int) -> int:
    return x >> (at & 255) & ((1 << (count & 255)) - 1)


def bits() -> list[Snippet]:
    x, y = operands(32)
    z = np.resize(np.array([0, 1, 4, 8, 16, 20, 31, 32, 33, 64, 200, 255, 256], np.uint32), 1024)
    rng = np.random.default_rng(3)
    picks = rng.integers(0, 1 << 32, 1024, dtype=np.uint32)
    ops = [
        Op("popc", "popc.b32 %r9, %r1;", "%r9", 32, each(int.bit_count, 32, x)),
        Op("clz", "clz.b32 %r9, %r1;", "%r9", 32, each(lambda p: 32 - p.bit_length(), 32, x)),
        Op("brev", "brev.b32 %r9, %r1;", "%r9", 32, each(lambda p: int(f"{p:032b}"[::-1], 2), 32, x)),
        Op("bfe.u32", "bfe.u32 %r9, %r1, %r3, %r2;", "%r9", 32, each(lambda p, q, r: field(p, r, q), 32, x, y, z)),
        Op("bfe.s32", "bfe.s32 %r9, %r1, %r3, %r2;", "%r9", 32),
        Op("bfi", "bfi.b32 %r9, %r1, %r4, %r3, %r2;", "%r9", 32),
        Op("prmt", "prmt.b32 %r9, %r1, %r2, %r4;", "%r9", 32),
        *(Op(f"lop3 {table}", f"lop3.b32 %r9, %r1, %r2, %r4, {table};", "%r9", 32,
             each(lambda p, q, r, t=table: sum((t >> ((p >> i & 1) << 2 | (q >> i & 1) << 1 | r >> i & 1) & 1) << i
                                               for i in range(32)), 32, x, y, picks)) for table in (0xE8, 0x1B, 0xFE)),
        *(Op(f"shf.{side}.{mode}", f"shf.{side}.{mode}.b32 %r9, %r1, %r2, %r3;", "%r9", 32,
             each(lambda p, q, r, le=side == "l", w=mode == "wrap": funnel(p, q, r, le, w), 32, x, y, z))
          for side in "lr" for mode in ("wrap", "clamp")),
    ]  # fmt: skip
    w = operands(64)[0]
    wides = [Op("popc.b64", "popc.b64 %r9, %d11;", "%r9", 32, each(int.bit_count, 32, w)),
             Op("clz.b64", "clz.b64 %r9, %d11;", "%r9", 32, each(lambda p: 64 - p.bit_length(), 32, w)),
             Op("brev.b64", "brev.b64 %d9, %d11;", "%d9", 64)]  # fmt: skip
    return lanewise("bits", ops, (x, y, z, picks)) + lanewise("bits-64", wides, (w,))


def conversions() -> list[Snippet]:
    """Every integer type to every other: truncation and extension by the source's sign."""
    x = np.concatenate([operands(64)[0][::32], np.random.default_rng(5).integers(0, 1 << 64, 96, dtype=np.uint64)])
    kinds = [f"{sign}{size}" for size in (8, 16, 32, 64) for sign in "us"]
    ops = []
    for of in kinds:
        for to in kinds:
            n, m = int(of[1:]), int(to[1:])
            source = {8: "%h8", 16: "%h8", 32: "%r8", 64: "%d11"}[n]
            dest, size = {8: ("%h9", 16), 16: ("%h9", 16), 32: ("%r9", 32), 64: ("%d9", 64)}[m]

            def convert(v: int, of: str = of, to: str = to, n: int = n, m: int = m) -> int:
                value = v & ((1 << n) - 1)
                value = (signed(value, n) if of[0] == "s" else value) & ((1 << m) - 1)
                return signed(value, m) if to[0] == "s" else value

            narrow = {64: "", 32: "cvt.u32.u64 %r8, %d11;"}.get(n, "cvt.u16.u64 %h8, %d11;")
            ops.append(
                Op(f"{of}->{to}", f"{narrow} cvt.{to}.{of} {dest}, {source};", dest, size, each(convert, size, x))
            )
    return lanewise("conversions", ops, (x,)) + lanewise("saturations", saturations(x), (x,))


def saturations(x: np.ndarray) -> list[Op]:
    """32 bits to fewer: the nearest number of the type, in a register of 16 or 32 bits."""
    ops = []
    for of, to in itertools.product(("s32", "u32"), ("s8", "u8", "s16", "u16")):
        m = int(to[1:])
        low, high = (-(1 << (m - 1)), (1 << (m - 1)) - 1) if to[0] == "s" else (0, (1 << m) - 1)

        def convert(v: int, of: str = of, low: int = low, high: int = high) -> int:
            value = signed(v & 0xFFFFFFFF, 32) if of[0] == "s" else v & 0xFFFFFFFF
            return min(max(value, low), high)

        for dest, size in (("%h9", 16), ("%r9", 32)) if m == 8 else (("%h9", 16),):
            line = f"cvt.u32.u64 %r8, %d11; cvt.sat.{to}.{of} {dest}, %r8;"
            ops.append(Op(f"{of}->{to} {size}", line, dest, size, each(convert, size, x)))
    return ops


def moves() -> list[Snippet]:
    x, y = operands(32)
    ops = [
        Op("pack b64", "mov.b64 %d9, {%r1, %r2};", "%d9", 64, each(lambda p, q: q << 32 | p, 64, x, y)),
        Op("unpack", "mov.b64 %d9, {%r1, %r2}; mov.b64 {%r8, %r9}, %d9; sub.s32 %r9, %r9, %r8;", "%r9", 32, y - x),
        Op("halves", "mov.b32 {%h1, %h2}, %r1; mov.b32 %r9, {%h2, %h1};", "%r9", 32,
           each(lambda p: (p << 16 | p >> 16), 32, x)),
        Op("quarters", "mov.b64 %d9, {%r1, %r2}; mov.b64 {%h1, %h2, %h3, %h4}, %d9; mov.b64 %d9, {%h4, %h3, %h2, %h1};",
           "%d9", 64),
        Op("selp", "setp.gt.s32 %p1, %r1, %r2; not.pred %p2, %p1; selp.b32 %r9, %r1, 5, %p2;", "%r9", 32,
           np.where(x.view(np.int32) > y.view(np.int32), np.uint32(5), x)),
        Op("predicates", "setp.lt.u32 %p1, %r1, %r2; setp.lt.xor.s32 %p2|%p3, %r1, %r2, %p1; or.pred %p4, %p1, %p3;"
           " and.pred %p5, %p4, %p2; xor.pred %p6, %p5, %p1; selp.b32 %r9, 1, 0, %p6; @!%p2 add.s32 %r9, %r9, 8;"
           " @%p3 xor.b32 %r9, %r9, 16;", "%r9", 32),
    ]  # fmt: skip
    return lanewise("moves", ops, (x, y))


def snippets() -> list[Snippet]:
    out = [s for n in (16, 32, 64) for s in (*width(n), *comparisons(n))]
    return [*out, *shifts(), *wide(), *bits(), *conversions(), *moves()]
