"""Every transformation against the same of `jnp`, on values whose products are rounded alike, and against float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.ops.primitive import fused_product, product
from jax_bwgemm.runtime.config import Config
from tests import cases
from tests.cases import GATES

pytestmark = pytest.mark.usefixtures("quiet")
BF16, F32 = jnp.bfloat16, jnp.float32


def arrays(*shapes, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def close(got, want, tolerance=2.0**-7):
    """Trees that agree to a rounding or two of bfloat16, relative to the largest element."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, np.abs(w).max(initial=0.0)), rtol=0)


def contraction(case, a, b):
    """Of the case's operands, (la, m, k) or (la, k, m) and so on; one matrix that a batch shares has no batch mode."""
    shared = [x.shape[0] == 1 < y.shape[0] for x, y in ((a, b), (b, a))]
    modes = ("lmk" if case.a_major == "k" else "lkm", "lkn" if case.b_major == "n" else "lnk")
    return Contraction(*(own[is_shared:] for own, is_shared in zip(modes, shared, strict=True)), "lmn"), shared


def params(case, a, b, **kwargs):
    found, shared = contraction(case, a, b)
    own = {"contraction": found, "out_dtype": jnp.dtype(case.out_dtype), "epilogue": case.epilogue}
    own |= {"tile": None, "precision": None, "out_sharding": None, "settings": Config("ignore")}
    return [x[0] if one else x for x, one in zip((a, b), shared, strict=True)], own | kwargs


def run(case, a, b, bias=None, residual=None):
    own = dataclasses.replace(case, has_bias=bias is not None, has_residual=residual is not None).epilogue
    extras = {"n": bias, "lmn": residual}
    (a, b), given = params(case, a, b, epilogue=own)
    modes = tuple(modes for modes, x in extras.items() if x is not None)
    given["contraction"] = dataclasses.replace(given["contraction"], extras=modes)
    return fused_product(a, b, [x for x in extras.values() if x is not None], **given)[0]


def plain(case, a, b, bias=None, residual=None):
    """The primitive in `jnp`: float32 until the one rounding."""
    a = a if case.a_major == "k" else jnp.swapaxes(a, 1, 2)
    b = b if case.b_major == "n" else jnp.swapaxes(b, 1, 2)
    out = case.alpha * jnp.matmul(a, b, preferred_element_type=F32) + (0 if bias is None else bias.astype(F32))
    out = getattr(jax.nn, case.activation)(out) if case.activation else out
    return (out if residual is None else out + residual.astype(F32)).astype(case.out_dtype)


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


@pytest.mark.parametrize("in_axes", RESIDUAL_AXES, ids=str)
@pytest.mark.parametrize("majors", cases.MAJORS, ids="".join)
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


AXES = [(0, 0), (1, 2), (2, 1), (0, None), (1, None), (2, None), (None, 0), (None, 1), (None, 2)]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
@pytest.mark.parametrize("majors", cases.MAJORS, ids="".join)
@pytest.mark.parametrize("batches", [(1, 1), (3, 3), (3, 1), (1, 3)], ids=str)
def test_vmap(in_axes, majors, batches):
    """Every way for an axis to meet majors and shared batches."""
    case = cases.Case(8, 24, 16, 3, a_major=majors[0], b_major=majors[1], a_batch=batches[0], b_batch=batches[1])
    v = 2
    operands = []
    for x, axis in zip(case.inputs()[:2], in_axes, strict=True):
        x = np.stack([x, x[..., ::-1]]) if axis is not None else x
        operands.append(jnp.asarray(x if axis is None else np.moveaxis(x, 0, axis)))

    def f(a, b):
        (a, b), given = params(case, a, b)
        return product(a, b, **given)

    got = jax.vmap(f, in_axes)(*operands)

    def pick(x, axis, i):
        return x if axis is None else jnp.take(x, i, axis)

    want = jnp.stack(
        [plain(case, *(pick(x, ax, i) for x, ax in zip(operands, in_axes, strict=True))) for i in range(v)]
    )
    close(got, want)


@pytest.mark.parametrize(
    "in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, 2, 1), (0, None, 0)], ids=str
)
@pytest.mark.parametrize("batches", [(1, 1), (3, 3)], ids=str)
def test_vmap_fused(in_axes, batches):
    case = cases.Case(8, 24, 16, 3, a_batch=batches[0], b_batch=batches[1], alpha=0.5, has_bias=True, activation="relu")
    operands = []
    for x, axis in zip(case.inputs(), in_axes, strict=True):
        operands.append(jnp.asarray(x if axis is None else np.moveaxis(np.stack([x, -x]), 0, axis)))
    close(
        jax.vmap(functools.partial(run, case), in_axes)(*operands),
        jax.vmap(functools.partial(plain, case), in_axes)(*operands),
    )


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_double_vmap_and_out_axes(out_axes):
    a, b = arrays((2, 3, 8, 16), (2, 16, 24))

    def nest(f):
        return jax.vmap(jax.vmap(f, (0, None)), (0, 0), out_axes)(a, b)

    close(nest(jax_bwgemm.matmul), nest(jnp.matmul))


def test_vmap_of_grad_and_grad_of_vmap():
    a, b = arrays((4, 8, 16), (16, 24))

    def loss(f):
        return lambda a, b: (f(a, b).astype(F32) ** 2).sum()

    def per_example(f):
        return jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(a, b)

    close(per_example(jax_bwgemm.matmul), per_example(jnp.matmul), 2.0**-6)

    def whole(f):
        return jax.grad(lambda a, b: jax.vmap(loss(f), (0, None))(a, b).sum(), (0, 1))(a, b)

    close(whole(jax_bwgemm.matmul), whole(jnp.matmul), 2.0**-6)


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


@pytest.mark.parametrize("activation", GATES)
def test_higher_derivatives_of_a_gate(activation):
    """Through the rounded input and the slope, in both modes."""
    a, b = (x.astype(F32) for x in arrays((5,), (5, 8)))

    def nth(f, n):
        fun = functools.reduce(lambda g, d: d(g), [jax.jacfwd, jax.jacrev, jax.jacfwd][:n], f)
        with jax.default_matmul_precision("highest"):
            return fun(a)

    for n in (1, 2, 3):
        got = nth(lambda a: jax_bwgemm.matmul(a, b, activation=activation), n)
        np.testing.assert_allclose(got, nth(lambda a: getattr(jax.nn, activation)(a @ b), n), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", GATES)
def test_what_a_gate_keeps_for_its_gradient(activation):
    """One array of the result's size and dtype: the slope, not what goes in, nor float32."""
    a, b, bias, residual = arrays((24, 16), (16, 40), (40,), (24, 40))

    def f(a, b, bias, residual):
        return jax_bwgemm.matmul(a, b, bias=bias, activation=activation, residual=residual)

    _, pullback = jax.vjp(f, a, b, bias, residual)
    kept = [x for x in jax.tree.leaves(pullback) if np.size(x) >= 24 * 40]
    assert [(x.size, x.dtype) for x in kept] == [(24 * 40, BF16)]


@pytest.mark.parametrize("activation", GATES)
def test_gates_of_the_largest_and_of_no_number(activation):
    """As jax.nn has it: an infinity times no slope at all is NaN."""
    rows = jnp.asarray([[3e38], [1e20], [100.0], [-100.0], [-1e20], [-3e38], [np.inf], [-np.inf], [np.nan]], F32)
    one = jnp.ones((1, 1), F32)
    got = jax_bwgemm.matmul(rows, one, activation=activation, precision="highest")
    np.testing.assert_array_equal(got, getattr(jax.nn, activation)(rows))
    assert np.isnan(got).ravel().tolist() == [False] * 7 + [True] * 2
    slopes = jax.vmap(jax.grad(lambda x: jax_bwgemm.matmul(x[None], one, activation=activation)[0, 0]))(rows[2:4])
    np.testing.assert_array_equal(slopes, [[1.0], [0.0]])


def test_relu_is_flat_at_zero():
    zeros = jnp.zeros((8, 8), BF16)
    grad = jax.grad(lambda b: jax_bwgemm.matmul(jnp.ones((8, 8), BF16), b, activation="relu").astype(F32).sum())(zeros)
    assert not grad.any()


def test_eager_is_jit():
    a, b = arrays((8, 16), (16, 24))
    np.testing.assert_array_equal(jax_bwgemm.matmul(a, b), jax.jit(jax_bwgemm.matmul)(a, b))
    with jax.disable_jit():
        np.testing.assert_array_equal(jax_bwgemm.matmul(a, b), jax.jit(jax_bwgemm.matmul)(a, b))


@pytest.mark.parametrize(
    "specs, out_spec",
    [((P("x"), P()), P("x")), ((P(), P(None, "x")), P(None, "x")), ((P("x"), P("y")), P("x", "y"))],
    ids=["rows", "columns", "both"],
)
def test_shard_map(specs, out_spec):
    """Values and gradients; an operand that devices share gets the sum of their gradients."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto)
    a, b = arrays((8, 16), (16, 8))
    f_b = (lambda f: lambda a, b: f(a, b.mT)) if specs[1] == P("y") else (lambda f: f)
    b = b.mT if specs[1] == P("y") else b

    def loss(f, a, b):
        out = jax.shard_map(f_b(f), mesh=mesh, in_specs=specs, out_specs=out_spec)(a, b)
        return (out.astype(F32) ** 2).sum()

    def value_and_grad(f):
        return jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1)))(a, b)

    close(value_and_grad(jax_bwgemm.matmul), value_and_grad(jnp.matmul), 2.0**-6)


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_shard_map_of_fused_and_vmap(activation):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b, bias = arrays((8, 4, 16), (16, 8), (8,))

    def layer(a, b, bias):
        return jax.vmap(lambda a: jax_bwgemm.matmul(a, b, bias=bias, activation=activation))(a)

    def loss(f, *args):
        return f(*args).astype(F32).sum()

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    grads = [jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(a, b, bias) for f in (sharded, layer)]
    close(*grads, 2.0**-6)


def test_explicit_sharding():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    a, b = arrays((8, 16), (16, 8))
    with jax.set_mesh(mesh):
        a, b = jax.device_put(a, P("x")), jax.device_put(b, P(None, "y"))
        out = jax.jit(jax_bwgemm.matmul)(a, b)
        assert jax.typeof(out).sharding.spec == jax.typeof(a @ b).sharding.spec
        close(out, a @ b)


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_explicit_sharding_of_a_gradient(activation):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    a, b = arrays((8, 16), (16, 8))

    def gradient(f, a, b):
        return jax.jit(jax.grad(lambda a, b: f(a, b).astype(F32).sum()))(a, b)

    def theirs(a, b):
        return getattr(jax.nn, activation)(jnp.matmul(a, b, preferred_element_type=F32)).astype(BF16)

    want = gradient(theirs, a, b)
    with jax.set_mesh(mesh):
        got = gradient(functools.partial(jax_bwgemm.matmul, activation=activation), jax.device_put(a, P("x")), b)
    assert jax.typeof(got).sharding.spec == P("x", None)
    close(got, want, 2.0**-6)
