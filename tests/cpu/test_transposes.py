"""Fused products where JAX transposes them, and what else of them runs outside of `jax.jit` or under its settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowered import calls

import jax_bwgemm
from jax_bwgemm import gated_matmul, gram, matmul

QUIET: Any = {"on_fallback": "ignore"}
pytestmark = pytest.mark.usefixtures("quiet")


def values(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in shapes]


A, W, U, BIAS, RESIDUAL, SQUARE, CT = values((4, 8), (8, 6), (8, 6), (6,), (4, 6), (4, 4), (4, 6))
LINEAR: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...], Any]] = {
    "residual": (lambda a, r: matmul(a, W, residual=r), lambda a, r: a @ W + r, (A, RESIDUAL), CT),
    "bias": (lambda w, b: matmul(A, w, bias=b, alpha=2.0), lambda w, b: 2 * (A @ w) + b, (W, BIAS), CT),
    "operand": (
        lambda a: matmul(a, W, epilogue=lambda acc, s: acc * s, operands=(BIAS,)), lambda a: (a @ W) * BIAS, (A,), CT
    ),
    "results": (
        lambda a: matmul(a, W, epilogue=lambda acc: (acc, jnp.sum(acc, 0))),
        lambda a: (a @ W, jnp.sum(a @ W, 0)), (A,), (CT, BIAS),
    ),
    "gate": (lambda u: gated_matmul(A, W, u), lambda u: jax.nn.silu(A @ W) * (A @ u), (U,), CT),
    "gram": (lambda r: gram(A, residual=r, beta=2.0), lambda r: A @ A.T + 2 * r, (SQUARE,), SQUARE),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_transposed(name: str) -> None:
    ours, theirs, args, ct = LINEAR[name]
    for wrap in (lambda f: f, jax.jit):
        for got, want in zip(
            jax.tree.leaves(jax.linear_transpose(wrap(ours), *args)(ct)),
            jax.tree.leaves(jax.linear_transpose(theirs, *args)(ct)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_tangent_that_is_written_with_a_residual() -> None:
    @jax.custom_jvp
    def f(a: jax.Array, w: jax.Array) -> jax.Array:
        return matmul(a, w)

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (a, w), (da, dw) = primals, tangents
        return matmul(a, w), matmul(da, w, residual=matmul(a, dw))

    both = [jax.grad(lambda *x, g=g: (g(*x) * CT).sum(), (0, 1))(A, W) for g in (f, jnp.matmul)]
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_is_not_linear_is_jaxs_error() -> None:
    with pytest.raises(NotImplementedError, match="Transpose rule"):
        jax.linear_transpose(lambda a: matmul(a, W, activation="relu"), A)(CT)


@pytest.mark.parametrize(
    "f", [lambda w: matmul(A, w, activation="gelu").sum(), lambda w: gated_matmul(A, w, w).sum()], ids=["gelu", "gated"]
)
def test_gradients_outside_of_jit_compile_once(f: Callable[..., Any]) -> None:
    compiled = []

    def listener(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.block_until_ready(jax.grad(f)(W))
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.block_until_ready(jax.grad(f)(2 * W))
        num, compiled[:] = len(compiled), []
        jax.block_until_ready(jax.grad(f)(W))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert num <= 1 and not compiled  # one multiplies by 2


def test_strict_promotion() -> None:
    """Of what the user does not mix."""
    x = SQUARE.astype(jnp.bfloat16)
    small, wide = x.astype(jnp.int8), x.astype(jnp.complex64)
    with jax.numpy_dtype_promotion("strict"):
        assert matmul(x, x, epilogue=jax.nn.relu).dtype == jnp.bfloat16
        assert matmul(small, small, out_dtype=jnp.bfloat16, activation="relu").dtype == jnp.bfloat16
        assert matmul(wide, wide, alpha=0.5).dtype == jnp.complex64
        assert gated_matmul(x, x, x).dtype == jax_bwgemm.newton_schulz(x, **QUIET).dtype == jnp.bfloat16


def test_no_imaginary_part_is_lost() -> None:
    wide = SQUARE.astype(jnp.complex64)
    with pytest.raises(ValueError, match="`a` requires real numbers for a result of float32, got complex64"):
        matmul(wide, SQUARE, out_dtype=jnp.float32, epilogue=lambda acc: 2 * acc)
    with pytest.raises(ValueError, match="`epilogue` requires real results, got complex64.4, 4.: return its real part"):
        matmul(SQUARE, SQUARE, epilogue=lambda acc: acc * 1j)
    with pytest.raises(ValueError, match="`gated_matmul` requires a floating result, got int8"):
        gated_matmul(*[SQUARE.astype(jnp.int8)] * 3)


def test_tensors_of_many_dimensions(artifacts_dir: Path) -> None:
    """As many as there are letters, each once; what has more is JAX's, and a sentence where it was to be ours."""

    def of_rank(rank: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2,) * rank, jnp.bfloat16)

    axes = tuple(range(26))
    shared = functools.partial(jax_bwgemm.dot_general, dimension_numbers=((axes, axes), ((), ())), **QUIET)
    assert jax.eval_shape(shared, of_rank(27), of_rank(27)).shape == (2, 2)
    apart = {"dimension_numbers": (((0,), (0,)), ((), ()))}
    with pytest.raises(ValueError, match="at most 52 modes, got 53: leave it to `lax.dot_general`"):
        jax.eval_shape(functools.partial(jax_bwgemm.dot_general, **apart, **QUIET), of_rank(27), of_rank(27))
    with jax_bwgemm.config(device="h200"), jax_bwgemm.installed():
        f = jax.jit(functools.partial(lax.dot_general, **apart))
        assert not calls(f.trace(of_rank(27), of_rank(27)).lower(lowering_platforms=("cuda",)).as_text())
