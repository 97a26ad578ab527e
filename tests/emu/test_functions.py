"""Functions that were found or traced, in emulated kernels: `matmul(epilogue=)`, `accelerate` and Flax's layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm import accelerate, config, matmul
from jax_bwgemm.runtime import emulated, ffi, jit_build
from tests.emu.shipped import variants, why_missing

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("large_products")]

TARGETS = ("sm_90a", "sm_100f")
ENDS = ("_bias_gelu_residual", "_bias_silu", "_residual")
NEEDED = [v for target in TARGETS for v in variants(target) if v.name.endswith(ENDS)]
WHY_NOT = ffi.status() or next(filter(None, map(why_missing, NEEDED)), None)
is_built = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
compiles = pytest.mark.skipif(bool(ffi.status() or jit_build.why_not_here()), reason=str(jit_build.why_not_here()))
F32 = jnp.float32


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


X, W, BIAS, ROWS, MATRIX = normal(0, 72, 136), normal(1, 136, 264), normal(2, 264), normal(3, 72, 1), normal(4, 72, 264)


def run(f: Callable[..., Any], *args: Any) -> tuple[jax.Array, list[str]]:
    """The result, and what follows the products in the kernels that were emulated."""
    with emulated.recorded() as runs:
        result = jax.block_until_ready(f(*args))
    return result, [name.name.rpartition("_cluster")[2].partition("_")[2] for name in runs]


def close(got: jax.Array, want: jax.Array) -> None:
    wide = np.asarray(want, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), wide, rtol=0, atol=0.01 * np.abs(wide).max())


@is_built
@pytest.mark.parametrize("target", TARGETS)
def test_chains_are_instances(target: str) -> None:
    """The same kernel as by name, bit for bit."""
    with config(emulate=target, on_fallback="error"):
        want, names = run(lambda: matmul(X, W, bias=BIAS, activation="gelu", residual=MATRIX))
        operands = BIAS, MATRIX
        got, others = run(lambda: matmul(X, W, epilogue=lambda acc, b, r: jax.nn.gelu(acc + b) + r, operands=operands))
    assert names == others
    np.testing.assert_array_equal(got, want)


@is_built
@pytest.mark.parametrize("target", TARGETS)
def test_accelerated(target: str) -> None:
    """Its kernels are those of the layers' own names."""

    def f(x: Any, w: Any, b: Any, r: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jax.nn.silu(c @ w + b) @ w.T + r, None), x, length=2)[0]

    args = X, W / 16, BIAS, normal(5, *X.shape)
    with config(emulate=target, on_fallback="error"):
        report = accelerate(f).report(*args)
        got, names = run(accelerate(f), *args)
    assert [product.epilogue for product in report.products] == ["bias_silu", "residual"]
    assert [name.removeprefix("streamk_").removeprefix("pingpong_") for name in names] == 2 * ["bias_silu", "residual"]
    close(got, f(*args))


@is_built
def test_a_layer_of_flaxs() -> None:
    nnx = pytest.importorskip("flax.nnx")
    flax = pytest.importorskip("jax_bwgemm.flax")
    options = {"dtype": jnp.bfloat16, "bias_init": jax.nn.initializers.normal(1.0)}
    layer = flax.nnx.Linear(136, 264, activation="gelu", rngs=nnx.Rngs(0), **options)
    with config(emulate="sm_100f", on_fallback="error"):
        got, names = run(lambda: layer(X, residual=MATRIX))
    assert len(names) == 1 and names[0].endswith("bias_gelu_residual")
    close(got, jax.nn.gelu(nnx.Linear(136, 264, rngs=nnx.Rngs(0), **options)(X)) + MATRIX)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gate": (lambda acc, b, r: jax.nn.silu(acc + b) * r, (BIAS, MATRIX)),
    "all places": (
        lambda acc, b, c, r: jnp.where(acc * c > b, jnp.exp(jnp.minimum(acc, 1.0)) - r, jnp.clip(r, -1, 1)),
        (BIAS, ROWS, MATRIX),
    ),
}


@compiles
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function(target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled on demand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    f, operands = FUNCTIONS[name]
    with config(emulate=target, on_fallback="error", compile_missing="auto"):
        got, names = run(lambda: matmul(X, W, epilogue=f, operands=operands))
    assert len(names) == 1 and "expr" in names[0]
    close(got, f(jnp.matmul(X, W, preferred_element_type=F32), *(x.astype(F32) for x in operands)))


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_reductions(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several results, and what a kernel reduces of rows and of columns: one kernel, of a matrix and of a stack."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def f(acc: Any, b: Any) -> Any:
        y = jax.nn.relu(acc + b)
        return y, y.sum(-2), jnp.abs(acc).max((-1, -2)), (y * y).mean(-1), acc

    for x in (X, jnp.stack([X, -X])):
        with config(emulate=target, on_fallback="error", compile_missing="auto"):
            got, names = run(jax.jit(lambda x: matmul(x, W, epilogue=f, operands=(BIAS,))), x)
        want = f(jnp.matmul(x, W, preferred_element_type=F32), BIAS.astype(F32))
        assert len(names) == 1 and names[0].count("_sum") == 2 and names[0].count("_max") == 1
        assert [x.dtype for x in got] == [jnp.bfloat16, F32, F32, F32, jnp.bfloat16]
        jax.tree.map(close, got, want)
        for g, w in zip(got[1:4], want[1:4], strict=True):  # of values that are not rounded
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * float(jnp.abs(w).max()))
