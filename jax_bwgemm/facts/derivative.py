"""The derivative of an epilogue's expression by one of its inputs, as an expression: of gradients in kernels.

At kinks it is what JAX has: 0 for relu, 1 for abs, and half of each for the larger of two that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax_bwgemm.facts.epilogue import Apply, Const, Input, Node

ZERO, ONE = Const(0.0), Const(1.0)
GELU = 2 * math.sqrt(2 / math.pi)


def derivative(node: Node, by: Input) -> Node:
    """d node / d by. Each value is in it as often as in `node`, or a few times more; equal parts are computed once."""
    if node == by:
        return ONE
    if not isinstance(node, Apply):
        return ZERO
    if node.op == "where":
        condition, x, y = node.args
        return where(condition, derivative(x, by), derivative(y, by))
    terms = [mul(slope, derivative(arg, by)) for slope, arg in zip(_slopes(node), node.args, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


def _slopes(node: Apply) -> tuple[Node, ...]:
    """Of an operation, in each of its arguments."""
    return SLOPES[node.op](*node.args, node)


def add(x: Node, y: Node) -> Node:
    return y if x == ZERO else x if y == ZERO else Apply("add", (x, y))


def sub(x: Node, y: Node) -> Node:
    return x if y == ZERO else Apply("sub", (x, y))


def mul(x: Node, y: Node) -> Node:
    if ZERO in (x, y):
        return ZERO
    return y if x == ONE else x if y == ONE else Apply("mul", (x, y))


def where(condition: Node, x: Node, y: Node) -> Node:
    return x if x == y else Apply("where", (condition, x, y))


def neg(x: Node) -> Node:
    return Apply("neg", (x,))


def _sigmoid(x: Node) -> Node:
    return Apply("sigmoid", (x,))


def _gate(x: Node, inner: Node, slope: Node) -> Node:
    """Of x * sigmoid(inner), where inner has this slope."""
    s = _sigmoid(inner)
    return Apply("mul", (s, add(ONE, mul(mul(x, slope), sub(ONE, s)))))


def _gelu(x: Node) -> Node:
    inner = mul(x, add(Const(GELU), mul(Const(0.044715 * GELU), Apply("square", (x,)))))
    return _gate(x, inner, add(Const(GELU), mul(Const(3 * 0.044715 * GELU), Apply("square", (x,)))))


def _gelu_exact(x: Node) -> Node:
    below = mul(Const(0.5), add(ONE, Apply("erf", (mul(x, Const(math.sqrt(0.5))),))))
    density = mul(Const(1 / math.sqrt(2 * math.pi)), Apply("exp", (mul(Const(-0.5), Apply("square", (x,))),)))
    return add(below, mul(x, density))


def _sign(x: Node) -> Node:
    return where(Apply("ge", (x, ZERO)), ONE, Const(-1.0))


def _extreme(larger: Node, smaller: Node) -> tuple[Node, ...]:
    half = Const(0.5)
    is_equal = Apply("eq", (larger, smaller))
    is_larger = Apply("gt", (larger, smaller))
    return where(is_equal, half, is_larger), where(is_equal, half, sub(ONE, is_larger))


def _inverse(x: Node) -> Node:
    return Apply("div", (ONE, x))


# Of each operation but `where`: its arguments, then the operation itself -> slopes.
SLOPES: dict[str, Callable[..., tuple[Node, ...]]] = {
    "add": lambda x, y, own: (ONE, ONE),
    "sub": lambda x, y, own: (ONE, Const(-1.0)),
    "mul": lambda x, y, own: (y, x),
    "div": lambda x, y, own: (_inverse(y), neg(Apply("div", (own, y)))),
    "max": lambda x, y, own: _extreme(x, y),
    "min": lambda x, y, own: _extreme(x, y)[::-1],
    "neg": lambda x, own: (Const(-1.0),),
    "abs": lambda x, own: (_sign(x),),
    "square": lambda x, own: (mul(Const(2.0), x),),
    "exp": lambda x, own: (own,),
    "log": lambda x, own: (_inverse(x),),
    "sqrt": lambda x, own: (mul(Const(0.5), _inverse(own)),),
    "rsqrt": lambda x, own: (mul(Const(-0.5), mul(own, Apply("square", (own,)))),),
    "erf": lambda x, own: (mul(Const(2 / math.sqrt(math.pi)), Apply("exp", (neg(Apply("square", (x,))),))),),
    "gt": lambda x, y, own: (ZERO, ZERO),
    "ge": lambda x, y, own: (ZERO, ZERO),
    "eq": lambda x, y, own: (ZERO, ZERO),
    "relu": lambda x, own: (Apply("gt", (x, ZERO)),),
    "gelu": lambda x, own: (_gelu(x),),
    "silu": lambda x, own: (_gate(x, x, ONE),),
    "sigmoid": lambda x, own: (mul(own, sub(ONE, own)),),
    "tanh": lambda x, own: (sub(ONE, Apply("square", (own,))),),
    "gelu_exact": lambda x, own: (_gelu_exact(x),),
    "squared_relu": lambda x, own: (mul(Const(2.0), Apply("relu", (x,))),),
    "leaky_relu": lambda x, own: (where(Apply("ge", (x, ZERO)), ONE, Const(0.01)),),
}
