"""Floating-point arithmetic, and the opcodes that integers and floats share (the type decides).

Approximations (`.approx`, `div.full`, `tanh`, `ex2`, `lg2`, `rcp`, `rsqrt`, `sin`, `cos`) are computed in float64 and
rounded once: hardware may differ in its last bits, within the errors that the PTX ISA states. All else agrees bit for
bit with an H200 (driver 580, 2026-11): one rounding, subnormals, signed zeros, one NaN whatever NaNs go in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator import alu, moves
from jax_bwgemm.emulator.decode import Decoder, Effect, Pure, handles
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.values import FLOAT, NUM_LANES, UINT, Value

_KINDS = {
    "f16": ("f16", 16),
    "bf16": ("bf16", 16),
    "f16x2": ("f16", 32),
    "bf16x2": ("bf16", 32),
    "f32": ("f32", 32),
    "f32x2": ("f32", 64),
    "f64": ("f64", 64),
}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}  # what arithmetic gives (PTX ISA, floating-point NaN)
_SOURCES = {"mad": 3, "fma": 3} | dict.fromkeys(
    ("neg", "abs", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos"), 1
)  # of all others 2
_BEYOND_FLOAT32, _HALF_OF_FLOAT32 = np.uint64((1 << 29) - 1), np.uint64(1 << 28)  # bits of a float64's mantissa
_LEAST_NORMAL = 2.0**-126  # of float32
_ROUNDING = ("rn", "ftz", "sat", "approx", "full", "rz")


def float_type(d: Decoder, mods: list[str], *allowed: str) -> tuple[str, int]:
    """The trailing float type: element kind and register bits."""
    if not mods or mods[-1] not in _KINDS:
        raise d.unsupported(f"unknown type `.{mods[-1] if mods else ''}`")
    d.only(mods[:-1], *allowed)
    return _KINDS[mods[-1]]


def apply(fn: Callable[..., Any], kind: str, bits: int, *args: Value) -> Value:
    """`fn` on the float elements of raw registers, computed in a wider type and rounded to `kind`."""
    is_vector, floats = _floats(kind, bits, args)
    out = np.asarray(fn(*(a.astype(np.float64) for a in floats)))
    if kind == "bf16":  # whose conversion from float64 goes through float32
        nearest = out.astype(np.float32)
        out = odd(nearest, out - nearest)
    bits_out = one_nan(out.astype(FLOAT[kind]), kind).view(UINT[bits])
    return bits_out if is_vector else int(bits_out[0])


def _floats(kind: str, bits: int, args: tuple[Value, ...]) -> tuple[bool, list[np.ndarray]]:
    """Whether any is a vector, and the float elements of all, of as many lanes."""
    is_vector = any(isinstance(a, np.ndarray) for a in args)
    shape = NUM_LANES if is_vector else 1
    raw = (np.ascontiguousarray(a) if isinstance(a, np.ndarray) else np.full(shape, a, UINT[bits]) for a in args)
    return is_vector, [a.view(FLOAT[kind]) for a in raw]


def apply_once(fn: Callable[..., Any], bits: int, *args: Value) -> Value:
    """`apply` of float32 where NumPy rounds once itself, as these instructions are most of an epilogue: sums, products
    and quotients in float32, and fma where a float64 sum of the product, which is exact, rounds like the exact sum."""
    is_vector, floats = _floats("f32", bits, args)
    if fn is not _fma:
        out = fn(*floats)
    else:
        total = floats[0].astype(np.float64) * floats[1] + floats[2]
        is_half = (total.view(np.uint64) & _BEYOND_FLOAT32) == _HALF_OF_FLOAT32  # perhaps not quite
        if is_half.any() or ((np.abs(total) < _LEAST_NORMAL) & (total != 0)).any():
            return apply(fn, "f32", bits, *args)
        out = total.astype(np.float32)
    out = out.view(np.uint32) if not np.isnan(out).any() else one_nan(out, "f32")
    out = out.view(UINT[bits])
    return out if is_vector else int(out[0])


def odd(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """x + error with an odd last bit, unless it is exact: rounding it again is then harmless."""
    even = x.view(UINT[8 * x.itemsize]) & 1 == 0
    outwards = np.copysign(x.dtype.type(np.inf), error.astype(x.dtype))
    return np.where((error != 0) & np.isfinite(x) & even, np.nextafter(x, outwards), x)


def one_nan(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits, every NaN the same."""
    raw = x.view(UINT[8 * x.itemsize])
    return np.where(np.isnan(x), raw.dtype.type(NAN[kind]), raw) if kind in NAN else raw


def _flush(x: np.ndarray) -> np.ndarray:
    """Subnormals of float32 become zeros of the same sign (`.ftz`)."""
    return np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(0.0, x), x)


def _with_modifiers(fn: Callable[..., Any], mods: list[str]) -> Callable[..., Any]:
    def run(*args: np.ndarray) -> np.ndarray:
        out: np.ndarray = fn(*(map(_flush, args) if "ftz" in mods else args))
        if "ftz" in mods:
            out = _flush(out)
        if "NaN" in mods:
            out = np.where(np.isnan(args).any(axis=0), np.nan, out)
        if "relu" in mods:
            out = np.where(out <= 0, 0.0, out)
        return np.minimum(np.where(out > 0, out, 0.0), 1.0) if "sat" in mods else out

    return run if {"ftz", "sat", "relu", "NaN"} & set(mods) else fn


def float_op(d: Decoder, instr: Instr, mods: list[str], fn: Callable[..., Any], *allowed: str) -> Pure:
    """A float instruction: sources in the type's registers, result rounded to nearest even."""
    kind, bits = float_type(d, mods, *allowed)
    d.arity(1 + _SOURCES.get(instr.opcode.split(".")[0], 2))
    if "rz" in mods:
        raise d.unsupported("rounding `.rz` is not modelled")
    names = ", ".join("xyz"[: len(instr.operands) - 1])
    own = _with_modifiers(fn, mods)
    is_once = kind == "f32" and own in (*_MIXED.values(), np.multiply, np.divide)
    bound = functools.partial(apply_once, own, bits) if is_once else functools.partial(apply, own, kind, bits)
    return alu.build(d, instr, f"F({names})", bits, bits, bound)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """In float64 the product of two narrower floats is exact."""
    product = x * y
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    return odd(total, error)


def _extreme(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fmin or fmax, with -0 < +0."""

    def pick(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        zeros = (x == 0) & (y == 0)
        negative = fn(np.where(np.signbit(x), -1, 1), np.where(np.signbit(y), -1, 1))
        return np.where(zeros, np.copysign(0.0, negative), fn(x, y))

    return pick


_IntForm = Callable[[Decoder, Instr, list[str]], Pure | Effect]
_SHARED: dict[str, tuple[_IntForm, Callable[..., Any], tuple[str, ...]]] = {
    "add": (alu.int_add, np.add, _ROUNDING),
    "sub": (alu.int_sub, np.subtract, _ROUNDING),
    "mul": (alu.int_mul, np.multiply, _ROUNDING),
    "mad": (alu.int_mad, _fma, _ROUNDING),
    "div": (alu.int_rare, np.divide, _ROUNDING),
    "neg": (alu.int_neg, np.negative, ("ftz",)),
    "min": (alu.int_minmax, _extreme(np.fmin), ("ftz", "NaN")),
    "max": (alu.int_minmax, _extreme(np.fmax), ("ftz", "NaN")),
}


_MIXED: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "fma": _fma}


def _mixed(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    """`add.f32.f16 d, a, c` and `fma.f32.f16 d, a, b, c`: all but the last source are 16-bit, the sum is float32."""
    name = instr.opcode.split(".")[0]
    d.arity(1 + _SOURCES.get(name, 2))
    d.only(mods[:-2], "rn", "sat")
    kind, fn = mods[-1], _with_modifiers(_MIXED[name], mods)
    *narrow, last = instr.operands[1:]
    slots = [d.src(o, 16) for o in narrow]
    c, dest = d.src(last, 32), d.dest(instr.operands[0])

    def run(r: list[Any]) -> None:
        values = [r[s] for s in (*slots, c)]
        is_vector = any(isinstance(v, np.ndarray) for v in values)
        count = NUM_LANES if is_vector else 1
        kinds = [kind] * len(slots) + ["f32"]
        floats = [_elements(v, k, count) for v, k in zip(values, kinds, strict=True)]
        out = fn(*floats).astype(np.float32).view(np.uint32)
        r[dest] = out if is_vector else int(out[0])

    return Pure(run, ((dest, 32),))


def _elements(value: Value, kind: str, count: int) -> np.ndarray:
    """Raw bits as float64."""
    dtype = UINT[32 if kind == "f32" else 16]
    array = value if isinstance(value, np.ndarray) else np.full(count, value, dtype)
    return array.view(FLOAT[kind]).astype(np.float64)


def _is_mixed(mods: list[str]) -> bool:
    return len(mods) >= 2 and mods[-2] == "f32" and mods[-1] in ("f16", "bf16")


@handles(*_SHARED)
def _arithmetic(d: Decoder, instr: Instr, mods: list[str]) -> Pure | Effect:
    if instr.opcode.split(".")[0] in _MIXED and _is_mixed(mods):
        return _mixed(d, instr, mods)
    int_form, fn, allowed = _SHARED[instr.opcode.split(".")[0]]
    if mods and mods[-1] in _KINDS:
        return float_op(d, instr, mods, fn, *allowed)
    return int_form(d, instr, mods)


@handles("abs")
def _abs(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    if mods and mods[-1] in _KINDS:
        return float_op(d, instr, mods, np.abs, "ftz")
    kind, bits = alu.int_type(d, mods)
    return alu.build(d, instr, "F(x, (0 - x) & M)", bits, bits, functools.partial(_signed_max, bits))


def _signed_max(bits: int, x: Value, y: Value) -> Value:
    sign = 1 << (bits - 1)
    if isinstance(x, np.ndarray):
        return np.where(x & sign, y, x)
    return y if x & sign else x


_UNARY: dict[str, Callable[..., Any]] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@handles(*_UNARY)
def _unary(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(2)
    return float_op(d, instr, mods, _UNARY[instr.opcode.split(".")[0]], "approx", "rn", "ftz")


@handles("fma")
def _fused(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(4)
    if _is_mixed(mods):
        return _mixed(d, instr, mods)
    return float_op(d, instr, mods, _fma, "rn", "ftz", "sat", "relu")


@handles("copysign")
def _copysign(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(3)
    return alu.build(d, instr, "(x & S) | (y & (S - 1))", float_type(d, mods)[1])


_FLOAT_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~np.isnan(x) & ~np.isnan(y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@handles("setp")
def _setp(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    d.arity(3, 4)
    if not mods or mods[-1] not in _KINDS:
        return moves.int_setp(d, instr, mods)
    kind, bits = float_type(d, mods, *_FLOAT_COMPARE, "and", "or", "xor", "ftz")
    boolop = moves.check_compare(d, mods, _FLOAT_COMPARE)
    fn = _FLOAT_COMPARE[mods[0]]
    x, y = d.src(instr.operands[1], bits), d.src(instr.operands[2], bits)

    def compare(a: Value, b: Value) -> Value:
        is_vector = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        shape, dtype = (NUM_LANES if is_vector else 1), UINT[bits]
        floats = [(v if isinstance(v, np.ndarray) else np.full(shape, v, dtype)).view(FLOAT[kind]) for v in (a, b)]
        out = fn(*floats)
        return out if is_vector else bool(out[0])

    def make(dest: int, first: int, second: int) -> Callable[[list[Any]], None]:
        def run(r: list[Any]) -> None:
            r[dest] = compare(r[first], r[second])

        return run

    return moves.finish_setp(d, instr, boolop, make, x, y)
