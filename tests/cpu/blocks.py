"""Feed-forward blocks and gated products beside the same written with `@`, and their operands: for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm import gated_matmul, gated_mlp, mlp
from jax_bwgemm.ops.reference import OPS

Fun = Callable[..., jax.Array]
T, D, F, N = 8, 16, 24, 20  # tokens, width, hidden values, width of the result
HOW = {"on_fallback": "ignore", "precision": "highest"}


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes]


def gate(activation: str = "silu") -> tuple[Fun, Fun, list[jax.Array]]:
    """With biases."""

    def plain(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return OPS[activation](x @ w + b) * (x @ v + c)

    def ours(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return gated_matmul(x, w, v, bias_gate=b, bias_up=c, activation=activation, **HOW)

    return ours, plain, arrays((2, T, D), (D, F), (D, F), (F,), (F,))


def bare_gate() -> tuple[Fun, Fun, list[jax.Array]]:
    ours = functools.partial(gated_matmul, activation="gelu", **HOW)
    return ours, lambda x, w, v: jax.nn.gelu(x @ w) * (x @ v), arrays((2, T, D), (D, F), (D, F))


def dense(activation: str = "gelu") -> tuple[Fun, Fun, list[jax.Array]]:
    def plain(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array, r: jax.Array) -> jax.Array:
        return OPS[activation](x @ w + b) @ v + c + r

    def ours(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array, r: jax.Array) -> jax.Array:
        return mlp(x, w, v, bias_in=b, bias_out=c, residual=r, activation=activation, **HOW)

    return ours, plain, arrays((2, T, D), (D, F), (F, N), (F,), (N,), (2, T, N))


def gated(activation: str = "silu") -> tuple[Fun, Fun, list[jax.Array]]:
    def plain(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        return (OPS[activation](x @ w) * (x @ u)) @ v

    return functools.partial(gated_mlp, activation=activation, **HOW), plain, arrays((2, T, D), (D, F), (D, F), (F, N))


def biased() -> tuple[Fun, Fun, list[jax.Array]]:
    def plain(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array, *b: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ w + b[0]) * (x @ u + b[1])) @ v + b[2] + b[3]

    def ours(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array, *b: jax.Array) -> jax.Array:
        return gated_mlp(x, w, u, v, bias_gate=b[0], bias_up=b[1], bias_down=b[2], residual=b[3], **HOW)

    shapes = (2, T, D), (D, F), (D, F), (F, N), (F,), (F,), (N,), (2, T, N)
    return ours, plain, arrays(*shapes)


LAYERS = {"gate": gate, "bare gate": bare_gate, "mlp": dense, "gated": gated, "gated with biases": biased}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def close(got: object, want: object) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def gradients(f: Fun, operands: list[jax.Array]) -> Fun:
    return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), tuple(range(len(operands))))
