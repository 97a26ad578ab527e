"""Which variants ship. The planner finds them in the manifest: this list is all that decides what is built."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jax_bwgemm.arch import ARCHS, TARGETS, family
from jax_bwgemm.problem import A_MAJORS, B_MAJORS
from jax_bwgemm.tile import SHIPPED_TILES, Tile, why_not_tile
from jax_bwgemm.variant import Variant

IN_DTYPES = ("bfloat16", "float16")
FUSED_KINDS = ("scale", "bias", "relu", "bias_relu", "scale_bias", "scale_relu", "scale_bias_relu")
FUSED_TILES = {
    "hopper": (Tile(128, 256, cluster_m=2), Tile(128, 128)),
    "blackwell": (Tile(256, 256, cta_group=2, cluster_m=2), Tile(128, 128)),
}  # a large and a small tile: a fused epilogue need not wait for a fit, an unfused one costs a pass over the result


def catalogue(targets: Iterable[str] = TARGETS) -> list[Variant]:
    """Every variant of every target: plain products of all tiles, majors and common dtypes; fused and mixed on two."""
    return [variant for target in targets for variant in (*_plain(target), *_mixed(target), *_fused(target))]


def _plain(target: str) -> list[Variant]:
    return [
        _variant(target, in_dtype, out_dtype, majors, tile, "identity")
        for tile in SHIPPED_TILES[family(target)]
        for majors in itertools.product(A_MAJORS, B_MAJORS)
        for in_dtype in IN_DTYPES
        for out_dtype in (in_dtype, "float32")
    ]


def _mixed(target: str) -> list[Variant]:
    """bfloat16 in and float16 out, or the other way round."""
    return [
        _variant(target, in_dtype, out_dtype, majors, tile, "identity")
        for tile in FUSED_TILES[family(target)]
        for majors in itertools.product(A_MAJORS, B_MAJORS)
        for in_dtype, out_dtype in (IN_DTYPES, IN_DTYPES[::-1])
    ]


def _fused(target: str) -> list[Variant]:
    """Epilogues belong to forward passes, where a is k-major; only a scale reaches gradients, which take any majors."""
    return [
        _variant(target, in_dtype, in_dtype, majors, tile, kind)
        for tile in FUSED_TILES[family(target)]
        for majors in itertools.product(A_MAJORS, B_MAJORS)
        for in_dtype in IN_DTYPES
        for kind in FUSED_KINDS
        if majors[0] == "k" or kind == "scale"
    ]


def _variant(target: str, in_dtype: str, out_dtype: str, majors: tuple[str, str], tile: Tile, kind: str) -> Variant:
    arch = next(arch for arch in ARCHS.values() if arch.target == target)
    reason = why_not_tile(tile, in_dtype, arch)
    if reason:
        raise ValueError(f"the catalogue requires legal tiles, got {tile} on {target}: {reason}")
    return Variant(target, in_dtype, in_dtype, out_dtype, *majors, tile, kind)
