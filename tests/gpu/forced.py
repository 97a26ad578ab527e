"""A custom call of one built kernel, whatever the planner would choose: the problem as the kernel sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm import artifacts, ffi
from jax_bwgemm.arch import Arch
from jax_bwgemm.artifacts import Entry
from jax_bwgemm.decision import Decision
from jax_bwgemm.lowering import attributes
from jax_bwgemm.plan import Plan, raster
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import TMA_ALIGN_BYTES


def forced(entry: Entry, problem: Problem, arch: Arch) -> Callable[..., jax.Array]:
    """A function of a, b and what the epilogue takes, as stored; the result as it is stored."""
    ffi.register(artifacts.artifact_dirs())
    group, along_n = raster(entry.variant.tile, problem, arch)
    plan = Plan(problem, arch, (), entry.variant.tile, raster_group=group, raster_along_n=along_n)
    rows_cols = (problem.m, problem.n) if problem.c_major == "n" else (problem.n, problem.m)
    result = jax.ShapeDtypeStruct((problem.batch, *rows_cols), jnp.dtype(problem.out_dtype))
    call = jax.ffi.ffi_call(ffi.TARGET_NAME, result)
    settings: dict[str, Any] = attributes(Decision(plan, entry))

    def product(a: jax.Array, b: jax.Array, *rest: jax.Array) -> jax.Array:
        return call(_padded(a), _padded(b), *rest, **settings)

    return product


def _padded(x: jax.Array) -> jax.Array:
    rest = -x.shape[2] % (TMA_ALIGN_BYTES // x.dtype.itemsize)
    return jnp.pad(x, ((0, 0), (0, 0), (0, rest))) if rest else x
