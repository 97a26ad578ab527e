"""A manifest as a build would write it, over cubins that hold nothing: enough to plan and to lower."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Iterable

from jax_bwgemm.arch import ARCHS, family
from jax_bwgemm.artifacts import Entry, Param, TmaFacts, write_manifest
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import (
    SHIPPED_TILES,
    STORE_SWIZZLE_BYTES,
    num_stages,
    num_threads,
    smem_bytes,
    store_box,
    tmem_cols,
)
from jax_bwgemm.variant import Variant

ARCH_OF = {arch.target: arch for arch in ARCHS.values()}
EPILOGUES = ("identity", "scale", "scale_bias_relu", "bias_relu")


def fake_entry(variant: Variant) -> Entry:
    tile, limit = variant.tile, ARCH_OF[variant.target].smem_bytes
    params = [Param(f"tma_{x}", 128 * i, 128) for i, x in enumerate("abc")]
    params += [Param(x, 384 + 4 * i, 4) for i, x in enumerate(("m", "n", "k", "batch"))]
    if "bias" in variant.epilogue:
        params.append(Param("bias", 400, 8))
    return Entry(
        variant=variant,
        entry="kernel_symbol",
        num_threads=num_threads(tile, variant.target),
        smem_bytes=smem_bytes(tile, 2, limit),
        num_stages=num_stages(tile, 2, limit),
        tmem_cols=tmem_cols(tile) if family(variant.target) == "blackwell" else 0,
        params=tuple(params),
        param_bytes=408,
        tma={
            "a": TmaFacts((64, tile.cta_m, 1), 128),
            "b": TmaFacts((64, tile.load_n, 1), 128),
            "c": TmaFacts((*store_box(tile, variant.out_dtype, variant.target), 1), STORE_SWIZZLE_BYTES),
        },
        registers=168,
        spill_bytes=0,
        sass={"HGMMA": 8},
        ptxas="12.9.83",
        cubin_sha256=hashlib.sha256(variant.name.encode()).hexdigest(),
        source_sha256="0" * 64,
    )


def write_fake_artifacts(directory: pathlib.Path, entries: Iterable[Entry]) -> None:
    entries = list(entries)
    for entry in entries:
        (directory / f"{entry.name}.cubin").write_bytes(entry.name.encode())
    write_manifest(directory, entries, "0.0.0")


def catalogue(targets: Iterable[str] = ("sm_90a", "sm_100a")) -> list[Entry]:
    """Every shipped tile and major, bfloat16 operands, three output dtypes, the epilogues above."""
    kinds = itertools.product(DTYPE_BYTES, "km", "nk", EPILOGUES)
    return [
        fake_entry(Variant(target, "bfloat16", "bfloat16", out, a_major, b_major, tile, epilogue))
        for out, a_major, b_major, epilogue in kinds
        for target in targets
        for tile in SHIPPED_TILES[family(target)]
    ]
