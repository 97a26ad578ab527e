"""Gradients of weights, summed over batches in a loop, on a GPU: against float64, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch


def summed(sums: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`sums` and x^T y of each batch; the product is JAX's gradient of a dense layer's weight."""

    def turn(sums: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        own, cotangent = batch
        _, pullback = jax.vjp(lambda w: own @ w, jnp.zeros((own.shape[-1], cotangent.shape[-1]), own.dtype))
        return sums + pullback(cotangent)[0].astype(sums.dtype), None

    return lax.scan(turn, sums, (x, y))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(4, 512, 256, 384), (3, 1000, 520, 264), (5, 4096, 1024, 4096), (2, 64, 2048, 512)])
def test_against_float64(sizes: tuple[int, ...], dtype: str, arch: Arch) -> None:
    """Of few tiles, the sum may be computed in parts, which XLA adds to what there is."""
    turns, tokens, k, n = sizes
    rng = np.random.default_rng(0)

    def normal(*shape: int, of: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), of)

    sums, x, y = normal(k, n, of=dtype), normal(turns, tokens, k), normal(turns, tokens, n)
    report = jax_bwgemm.accelerate(summed).report(sums, x, y)
    assert report.products[-1].epilogue == "residual", str(report)  # behind the forward pass, which nobody needs
    program = jax.jit(jax_bwgemm.accelerate(summed)).lower(sums, x, y).compile()
    assert "output_to_operand_aliasing" in program.as_text() or k * n < 2**20
    got = np.asarray(program(sums, x, y), np.float64)
    want = np.asarray(sums, np.float64) + np.einsum("tsk,tsn->kn", np.asarray(x, np.float64), np.asarray(y, np.float64))
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol={"float32": 2e-5, "bfloat16": 2.0**-7 * turns}[dtype] * scale)
    assert np.array_equal(got, np.asarray(program(sums, x, y), np.float64)), "the argument is as it was"
