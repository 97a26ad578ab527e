"""`install` on a GPU: values of whole models, that our kernels ran, and that no transpose did."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.bench import models
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import ffi


@pytest.fixture(autouse=True)
def on_a_gpu(arch: Arch) -> None:
    """Every test of this file runs our kernels."""


def assert_close(got: Any, want: Any, relative: float) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert np.linalg.norm(x - y) <= relative * np.linalg.norm(y)


def test_a_training_step() -> None:
    """Weights of all forms, their gradients, and scores: against XLA's float32."""
    block = models.Block(256, 704, 4, 2, 128, attention="einsum")
    w, x = models.make_operands(block)

    def gradients(w: Any, x: jax.Array) -> Any:
        return jax.grad(lambda w: models.forward(block, w, x).astype(jnp.float32).sum())(w)

    before = ffi.execute_count()
    with jax_bwgemm.installed():
        got = jax.block_until_ready(jax.jit(gradients)(w, x))
    num = ffi.execute_count() - before
    assert num >= 18
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (w, x))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(gradients)(*wide)
    theirs = jax.block_until_ready(jax.jit(gradients)(w, x))
    assert ffi.execute_count() == before + num  # the last two were XLA's
    for ours, xlas, exact in zip(*(jax.tree.leaves(tree) for tree in (got, theirs, want)), strict=True):
        error = [float(jnp.linalg.norm(z.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)) for z in (ours, xlas)]
        assert error[0] <= 1.5 * error[1] + 2.0**-9


def test_a_weights_gradient_is_one_kernel() -> None:
    """Stored as the weight is: XLA drops the one that JAX would transpose, and no transpose runs."""
    x, w, ct = (jnp.ones(shape, jnp.bfloat16) for shape in ((2048, 1024), (1024, 512), (2048, 512)))

    def f(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        return jax.vjp(lambda w: x @ w, w)[1](ct)[0]

    with jax_bwgemm.installed():
        program = jax.jit(f).lower(x, w, ct).compile()
    text = program.as_text() or ""
    assert text.count("custom-call(") == 1 and "transpose(" not in text.replace("jit(f)/transpose(", "")
    np.testing.assert_array_equal(program(x, w, ct), np.full((1024, 512), 2048.0))


def test_a_result_that_is_read_both_ways() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 512), jnp.bfloat16)

    def f(x: jax.Array) -> Any:
        y = x @ x
        return y, y.T, jax.grad(lambda x: (x @ x).astype(jnp.float32).sum())(x)

    with jax_bwgemm.installed():
        got = jax.jit(f)(x)
    assert_close(got, jax.jit(f)(x), 0.01)
    np.testing.assert_array_equal(got[0], got[1].T)
