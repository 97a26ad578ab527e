"""A store group's way out of its threads' registers, to the result. Here by TMA; `thread_outlets` has the others."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.boxes import Boxes, TmaParts


@dataclasses.dataclass(frozen=True)
class StoreGroup:
    """Warps that store on their own: the `idx`-th group; `tidx` counts its `threads`, the store warp is its first."""

    idx: Int32
    tidx: Int32
    threads: int
    is_store_warp: Boolean
    barrier_id: Int32

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)


def store_group(tidx: Int32, threads: int, first_barrier: int) -> StoreGroup:
    """Of the `tidx`-th thread of those that store. Groups have named barriers from `first_barrier` on."""
    idx = cute.arch.make_warp_uniform(tidx // threads)
    own = tidx % threads
    return StoreGroup(idx, own, threads, cute.arch.make_warp_uniform(own // 32) == 0, first_barrier + idx)


class Outlet(Protocol):
    """What every way out can do. `fragment`: the shape of a thread's registers with a box."""

    @property
    def boxes(self) -> Boxes: ...

    @property
    def fragment(self) -> Any: ...

    def reclaim(self) -> None:
        """Before a tile's first box: waits until the buffers have been read."""

    def publish(self, rounded: cute.Tensor, at: Any, buffer: int) -> None:
        """Registers -> a buffer -> the result's box `at` (m, n, l), by the whole group."""

    def finish(self) -> None:
        """Before the CTA may go: its shared memory is being read until then."""


def round_box(values: cute.Tensor, outlet: Outlet) -> cute.Tensor:
    rounded = cute.make_rmem_tensor(outlet.fragment, outlet.boxes.dtype)
    rounded.store(values.load().to(outlet.boxes.dtype))
    return rounded


def rounded_for(results: tuple[cute.Tensor, ...], outlets: tuple[Outlet, ...], i: int) -> cute.Tensor:
    """What the `i`-th outlet publishes: its result, or behind all results an image of one. That is rounded anew, value
    by value: out of a vector of float16, the compiler takes elements by registers that nobody has written."""
    if i < len(results):
        return round_box(results[i], outlets[i])
    values, own = results[i % len(results)], cute.make_rmem_tensor(outlets[i].fragment, outlets[i].boxes.dtype)
    for j in range(cute.size(values)):
        own[j] = values[j].to(outlets[i].boxes.dtype)
    return own


def of_outlet(rounded: cute.Tensor, outlet: Outlet) -> cute.Tensor:
    """The same registers, in the shape that an outlet wants."""
    return cute.make_tensor(rounded.iterator, cute.make_layout(outlet.fragment))


@dataclasses.dataclass(frozen=True)
class TmaOutlet:
    """Through `r2s` into Rs (R2S, R2S_M, R2S_N, buffer), the thread's part of the group's buffers; from there to the
    result by `parts`, of the store warp.

    A store that takes one box meets its group once: the store warp has waited by then for the store that read the next
    buffer. One that takes several meets it before the first, whose buffers it has waited for, and behind the last.
    """

    boxes: Boxes
    group: StoreGroup
    r2s: Any
    Rs: cute.Tensor
    parts: TmaParts

    @property
    def fragment(self) -> Any:
        return cute.shape(self.Rs)[:3]

    @cute.jit
    def reclaim(self) -> None:
        self.wait_for_stores(0)
        if cutlass.const_expr(self.boxes.a_store == 1):
            self.group.meet()

    @cute.jit
    def publish(self, rounded: cute.Tensor, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        a_store = cutlass.const_expr(self.boxes.a_store)
        if cutlass.const_expr(a_store > 1 and buffer % a_store == 0):  # before the first box of a store
            self.wait_for_stores(pipelines.wide_stores_in_flight(self.boxes.buffers, a_store))
            self.group.meet()
        cute.copy(self.r2s, rounded, self.Rs[None, None, None, buffer])
        if cutlass.const_expr(buffer % a_store == a_store - 1):
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(a_store == 1):  # so that after the barrier the next buffer may be written
                self.wait_for_stores(pipelines.stores_in_flight(self.boxes.buffers))
            self.group.meet()
            if self.group.is_store_warp:
                self.send((at[0], at[1] // a_store, at[2]), buffer // a_store)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_for_stores(self, in_flight: cutlass.Constexpr[int]) -> None:
        """The store warp: until all stores but so many have read their buffers."""
        if self.group.is_store_warp:
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)

    def send(self, at: Any, buffer: int) -> None:
        """A store's buffer -> the result at `at`, in boxes of a store, by one warp."""
        self.parts.store(buffer, at)

    @cute.jit
    def finish(self) -> None:
        if self.group.is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
