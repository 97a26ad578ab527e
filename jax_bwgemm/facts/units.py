"""What a layer does to the product that makes its hidden values, forward and backward, as epilogues.

A unit is `activation(x @ w + bias)`; a gated one is `activation(x @ w_gate + bias) * (x @ w_up + bias_up)`. Under
differentiation it also returns what goes into the activation; and the product that makes the cotangent of its result
turns that into the cotangents of its sums, which is `pullback`.
"""

from __future__ import annotations

from jax_bwgemm.facts.derivative import ZERO, derivative, mul
from jax_bwgemm.facts.epilogue import ACC, ACTIVATIONS, BIAS, UP, Apply, Epilogue, Input, Node, Reduction

BEFORE, BEFORE_UP = Input("before", "mn"), Input("before_up", "mn")  # what goes in, of each b, as a matrix
BIAS_UP = Input("bias_up", "n")


def unit(activation: str, is_gated: bool = False, has_bias: bool = False) -> Epilogue:
    """Its result alone. ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` requires one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return Epilogue(_result(activation, _sums(is_gated, has_bias)))


def kept(activation: str, is_gated: bool = False, has_bias: bool = False) -> Epilogue:
    """Its result, and what goes in; relu's result tells that by itself."""
    plain = unit(activation, is_gated, has_bias)
    if activation == "relu" and not is_gated:
        return plain
    roles = (BEFORE.role, BEFORE_UP.role)
    return Epilogue(plain.out, seconds=tuple(zip(roles, _sums(is_gated, has_bias), strict=False)))


def pullback(activation: str, is_gated: bool = False, has_bias: bool = False) -> Epilogue:
    """Its sums are the cotangent of a unit's result, what it reads is what went in (relu: the result), and its results
    are the cotangents of the unit's sums: the first, and of a gated one `up`. With biases, theirs come last: the
    results, summed over m."""
    saved = (BEFORE, BEFORE_UP) if is_gated else (BEFORE,)
    out = _result(activation, saved)
    nodes = [_times(derivative(out, x)) for x in saved]
    roles = (BIAS.role, BIAS_UP.role) if has_bias else ()
    reductions = tuple(Reduction(f"{role}_ct", "sum", "n", node) for role, node in zip(roles, nodes, strict=False))
    return Epilogue(nodes[0], seconds=tuple((UP.role, node) for node in nodes[1:]), reductions=reductions)


def _times(slope: Node) -> Node:
    """The sums times a slope; where that is one or nothing, the sums or nothing, whatever they are."""
    if isinstance(slope, Apply) and slope.op == "gt":
        return Apply("where", (slope, ACC, ZERO))
    return mul(ACC, slope)


def _sums(is_gated: bool, has_bias: bool) -> tuple[Node, ...]:
    sums: tuple[Node, ...] = (ACC, UP) if is_gated else (ACC,)
    if has_bias:
        sums = tuple(Apply("add", (x, bias)) for x, bias in zip(sums, (BIAS, BIAS_UP), strict=False))
    return sums


def _result(activation: str, sums: tuple[Node, ...]) -> Node:
    active = Apply(activation, (sums[0],))
    return Apply("mul", (active, sums[1])) if len(sums) > 1 else active
