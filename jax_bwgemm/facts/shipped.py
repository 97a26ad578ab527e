"""The tiles that ship: what the planner chooses from and the catalogue compiles, by the name of a family. Data only.

Their order is the planner's where nothing else decides.
"""

from __future__ import annotations

from jax_bwgemm.facts.thin import ROWS
from jax_bwgemm.facts.tile import THIN_COLS, Tile

HOPPER_BASE = (
    Tile(128, 256, cluster_m=2),
    Tile(128, 128),
    Tile(64, 64),
)  # of any majors
HOPPER_FURTHER = (
    Tile(128, 256),
    Tile(128, 192, cluster_m=2),
    Tile(256, 128),
    Tile(64, 128),
    Tile(128, 128, cluster_m=2, pingpong=True),
    Tile(128, 128, cluster_k=4),
    Tile(128, 256, cluster_m=2, stream_k=True),
    Tile(128, 256, stream_k=True),
    Tile(128, 128, cluster_m=2, stream_k=True),
    Tile(128, 192, cluster_m=2, stream_k=True),
    Tile(128, 96, cluster_m=2, pingpong=True),
    Tile(128, 64),
    Tile(64, 64, stream_k=True),
    Tile(64, 64, cluster_m=2, pingpong=True),
    Tile(64, 64, cluster_k=4),
    Tile(64, 128, cluster_m=2, pingpong=True),
    Tile(64, 128, cluster_k=4),
    Tile(64, 192, cluster_m=2, pingpong=True),
    Tile(128, 64, cluster_n=2, pingpong=True),
    Tile(128, 128, cluster_n=2, pingpong=True),
    Tile(128, 224, cluster_m=2),
    Tile(64, 32, cluster_m=2, pingpong=True),
    Tile(128, 128, cluster_m=4, pingpong=True),
    Tile(128, 160, cluster_m=4, pingpong=True),
    Tile(128, 192, pingpong=True),
    Tile(192, 192, cluster_n=2),
    Tile(64, 32, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 64, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 96, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 128, cluster_m=4, pingpong=True),
    Tile(64, 160, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 64, cluster_m=4, pingpong=True),
    Tile(128, 96, cluster_n=4, pingpong=True),
    Tile(128, 128, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(192, 128, cluster_n=2, stream_k=True),
    Tile(128, 64, cluster_n=4, stream_k=True),
    Tile(128, 128, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 96, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 64, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(128, 160, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(128, 128, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(128, 192, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 64, cluster_n=4, pingpong=True),
    Tile(64, 64, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 80, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 128, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 128, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(192, 96, cluster_m=2, cluster_n=2),
    Tile(64, 64, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(128, 192, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(192, 128, cluster_m=2, cluster_n=4, stream_k=True),
    Tile(64, 224, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 128, cluster_m=2),
    Tile(128, 96, cluster_m=4),
    Tile(192, 128, cluster_m=2, cluster_n=2),
    Tile(64, 32, cluster_m=2, stream_k=True),
    Tile(64, 96, cluster_m=4, pingpong=True),
    Tile(64, 96, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(64, 128, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(128, 80, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(128, 96, cluster_m=4, pingpong=True),
    Tile(128, 192, cluster_m=2, pingpong=True),
    Tile(192, 160, cluster_m=2),
    Tile(64, 112, cluster_m=4, pingpong=True),
    Tile(64, 192, cluster_m=4, stream_k=True),
    Tile(128, 224, cluster_m=4),
    Tile(128, 160, cluster_m=4, cluster_n=2),
    Tile(128, 160, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 96, cluster_n=4, pingpong=True),
    Tile(64, 144, cluster_m=4, pingpong=True),
    Tile(64, 48, pingpong=True),
    Tile(64, 32, cluster_n=2, pingpong=True),
    Tile(64, 32, cluster_n=4, pingpong=True),
)  # for some shapes only
# Tiles in clusters of four and eight read least from the L2 cache: what they gave is in docs/hopper.md.
# Tried for large products on an H200 (2026-11-24), not shipped: 256x192, 256x160 and 192x192, alone and in clusters of
# two. At 8192 they take 0.99 to 1.04 times as long as 256x128 in a cluster, which 128x256 beats (4096: 1.05 to 1.23
# times), and under load, at 690 W, all reach 658 to 670 TFLOP/s: reading less from the L2 cache saves no power.
HOPPER_PROMOTED = (
    Tile(128, 128, cluster_m=2, promoted=True),
    Tile(128, 128, promoted=True),
)
HOPPER_GATED = (
    Tile(128, 256, cluster_m=2, gated=True),
    Tile(128, 256, cluster_m=2, stream_k=True, gated=True),
    Tile(128, 128, cluster_m=2, pingpong=True, gated=True),
    Tile(128, 128, gated=True),
    Tile(64, 128, gated=True),
    Tile(64, 128, stream_k=True, gated=True),
)
HOPPER_NARROW_BASE = (
    Tile(128, 16),
    Tile(128, 32),
    Tile(128, 64),
)
HOPPER_NARROW_FURTHER = (
    Tile(64, 16),
    Tile(256, 64),
    Tile(64, 16, stream_k=True),
    Tile(64, 32, stream_k=True),
    Tile(128, 16, stream_k=True),
    Tile(64, 32, cluster_k=4),
    Tile(64, 48, cluster_k=4),
    Tile(64, 32, cluster_k=8),
    Tile(64, 48, cluster_k=8),
    Tile(64, 32, cluster_m=4, pingpong=True),
    Tile(128, 32, cluster_m=2, pingpong=True),
    Tile(128, 32, cluster_m=4, pingpong=True),
    Tile(64, 32, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(128, 64, cluster_m=4, pingpong=True),
    Tile(64, 32, cluster_m=4, stream_k=True),
    Tile(64, 64, cluster_k=8),
    Tile(64, 16, pingpong=True),
    Tile(64, 16, cluster_m=4, pingpong=True),
    Tile(64, 64, cluster_m=4, pingpong=True),
    Tile(64, 16, cluster_n=2, stream_k=True),
    Tile(64, 16, cluster_m=2, stream_k=True),
    Tile(64, 16, cluster_m=4, stream_k=True),
    Tile(64, 16, cluster_m=2, cluster_n=2, stream_k=True),
    Tile(128, 16, cluster_m=4, stream_k=True),
)
HOPPER_SWAPPED = (
    Tile(64, 48, cluster_k=4),
    Tile(64, 80, cluster_k=4),
    Tile(64, 96, cluster_m=4, pingpong=True),
    Tile(64, 112, cluster_k=4),
    Tile(64, 208, cluster_k=2),
    Tile(128, 80),
    Tile(128, 96),
    Tile(128, 160, cluster_m=2),
    Tile(128, 160, cluster_k=2),
    Tile(128, 192, cluster_m=2),
    Tile(192, 96),
    Tile(256, 64),
    Tile(256, 112),
    Tile(64, 32, cluster_k=8),
    Tile(64, 48, cluster_k=8),
    Tile(64, 32, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 64, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 128, cluster_m=4, pingpong=True),
    Tile(128, 64, cluster_m=4, pingpong=True),
    Tile(128, 96, cluster_m=4, pingpong=True),
    Tile(128, 112, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(128, 128, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(192, 160, cluster_m=2, cluster_n=2, stream_k=True),
    Tile(64, 96, cluster_k=8),
    Tile(64, 96, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 96, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 96, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(128, 192, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(64, 192, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 32, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(64, 48, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 224, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 80, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(128, 112, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(128, 160, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(128, 160, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 96, cluster_k=2),
    Tile(64, 128, cluster_k=8),
    Tile(64, 96, cluster_m=2, cluster_n=2, pingpong=True),
    Tile(64, 128, stream_k=True),
    Tile(64, 160, cluster_m=4, pingpong=True),
    Tile(128, 48, cluster_n=2, pingpong=True),
    Tile(128, 64),
    Tile(128, 80, cluster_n=2, pingpong=True),
    Tile(128, 96, cluster_k=4),
    Tile(128, 128, cluster_m=4, pingpong=True),
    Tile(128, 160, cluster_n=2),
    Tile(128, 160, cluster_m=4, pingpong=True),
    Tile(128, 160, cluster_m=2, stream_k=True),
    Tile(128, 224, cluster_m=4),
    Tile(192, 128, cluster_m=4, cluster_n=2, stream_k=True),
    Tile(64, 80, cluster_m=4, pingpong=True),
    Tile(64, 80, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(64, 112, cluster_m=4, stream_k=True),
    Tile(64, 160, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 80, cluster_m=4, pingpong=True),
    Tile(128, 112, cluster_m=4, pingpong=True),
    Tile(128, 224, cluster_m=2),
    Tile(64, 16, pingpong=True),
    Tile(64, 16, cluster_n=2, stream_k=True),
    Tile(64, 32, cluster_n=2, stream_k=True),
    Tile(64, 112, cluster_m=4, pingpong=True),
    Tile(64, 144, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(64, 192, cluster_m=4, stream_k=True),
    Tile(64, 192, cluster_m=2, cluster_n=4, pingpong=True),
    Tile(64, 256),
    Tile(128, 80, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 112, cluster_m=4, cluster_n=2, pingpong=True),
    Tile(128, 240, cluster_m=4),
    Tile(192, 192),
    Tile(256, 160, cluster_n=2),
)
HOPPER_SYMMETRIC = (
    Tile(128, 256, cluster_m=2, symmetric=True),
    Tile(128, 256, cluster_m=2, stream_k=True, symmetric=True),
    Tile(128, 128, pingpong=True, symmetric=True),
    Tile(128, 128, stream_k=True, symmetric=True),
)  # tried on an H200: 256x128 (8192: 1 % slower), 128x128 in clusters of 2x2 (4096: 11 %)
BLACKWELL = (
    Tile(256, 256, cta_group=2, cluster_m=2),
    Tile(256, 256, cta_group=2, cluster_m=2, num_accs=2),
    Tile(256, 192, cta_group=2, cluster_m=2),
    Tile(256, 128, cta_group=2, cluster_m=2),
    Tile(128, 128, cta_group=2, cluster_m=2),
    Tile(128, 256),
    Tile(128, 128),
    Tile(128, 64),
    Tile(64, 128),
    Tile(256, 128, cta_group=2, cluster_m=2, cluster_k=4),
    Tile(128, 128, cluster_k=4),
    Tile(128, 64, cluster_k=8),
)
BLACKWELL_GATED = (
    Tile(256, 256, cta_group=2, cluster_m=2, gated=True),
    Tile(256, 128, cta_group=2, cluster_m=2, gated=True),
    Tile(128, 128, gated=True),
    Tile(64, 128, gated=True),
)
BLACKWELL_SYMMETRIC = (
    Tile(256, 256, cta_group=2, cluster_m=2, symmetric=True),
    Tile(128, 128, symmetric=True),
)
BLACKWELL_NARROW = (
    Tile(128, 16),
    Tile(128, 32),
    Tile(128, 64),
    Tile(128, 16, cluster_k=4),
    Tile(128, 32, cluster_k=4),
    Tile(128, 64, cluster_k=4),
)

HOPPER_DIRECT = (
    Tile(64, 16, direct=True),
    Tile(64, 32, direct=True),
    Tile(64, 64, direct=True),
    Tile(128, 16, direct=True),
    Tile(64, 128, direct=True),
    Tile(64, 256, direct=True),
)
HOPPER_DIRECT_LARGE = (Tile(128, 128, direct=True),)  # spills with an m-major a and a k-major b
HOPPER_DIRECT_SPLIT = (
    Tile(64, 16, cluster_k=8, direct=True),
    Tile(64, 32, cluster_k=8, direct=True),
)
HOPPER_THIN = {
    major: tuple(Tile(rows, THIN_COLS, cluster_k=cluster_k, direct=True) for cluster_k in (1, 8, 4))
    for major, rows in ROWS.items()
}  # by a's major
HOPPER_ROW = (
    Tile(128, 256, cluster_m=2, by_rows=True),
    Tile(128, 256, cluster_m=2, stream_k=True, by_rows=True),
    Tile(256, 128, by_rows=True),
    Tile(128, 128, cluster_n=2, pingpong=True, by_rows=True),
    Tile(64, 128, by_rows=True),
)

SHIPPED_TILES = {
    "hopper": (*HOPPER_BASE, *HOPPER_FURTHER, *HOPPER_PROMOTED, *HOPPER_GATED, *HOPPER_SYMMETRIC),
    "blackwell": (*BLACKWELL, *BLACKWELL_GATED, *BLACKWELL_SYMMETRIC),
}  # for any product, as 2-byte operands have them: `k_tile` follows the dtype
NARROW_TILES = {
    "hopper": (*HOPPER_NARROW_BASE, *HOPPER_NARROW_FURTHER),
    "blackwell": BLACKWELL_NARROW,
}  # where n is narrow: of few columns, or of the transposed product of few rows
SWAPPED_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": HOPPER_SWAPPED,
    "blackwell": (),
}  # of the transposed product of more rows than few: its columns may be any multiple of 16, whatever the weights' major
ROW_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": HOPPER_ROW,
    "blackwell": (),
}  # of results whose rows end within sectors
DIRECT_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": (*HOPPER_DIRECT, *HOPPER_DIRECT_LARGE, *HOPPER_DIRECT_SPLIT[:1]),
    "blackwell": (),
}  # of small products, and of few columns whose operands TMA cannot step over
SWAPPED_DIRECT_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": (*HOPPER_DIRECT[:2], *HOPPER_DIRECT_SPLIT),
    "blackwell": (),
}  # the same of few rows
THIN_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": (*HOPPER_THIN["k"], *HOPPER_THIN["m"]),
    "blackwell": (),
}  # of a large matrix whose lines begin anywhere and of up to 8 vectors
BUILT_TILES = SHIPPED_TILES, NARROW_TILES, SWAPPED_TILES, DIRECT_TILES, SWAPPED_DIRECT_TILES, THIN_TILES
# all that have kernels of their own: those of ROW_TILES have the kernels of other tiles (`variant_for`)
