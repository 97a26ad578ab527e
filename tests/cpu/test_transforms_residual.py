"""A product with a residual under every transformation, against the same of `jnp`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from transforms import BF16, F32, arrays, close, plain, run

import jax_bwgemm
from tests import cases
from tests.cases import GATES

pytestmark = pytest.mark.usefixtures("quiet")


_BATCHED = cases.Case(40, 24, 16, 3, a_batch=3, alpha=0.5, has_residual=True)
RESIDUALS = [
    dataclasses.replace(_BATCHED, b_batch=b_batch, has_bias=has_bias, activation=activation)
    for b_batch, has_bias, activation in (
        (3, False, None), (1, True, None), (3, False, "relu"), (1, True, "relu"), (3, False, "gelu"), (1, True, "silu"),
    )
]  # fmt: skip


def with_residual(f, case):
    """`f` of those operands that there are, by position."""
    return lambda a, b, *rest: f(case, a, b, rest[0] if case.has_bias else None, rest[-1])


def operands(case, seed=0):
    return [jnp.asarray(x) for x in (*case.inputs(seed), case.residual(seed)) if x is not None]


@pytest.mark.parametrize("case", RESIDUALS, ids=str)
def test_residual(case):
    a, b, bias = case.inputs()
    want = case.reference(a, b, bias, case.residual())
    cases.check(np.asarray(jax.jit(with_residual(run, case))(*operands(case))), want, case.out_dtype)


@pytest.mark.parametrize("case", RESIDUALS, ids=str)
def test_jvp_with_a_residual(case):
    """In all operands, and in each alone; the primal is the undifferentiated function's, bit by bit, if no gate's."""
    primals, tangents = operands(case), operands(case, 1)
    ours, theirs = with_residual(run, case), with_residual(plain, case)
    got = jax.jvp(ours, primals, tangents)
    close(got, jax.jvp(theirs, primals, tangents))
    if case.activation not in GATES:
        np.testing.assert_array_equal(got[0], ours(*primals))
    for i in range(len(primals)):
        alone = [functools.partial(lambda f, i, x: f(*primals[:i], x, *primals[i + 1 :]), f, i) for f in (ours, theirs)]
        close(*(jax.jvp(f, (primals[i],), (tangents[i],)) for f in alone))


@pytest.mark.parametrize("case", RESIDUALS, ids=str)
def test_gradients_with_a_residual(case):
    """The activation's mask is not the result's sign; the residual's gradient is the cotangent, bit by bit."""
    primals = operands(case)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((case.batch, case.m, case.n)), BF16)
    got, want = (jax.vjp(with_residual(f, case), *primals)[1](ct) for f in (run, plain))
    close(got, want, 2.0**-6)
    np.testing.assert_array_equal(got[-1], ct)


def test_a_large_residual_hides_no_activation():
    """Where the sum is rounded to the residual, or negative, relu's derivative is still 1 for what it lets through."""
    a, b, big = jnp.full((1, 1), 2.0**-6, BF16), jnp.ones((1, 8), BF16), jnp.full((1, 8), -1024.0, BF16)

    def f(b):
        return jax_bwgemm.matmul(a, b, activation="relu", residual=big).astype(F32).sum()

    np.testing.assert_array_equal(jax.grad(f)(b), np.full((1, 8), 2.0**-6))


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_grad_of_grad_with_a_residual(activation):
    case = dataclasses.replace(RESIDUALS[3], out_dtype="float32", activation=activation)
    a, b, bias, residual = operands(case)

    def twice(f):
        def loss(b):
            return jnp.tanh(f(case, a, b, bias, residual)).sum()

        return jax.grad(lambda b: (jax.grad(loss)(b).astype(F32) ** 2).sum())(b)

    close(twice(run), twice(plain), 2.0**-5)


RESIDUAL_AXES = [
    (0, None, None, 0), (0, None, None, None), (None, 0, None, 1), (None, 0, None, None), (None, None, None, 2),
    (None, None, 0, None), (None, None, 0, 3), (0, 0, 0, 3), (1, 2, None, 2), (2, 1, None, None), (0, None, 0, 1),
]  # fmt: skip
MAJORS = [cases.MAJORS[0], *(pytest.param(majors, marks=pytest.mark.long) for majors in cases.MAJORS[1:])]


@pytest.mark.parametrize("in_axes", RESIDUAL_AXES, ids=str)
@pytest.mark.parametrize("majors", MAJORS, ids="".join)
@pytest.mark.parametrize("batches", [(1, 1), (3, 3), (3, 1), (1, 3)], ids=str)
def test_vmap_with_a_residual(in_axes, majors, batches):
    """Every way for the mapped axis to join the product's dimensions, and the residual with it."""
    batch = max(batches)
    case = cases.Case(
        8, 24, 16, batch, a_major=majors[0], b_major=majors[1], a_batch=batches[0], b_batch=batches[1],
        alpha=0.5, has_bias=True, activation="relu", has_residual=True,
    )  # fmt: skip
    stacked = [
        x if axis is None else jnp.moveaxis(jnp.stack([x, -x, x[..., ::-1]]), 0, axis)
        for x, axis in zip(operands(case), in_axes, strict=True)
    ]
    got, want = (jax.vmap(with_residual(f, case), in_axes)(*stacked) for f in (run, plain))
    close(got, want)


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_residual_in_shard_map_scan_and_checkpoint(activation):
    """A residual network: the gradient of every operand, some shared by the devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, weights, bias = arrays((8, 16), (3, 16, 16), (16,))

    def network(mm, x, weights, bias):
        layer = jax.checkpoint(lambda x, w: (mm(x, w, bias, x), None))
        return lax.scan(layer, x, weights)[0]

    def theirs(x, w, bias, residual):
        z = getattr(jax.nn, activation)(jnp.matmul(x, w, preferred_element_type=F32) + bias.astype(F32))
        return (z + residual.astype(F32)).astype(BF16)

    def ours(x, w, bias, residual):
        return jax_bwgemm.matmul(x, w, bias=bias, activation=activation, residual=residual)

    def gradients(f):
        loss = lambda *args: f(*args).astype(F32).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weights, bias)

    specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x")}
    sharded = jax.shard_map(functools.partial(network, ours), mesh=mesh, **specs)
    want = gradients(functools.partial(network, theirs))
    close(gradients(functools.partial(network, ours)), want, 2.0**-5)
    close(gradients(sharded), want, 2.0**-5)
