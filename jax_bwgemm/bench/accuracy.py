"""Relative error against float64 on the same inputs. Knows no clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from jax_bwgemm.bench.cases import Case
from jax_bwgemm.facts.epilogue import Const, Input, Node

NUM_ROWS, NUM_COLS = 64, 512  # of the result; float64 of all 8192x8192x8192 would take minutes, and elements are alike


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some elements of the result, of the last matrix of a batch: rows x columns, and their float64."""

    rows: np.ndarray
    cols: np.ndarray
    expected: np.ndarray

    def error(self, result: np.ndarray) -> float:
        """|result - expected| / |expected| in the Frobenius norm, over the sample; `result` is whole."""
        return self.distance(result) / float(np.linalg.norm(self.expected))

    def distance(self, result: np.ndarray) -> float:
        """|result - expected|, likewise."""
        matrix = result.reshape(-1, *result.shape[-2:])[-1]
        difference = matrix[np.ix_(self.rows, self.cols)].astype(np.float64) - self.expected
        return float(np.linalg.norm(difference))


def sample(case: Case, operands: Mapping[str, np.ndarray], seed: int = 0) -> Sample:
    """The case's formula in float64, from its operands as stored."""
    rng = np.random.default_rng(seed)
    rows, cols = rng.permutation(case.m)[:NUM_ROWS], rng.permutation(case.n)[:NUM_COLS]
    last = {name: x[-1] if case.batch > 1 and name != "bias" else x for name, x in operands.items()}
    a = (last["a"][:, rows].T if case.form[0] == "t" else last["a"][rows]).astype(np.float64)

    def times(b: np.ndarray) -> np.ndarray:
        return a @ (b[cols].T if case.form[1] == "t" else b[:, cols]).astype(np.float64)

    x = times(last["b"])
    for step in case.steps:
        if step == "swiglu":
            x = FLOAT64["silu"](x) * times(last["up"])
        elif step == "bias":
            x = x + last["bias"][cols].astype(np.float64)
        elif step == "residual":
            x = x + last["residual"][np.ix_(rows, cols)].astype(np.float64)
        else:
            x = FLOAT64[step](x)
    return Sample(rows, cols, x)


def evaluate(node: Node, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """An epilogue's expression in float64, of inputs by their roles."""
    if isinstance(node, Input):
        return known[node.role]
    if isinstance(node, Const):
        return np.asarray(node.value)
    return FLOAT64[node.op](*(evaluate(arg, known) for arg in node.args))


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


FLOAT64: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "square": np.square,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": _erf,
    "gt": lambda x, y: np.greater(x, y).astype(np.float64),
    "ge": lambda x, y: np.greater_equal(x, y).astype(np.float64),
    "eq": lambda x, y: np.equal(x, y).astype(np.float64),
    "where": lambda x, y, z: np.asarray(np.where(np.asarray(x) != 0, y, z)),
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu_exact": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "squared_relu": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
}  # written out anew, for the tests of all other readers
