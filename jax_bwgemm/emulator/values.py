"""Register values: a Python int (or bool) while all lanes agree, a NumPy vector of 32 lanes once they may not.

Registers hold raw bits, unsigned. Scalars never become NumPy scalars, so that arithmetic stays exact and quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Value = Any  # int | bool | np.ndarray of 32 lanes

NUM_LANES = 32
LANES = np.arange(NUM_LANES, dtype=np.uint32)
ALL_LANES = 0xFFFFFFFF  # a bit each
UINT: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.object_}  # 128: of ints
SINT: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


class NoValue:
    """What a register holds that nobody has written, or that an asynchronous instruction has yet to fill. Every use,
    comparisons and truth among them, is a TypeError, which the warp reports as the kernel's fault."""

    __slots__ = ()
    __array_ufunc__ = None

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a register without a value is used")

    __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = object.__hash__


UNDEFINED, IN_FLIGHT = NoValue(), NoValue()


def vec(x: Value, bits: int) -> np.ndarray:
    """`x` as a vector of 32 lanes of unsigned `bits` (bool for 1)."""
    dtype = np.bool_ if bits == 1 else UINT[max(bits, 8)]
    if isinstance(x, np.ndarray):
        return x.astype(dtype, copy=False)
    return np.full(NUM_LANES, x, dtype)


def signed(x: Value, bits: int) -> Value:
    """The two's complement reading of raw bits."""
    if isinstance(x, np.ndarray):
        return x.astype(UINT[bits], copy=False).view(SINT[bits])
    sign = 1 << (bits - 1)
    return ((x & ((1 << bits) - 1)) ^ sign) - sign


def select(p: Value, a: Value, b: Value, bits: int) -> Value:
    """`a` where `p`, else `b`."""
    if not isinstance(p, np.ndarray):
        return a if p else b
    if bits == 1:
        return np.where(p, a, b)
    return np.where(p, vec(a, bits), vec(b, bits))


def lifted(fn: Callable[..., int], bits: int, *args: Value) -> Value:
    """A function of Python ints, applied lane by lane if any argument is a vector."""
    if not any(isinstance(a, np.ndarray) for a in args):
        return fn(*args)
    columns = [a.tolist() if isinstance(a, np.ndarray) else [a] * NUM_LANES for a in args]
    return np.array([fn(*lane) for lane in zip(*columns, strict=True)], np.bool_ if bits == 1 else UINT[bits])
