"""A manifest as a build would write it, over cubins that hold nothing: enough to plan and to lower."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator

from jax_bwgemm.arch import ARCHS, family_of
from jax_bwgemm.artifacts import PARAM_KINDS, Entry, Param, RepackEntry, TmaFacts, write_manifest
from jax_bwgemm.repack import ELEMENT_BYTES, KINDS, NUM_THREADS, Repack
from jax_bwgemm.shipped import SHIPPED_TILES
from jax_bwgemm.tile import k_tile, num_stages, num_threads, smem_bytes, tmem_cols
from jax_bwgemm.variant import STORES, Variant, tma_boxes, why_not_variant

ARCH_OF = {arch.target: arch for arch in ARCHS.values()}
EPILOGUES = ("identity", "scale", "scale_bias_relu", "bias_relu", "residual", "scale_bias_relu_residual")
DTYPES = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
)
OTHER_DTYPES = (
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float8_e5m2", "float32"),
    ("int8", "int8", "int32"),
)  # without an epilogue


def fake_entry(variant: Variant) -> Entry:
    tile, arch = variant.tile, ARCH_OF[variant.target]
    params = _params(variant)
    return Entry(
        variant=variant,
        entry="kernel_symbol",
        num_threads=num_threads(tile, variant.target, variant.has_residual),
        smem_bytes=smem_bytes(tile, variant.a_dtype, variant.out_dtype, arch, variant.has_residual),
        num_stages=num_stages(tile, variant.a_dtype, variant.out_dtype, arch, variant.has_residual),
        tmem_cols=tmem_cols(tile) if family_of(variant.target).sums_in_tmem else 0,
        params=params,
        param_bytes=params[-1].offset + params[-1].size,
        tma={operand: TmaFacts(*facts) for operand, facts in tma_boxes(variant).items()},
        registers=168,
        spill_bytes=0,
        sass={"HGMMA": 8},
        ptxas="12.9.83",
        cubin_sha256=hashlib.sha256(variant.name.encode()).hexdigest(),
        source_sha256="0" * 64,
    )


def fake_repack(repack: Repack) -> RepackEntry:
    return RepackEntry(
        repack=repack,
        entry="repack_symbol",
        num_threads=NUM_THREADS,
        smem_bytes=repack.smem_bytes,
        registers=48,
        spill_bytes=0,
        sass={"LDG.128": 8},
        ptxas="12.9.83",
        cubin_sha256=hashlib.sha256(repack.name.encode()).hexdigest(),
        source_sha256="0" * 64,
    )


def _params(variant: Variant) -> tuple[Param, ...]:
    """Each leaf on its own alignment, in the order of `PARAM_KINDS`."""
    absent = {"c" if variant.store == "tma" else "tma_c"}
    steps = {"alpha": "scale", "bias": "bias", "tma_r": "residual"}
    absent |= {kind for kind, step in steps.items() if step not in variant.epilogue}
    absent |= set() if variant.tile.stream_k else {"stream_tiles", "stream_clusters", "workspace", "token"}
    sizes = dict.fromkeys(("tma_a", "tma_b", "tma_c", "tma_r"), 128)
    sizes |= dict.fromkeys(("c", "a_policy", "b_policy", "workspace", "token", "bias"), 8)
    params, end = [], 0
    for kind in PARAM_KINDS:
        if kind not in absent:
            size = sizes.get(kind, 4)
            params.append(Param(kind, -(-end // min(size, 64)) * min(size, 64), size))
            end = params[-1].offset + size
    return tuple(params)


def write_fake_artifacts(directory: pathlib.Path, entries: Iterable[Entry | RepackEntry]) -> None:
    entries = list(entries)
    for entry in entries:
        (directory / f"{entry.name}.cubin").write_bytes(entry.name.encode())
    write_manifest(directory, entries, "0.0.0")


def catalogue(targets: Iterable[str] = ("sm_90a", "sm_100a")) -> list[Entry]:
    """Every shipped tile, major and way to store: bfloat16 operands with three output dtypes and the epilogues above,
    other dtypes without one. All that is legal of it."""
    return [fake_entry(variant) for variant in _variants(targets) if why_not_variant(variant) is None]


def repacks(targets: Iterable[str] = ("sm_90a", "sm_100a")) -> list[RepackEntry]:
    return [fake_repack(Repack(*fields)) for fields in itertools.product(targets, KINDS, ELEMENT_BYTES)]


def _variants(targets: Iterable[str]) -> Iterator[Variant]:
    kinds = itertools.chain(itertools.product(DTYPES, EPILOGUES), itertools.product(OTHER_DTYPES, EPILOGUES[:1]))
    layouts = list(itertools.product("km", "nk", "nm", STORES))
    for target, ((a, b, out), epilogue), (a_major, b_major, c_major, store) in itertools.product(
        targets, kinds, layouts
    ):
        for tile in SHIPPED_TILES[family_of(target).name]:
            own = dataclasses.replace(tile, k_tile=k_tile(a))
            yield Variant(target, a, b, out, a_major, b_major, own, epilogue, c_major, store)
