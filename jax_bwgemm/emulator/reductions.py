"""What cp.reduce.async.bulk.tensor does to an element: operation and element type (PTX ISA, its table of .redOp).

`.inc` and `.dec` are those of `atom`. Float sums are rounded once, to nearest even; -0 < +0. What the ISA leaves open
for the tensor form is refused: subnormals in f32 sums (the non-tensor forms flush them), NaN in a minimum or maximum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_bwgemm.emulator.floats import apply

Reduction = Callable[[np.ndarray, np.ndarray], np.ndarray]  # raw bits in global memory, in shared memory -> raw bits

_INTEGERS = ("u32", "s32", "u64", "s64")
_BITS = ("u32", "s32", "u64")  # on an s64 map: CUDA_ERROR_ILLEGAL_INSTRUCTION on an H200, driver 580
_HALVES = ("f16", "bf16")
_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f32", *_HALVES),
    "min": (*_INTEGERS, *_HALVES),
    "max": (*_INTEGERS, *_HALVES),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
}
OPERATIONS = tuple(_TYPES)
_BITWISE: dict[str, Reduction] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
}
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}


class NotModelled(Exception):
    """A value for which the ISA does not say what happens."""


def reduction(operation: str, element: str) -> Reduction | None:
    """None where the ISA has no such operation on the type."""
    if element not in _TYPES[operation]:
        return None
    if operation in _BITWISE:
        return _BITWISE[operation]
    if operation == "add":
        return np.add if element in _INTEGERS else lambda old, new: _sum(element, old, new)
    pick = np.minimum if operation == "min" else np.maximum
    if element in _HALVES:
        return lambda old, new: _extreme(element, pick, old, new)
    return lambda old, new: pick(_as(element, old), _as(element, new)).view(old.dtype)


def _as(element: str, raw: np.ndarray) -> np.ndarray:
    return raw.view(f"{'i' if element[0] == 's' else 'u'}{raw.itemsize}")


def _sum(element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    total: np.ndarray = apply(np.add, element, 8 * old.itemsize, old, new)
    if element == "f32" and any(((x & 0x7F800000 == 0) & (x & 0x7FFFFF != 0)).any() for x in (old, new, total)):
        raise NotModelled("a subnormal in a float32 sum")
    return total


def _extreme(element: str, pick: Callable[..., np.ndarray], old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if any((x & 0x7FFF > _INFINITY[element]).any() for x in (old, new)):
        raise NotModelled("a NaN in a minimum or maximum")
    return _ordered(pick(_ordered(old), _ordered(new)).astype(old.dtype)).astype(old.dtype)


def _ordered(raw: np.ndarray) -> np.ndarray:
    """16-bit floats as integers in their order, and back."""
    bits = raw.view(np.int16)
    return np.where(bits < 0, bits ^ 0x7FFF, bits).view(np.int16)
