"""Small products under JAX on Hopper: by direct kernels, of operands as they lie, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.runtime import emulated, ffi
from tests.cases import Case, check, check_case, relative_error
from tests.emu.shipped import why_any_missing

WHY_NOT = ffi.status() or why_any_missing("sm_90a")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

matmul = functools.partial(jax_bwgemm.matmul, emulate="sm_90a", on_fallback="error")


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def direct(f: Any, *args: Any) -> tuple[Any, list[str]]:
    """What `f` makes, and the majors of the kernels, all direct ones: nothing is padded or transposed before."""
    with emulated.recorded() as runs:
        found = jax.block_until_ready(jax.jit(f)(*args))
    assert all("_direct_" in run.name for run in runs), [run.name for run in runs]
    return found, [run.name.split("_")[5] for run in runs]


@pytest.mark.parametrize("k", [64, 67], ids=["aligned", "odd"])
@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
def test_majors(majors: str, k: int) -> None:
    a, b = (normal(0, 40, k) if majors[0] == "k" else normal(0, k, 40)), normal(1, k, 24)
    b = b if majors[1] == "n" else jnp.asarray(np.ascontiguousarray(b.T))

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(a if majors[0] == "k" else a.T, b if majors[1] == "n" else b.T)

    out, ran = direct(f, a, b)
    left, right = f64(a if majors[0] == "k" else a.T), f64(b if majors[1] == "n" else b.T)
    check(np.asarray(out), left @ right, "bfloat16")
    flipped = ("m" if majors[1] == "n" else "k") + ("n" if majors[0] == "m" else "k") + "m"
    assert ran in ([majors + "n"], [flipped])  # as it is, or transposed


@pytest.mark.parametrize("cluster_k", [1, 8])
@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
def test_a_matrix_and_few_vectors(majors: str, cluster_k: int) -> None:
    """By a thin tile, which is the user's here: the planner has one for matrices of 16 MB and more."""
    tile = Tile(128 if majors[0] == "k" else 120, 8, cluster_k=cluster_k, direct=True)
    a, b = normal(0, *((131, 167) if majors[0] == "k" else (167, 131))), normal(1, 167, 3)
    b = b if majors[1] == "n" else jnp.asarray(np.ascontiguousarray(b.T))

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        own = a if majors[0] == "k" else a.T
        return matmul(own, b if majors[1] == "n" else b.T, tile=tile)

    out, ran = direct(f, a, b)
    left, right = f64(a if majors[0] == "k" else a.T), f64(b if majors[1] == "n" else b.T)
    check(np.asarray(out), left @ right, "bfloat16")
    assert ran == [majors + "n"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients(dtype: str) -> None:
    """Of odd sizes: each cotangent is a kernel's, of its own majors, where one ships."""
    a, b, ct = normal(0, 33, 47, dtype=dtype), normal(1, 47, 19, dtype=dtype), normal(2, 33, 19, dtype=dtype)
    if dtype == "float16":  # whose direct kernels are those of forward passes
        out, ran = direct(matmul, a, b)
        assert ran in (["knn"], ["mkm"]) and relative_error(np.asarray(out), f64(a) @ f64(b)) < 1e-3
        return
    (d_a, d_b), ran = direct(lambda a, b, ct: jax.vjp(matmul, a, b)[1](ct), a, b, ct)
    assert {majors[:2] for majors in ran} == {"kk", "mn"} and len(ran) == 2  # each as it is, or transposed
    check(np.asarray(d_a), f64(ct) @ f64(b).T, dtype)
    check(np.asarray(d_b), f64(a).T @ f64(ct), dtype)


def test_a_batch_that_shares_its_weights() -> None:
    a, b = normal(0, 3, 21, 40), normal(1, 40, 24)
    out, ran = direct(jax.vmap(lambda a, b: matmul(a, b, out_dtype="float32"), (0, None)), a, b)
    assert ran == ["knn"] and out.dtype == jnp.float32
    check(np.asarray(out), f64(a) @ f64(b), "float32")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_a_dense_layer(activation: str | None) -> None:
    a, b, bias = normal(0, 9, 55), normal(1, 55, 30), normal(2, 30)
    out, _ = direct(lambda a, b, bias: matmul(a, b, bias=bias, activation=activation), a, b, bias)
    case = Case(9, 30, 55, has_bias=True, activation=activation)
    want = case.reference(np.asarray(a)[None], np.asarray(b)[None], np.asarray(bias))[0]
    check_case(np.asarray(out), want, case)


def test_a_slice_that_begins_anywhere() -> None:
    """Its rows are read as they lie, but where it begins must be a multiple of 16 bytes: elsewhere it is copied."""
    whole, b = normal(0, 44, 37), normal(1, 37, 16)
    out, _ = direct(lambda whole, b: matmul(whole[3:], b), whole, b)
    check(np.asarray(out), f64(whole)[3:] @ f64(b), "bfloat16")
