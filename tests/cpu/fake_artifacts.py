"""A manifest as a build would write it, over cubins that hold nothing: enough to plan and to lower."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator

from jax_bwgemm.facts.arch import arch_of, family_of
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.recipe import Recipe, leaf_bytes, map_sources
from jax_bwgemm.facts.repack import ELEMENT_BYTES, KINDS, NUM_THREADS, Repack
from jax_bwgemm.facts.resources import num_stages, num_threads, smem_bytes, tmem_cols
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.facts.variant import STORES, Variant, buffers, tensor_maps, why_not_variant
from jax_bwgemm.kernels.aot.refusals import lay_out
from jax_bwgemm.runtime.artifacts import Entry, RepackEntry, write_manifest
from tests.cases import fused

NO_PTX = hashlib.sha256(b"").hexdigest()  # of an empty file, where a test makes one
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

USUAL = {  # tiles that have more than the plain product of bfloat16
    "hopper": (
        Tile(128, 256, cluster_m=2),
        Tile(128, 128),
        Tile(64, 128),
        Tile(64, 64),
        Tile(128, 128, cluster_m=2, pingpong=True),
        Tile(128, 128, cluster_k=4),
        *(tile for tile in SHIPPED_TILES["hopper"] if tile.promoted or tile.symmetric),
    ),
    "blackwell": SHIPPED_TILES["blackwell"],
}


def fake_entry(variant: Variant) -> Entry:
    tile, arch = variant.tile, arch_of(variant.target)
    return Entry(
        variant=variant,
        entry="kernel_symbol",
        num_threads=num_threads(tile, variant.target, variant.moves),
        smem_bytes=smem_bytes(tile, variant.a_dtype, variant.out_dtype, arch, variant.moves),
        num_stages=num_stages(tile, variant.a_dtype, variant.out_dtype, arch, variant.moves),
        tmem_cols=tmem_cols(tile) if family_of(variant.target).sums_in_tmem else 0,
        recipe=_recipe(variant),
        registers=168,
        spill_bytes=0,
        sass={"HGMMA": 8},
        ptxas="12.9.83",
        cubin_sha256=hashlib.sha256(variant.name.encode()).hexdigest(),
        ptx_sha256=NO_PTX,
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
        ptx_sha256=NO_PTX,
        source_sha256="0" * 64,
    )


def _recipe(variant: Variant) -> Recipe:
    """Every buffer, by its tensor map if it has one, and the sizes: the least that a kernel takes."""
    sources = list(map_sources(tensor_maps(variant)))
    sources += [f"ptr:{i}" for i in range(len(buffers(variant))) if f"tma:{i}" not in sources]
    sources += ["size:m", "size:n", "size:k", "size:batch"]
    params = lay_out(tuple((source, leaf_bytes(source)) for source in sources))
    return Recipe(buffers(variant), tensor_maps(variant), params)


def write_fake_artifacts(directory: pathlib.Path, entries: Iterable[Entry | RepackEntry]) -> None:
    entries = list(entries)
    for entry in entries:
        (directory / f"{entry.name}.cubin").write_bytes(entry.name.encode())
    write_manifest(directory, entries, "0.0.0")


def catalogue(targets: Iterable[str] = ("sm_90a", "sm_100f", "sm_100a")) -> list[Entry]:
    """Every shipped tile, major and way to store for bfloat16; usual tiles have float16 and float32 results and the
    epilogues above, too, and other dtypes without one. All that is legal of it."""
    return [fake_entry(variant) for variant in _variants(targets) if why_not_variant(variant) is None]


def layers(targets: Iterable[str] = ("sm_90a",)) -> list[Entry]:
    """What dense layers of bfloat16 take, forward and backward, on the tile of large products and on a small one."""
    kinds = ["identity", *("_".join(x) for x in itertools.product(("bias",), ("relu", "gelu", "silu", "residual")))]
    kinds += ["bias", "relu", "gelu", "silu", "residual", "bias_silu_residual"]
    epilogues = [*(Epilogue(fused(kind)) for kind in kinds), pullback("relu"), pullback("relu", has_bias=True)]
    gated = [unit("silu", True), kept("silu", True)]
    tiles = [(tile, epilogues) for tile in (Tile(128, 256, cluster_m=2), Tile(64, 64))]
    tiles += [(Tile(128, 256, cluster_m=2, gated=True), gated), (Tile(64, 64), [pullback("silu", True)])]
    variants = [
        Variant(target, *DTYPES[0], a, b, tile, own.out, seconds=own.seconds, reductions=own.reductions)
        for target, (tile, owns), a, b in itertools.product(targets, tiles, "km", "nk")
        for own in owns
    ]
    return [fake_entry(variant) for variant in variants if why_not_variant(variant) is None]


def repacks(targets: Iterable[str] = ("sm_90a", "sm_100f")) -> list[RepackEntry]:
    return [fake_repack(Repack(*fields)) for fields in itertools.product(targets, KINDS, ELEMENT_BYTES)]


def _variants(targets: Iterable[str]) -> Iterator[Variant]:
    kinds = itertools.chain(itertools.product(DTYPES, EPILOGUES), itertools.product(OTHER_DTYPES, EPILOGUES[:1]))
    layouts = list(itertools.product("km", "nk", "nm", STORES))
    for target, ((a, b, out), epilogue), (a_major, b_major, c_major, store) in itertools.product(
        targets, kinds, layouts
    ):
        if arch_of(target).target_of(a) != target:
            continue
        is_plain = (a, b, out, epilogue) == (*DTYPES[0], "identity")
        for tile in (SHIPPED_TILES if is_plain else USUAL)[family_of(target).name]:
            own = dataclasses.replace(tile, k_tile=k_tile(a))
            yield Variant(target, a, b, out, a_major, b_major, own, fused(epilogue, c_major), c_major, store)
