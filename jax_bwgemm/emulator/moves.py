"""Moves, selects, predicates and address conversions."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import numpy as np

from jax_bwgemm.emulator.alu import build, factory, int_type
from jax_bwgemm.emulator.decode import SHARED_BASE, Decoder, Pure, handles
from jax_bwgemm.emulator.syntax import Instr, Not, Operand, Pair, Sink, Vec
from jax_bwgemm.emulator.values import NUM_LANES, UINT, select


@handles("selp")
def _selp(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(4)
    if mods not in (["f32"], ["f64"]):
        int_type(d, mods)
    bits = int(mods[0][1:])
    a, b, p = d.src(instr.operands[1], bits), d.src(instr.operands[2], bits), d.src(instr.operands[3], 1)
    dest = d.dest(instr.operands[0])

    def run(r: list[Any]) -> None:
        q = r[p]
        r[dest] = r[a] if q is True else r[b] if q is False else select(q, r[a], r[b], bits)

    return Pure(run, ((dest, bits),))


_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def int_setp(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """`setp.cmp[.boolop].type p[|q], a, b[, c]`."""
    kind, bits = int_type(d, mods, *_COMPARE, "and", "or", "xor")
    boolop = check_compare(d, mods, _COMPARE)
    flip = "S" if kind == "s" and mods[0] not in ("eq", "ne") else "0"
    test = f"((x ^ {flip}) {_COMPARE[mods[0]]} (y ^ {flip}))" if flip == "S" else f"(x {_COMPARE[mods[0]]} y)"
    x, y = d.src(instr.operands[1], bits), d.src(instr.operands[2], bits)
    return finish_setp(d, instr, boolop, functools.partial(factory(test, 2), M=0, S=1 << (bits - 1), B=0, F=0), x, y)


def check_compare(d: Decoder, mods: list[str], comparisons: Container[str]) -> list[str]:
    """The boolean operation of `setp.cmp[.boolop].type`, if there is one, which takes a fourth operand."""
    boolop = [m for m in mods[1:-1] if m != "ftz"]
    if mods[0] not in comparisons or len(boolop) > 1 or any(m in comparisons for m in boolop):
        raise d.unsupported("requires one comparison and at most one of .and, .or and .xor")
    d.arity(3 + len(boolop))
    return boolop


def finish_setp(d: Decoder, instr: Instr, boolop: list[str], make: Any, x: int, y: int) -> Pure:
    """The comparison into p, or combined with a third predicate, and its complement into q."""
    first = instr.operands[0]
    if not isinstance(first, Pair) and not boolop:
        dest = d.dest(first)
        return Pure(make(dest, x, y), ((dest, 1),))
    p = d.dest(first.first if isinstance(first, Pair) else first)
    q = d.dest(first.second if isinstance(first, Pair) else Sink())
    third, third_not = predicate(d, instr.operands[3]) if boolop else (0, False)
    temp = d.new_slot()
    compare = make(temp, x, y)
    combine = {"and": lambda t, c: t & c, "or": lambda t, c: t | c, "xor": lambda t, c: t ^ c, "": lambda t, c: t}
    op = combine[boolop[0] if boolop else ""]

    def run(r: list[Any]) -> None:
        compare(r)
        c = r[third] ^ third_not if boolop else True
        t = r[temp]
        r[p] = op(t, c)
        r[q] = op(t ^ True, c)

    return Pure(run, ((p, 1), (q, 1)))


def predicate(d: Decoder, operand: Operand) -> tuple[int, bool]:
    """Slot and negation of a predicate source."""
    if isinstance(operand, Not):
        return d.src(operand.operand, 1), True
    return d.src(operand, 1), False


@handles("mov")
def _mov(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(2)
    if len(mods) != 1 or mods[0] not in (
        "pred",
        "b16",
        "u16",
        "s16",
        "b32",
        "u32",
        "s32",
        "f32",
        "b64",
        "u64",
        "s64",
        "f64",
        "b128",
    ):
        raise d.unsupported("unknown modifier")
    bits = 1 if mods[0] == "pred" else int(mods[0][1:])
    dest, source = instr.operands
    if isinstance(dest, Vec):
        return _unpack(d, dest, d.src(source, bits), bits)
    if isinstance(source, Vec):
        return _pack(d, d.dest(dest), source, bits)
    return build(d, instr, "x", bits)


def _width(d: Decoder, vector: Vec, bits: int) -> int:
    """Of an element; there are 2 or 4."""
    count = len(vector.items)
    if count not in (2, 4) or bits // count not in (8, 16, 32, 64):
        raise d.unsupported(f"requires 2 or 4 elements of 8 to 64 bits, got {count} of {bits // max(count, 1)}")
    return bits // count


def _pack(d: Decoder, dest: int, source: Vec, bits: int) -> Pure:
    """The first element is the low part."""
    count, width = len(source.items), _width(d, source, bits)
    slots = [d.src(o, width) for o in source.items]
    part, whole = UINT.get(width), UINT.get(bits)

    def run(r: list[Any]) -> None:
        values = [r[s] for s in slots]
        if bits == 128:
            r[dest] = sum(
                (v.astype(object) if type(v) is np.ndarray else v) << (i * width) for i, v in enumerate(values)
            )
            return
        if any(type(v) is np.ndarray for v in values):
            lanes = np.empty((NUM_LANES, count), part)
            for i, v in enumerate(values):
                lanes[:, i] = v
            r[dest] = lanes.view(whole)[:, 0]
            return
        r[dest] = sum(v << (i * width) for i, v in enumerate(values))

    return Pure(run, ((dest, bits),))


def _unpack(d: Decoder, dest: Vec, source: int, bits: int) -> Pure:
    """Vectors come apart as strided views: registers are never written in place."""
    count, width = len(dest.items), _width(d, dest, bits)
    ones, dtype = (1 << width) - 1, UINT[width]
    parts = [(d.dest(o), i) for i, o in enumerate(dest.items) if not isinstance(o, Sink)]

    def run(r: list[Any]) -> None:
        v = r[source]
        if type(v) is np.ndarray and bits == 128:
            for slot, i in parts:
                r[slot] = (v >> (i * width) & ones).astype(dtype)
            return
        if type(v) is np.ndarray:
            pieces = np.ascontiguousarray(v).view(dtype)
            for slot, i in parts:
                r[slot] = pieces[i::count]
            return
        for slot, i in parts:
            r[slot] = v >> (i * width) & ones

    return Pure(run, tuple((slot, width) for slot, _ in parts))


@handles("cvta")
def _cvta(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """`cvta.space` adds the space's generic base, `cvta.to.space` removes it. Global addresses are generic already."""
    d.only(mods, "to", "param", "shared", "shared::cta", "shared::cluster", "global", "const", "u64")
    d.arity(2)
    if mods[-1] != "u64" or mods[-2] in ("to", "u64"):
        raise d.unsupported("requires a state space and .u64")
    if mods[-2] in ("param", "global", "const"):
        return build(d, instr, "x", 64)
    sign = "-" if "to" in mods else "+"
    return build(d, instr, f"x {sign} {SHARED_BASE}", 64)
