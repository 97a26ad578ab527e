"""Static objects of a Hopper tile: functions of the tile alone, made alike for the host and in the kernel.

They cross no kernel boundary, so they cost no parameter. Also which tile a CTA of a grid computes. What the device does
with them is in the rungs.
"""

from __future__ import annotations

from typing import Any

import cutlass.utils.hopper_helpers as sm90
from _layouts import row_major as row_major  # the same on both: what TMA counts
from _order import TileOrder
from cutlass import BFloat16, Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp
from cutlass.tensor_utils import LayoutEnum

from jax_bwgemm.facts.tile import Tile

RASTER_ROWS = 16  # of CTA tiles, walked together: 132 tiles of 128x256 then cover as many rows as columns of C


def tiled_mma(tile: Tile) -> cute.TiledMma:
    """wgmma of 64 x mma_n x 16 by each warpgroup, slabs of 64 rows side by side: bfloat16, k-major; float32 sums."""
    k_major, warpgroups = OperandMajorMode.K, (tile.num_consumer_warpgroups, 1, 1)
    return sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, warpgroups, (64, tile.mma_n))


def smem_layouts(tile: Tile, stages: int) -> tuple[Any, Any]:
    """(rows, k, stage) of A and of B."""
    tiler = (tile.cta_m, tile.mma_n, tile.k_tile)
    a = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, BFloat16, stages)
    return a, sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, stages)


def cluster_layout(tile: Tile) -> Any:
    """(1, M, N, 1): CTAs of the cluster."""
    return cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1))


def operand_atoms(a: cute.Tensor, b: cute.Tensor, tile: Tile, stages: int) -> tuple[cute.CopyAtom, cute.CopyAtom]:
    """TMA of a stage of A; and of this CTA's part of B, which the CTAs of the cluster, all along m, load for each
    other."""
    a_smem, b_smem = (cute.slice_(layout, (None, None, 0)) for layout in smem_layouts(tile, stages))
    load, multicast = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
    tma_a, _ = cpasync.make_tiled_tma_atom(load, a, a_smem, (tile.cta_m, tile.k_tile))
    shape, parts = (tile.mma_n, tile.k_tile), tile.cluster_m
    tma_b, _ = cpasync.make_tiled_tma_atom(multicast if parts > 1 else load, b, b_smem, shape, num_multicast=parts)
    return tma_a, tma_b


def tile_order(tile: Tile, clusters_m: Int32, tiles_n: Int32) -> TileOrder:
    """Clusters, as they start, or as they go from tile to tile."""
    return TileOrder(Uint32(clusters_m), Uint32(tiles_n), Uint32(RASTER_ROWS // tile.cluster_m))


def tile_of_cta(tile: Tile, x: Int32, y: Int32, tiles_m: Int32, tiles_n: Int32) -> tuple[Int32, Int32]:
    """(m, n) of the CTA tile of blockIdx (x, y) in a grid of (tiles_m, tiles_n), without clusters."""
    tile_m, tile_n = tile_order(tile, tiles_m, tiles_n).of(Uint32(x + y * tiles_m))
    return Int32(tile_m), Int32(tile_n)


def store_layout(rows: int, cols: int, boxes: int) -> Any:
    """(row, column, box) of what TMA stores, each box swizzled by itself."""
    return sm90.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (rows, cols), boxes)


def store_matrices(mma: cute.TiledMma) -> cute.TiledCopy:
    """stmatrix: four 8x8 matrices of a warp's accumulator, rounded, into shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
    return cute.make_tiled_copy_S(
        sm90.get_smem_store_op(LayoutEnum.ROW_MAJOR, BFloat16, Float32), cute.make_tiled_copy_C_atom(atom, mma)
    )
