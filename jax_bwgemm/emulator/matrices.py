"""ldmatrix and stmatrix: matrices of 8x8 16-bit elements between registers and shared memory. Checked on an H200
(driver 580, 2026-11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles, whole_warp
from jax_bwgemm.emulator.memory import address_slot, lane_addresses, shared_load, shared_store
from jax_bwgemm.emulator.syntax import Instr, Operand
from jax_bwgemm.emulator.values import NUM_LANES


def _matrix(d: Decoder, instr: Instr, mods: list[str], address: Operand, regs: Operand) -> tuple[int, int, int, bool]:
    d.only(mods, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    count = next((int(m[1:]) for m in mods if m in ("x1", "x2", "x4")), 0)
    if "m8n8" not in mods or not count or len(d.items(regs)) != count:
        raise d.unsupported("requires .m8n8 and a register for each matrix")
    slot, offset = address_slot(d, address, 32)
    return slot, offset, count, "trans" in mods


def _rows(w: Any, slot: int, offset: int, count: int) -> np.ndarray:
    """The row addresses: lane 8i + j holds row j of matrix i."""
    addresses = lane_addresses(w, slot, offset)
    if len(addresses) == 1:
        addresses = np.repeat(addresses, NUM_LANES)
    return addresses[: 8 * count]


@handles("stmatrix")
def _stmatrix(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    slot, offset, count, trans = _matrix(d, instr, mods, instr.operands[0], instr.operands[1])
    sources = [d.src(o, 32) for o in d.items(instr.operands[1])]

    @whole_warp
    def run(w: Any) -> int | None:
        fragments = np.empty((count, NUM_LANES), np.uint32)
        for i, source in enumerate(sources):
            fragments[i] = w.value(source)
        matrices = fragments.view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = matrices.transpose(0, 2, 1)
        data = np.ascontiguousarray(matrices).reshape(8 * count, 8).view(np.uint64)
        shared_store(w, _rows(w, slot, offset, count), 64, data)
        return None

    return Effect(run)


@handles("ldmatrix")
def _ldmatrix(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(2)
    slot, offset, count, trans = _matrix(d, instr, mods, instr.operands[1], instr.operands[0])
    dests = [d.dest(o) for o in d.items(instr.operands[0])]

    @whole_warp
    def run(w: Any) -> int | None:
        rows = shared_load(w, _rows(w, slot, offset, count), 64, 2)
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = matrices.transpose(0, 2, 1)
        fragments = np.ascontiguousarray(matrices).reshape(count, 64).view(np.uint32)
        for i, dest in enumerate(dests):
            w.put(dest, fragments[i].copy(), 32)
        return None

    return Effect(run, tuple((dest, 32) for dest in dests))
