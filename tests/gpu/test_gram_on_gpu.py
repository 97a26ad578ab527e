"""Symmetric products on a GPU: every kernel of its target against float64, bit by bit its own transpose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.runtime.decision import target_arch
from tests.cases import BOUNDS, has, relative_error

ARCH = target_arch(None)
VARIANTS = [] if isinstance(ARCH, str) else [v for v in catalogue((ARCH.target,)) if v.tile.symmetric]
TILES: list[Tile] = list(dict.fromkeys(v.tile for v in VARIANTS))
gram = functools.partial(jax_bwgemm.gram, on_fallback="error")


def check(out: jax.Array, a: np.ndarray, alpha: float = 1.0, addend: np.ndarray | None = None) -> None:
    got = np.asarray(out)
    bits = got.view(f"u{got.itemsize}")
    assert np.array_equal(bits, bits.swapaxes(-1, -2))
    want = alpha * (a @ a.swapaxes(-1, -2))
    assert relative_error(got, want if addend is None else want + addend) <= BOUNDS[str(got.dtype)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("m, k, batch", [(8, 8, 1), (1032, 200, 2), (2056, 4104, 1)])
def test_kernels(variant: Variant, m: int, k: int, batch: int) -> None:
    rng = np.random.default_rng(m)
    a = jnp.asarray(rng.standard_normal((batch, m, k), np.float32), variant.a_dtype)
    wide, transpose_a = np.asarray(a, np.float64), variant.a_major == "m"
    options = {"tile": variant.tile, "out_dtype": variant.out_dtype, "transpose_a": transpose_a}
    alpha = -0.5 if has(variant, "alpha") else 1.0
    addend = None
    if has(variant, "residual"):
        residual = rng.standard_normal((batch, m, m), np.float32)
        residual = jnp.asarray(residual + residual.swapaxes(1, 2), variant.out_dtype)
        options |= {"residual": residual, "beta": 1.5}
        addend = 1.5 * np.asarray(residual, np.float64)
    stored = jnp.asarray(np.ascontiguousarray(np.asarray(a).swapaxes(1, 2))) if transpose_a else a
    check(jax.jit(functools.partial(gram, alpha=alpha, **options))(stored), wide, alpha, addend)


@pytest.mark.parametrize("m, k", [(8192, 512), (4096, 4096), (2048, 2048), (1024, 4096), (1000, 72), (513, 100)])
def test_what_the_planner_chooses(m: int, k: int) -> None:
    a = jnp.asarray(np.random.default_rng(0).standard_normal((m, k), np.float32), jnp.bfloat16)
    check(jax.jit(gram)(a), np.asarray(a, np.float64))


def test_the_gradient() -> None:
    rng = np.random.default_rng(0)
    a, g = (jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in ((1024, 512), (1024, 1024)))
    (found,) = jax.jit(lambda a, g: jax.vjp(gram, a)[1](g))(a, g)
    wide = np.asarray(g, np.float64)
    assert relative_error(found, (wide + wide.T) @ np.asarray(a, np.float64)) <= 2 * BOUNDS["bfloat16"]


@pytest.mark.parametrize("shape", [(1024, 2048), (2048, 1024)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), jnp.bfloat16)
    found = jax.jit(functools.partial(jax_bwgemm.newton_schulz, on_fallback="error"))(x)
    values = np.linalg.svd(np.asarray(found, np.float32), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3
