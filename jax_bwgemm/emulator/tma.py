"""The TMA engine: cp.async.bulk.tensor loads and stores, reductions into global memory, bulk groups.

Boxes, swizzles, what lies outside, multicast and the bytes on mbarriers agree with an H200 (driver 580, 2026-11).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import PARAM_BASE, Decoder, Effect, handles
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.mbarrier import MBarrier, barrier_in, check_async_init, complete_async
from jax_bwgemm.emulator.memory import address_slot
from jax_bwgemm.emulator.policies import policy_check
from jax_bwgemm.emulator.reductions import OPERATIONS, NotModelled, reduction
from jax_bwgemm.emulator.syntax import Imm, Instr
from jax_bwgemm.emulator.tensormap import TensorMap, box_chunks
from jax_bwgemm.emulator.values import signed

_RANKS = ("1d", "2d", "3d", "4d", "5d")


@dataclasses.dataclass(frozen=True)
class _Box:
    """Operands of one tensor copy: slots of the map's address, the coordinates and the shared address."""

    map_slot: int
    map_offset: int
    coords: tuple[int, ...]
    shared: int
    shared_offset: int

    def resolve(self, w: Any) -> tuple[TensorMap, np.ndarray, tuple[int, ...], int]:
        """The map, the tensor's view, the coordinates and the shared address."""
        address = w.uniform(self.map_slot, "tensor map address") + self.map_offset
        tensor_map, view = w.cta.cluster.machine.tensor_map(address - PARAM_BASE, w)
        if len(tensor_map.dims) != len(self.coords):
            raise w.fault(
                "tensor-map", f"{len(self.coords)} coordinates for `{tensor_map.name}` of rank {len(tensor_map.dims)}"
            )
        inner = tensor_map.box[0] * tensor_map.element_bytes
        if tensor_map.swizzle and inner != tensor_map.swizzle:
            raise w.fault(
                "tensor-map", f"an inner box of {inner} bytes under swizzle {tensor_map.swizzle} is not modelled"
            )
        coords = tuple(signed(w.uniform(c, "coordinate"), 32) for c in self.coords)
        if coords[0] * tensor_map.element_bytes % 16:  # CUDA_ERROR_ILLEGAL_INSTRUCTION on an H200 (driver 580, 2026-11)
            raise w.fault("misaligned", f"an innermost coordinate requires a multiple of 16 bytes, got {coords[0]}")
        return tensor_map, view, coords, w.uniform(self.shared, "shared address") + self.shared_offset


def _box(d: Decoder, instr: Instr, mods: list[str], tensor: int, shared: int) -> _Box:
    mem = d.mem(instr.operands[tensor])
    if not mods or mods[0] not in _RANKS or len(mem.coords) != int(mods[0][0]):
        raise d.unsupported("requires a rank .1d to .5d and as many coordinates")
    at, offset = address_slot(d, instr.operands[shared])
    coords = tuple(d.src(c, 32) for c in mem.coords)
    return _Box(d.src(mem.base, 64), mem.offset, coords, at, offset)


def _place(w: Any, cta: Any, offset: int, tensor_map: TensorMap) -> tuple[np.ndarray, slice]:
    """Chunk numbers of the box in shared memory, and the granules that it covers."""
    size = tensor_map.box_bytes
    if offset % 128:
        raise w.fault("misaligned", f"a TMA box requires a shared address that is a multiple of 128, got {offset:#x}")
    if offset + size > cta.limit:
        raise w.fault("out-of-bounds", f"a TMA box of {size} bytes at {offset:#x}, the launch has {cta.limit:#x}")
    for at in cta.barriers:
        if offset < at + 8 and at < offset + size:
            raise w.fault("barrier-misuse", f"a TMA box at {offset:#x} covers the live mbarrier at {at:#x}")
    low = offset % 1024
    chunks = box_chunks(low, size // 16, tensor_map.swizzle, tensor_map.swizzle_atom_bytes)
    return chunks + (offset - low) // 16, slice(offset // 16, (offset + size) // 16)


@handles("cp.async.bulk.tensor")
def _tensor(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    if "bulk_group" in mods:
        return _store(d, instr, mods)
    return _load(d, instr, mods)


def _load(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[dst], [map, {coords}], [mbar]{, ctaMask}{, cache hint}`."""
    d.only(
        mods,
        *_RANKS,
        "shared::cluster",
        "shared::cta",
        "global",
        "tile",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "L2::cache_hint",
        "cta_group::1",
        "cta_group::2",
    )
    multicast, pair = "multicast::cluster" in mods, "cta_group::2" in mods
    d.arity(3 + multicast + ("L2::cache_hint" in mods))
    box = _box(d, instr, mods, 1, 0)
    bar_slot, bar_offset = address_slot(d, instr.operands[2])
    mask_slot = d.src(instr.operands[3], 16) if multicast else None
    check = _policy(d, instr, mods)

    def run(w: Any) -> None:
        check(w)
        if len(w.active) != 1:
            raise w.fault("multiple-issue", f"{len(w.active)} lanes issue one TMA load each: elect one")
        tensor_map, view, coords, address = box.resolve(w)
        cluster = w.cta.cluster
        home, offset = cluster.cta_of(address, w)
        bar_cta, bar_at = cluster.cta_of(w.uniform(bar_slot) + bar_offset, w)
        if mask_slot is None:
            _check_signal(w, home, bar_cta, pair)
            targets = [(home, bar_cta)]
        else:
            targets = [(cta, _signalled(cluster, cta, bar_cta, pair)) for cta in masked_ctas(w, w.uniform(mask_slot))]
        w.check_grid_wait()
        delivered = [cta.rank_in_grid for cta, _ in targets]
        cluster.machine.counters.tma_load(w.cta.rank_in_grid, delivered, tensor_map.name, tensor_map.box_bytes)
        for cta, signal in targets:
            _load_into(w, cta, offset, tensor_map, view, coords, barrier_in(signal, bar_at, w.where()))

    return Effect(run)


def _policy(d: Decoder, instr: Instr, mods: list[str]) -> Callable[[Any], None]:
    return policy_check(d, instr.operands[-1]) if "L2::cache_hint" in mods else lambda w: None


def _check_signal(w: Any, home: Any, bar_cta: Any, pair: bool) -> None:
    """The barrier is in the CTA of the destination, or with .cta_group::2 in either CTA of its pair."""
    if bar_cta is not home and not (pair and bar_cta.rank ^ 1 == home.rank):
        raise w.fault("barrier-misuse", f"a load into CTA rank {home.rank} cannot signal CTA rank {bar_cta.rank}")


def _signalled(cluster: Any, cta: Any, bar_cta: Any, pair: bool) -> Any:
    """Multicast: the same offset in the destination, or in the CTA of its pair that has the barrier's parity."""
    return cluster.ctas[cta.rank & ~1 | bar_cta.rank & 1] if pair else cta


def masked_ctas(w: Any, mask: int) -> list[Any]:
    ctas = w.cta.cluster.ctas
    if mask >> len(ctas) or not mask:
        raise w.fault("out-of-bounds", f"CTA mask {mask:#x} in a cluster of {len(ctas)}")
    return [cta for cta in ctas if mask >> cta.rank & 1]


def _load_into(
    w: Any, cta: Any, offset: int, tensor_map: TensorMap, view: np.ndarray, coords: tuple[int, ...], barrier: MBarrier
) -> None:
    """One destination CTA: poison now, data and bytes on the barrier when it completes."""
    if cta.exited:
        raise w.fault("exited-cta", f"a TMA load writes to CTA {cta.rank_in_grid}, which has ended")
    chunks, granules = _place(w, cta, offset, tensor_map)
    cluster, tracker = w.cta.cluster, w.cta.cluster.tracker

    def finish() -> None:
        cta.chunks[chunks] = tensor_map.load(view, coords)
        cta.version += 1
        complete_async(op, barrier, tensor_map.box_bytes, 0)

    op = cluster.new_op(w, "load", finish, {cta, barrier.cta}, tensor_map.name)
    check_async_init(op, barrier)
    number = tracker.event(w.gid, 0, op.bit, op.where)
    tracker.write(cta.shadow, granules, number, op.clock, True)
    cta.smem[granules.start * 16 : granules.stop * 16] = 0xFF
    cta.version += 1
    cluster.engine.issue(op)


def _store(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[map, {coords}], [src]{, cache hint}`. A whole warp may issue it: equal copies count once (ptxas 13.0
    makes one UTMASTG of them, though of a reduction it makes a loop over the lanes)."""
    d.only(mods, *_RANKS, "global", "shared::cta", "tile", "bulk_group", "L2::cache_hint")
    return _outward(d, instr, mods, "store")


@handles("cp.reduce.async.bulk.tensor")
def _reduce(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[map, {coords}], [src]{, cache hint}`: each element inside is combined with what is there. The map names the
    type; other pairs of operation and type than the PTX ISA's are refused."""
    d.only(mods, *_RANKS, *OPERATIONS, "global", "shared::cta", "tile", "bulk_group", "L2::cache_hint")
    named = [m for m in mods if m in OPERATIONS]
    if len(named) != 1 or "bulk_group" not in mods:
        raise d.unsupported("requires one reduction operation and .bulk_group")
    return _outward(d, instr, mods, named[0])


def _combine(w: Any, tensor_map: TensorMap, operation: str) -> Any:
    """What makes an element of the old and the new one."""
    where = w.where()
    if len(w.active) != 1:
        raise w.fault("multiple-issue", f"{len(w.active)} lanes issue one TMA reduction each: elect one")
    found = reduction(operation, tensor_map.element)
    if found is None:
        raise w.fault("tensor-map", f"there is no .{operation} of {tensor_map.element} (`{tensor_map.name}`)")

    def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        try:
            return found(old, new)
        except NotModelled as error:
            raise Fault("tensor-map", f"{error} is not modelled (`{tensor_map.name}`)", where) from None

    return combine


def _outward(d: Decoder, instr: Instr, mods: list[str], operation: str) -> Effect:
    """A box on its way from shared to global memory."""
    d.arity(2 + ("L2::cache_hint" in mods))
    box = _box(d, instr, mods, 0, 1)
    check = _policy(d, instr, mods)

    def run(w: Any) -> None:
        check(w)
        w.check_grid_wait()
        tensor_map, view, coords, address = box.resolve(w)
        how = () if operation == "store" else (_combine(w, tensor_map, operation),)
        if min(coords) < 0:  # CUDA_ERROR_ILLEGAL_INSTRUCTION on an H200; loads may
            raise w.fault("out-of-bounds", f"a tensor store requires coordinates of 0 and up, got {coords}")
        cluster, tracker = w.cta.cluster, w.cta.cluster.tracker
        cta, offset = cluster.cta_of(address, w)
        if cta is not w.cta:
            raise w.fault("out-of-bounds", "a bulk store reads the shared memory of another CTA")
        chunks, granules = _place(w, cta, offset, tensor_map)

        def finish() -> None:
            tensor_map.store(view, coords, cta.chunks[chunks], *how)
            cluster.machine.order.changed()

        op = cluster.new_op(w, "store", finish, {cta}, tensor_map.name)
        number = tracker.event(w.gid, 0, op.bit, op.where)
        tracker.read(cta.shadow, granules, number, op.clock, ("bulk", w.gid), True)
        cluster.machine.note_global_write(tensor_map, coords, cluster, w, operation)
        cluster.machine.counters.tma_store(w.cta.rank_in_grid, tensor_map.name, tensor_map.box_bytes)
        w.bulk_open.append(op)
        cluster.engine.issue(op)

    return Effect(run)


@handles("cp.async.bulk.commit_group")
def _commit(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(0)
    d.only(mods)

    def run(w: Any) -> None:
        w.bulk_groups.append(w.bulk_open)
        w.bulk_open = []

    return Effect(run)


@handles("cp.async.bulk.wait_group")
def _wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """Waits until all but the newest N groups have read their shared memory (or, without .read, are complete)."""
    d.arity(1)
    d.only(mods, "read")
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise d.unsupported("requires a number")
    keep = operand.value

    def run(w: Any) -> int | None:
        old = w.bulk_groups[: len(w.bulk_groups) - keep] if len(w.bulk_groups) > keep else []
        for op in (op for group in old for op in group):
            if not op.done:
                return w.block(op, f"the bulk store issued at {op.where}")
            w.clock.ops |= 1 << op.bit
        w.bulk_groups = w.bulk_groups[len(old) :]
        return None

    return Effect(run)
