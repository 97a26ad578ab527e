"""THE request of a launch: a plan and a manifest entry -> all that a custom call says, and the buffers it says it of.

Lowering, emulator, benchmark and tests ask here, and the launcher (`ffi/`) reads nothing else. Knows no JAX.
"""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.epilogue import UP
from jax_bwgemm.facts.geometry import concurrent_clusters
from jax_bwgemm.facts.padding import contiguous, padded_shape
from jax_bwgemm.facts.recipe import Attribute, Buffer
from jax_bwgemm.facts.resources import direct_smem_bytes, workspace_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.runtime.artifacts import Entry

TILES_ALONG_M, TILES_ALONG_N = 1, 2  # first, in a grid of tiles (ffi/launch_plan)


@dataclasses.dataclass(frozen=True)
class Array:
    """A buffer of a launch, row-major."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """One launch. Behind the product's results come parts of its reductions, and what is there for the kernel alone, as
    a workspace is."""

    attributes: dict[str, Attribute]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


def request(plan: Plan, entry: Entry, max_clusters: int | None = None) -> Request:
    """What launches `entry` as `plan` says; `max_clusters` run at once, by default as many as the planned device holds
    (a workspace has room for so many)."""
    tile = entry.variant.tile
    clusters = concurrent_clusters(tile, plan.arch) if max_clusters is None else max_clusters
    arrays = [
        (buffer.is_result, Array(buffer.dtype, _shape(buffer, plan, workspace_bytes(tile, clusters))))
        for buffer in entry.recipe.buffers
    ]
    operands = tuple(array for is_result, array in arrays if not is_result)
    return Request(_attributes(plan, entry), operands, tuple(array for is_result, array in arrays if is_result))


def _attributes(plan: Plan, entry: Entry) -> dict[str, Attribute]:
    """Names, geometry (which the launcher reads itself), then what a kernel's leaves may name, then the recipe."""
    tile = entry.variant.tile
    return {
        "variant": entry.name,
        "entry": entry.entry,
        "target": entry.variant.target,
        "cubin_sha256": entry.cubin_sha256,
        "cta_m": tile.cta_m,
        "mma_n": tile.mma_n,
        "out_n": tile.out_n,
        "cluster_m": tile.cluster_m,
        "cluster_n": tile.cluster_n,
        "cluster_k": tile.cluster_k,
        "num_threads": entry.num_threads,
        "smem_bytes": _smem_bytes(plan, entry),
        "stream_tiles": plan.stream.tiles,
        "stream_clusters": plan.stream.clusters,
        "tile_grid": _tile_grid(tile, entry.variant.c_major),
        "rounds": plan.rounds,
        "parts": plan.problem.batch if plan.problem.whole_k else 1,
        "pdl": int(plan.pdl),
        "raster_group": plan.raster_group,
        "raster_along_n": plan.raster_along_n,
        "raster_order": RASTER_ORDERS.index(plan.raster_order),
        "a_l2": plan.a_l2,
        "b_l2": plan.b_l2,
        "c_l2": plan.c_l2,
        **dict(plan.problem.epilogue.scalars),
        **entry.recipe.texts(),
    }


def _tile_grid(tile: Tile, c_major: str) -> int:
    """0: persistent CTAs; else one for each tile, and which of them lie side by side along the grid's x: those that do
    in the result."""
    return 0 if not tile.direct else TILES_ALONG_N if c_major == "n" else TILES_ALONG_M


def _smem_bytes(plan: Plan, entry: Entry) -> int:
    own = entry.variant
    if not plan.stages:
        return entry.smem_bytes
    return direct_smem_bytes(own.tile, own.a_dtype, own.out_dtype, own.target, plan.stages)


def _shape(buffer: Buffer, plan: Plan, num_bytes: int) -> tuple[int, ...]:
    """As the kernel gets it: a and b padded, where their rows may be."""
    p = plan.problem
    if buffer.role in ("a", "b", UP.role) and not buffer.is_result:
        operand = "a" if buffer.role == "a" else "b"
        batch, rows, elements = padded_shape(p, operand)
        return batch, rows, elements if "+" in buffer.dims[-1] else contiguous(p, operand)
    return buffer.shape({"l": p.batch, "m": p.m, "n": p.n, "bytes": num_bytes})
