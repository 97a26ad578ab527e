"""Runs a compiled variant of ours in the emulator, from the facts that the manifest holds."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np

from jax_bwgemm.emulator import Counters, Launch, Memory, Schedule, TensorMap, run
from jax_bwgemm.emulator.syntax import Module

ELEMENT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a launcher must know. `params`: (kind, size) in order; `tma`: operand -> (box, swizzle bytes)."""

    params: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    tma: dict[str, tuple[tuple[int, int, int], int]]
    cluster: tuple[int, int, int]
    cta_m: int
    mma_n: int
    a_major: str
    b_major: str
    out_dtype: str
    entry: str | None = None


def operand_map(address: int, array: np.ndarray, box: tuple[int, ...], swizzle: int, name: str) -> TensorMap:
    """The map of a row-major (batch, other, contiguous) array."""
    batch, other, contiguous = array.shape
    pitch = contiguous * array.itemsize
    return TensorMap(
        address,
        (contiguous, other, batch),
        (pitch, pitch * other),
        tuple(box),
        ELEMENT[array.dtype.name],
        swizzle,
        name,
    )


def run_matmul(
    module: Module,
    facts: Facts,
    a: np.ndarray,
    b: np.ndarray,
    alpha: float = 1.0,
    bias: np.ndarray | None = None,
    max_clusters: int | None = None,
    raster_group: int = 8,
    raster_along_n: int = 0,
    schedule: Schedule | None = None,
    **options: Any,
) -> tuple[np.ndarray, Counters]:
    """`a` (la, m, k) or (la, k, m) and `b` (lb, k, n) or (lb, n, k), by the majors of `facts`; the result (l, m, n).

    The result starts as NaN.
    """
    m, k = a.shape[1:] if facts.a_major == "k" else a.shape[:0:-1]
    n = b.shape[2] if facts.b_major == "n" else b.shape[1]
    batch = max(a.shape[0], b.shape[0])
    out = np.full((batch, m, n), np.nan, facts.out_dtype)
    memory = Memory()
    arrays = {"a": a, "b": b, "c": out}
    values: dict[str, Any] = {
        f"tma_{name}": operand_map(memory.register(array, name), array, *facts.tma[name], name)
        for name, array in arrays.items()
    }
    values |= {
        "m": m,
        "n": n,
        "k": k,
        "batch": batch,
        "a_batch_step": int(a.shape[0] > 1),
        "b_batch_step": int(b.shape[0] > 1),
        "raster_group": raster_group,
        "raster_along_n": raster_along_n,
        "alpha": struct.pack("<f", alpha),
    }
    if bias is not None:
        values["bias"] = memory.register(bias, "bias")
    cluster_m, cluster_n, _ = facts.cluster
    tiles = -(-m // (cluster_m * facts.cta_m)) * -(-n // (cluster_n * facts.mma_n)) * batch
    launch = Launch(
        grid=(cluster_m, cluster_n, min(tiles, max_clusters or tiles)),
        block=(facts.num_threads, 1, 1),
        params=tuple(values[kind] for kind, _ in facts.params),
        cluster=facts.cluster,
        smem_bytes=facts.smem_bytes,
        entry=facts.entry,
    )
    return out, run(module, launch, memory, schedule, **options)


def facts_of(variant: Any, compiled: Any) -> Facts:
    """From `kernels.compile.compile_variant`'s result."""
    tile = variant.tile
    return Facts(
        compiled.params,
        compiled.num_threads,
        compiled.smem_bytes,
        compiled.tma,
        compiled.cluster,
        tile.cta_m,
        tile.mma_n,
        variant.a_major,
        variant.b_major,
        variant.out_dtype,
    )
