"""A custom call of one built kernel, whatever the planner would choose: the problem as the kernel sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import TMA_ALIGN_BYTES
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.order import raster
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.streams import best_stream
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.launch import request


def forced(entry: Entry, problem: Problem, arch: Arch, **settings: Any) -> Callable[..., jax.Array]:
    """A function of a, b and what the epilogue takes, as stored; the result as it is stored. `settings` replace the
    planner's, such as raster_order="snake" or stream=Stream(2, 4)."""
    products = all_forced(entry, problem, arch, **settings)
    return lambda *operands: products(*operands)[0]


def all_forced(entry: Entry, problem: Problem, arch: Arch, **settings: Any) -> Callable[..., list[jax.Array]]:
    """As `forced`, with every result, then every reduction; of a gated product, `up` comes behind b."""
    ffi.register(artifacts.launch_dirs())
    tile = entry.variant.tile
    group, along_n = raster(tile, problem, arch)
    stream = best_stream(tile, problem, arch)
    plan = Plan(problem, arch, (), tile, None, group, along_n, arch.family.raster_order, stream=stream)
    plan = dataclasses.replace(plan, **settings)
    made = request(plan, entry)
    call = jax.ffi.ffi_call(ffi.TARGET_NAME, [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in made.results])
    attrs: dict[str, Any] = ffi.as_hlo(made.attributes)

    count = 1 + problem.num_bs

    def products(*operands: jax.Array) -> list[jax.Array]:
        given = operands[:count] if tile.direct else map(_padded, operands[:count])
        found: list[jax.Array] = call(*given, *operands[count:], **attrs)
        matrices, rest = found[: len(problem.results)], found[len(problem.results) :]
        reducers = {"sum": jnp.sum, "max": jnp.max}
        parts = zip(problem.epilogue.reductions, rest, strict=False)  # a workspace may be last
        return [*matrices, *(reducers[x.reducer](part, 1) for x, part in parts)]

    return products


def _padded(x: jax.Array) -> jax.Array:
    rest = -x.shape[2] % (TMA_ALIGN_BYTES // x.dtype.itemsize)
    return jnp.pad(x, ((0, 0), (0, 0), (0, rest))) if rest else x
