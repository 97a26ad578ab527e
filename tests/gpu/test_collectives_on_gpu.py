"""Collective matmul over two GPUs: values and gradients against float64, by our kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import ffi

SPECS = (P("x"), P(None, "x"), P("x"))


@pytest.fixture(autouse=True)
def on_gpus(arch: Arch) -> None:
    if jax.device_count() < 2:
        pytest.skip("one GPU is no mesh")


@pytest.mark.parametrize("num_chunks", [None, 1, 3])
@pytest.mark.parametrize("shape", [(512, 256, 384), (520, 130, 132)], ids=str)
@pytest.mark.parametrize("in_order", [True, False])
def test_an_mlp_and_its_gradients(in_order: bool, shape: tuple[int, int, int], num_chunks: int | None) -> None:
    m, d, f = shape  # rows, width, hidden
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    settings: dict[str, Any] = {"axis_name": "x", "num_chunks": num_chunks, "on_fallback": "error"}
    up = functools.partial(jax_bwgemm.all_gather_matmul, in_order=in_order, activation="relu", **settings)
    down = functools.partial(jax_bwgemm.matmul_reduce_scatter, **settings)
    mlp = jax.shard_map(lambda x, w, v: down(up(x, w), v), mesh=mesh, in_specs=SPECS, out_specs=P("x"))
    rng = np.random.default_rng(0)
    operands = [
        jax.device_put(jnp.asarray(rng.standard_normal(size), jnp.bfloat16), NamedSharding(mesh, spec))
        for size, spec in zip(((m, d), (d, f), (f, d)), SPECS, strict=True)
    ]

    def loss(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = mlp(*operands).astype(jnp.float32)
        return (out**2).sum() / 2, out

    before = ffi.execute_count()
    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)
    jax.block_until_ready(gradients)
    assert ffi.execute_count() >= before + 2 * 10  # on each GPU

    x, w, v = (np.asarray(z, np.float64) for z in operands)
    h = np.maximum(x @ w, 0)
    ct = h @ v
    dh = (ct @ v.T) * (h > 0)
    for got, want in zip((out, *gradients), (ct, dh @ w.T, x.T @ dh, h.T @ ct), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 0.02 * np.linalg.norm(want)
