"""Exact arithmetic and one rounding, in fractions: what a correctly rounded instruction must give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary float: `digits` of significand with the hidden one, smallest normal exponent, largest exponent."""

    digits: int
    low: int
    high: int
    bits: int
    nan: int

    def encode(self, value: Fraction, negative: bool = False, clamp: bool = False) -> int:
        """Raw bits, to nearest even; `negative` is the sign of a zero; `clamp` to the largest finite value."""
        sign = 1 << (self.bits - 1) if value < 0 or (not value and negative) else 0
        value = abs(value)
        if not value:
            return sign
        exponent = max(_floor_log2(value), self.low)
        units = round(value / Fraction(2) ** (exponent - self.digits + 1))
        number = units + ((exponent - self.low) << (self.digits - 1))  # a carry moves into the exponent by itself
        infinity = (self.high - self.low + 2) << (self.digits - 1)
        return sign | (min(number, infinity - 1) if clamp else min(number, infinity))

    def infinity(self, negative: bool) -> int:
        return negative << (self.bits - 1) | (self.high - self.low + 2) << (self.digits - 1)


F32 = Format(24, -126, 127, 32, 0x7FFFFFFF)
F16 = Format(11, -14, 15, 16, 0x7FFF)
BF16 = Format(8, -126, 127, 16, 0x7FFF)


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def exactly(fn: Callable[..., float | Fraction], to: Format, *operands: np.ndarray) -> np.ndarray:
    """`fn` of floats, lane by lane. A NaN of any kind becomes the format's one NaN (PTX ISA, floating-point NaN)."""
    with np.errstate(all="ignore"):
        return np.array([_one(fn, to, *lane) for lane in zip(*operands, strict=True)], f"u{to.bits // 8}")


def _one(fn: Callable[..., float | Fraction], to: Format, *lane: np.floating) -> int:
    rough = fn(*map(np.float64, lane))
    if math.isnan(rough):
        return to.nan
    if not all(map(math.isfinite, lane)) or 0 in lane:
        return (
            to.infinity(rough < 0) if math.isinf(rough) else to.encode(Fraction(float(rough)), bool(np.signbit(rough)))
        )
    value = Fraction(fn(*(Fraction(float(x)) for x in lane)))
    return to.encode(value, bool(np.signbit(rough)))
