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

import dataclasses
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels import pipelines

VECTOR = 4  # floats of one 16-byte access; neighbouring threads use neighbouring vectors, so no banks conflict


@dataclasses.dataclass(frozen=True)
class KSplit:
    """The exchange of a CTA, of column `x` of its cluster. `parts`: its shared memory for its part, and where every
    other CTA has its own; `threads` of it store."""

    tile: Tile
    x: Int32
    threads: int
    parts: cute.Pointer
    written: cute.Pointer
    drained: cute.Pointer

    @cute.jit
    def leave(self, values: cute.Tensor, box: Any, tidx: Int32) -> None:
        """A thread's `values` of one box -> this CTA's shared memory. A CTA without k tiles leaves zeros."""
        own = self._part_of(self.parts, values, box, tidx)
        for i in cutlass.range_constexpr(cute.size(values) // VECTOR):
            vector = cute.make_tensor(values.iterator + i * VECTOR, cute.make_layout(VECTOR))
            cute.autovec_copy(vector, own[None, i])

    @cute.jit
    def meet(self, phase: Int32) -> None:
        """Between leaving parts and adding them."""
        self._tell_all(self.written)
        cute.arch.mbarrier_wait(self.written, phase)
        cute.arch.fence_acq_rel_cluster()

    @cute.jit
    def add(self, values: cute.Tensor, box: Any, tidx: Int32) -> None:
        """`values` = the sum of all CTAs' parts of one box, in rank order."""
        loaded = cute.make_rmem_tensor(VECTOR, values.element_type)
        values.fill(0)
        for z in cutlass.range_constexpr(self.tile.cluster_k):
            part = self._part_of(cute.arch.map_dsmem_ptr(self.parts, self._rank(z)), values, box, tidx)
            for i in cutlass.range_constexpr(cute.size(values) // VECTOR):
                cute.autovec_copy(part[None, i], loaded)
                for j in cutlass.range_constexpr(VECTOR):
                    values[i * VECTOR + j] = values[i * VECTOR + j] + loaded[j]

    @cute.jit
    def part(self, phase: Int32) -> None:
        """After adding: TMA may overwrite what was read and written here; and a CTA that has no k tiles, its own
        part."""
        cute.arch.fence_proxy("async.shared", space="cluster")
        self._tell_all(self.drained)
        self.wait_drained(phase)

    def wait_drained(self, phase: Int32) -> None:
        cute.arch.mbarrier_wait(self.drained, phase)
        cute.arch.fence_acq_rel_cluster()

    @cute.jit
    def _tell_all(self, barrier: cute.Pointer) -> None:
        """One arrival of this warp at every CTA of the split, after all that its lanes did before."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.fence_acq_rel_cluster()  # one for all: a release by each arrival would be as many
            for z in cutlass.range_constexpr(self.tile.cluster_k):
                cute.arch.mbarrier_arrive(barrier, self._rank(z), relaxed=True, scope=MemScopeKind.CLUSTER)

    def _rank(self, z: int) -> Int32:
        """In the cluster, of the split's `z`-th CTA."""
        return self.x + z * self.tile.cluster_m

    def _part_of(self, parts: cute.Pointer, values: cute.Tensor, box: Any, tidx: Any) -> cute.Tensor:
        """(VECTOR, vectors) of one thread and box."""
        vectors = cute.size(values) // VECTOR
        layout = cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * self.threads))
        return cute.make_tensor(parts + (tidx + box * (vectors * self.threads)) * VECTOR, layout)


def init_barriers(written: cute.Pointer, drained: cute.Pointer, tile: Tile, storing_warps: int) -> None:
    """By one thread."""
    count = pipelines.split_arrivals(tile, storing_warps)
    cute.arch.mbarrier_init(written, count)
    cute.arch.mbarrier_init(drained, count)
