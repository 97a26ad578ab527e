"""Runs a compiled variant of ours in the emulator, from the facts that the manifest holds."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np

from jax_bwgemm.emulator import Counters, Launch, Memory, Schedule, TensorMap, run
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts import recipe
from jax_bwgemm.facts.geometry import cluster_tiles
from jax_bwgemm.facts.problem import DTYPE_SHORT, Problem
from jax_bwgemm.facts.resources import direct_smem_bytes, direct_stage_bytes, direct_stages, workspace_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, buffers, places
from tests.cases import Case, activation_of, has
from tests.walks import walk_leaves

NORMAL = 0x1000000000000000  # an L2 cache policy
TOKEN = 0x0123456789ABCDEF  # of a raised flag
PITCH_BYTES = 16  # what TMA can step over


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a launcher must know. `params`: (source, bytes) in order; `tensor_maps`: by their parameters' sources."""

    variant: Variant
    params: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    tensor_maps: dict[str, recipe.TensorMap]
    entry: str | None = None


def operand_map(address: int, array: np.ndarray, facts: recipe.TensorMap, name: str) -> TensorMap:
    """The map of a row-major (batch, other, contiguous) array."""
    batch, other, contiguous = array.shape
    pitch = contiguous * array.itemsize
    is_tf32 = array.dtype == np.float32 and name in ("a", "b")
    element = "tf32" if is_tf32 else DTYPE_SHORT[array.dtype.name]
    more = {} if facts.swizzle_atom_bytes == 16 else {"swizzle_atom_bytes": facts.swizzle_atom_bytes}
    sizes, strides = (contiguous, other, batch), (pitch, pitch * other)
    return TensorMap(address, sizes, strides, facts.box, element, facts.swizzle_bytes, name, **more)


def padded(array: np.ndarray) -> np.ndarray:
    """Zeros behind each row until TMA can step over it: what the lowering does."""
    rest = -array.shape[2] % (PITCH_BYTES // array.itemsize)
    return np.pad(array, ((0, 0), (0, 0), (0, rest))) if rest else array


def poisoned_workspace(tile: Tile, clusters: int) -> np.ndarray:
    """NaN, and no raised flag."""
    return np.full(workspace_bytes(tile, clusters) // 4, np.nan, np.float32)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """NaN, or for integers a pattern that no sum is expected to have."""
    return np.full(shape, -(2**30) - 1, dtype) if dtype == "int32" else np.full(shape, np.nan, np.float32).astype(dtype)


def poisoned_parts(variant: Variant, batch: int, m: int, n: int) -> dict[str, np.ndarray]:
    """Of the reductions, by role."""
    roles, sizes = {x.role for x in variant.reductions}, {"l": batch, "m": m, "n": n}
    return {x.role: poisoned(x.shape(sizes), x.dtype) for x in buffers(variant) if x.role in roles}


def run_matmul(
    module: Module,
    facts: Facts,
    a: np.ndarray,
    b: np.ndarray,
    alpha: float = 1.0,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    max_clusters: int | None = None,
    raster_group: int = 8,
    raster_along_n: int = 0,
    schedule: Schedule | None = None,
    stream: tuple[int, int] = (0, 1),
    workspace: np.ndarray | None = None,
    raster_order: int = 0,
    others: Mapping[str, np.ndarray] | None = None,
    scalars: Mapping[str, float] | None = None,
    policies: Mapping[str, int] | None = None,
    in_place: bool = False,
    **options: Any,
) -> tuple[np.ndarray, Counters]:
    """`a` (la, m, k) or (la, k, m) and `b` (lb, k, n) or (lb, n, k), by the variant's majors; the result (l, m, n).

    `others`: what else the variant reads, by role, as it is stored; further results are written there. `policies`: of
    the L2 cache, other than normal, by matrix. `in_place`: the result is stored over a copy of the residual.
    """
    variant, tile = facts.variant, facts.variant.tile
    m, k = a.shape[1:] if variant.a_major == "k" else a.shape[:0:-1]
    n = b.shape[2] if variant.b_major == "n" else b.shape[1]
    batch = max(a.shape[0], b.shape[0])
    out = poisoned((batch, m, n) if variant.c_major == "n" else (batch, n, m), variant.out_dtype)
    memory = Memory()
    arrays = {"a": a, "b": b, "out": out} if tile.direct else {"a": padded(a), "b": padded(b), "out": out}
    arrays |= {name: array for name, array in (("bias", bias), ("residual", residual)) if array is not None}
    arrays |= {name: padded(array) if name == "up" else array for name, array in (others or {}).items()}
    tiles = -(-m // (tile.cluster_m * tile.cta_m)) * -(-n // (tile.cluster_n * tile.out_n)) * batch
    clusters = min(tiles, max_clusters or tiles)
    if tile.stream_k:
        clusters = max_clusters or tiles
        arrays["workspace"] = poisoned_workspace(tile, clusters) if workspace is None else workspace
    at = places(variant)
    if in_place:
        assert residual is not None and residual.shape == out.shape
        out[...] = arrays.pop("residual")
    addresses = {name: memory.register(array, name) for name, array in arrays.items()}
    if in_place:
        addresses["residual"], arrays["residual"] = addresses["out"], out
    roles = {i: name for name, i in reversed(at.items())}
    values: dict[str, Any] = {}
    for source, own in facts.tensor_maps.items():
        name = roles[own.buffer]
        values[source] = operand_map(addresses[name], arrays[name], own, name)
    values |= {f"ptr:{at[name]}": address for name, address in addresses.items() if name in at}
    values |= {"size:m": m, "size:n": n, "size:k": k, "size:batch": batch, "float:alpha": struct.pack("<f", alpha)}
    values |= {f"float:{role}": struct.pack("<f", value) for role, value in (scalars or {}).items()}
    values |= {f"step:{at[name]}": int(array.shape[0] > 1) for name, array in (("a", a), ("b", b))}
    values |= {"int:raster_along_n": raster_along_n, "int:raster_order": raster_order, "token": TOKEN}
    values |= {f"l2:{matrix}_l2": (policies or {}).get(matrix, NORMAL) for matrix in "abc"}
    values |= walk_leaves(variant.tile, Problem(m, n, k, batch), raster_group, raster_along_n, clusters, stream)
    grid = (tile.cluster_m, tile.cluster_n, tile.cluster_k * clusters)
    if tile.direct:
        along = cluster_tiles(tile, Problem(m, n, k))
        grid = (*(along[::-1] if variant.c_major == "n" else along), batch * tile.cluster_k)
    launch = Launch(
        grid=grid,
        block=(facts.num_threads, 1, 1),
        params=tuple(values[source.partition("[")[0]] for source, _ in facts.params),
        cluster=(tile.cluster_m, tile.cluster_n, tile.cluster_k),
        smem_bytes=launch_smem_bytes(facts, k),
        entry=facts.entry,
    )
    counters = run(module, launch, memory, schedule, demand_grid_wait=True, **options)
    return out if variant.c_major == "n" else out.swapaxes(1, 2), counters


def launch_smem_bytes(facts: Facts, k: int) -> int:
    """Of a direct tile no more than its sums need."""
    tile = facts.variant.tile
    if not tile.direct or tile.is_thin:
        return facts.smem_bytes
    of = facts.variant
    most = facts.smem_bytes // direct_stage_bytes(tile, of.a_dtype)
    return direct_smem_bytes(tile, of.a_dtype, of.out_dtype, of.target, direct_stages(tile, k, most))


def facts_of(variant: Variant, compiled: Any) -> Facts:
    """From `kernels.aot.compile.compile_variant`'s result."""
    maps = by_source(compiled.tensor_maps)
    return Facts(variant, compiled.params, compiled.num_threads, compiled.smem_bytes, maps)


def by_source(tensor_maps: Sequence[recipe.TensorMap]) -> dict[str, recipe.TensorMap]:
    return dict(zip(recipe.map_sources(tensor_maps), tensor_maps, strict=True))


def case_of(variant: Variant, m: int, n: int, k: int, a_batch: int = 1, b_batch: int = 1) -> Case:
    """The problem that exercises all of a variant's epilogue."""
    return Case(
        m,
        n,
        k,
        max(a_batch, b_batch),
        variant.a_dtype,
        variant.out_dtype,
        variant.a_major,
        variant.b_major,
        a_batch,
        b_batch,
        0.5 if has(variant, "alpha") else 1.0,
        has(variant, "bias"),
        activation_of(variant),
        variant.b_dtype,
        variant.c_major,
        bool(variant.moves.matrices),
    )
