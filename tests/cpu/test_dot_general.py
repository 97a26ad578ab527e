"""`dot_general` against `lax.dot_general` for any dimension numbers, and the majors that it finds."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jax_bwgemm
from jax_bwgemm.facts.contraction import of_dot_general
from jax_bwgemm.ops.shape_rules import sizes_of
from jax_bwgemm.planner.views import view

BF16 = jnp.bfloat16


@st.composite
def dot_problems(draw):
    """Operands of up to two batch, two contracting and two free dimensions each, in any order, with their numbers."""
    size = st.sampled_from([1, 2, 3, 4])
    batch, contract = (draw(st.lists(size, max_size=2)) for _ in range(2))

    def operand():
        free = draw(st.lists(size, max_size=2))
        sizes = batch + contract + free
        order = draw(st.permutations(range(len(sizes))))
        where = [order.index(i) for i in range(len(sizes))]
        shape = tuple(sizes[i] for i in order)
        return shape, tuple(where[: len(batch)]), tuple(where[len(batch) : len(batch) + len(contract)])

    (lhs, lhs_b, lhs_c), (rhs, rhs_b, rhs_c) = operand(), operand()
    return lhs, rhs, ((lhs_c, rhs_c), (lhs_b, rhs_b))


def integers(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-3, 4, shape), BF16) for shape in shapes]


@given(dot_problems())
@settings(deadline=None, max_examples=30)
def test_values_are_laxs(problem):
    lhs_shape, rhs_shape, dims = problem
    lhs, rhs = integers(lhs_shape, rhs_shape)
    got = jax_bwgemm.dot_general(lhs, rhs, dims, on_fallback="ignore")
    want = lax.dot_general(lhs, rhs, dims)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got, want)  # small integers are exact


@given(dot_problems())
@settings(deadline=None, max_examples=8)
def test_gradients_are_laxs(problem):
    lhs_shape, rhs_shape, dims = problem
    lhs, rhs = integers(lhs_shape, rhs_shape)

    def ours(x, y):
        return jax_bwgemm.dot_general(x, y, dims, on_fallback="ignore")

    def theirs(x, y):
        return lax.dot_general(x, y, dims)

    ct = jnp.ones(jax.eval_shape(theirs, lhs, rhs).shape, BF16)
    for got, want in zip(jax.vjp(ours, lhs, rhs)[1](ct), jax.vjp(theirs, lhs, rhs)[1](ct), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "lhs, rhs, dims, majors",
    [
        ((4, 8), (8, 6), (((1,), (0,)), ((), ())), "kn"),
        ((4, 8), (6, 8), (((1,), (1,)), ((), ())), "kk"),
        ((8, 4), (8, 6), (((0,), (0,)), ((), ())), "mn"),
        ((8, 4), (6, 8), (((0,), (1,)), ((), ())), "mk"),
        ((2, 3, 4, 8), (8, 6), (((3,), (0,)), ((), ())), "kn"),  # a dense layer
        ((2, 3, 4, 5), (4, 5, 6), (((2, 3), (0, 1)), ((), ())), "kn"),  # DenseGeneral over two axes
        ((2, 3, 4, 5), (4, 5, 6), (((3, 2), (1, 0)), ((), ())), "kn"),
        ((7, 4, 8), (7, 6, 8), (((2,), (2,)), ((0,), (0,))), "kk"),  # scores
        ((7, 4, 8), (7, 8, 6), (((2,), (1,)), ((0,), (0,))), "kn"),
        ((2, 4, 8), (8,), (((2,), (0,)), ((), ())), "kk"),  # a vector is the rows
        ((7, 8), (7, 8, 6), (((1,), (1,)), ((0,), (0,))), "kn"),
    ],
)
def test_stored_as_needed_is_taken_as_it_is(lhs, rhs, dims, majors):
    contraction = of_dot_general(len(lhs), len(rhs), dims)
    found = view(contraction, sizes_of(contraction, [jax.ShapeDtypeStruct(shape, BF16) for shape in (lhs, rhs)]))
    a, b = found.rows[0], found.columns[0]
    assert not a.moves and not b.moves
    assert ("k" if a.major == "k" else "m") + ("k" if b.major == "k" else "n") == majors


def test_positional_precision_and_preferred_type():
    x, y = integers((4, 8), (8, 6))
    dims = (((1,), (0,)), ((), ()))
    for precision in (None, "highest", lax.Precision.DEFAULT, (lax.Precision.HIGHEST,) * 2):
        got = jax_bwgemm.dot_general(x, y, dims, precision, jnp.float32, on_fallback="ignore")
        assert got.dtype == jnp.float32


@pytest.mark.parametrize(
    "expression, shapes",
    [
        ("bqhd,bkhd->bhqk", ((2, 3, 4, 5), (2, 6, 4, 5))),
        ("bhqk,bkhd->bqhd", ((2, 4, 3, 6), (2, 6, 4, 5))),
        ("ij,kj", ((3, 4), (5, 4))),
    ],
)
def test_einsum(expression, shapes):
    x, y = integers(*shapes)

    def ours(*args, **kwargs):
        return jax_bwgemm.dot_general(*args, **kwargs, on_fallback="ignore")

    np.testing.assert_array_equal(jnp.einsum(expression, x, y, _dot_general=ours), jnp.einsum(expression, x, y))


DIMS = (((1,), (0,)), ((), ()))


ALL_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
OURS = {("float32",) * 2, ("bfloat16",) * 2, *itertools.product(ALL_DTYPES[2:4], repeat=2)}


@pytest.mark.parametrize("preferred", [None, "float16", "int32"])
@pytest.mark.parametrize("dtypes", [*itertools.product(ALL_DTYPES, repeat=2)], ids="-".join)
def test_every_dtype_is_laxs(dtypes, preferred):
    """Values and dtypes, whether it is a kernel's product or handed over; `uint8` gets the magnitudes."""
    operands = (jnp.abs(z) if d == "uint8" else z for z, d in zip(integers((4, 8), (8, 6)), dtypes, strict=True))
    x, y = (z.astype(d) for z, d in zip(operands, dtypes, strict=True))
    ints = set(dtypes) <= {"int8", "uint8"}
    is_ours = preferred == "int32" if ints else dtypes in OURS and preferred != "int32"
    reason = "its kernels need CUDA, got cpu" if is_ours else "operands require|the result of .* requires"
    with pytest.warns(jax_bwgemm.FallbackWarning, match=reason):
        got = jax_bwgemm.dot_general(x, y, DIMS, preferred_element_type=preferred)
    want = lax.dot_general(x, y, DIMS, preferred_element_type=preferred)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_algorithms_and_shardings_are_laxs():
    x, y = integers((4, 8), (8, 6))
    with pytest.warns(jax_bwgemm.FallbackWarning, match="`precision` requires BF16_BF16_F32 or DEFAULT for bfloat16"):
        jax_bwgemm.dot_general(x, y, DIMS, lax.DotAlgorithmPreset.BF16_BF16_F32_X3, jnp.float32)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="its kernels need CUDA"):
        jax_bwgemm.dot_general(x, y, DIMS, lax.DotAlgorithmPreset.BF16_BF16_F32, jnp.float32)
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    with pytest.warns(jax_bwgemm.FallbackWarning, match="requires a `precision` below highest, got highest"):
        jax_bwgemm.dot_general(x, y, DIMS, "highest")


@pytest.mark.parametrize(
    "dims", [None, ((1, 0), ((), ())), (([1], [0]), ([], [])), (np.array([[1], [0]]), ((), ()))], ids=str
)
def test_other_forms_of_dimension_numbers_are_laxs(dims):
    """Newer JAX reads None as a product of matrices, and a number as a dimension."""
    x, y = integers((4, 8), (8, 6))
    try:
        want = lax.dot_general(x, y, dims)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            jax_bwgemm.dot_general(x, y, dims, on_fallback="ignore")
        return
    for dtype in (BF16, jnp.float16, jnp.int16):  # ours and XLA's
        got = jax_bwgemm.dot_general(x.astype(dtype), y.astype(dtype), dims, on_fallback="ignore")
        np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("dims", [(((1,), (1,)), ((), ())), (((2,), (0,)), ((), ()))])
def test_errors_are_laxs(dims):
    x, y = integers((4, 8), (5, 6))
    with pytest.raises((TypeError, ValueError)) as theirs:
        lax.dot_general(x, y, dims)
    with pytest.raises((TypeError, ValueError)) as ours:
        jax_bwgemm.dot_general(x, y, dims)
    assert str(ours.value) == str(theirs.value)
