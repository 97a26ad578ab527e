"""Expressions of an epilogue from what JAX traces: every operation is known, and means what was traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.facts.epilogue import ACC, BIAS, RESIDUAL, Apply, Epilogue, Input, Node
from jax_bwgemm.facts.epilogue import OPS as KNOWN_OPS
from jax_bwgemm.ops.reference import OPS, finish
from jax_bwgemm.ops.tracing import Leaf, UnfusableError, epilogue_of, trees_of

LEAVES = tuple(map(Leaf, ("acc", "bias", "residual")))
INPUTS = dict(zip(LEAVES, (ACC, BIAS, RESIDUAL), strict=True))


def traced(f: Callable[..., Any], dtype: Any = jnp.float32, num: int = 3) -> Epilogue:
    jaxpr = jax.make_jaxpr(f)(*[jax.ShapeDtypeStruct((4, 8), dtype)] * num)
    (tree,) = trees_of(jaxpr, LEAVES[:num])
    return epilogue_of([tree], INPUTS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_known(op: str, dtype: str) -> None:
    args = (ACC, BIAS, RESIDUAL)[: KNOWN_OPS[op].num_args]
    assert traced(OPS[op], jnp.dtype(dtype), len(args)).out == Apply(op, args)


def nodes() -> st.SearchStrategy[Node]:
    inner: st.SearchStrategy[Node] = st.sampled_from((ACC, BIAS, RESIDUAL))

    def larger(smaller: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        return st.sampled_from(sorted(OPS)).flatmap(
            lambda op: st.tuples(*[smaller] * KNOWN_OPS[op].num_args).map(lambda args: Apply(op, args))
        )

    return st.recursive(inner, larger, max_leaves=6)


def operands(epilogue: Epilogue, known: dict[Input, Any]) -> list[Any]:
    return [known[x] for x in epilogue.operands]


@settings(max_examples=60, deadline=None)
@given(nodes())
def test_what_was_traced_is_what_is_meant(node: Node) -> None:
    """Of any expression: the same values, if perhaps in another form, such as silu for x * sigmoid(x)."""
    rng = np.random.default_rng(0)
    known = {x: jnp.asarray(rng.standard_normal((4, 8)), jnp.float32) for x in (ACC, BIAS, RESIDUAL)}
    given = Epilogue(node)

    def f(acc: Any, bias: Any, residual: Any) -> Any:
        own = {ACC: acc, BIAS: bias, RESIDUAL: residual}
        return finish((acc,), given, operands(given, own), jnp.float32)[0]

    found = traced(f)
    (got,) = finish((known[ACC],), found, operands(found, known), jnp.float32)
    np.testing.assert_allclose(got, f(*known.values()), rtol=1e-5, atol=1e-5)


def test_constants_are_compiled_in_but_a_scale() -> None:
    found = traced(lambda acc, bias, residual: jax.nn.relu(2.0 * acc + bias) * 3 + residual)
    assert str(found.out) == "add(mul(relu(add(mul(acc, alpha), bias:n)), 3.0), residual:mn)"
    assert found.scalars == (("alpha", 2.0),)


SCALES = {
    "times": (lambda acc, b, r: acc * 0.1 + r, 0.1),
    "the other way round": (lambda acc, b, r: r + 0.1 * acc, 0.1),
    "less": (lambda acc, b, r: r - acc, -1.0),
    "less a part": (lambda acc, b, r: r - 0.1 * acc, -0.1),
    "less what it was divided by": (lambda acc, b, r: r - acc / 8, -0.125),
    "by a power of two": (lambda acc, b, r: acc / -4.0 + r, -0.25),
}


@pytest.mark.parametrize("f, alpha", SCALES.values(), ids=SCALES)
def test_a_part_of_the_sums_is_added(f: Callable[..., Any], alpha: float) -> None:
    """As of gradients that are averaged, or of a step of gradient descent: one kernel, whatever the part."""
    found = traced(f)
    assert str(found.out) == "add(mul(acc, alpha), residual:mn)" and found.kind == "scale_residual"
    assert dict(found.scalars)["alpha"] == pytest.approx(alpha, rel=1e-7)


@pytest.mark.parametrize("by", [3.0, 0.0, float("inf")])
def test_a_division_that_no_scale_is(by: float) -> None:
    """Whose result would be another."""
    assert str(traced(lambda acc, b, r: acc / by + r).out).startswith("add(div(acc, ")


def test_the_sums_stand_first() -> None:
    """As the names of kernels have it."""
    for f in (lambda a, b, r: r + jax.nn.gelu(b + a), lambda a, b, r: jax.nn.gelu(a + b) + r):
        assert traced(f).kind == "bias_gelu_residual"


@pytest.mark.parametrize(
    "f, what",
    [
        (lambda a, b, r: jnp.cumsum(a, 0), "`cumsum`"),
        (lambda a, b, r: a - a.max(), "`reduce_max`"),
        (lambda a, b, r: a.T @ b, "`transpose`"),
        (lambda a, b, r: jnp.sin(a), "`sin`"),
        (lambda a, b, r: a.astype(jnp.int32) * 2, "`convert_element_type` from float32 to int32"),
        (lambda a, b, r: a.astype(jnp.float8_e4m3fn).astype(jnp.float32), "from float32 to float8_e4m3fn"),
        (lambda a, b, r: jnp.sort(a), "`sort`"),
        (lambda a, b, r: a + np.ones((4, 8), np.float32), "a constant of float32"),
        (lambda a, b, r: own(a), "a function with a derivative of its own"),
        (lambda a, b, r: doubled(a, 40), "an expression of more than 256 operations"),
    ],
)
def test_what_is_none_is_named(f: Any, what: str) -> None:
    with pytest.raises(UnfusableError, match=what):
        traced(f)


def doubled(x: Any, num: int) -> Any:
    """A tree of 2**num leaves."""
    for _ in range(num):
        x = x + x
    return x


@jax.custom_jvp
def own(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


own.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0]))
