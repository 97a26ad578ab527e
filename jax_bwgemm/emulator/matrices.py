"""ldmatrix and stmatrix: matrices of 8x8 16-bit elements between registers and shared memory, checked on an H200
(driver 580, 2026-11); stmatrix of 16x8 bytes (sm_100; CUTLASS copy_traits_sm100.hpp, SM100_U8x4_STSM_T)."""

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
    slot, offset = address_slot(d, address)
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
    is_bytes = "m16n8" in mods
    if is_bytes:
        d.not_on("stmatrix.b8", "sm_90")  # ptxas 13.0 refuses it there, and m16n8 without .trans
        if "trans" not in mods or "b8" not in mods:
            raise d.unsupported("requires .m16n8 with .trans and .b8")
        mods = [{"m16n8": "m8n8", "b8": "b16"}.get(m, m) for m in mods]
    slot, offset, count, trans = _matrix(d, instr, mods, instr.operands[0], instr.operands[1])
    sources = [d.src(o, 32) for o in d.items(instr.operands[1])]

    @whole_warp
    def run(w: Any) -> int | None:
        fragments = np.empty((count, NUM_LANES), np.uint32)
        for i, source in enumerate(sources):
            fragments[i] = w.value(source)
        if is_bytes:
            data = _columns(fragments).reshape(8 * count, 16).view(np.uint64)
        else:
            matrices = fragments.view(np.uint16).reshape(count, 8, 8)
            data = np.ascontiguousarray(matrices.transpose(0, 2, 1) if trans else matrices)
            data = data.reshape(8 * count, 8).view(np.uint64)
        shared_store(w, _rows(w, slot, offset, count), 64, data)
        return None

    return Effect(run)


def _columns(fragments: np.ndarray) -> np.ndarray:
    """(matrices, 8 columns, 16 rows) of bytes: byte v of thread t is row t/4 + 8*(v/2), column 2*(t%4) + v%2."""
    octets = fragments.view(np.uint8).reshape(-1, 8, 4, 2, 2)  # matrix, t/4, t%4, v/2, v%2
    return np.ascontiguousarray(octets.transpose(0, 2, 4, 3, 1))


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
