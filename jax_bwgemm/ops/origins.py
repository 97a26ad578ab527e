"""Where an operand of a lowering comes from, read off the StableHLO that has been emitted so far. Emits nothing.

Operations of the same function are seen, and of those that it calls; of what an inner function is handed, only what the
module has by then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir

from jax_bwgemm.runtime.config import is_users

# Operations that XLA's loop fusion computes element by element. An operand that a constant makes is folded.
_FUSIBLE = {
    "abs", "add", "and", "atan2", "bitcast_convert", "broadcast_in_dim", "cbrt", "ceil", "clamp", "compare", "complex",
    "concatenate", "constant", "convert", "cosine", "count_leading_zeros", "divide", "dynamic_slice", "exponential",
    "exponential_minus_one", "floor", "gather", "imag", "iota", "is_finite", "log", "log_plus_one", "logistic",
    "maximum", "minimum", "multiply", "negate", "not", "or", "pad", "popcnt", "power", "real", "reduce_precision",
    "remainder", "reverse", "round_nearest_afz", "round_nearest_even", "rsqrt", "select", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "slice", "sqrt", "subtract", "tan", "tanh",
    "transpose", "xor",
}  # fmt: skip
_SLICES = ("stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.real_dynamic_slice", "stablehlo.dynamic_gather")
_RESHAPES = ("stablehlo.reshape", "stablehlo.dynamic_reshape")
_ANY = -1  # elements of an array whose sizes are symbols; MLIR's number for such a size is negative, too
_LEADING_ONLY = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def before_transpose(value: Any) -> tuple[Any, tuple[int, ...]] | None:
    """What `value` is a transpose of, and the dimensions of `value` in the order in which they lie there; else None.

    Seen through reshapes that add or drop dimensions of size 1 and, where the last two dimensions change places,
    through those of the leading ones.
    """
    shape, op = list(value.type.shape), defining_op(value)
    while op is not None and op.name in _LEADING_ONLY:
        value = op.operands[0]
        is_view = math.prod(value.type.shape) == math.prod(op.results[0].type.shape)
        if not is_view or (value.type.shape[-2:] != shape[-2:] and _no_units(value.type.shape) != _no_units(shape)):
            return None
        op = defining_op(value)
    if op is None or op.name != "stablehlo.transpose":
        return None
    order, rank = list(op.attributes["permutation"]), len(shape)
    made = list(value.type.shape)  # of the transpose
    if made == shape:
        return op.operands[0], tuple(order.index(i) for i in range(rank))
    if order == [*range(len(order) - 2), len(order) - 1, len(order) - 2] and made[-2:] == shape[-2:]:
        return op.operands[0], (*range(rank - 2), rank - 1, rank - 2)
    if _no_units(made) != _no_units(shape):
        return None
    units = [i for i, size in enumerate(shape) if size == 1]
    where = dict(zip(*([i for i, size in enumerate(x) if size != 1] for x in (made, shape)), strict=True))
    lying = (order.index(i) for i in range(len(order)))
    return op.operands[0], (*units, *(where[i] for i in lying if i in where))


def custom_call_before(value: Any, target: str) -> Any | None:
    """The custom call of `target` whose first result `value` is, seen through reshapes and barriers; else None."""
    op = defining_op(value)
    while op is not None and op.name in ("stablehlo.reshape", "stablehlo.optimization_barrier"):
        if len(op.operands) != 1:
            return None
        value = op.operands[0]
        op = defining_op(value)
    if op is None or op.name != "stablehlo.custom_call" or op.attributes["call_target_name"].value != target:
        return None
    return op if value == op.results[0] else None


def attribute(call: Any, name: str) -> str:
    """A text that a custom call of ours says."""
    text: str = call.attributes["mhlo.backend_config"][name].value
    return text


def _no_units(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def is_fusible(value: Any, module: Any) -> bool:
    """Whether XLA can compute `value` inside an operation that reads it once: it is made by elementwise arithmetic or
    by moving elements. Else it lies in memory: an argument, what a product, a library, a loop or another device made,
    or a slice without a gap of one of these.
    """
    op = defining_op(value)
    while op is not None and (op.name == "func.call" or _keeps_order(op)):
        value = _result_in_callee(op, value, module) if op.name == "func.call" else op.operands[0]
        op = defining_op(value)
    return op is not None and (op.name.startswith("chlo.") or op.name.removeprefix("stablehlo.") in _FUSIBLE)


def slice_step_bytes(value: Any, item_bytes: int, module: Any, seen: tuple[int, ...] = ()) -> int:
    """A number of bytes that divides the offset of `value` in the array that it is a slice (of a slice) of; 0 if it is
    no slice.

    XLA may hand a custom call a pointer into the array instead of a copy of the slice. `module`: the operation in which
    the function will be. `seen`: sizes of the inner functions' arguments on the way here.
    """
    step = 0
    calls: list[Any] = []
    while True:
        op = defining_op(value)
        if op is None and calls:
            value = calls.pop().operands[value.arg_number]
        elif op is None:
            return math.gcd(step, _handed_step_bytes(value, item_bytes, module, seen))
        elif op.name == "func.call":
            calls.append(op)
            value = _result_in_callee(op, value, module)
        elif op.name in (*_RESHAPES, *_SLICES):
            step = math.gcd(step, _offset_step_bytes(op, item_bytes) if op.name in _SLICES else 0)
            value = op.operands[0]
        else:
            return step


def users_line() -> tuple[str, int] | None:
    """The file and line, outside of this package and JAX, of what is being lowered; None where JAX does not know."""
    lines = re.findall(r'"([^"\n]+)":(\d+):\d+', str(ir.Location.current))
    return next(((name, int(line)) for name, line in lines if is_users(name)), None)


def named(ctx: Any, name: str) -> Any:
    """A context in which what is emitted has `name` behind that of its primitive, as profilers show it."""
    path = "/".join(filter(None, (str(ctx.name_stack), ctx.primitive.name, name)))
    return ir.Location.name(path, ir.Location.current)


def may_be_in_loop() -> bool:
    """Whether what is emitted now may belong to the body of a loop. That is a function of its own: `closed_call` in
    jax 0.10, and in jax 0.11 one that is no part of the module yet, since it will be inlined, as some others are."""
    op = ir.InsertionPoint.current.block.owner.operation
    while op.name not in ("stablehlo.while", "func.func"):
        op = op.parent.operation
    if op.name == "stablehlo.while" or not _is_attached(op):
        return True
    name: str = op.attributes["sym_name"].value
    return name.startswith("closed_call")


def _handed_step_bytes(argument: Any, item_bytes: int, module: Any, seen: tuple[int, ...]) -> int:
    """The same of an argument: the entry function's, and a loop's, are whole arrays. An inner function may be handed
    any slice of that size which the module has by now; whoever calls it later is not seen. Where sizes are symbols,
    any may be alike."""
    size, entry = _num_elements(argument), argument.owner.owner.operation
    if entry.name != "func.func" or (_is_attached(entry) and _is_public(entry)):
        return 0
    if size in seen:
        return item_bytes if size == _ANY else 0
    slices = (op for function in _functions(module) for op in _operations(function.regions[0]) if op.name in _SLICES)
    results = (op.results[0] for op in slices if _ANY in (size, made := _num_elements(op.results[0])) or made == size)
    alike = (value for value in results if value.type.element_type == argument.type.element_type)
    return math.gcd(*(slice_step_bytes(value, item_bytes, module, (*seen, size)) for value in alike))


def _offset_step_bytes(op: Any, item_bytes: int) -> int:
    """What divides the offset of a slice in its operand; of sizes that are symbols, 1."""
    shape = op.operands[0].type.shape
    if op.name not in _SLICES[:2]:
        return item_bytes
    strides = [math.prod(max(size, 1) for size in shape[i + 1 :]) * item_bytes for i in range(len(shape))]
    if op.name == "stablehlo.slice":
        return sum(start * stride for start, stride in zip(op.attributes["start_indices"], strides, strict=True))
    return math.gcd(*_moving(strides, shape, op.results[0].type.shape))


def _num_elements(value: Any) -> int:
    sizes = value.type.shape
    return _ANY if any(size < 0 for size in sizes) else math.prod(sizes)


def _functions(module: Any) -> Iterator[Any]:
    return (op.operation for op in module.regions[0].blocks[0] if op.operation.name == "func.func")


def _operations(region: Any) -> Iterator[Any]:
    for block in region:
        for op in block:
            yield op.operation
            for inner in op.operation.regions:
                yield from _operations(inner)


def _is_attached(function: Any) -> bool:
    """Newer versions of the bindings raise where older ones give None."""
    try:
        return function.parent is not None
    except ValueError:
        return False


def _is_public(function: Any) -> bool:
    return "sym_visibility" not in function.attributes or function.attributes["sym_visibility"].value == "public"


def _keeps_order(op: Any) -> bool:
    """A reshape, or a slice without a gap: nothing is moved, a pointer says it all."""
    if op.name not in (*_LEADING_ONLY, "stablehlo.slice", "stablehlo.dynamic_slice"):
        return False
    shape, part = op.operands[0].type.shape, op.results[0].type.shape
    if op.name in _LEADING_ONLY:
        return bool(math.prod(shape) == math.prod(part))
    if op.name == "stablehlo.slice" and any(stride != 1 for stride in op.attributes["strides"]):
        return False
    first = next((i for i, size in enumerate(part) if size != 1), len(part))  # the slowest that has several elements
    return list(shape[first + 1 :]) == list(part[first + 1 :])


def _result_in_callee(call: Any, value: Any, module: Any) -> Any:
    """Where the function that `call` calls makes `value`, one of its results."""
    name = call.attributes["callee"].value
    function = next(op for op in _functions(module) if op.attributes["sym_name"].value == name)
    returned = list(function.regions[0].blocks[0])[-1]
    return returned.operands[list(call.results).index(value)]


def _moving(strides: Sequence[int], shape: Sequence[int], sliced: Sequence[int]) -> list[int]:
    """The strides of the dimensions along which a dynamic slice can move."""
    return [stride for stride, size, part in zip(strides, shape, sliced, strict=True) if size != part]


def defining_op(value: Any) -> Any | None:
    """The operation whose result `value` is; None for an argument of the enclosing function."""
    return getattr(value.owner, "operation", None)
