"""k in parts on a GPU: against float64 for every form, the same bits twice, and that one pass follows the kernel."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.planner import parts
from jax_bwgemm.runtime import attempts
from tests.cases import BOUNDS, relative_error

FORMS = ("tn", "nn", "nt", "tt")
SIZES = [(1608, 80, 5656), (328, 2104, 11744), (128, 128, 65536), (73, 136, 1024), (1000, 37, 4096), (144, 264, 14307)]
matmul = functools.partial(jax_bwgemm.matmul, on_fallback="error")
CASES = [(form, size, count) for form in FORMS for size in SIZES for count in (2, 5, 8)]


@pytest.fixture(autouse=True)
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many parts, whatever is predicted or was measured."""
    monkeypatch.setattr(parts, "counts", lambda *_: (request.param,))
    monkeypatch.setattr(parts, "sum_us", lambda *_: -1e9)
    monkeypatch.setattr("jax_bwgemm.runtime.decision.measurements", lambda *_: None)
    attempts.forget()
    yield request.param
    attempts.forget()


def product(form: str, **settings: Any) -> Any:
    def f(a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
        own = settings | ({"bias": bias[0]} if bias else {})
        return matmul(a if form[0] == "n" else a.T, b if form[1] == "n" else b.T, **own)

    return jax.jit(f)


def operands(form: str, m: int, n: int, k: int, dtype: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """As stored, and their product in float64."""
    rng = np.random.default_rng(m)
    shapes = (m, k) if form[0] == "n" else (k, m), (k, n) if form[1] == "n" else (n, k)
    a, b = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    return a, b, (wide[0] if form[0] == "n" else wide[0].T) @ (wide[1] if form[1] == "n" else wide[1].T)


@pytest.mark.parametrize(("form", "size", "count"), CASES, indirect=["count"], ids=str)
def test_against_float64(form: str, size: tuple[int, int, int], count: int) -> None:
    a, b, want = operands(form, *size, "bfloat16")
    f = product(form)
    out = f(a, b)
    assert relative_error(np.asarray(out), want) <= BOUNDS["bfloat16"]
    for _ in range(3):
        assert np.array_equal(np.asarray(f(a, b)).view(np.uint16), np.asarray(out).view(np.uint16))


@pytest.mark.parametrize("count", [4], indirect=True)
@pytest.mark.parametrize("form", ["tn", "nt"])
def test_float16_and_what_follows(form: str, count: int) -> None:
    a, b, wide = operands(form, 512, 256, 8192, "float16")
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(256), "float16")
    out = product(form, alpha=0.125, activation="relu")(a, b, bias)
    assert relative_error(np.asarray(out), np.maximum(wide / 8 + np.asarray(bias, np.float64), 0)) <= BOUNDS["float16"]


@pytest.mark.parametrize("count", [2, 8, 32], indirect=True)
@pytest.mark.parametrize(("form", "activation"), [("tn", None), ("nt", "relu")])
def test_one_kernel_and_one_pass(form: str, activation: str | None, count: int) -> None:
    """XLA moves no operand, and adds, applies the epilogue and rounds in one kernel. Of tn with relu, the kernel of the
    whole would be one of a transposed a, and parts take its route."""
    a, b, _ = operands(form, 512, 256, 8192, "bfloat16")
    text = product(form, activation=activation).lower(a, b).compile().as_text()
    entry = text.partition("\nENTRY ")[2].partition("\n}")[0]
    assert f"f32[{count},512,256]" in entry
    assert len(re.findall(r" custom-call\(", entry)) == 1 and len(re.findall(r" fusion\(", entry)) == 1
    assert not re.search(r" (copy|transpose|slice|add|dot)\(", entry)
