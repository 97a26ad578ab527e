"""`cvt`: between integers, from floats to packed small floats, and back. Agrees bit for bit with an H200 (driver 580,
2026-11), NaN, infinities, ties and subnormals included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator import alu
from jax_bwgemm.emulator.decode import Decoder, Pure, handles
from jax_bwgemm.emulator.floats import one_nan
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.values import FLOAT, NUM_LANES, SINT, UINT, Value, lifted, signed

_SMALL = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}
_INTEGERS = {f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)}
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "e4m3": 448.0, "e5m2": 57344.0}
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}  # what cvt gives for NaN (PTX ISA, cvt)


def _is_int(name: str) -> bool:
    return name in _INTEGERS


@handles("cvt")
def _cvt(d: Decoder, instr: Instr, mods: list[str]) -> Pure:
    to, of = mods[-2], mods[-1]
    options = mods[:-2]
    if _is_int(to) and _is_int(of):
        return _int_to_int(d, instr, options, to, of)
    if to.endswith("x2") and of == "f32":
        return _pack_floats(d, instr, options, to[:-2])
    if to == "tf32" and of == "f32":
        return _to_tf32(d, instr, options)
    if to in ("e4m3x2", "e5m2x2") and of == "f16x2":
        return _narrow_halves(d, instr, options, to[:-2])
    if to.endswith("x2") and of.endswith("x2"):
        return _unpack_floats(d, instr, options, to[:-2], of[:-2])
    if to in FLOAT and of in FLOAT:
        return _float_to_float(d, instr, options, to, of)
    if to in FLOAT and _is_int(of):
        return _int_to_float(d, instr, options, to, of)
    if _is_int(to) and of in FLOAT:
        return _float_to_int(d, instr, options, to, of)
    raise d.unsupported(f"unknown conversion {of} -> {to}")


def _int_to_int(d: Decoder, instr: Instr, options: list[str], to: str, of: str) -> Pure:
    d.arity(2)
    d.only(options, "sat")
    from_bits, to_bits = int(of[1:]), int(to[1:])
    reg_bits = d.register_bits(instr.operands[0], to_bits)
    if "sat" in options:
        low, high = (-(1 << (to_bits - 1)), (1 << (to_bits - 1)) - 1) if to[0] == "s" else (0, (1 << to_bits) - 1)

        def clamp(x: int) -> int:
            value = signed(x, from_bits) if of[0] == "s" else x & ((1 << from_bits) - 1)
            return min(max(value, low), high) & ((1 << reg_bits) - 1)

        return alu.build(
            d, instr, "F(x)", max(from_bits, 16), reg_bits, functools.partial(lifted, clamp, reg_bits), True
        )

    def convert(x: Value) -> Value:
        if isinstance(x, np.ndarray):
            narrow = x.astype(UINT[from_bits])
            wide = narrow.view(SINT[from_bits]) if of[0] == "s" else narrow
            return wide.astype(SINT[to_bits] if to[0] == "s" else UINT[to_bits]).astype(UINT[reg_bits])
        value = signed(x, from_bits) if of[0] == "s" else x & ((1 << from_bits) - 1)
        return value & ((1 << to_bits) - 1) if to[0] != "s" else signed(value, to_bits) & ((1 << reg_bits) - 1)

    return alu.build(d, instr, "F(x)", max(from_bits, 16), reg_bits, convert, True)


def round_small(x: np.ndarray, kind: str, saturate: bool = False, relu: bool = False) -> np.ndarray:
    """float32 -> raw bits of a small float, to nearest even; `saturate` clamps to the largest finite value."""
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
    if saturate:
        x = np.clip(x, -_LARGEST[kind], _LARGEST[kind])
    out: np.ndarray = x.astype(FLOAT[kind]).view(UINT[_SMALL[kind]])
    nan = np.isnan(x)
    if nan.any():
        out = np.where(nan, UINT[_SMALL[kind]](_NAN[kind]), out)
    return out


def _floats(x: Value, count: int) -> np.ndarray:
    return x.view(np.float32) if isinstance(x, np.ndarray) else np.full(count, x, np.uint32).view(np.float32)


def _pack_floats(d: Decoder, instr: Instr, options: list[str], kind: str) -> Pure:
    """`cvt.rn[.satfinite][.relu].{f16x2,bf16x2,e4m3x2,e5m2x2}.f32 d, a, b`: a is the high half."""
    d.arity(3)
    d.only(options, "rn", "satfinite", "relu")
    if kind not in _SMALL:
        raise d.unsupported(f"unknown packed type `.{kind}x2`")
    width, saturate, relu = _SMALL[kind], "satfinite" in options, "relu" in options
    dtype = UINT[2 * width]

    def convert(high: Value, low: Value) -> Value:
        is_vector = isinstance(high, np.ndarray) or isinstance(low, np.ndarray)
        count = NUM_LANES if is_vector else 1
        pair = np.empty((count, 2), np.float32)
        pair[:, 0], pair[:, 1] = _floats(low, count), _floats(high, count)
        out = round_small(pair, kind, saturate, relu).view(dtype)[:, 0]
        return out if is_vector else int(out[0])

    return alu.build(d, instr, "F(x, y)", 32, 2 * width, convert)


def _narrow_halves(d: Decoder, instr: Instr, options: list[str], kind: str) -> Pure:
    """`cvt.rn.satfinite[.relu].{e4m3x2,e5m2x2}.f16x2 d, a`."""
    d.arity(2)
    d.only(options, "rn", "satfinite", "relu")
    if "satfinite" not in options:
        raise d.unsupported("requires .satfinite")

    def convert(x: np.ndarray) -> np.ndarray:
        floats = x.view(np.float16).astype(np.float32)
        return round_small(floats, kind, True, "relu" in options).view(np.uint16)

    return alu.build(d, instr, "F(x)", 32, 16, _lift(convert, 32, 16))


def _to_tf32(d: Decoder, instr: Instr, options: list[str]) -> Pure:
    """`cvt.{rna,rn}.tf32.f32 d, a`: 10 bits of fraction, ties away from zero or to even. NaN: one of its own, as a TMA
    load of TF32 makes it; the ISA does not say."""
    d.arity(2)
    d.only(options, "rna", "rn")
    if len(options) != 1:
        raise d.unsupported("requires .rna or .rn")

    def convert(x: np.ndarray) -> np.ndarray:
        half = np.uint32(0x1000) if options == ["rna"] else np.uint32(0xFFF) + (x >> np.uint32(13) & np.uint32(1))
        rounded = (x + half) & np.uint32(0xFFFFE000)
        magnitude = x & np.uint32(0x7FFFFFFF)
        out = np.where(magnitude < 0x7F800000, rounded, x)
        return np.where(magnitude > 0x7F800000, np.uint32(0x7FFFE000), out)

    return alu.build(d, instr, "F(x)", 32, 32, _lift(convert, 32, 32))


def _unpack_floats(d: Decoder, instr: Instr, options: list[str], to: str, of: str) -> Pure:
    """`cvt.rn.f16x2.e4m3x2` and the like: exact."""
    d.arity(2)
    d.only(options, "rn", "relu")
    if to != "f16" or of not in ("e4m3", "e5m2"):
        raise d.unsupported(f"unknown conversion {of}x2 -> {to}x2")

    def convert(x: Value) -> Value:
        source = x.astype(np.uint16) if isinstance(x, np.ndarray) else np.full(1, x, np.uint16)
        out = one_nan(source.view(FLOAT[of]).astype(np.float16), "f16").view(np.uint32)
        return out if isinstance(x, np.ndarray) else int(out[0])

    return alu.build(d, instr, "F(x)", 16, 32, convert)


def _lift(fn: Callable[[np.ndarray], np.ndarray], of_bits: int, to_bits: int) -> Callable[[Value], Value]:
    """A function of an array of raw `of_bits` to one of raw `to_bits`, for scalars too."""

    def convert(x: Value) -> Value:
        if isinstance(x, np.ndarray):
            return fn(x.astype(UINT[of_bits], copy=False)).astype(UINT[to_bits], copy=False)
        return int(fn(np.full(1, x & ((1 << of_bits) - 1), UINT[of_bits])).astype(UINT[to_bits])[0])

    return convert


def _float_to_float(d: Decoder, instr: Instr, options: list[str], to: str, of: str) -> Pure:
    d.arity(2)
    d.only(options, "rn", "satfinite", "relu", "ftz", "rni", "rzi", "rmi", "rpi")
    widths = {**_SMALL, "f32": 32, "f64": 64}
    whole = [o for o in options if o in _ROUND]

    def convert(x: np.ndarray) -> np.ndarray:
        floats = x.view(FLOAT[of])
        if whole:
            floats = _ROUND[whole[0]](floats.astype(np.float64))
        if to in _SMALL:
            return round_small(floats.astype(np.float32), to, "satfinite" in options, "relu" in options)
        wide = np.asarray(floats).astype(FLOAT[to])
        return wide.view(UINT[widths[to]]) if of == "bf16" else one_nan(wide, to)  # a bf16 NaN keeps its bits

    return alu.build(d, instr, "F(x)", widths[of], widths[to], _lift(convert, widths[of], widths[to]))


_ROUND: dict[str, Callable[[np.ndarray], Any]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _int_to_float(d: Decoder, instr: Instr, options: list[str], to: str, of: str) -> Pure:
    d.arity(2)
    d.only(options, "rn")
    bits, widths = int(of[1:]), {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}

    def convert(x: np.ndarray) -> np.ndarray:
        whole = x.view(SINT[bits]) if of[0] == "s" else x
        return whole.astype(FLOAT[to]).view(UINT[widths[to]])

    return alu.build(d, instr, "F(x)", max(bits, 16), widths[to], _lift(convert, bits, widths[to]))


def _float_to_int(d: Decoder, instr: Instr, options: list[str], to: str, of: str) -> Pure:
    d.arity(2)
    d.only(options, *_ROUND, "ftz", "sat")
    bits, widths = int(to[1:]), {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
    mode = next((o for o in options if o in _ROUND), None)
    if mode is None:
        raise d.unsupported("requires a rounding modifier")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    nan = 1 << 63 if bits == 64 else 0  # as an H200 does

    def convert(x: np.ndarray) -> np.ndarray:
        rounded = _ROUND[mode](x.view(FLOAT[of]).astype(np.float64))
        numbers = [nan if v != v else int(min(max(v, low), high)) & ((1 << bits) - 1) for v in rounded.tolist()]
        return np.array(numbers, UINT[bits])

    return alu.build(d, instr, "F(x)", widths[of], max(bits, 16), _lift(convert, widths[of], max(bits, 16)))
