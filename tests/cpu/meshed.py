"""Programs on a mesh that XLA partitions with the CUDA rule, on 8 CPU devices: shared by the tests of the partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from lowered import collectives

from jax_bwgemm.ops import choices
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.runtime.rungs import Attempt

BF16, F32 = jnp.bfloat16, jnp.float32
H200 = {"device": "h200", "on_fallback": "ignore"}


def mesh_of(axis_type: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Integers, whose products are exact in any order of summation."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-2, 3, shape), BF16) for shape in shapes]


def compiled(
    f: Callable[..., Any],
    operands: Sequence[jax.Array],
    reductions: list[str] | None = None,
    gathers: list[str] | None = None,
    **settings: Any,
) -> tuple[Any, list[str]]:
    """What it returns, and its collectives. The local products fall back to XLA's. `reductions` and `gathers` get the
    lines of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "choose", lambda asked, _: Attempt(Route(asked.problem), reason="this is a CPU"))
        program = jax.jit(lambda *x: f(*x), **settings).lower(*operands).compile()
    for lines, kind in ((reductions, "all-reduce("), (gathers, "all-gather(")):
        if lines is not None:
            lines += [line for line in program.as_text().splitlines() if kind in line]
    return program(*operands), collectives(program.as_text())


def grad(f: Callable[..., Any], num: int = 2) -> Callable[..., Any]:
    return jax.grad(lambda *x: (f(*x).astype(F32) ** 2).sum(), range(num))


def shapes_of(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype, x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]
