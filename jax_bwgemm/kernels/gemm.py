"""What both families share: compile-time facts, run-time sizes, the walk over tiles, the load warp, the store."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute, pipeline

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.kernels import masks, pipelines
from jax_bwgemm.kernels.epilogue import Epilogue
from jax_bwgemm.kernels.operands import DSL_DTYPES, coordinate_tensor
from jax_bwgemm.kernels.scheduler import TileOrder, tile_coordinates
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import EPILOGUE_STAGES, Tile, num_stages, num_threads, store_box
from jax_bwgemm.variant import Variant


class Sizes(NamedTuple):
    """Kernel parameters behind the three tensor maps; docs/architecture.md, kernel parameter block."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    a_batch_step: Int32
    b_batch_step: Int32
    raster_group: Int32
    raster_along_n: Int32


class Walk(NamedTuple):
    """The tiles of one cluster, in its order: indices `first`, `first + step`, ... below `num_tiles`."""

    order: TileOrder
    num_tiles: Uint32
    k_tiles: Int32
    first: Uint32
    step: Uint32
    x: Int32
    y: Int32

    def tile_of(self, tile: Tile, idx: Uint32) -> tuple[Int32, Int32, Int32]:
        """(m, n, l) of this CTA's tile, in units of cta_m, mma_n and 1."""
        tile_m, tile_n, l_idx = tile_coordinates(idx, self.order, cutlass.min)
        return Int32(tile_m) * tile.cluster_m + self.x, Int32(tile_n) * tile.cluster_n + self.y, Int32(l_idx)


class Gemm:
    """One variant. Everything on self is fixed at compile time."""

    def __init__(self, variant: Variant) -> None:
        tile = self.tile = variant.tile
        arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
        self.in_dtype, self.out_dtype = DSL_DTYPES[variant.a_dtype], DSL_DTYPES[variant.out_dtype]
        self.a_major, self.b_major = variant.a_major, variant.b_major
        self.full_bytes = pipelines.full_bytes(tile, DTYPE_BYTES[variant.a_dtype])
        self.stages = num_stages(tile, DTYPE_BYTES[variant.a_dtype], arch.smem_bytes)
        self.threads = num_threads(tile, variant.target)
        self.store_cols, self.store_rows = store_box(tile, variant.out_dtype, variant.target)
        self.cluster = (tile.cluster_m, tile.cluster_n)
        self.epilogue = Epilogue(variant.epilogue)

    def epilogue_args(self, alpha: Any, bias: Any) -> tuple[Any, ...]:
        """Those of the two that this epilogue takes, in kernel order."""
        given = {"alpha": alpha, "bias": bias}
        return tuple(given[param] for param in self.epilogue.params)

    def walk(self, sizes: Sizes) -> Walk:
        tile = self.tile
        x, y, first = cute.arch.block_idx()
        rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
        tiles_m, tiles_n = Uint32((sizes.m + (rows - 1)) // rows), Uint32((sizes.n + (cols - 1)) // cols)
        order = TileOrder(tiles_m, tiles_n, Uint32(sizes.raster_group), Uint32(sizes.raster_along_n))
        num_tiles = tiles_m * tiles_n * Uint32(sizes.batch)
        k_tiles = (sizes.k + (tile.k_tile - 1)) // tile.k_tile
        return Walk(order, num_tiles, k_tiles, Uint32(first), Uint32(cute.arch.grid_dim()[2]), x, y)

    def coordinate_tensors(self, sizes: Sizes) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(m, k, l), (n, k, l), (m, n, l): A, B and C as their tensor maps count them."""
        m, n, k, batch = sizes[:4]
        a = coordinate_tensor(self.a_major == "k", m, k, batch)
        return a, coordinate_tensor(self.b_major == "k", n, k, batch), coordinate_tensor(True, m, n, batch)

    @cute.jit
    def keep_full(
        self,
        tma_a: cute.CopyAtom,
        As: cute.Tensor,
        Ag: cute.Tensor,
        tma_b: cute.CopyAtom,
        Bs: cute.Tensor,
        Bg: cute.Tensor,
        ab: Any,
        walk: Walk,
        sizes: Sizes,
    ) -> None:
        """The load warp: fills every stage as soon as it is empty, through all tiles.

        As, Bs: (TMA, stage); Ag: (TMA, mma_m tiles, k tiles, l); Bg: (TMA, mma_n tiles, k tiles, l).
        """
        tile = self.tile
        a_mask = cutlass.Int16(masks.a_mask(tile, walk.x))
        b_mask = cutlass.Int16(masks.b_mask(tile, walk.x, walk.y))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        idx = walk.first
        while idx < walk.num_tiles:
            m_idx, n_idx, l_idx = walk.tile_of(tile, idx)
            Ag_tile = Ag[None, m_idx // tile.cta_group, None, l_idx * sizes.a_batch_step]
            Bg_tile = Bg[None, n_idx, None, l_idx * sizes.b_batch_step]
            for k_idx in cutlass.range(walk.k_tiles, unroll=1):
                ab.producer_acquire(state)
                barrier = ab.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    Ag_tile[None, k_idx],
                    As[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=a_mask if cutlass.const_expr(tile.cluster_n > 1) else None,
                )
                cute.copy(
                    tma_b,
                    Bg_tile[None, k_idx],
                    Bs[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=b_mask if cutlass.const_expr(tile.cluster_m > tile.cta_group) else None,
                )
                state.advance()
            idx += walk.step
        ab.producer_tail(state)

    @cute.jit
    def publish(
        self,
        r2s: cute.TiledCopy,
        registers: cute.Tensor,
        Rs: cute.Tensor,
        tma_c: cute.CopyAtom,
        Cs: cute.Tensor,
        Cg: cute.Tensor,
        box: cutlass.Constexpr,
        is_store_warp: cutlass.Boolean,
        barrier_id: Int32,
        threads: cutlass.Constexpr,
    ) -> None:
        """Registers -> the next smem box -> TMA store of it to Cg. `threads` write the box, their first warp stores."""
        stage = box % EPILOGUE_STAGES
        cute.copy(r2s, registers, Rs[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        if is_store_warp:  # so that after the barrier the next buffer may be written: its last store has read it
            cute.arch.cp_async_bulk_wait_group(pipelines.stores_in_flight(), read=True)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
        if is_store_warp:
            cute.copy(tma_c, Cs[None, stage], Cg)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def reclaim(self, is_store_warp: cutlass.Boolean, barrier_id: Int32, threads: cutlass.Constexpr) -> None:
        """Before the first box of a tile: all stores have read their buffers."""
        if is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=threads)
