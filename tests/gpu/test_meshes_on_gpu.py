"""Products over two GPUs: values against float64, and no more collectives than `jnp`'s."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
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

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
matmul = functools.partial(jax_bwgemm.matmul, on_fallback="error")
SPECS = {
    "m": (P("x"), P()),
    "n": (P(), P(None, "x")),
    "k": (P(None, "x"), P("x")),
    "m and k by FSDP": (P("x"), P("x")),
}


@pytest.fixture(autouse=True)
def on_gpus(arch: Arch) -> None:
    if jax.device_count() < 2:
        pytest.skip("one GPU is no mesh")


def placed(axis_type: AxisType, specs: Any, *shapes: tuple[int, ...]) -> tuple[Any, list[jax.Array]]:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    rng = np.random.default_rng(0)
    arrays = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    return mesh, [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def compiled(f: Callable[..., Any], operands: list[jax.Array]) -> tuple[Any, list[str]]:
    program = jax.jit(f).lower(*operands).compile()
    return program(*operands), sorted(re.findall(rf"\b({COLLECTIVES})(?:-start)?\(", program.as_text() or ""))


def check(got: jax.Array, a: jax.Array, b: jax.Array) -> None:
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 0.005 * np.linalg.norm(want)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (130, 70, 66)], ids=str)
def test_a_product(name: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    _, (a, b) = placed(AxisType.Auto, SPECS[name], (m, k), (k, n))
    before = ffi.execute_count()
    got, ours = compiled(matmul, [a, b])
    jax.block_until_ready(got)
    assert ffi.execute_count() >= before + 2  # on each GPU
    want, theirs = compiled(jnp.matmul, [a, b])
    assert len(ours) <= len(theirs) and got.sharding.is_equivalent_to(want.sharding, 2)
    check(got, a, b)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_gradients(axis_type: AxisType) -> None:
    mesh, (a, b) = placed(axis_type, SPECS["m"], (512, 256), (256, 384))
    with jax.set_mesh(mesh):
        both = [
            compiled(jax.grad(lambda a, b, f=f: (f(a, b).astype(jnp.float32) ** 2).sum(), (0, 1)), [a, b])
            for f in (matmul, jnp.matmul)
        ]
    (got, ours), (want, theirs) = both
    assert ours == theirs
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y)


def test_a_whole_model() -> None:
    _, (x, up, down) = placed(AxisType.Auto, (P("x"), P(), P()), (1024, 512), (512, 1024), (1024, 512))

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        return jax.grad(lambda up, down: (jax.nn.relu(x @ up) @ down).astype(jnp.float32).sum(), (0, 1))(up, down)

    before = ffi.execute_count()
    with jax_bwgemm.installed():
        got, _ = compiled(step, [x, up, down])
    jax.block_until_ready(got)
    assert ffi.execute_count() >= before + 8
    want, _ = compiled(step, [x, up, down])
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y)
