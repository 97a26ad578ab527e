"""Derivatives as expressions are JAX's own derivatives of what the operations mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.facts.derivative import SLOPES, derivative
from jax_bwgemm.facts.epilogue import ACC, OPS, UP, Apply, Const, Input, inputs, parse
from jax_bwgemm.ops.reference import evaluate

X = Input("residual", "mn")


def _same(text: str, values: np.ndarray) -> None:
    """By each input, at `values` of the one and others of the rest."""
    node = parse(text)
    known = {x.role: jnp.asarray(np.roll(values, i)) for i, x in enumerate(inputs(node))}
    for x in inputs(node):
        want = jax.grad(lambda v, x=x: evaluate(node, known | {x.role: v}).sum())(known[x.role])
        got = jnp.broadcast_to(evaluate(derivative(node, x), known), want.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=f"{node} by {x}: {derivative(node, x)}")


def test_every_operation_has_slopes() -> None:
    assert set(SLOPES) == set(OPS) - {"where"}


@pytest.mark.parametrize("op", sorted(OPS))
def test_of_an_operation(op: str) -> None:
    args = (ACC, X, UP)[: OPS[op].num_args]
    positive = op in ("log", "sqrt", "rsqrt", "div")
    values = np.linspace(0.3 if positive else -3.1, 4, 23, dtype=np.float32)
    _same(str(Apply(op, args)), values)


@pytest.mark.parametrize("op", ["relu", "max", "min", "abs", "leaky_relu", "squared_relu"])
def test_at_a_kink(op: str) -> None:
    args = (ACC, Const(0.0))[: OPS[op].num_args]
    node, zero = Apply(op, args), jnp.zeros(3)
    want = jax.grad(lambda v: evaluate(node, {"acc": v}).sum())(zero)
    np.testing.assert_array_equal(jnp.broadcast_to(evaluate(derivative(node, ACC), {"acc": zero}), (3,)), want)


def test_of_what_is_composed() -> None:
    values = np.linspace(-2, 2, 17, dtype=np.float32)
    _same("mul(silu(add(mul(acc, 0.5), bias:n)), up)", values)
    _same("add(mul(gelu(acc), sigmoid(residual:mn)), where(gt(acc, residual:mn), square(acc), up))", values)
    _same("div(exp(neg(acc)), add(1.0, square(residual:mn)))", values)


def test_of_what_is_not_there() -> None:
    assert derivative(parse("silu(acc)"), X) == Const(0.0)
    assert derivative(ACC, ACC) == Const(1.0)
    assert str(derivative(parse("add(mul(acc, 3.0), residual:mn)"), ACC)) == "3.0"
