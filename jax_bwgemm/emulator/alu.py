"""Integer and logic instructions.

The frequent ones are expressions over x, y, z with M = all ones and S = the sign bit of the type; one expression serves
ints and vectors alike. The rare ones are functions of Python ints. All were checked bit for bit on an H200 (driver 580,
2026-11), as scalars and as vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Pure, handles
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.values import UINT, Value, lifted, signed, vec


@functools.cache
def factory(expression: str, num_sources: int) -> Callable[..., Callable[[list[Any]], None]]:
    """A maker of closures `r[d] = expression`, compiled once an expression."""
    names = "xyz"[:num_sources]
    loads = "; ".join(f"{n} = r[i{n}]" for n in names)
    slots = ", ".join(f"i{n}" for n in names)
    source = f"def make(d, {slots}, M, S, B, F):\n def f(r):\n  {loads}\n  r[d] = {expression}\n return f"
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - the expressions are the literals of this file
    make: Callable[..., Callable[[list[Any]], None]] = scope["make"]
    return make


def build(
    d: Decoder,
    instr: Instr,
    expression: str,
    bits: int,
    dest_bits: int | None = None,
    fn: Any = None,
    wider: bool = False,
) -> Pure:
    """`dest = expression(sources)`; all sources are `bits` wide, or their registers `wider`. `fn` is called F in the
    expression."""
    sources = [d.src(o, bits, wider) for o in instr.operands[1:]]
    dest = d.dest(instr.operands[0])
    closure = factory(expression, len(sources))(dest, *sources, (1 << bits) - 1, 1 << (bits - 1), bits, fn)
    return Pure(closure, ((dest, dest_bits or bits),))


def int_type(d: Decoder, mods: list[str], *allowed: str) -> tuple[str, int]:
    """The trailing integer type: kind (u, s or b) and bits. The modifiers before it must be among `allowed`."""
    name = mods[-1] if mods else ""
    if name not in ("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"):
        raise d.unsupported(f"unknown integer type `.{name}`")
    d.only(mods[:-1], *allowed)
    return name[0], int(name[1:])


def _add(d: Decoder, instr: Instr, mods: list[str], expression: str) -> Pure:
    d.arity(3)
    return build(d, instr, expression, int_type(d, mods)[1])


def int_add(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    return _add(d, instr, mods, "(x + y) & M")


def int_sub(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    return _add(d, instr, mods, "(x - y) & M")


@handles("and", "or", "xor")
def _logic(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(3)
    sign = {"and": "&", "or": "|", "xor": "^"}[instr.opcode.split(".")[0]]
    bits = 1 if mods == ["pred"] else int_type(d, mods)[1]
    return build(d, instr, f"x {sign} y", bits)


@handles("not")
def _not(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(2)
    if mods == ["pred"]:
        return build(d, instr, "x ^ True", 1)
    return build(d, instr, "x ^ M", int_type(d, mods)[1])


def int_neg(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(2)
    return build(d, instr, "(0 - x) & M", int_type(d, mods)[1])


def int_mul(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(3)
    kind, bits = int_type(d, mods, "lo", "hi", "wide")
    _check_product(d, mods, bits)
    if mods[0] == "lo":
        return build(d, instr, "(x * y) & M", bits)
    if mods[0] == "wide":
        return build(d, instr, "F(x, y)", bits, 2 * bits, functools.partial(_mul_wide, kind, bits))
    return build(d, instr, "F(x, y)", bits, bits, functools.partial(_mul_hi, kind, bits))


def _check_product(d: Decoder, mods: list[str], bits: int) -> None:
    if len(mods) != 2 or bits not in ((16, 32) if mods[0] == "wide" else (16, 32, 64)):
        raise d.unsupported("requires .lo, .hi or .wide, and 16, 32 or 64 bits (for .wide 16 or 32)")


def _mul_wide(kind: str, bits: int, x: Value, y: Value) -> Value:
    if kind == "s":
        x, y = signed(x, bits), signed(y, bits)
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        wide: Any = {16: np.int32, 32: np.int64}[bits] if kind == "s" else UINT[2 * bits]
        return (np.asarray(x).astype(wide) * np.asarray(y).astype(wide)).view(UINT[2 * bits])
    return (x * y) & ((1 << 2 * bits) - 1)


def _mul_hi(kind: str, bits: int, x: Value, y: Value) -> Value:
    if isinstance(x, int) and isinstance(y, int):
        product = signed(x, bits) * signed(y, bits) if kind == "s" else x * y
        return (product >> bits) & ((1 << bits) - 1)
    if bits == 64:
        return lifted(functools.partial(_mul_hi, kind, bits), bits, x, y)
    return (_mul_wide(kind, bits, x, y) >> bits).astype(UINT[bits])


def int_mad(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(4)
    kind, bits = int_type(d, mods, "lo", "wide", "hi")
    _check_product(d, mods, bits)
    if mods[0] == "lo":
        return build(d, instr, "((x * y & M) + z) & M", bits)
    dest_bits = 2 * bits if mods[0] == "wide" else bits
    product = functools.partial(_mul_wide if mods[0] == "wide" else _mul_hi, kind, bits)
    x, y = d.src(instr.operands[1], bits), d.src(instr.operands[2], bits)
    z, dest, ones = d.src(instr.operands[3], dest_bits), d.dest(instr.operands[0]), (1 << dest_bits) - 1

    def run(r: list[Any]) -> None:
        r[dest] = (product(r[x], r[y]) + r[z]) & ones

    return Pure(run, ((dest, dest_bits),))


@handles("shl", "shr")
def _shift(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(3)
    kind, bits = int_type(d, mods)
    amount = d.src(instr.operands[2], 32)
    x, dest = d.src(instr.operands[1], bits), d.dest(instr.operands[0])
    shift = functools.partial(_shl if instr.opcode.startswith("shl") else _sar if kind == "s" else _shr, bits)

    def run(r: list[Any]) -> None:
        r[dest] = shift(r[x], r[amount])

    return Pure(run, ((dest, bits),))


def _shl(bits: int, x: Value, y: Value) -> Value:
    if isinstance(y, np.ndarray):
        return np.where(y < bits, vec(x, bits) << np.minimum(y, bits - 1).astype(UINT[bits]), UINT[bits](0))
    return (x << y) & ((1 << bits) - 1) if y < bits else 0


def _shr(bits: int, x: Value, y: Value) -> Value:
    if isinstance(y, np.ndarray):
        return np.where(y < bits, vec(x, bits) >> np.minimum(y, bits - 1).astype(UINT[bits]), UINT[bits](0))
    return x >> y if y < bits else 0


def _sar(bits: int, x: Value, y: Value) -> Value:
    if isinstance(y, np.ndarray):
        wide = vec(x, bits).view(f"i{bits // 8}")
        return (wide >> np.minimum(y, bits - 1).astype(wide.dtype)).view(UINT[bits])
    shifted = signed(x, bits) >> min(y, bits - 1)
    return shifted.view(UINT[bits]) if isinstance(shifted, np.ndarray) else shifted & ((1 << bits) - 1)


def int_minmax(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """`.relu`, of s32 alone: no less than 0."""
    d.arity(3)
    kind, bits = int_type(d, mods, *(["relu"] if mods[-1] == "s32" else []))
    name = instr.opcode.split(".")[0]
    scalar, vector = {"min": (min, np.minimum), "max": (max, np.maximum)}[name]
    flip = 1 << (bits - 1) if kind == "s" else 0

    def pick(x: Value, y: Value) -> Value:
        x, y = x ^ flip, y ^ flip
        both = isinstance(x, int) and isinstance(y, int)
        found = scalar(x, y) if both else vector(vec(x, bits), vec(y, bits))
        if "relu" in mods:
            found = max(found, flip) if both else np.maximum(found, UINT[bits](flip))
        return found ^ flip

    return build(d, instr, "F(x, y)", bits, bits, pick)


_RARE: dict[str, Callable[..., int]] = {
    "popc": lambda bits, kind, x: int(x).bit_count(),
    "clz": lambda bits, kind, x: bits - int(x).bit_length(),
    "brev": lambda bits, kind, x: int(f"{x:0{bits}b}"[::-1], 2),
    "div": lambda bits, kind, x, y: _divide(bits, kind, x, y)[0],
    "rem": lambda bits, kind, x, y: _divide(bits, kind, x, y)[1],
    "bfe": lambda bits, kind, x, pos, count: _extract(bits, kind, x, pos & 0xFF, count & 0xFF),
}


def _divide(bits: int, kind: str, x: int, y: int) -> tuple[int, int]:
    ones = (1 << bits) - 1
    if y == 0:
        return ones, x  # unspecified by the PTX ISA; what hardware gives
    if kind == "s":
        x, y = signed(x, bits), signed(y, bits)
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return quotient & ones, (x - quotient * y) & ones


def _extract(bits: int, kind: str, x: int, pos: int, count: int) -> int:
    field = (x >> pos) & ((1 << count) - 1)
    sign = (x >> min(pos + count - 1, bits - 1)) & 1 if count and kind == "s" else 0
    return (field | (-sign << min(count, max(bits - pos, 0)))) & ((1 << bits) - 1)


@handles("popc", "clz", "brev", "rem", "bfe")
def int_rare(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    kind, bits = int_type(d, mods)
    name = instr.opcode.split(".")[0]
    d.arity({"popc": 2, "clz": 2, "brev": 2, "bfe": 4}.get(name, 3))
    fn = functools.partial(_RARE[name], bits, kind)
    dest_bits = 32 if name in ("popc", "clz") else bits
    names = "xyz"[: len(instr.operands) - 1]
    lift = functools.partial(lifted, fn, dest_bits)
    return build(d, instr, f"F({', '.join(names)})", bits, dest_bits, lift)


@handles("bfi")
def _bfi(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(5)
    bits = int_type(d, mods)[1]
    slots = [d.src(o, b) for o, b in zip(instr.operands[1:], (bits, bits, 32, 32), strict=True)]
    dest = d.dest(instr.operands[0])

    def insert(a: int, b: int, pos: int, count: int) -> int:
        mask = (((1 << (count & 0xFF)) - 1) << (pos & 0xFF)) & ((1 << bits) - 1)
        return (b & ~mask) | ((a << (pos & 0xFF)) & mask)

    def run(r: list[Any]) -> None:
        r[dest] = lifted(insert, bits, *(r[s] for s in slots))

    return Pure(run, ((dest, bits),))


@handles("prmt")
def _prmt(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(4)
    d.only(mods, "b32")

    def permute(x: int, y: int, z: int) -> int:
        octets = (x | y << 32).to_bytes(8, "little")
        out = 0
        for i in range(4):
            pick = (z >> 4 * i) & 0xF
            octet = octets[pick & 7]
            out |= (octet if pick < 8 else (0xFF if octet & 0x80 else 0)) << 8 * i
        return out

    return build(d, instr, "F(x, y, z)", 32, 32, functools.partial(lifted, permute, 32))


@handles("lop3")
def _lop3(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(5)
    d.only(mods, "b32")
    slots = [d.src(o, 32) for o in instr.operands[1:]]
    dest, table_slot = d.dest(instr.operands[0]), slots[3]

    def run(r: list[Any]) -> None:
        a, b, c = (r[s] for s in slots[:3])
        out: Value = 0
        for i in range(8):
            if r[table_slot] >> i & 1:
                out = out | (
                    (a if i & 4 else a ^ 0xFFFFFFFF)
                    & (b if i & 2 else b ^ 0xFFFFFFFF)
                    & (c if i & 1 else c ^ 0xFFFFFFFF)
                )
        r[dest] = out

    return Pure(run, ((dest, 32),))


@handles("shf")
def _funnel(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(4)
    d.only(mods, "l", "r", "wrap", "clamp", "b32")
    left, wrap = mods[0] == "l", "wrap" in mods

    def shift(x: int, y: int, z: int) -> int:
        amount = z & 31 if wrap else min(z, 32)
        both = y << 32 | x
        return ((both << amount) >> 32 if left else both >> amount) & 0xFFFFFFFF

    return build(d, instr, "F(x, y, z)", 32, 32, functools.partial(lifted, shift, 32))
