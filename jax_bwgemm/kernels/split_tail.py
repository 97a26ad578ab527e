"""Split-K of the tail: the last tiles, which would fill a part of a wave, are divided along k between all clusters.

With T tiles on G clusters, T - T % G of them are whole waves. The R = T % G that are left become R * parts items, one a
cluster: item i is part i // R of tile i % R, so that clusters side by side read the same k. Every CTA but those of the
last part leaves its accumulator in a workspace in global memory and raises a flag; those of the last part wait for the
flags and add the parts to their own, in the order of k, so that the same inputs give the same bits.

    flag        who raises it                                     who waits
    of a CTA    the group's first warp, when its threads have     the same group of the CTA that has the last part of
    and group   met: a release at gpu scope                       the tile: its first warp, acquiring; then they meet

A CTA waits only for clusters before its own, which start before it: no launch hangs for want of SMs.

Nothing zeroes the flags. A raised one has the value `token`, 64 random bits that only this call site uses, and whoever
has waited for it takes it down, so that a workspace never holds the token but where a flag is up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from jax_bwgemm.tile import FLAG_BYTES

VECTOR = 4  # floats of one 16-byte access; neighbouring threads use neighbouring vectors


class Tail(NamedTuple):
    """Items from `first` on are parts of the last `tiles` tiles. `flags` (then parts): the workspace."""

    first: Uint32
    tiles: Uint32
    parts: Uint32
    flags: cute.Pointer
    token: Int64


class Item(NamedTuple):
    """What a cluster does in one turn: k tiles `k_first` to `k_first + k_count` of a tile. Of a tile in `part` < `last`
    parts, only the last one's CTAs store the result; elsewhere both are 0."""

    tile_idx: Uint32
    k_first: Int32
    k_count: Int32
    part: Uint32
    last: Uint32


def tail_of(
    num_tiles: Uint32, clusters: Uint32, k_tiles: Int32, wanted: Int32, flags: cute.Pointer, token: Int64
) -> Tail:
    """No more parts than there are clusters and k tiles for."""
    first = num_tiles // clusters * clusters
    tiles = num_tiles - first
    parts = cutlass.min(Uint32(wanted), Uint32(k_tiles))
    return Tail(first, tiles, cutlass.min(parts, clusters // cutlass.max(tiles, Uint32(1))), flags, token)


@cute.jit
def item_of(tail: Tail, idx: Uint32, k_tiles: Int32) -> Item:
    tile_idx, part, last = idx, Uint32(0), Uint32(0)
    k_first, k_count = Int32(0), k_tiles
    if idx >= tail.first:
        part = (idx - tail.first) // tail.tiles
        last = tail.parts - 1
        tile_idx = idx - part * tail.tiles
        each = k_tiles // Int32(tail.parts)
        longer = k_tiles - each * Int32(tail.parts)  # the first ones have one k tile more
        k_first = Int32(part) * each + cutlass.min(Int32(part), longer)
        k_count = each + Int32(Int32(part) < longer)
    return Item(tile_idx, k_first, k_count, part, last)


@cute.jit
def leave_part(
    tail: Tail,
    acc: cute.Tensor,
    slot: Int32,
    tidx: Int32,
    group: Any,
    groups: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """A thread's accumulator -> the CTA's slot of the workspace; then the group's flag. `threads`: of all groups."""
    own = part_at(tail, acc, slot, tidx, threads)
    for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        cute.autovec_copy(cute.make_tensor(acc.iterator + i * VECTOR, cute.make_layout(VECTOR)), own[None, i])
    cute.arch.barrier(barrier_id=group.barrier_id, number_of_threads=threads // groups)
    if group.is_store_warp:
        with cute.arch.elect_one():
            cute.arch.store(flag_at(tail, slot, group, groups), tail.token, sem="release", scope="gpu")


@cute.jit
def add_part(
    tail: Tail,
    acc: cute.Tensor,
    slot: Int32,
    tidx: Int32,
    group: Any,
    groups: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """`acc` += what another CTA left in its slot, once its flag is up."""
    if group.is_store_warp:
        flag = flag_at(tail, slot, group, groups)
        found = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
        while found != tail.token:
            found = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
        with cute.arch.elect_one():
            cute.arch.store(flag, Int64(0))
    cute.arch.barrier(barrier_id=group.barrier_id, number_of_threads=threads // groups)
    own = part_at(tail, acc, slot, tidx, threads)
    loaded = cute.make_rmem_tensor(cute.size(acc), acc.element_type)
    for i in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        cute.autovec_copy(own[None, i], cute.make_tensor(loaded.iterator + i * VECTOR, cute.make_layout(VECTOR)))
    acc.store(acc.load() + cute.make_tensor(loaded.iterator, acc.layout).load())


def part_at(tail: Tail, acc: cute.Tensor, slot: Int32, tidx: Int32, threads: int) -> cute.Tensor:
    """(VECTOR, vectors) of one thread in a slot of the workspace, behind the flags."""
    vectors = cute.size(acc) // VECTOR
    parts = cute.recast_ptr(tail.flags + FLAG_BYTES // 8, dtype=acc.element_type)
    start = Int64(slot) * (vectors * threads * VECTOR) + Int64(tidx) * VECTOR
    pointer = cute.make_ptr(acc.element_type, (parts + start).toint(), cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * threads)))


def flag_at(tail: Tail, slot: Int32, group: Any, groups: int) -> cute.Pointer:
    return tail.flags + (slot * groups + group.idx)
