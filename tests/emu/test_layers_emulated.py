"""Feed-forward blocks with `emulate=`: gated kernels, several results and matrices, forward and back, through JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.runtime import emulated, ffi
from tests.emu.shipped import why_any_missing

WHY_NOT = ffi.status() or why_any_missing("sm_100f", "sm_90a")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.usefixtures("large_products"),
]
T, D, F, N = 40, 48, 136, 64


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s) * (1 if len(s) == 1 else s[0] ** -0.5), jnp.bfloat16) for s in shapes]


def check(ours: Callable[..., jax.Array], plain: Callable[..., jax.Array], operands: list[jax.Array]) -> list[str]:
    """Values and all gradients, against the same in float32. Returns the names of the kernels that ran."""

    def both(f: Callable[..., jax.Array], x: list[jax.Array]) -> list[jax.Array]:
        out, pullback = jax.vjp(f, *x)
        return [out, *pullback(jnp.ones_like(out))]

    with emulated.recorded() as runs:
        got = jax.block_until_ready(both(ours, operands))
    want = both(plain, [x.astype(jnp.float32) for x in operands])
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        error = np.linalg.norm(np.asarray(g, np.float64) - np.asarray(w)) / np.linalg.norm(np.asarray(w))
        assert error < 2.0**-6, (i, error)
    return [run.name for run in runs]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_a_gated_block(target: str) -> None:
    names = check(
        lambda x, w, u, v: jax_bwgemm.gated_mlp(x, w, u, v, emulate=target, on_fallback="error"),
        lambda x, w, u, v: (jax.nn.silu(x @ w) * (x @ u)) @ v,
        arrays((T, D), (D, F), (D, F), (F, N)),
    )
    assert len(names) == 8 and sum("_gated_silu_gate_before" in name for name in names) == 1


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_block_with_biases(target: str, activation: str) -> None:
    active = getattr(jax.nn, activation)

    def ours(x: jax.Array, w: jax.Array, v: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        how = {"activation": activation, "emulate": target, "on_fallback": "error"}
        return jax_bwgemm.mlp(x, w, v, bias_in=b, bias_out=c, **how)

    operands = arrays((T, D), (D, F), (F, N), (F,), (N,))
    names = check(ours, lambda x, w, v, b, c: active(x @ w + b) @ v + c, operands)
    assert len(names) == 6


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_what_goes_into_an_activation_is_a_second_result(target: str) -> None:
    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, activation="silu", emulate=target, on_fallback="error")

    names = check(ours, lambda x, w: jax.nn.silu(x @ w), arrays((T, D), (D, F)))
    assert names[0].endswith("_silu_before_identity")
