"""Split-K inside a cluster: its CTAs divide k among themselves and add their parts up through each other's memory.

Every CTA leaves its part in its own shared memory, in the stages that the main loop no longer needs, and says so to
all. Then each reads one box in `cluster_k` of every CTA's part and adds them in rank order, so that the same inputs
give the same bits. There is no workspace and nothing to reset.

    barrier    who arrives                                      who waits
    written    each storing warp, at every CTA of the split     the storing warps, before they read others' parts
    drained    each storing warp, at every CTA of the split     the storing warps, and the load warp, before it fills
                                                                the stages again or goes
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.tile import Tile

VECTOR = 4  # floats of one 16-byte access; neighbouring threads use neighbouring vectors, so no banks conflict


class KSplit(NamedTuple):
    """`parts`: this CTA's shared memory for its part, and where every other CTA has its own."""

    parts: cute.Pointer
    written: cute.Pointer
    drained: cute.Pointer

    def wait_drained(self, phase: Int32) -> None:
        cute.arch.mbarrier_wait(self.drained, phase)
        cute.arch.fence_acq_rel_cluster()


def init_barriers(split: KSplit, tile: Tile, storing_warps: int) -> None:
    """By one thread."""
    count = pipelines.split_arrivals(tile, storing_warps)
    cute.arch.mbarrier_init(split.written, count)
    cute.arch.mbarrier_init(split.drained, count)


@cute.jit
def tell_all(barrier: cute.Pointer, tile: cutlass.Constexpr, x: Int32) -> None:
    """One arrival of this warp at every CTA of the split, after all that its lanes did before."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.fence_acq_rel_cluster()  # one for all: a release by each arrival would be as many
        for z in cutlass.range_constexpr(tile.cluster_k):
            cute.arch.mbarrier_arrive(barrier, x + z * tile.cluster_m, relaxed=True, scope=MemScopeKind.CLUSTER)


@cute.jit
def meet(split: KSplit, tile: cutlass.Constexpr, x: Int32, phase: Int32) -> None:
    """Between leaving parts and adding them."""
    tell_all(split.written, tile, x)
    cute.arch.mbarrier_wait(split.written, phase)
    cute.arch.fence_acq_rel_cluster()


@cute.jit
def part(split: KSplit, tile: cutlass.Constexpr, x: Int32, phase: Int32) -> None:
    """After adding: TMA may overwrite what was read and written here; and a CTA that has no k tiles, its own part."""
    cute.arch.fence_proxy("async.shared", space="cluster")
    tell_all(split.drained, tile, x)
    split.wait_drained(phase)


@cute.jit
def leave_part(split: KSplit, values: cute.Tensor, box: Any, tidx: Int32, threads: cutlass.Constexpr) -> None:
    """A thread's `values` of one box -> this CTA's shared memory. A CTA without k tiles leaves zeros."""
    own = part_of(split.parts, values, box, tidx, threads)
    for i in cutlass.range_constexpr(cute.size(values) // VECTOR):
        vector = cute.make_tensor(values.iterator + i * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(vector, own[None, i])


@cute.jit
def add_parts(
    split: KSplit,
    values: cute.Tensor,
    box: Any,
    tidx: Int32,
    threads: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    x: Int32,
) -> None:
    """`values` = the sum of all CTAs' parts of one box, in rank order."""
    loaded = cute.make_rmem_tensor(VECTOR, values.element_type)
    values.fill(0)
    for z in cutlass.range_constexpr(tile.cluster_k):
        part = part_of(cute.arch.map_dsmem_ptr(split.parts, x + z * tile.cluster_m), values, box, tidx, threads)
        for i in cutlass.range_constexpr(cute.size(values) // VECTOR):
            cute.autovec_copy(part[None, i], loaded)
            for j in cutlass.range_constexpr(VECTOR):
                values[i * VECTOR + j] = values[i * VECTOR + j] + loaded[j]


def part_of(parts: cute.Pointer, values: cute.Tensor, box: Any, tidx: Any, threads: int) -> cute.Tensor:
    """(VECTOR, vectors) of one thread and box."""
    vectors = cute.size(values) // VECTOR
    layout = cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * threads))
    return cute.make_tensor(parts + (tidx + box * (vectors * threads)) * VECTOR, layout)
