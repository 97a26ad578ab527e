"""`matmul`'s shapes, dtypes and errors: those of `jnp.matmul`, in our words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_bwgemm
from jax_bwgemm.ops.shape_rules import matmul_shape, result_dtype
from tests.fuzz import fuzz, rounds

BF16 = jnp.bfloat16
X = jnp.ones((4, 8), BF16)
W = jnp.ones((8, 16), BF16)


@st.composite
def shape_pairs(draw):
    """Shapes that often, not always, multiply."""
    dims = st.sampled_from([1, 1, 2, 3, 8])
    batch = draw(st.lists(dims, max_size=3))
    k = draw(dims)

    def operand(matrix):
        own = [d if draw(st.booleans()) else 1 for d in batch][draw(st.integers(0, len(batch))) :]
        return tuple(own + matrix)

    a = operand([draw(dims), k]) if draw(st.booleans()) else (k,)
    b_k = k if draw(st.integers(0, 9)) else draw(dims)
    b = operand([b_k, draw(dims)]) if draw(st.booleans()) else (b_k,)
    return a, b


@fuzz
@given(shape_pairs())
@settings(deadline=None, max_examples=rounds(200))
def test_shapes_are_numpys(shapes):
    a, b = shapes
    try:
        want = np.matmul(np.zeros(a), np.zeros(b)).shape
    except ValueError:
        with pytest.raises(ValueError, match="`matmul` requires"):
            matmul_shape(a, b)
    else:
        assert matmul_shape(a, b) == want


@given(shape_pairs(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_values_are_jnps(shapes, as_float32):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), BF16) for shape in shapes)
    dtype = jnp.float32 if as_float32 else None
    try:
        want = jnp.matmul(a, b, preferred_element_type=dtype)
    except (TypeError, ValueError):
        return
    got = jax_bwgemm.matmul(a, b, out_dtype=dtype, on_fallback="ignore")
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)  # small integers are exact


def test_memory_spaces_are_not_mixed():
    """As JAX refuses them; a kernel would be handed the host's memory."""
    host = jax.device_put(W, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    message = "`matmul` requires operands in one memory space, got .*Host.*: move them first"
    for args, more in (((X, host), {}), ((X, W), {"residual": jax.device_put(jnp.ones((4, 16), BF16), host.sharding)})):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda *x, more=more: jax_bwgemm.matmul(*x, **more), *args)


@pytest.mark.parametrize(
    "shapes", [((0, 8), (8, 4)), ((4, 0), (0, 4)), ((2, 4, 0), (0, 4)), ((0, 4, 8), (8, 4)), ((0,), (0,))]
)
def test_empty(shapes):
    a, b = (jnp.ones(shape, BF16) for shape in shapes)
    got = jax_bwgemm.matmul(a, b, on_fallback="error")  # XLA knows these; that is no fallback
    np.testing.assert_array_equal(got, jnp.matmul(a, b))
    assert got.shape == jnp.matmul(a, b).shape


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: jax_bwgemm.matmul(X, X),
            ValueError,
            r"last dimension of `a` to equal the second-to-last dimension of `b`, got 8 and 4 in \(4, 8\) @ \(4, 8\)",
        ),
        (
            lambda: jax_bwgemm.matmul(X, X[0, :4]),
            ValueError,
            r"equal the dimension of `b`, got 8 and 4 in \(4, 8\) @ \(4,\)",
        ),
        (lambda: jax_bwgemm.matmul(X[0, 0], W), ValueError, r"`a` of rank 1 or more, got a scalar; use `\*`"),
        (lambda: jax_bwgemm.matmul(X, 3.0), ValueError, r"`b` of rank 1 or more, got a scalar"),
        (
            lambda: jax_bwgemm.matmul(jnp.ones((2, 4, 8), BF16), jnp.ones((3, 8, 4), BF16)),
            ValueError,
            r"batch dimensions that broadcast, got \(2,\) and \(3,\)",
        ),
        (lambda: jax_bwgemm.matmul([[1.0]], W), TypeError, r"`a` requires an array, got list"),
        (lambda: jax_bwgemm.matmul(X, None), TypeError, r"`b` requires an array, got NoneType"),
        (lambda: jax_bwgemm.matmul(X, W, out_dtype="colour"), TypeError, r"`out_dtype` requires a dtype, got 'colour'"),
        (lambda: jax_bwgemm.matmul(X, W, alpha="2"), TypeError, r"`alpha` requires a Python number, got '2'"),
        (
            lambda: jax.jit(lambda s: jax_bwgemm.matmul(X, W, alpha=s))(2.0),
            TypeError,
            r"`alpha` requires a Python number, got .*; multiply by an array",
        ),
        (
            lambda: jax_bwgemm.matmul(X, W, bias=jnp.ones(8, BF16)),
            ValueError,
            r"`bias` requires the shape \(n,\) = \(16,\), got \(8,\)",
        ),
        (
            lambda: jax_bwgemm.matmul(X, W[:, 0], bias=jnp.ones(4, BF16)),
            ValueError,
            r"`bias` requires a matrix `b`, got a vector",
        ),
        (
            lambda: jax_bwgemm.matmul(X, W, residual=jnp.ones(16, BF16)),
            ValueError,
            r"`residual` requires the result's shape \(4, 16\), got \(16,\); broadcast it first, or add it afterwards",
        ),
        (
            lambda: jax_bwgemm.matmul(jnp.ones((2, 4, 8), BF16), W, residual=jnp.ones((1, 4, 16), BF16)),
            ValueError,
            r"`residual` requires the result's shape \(2, 4, 16\), got \(1, 4, 16\)",
        ),
        (lambda: jax_bwgemm.matmul(X, W[:, 0], residual=1.0), ValueError, r"the result's shape \(4,\), got \(\)"),
        (
            lambda: jax_bwgemm.matmul(X, W, activation="gelu_tanh"),
            ValueError,
            "`activation` requires None or one of relu, gelu, silu, sigmoid, tanh, gelu_exact, squared_relu, "
            "leaky_relu, got 'gelu_tanh'",
        ),
        (
            lambda: jax_bwgemm.matmul(X, W, tile="big"),
            ValueError,
            r"`tile` requires the form '128x256x64_cta1_cluster2x1', got 'big'",
        ),
        (lambda: jax_bwgemm.matmul(X, W, device="a100"), ValueError, r"`device` requires one of h100"),
        (lambda: jax_bwgemm.matmul(X, W, on_fallback="no"), ValueError, r"`on_fallback` requires one of warn"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float16"),
        ("bfloat16", "float32"),
        ("int32", "int32"),
        ("int32", "bfloat16"),
        ("int8", "float8_e4m3fn"),
        ("complex64", "complex64"),
        ("bool", "float32"),
    ],
)
def test_other_dtypes_are_jnps_and_say_so(dtypes):
    a, b = X.astype(dtypes[0]), W.astype(dtypes[1])
    with pytest.warns(
        jax_bwgemm.FallbackWarning,
        match=f"operands require two of float8_e4m3fn and float8_e5m2, .*, got {dtypes[0]} and {dtypes[1]}",
    ):
        got = jax_bwgemm.matmul(a, b)
    want = jnp.matmul(a, b)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_other_output_dtype():
    with pytest.warns(jax_bwgemm.FallbackWarning, match="the result of bfloat16 and bfloat16 requires .*, got int32"):
        assert jax_bwgemm.matmul(X, W, out_dtype=jnp.int32).dtype == jnp.int32


def test_epilogue_of_other_dtypes():
    got = jax_bwgemm.matmul(
        X.astype("float16"),
        W.astype("float32"),
        alpha=-0.5,
        bias=jnp.full(16, 3.0),
        activation="relu",
        on_fallback="ignore",
    )
    np.testing.assert_array_equal(got, np.zeros((4, 16)))
    np.testing.assert_array_equal(
        jax_bwgemm.matmul(X.astype("int8"), W.astype("int8"), alpha=0.5, on_fallback="ignore"), np.full((4, 16), 4)
    )


RESIDUAL_SHAPES = [((4, 8), (8, 16)), ((2, 1, 4, 8), (3, 8, 16)), ((8,), (8, 16)), ((3, 4, 8), (8,)), ((8,), (8,))]


@pytest.mark.parametrize("shapes", RESIDUAL_SHAPES, ids=str)
def test_residual_has_the_results_shape(shapes):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), BF16) for shape in shapes)
    want = jnp.matmul(a, b)
    residual = rng.integers(-9, 10, want.shape)  # cast to the output dtype
    got = jax_bwgemm.matmul(a, b, residual=residual, on_fallback="ignore")
    assert got.dtype == BF16
    np.testing.assert_array_equal(got, want + residual)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float16", "float32"), ("int32", "int32")])
def test_residual_is_added_behind_the_activation_and_before_the_rounding(dtypes):
    """A product of 256 and a residual of 1 round to 256 and 257 + 1 in bfloat16, where eight bits are kept."""
    a, b = jnp.full((4, 8), 4).astype(dtypes[0]), jnp.full((8, 16), 8).astype(dtypes[1])
    kwargs = {"alpha": -1.0, "activation": "relu", "on_fallback": "ignore"}
    np.testing.assert_array_equal(jax_bwgemm.matmul(a, b, residual=jnp.full((4, 16), -3.0), **kwargs), -3.0)
    got = jax_bwgemm.matmul(a, b, bias=jnp.ones(16), residual=jnp.ones((4, 16)), on_fallback="ignore")
    np.testing.assert_array_equal(got, 258)  # 257 is none of bfloat16


def test_result_dtype():
    assert result_dtype(jnp.bfloat16, jnp.bfloat16) == jnp.bfloat16
    assert result_dtype(jnp.bfloat16, jnp.float16) == jnp.float32
    assert result_dtype(jnp.bfloat16, jnp.bfloat16, "float32") == jnp.float32
    assert result_dtype(np.int8, np.int8) == jnp.int8
    assert result_dtype(np.int8, np.uint8) == jnp.int16
    assert result_dtype(jnp.float8_e4m3fn, jnp.float8_e4m3fn) == jnp.float8_e4m3fn
    assert result_dtype(jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize("other", ["float8_e5m2", "bfloat16", "float32"])
def test_operands_that_jax_does_not_promote_need_an_out_dtype(other):
    a, b = X.astype("float8_e4m3fn"), W.astype(other)
    with pytest.raises(ValueError, match=f"requires `out_dtype` for operands .*, got float8_e4m3fn and {other}; pass"):
        jax_bwgemm.matmul(a, b)
    got = jax_bwgemm.matmul(a, b, out_dtype=jnp.float32, on_fallback="ignore")
    np.testing.assert_array_equal(got, jnp.matmul(a, b, preferred_element_type=jnp.float32))


def test_numpy_operands_and_bias_in_another_dtype():
    got = jax_bwgemm.matmul(np.asarray(X), np.asarray(W), bias=np.ones(16, np.float32), on_fallback="ignore")
    assert got.dtype == BF16
    np.testing.assert_array_equal(got, np.full((4, 16), 9))
