"""Every transformation against the same of `jnp`, on values whose products are rounded alike, and against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from transforms import BF16, F32, arrays, close, plain, run

import jax_bwgemm
from tests import cases
from tests.cases import GATES

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_values(case):
    a, b, bias = case.inputs()
    got = jax.jit(functools.partial(run, case))(*map(jnp.asarray, (a, b)), bias)
    assert got.dtype == case.out_dtype
    cases.check(np.asarray(got), case.reference(a, b, bias), case.out_dtype)


GRAD_CASES = [*cases.BATCHES, *cases.BY_MAJORS[::2], *cases.BY_DTYPES, *cases.EPILOGUES]


@pytest.mark.parametrize("case", GRAD_CASES, ids=str)
def test_gradients(case):
    """Against float64 differentiation of the same inputs, within the bound of the operands' dtype."""
    a, b, bias = case.inputs()
    operands = [jnp.asarray(x) for x in (a, b, bias) if x is not None]
    ct = np.random.default_rng(1).standard_normal((case.batch, case.m, case.n)).astype(cases.DTYPES[case.out_dtype])
    out, pullback = jax.vjp(lambda a, b, *c: run(case, a, b, c[0] if c else None), *operands)
    got = pullback(jnp.asarray(ct))
    slope = (np.asarray(out, np.float64) > 0) if case.activation == "relu" else case.slope(a, b, bias)
    z = case.alpha * ct.astype(np.float64) * slope
    a, b = a.astype(np.float64), b.astype(np.float64)
    rows = a if case.a_major == "k" else a.swapaxes(1, 2)
    cols = b if case.b_major == "n" else b.swapaxes(1, 2)
    d_a, d_b = z @ cols.swapaxes(1, 2), rows.swapaxes(1, 2) @ z
    d_a = d_a.sum(0, keepdims=True) if case.a_batch == 1 else d_a
    d_b = d_b.sum(0, keepdims=True) if case.b_batch == 1 else d_b
    want = [d_a if case.a_major == "k" else d_a.swapaxes(1, 2), d_b if case.b_major == "n" else d_b.swapaxes(1, 2)]
    for g, w, x in zip(got, want, operands, strict=False):
        assert (g.shape, g.dtype) == (x.shape, x.dtype)
        roundings = 2 + (case.activation in GATES)  # the cotangent's and the result's, and of gates the slope's
        cases.check(np.asarray(g), w, case.dtype, roundings)
    if bias is not None:
        want_bias = (z / case.alpha).sum((0, 1))
        assert cases.relative_error(np.asarray(got[2]), want_bias) < 0.05  # jnp sums it in bfloat16


@pytest.mark.parametrize("case", [*cases.BATCHES[::2], *cases.EPILOGUES[:8]], ids=str)
def test_jvp(case):
    primals = [jnp.asarray(x) for x in case.inputs() if x is not None]
    tangents = [jnp.asarray(x) for x in case.inputs(1) if x is not None]

    def call(f):
        return jax.jvp(lambda a, b, *c: f(case, a, b, c[0] if c else None), primals, tangents)

    close(call(run), call(plain), 2.0**-6 if case.activation in GATES else 2.0**-7)


def test_jvp_in_one_operand():
    a, b, d = arrays((8, 16), (16, 24), (16, 24))
    close(
        jax.jvp(lambda b: jax_bwgemm.matmul(a, b, activation="relu"), (b,), (d,)),
        jax.jvp(lambda b: jax.nn.relu(a @ b), (b,), (d,)),
    )


@pytest.mark.parametrize(
    "shapes",
    [
        ((16,), (16, 24)),
        ((8, 16), (16,)),
        ((16,), (16,)),
        ((3, 8, 16), (16,)),
        ((2, 1, 8, 16), (3, 16, 24)),
        ((16,), (3, 16, 24)),
    ],
    ids=str,
)
def test_grad_of_matmuls_shapes(shapes):
    a, b = arrays(*shapes)

    def loss(f):
        return jax.value_and_grad(lambda a, b: jnp.sin(f(a, b).astype(F32)).sum(), (0, 1))(a, b)

    close(loss(jax_bwgemm.matmul), loss(jnp.matmul), 2.0**-5)


@pytest.mark.parametrize("majors", cases.MAJORS, ids="".join)
def test_hvp_and_grad_of_grad(majors):
    case = cases.Case(8, 24, 16, out_dtype="float32", a_major=majors[0], b_major=majors[1], alpha=0.5)
    a, b, _ = (None if x is None else jnp.asarray(x) for x in case.inputs())
    d, _, _ = case.inputs(1)

    def loss(f):
        return lambda a: jnp.tanh(f(case, a, b, None)).sum()

    def hvp(f):
        return jax.jvp(jax.grad(loss(f)), (a,), (jnp.asarray(d),))

    close(hvp(run), hvp(plain), 2.0**-5)

    def twice(f):
        return jax.grad(lambda a: (jax.grad(loss(f))(a).astype(F32) ** 2).sum())(a)

    close(twice(run), twice(plain), 2.0**-5)


def test_hessian():
    a, b = arrays((5,), (5, 8))

    def f(mm):
        return jax.hessian(lambda a: (mm(a, b).astype(F32) ** 2).sum())(a)

    close(f(jax_bwgemm.matmul), f(jnp.matmul), 2.0**-5)


def test_linear_transpose():
    a, b, ct = arrays((8, 16), (16, 24), (8, 24))
    for fun, operand in ((lambda f: lambda x: f(x, b), a), (lambda f: lambda x: f(a, x), b)):
        got, want = (jax.linear_transpose(fun(f), operand)(ct) for f in (jax_bwgemm.matmul, jnp.matmul))
        close(got, want)


def test_checkpoint():
    a, b = arrays((8, 16), (16, 16))

    def f(mm):
        return jax.grad(lambda b: jax.checkpoint(lambda x: mm(mm(x, b), b))(a).astype(F32).sum())(b)

    close(f(jax_bwgemm.matmul), f(jnp.matmul))


def test_scan_over_stacked_weights():
    x, weights = arrays((8, 16), (3, 16, 16))

    def f(mm):
        return jax.value_and_grad(
            lambda w: lax.scan(lambda c, v: (jnp.tanh(mm(c, v)), None), x, w)[0].astype(F32).sum()
        )(weights)

    close(f(jax_bwgemm.matmul), f(jnp.matmul), 2.0**-5)


def test_while_and_cond():
    x, w = arrays((8, 8), (8, 8))

    def f(mm):
        return lax.fori_loop(0, 3, lambda i, c: lax.cond(i > 0, lambda c: jnp.tanh(mm(c, w)), lambda c: c, c), x)

    close(f(jax_bwgemm.matmul), f(jnp.matmul))


def test_relu_is_flat_at_zero():
    zeros = jnp.zeros((8, 8), BF16)
    grad = jax.grad(lambda b: jax_bwgemm.matmul(jnp.ones((8, 8), BF16), b, activation="relu").astype(F32).sum())(zeros)
    assert not grad.any()


def test_eager_is_jit():
    a, b = arrays((8, 16), (16, 24))
    np.testing.assert_array_equal(jax_bwgemm.matmul(a, b), jax.jit(jax_bwgemm.matmul)(a, b))
    with jax.disable_jit():
        np.testing.assert_array_equal(jax_bwgemm.matmul(a, b), jax.jit(jax_bwgemm.matmul)(a, b))
