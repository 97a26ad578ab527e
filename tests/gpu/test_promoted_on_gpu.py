"""Hopper's tensor cores keep few bits of a float8 sum; promoted sums keep float32 from stage to stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime.decision import target_arch

ARCH = target_arch(None)
PRESET = jax.lax.DotAlgorithmPreset
M, N, K = 256, 384, 16384


@pytest.mark.skipif(not isinstance(ARCH, Arch) or ARCH.family.name != "hopper", reason="no Hopper GPU")
@pytest.mark.parametrize("majors", ["kk", "kn", "mk"])
def test_long_sums_of_positive_products(majors: str) -> None:
    """Truncated at every MMA of 32, a sum of 16384 falls short by per cents; at four MMAs of a stage, by far less."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float8_e4m3fn) for shape in ((M, K), (N, K)))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T

    def error(precision: PRESET) -> float:
        options = {"out_dtype": jnp.float32, "precision": precision, "on_fallback": "error"}

        def product(x: jax.Array, y: jax.Array) -> jax.Array:
            return jax_bwgemm.matmul(x if majors[0] == "k" else x.T, y if majors[1] == "n" else y.T, **options)

        got = jax.jit(product)(a if majors[0] == "k" else jnp.array(a.T), jnp.array(b.T) if majors[1] == "n" else b)
        return float(np.abs(np.asarray(got, np.float64) / exact - 1).max())

    promoted, fast = error(PRESET.ANY_F8_ANY_F8_F32), error(PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM)
    print(f"relative error of {majors}: promoted {promoted:.1e}, fast {fast:.1e}")
    assert promoted < 2e-3 and promoted < fast / 4
