"""An MMA's sums do not depend on the CPU's BLAS: only on what is summed."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator.descriptors import sums_of_products

RNG = np.random.default_rng(0)


def operand(rows: int, k: int) -> np.ndarray:
    """As bfloat16 has them."""
    wide = RNG.standard_normal((rows, k), np.float32)
    return (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("k", [16, 32, 64])
def test_no_place_has_an_order_of_its_own(k: int) -> None:
    """The transpose, some of the rows and columns, and k backwards have the same bits."""
    a, b = operand(100, k), operand(72, k)
    whole = sums_of_products(a, b, False)
    assert whole.dtype == np.float32
    assert np.array_equal(whole, sums_of_products(b, a, False).T)
    assert np.array_equal(whole[3:20, 7:9], sums_of_products(a[3:20], b[7:9], False))
    assert np.array_equal(whole, sums_of_products(a[:, ::-1], b[:, ::-1], False))
    square = sums_of_products(a, a, False)
    assert np.array_equal(square, square.T)


def test_each_is_rounded_once() -> None:
    a, b = operand(20, 64), operand(30, 64)
    exact = (a[:, None].astype(np.float64) * b[None].astype(np.float64)).sum(-1)
    assert np.array_equal(sums_of_products(a, b, False), exact.astype(np.float32))


def test_integers_are_exact() -> None:
    a = RNG.integers(-128, 128, (8, 4096)).astype(np.float32)
    assert np.array_equal(sums_of_products(a, a, True), a.astype(np.int64) @ a.astype(np.int64).T)


def test_infinities() -> None:
    a = np.array([[3e38, 3e38], [np.inf, 1.0], [np.nan, 1.0]], np.float32)
    with np.errstate(all="raise"):
        found = sums_of_products(a, np.array([[3e38, 1.0]], np.float32), False)
    assert np.isposinf(found[:2]).all() and np.isnan(found[2]).all()
