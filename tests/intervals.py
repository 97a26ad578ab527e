"""In which interval a computed epilogue lies: the expression evaluated in float64 on intervals, each operation wider by
what it may be wrong itself. `float32` and its approximations are all that enters: no bound is fitted to a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_bwgemm.bench.accuracy import FLOAT64
from jax_bwgemm.facts.epilogue import Apply, Const, Input, Node, inputs

Interval = tuple[np.ndarray, np.ndarray]  # of each element: the least and the largest
ULP, TINY = 2.0**-24, 2.0**-120  # of float32, relative: half of one; more than what is flushed to zero
DIPS = {"silu": -1.2784645427610738, "gelu": -0.7524613220960823, "gelu_exact": -0.7517915246935645}  # of the least
RISING = ("exp", "log", "sqrt", "erf", "relu", "squared_relu", "leaky_relu", "sigmoid", "tanh")
CUT = 3  # operations in one another: of a gelu's, with what is used twice twice, more than MAX_SIZE
EXACT = ("max", "min", "neg", "abs", "gt", "ge", "eq", "where", "relu")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Who computes: a kernel whose result is `coarse` has tanh.approx (2**-10.9, seen on an H200) in its activations;
    others have ex2.approx, lg2.approx and rcp.approx (2**-22, PTX ISA), within 2**-20 of themselves;
    `xla` writes a gelu as x * (1 + tanh(...)) / 2, which loses digits where that is small. `before`: by how much, for
    its magnitude, is rounded what is computed before the product, since it reads operands and no sums: a vector, and a
    matrix behind several operations, which `ops.tracing.MAX_SIZE` may cut off."""

    coarse: bool = False
    xla: bool = False
    before: float = 0.0

    def error(self, op: str, x: np.ndarray, value: np.ndarray) -> Any:
        """By how much a `value` of `op` may be wrong; x: its first argument's magnitude."""
        if op in EXACT:
            return 0.0
        if op in ("add", "sub", "mul", "square", "squared_relu", "leaky_relu"):
            return 2 * ULP * value + TINY
        if self.coarse and op in ("silu", "gelu"):
            return 2.0**-11.9 * x + TINY
        if self.coarse and op in ("sigmoid", "tanh"):
            return 2.0 ** (-11.9 if op == "sigmoid" else -10.9)
        if op == "gelu_exact" or (self.xla and op == "gelu"):
            return 2.0**-20 * x + TINY
        if op in ("silu", "gelu", "sigmoid"):
            return 2.0**-18 * value + 2.0**-30 * np.maximum(x, 1.0)
        if op == "exp":
            return (2.0**-21 + 2 * ULP * x) * value + TINY
        if op == "log":
            return 2.0**-21 * np.maximum(value, 1.0)
        return 2.0**-20 * value + TINY


def interval(
    node: Node, known: Mapping[Node, Interval], of: Arithmetic, done: dict[Node, Interval] | None = None
) -> Interval:
    """Of an expression, of intervals of its inputs."""
    done = {} if done is None else done
    if isinstance(node, Const):
        value = np.float64(np.float32(node.value))
        return value, value
    if isinstance(node, Input):
        return known[node]
    if node not in done:
        args = [interval(arg, known, of, done) for arg in node.args]
        low, high = _exact(node.op, args)
        magnitudes = [np.maximum(np.abs(x), np.abs(y)) for x, y in (args[0], (low, high))]
        error = of.error(node.op, *magnitudes) + of.before * _is_before(node) * magnitudes[1]
        done[node] = low - error, high + error
    return done[node]


def _is_before(node: Node) -> bool:
    places = {x.place for x in inputs(node)} - {"scalar", "one"}
    return places in ({"m"}, {"n"}) or ("mn" in places and "acc" not in places and _depth(node) >= CUT)


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, node.args)) if isinstance(node, Apply) else 0


def _exact(op: str, args: list[Interval]) -> Interval:
    """Of an operation without errors."""
    function, (low, high) = FLOAT64[op], args[0]
    if op in RISING:
        return function(low), function(high)
    if op in ("rsqrt", "neg"):
        return function(high), function(low)
    if op in ("abs", "square"):
        ends = function(low), function(high)
        return np.where(low * high <= 0, 0.0, np.minimum(*ends)), np.maximum(*ends)
    if op in DIPS:
        ends = function(low), function(high)
        dips = (low < DIPS[op]) & (high > DIPS[op])
        return np.where(dips, function(np.float64(DIPS[op])), np.minimum(*ends)), np.maximum(*ends)
    if op == "where":
        return _chosen(*args)
    other_low, other_high = args[1]
    if op == "sub":
        return low - other_high, high - other_low
    if op in ("gt", "ge"):
        return function(low, other_high), function(high, other_low)
    if op == "eq":
        is_known = (low == high) & (other_low == other_high)
        meet = (low <= other_high) & (high >= other_low)
        return np.where(is_known, meet, 0.0), meet.astype(np.float64)
    if op in ("mul", "div"):
        ends = [function(x, y) for x in (low, high) for y in (other_low, other_high)]
        return np.minimum.reduce(np.broadcast_arrays(*ends)), np.maximum.reduce(np.broadcast_arrays(*ends))
    return function(low, other_low), function(high, other_high)


def _chosen(condition: Interval, x: Interval, y: Interval) -> Interval:
    """Either, where the condition is not known."""
    low, high = condition
    takes_x, takes_y = (low != 0) | (high != 0), (low <= 0) & (high >= 0)
    lows = np.minimum(np.where(takes_x, x[0], np.inf), np.where(takes_y, y[0], np.inf))
    return lows, np.maximum(np.where(takes_x, x[1], -np.inf), np.where(takes_y, y[1], -np.inf))


def rounded(found: Interval, dtype: Any) -> Interval:
    """As a result has them: rounding keeps the order, so what lay in an interval lies between its rounded ends."""
    low, high = (x.astype(np.float32).astype(dtype).astype(np.float64) for x in found)
    return low, high
