"""Stream-K: the last tiles are one stream of k tiles, of which every cluster takes an equally long share.

Whole tiles are dealt to the clusters in turn. The last `tiles` of them lie behind one another as tiles * k_tiles k
tiles; cluster c of C multiplies those from c * each on (the first ones have one more). Where a tile ends within a
cluster's share, its piece of the next tile comes first: every CTA leaves that piece's accumulator in a workspace in
global memory and raises a flag. Then come the tiles that are all its own, and last the end of the tile that others have
begun: its CTAs wait for their flags and add their parts to its own, in the order of k, so that the same inputs give the
same bits on the same device.

    flag        who raises it                                     who waits
    of a CTA    the group's first warp, when its threads have     the same group of the CTA that has the end of the
    and group   met: a release at gpu scope                       tile: its first warp, acquiring; then they meet

A CTA waits only for clusters before its own, which start before it, and has left its own part before: no launch hangs
for want of SMs, and where shares are longer than a tile, parts lie ready.

Nothing zeroes the flags. A raised one has the value `token`, 64 random bits that only this call site uses, and whoever
has waited for it takes it down, so that a workspace never holds the token but where a flag is up.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_bwgemm.facts.resources import FLAG_BYTES
from jax_bwgemm.kernels.walk import Stream, Walk

VECTOR = 4  # floats of one 16-byte access; neighbouring threads use neighbouring vectors
LOADED_REGISTERS = 32  # of a part, at a time; of parts of fewer, twice as many, so that their latencies overlap
WARP_LANES = 32


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A thread's access to the workspace: the `tidx`-th of all that have accumulators, in `group`, one of `groups`.
    Where the walk has no stream, every piece is a whole tile, and there is nothing to do."""

    walk: Walk
    group: Any
    groups: int
    tidx: Int32

    @cute.jit
    def leave(self, acc: cute.Tensor) -> None:
        """A piece of a tile whose end this cluster does not have: to the CTA's slot."""
        if cutlass.const_expr(self.walk.stream is not None):
            self._leave(cute.coalesce(acc))

    @cute.jit
    def add(self, acc: cute.Tensor, parts: Int32) -> None:
        """The end of a tile that `parts` clusters before this one have begun: `acc` += what they left at the CTA's
        place, in the order of k."""
        if cutlass.const_expr(self.walk.stream is not None):  # noqa: SIM102 (a compile-time condition stands alone)
            if parts > 0:
                self._add(cute.coalesce(acc), self._slot(Int32(self._stream.share.cluster) - parts), parts)

    @cute.jit
    def _leave(self, acc: cute.Tensor) -> None:
        """A thread's accumulator -> the workspace; then the group's flag."""
        slot = self._slot(Int32(self._stream.share.cluster))
        own = self._part_at(acc, slot)
        for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
            cute.autovec_copy(cute.make_tensor(acc.iterator + i * VECTOR, cute.make_layout(VECTOR)), own[None, i])
        self.group.meet()
        if self.group.is_store_warp:
            with cute.arch.elect_one():
                cute.arch.store(self._flag_at(slot), self._stream.params.token, sem="release", scope="gpu")

    @cute.jit
    def _add(self, acc: cute.Tensor, first_slot: Int32, parts: Int32) -> None:
        """Once their flags are up; each lane looks at one of them."""
        slot_step = cutlass.const_expr(self.walk.tile.cluster_ctas)
        if self.group.is_store_warp:
            i = Int32(cute.arch.lane_idx())
            while i < parts:
                flag = self._flag_at(first_slot + i * slot_step)
                found = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
                while found != self._stream.params.token:
                    found = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
                cute.arch.store(flag, Int64(0))
                i += WARP_LANES
            cute.arch.sync_warp()
        self.group.meet()
        count = cutlass.const_expr(math.gcd(cute.size(acc), LOADED_REGISTERS))
        together = cutlass.const_expr(max(1, 2 * LOADED_REGISTERS // cute.size(acc)))
        loaded = cute.make_rmem_tensor((count, together), acc.element_type)
        for first in cutlass.range(0, parts, together, unroll=1):
            for begin in cutlass.range_constexpr(0, cute.size(acc), count):
                for j in cutlass.range_constexpr(together):  # the last part again where there are no more
                    part = cutlass.min(first + j, parts - 1)
                    own = self._part_at(acc, first_slot + part * slot_step)
                    for i in cutlass.range_constexpr(0, count, VECTOR):
                        vector = cute.make_tensor(loaded[None, j].iterator + i, cute.make_layout(VECTOR))
                        cute.autovec_copy(own[None, (begin + i) // VECTOR], vector)
                for i in cutlass.range_constexpr(count):
                    acc[begin + i] = acc[begin + i] + loaded[i, 0]
                for j in cutlass.range_constexpr(1, together):
                    is_part = first + j < parts
                    for i in cutlass.range_constexpr(count):
                        acc[begin + i] = cutlass.select_(is_part, acc[begin + i] + loaded[i, j], acc[begin + i])

    @property
    def _stream(self) -> Stream:
        assert self.walk.stream is not None  # only a stream's pieces are left and added
        return self.walk.stream

    def _slot(self, cluster: Int32) -> Int32:
        """Of the workspace: that of the CTA at this one's place in a cluster."""
        return cluster * self.walk.tile.cluster_ctas + self.walk.y * self.walk.tile.cluster_m + self.walk.x

    def _part_at(self, acc: cute.Tensor, slot: Int32) -> cute.Tensor:
        """(VECTOR, vectors) of one thread in a slot of the workspace, behind the flags."""
        vectors, threads = cute.size(acc) // VECTOR, self.groups * self.group.threads
        parts = cute.recast_ptr(self._stream.params.workspace + FLAG_BYTES // 8, dtype=acc.element_type)
        start = Int64(slot) * (vectors * threads * VECTOR) + Int64(self.tidx) * VECTOR
        pointer = cute.make_ptr(acc.element_type, (parts + start).toint(), cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * threads)))

    def _flag_at(self, slot: Int32) -> cute.Pointer:
        return self._stream.params.workspace + (slot * self.groups + self.group.idx)
