"""k in parts by kernels that ship, in the emulator, against float64: of any k, whose last part is what is left."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.planner import parts
from jax_bwgemm.runtime import attempts, emulated, ffi
from tests.cases import BOUNDS, relative_error
from tests.emu.shipped import why_any_missing

WHY_NOT = ffi.status() or why_any_missing("sm_90a")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
matmul = functools.partial(jax_bwgemm.matmul, emulate="sm_90a", device="h200", on_fallback="error")


@pytest.fixture(autouse=True)
def three_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of products that would be too small for any."""
    monkeypatch.setattr(parts, "counts", lambda *_: (3,))
    monkeypatch.setattr(parts, "sum_us", lambda *_: -1e9)
    attempts.forget()
    yield
    attempts.forget()


def stored(form: str, m: int, n: int, k: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """a of shape (m, k), or "t" (k, m); b of shape (k, n), or "t" (n, k)."""
    rng = np.random.default_rng(0)
    shapes = (m, k) if form[0] == "n" else (k, m), (k, n) if form[1] == "n" else (n, k)
    a, b = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return a, b


def product(form: str, **settings: Any) -> Any:
    def f(a: jax.Array, b: jax.Array, **more: Any) -> jax.Array:
        return matmul(a if form[0] == "n" else a.T, b if form[1] == "n" else b.T, **settings, **more)

    return jax.jit(f)


def exact(form: str, a: jax.Array, b: jax.Array) -> np.ndarray:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return (a if form[0] == "n" else a.T) @ (b if form[1] == "n" else b.T)


def names(f: Any, *args: Any, **more: Any) -> tuple[list[str], np.ndarray]:
    with emulated.recorded() as runs:
        out = np.asarray(jax.block_until_ready(f(*args, **more)))
    return [run.name for run in runs], out


KINDS = [("bfloat16", form) for form in ("tn", "nn", "nt", "tt")] + [("float16", form) for form in ("tn", "nn", "nt")]


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_every_major(dtype: str, form: str) -> None:
    """Parts of three k tiles of 64, and 24 terms that are left. What lies behind the last one's is the next row."""
    a, b = stored(form, 72, 40, 408, dtype)
    found, out = names(product(form), a, b)
    assert len(found) == 1 and "_f32_" in found[0]
    assert relative_error(out, exact(form, a, b)) <= BOUNDS[dtype]
    assert np.array_equal(names(product(form), a, b)[1].view(np.uint16), out.view(np.uint16))


@pytest.mark.parametrize(
    ("form", "m", "n", "k"),
    [
        ("nt", 73, 37, 216),
        ("nt", 73, 37, 331),
        ("nt", 1, 130, 129),
        ("nn", 200, 37, 331),
        ("tn", 73, 40, 216),
        ("tn", 73, 72, 129),
    ],
)
def test_odd_sizes(form: str, m: int, n: int, k: int) -> None:
    """Results whose rows TMA cannot step over; operands that are padded first; a last part of one term."""
    a, b = stored(form, m, n, k, "bfloat16")
    found, out = names(product(form), a, b)
    assert any("_f32_" in name for name in found)
    assert relative_error(out, exact(form, a, b)) <= BOUNDS["bfloat16"]


@pytest.mark.parametrize("form", ["tn", "nt"])
def test_what_follows_the_sum_is_rounded_once(form: str) -> None:
    a, b = stored(form, 72, 40, 3 * 64, "bfloat16")
    rng = np.random.default_rng(1)
    bias, residual = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((40,), (72, 40)))
    found, out = names(product(form, alpha=0.5, activation="relu"), a, b, bias=bias, residual=residual)
    want = np.maximum(0.5 * exact(form, a, b) + np.asarray(bias, np.float64), 0) + np.asarray(residual, np.float64)
    assert len(found) == 1 and relative_error(out, want) <= BOUNDS["bfloat16"]
    found, out = names(product(form, out_dtype=jnp.float32), a, b)
    assert "_f32_" in found[0] and relative_error(out, exact(form, a, b)) <= BOUNDS["float32"]


@pytest.mark.parametrize("form", ["tn", "nn", "nt"])
def test_a_part_of_k_may_be_a_stranger_to_the_others(form: str) -> None:
    """A part that took a term of its neighbour's, or none of its own, would be far off."""
    a, b = stored(form, 72, 72, 331, "bfloat16")
    scales = np.repeat([1.0, 2.0**10, 2.0**20], 128)[:331]
    a = jnp.asarray(np.asarray(a, np.float32) * (scales if form[0] == "n" else scales[:, None]), "bfloat16")
    _, out = names(product(form, out_dtype=jnp.float32), a, b)
    for first in (0, 128, 256):
        own = np.zeros(331)
        own[first : first + 128] = 1
        part = jnp.asarray(np.asarray(a, np.float32) * (own if form[0] == "n" else own[:, None]), "bfloat16")
        _, alone = names(product(form, out_dtype=jnp.float32), part, b)
        assert relative_error(alone, exact(form, part, b)) <= BOUNDS["float32"]
    assert relative_error(out, exact(form, a, b)) <= BOUNDS["float32"]


@pytest.mark.parametrize("form", ["tn", "nn", "nt"])
def test_a_direct_tile_has_parts_too(form: str) -> None:
    """Of rows that start anywhere, in a launch that has stages for one part."""
    a, b = stored(form, 73, 9, 331, "bfloat16")
    found, out = names(product(form), a, b)
    assert len(found) == 1 and "_direct_" in found[0] and "_f32_" in found[0]
    assert relative_error(out, exact(form, a, b)) <= BOUNDS["bfloat16"]


def test_a_weights_gradient_of_a_layer() -> None:
    """As JAX differentiates it: the sum over all rows of (batch, rows) inputs is one k."""
    rng = np.random.default_rng(2)
    x, w, g = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((3, 64, 40), (40, 24), (3, 64, 24)))
    gradient = jax.jit(lambda x, w, g: jax.vjp(lambda w: matmul(x.reshape(-1, 40), w), w)[1](g.reshape(-1, 24))[0])
    found, out = names(gradient, x, w, g)
    wide = np.asarray(x, np.float64).reshape(-1, 40).T @ np.asarray(g, np.float64).reshape(-1, 24)
    assert any("_f32_mn" in name for name in found) and relative_error(out, wide) <= BOUNDS["bfloat16"]


def test_parts_are_added_in_their_order() -> None:
    """A large number, its opposite and a small one, each in a part of its own: only this order keeps the small one."""
    a = np.zeros((64, 3 * 64), np.float32)
    a[:, 0], a[:, 64], a[:, 128] = 2.0**40, -(2.0**40), 1.0
    b = jnp.ones((3 * 64, 64), "bfloat16")
    for form, x in (("nn", jnp.asarray(a, "bfloat16")), ("tn", jnp.asarray(a.T, "bfloat16"))):
        found, out = names(product(form), x, b)
        assert len(found) == 1 and (out.astype(np.float32) == 1).all()
    swapped = jnp.asarray(np.roll(a, 64, axis=1), "bfloat16")  # the small one first
    assert (names(product("nn"), swapped, b)[1].astype(np.float32) == 0).all()
