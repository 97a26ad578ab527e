"""What each dtype means: values, saturation, wrapping, gradients; on a CPU, where XLA computes them."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from tests import cases

pytestmark = pytest.mark.usefixtures("quiet")
BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_PAIRS = [*itertools.product(FP8, repeat=2)]


def arrays(shapes, dtypes, seed=0):
    """Standard normal, integers over their whole range."""
    rng = np.random.default_rng(seed)
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if dtype in ("int8", "uint8"):
            info = jnp.iinfo(dtype)
            yield jnp.asarray(rng.integers(info.min, info.max + 1, shape), dtype)
        else:
            yield jnp.asarray(rng.standard_normal(shape), dtype)


def f64(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("out_dtype", FP8)
def test_float8_result_with_a_residual_saturates(out_dtype):
    """What overflows is the sum, in float32, in the forward pass and where it is differentiated."""
    a, b = arrays([(33, 70), (70, 20)], ("bfloat16",) * 2)
    largest = float(jnp.finfo(out_dtype).max)
    residual = jnp.full((33, 20), largest, out_dtype)
    f = functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype, activation="relu")
    want = np.minimum(np.maximum(f64(a) @ f64(b), 0) + largest, largest)
    np.testing.assert_array_equal(f64(f(a, b, residual=residual)), want)
    out, pullback = jax.vjp(lambda b: f(a, b, residual=residual), b)
    np.testing.assert_array_equal(f64(out), want)
    assert pullback(jnp.ones_like(out))[0].dtype == BF16


@pytest.mark.parametrize("out_dtype", FP8)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_float8_result_of_a_gate_and_its_gradient(activation, out_dtype):
    """What goes into the gate is not rounded to 8 bits on the way."""
    a, b = arrays([(33, 70), (70, 20)], ("bfloat16",) * 2)
    f = functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype, activation=activation)
    case = cases.Case(33, 20, 70, activation=activation)
    want, slope = (g(np.asarray(a)[None], np.asarray(b)[None], None)[0] for g in (case.reference, case.slope))
    cases.check(np.asarray(f(a, b)), want, out_dtype)
    out, pullback = jax.vjp(lambda b: f(a, b), b)
    cases.check(np.asarray(out), want, out_dtype)
    (got,) = pullback(jnp.ones_like(out))
    assert cases.relative_error(np.asarray(got), f64(a).T @ slope) <= 2 * cases.BOUNDS[out_dtype]


PAIRS = [("float32", "float32"), ("float16", "float16"), *FP8_PAIRS]
OUTS = ["float32", "bfloat16", "float16", *FP8]


@pytest.mark.parametrize("out_dtype", OUTS)
@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_floats(dtypes, out_dtype):
    a, b = arrays([(3, 33, 70), (70, 20)], dtypes)
    out = jax.jit(functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype))(a, b)
    assert out.dtype == out_dtype
    cases.check(np.asarray(out), f64(a) @ f64(b), out_dtype)


@pytest.mark.parametrize("dtypes", [*itertools.product(("int8", "uint8"), repeat=2)], ids="-".join)
def test_integers(dtypes):
    """Exact in int32; in jnp.matmul's own dtype they wrap around, and a kernel is one argument away."""
    a, b = arrays([(3, 33, 70), (70, 20)], dtypes)
    exact = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
    np.testing.assert_array_equal(jax_bwgemm.matmul(a, b, out_dtype=jnp.int32), exact)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="requires int32, got .*; pass int32 to use a kernel"):
        wrapped = jax_bwgemm.matmul(a, b, on_fallback="warn")
    assert wrapped.dtype == jnp.matmul(a, b).dtype
    np.testing.assert_array_equal(wrapped, exact.astype(wrapped.dtype))


def test_integers_with_an_epilogue_are_xlas():
    a, b = arrays([(4, 8), (8, 16)], ("int8", "int8"))
    with pytest.warns(jax_bwgemm.FallbackWarning, match="integer operands require no epilogue, got scale"):
        out = jax_bwgemm.matmul(a, b, out_dtype=F32, alpha=0.5, on_fallback="warn")
    np.testing.assert_allclose(out, 0.5 * (f64(a) @ f64(b)), rtol=1e-6)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="integer operands require no epilogue, got silu"):
        out = jax_bwgemm.matmul(a, b, out_dtype=F32, activation="silu", on_fallback="warn")
    np.testing.assert_allclose(out, cases.ACTIVATIONS["silu"](f64(a) @ f64(b)), rtol=1e-6)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("operand", ["float32", "bfloat16", *FP8])
def test_float8_results_saturate(dtype, operand):
    """Also infinities, as the kernels' conversions do; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    rows = jnp.asarray([[1.0], [400.0], [-400.0], [np.nan]], operand)
    out = jax_bwgemm.matmul(rows, jnp.full((1, 2), 400.0, operand), out_dtype=dtype)
    np.testing.assert_array_equal(f64(out[1:]), [[largest] * 2, [-largest] * 2, [np.nan] * 2])
    assert 380 < float(out[0, 0]) < 420
    if operand in ("float32", "bfloat16", "float8_e5m2"):
        infinite = jnp.asarray([[np.inf], [-np.inf]], operand)
        out = jax_bwgemm.matmul(infinite, jnp.ones((1, 1), operand), out_dtype=dtype)
        np.testing.assert_array_equal(f64(out), [[largest], [-largest]])


def test_float8_results_saturate_behind_every_epilogue():
    a, b, bias = jnp.full((2, 4), 20.0, E4M3), jnp.full((4, 3), 20.0, E4M3), jnp.full(3, 100.0, E4M3)
    for steps in ({"alpha": 2.0}, {"bias": bias}, {"activation": "relu", "bias": bias}):
        np.testing.assert_array_equal(f64(jax_bwgemm.matmul(a, b, **steps)), np.full((2, 3), 448.0))
    np.testing.assert_array_equal(f64(jax_bwgemm.matmul(a, b, alpha=-1.0)), np.full((2, 3), -448.0))
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(f64(jax_bwgemm.dot_general(a, b, dims)), np.full((2, 3), 448.0))
    mixed = jax_bwgemm.matmul(a, b.astype(BF16), out_dtype=E4M3)  # not a kernel's operands
    np.testing.assert_array_equal(f64(mixed), np.full((2, 3), 448.0))

    def with_bias(bias):
        return jax_bwgemm.matmul(a, b, bias=bias)

    np.testing.assert_array_equal(f64(jax.vmap(with_bias)(jnp.stack([bias, bias]))), np.full((2, 2, 3), 448.0))


def dots_of(f, *args) -> list[str]:
    """ "lhs*rhs->out" of every product of ours in a jaxpr."""
    found = []
    for eqn in jax.make_jaxpr(f)(*args).eqns:
        if eqn.primitive.name.startswith("bwgemm"):
            a, b = eqn.invars[:2]
            found.append(f"{a.aval.dtype}*{b.aval.dtype}->{eqn.outvars[0].aval.dtype}")
    return found


@pytest.mark.parametrize("out_dtype, factor", [("float32",) * 2, ("bfloat16",) * 2, (FP8[0], "bfloat16")])
@pytest.mark.parametrize("dtypes", FP8_PAIRS, ids="-".join)
def test_float8_gradients_widen_the_operand(dtypes, out_dtype, factor):
    """The cotangent is multiplied as it is, and the result rounded once."""
    a, b = arrays([(2, 40, 24), (24, 36)], dtypes)
    (ct,) = arrays([(2, 40, 36)], [out_dtype], 1)
    matmul = functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype)

    def pullback(a, b, ct):
        return jax.vjp(matmul, a, b)[1](ct)

    d_a, d_b = jax.jit(pullback)(a, b, ct)
    assert (d_a.dtype, d_b.dtype) == dtypes
    cases.check(np.asarray(d_a), f64(ct) @ f64(b).T, dtypes[0])
    cases.check(np.asarray(d_b), np.einsum("lmk,lmn->kn", f64(a), f64(ct)), dtypes[1])
    assert dots_of(pullback, a, b, ct)[1:] == [f"{factor}*{factor}->float32"] * 2


def test_cotangents_that_float8_cannot_hold():
    """2**-13 is zero in e4m3, and the gradient is not."""
    a, b = jnp.ones((8, 4), E4M3), jnp.full((4, 64), 2.0**6, E4M3)
    _, pullback = jax.vjp(lambda a: jax_bwgemm.matmul(a, b, out_dtype=F32), a)
    np.testing.assert_array_equal(f64(pullback(jnp.full((8, 64), 2.0**-13))[0]), np.full((8, 4), 0.5))


def test_float8_gradients_saturate():
    a, b = jnp.ones((8, 4), E4M3), jnp.full((4, 64), 2.0**6, E4M3)
    _, pullback = jax.vjp(lambda a: jax_bwgemm.matmul(a, b, out_dtype=F32), a)
    np.testing.assert_array_equal(f64(pullback(jnp.ones((8, 64)))[0]), np.full((8, 4), 448.0))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float16")], ids="-".join)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_gradients_of_the_operands_dtype(dtypes, out_dtype):
    a, b = arrays([(2, 40, 24), (24, 36)], dtypes)
    (ct,) = arrays([(2, 40, 36)], [out_dtype], 1)
    d_a, d_b = jax.vjp(functools.partial(jax_bwgemm.matmul, out_dtype=out_dtype), a, b)[1](ct)
    assert (d_a.dtype, d_b.dtype) == dtypes
    cases.check(np.asarray(d_a), f64(ct) @ f64(b).T, dtypes[0], num_roundings=2)
    cases.check(np.asarray(d_b), np.einsum("lmk,lmn->kn", f64(a), f64(ct)), dtypes[1], num_roundings=2)


def test_integers_have_no_gradient():
    a, b = arrays([(4, 8), (8, 16)], ("int8", "uint8"))
    matmul = functools.partial(jax_bwgemm.matmul, out_dtype=jnp.int32)
    none = functools.partial(np.zeros, dtype=jax.dtypes.float0)
    out, tangent = jax.jvp(matmul, (a, b), (none(a.shape), none(b.shape)))
    np.testing.assert_array_equal(out, matmul(a, b))
    assert tangent.dtype == jax.dtypes.float0
    out, pullback = jax.vjp(matmul, a, b)
    assert [x.dtype for x in pullback(none(out.shape))] == [jax.dtypes.float0] * 2
    grad = jax.grad(lambda s: s * matmul(a, b).astype(F32).sum())(2.0)  # beside something that has one
    assert float(grad) == float(matmul(a, b).astype(F32).sum())


KINDS = [("float32", "float32", "float32"), ("float8_e4m3fn", "float8_e5m2", "float32"), ("int8", "uint8", "int32")]


def own_and_jnps(kind):
    own = functools.partial(jax_bwgemm.matmul, out_dtype=kind[2])
    return own, functools.partial(jnp.matmul, preferred_element_type=kind[2])


def assert_close(got, want):
    """Sums of float32 in another order."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=0, atol=0 if got.dtype == jnp.int32 else 1e-4)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 2), (2, 1)], ids=str)
def test_vmap(kind, in_axes):
    shapes = [list((8, 16)), list((16, 24))]
    for shape, axis in zip(shapes, in_axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    a, b = arrays(shapes, kind[:2])
    got, want = (jax.jit(jax.vmap(f, in_axes))(a, b) for f in own_and_jnps(kind))
    assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS[:2], ids="-".join)
def test_jvp(kind):
    primals, tangents = (tuple(arrays([(8, 16), (16, 24)], kind[:2], seed)) for seed in (0, 1))
    got, want = (jax.jvp(f, primals, tangents) for f in own_and_jnps(kind))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_shard_map(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    a, b = arrays([(8, 16), (16, 24)], kind[:2])
    own, jnps = own_and_jnps(kind)
    specs = {"in_specs": (P("x"), P(None, "y")), "out_specs": P("x", "y")}
    assert_close(jax.jit(jax.shard_map(own, mesh=mesh, **specs))(a, b), jnps(a, b))


def test_gradient_in_shard_map():
    """A float8 weight that devices share: the sum of their parts, and no cotangent rounded to float8."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = arrays([(32, 16), (16, 24)], FP8)
    (ct,) = arrays([(32, 24)], ["float32"], 1)
    matmul = functools.partial(jax_bwgemm.matmul, out_dtype=F32)
    sharded = jax.shard_map(matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    d_a, d_b = jax.jit(lambda a, b, ct: jax.vjp(sharded, a, b)[1](ct))(a, b, ct)
    cases.check(np.asarray(d_a), f64(ct) @ f64(b).T, FP8[0])
    cases.check(np.asarray(d_b), f64(a).T @ f64(ct), FP8[1], num_roundings=3)  # each device's part, and their sums
