"""CTA and cluster barriers; the fences that publish accesses to another proxy, another CTA or a barrier's users."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles, whole_warp
from jax_bwgemm.emulator.global_order import CTA_SCOPE, GPU_SCOPE, SCOPES
from jax_bwgemm.emulator.races import INITS, KNOWN, PUBLISHED, PUBLISHED_REMOTE, Clock
from jax_bwgemm.emulator.syntax import Instr


@handles("bar.sync", "barrier.sync", "barrier.cta.sync")
def _bar_sync(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Arrivals count 32 a warp; all threads of the CTA without a count."""
    d.arity(1, 2)
    d.only(mods, "aligned")
    number = d.src(instr.operands[0], 32)
    count = d.src(instr.operands[1], 32) if len(instr.operands) > 1 else None

    @whole_warp
    def run(w: Any) -> int | None:
        if w.split.token is not None:
            barrier, generation = w.split.token
        else:
            barrier = w.cta.named_barrier(w.uniform(number, "barrier id"))
            generation = barrier.generation
            expected = 32 * len(w.cta.warps) if count is None else w.uniform(count, "barrier count")
            _arrive_named(w, barrier, expected)
            w.split.token = barrier, generation
        if barrier.generation == generation:
            name = f"bar.sync {w.uniform(number)}: {barrier.arrived} of {barrier.count} threads have arrived"
            return w.block(barrier, name)
        w.split.token = None
        w.clock.join(barrier.clock)
        w.meet()
        return None

    return Effect(run)


def _arrive_named(w: Any, barrier: Any, expected: int) -> None:
    if expected % 32:
        raise w.fault("barrier-misuse", f"bar.sync requires a multiple of 32 threads, got {expected}")
    if barrier.arrived and barrier.count != expected:
        raise w.fault("barrier-misuse", f"bar.sync with {expected} threads joins one with {barrier.count}")
    barrier.count = expected
    barrier.arrived += 32
    release(w, barrier.gathering)
    if barrier.arrived > expected:
        raise w.fault("barrier-misuse", f"{barrier.arrived} threads arrived at a barrier of {expected}")
    if barrier.arrived == expected:
        barrier.complete()


@handles("bar.arrive", "barrier.arrive", "barrier.cta.arrive")
def _bar_arrive(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    d.only(mods, "aligned")
    number, count = d.src(instr.operands[0], 32), d.src(instr.operands[1], 32)

    @whole_warp
    def run(w: Any) -> int | None:
        _arrive_named(w, w.cta.named_barrier(w.uniform(number)), w.uniform(count))
        return None

    return Effect(run)


def release(w: Any, clock: Any) -> None:
    """What the warp has done so far becomes known to whoever acquires `clock`."""
    w.check_tmem_wait()
    clock.join(w.clock)
    w.clock.rows[KNOWN, w.gid] += 1


@handles("barrier.cluster.arrive")
def _cluster_arrive(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`.relaxed` orders nothing but what a fence before it released: fence.mbarrier_init, fence.acq_rel."""
    d.arity(0)
    d.only(mods, "release", "relaxed", "aligned")

    @whole_warp
    def run(w: Any) -> int | None:
        barrier = w.cta.cluster.barrier
        if w.cluster_generation is not None:
            raise w.fault("barrier-misuse", "a second barrier.cluster.arrive without a wait in between")
        w.cluster_generation = barrier.generation
        if "relaxed" in mods:
            barrier.gathering.join_inits(w.clock)
            w.join_released(barrier.gathering)
        else:
            w.clock.release()
            release(w, barrier.gathering)
            w.meet()
        w.cta.cluster.settle_barrier()
        return None

    return Effect(run)


@handles("barrier.cluster.wait")
def _cluster_wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(0)
    d.only(mods, "acquire", "aligned")

    @whole_warp
    def run(w: Any) -> int | None:
        barrier = w.cta.cluster.barrier
        generation = w.cluster_generation
        if generation is None:
            raise w.fault("barrier-misuse", "barrier.cluster.wait without an arrive")
        if barrier.generation == generation:
            return w.block(
                barrier, f"barrier.cluster: {barrier.arrived} of {len(w.cta.cluster.warps)} warps have arrived"
            )
        w.cluster_generation = None
        w.clock.join(barrier.clock)
        w.clock.acquire()
        return None

    return Effect(run)


@handles("fence.proxy.async")
def _fence_async(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "shared::cta", "shared::cluster", "global")

    def run(w: Any) -> None:
        if mods != ["global"]:
            _publish(w, PUBLISHED, *([] if mods == ["shared::cta"] else [PUBLISHED_REMOTE]))

    return Effect(run)


@handles("fence.mbarrier_init")
def _fence_inits(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "release", "cluster")
    return Effect(lambda w: _publish(w, INITS))


def _publish(w: Any, *covered: int) -> None:
    rows = w.clock.rows
    for row in covered:
        np.maximum(rows[row], rows[KNOWN], out=rows[row])
    rows[KNOWN, w.gid] += 1


@handles("fence.acq_rel", "fence.sc", "membar")
def _fence(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """At cluster scope and above: what relaxed waits saw becomes known, what is known is released and acquired. In
    global memory at every scope."""
    d.only(mods, *SCOPES)
    scope = next((SCOPES[mod] for mod in mods), GPU_SCOPE)

    def run(w: Any) -> None:
        if scope > CTA_SCOPE:
            _fence_cluster(w)
        w.cta.cluster.machine.order.fence(w, scope)

    return Effect(run)


def _fence_cluster(w: Any) -> None:
    seen: Clock | None = w.seen
    if seen is not None:
        w.clock.join(seen)
        w.seen = None
    w.clock.acquire()
    w.clock.release()
    w.released = w.handed()
    w.clock.rows[KNOWN, w.gid] += 1
