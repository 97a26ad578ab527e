"""Feed-forward blocks on a GPU: values and gradients of bfloat16 against float64, also of sizes that no tile has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch

SIZES = [(512, 256, 384, 256), (200, 136, 264, 72), (2048, 512, 1024, 512), (64, 512, 2048, 512), (3, 64, 128, 40)]


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    scales = [1.0 if i == 0 or len(s) == 1 else s[0] ** -0.5 for i, s in enumerate(shapes)]
    return [jnp.asarray(rng.standard_normal(s) * x, jnp.bfloat16) for s, x in zip(shapes, scales, strict=True)]


def in_float64(f: Callable[..., jax.Array], operands: list[jax.Array]) -> list[np.ndarray]:
    """The result, and the gradient of its sum in each operand, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in operands]
        out, pullback = jax.vjp(f, *wide)
        return [np.asarray(x) for x in (out, *pullback(jnp.ones_like(out)))]


def close(got: object, want: list[np.ndarray]) -> None:
    for i, (g, w) in enumerate(zip(jax.tree.leaves(got), want, strict=True)):
        error = np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w)
        assert error < 2.0**-6, (i, error)


def both(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, pullback = jax.vjp(f, *operands)
        return out, pullback(jnp.ones_like(out))

    return jax.jit(run)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_block(sizes: tuple[int, ...], activation: str, arch: Arch) -> None:
    t, d, f, n = sizes
    operands, active = arrays((t, d), (d, f), (d, f), (f, n)), ACTIVATIONS[activation]

    def plain(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        return (active(x @ w) * (x @ u)) @ v

    want = in_float64(plain, operands)
    close(both(lambda *o: jax_bwgemm.gated_mlp(*o, activation=activation, on_fallback="error"))(*operands), want)
    close(both(jax_bwgemm.accelerate(plain))(*operands), want)
    separate = both(lambda x, w, u, v: jax_bwgemm.gated_matmul(x, w, u, activation=activation) @ v)
    close(separate(*operands), want)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_a_block_with_biases_and_a_residual(sizes: tuple[int, ...], activation: str, arch: Arch) -> None:
    t, d, f, n = sizes
    operands, active = arrays((t, d), (d, f), (f, n), (f,), (n,), (t, n)), ACTIVATIONS[activation]

    def ours(*operands: jax.Array) -> jax.Array:
        x, w, v, b, c, r = operands
        kwargs = {"activation": activation, "on_fallback": "error"}
        return jax_bwgemm.mlp(x, w, v, bias_in=b, bias_out=c, residual=r, **kwargs)

    def plain(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array, r: jax.Array) -> jax.Array:
        return active(x @ w + b) @ v + c + r

    want = in_float64(plain, operands)
    close(both(ours)(*operands), want)
    close(both(jax_bwgemm.accelerate(plain))(*operands), want)


def test_kernels_of_a_gated_block(arch: Arch) -> None:
    """All eight products of a training step are ours, and nothing else touches hidden values."""
    operands = arrays((4096, 2048), (2048, 4096), (2048, 4096), (4096, 2048))

    @jax_bwgemm.accelerate
    def found(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ w) * (x @ u)) @ v

    for f in (lambda *o: jax_bwgemm.gated_mlp(*o, on_fallback="error"), found):
        program = both(f).lower(*operands).compile()
        calls = [line for line in program.as_text().splitlines() if 'custom_call_target="jax_bwgemm' in line]
        assert len(calls) == 8 and sum("_gated_" in line for line in calls) == 1
        assert sum("_residual" in line for line in calls) == 1 and sum("before:bfloat16" in line for line in calls) >= 1


def test_the_same_bits_every_time(arch: Arch) -> None:
    operands = arrays((1024, 512), (512, 1024), (512, 1024), (1024, 512))
    step = both(jax_bwgemm.gated_mlp)
    first, *others = (jax.tree.leaves(step(*operands)) for _ in range(5))
    for other in others:
        assert all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(first, other, strict=True))


def test_the_derivative_of_an_activation(arch: Arch) -> None:
    """The kernel of a gelu returns what goes into it, too."""
    operands = arrays((512, 256), (256, 1024), (1024,))
    want = in_float64(lambda x, w, b: jax.nn.gelu(x @ w + b), operands)
    ours = both(lambda x, w, b: jax_bwgemm.matmul(x, w, bias=b, activation="gelu", on_fallback="error"))
    close(ours(*operands), want)
