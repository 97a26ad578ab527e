"""What `docs/numerics.md` says of special values and rounding, of the fallback: XLA's product on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.families import FAMILIES, FLOAT32_BITS

DOCUMENT = Path(__file__).parents[2] / "docs" / "numerics.md"
SUMS = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -200.0, 200.0], np.float32)
EXPECTED = {
    None: SUMS,
    "relu": [np.nan, np.inf, 0.0, 3e38, 0.0, 0.0, 0.0, 200.0],
    "gelu": [np.nan, np.inf, np.nan, 3e38, 0.0, 0.0, 0.0, 200.0],
    "silu": [np.nan, np.inf, np.nan, 3e38, 0.0, 0.0, 0.0, 200.0],
}
pytestmark = pytest.mark.usefixtures("quiet")


def results(sums: np.ndarray, **options: Any) -> np.ndarray:
    """Of sums that are one product each."""
    a, b = np.zeros((len(sums), 64), np.float32), np.zeros((64, 32), np.float32)
    a[:, 0], b[0] = sums, 1.0
    out = jax_bwgemm.matmul(*(jnp.asarray(x.astype(ml_dtypes.bfloat16)) for x in (a, b)), **options)
    return np.asarray(out)[:, 0].astype(np.float32)


@pytest.mark.parametrize("activation", EXPECTED)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_special_values(activation: str | None, out_dtype: str) -> None:
    got = results(SUMS, activation=activation, out_dtype=jnp.dtype(out_dtype))
    np.testing.assert_allclose(got, np.asarray(EXPECTED[activation], np.float32), rtol=2**-8)


@pytest.mark.parametrize("activation", EXPECTED)
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_results_saturate(activation: str | None, out_dtype: str) -> None:
    dtype = jnp.dtype(out_dtype)
    largest = float(jnp.finfo(dtype).max)
    got = results(SUMS, activation=activation, out_dtype=dtype)
    want = np.clip(np.asarray(EXPECTED[activation], np.float32), -largest, largest).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_a_result_beyond_its_dtype_is_infinite() -> None:
    np.testing.assert_array_equal(results(SUMS[3:5], alpha=2.0), [np.inf, -np.inf])
    np.testing.assert_array_equal(results(np.float32([1e5, -1e5]), out_dtype=jnp.float16), [np.inf, -np.inf])


def test_one_rounding_to_the_nearest_even() -> None:
    """Behind the epilogue: 1 + 2**-8 and 1 + 3 * 2**-8 lie between two bfloat16."""
    bias = jnp.asarray(np.full(32, 2.0**-8, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(results(np.float32([1.0, 1 + 2**-7]), bias=bias), [1.0, 1 + 2**-6])


def test_xla_on_a_cpu_flushes_subnormals() -> None:
    """As kernels do not (`tests/emu/test_summation.py`)."""
    np.testing.assert_array_equal(results(np.float32([1e-39, -1e-39, 2.5e-38])) != 0, [False, False, True])


def test_a_nan_stays_in_its_row_and_column() -> None:
    a, b = np.ones((4, 64), np.float32), np.ones((64, 32), np.float32)
    a[1, 3], b[5, 7] = np.nan, np.inf
    out = np.asarray(jax.jit(jax_bwgemm.matmul)(a, b))
    assert np.isnan(out[1]).all() and np.isfinite(np.delete(np.delete(out, 1, 0), 7, 1)).all()
    assert np.isinf(np.delete(out[:, 7], 1)).all()


def test_the_documents_numbers_are_the_facts() -> None:
    """A row's second cell: how many elements an MMA sums. And whose tests it names, there are."""
    text = DOCUMENT.read_text()
    rows = dict(re.findall(r"^\| (bfloat16|float32|int8)\b[^|]*\| (\d+) of k", text, re.MULTILINE))
    assert rows == {"bfloat16": "16", "float32": "8", "int8": "32"}
    assert {of.name: of.fp8_sum_bits for of in FAMILIES} == {"hopper": 12, "blackwell": FLOAT32_BITS}
    assert "keep some 12 bits" in text
    for path in re.findall(r"`(tests/\w+/\w+\.py)`", text):
        assert (DOCUMENT.parents[1] / path).exists(), path
