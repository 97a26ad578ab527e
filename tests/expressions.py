"""What the expressions of an epilogue mean, in float64: written anew, for tests of what computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from jax_bwgemm.facts.epilogue import Apply, Const, Input, Node
from tests.cases import ACTIVATIONS

OPS: dict[str, Callable[..., np.ndarray]] = {
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
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "gt": lambda x, y: (x > y).astype(np.float64),
    "ge": lambda x, y: (x >= y).astype(np.float64),
    "eq": lambda x, y: (x == y).astype(np.float64),
    "where": lambda x, y, z: np.where(x != 0, y, z),
    **{name: function for name, function in ACTIVATIONS.items() if name},
}


def evaluate(node: Node, values: Mapping[str, np.ndarray | float]) -> np.ndarray:
    """Of inputs by role; vectors along m have shape (m, 1)."""
    if isinstance(node, Const):
        return np.asarray(node.value)
    if isinstance(node, Input):
        return np.asarray(values[node.role], np.float64)
    assert isinstance(node, Apply)
    return OPS[node.op](*(evaluate(arg, values) for arg in node.args))
