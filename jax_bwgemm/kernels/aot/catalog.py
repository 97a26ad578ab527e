"""Which variants ship. The planner finds them in the manifest: this list is all that decides what is built."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

from jax_bwgemm.facts.arch import TARGETS, arch_of, family_of
from jax_bwgemm.facts.epilogue import ACC, FACTOR, Apply, Epilogue, axpby, chain
from jax_bwgemm.facts.repack import ELEMENT_BYTES, KINDS, Repack
from jax_bwgemm.facts.shipped import (
    BLACKWELL,
    BLACKWELL_GATED,
    BLACKWELL_NARROW,
    BLACKWELL_SYMMETRIC,
    HOPPER_BASE,
    HOPPER_DIRECT,
    HOPPER_DIRECT_LARGE,
    HOPPER_DIRECT_SPLIT,
    HOPPER_GATED,
    HOPPER_NARROW_BASE,
    HOPPER_PROMOTED,
    HOPPER_SYMMETRIC,
    HOPPER_THIN,
)
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.facts.variant import Variant, why_not_variant

BF16, F16, F32, S32 = "bfloat16", "float16", "float32", "int32"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
Dtypes = tuple[str, str, str]

FORWARD = ("kn", "kk")  # of a and b: forward passes and the gradients of their inputs, of weights of either major
WEIGHTS = ("mn",)  # whose gradients these are
MAJORS = (*FORWARD, *WEIGHTS)
ALL_MAJORS = (*MAJORS, "mk")
HALF: tuple[Dtypes, ...] = tuple((x, x, out) for x in (BF16, F16) for out in (x, F32))
BF16_ONLY: tuple[Dtypes, ...] = ((BF16, BF16, BF16),)
BF16_OR_F32: tuple[Dtypes, ...] = (*BF16_ONLY, (BF16, BF16, F32))
F16_ONLY: tuple[Dtypes, ...] = ((F16, F16, F16),)
F16_OR_F32: tuple[Dtypes, ...] = (*F16_ONLY, (BF16, BF16, F32))
CROSSED: tuple[Dtypes, ...] = ((BF16, BF16, F16), (F16, F16, BF16))
SAME: tuple[Dtypes, ...] = (*BF16_ONLY, (F16, F16, F16))
TF32: tuple[Dtypes, ...] = ((F32, F32, F32),)
FP8: tuple[Dtypes, ...] = ((E4M3, E4M3, BF16), (E4M3, E4M3, F32))
MIXED_FP8: tuple[Dtypes, ...] = ((E4M3, E5M2, BF16), (E5M2, E4M3, BF16))  # a gradient is e5m2
RARE_FP8: tuple[Dtypes, ...] = ((E5M2, E5M2, BF16), (E4M3, E4M3, E4M3))
INT8: tuple[Dtypes, ...] = tuple((a, b, S32) for a in ("int8", "uint8") for b in ("int8", "uint8"))
SCALE, BIAS = chain(2.0), chain(has_bias=True)  # of any scale
FACTORED = Epilogue(Apply("mul", (ACC, FACTOR)))  # by the scales of float8 operands, which the device has computed
RELU, GELU, SILU = (chain(activation=name) for name in ("relu", "gelu", "silu"))
BIAS_RELU, BIAS_GELU, BIAS_SILU = (chain(has_bias=True, activation=name) for name in ("relu", "gelu", "silu"))
SCALED = chain(2.0, True), chain(2.0, False, "relu"), chain(2.0, True, "relu")
FUSED = (SCALE, BIAS, RELU, BIAS_RELU, *SCALED)
GATED = (GELU, BIAS_GELU, SILU, BIAS_SILU)
RESIDUAL = (chain(has_residual=True), chain(has_bias=True, has_residual=True), chain(1.0, True, "relu", True))
ADDED = chain(has_residual=True), chain(2.0, has_residual=True)  # to what the batches before have summed up
GATED_RESIDUAL = (chain(1.0, True, "gelu", True), chain(1.0, True, "silu", True))
UNITS = tuple(unit(name, is_gated=True) for name in ("silu", "gelu"))
UNITS_KEPT = tuple(kept(name, is_gated=True) for name in ("silu", "gelu"))
UNITS_BACK = tuple(pullback(name, is_gated=True) for name in ("silu", "gelu"))
KEPT = tuple(kept(name, has_bias=has_bias) for name in ("silu", "gelu") for has_bias in (False, True))
KEPT_BUT_GELU = tuple(epilogue for epilogue in KEPT if epilogue != kept("gelu"))
BACK = tuple(pullback(name) for name in ("silu", "gelu", "relu"))
OF_BIASES = tuple(pullback(name, has_bias=True) for name in ("silu", "gelu", "relu"))  # whose cotangents are sums
UNITS_OF_BIASES = tuple(pullback(name, True, True) for name in ("silu", "gelu"))
SYRK = Epilogue(), SCALE, axpby(2.0, 2.0, True)  # a symmetric product's, of any scales
SYRK_MAJORS = ("kk", "mn")  # a @ a^T and a^T @ a
DENSE = (BIAS, BIAS_RELU, BIAS_GELU, BIAS_SILU)  # a dense layer's


@dataclasses.dataclass(frozen=True)
class Row:
    """Every combination of its fields."""

    tiles: tuple[Tile, ...]
    dtypes: tuple[Dtypes, ...]
    majors: tuple[str, ...] = ALL_MAJORS
    epilogues: tuple[Epilogue, ...] = (Epilogue(),)
    c_major: str = "n"
    store: str = "tma"

    def variants(self, target: str) -> Iterator[Variant]:
        for tile, dtypes, majors, epilogue in itertools.product(self.tiles, self.dtypes, self.majors, self.epilogues):
            own = dataclasses.replace(tile, k_tile=k_tile(dtypes[0]))
            of = epilogue if self.c_major == "n" else epilogue.transposed
            yield Variant(
                target, *dtypes, majors[0], majors[1], own, of.out, self.c_major, self.store, of.seconds, of.reductions
            )


def _tiles(text: str) -> tuple[Tile, ...]:
    """Of Hopper, a comma between: rows and columns, the cluster if there is one, and in which ways it works."""
    return tuple(_tile(*item.split()) for item in text.split(","))


def _tile(size: str, *words: str) -> Tile:
    cluster, ways = (words[0], words[1:]) if words and words[0][0].isdigit() else ("1x1", words)
    return Tile.from_str("_".join([f"{size}x64_cta1_cluster{cluster}", *ways]))


PAIR, SMALL = Tile(256, 256, cta_group=2, cluster_m=2), Tile(128, 128)
SPLIT = Tile(128, 128, cluster_k=4)
BLACKWELL_BASE = Tile(256, 128, cta_group=2, cluster_m=2), Tile(128, 256)
HOPPER_LARGE, HOPPER_LARGE_STREAM, HOPPER_PINGPONG = _tiles("128x256 2x1, 128x256 2x1 streamk, 128x128 2x1 pingpong")
HOPPER_STREAM = Tile(128, 256, stream_k=True)  # of layers, whose lines are whole: 1 % faster there than in clusters
HOPPER_DEEP, HOPPER_DEEP_WIDE = _tiles("64x64 streamk, 128x64 1x4 streamk")  # few tiles, long sums
HOPPER_WIDE, HOPPER_SHARING, HOPPER_TALL = _tiles("128x96 1x4 pingpong, 64x128 4x1 pingpong, 128x64 4x1 pingpong")
HOPPER_FEW, HOPPER_ROWS = _tiles("64x16 streamk, 128x32 4x1 pingpong")  # rows are columns of the transpose

# A class of products has the tiles that are worth a kernel. Of plain bfloat16 products, by the majors of a, b and c:
# those that the products of results/regret would miss (`bench --spare`). Of other classes, whose products are hardly
# measured: those that theirs would miss as `bench --cover` predicts.
HOPPER_PLAIN = {
    "knn": _tiles(
        "128x256, 128x192 2x1, 128x128 2x1 pingpong, 128x256 2x1 streamk, 128x256 streamk, 128x128 2x1 streamk, "
        "128x64, 64x64 streamk, 64x64 2x1 pingpong, 64x64 1x1x4, 64x128 2x1 pingpong, 64x128 1x1x4, "
        "64x192 2x1 pingpong, 128x128 1x2 pingpong, 128x224 2x1, 64x32 2x1 pingpong, 128x96 2x1 pingpong, "
        "128x160 4x1 pingpong, 192x192 1x2, 64x64 4x2 pingpong, 64x128 4x1 pingpong, 128x64 4x1 pingpong, "
        "128x96 1x4 pingpong, 128x64 1x4 streamk, 128x128 4x2 pingpong, 128x64 2x4 pingpong, 128x160 4x2 streamk, "
        "128x128 2x4 pingpong, 128x192 4x2 streamk, 64x16 streamk, 64x32 4x1 streamk, 128x32 4x1 pingpong, "
        "64x32 4x1 pingpong, 128x192 2x1 streamk, 64x64 4x2 streamk, 192x96 2x2, 64x192 4x1 streamk, 128x224 4x1, "
        "64x16 1x2 streamk, 64x16 2x1 streamk"
    ),
    "kkn": _tiles(
        "128x256, 128x192 2x1, 128x64, 128x96 1x4 pingpong, 128x128 2x1 pingpong, 128x256 2x1 streamk, "
        "128x256 streamk, 128x128 1x2 pingpong, 128x224 2x1, 128x128 4x1 pingpong, 192x192 1x2, 64x64 4x2 pingpong, "
        "64x96 2x2 pingpong, 64x128 4x1 pingpong, 128x64 4x1 pingpong, 128x64 1x4 streamk, 128x128 4x2 pingpong, "
        "128x160 4x2 streamk, 64x80 2x2 pingpong, 128x192 4x2 streamk, 192x128 2x4 streamk, 64x16 streamk, "
        "64x32 4x1 streamk, 128x32 4x1 pingpong, 64x32 1x1x4, 64x32 4x1 pingpong, 64x64 2x2 pingpong, "
        "128x80 2x4 pingpong, 64x96 4x1 pingpong, 64x128 4x2 streamk, 128x96 4x1 pingpong, 64x192 4x1 streamk, "
        "64x112 4x1 pingpong, 128x160 4x2 pingpong, 64x96 1x4 pingpong, 64x144 4x1 pingpong, 64x48 pingpong, "
        "64x32 1x2 pingpong, 64x16 4x1 streamk"
    ),  # 128x192 2x1 streamk would spill 8 bytes
    "mnn": _tiles(
        "128x256 2x1 streamk, 128x256 streamk, 128x192 pingpong, 192x128 1x2 streamk, 128x128 1x2 pingpong, 128x64, "
        "64x128 4x1 pingpong, 64x64 4x2 pingpong, 64x64 streamk, 128x64 1x4 streamk, 64x64 1x1x4, 64x16 streamk, "
        "64x32 4x1 streamk, 128x32 4x1 pingpong, 128x128 4x2 pingpong, 128x96 4x2 pingpong, 128x160 4x2 streamk, "
        "128x128 4x2 streamk, 128x192 4x2 pingpong, 128x96 1x4 pingpong, 128x192 2x1 streamk, 128x16 streamk, "
        "64x48 1x1x8, 64x128 1x1x4, 192x192 1x2, 64x32 4x1 pingpong, 64x64 1x4 pingpong, 64x128 4x2 pingpong, "
        "64x64 4x2 streamk, 128x128 2x1, 128x64 4x1 pingpong, 128x192 2x1 pingpong, 64x32 2x1 streamk, "
        "64x96 4x2 streamk, 192x160 2x1, 64x192 4x1 streamk, 128x160 4x2, 64x32 1x4 pingpong, 64x16 1x2 streamk, "
        "64x16 4x1 pingpong, 128x256"
    ),  # gradients of weights, whose sums run over the rows of both operands; the last is for meshes (`giving_way`)
    "mkm": _tiles(
        "128x16, 128x32, 128x64, 256x64, 64x16 streamk, 64x32 streamk, 128x16 streamk, 64x32 1x1x4, 64x48 1x1x4, "
        "64x48 1x1x8, 64x32 4x1 pingpong, 128x32 4x1 pingpong, 64x32 2x2 pingpong, 128x64 4x1 pingpong, 64x80 1x1x4, "
        "64x96 4x1 pingpong, 64x112 1x1x4, 64x208 1x1x2, 128x80, 128x96, 128x160 2x1, 128x160 1x1x2, 128x192 2x1, "
        "192x96, 256x112, 64x64 4x2 pingpong, 64x128 4x1 pingpong, 128x96 4x1 pingpong, 128x112 2x2 pingpong, "
        "128x128 2x2 pingpong, 64x96 1x1x8, 64x96 4x2 pingpong, 64x96 4x2 streamk, 128x192 4x2 streamk, "
        "64x192 4x2 pingpong, 64x48 2x2 pingpong, 64x224 4x2 pingpong, 128x112 2x4 pingpong, 128x160 2x4 pingpong, "
        "64x96 1x1x2, 128x160 1x2, 128x48 1x2 pingpong, 128x160 4x1 pingpong, 128x96 1x1x4, 64x96 2x2 pingpong, "
        "64x80 4x2 pingpong, 64x80 4x1 pingpong, 128x80 4x1 pingpong, 64x160 4x2 pingpong, 128x112 4x1 pingpong, "
        "128x224 2x1, 64x16 pingpong, 64x16 1x2 streamk, 64x16 4x1 streamk, 64x32 1x2 streamk, 64x64 4x1 pingpong, "
        "64x256, 128x80 2x4 pingpong, 128x112 4x2 pingpong"
    ),
    "kkm": _tiles(
        "128x32, 64x16 streamk, 64x32 streamk, 128x16 streamk, 64x32 1x1x4, 64x48 1x1x4, 64x112 1x1x4, 64x48 1x1x8, "
        "64x32 4x1 pingpong, 128x32 4x1 pingpong, 64x32 2x2 pingpong, 128x64 4x1 pingpong, 64x80 1x1x4, "
        "64x96 4x1 pingpong, 128x80, 128x96, 128x160 2x1, 256x112, 64x64 4x2 pingpong, 64x128 4x1 pingpong, "
        "128x112 2x2 pingpong, 192x160 2x2 streamk, 64x96 1x1x8, 64x96 4x2 pingpong, 128x96 4x2 pingpong, "
        "64x96 4x2 streamk, 128x192 4x2 streamk, 64x192 4x2 pingpong, 64x48 2x2 pingpong, 128x80 2x4 pingpong, "
        "128x160 4x2 pingpong, 128x64, 64x64 1x1x8, 128x80 1x2 pingpong, 128x160 2x1 streamk, 128x112 4x1 pingpong, "
        "64x112 4x1 streamk, 128x224 2x1, 128x128 4x1 pingpong, 64x80 4x2 pingpong, 128x80 4x1 pingpong, "
        "64x16 pingpong, 64x16 1x2 streamk, 64x112 4x1 pingpong, 64x144 2x4 pingpong, 128x80 4x2 pingpong, "
        "128x240 4x1, 256x160 1x2"
    ),
    "mnm": _tiles(
        "64x16 streamk, 128x16 streamk, 64x32 1x1x8, 128x160 2x1, 64x32 4x1 pingpong, 128x64 4x1 pingpong, "
        "128x128 2x2 pingpong, 64x192 4x2 pingpong, 64x32 2x4 pingpong, 64x32 4x1 streamk, 128x224 4x1, "
        "128x96 4x2 pingpong, 128x128 4x1 pingpong, 192x128 4x2 streamk, 64x128 1x1x8, 64x160 4x1 pingpong, "
        "64x96 2x2 pingpong, 64x96 1x1x8, 64x128 streamk, 128x32, 128x64, 128x32 2x1 pingpong, 128x32 4x1 pingpong, "
        "128x224 2x1, 64x16 1x2 streamk, 64x16 2x2 streamk, 128x16 4x1 streamk, 64x192 4x1 streamk, "
        "64x192 2x4 pingpong, 192x192"
    ),
    "knm": _tiles(
        "64x16 streamk, 128x16 streamk, 64x32 1x1x8, 128x160 2x1, 64x32 4x1 pingpong, 128x64 4x1 pingpong, "
        "128x128 2x2 pingpong, 64x192 4x2 pingpong, 64x32 2x4 pingpong, 64x32 4x1 streamk"
    ),
}  # beside HOPPER_BASE
HOPPER_HALF = _tiles(
    "128x256 2x1 streamk, 192x128 1x2 streamk, 128x128 1x2 pingpong, 128x96 1x4 pingpong, 64x128 4x1 pingpong, "
    "128x64 4x1 pingpong, 64x64 streamk, 128x128 4x2 pingpong"
)  # of float16, and with float32 results
HOPPER_PARTS = {
    "kn": _tiles("64x64 4x2 pingpong, 128x64 2x4 pingpong, 128x32 4x1 pingpong"),
    "kk": _tiles("64x64 2x2 pingpong, 192x96 2x2, 192x128 2x2"),
    "mn": _tiles("64x64 2x2 pingpong, 64x32 4x1 pingpong, 128x32 4x1 pingpong, 128x64 2x4 pingpong, 128x96 4x1"),
}  # with float32 results, of k in parts: those that results/regret/h200_parts.json would miss most
HOPPER_F16 = _tiles("128x256, 128x64")
HOPPER_HALF_SWAPPED = _tiles(
    "64x16 streamk, 64x32 4x1 pingpong, 128x160 2x1, 64x128 4x1 pingpong, 128x64 4x1 pingpong, 64x96 4x2 pingpong"
)
HOPPER_F16_SWAPPED = _tiles("128x32 4x1 pingpong, 128x96")
HOPPER_DENSE = _tiles(
    "128x256 streamk, 192x128 1x2 streamk, 128x128 2x1 pingpong, 128x96 1x4 pingpong, 128x64 1x2 pingpong, "
    "64x64 streamk"
)  # of a layer's product
HOPPER_DENSE_SWAPPED = HOPPER_FEW, Tile(64, 32, cluster_m=4, pingpong=True), HOPPER_ROWS, HOPPER_TALL
HOPPER_BYTES = _tiles(
    "192x128 1x2 streamk, 64x64 1x4 pingpong, 64x96 2x2 pingpong, 64x160 4x2 pingpong, 64x64 4x2 pingpong, 64x64 1x1x4"
)  # of operands of 1 and of 4 bytes
HOPPER_BYTES_SWAPPED = _tiles(
    "128x192 2x1 streamk, 128x64 1x2 pingpong, 64x64 4x2 pingpong, 64x32 2x2 pingpong, 64x32 1x1x8, 64x16 streamk"
)
HOPPER_ODD = _tiles(
    "256x128, 128x256 2x1, 128x256 2x1 streamk, 128x128 1x2 pingpong, 64x128, 64x64 4x2 pingpong, "
    "128x128 4x2 pingpong, 64x64, 64x64 1x1x4, 64x64 streamk, 128x32 4x1 pingpong, 64x16, 64x16 streamk"
)  # of any shape, where TMA cannot step over the result's rows
HOPPER_ODD_HALF = HOPPER_SHARING, HOPPER_DEEP
HOPPER_ODD_SWAPPED = _tiles("128x32, 64x16 streamk, 128x80")
HOPPER_SYRK_MN = tuple(
    tile for tile in HOPPER_SYMMETRIC if not (tile.stream_k and tile.mma_n == 256)
)  # which lacks registers for that, and would spill 16 bytes


def _thin(majors: str, c_major: str) -> Row:
    """A large matrix and few vectors, of any majors."""
    return Row(HOPPER_THIN[majors[0]], (*BF16_ONLY, *F16_ONLY), (majors,), c_major=c_major, store="threads")


ROWS = {
    "hopper": (
        Row(HOPPER_BASE, (*SAME, (BF16, BF16, F32))),
        Row(HOPPER_BASE[:2], ((F16, F16, F32),), MAJORS),
        *(Row(tiles, BF16_ONLY, (majors[:2],), c_major=majors[2]) for majors, tiles in HOPPER_PLAIN.items()),
        Row(HOPPER_HALF, F16_OR_F32, MAJORS),
        Row(HOPPER_F16, F16_ONLY, MAJORS),
        Row(_tiles("128x192 2x1, 192x192 1x2"), ((BF16, BF16, F32),), WEIGHTS),
        *(Row(tiles, ((BF16, BF16, F32),), (majors,)) for majors, tiles in HOPPER_PARTS.items()),
        Row(HOPPER_HALF_SWAPPED, F16_OR_F32, ("mk", "kk"), c_major="m"),
        Row(_tiles("64x16 streamk, 64x96 4x2 pingpong"), F16_OR_F32, WEIGHTS, c_major="m"),
        Row(HOPPER_F16_SWAPPED, F16_ONLY, ("mk", "kk", "mn"), c_major="m"),
        Row((SMALL,), CROSSED, FORWARD),
        # Epilogues belong to forward passes, where a is k-major; a scale and a sum of batches reach gradients.
        Row(HOPPER_DENSE, BF16_ONLY, FORWARD, (*DENSE, *RESIDUAL[:2])),
        Row(HOPPER_DENSE_SWAPPED, BF16_ONLY, ("mk", "kk"), DENSE, c_major="m"),
        Row((HOPPER_FEW, HOPPER_ROWS, HOPPER_TALL), BF16_ONLY, ("mk", "kk"), RESIDUAL[:2], c_major="m"),
        Row(_tiles("128x128 2x4 pingpong"), BF16_ONLY, FORWARD, (BIAS, BIAS_GELU)),
        Row(_tiles("64x64 2x2 pingpong, 64x64"), BF16_ONLY, FORWARD, RESIDUAL[:2]),
        Row(HOPPER_DENSE[1:], F16_ONLY, FORWARD, (BIAS, BIAS_GELU)),  # the first would spill 8 bytes
        Row((HOPPER_FEW, HOPPER_TALL), F16_ONLY, ("mk", "kk"), (BIAS, BIAS_GELU), c_major="m"),
        Row(_tiles("128x256 streamk, 64x16 streamk"), F16_ONLY, FORWARD, (BIAS,)),
        Row(_tiles("128x128 2x4 pingpong"), F16_ONLY, FORWARD, (BIAS_GELU,)),
        Row((HOPPER_STREAM, HOPPER_PINGPONG, HOPPER_DEEP), BF16_ONLY, FORWARD, (RELU, GELU, SILU)),
        Row((HOPPER_SHARING,), BF16_ONLY, FORWARD, (RELU,)),
        Row((HOPPER_FEW, HOPPER_TALL), BF16_ONLY, ("mk", "kk"), (RELU, GELU, SILU), c_major="m"),
        Row((HOPPER_LARGE,), BF16_ONLY, FORWARD, (*DENSE, RELU, GELU, SILU)),
        Row((HOPPER_LARGE,), F16_ONLY, FORWARD, (BIAS, BIAS_RELU, BIAS_SILU, RELU, GELU, SILU)),  # the other spills
        Row((HOPPER_LARGE, SMALL), SAME, FORWARD, (SCALE,)),
        Row((HOPPER_PINGPONG,), F16_ONLY, FORWARD, (BIAS_RELU, RELU, GELU, SILU, BIAS_SILU)),  # hides what they take
        Row((HOPPER_PINGPONG,), BF16_ONLY, FORWARD, SCALED),
        Row((HOPPER_LARGE, SMALL, HOPPER_PINGPONG, HOPPER_DEEP), BF16_ONLY, FORWARD, (*RESIDUAL[2:], *GATED_RESIDUAL)),
        Row((HOPPER_FEW, HOPPER_TALL), BF16_ONLY, ("mk", "kk"), (*RESIDUAL[2:], *GATED_RESIDUAL), c_major="m"),
        Row((SMALL,), (*BF16_OR_F32, *F16_ONLY), FORWARD, RESIDUAL[:2]),
        Row((HOPPER_LARGE,), BF16_ONLY, FORWARD, RESIDUAL[:2]),  # which "batch" may choose: no CTAs share its tiles
        Row((HOPPER_LARGE, SMALL), SAME, WEIGHTS, (SCALE,)),
        Row((HOPPER_LARGE_STREAM, HOPPER_PINGPONG), BF16_OR_F32, WEIGHTS, ADDED[:1]),
        Row((HOPPER_LARGE_STREAM, HOPPER_PINGPONG), BF16_ONLY, WEIGHTS, ADDED[1:]),
        # Layers of a transformer: forward, forward for a gradient, and back.
        Row(HOPPER_GATED, BF16_ONLY, FORWARD, (*UNITS, *UNITS_KEPT)),
        Row((HOPPER_STREAM, HOPPER_PINGPONG), BF16_ONLY, FORWARD, (*BACK, *UNITS_BACK)),
        Row((HOPPER_STREAM, HOPPER_PINGPONG), BF16_ONLY, FORWARD, (*OF_BIASES, *UNITS_OF_BIASES)),
        Row((HOPPER_LARGE_STREAM,), BF16_ONLY, FORWARD, KEPT_BUT_GELU),  # whose registers it lacks
        Row((HOPPER_PINGPONG,), BF16_ONLY, FORWARD, KEPT),
        Row(HOPPER_GATED[:1], F16_ONLY, FORWARD, (*UNITS, *UNITS_KEPT)),
        Row((HOPPER_PINGPONG,), F16_ONLY, FORWARD, (*BACK, *UNITS_BACK, *OF_BIASES, *UNITS_OF_BIASES)),
        Row((SMALL,), F16_ONLY, FORWARD, KEPT),
        Row((SMALL,), (*BF16_OR_F32, *F16_ONLY), store="threads"),
        Row(HOPPER_ODD, BF16_ONLY, MAJORS, store="threads"),
        Row(HOPPER_ODD_HALF, F16_OR_F32, MAJORS, store="threads"),
        Row(HOPPER_ODD_SWAPPED, BF16_ONLY, ("kk",), c_major="m", store="threads"),  # else b is padded, or XLA's
        Row((HOPPER_PINGPONG,), BF16_ONLY, FORWARD, DENSE, store="threads"),
        Row(_tiles("128x256"), BF16_ONLY, FORWARD, (BIAS,), store="threads"),
        Row((*HOPPER_DIRECT, *HOPPER_DIRECT_SPLIT[:1]), BF16_ONLY, store="threads"),
        Row(HOPPER_DIRECT_LARGE, BF16_ONLY, ("kk", "mn"), store="threads"),
        Row((*HOPPER_DIRECT[:2], *HOPPER_DIRECT_SPLIT), BF16_ONLY, c_major="m", store="threads"),
        Row(_tiles("64x16 direct, 64x64 direct, 64x16 1x1x8 direct"), F16_OR_F32, MAJORS, store="threads"),
        Row(HOPPER_DIRECT_LARGE, F16_OR_F32, MAJORS, store="threads"),
        Row(_tiles("64x16 direct"), F16_ONLY, ("mk", "kk", "mn"), c_major="m", store="threads"),
        Row((*_tiles("64x16 direct, 64x32 direct"), HOPPER_WIDE), BF16_ONLY, FORWARD, DENSE, store="threads"),
        Row(_tiles("64x128 direct"), BF16_ONLY, ("kk",), DENSE, store="threads"),  # spills with an n-major b
        Row((*_tiles("64x32 direct"), HOPPER_WIDE), BF16_ONLY, FORWARD, (RELU,), store="threads"),
        Row((*_tiles("64x32 direct"), *HOPPER_ODD_HALF), F16_ONLY, FORWARD, (BIAS, BIAS_GELU), store="threads"),
        Row(_tiles("64x128 direct"), F16_ONLY, ("kk",), (BIAS,), store="threads"),
        Row(_tiles("64x64 direct"), F16_ONLY, FORWARD, (BIAS_GELU,), store="threads"),
        *(_thin(majors, c_major) for majors in ALL_MAJORS for c_major in "nm"),
        Row((SMALL,), (*FP8, *MIXED_FP8, *RARE_FP8, *INT8), ("kk", "mk"), store="threads"),
        Row((HOPPER_LARGE,), (*FP8, *TF32), ("kk", "mk"), store="threads"),
        Row((SMALL,), TF32, ("kk", "mk"), store="threads"),
        Row((SMALL,), TF32, ("mk",), c_major="m", store="threads"),
        Row((dataclasses.replace(SMALL, promoted=True),), FP8, ("kk", "mk"), store="threads"),
        Row(HOPPER_SYMMETRIC, SAME, SYRK_MAJORS[:1], SYRK),
        Row(HOPPER_SYRK_MN, BF16_ONLY, SYRK_MAJORS[1:], SYRK),
        Row(HOPPER_SYMMETRIC, BF16_OR_F32[1:], SYRK_MAJORS),
        Row(HOPPER_PROMOTED, (*FP8, *MIXED_FP8), ("kk", "mk")),
        Row(HOPPER_PROMOTED, (*FP8, *MIXED_FP8), ("mk",), c_major="m"),
        Row((HOPPER_LARGE, SMALL, SPLIT), FP8, ("kk", "mk")),
        Row((HOPPER_LARGE, SMALL), FP8[:1], ("kk",), (FACTORED,)),
        Row((HOPPER_LARGE, SMALL), FP8[:1], ("mk",), (FACTORED,), c_major="m"),
        Row((HOPPER_LARGE, SMALL), (*FP8[:1], *TF32), ("kk",), DENSE),
        Row((HOPPER_LARGE, SMALL), (*FP8[:1], *TF32), ("mk",), DENSE, c_major="m"),
        Row((HOPPER_LARGE, SMALL), (*MIXED_FP8, *RARE_FP8, *INT8), ("kk",)),
        Row((SMALL,), (*MIXED_FP8, *RARE_FP8, *INT8), ("mk",)),
        Row((HOPPER_LARGE, SMALL, *HOPPER_NARROW_BASE), FP8, ("mk",), c_major="m"),  # x @ w, transposed
        Row((HOPPER_LARGE, SMALL), (*MIXED_FP8, *RARE_FP8, *INT8), ("mk",), c_major="m"),
        Row((HOPPER_LARGE, SMALL), TF32, ("kk", "mk")),
        Row((HOPPER_LARGE, SMALL, HOPPER_NARROW_BASE[0]), TF32, ("mk",), c_major="m"),  # x @ w, transposed
        Row(HOPPER_BYTES, (*FP8[:1], *TF32), ("kk",)),
        Row(HOPPER_BYTES_SWAPPED, (*FP8[:1], *TF32), ("mk",), c_major="m"),
        Row(_tiles("64x32 2x2 pingpong, 64x16 streamk"), (*FP8[:1], *TF32), ("kk",), c_major="m"),
        Row(_tiles("64x160 4x2 pingpong"), FP8[:1], ("mk",), c_major="m"),
        Row(_tiles("64x64 2x2 pingpong"), FP8[:1], ("kk",), store="threads"),
        Row(_tiles("128x192 2x1 streamk"), TF32, ("kk",)),
        Row(_tiles("64x64 4x2 streamk"), TF32, ("mk",), c_major="m"),
        Row(_tiles("64x64 4x2 streamk"), TF32, ("mk",), c_major="m", store="threads"),
        Row(_tiles("64x64 1x4 pingpong, 64x16 streamk"), TF32, ("kk",), store="threads"),
    ),
    "blackwell": (
        Row((PAIR, SMALL), HALF),
        Row(BLACKWELL_BASE, (*SAME, (BF16, BF16, F32)), MAJORS),
        Row(tuple(tile for tile in BLACKWELL if tile not in (PAIR, SMALL, *BLACKWELL_BASE)), BF16_ONLY, MAJORS),
        Row(BLACKWELL_NARROW, BF16_ONLY, ("mk", "kk"), c_major="m"),
        Row((Tile(128, 16),), BF16_ONLY, ("mk", "kk"), DENSE, c_major="m"),
        Row((Tile(128, 16), Tile(128, 16, cluster_k=4)), BF16_ONLY, MAJORS),
        Row((SMALL,), CROSSED, FORWARD),
        Row((PAIR, SMALL), BF16_ONLY, FORWARD, FUSED),
        Row((PAIR, SMALL), F16_ONLY, FORWARD, FUSED[:4]),
        Row((PAIR, SMALL), BF16_ONLY, FORWARD, GATED),
        Row((PAIR,), F16_ONLY, FORWARD, GATED),
        Row((PAIR, SMALL), SAME, WEIGHTS, (SCALE,)),
        Row((PAIR,), BF16_OR_F32, WEIGHTS, ADDED[:1]),
        Row((PAIR,), BF16_ONLY, WEIGHTS, ADDED[1:]),
        Row(BLACKWELL_GATED, BF16_ONLY, FORWARD, (*UNITS, *UNITS_KEPT)),
        Row(BLACKWELL_SYMMETRIC, BF16_ONLY, SYRK_MAJORS, SYRK),
        Row(BLACKWELL_SYMMETRIC, F16_ONLY, SYRK_MAJORS[:1], SYRK),
        Row(BLACKWELL_SYMMETRIC, BF16_OR_F32[1:], SYRK_MAJORS),
        Row((PAIR, SMALL), BF16_ONLY, FORWARD, (*KEPT, *BACK, *UNITS_BACK, *OF_BIASES, *UNITS_OF_BIASES)),
        Row((PAIR, SMALL), BF16_ONLY, FORWARD, (*RESIDUAL, *GATED_RESIDUAL)),
        Row((PAIR, SMALL), BF16_ONLY, store="threads"),
        Row((SMALL,), ((BF16, BF16, F32), (F16, F16, F16)), store="threads"),
        Row((PAIR, SMALL), TF32),
        Row((SMALL,), TF32, store="threads"),
        Row((PAIR, SMALL), FP8),
        Row((PAIR, SMALL), FP8[:1], FORWARD, (FACTORED,)),
        Row((PAIR,), MIXED_FP8),
        Row((PAIR,), RARE_FP8, FORWARD),
        Row((SPLIT,), (*TF32, FP8[0]), FORWARD),
        Row((PAIR, SMALL), INT8[:1]),
        Row((SMALL,), INT8[1:], FORWARD),
    ),
}


def catalogue(targets: Iterable[str] = TARGETS) -> list[Variant]:
    """Every variant of every target. A dtype that a target's tensor cores lack, or that another target has, is left
    out; else all must be legal."""
    return [variant for target in targets for variant in _of_target(target)]


def repacks(targets: Iterable[str] = TARGETS) -> list[Repack]:
    """Every repack of every target, but of those that only some dtypes' kernels have: any target of a device does."""
    own = [target for target in targets if arch_of(target).target == target]
    return [Repack(*fields) for fields in itertools.product(own, KINDS, ELEMENT_BYTES)]


@functools.cache
def _of_target(target: str) -> tuple[Variant, ...]:
    return tuple(variant for row in ROWS[family_of(target).name] for variant in _of_row(row, target))


def _of_row(row: Row, target: str) -> Iterator[Variant]:
    arch = arch_of(target)
    for variant in row.variants(target):
        if arch.flops_per_clk(variant.a_dtype) == 0 or arch.target_of(variant.a_dtype) != target:
            continue
        if reason := why_not_variant(variant):
            raise ValueError(f"the catalogue requires legal variants, got {variant.name}: {reason}")
        yield variant
