"""Where an operand of a lowering comes from, read off the StableHLO that has been emitted so far. Emits nothing.

Only operations of the same function are seen: an operand that is an argument of it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LEADING_ONLY = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def before_transpose(value: Any) -> Any | None:
    """The operand of a transpose of the last two dimensions, seen through reshapes of the leading ones; else None."""
    op = _defining_op(value)
    last_two = value.type.shape[-2:]
    while op is not None and op.name in _LEADING_ONLY:
        value = op.operands[0]
        if value.type.shape[-2:] != last_two or math.prod(value.type.shape) != math.prod(op.results[0].type.shape):
            return None
        op = _defining_op(value)
    if op is None or op.name != "stablehlo.transpose":
        return None
    order = list(op.attributes["permutation"])
    rank = len(order)
    return op.operands[0] if order == [*range(rank - 2), rank - 1, rank - 2] else None


def slice_step_bytes(value: Any, item_bytes: int) -> int:
    """A number of bytes that divides the offset of `value` in the array that it is a slice (of a slice) of; 0 if it is
    no slice.

    XLA may hand a custom call a pointer into the array instead of a copy of the slice.
    """
    step, op = 0, _defining_op(value)
    while op is not None and op.name in ("stablehlo.reshape", "stablehlo.slice", "stablehlo.dynamic_slice"):
        shape = op.operands[0].type.shape
        strides = [math.prod(shape[i + 1 :]) * item_bytes for i in range(len(shape))]
        if op.name == "stablehlo.slice":
            starts = op.attributes["start_indices"]
            step = math.gcd(step, sum(start * stride for start, stride in zip(starts, strides, strict=True)))
        elif op.name == "stablehlo.dynamic_slice":
            step = math.gcd(step, *_moving(strides, shape, op.results[0].type.shape))
        op = _defining_op(op.operands[0])
    return step


def _moving(strides: Sequence[int], shape: Sequence[int], sliced: Sequence[int]) -> list[int]:
    """The strides of the dimensions along which a dynamic slice can move."""
    return [stride for stride, size, part in zip(strides, shape, sliced, strict=True) if size != part]


def _defining_op(value: Any) -> Any | None:
    """The operation whose result `value` is; None for an argument of the enclosing function."""
    return getattr(value.owner, "operation", None)
