"""Random epilogues where XLA computes them, and their gradients. The bound is derived (`tests/intervals.py`): float64
along the expression, on intervals that each operation widens by what float32 loses there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm import matmul
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.derivative import derivative
from jax_bwgemm.facts.epilogue import ACC, Epilogue, Input
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.ops.reference import evaluate
from jax_bwgemm.runtime.config import resolve
from tests.expressions import Product, random_epilogue, seeded
from tests.fuzz import TIMES, fuzz, rounds
from tests.intervals import Arithmetic, interval

SHAPE = 24, 40, 32
XLA = Arithmetic(xla=True)
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
pytestmark = [fuzz, pytest.mark.usefixtures("quiet")]


@st.composite
def epilogues(draw: st.DrawFn, results: tuple[int, ...] = (1,)) -> Epilogue:
    return random_epilogue(lambda options: draw(st.sampled_from(options)), results=results)


def function_of(product: Product) -> Callable[..., Any]:
    """Of the sums and the operands, with scalars that are known, as a user writes it."""
    epilogue = product.epilogue
    roles = [x.role for x in epilogue.operands]

    def f(acc: Any, *operands: Any) -> Any:
        known = dict(zip(roles, operands, strict=True)) | {"acc": acc}
        known |= {role: jnp.asarray(x, acc.dtype) for role, x in epilogue.scalars}
        return jnp.broadcast_to(evaluate(epilogue.out, known), acc.shape)

    return f


def given_to(product: Product, seed: int) -> tuple[dict[str, np.ndarray], list[Any]]:
    """As stored; and a, b and the operands as JAX's function has them."""
    operands = product.operands(SHAPE, seed)
    places = {x.role: x.place for x in product.epilogue.operands}

    def given(role: str, x: np.ndarray) -> Any:
        return x[:, None] if places.get(role) == "m" else x[0] if places.get(role) == "one" else x

    return operands, [jnp.asarray(given(role, x)) for role, x in operands.items()]


@pytest.mark.long
@settings(max_examples=rounds(300), deadline=None, derandomize=TIMES == 1)
@given(epilogues(), st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(0, 99))
def test_results(epilogue: Epilogue, dtype: str, seed: int) -> None:
    """A traced function of the sums and operands, against the expression that it was made from."""
    product = Product(epilogue, dtype, dtype)
    operands, (a, b, *others) = given_to(product, seed)
    got = matmul(a, b, epilogue=function_of(product), operands=tuple(others))
    product.check({"out": np.asarray(got)}, operands, Arithmetic(xla=True, before=HALF_ULP[dtype]))


@settings(max_examples=rounds(60), deadline=None, derandomize=TIMES == 1)
@given(epilogues(), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 99))
def test_reductions(epilogue: Epilogue, dtype: str, seed: int) -> None:
    """Of values that are not rounded: a sum in whatever order, and the largest."""
    product = Product(epilogue, dtype, dtype)
    operands, (a, b, *others) = given_to(product, seed)
    f = function_of(product)

    def reducing(*args: Any) -> Any:
        y = f(*args)
        return y, y.sum(-1), y.max(-2)

    out, total, largest = map(np.asarray, matmul(a, b, epilogue=reducing, operands=tuple(others)))
    of = Arithmetic(xla=True, before=HALF_ULP[dtype])
    product.check({"out": out}, operands, of)
    low, high = (np.broadcast_to(x, SHAPE[:2]) for x in product.intervals(operands, of)["out"])
    slack = SHAPE[1] * 2.0**-24 * np.maximum(np.abs(low), np.abs(high)).sum(1)
    assert ((low.sum(1) - slack <= total) & (total <= high.sum(1) + slack)).all()
    assert ((low.max(0) <= largest) & (largest <= high.max(0))).all()


@settings(max_examples=rounds(60), deadline=None, derandomize=TIMES == 1)
@given(st.data(), st.booleans(), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 99))
def test_several_results(data: st.DataObject, is_gated: bool, dtype: str, seed: int) -> None:
    """Of one and of two products, as an expression."""
    epilogue = random_epilogue(lambda options: data.draw(st.sampled_from(options)), is_gated, (2, 3))
    product = Product(epilogue, dtype, dtype)
    operands = product.operands(SHAPE, seed)
    extras = tuple(x.place.replace("one", "") for x in epilogue.operands)
    numbers = {x.role for x in epilogue.operands if x.place == "one"}
    others = [jnp.asarray(x[0] if role in numbers else x) for role, x in operands.items() if role not in "ab"]
    results = fused_product(
        *(jnp.asarray(operands[role]) for role in "ab"), others,
        contraction=Contraction("mk", "kn", "mn", extras, 1 + is_gated), out_dtype=jnp.dtype(dtype), epilogue=epilogue,
        tile=None, precision=None, out_sharding=None, settings=resolve(None, None),
    )  # fmt: skip
    product.check(dict(zip(dict(epilogue.results), results, strict=True)), product.operands(SHAPE, seed), XLA)


@settings(max_examples=rounds(40), deadline=None, derandomize=TIMES == 1)
@given(epilogues(), st.booleans(), st.integers(0, 99))
def test_gradients(epilogue: Epilogue, reduces: bool, seed: int) -> None:
    """Of every operand, also where the result is summed over rows, against JAX's own of the unfused function in
    float64: no further from it than what is computed from a slope that is anywhere in its interval."""
    product = Product(epilogue, "float32", "float32")
    operands, args = given_to(product, seed)
    f, every = function_of(product), tuple(range(len(args)))
    rng = np.random.default_rng([seed, 1])
    weights, columns = (rng.standard_normal(shape, np.float32) for shape in (SHAPE[:2], SHAPE[1]))
    columns = columns if reduces else np.zeros_like(columns)

    def with_sums(*args: Any) -> Any:
        y = f(*args)
        return y, y.sum(-2)

    def ours(a: Any, b: Any, *others: Any) -> Any:
        if not reduces:
            return (matmul(a, b, epilogue=f, operands=others) * weights).sum()
        y, sums = matmul(a, b, epilogue=with_sums, operands=others)
        return (y * weights).sum() + (sums * columns).sum()

    got = jax.jit(jax.grad(ours, every))(*args)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        exactly = weights.astype(np.float64) + columns
        want = jax.jit(jax.grad(lambda a, b, *x: (f(a @ b, *x) * exactly).sum(), every))(*wide)
    magnitudes = np.abs(weights.astype(np.float64)) + np.abs(columns)
    for role, own, exact, bound in zip(operands, got, want, bounds(product, operands, magnitudes), strict=True):
        error = np.abs(np.asarray(own, np.float64) - np.asarray(exact)).reshape(bound.shape)
        assert (error <= bound).all(), (
            f"{role} of {product}: {error.max()} where {bound[error > bound].max()} is allowed"
        )


def bounds(product: Product, operands: dict[str, np.ndarray], magnitude: np.ndarray) -> list[np.ndarray]:
    """Of the gradient by each operand, for cotangents of this magnitude: how wide the interval is in which it lies."""
    known, result = product.known(operands), product.epilogue.out

    def slopes(x: Input) -> tuple[np.ndarray, np.ndarray]:
        """By how much the cotangents of a place may differ, and their magnitudes."""
        low, high = (np.broadcast_to(y, SHAPE[:2]) for y in interval(derivative(result, x), known, XLA))
        largest = magnitude * np.maximum(np.abs(low), np.abs(high))
        return magnitude * (high - low) + 2.0**-22 * largest, largest

    def summed(x: np.ndarray, place: str) -> np.ndarray:
        return x.sum({"m": 1, "n": 0, "one": None}[place]) if place != "mn" else x

    width, largest = slopes(ACC)
    (m, n, _), a, b = SHAPE, *(np.abs(operands[role].astype(np.float64)) for role in "ab")
    found = [width @ b.T + n * 2.0**-23 * largest @ b.T, a.T @ width + m * 2.0**-23 * a.T @ largest]
    for x in product.epilogue.operands:
        width, largest = slopes(x)
        found.append(summed(width, x.place) + max(m, n) * 2.0**-23 * summed(largest, x.place))
    return [x + 2.0**-100 for x in found]


def test_the_bounds_are_narrow_and_wrong_results_are_not_in_them() -> None:
    """Of most expressions nearly all elements are known within 2**-6, and an error of twice that is seen."""
    narrow, seen = 0, 0
    for seed in range(100):
        product = seeded(seed)
        operands = product.operands(SHAPE, seed)
        low, high = product.intervals(operands, Arithmetic(product.out_dtype == "bfloat16"))["out"]
        narrow += np.quantile((high - low) / (1 + np.abs(low)), 0.9) <= 2.0**-6
        wrong = (low + high) / 2 + 2.0**-5 * (1 + np.abs(low))
        middle = product.intervals(operands, Arithmetic(product.out_dtype == "bfloat16"))
        try:
            product.check({role: sum(ends) / 2 for role, ends in middle.items()} | {"out": wrong}, operands)
        except AssertionError:
            seen += 1
    assert narrow >= 90 and seen >= 99
