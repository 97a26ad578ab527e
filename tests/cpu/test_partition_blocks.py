"""Fused feed-forward blocks on a mesh that XLA partitions (tests/cpu/test_partition.py says how that is seen here)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshed import F32, H200, arrays, compiled, grad, mesh_of, shapes_of

import jax_bwgemm
from jax_bwgemm.ops import choices, lowering
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.runtime.rungs import Attempt


@pytest.fixture(autouse=True)
def _cuda_rule(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU, planned for an H200."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])


def _asked(f: Any, operands: Any) -> list[bool]:
    """Of each product of a compiled program, whether others are said to want SMs beside it."""
    found: list[bool] = []

    def choose(asked: Any, _: Any) -> Attempt:
        found.append(asked.shares_device)
        return Attempt(Route(asked.problem), reason="this is a CPU")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "choose", choose)
        jax.jit(f).lower(*operands).compile()
    return found


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_product_of_a_mesh_shares_its_device(axis_type: AxisType) -> None:
    """Collectives run beside it: of a layer's gradient, and by hand. Not on one device, and not on a mesh of one."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, **H200)

    x, w = arrays((16, 64), (64, 32))
    assert _asked(grad(layer), (x, w)) == [False] * 3
    with jax.set_mesh(mesh_of(axis_type)):
        placed = jax.device_put(x, P("x")), jax.device_put(w, P())
        assert _asked(grad(layer), placed) == [True] * 3
        by_hand = jax.shard_map(layer, in_specs=(P("x"), P()), out_specs=P("x"))
        assert _asked(by_hand, placed) == [True]
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:1])):
        assert _asked(layer, (jax.device_put(x, P("x")), jax.device_put(w, P()))) == [False]


X = (4, 16, 32)
BLOCKS: dict[str, tuple[P, P, P]] = {
    "data parallel": (P("x"), P(), P()),
    "tensor parallel": (P("x"), P(None, "y"), P("y")),
    "FSDP": (P("x"), P("x"), P("x")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("of", [lambda f, _: f, grad], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
def test_blocks(is_gated: bool, name: str, of: Any, axis_type: AxisType) -> None:
    """Both layers of a block, of one weight or two and fused: the collectives of the same written out, but for what is
    scattered where that is reduced and sliced."""
    placed, first, last = BLOCKS[name]
    num = 4 if is_gated else 3
    specs = (placed, *[first] * (num - 2), last)
    sharding = P("x") if axis_type == AxisType.Explicit else None

    def fused(x: jax.Array, *weights: jax.Array) -> jax.Array:
        block = jax_bwgemm.gated_mlp if is_gated else functools.partial(jax_bwgemm.mlp, activation="silu")
        return block(x, *weights, out_sharding=sharding, **H200)

    def plain(x: jax.Array, *weights: jax.Array) -> jax.Array:
        *firsts, down = weights
        gate, *up = (x @ w for w in firsts)
        h = jax.nn.silu(gate) * up[0] if up else jax.nn.silu(gate)
        return jnp.matmul(h, down, out_sharding=sharding)

    with jax.set_mesh(mesh_of(axis_type)):
        shapes = (X, *[(32, 64)] * (num - 2), (64, 32))
        operands = [jax.device_put(z, s) for z, s in zip(arrays(*shapes), specs, strict=True)]
        lowered = jax.jit(of(fused, num)).lower(*operands).as_text()
        got, found = compiled(of(fused, num), operands)
        want, theirs = compiled(of(plain, num), operands)
    assert "CustomSPMDPartitioning" in lowered
    scattered = found.count("reduce-scatter")
    assert found.count("all-gather") <= theirs.count("all-gather")
    assert found.count("all-reduce") <= theirs.count("all-reduce") - bool(scattered)
    assert scattered in (0, num - 1) and set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert shapes_of(got) == shapes_of(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        near = 2.0**-7 * float(jnp.abs(b.astype(F32)).max())
        np.testing.assert_allclose(np.asarray(a, F32), np.asarray(b, F32), rtol=2.0**-6, atol=near)
