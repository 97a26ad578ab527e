"""tcgen05.cp: from shared memory, as a matrix descriptor names it, to TMEM.

Row r of the source goes to one or more lanes; its 16 or 32 bytes to 4 or 8 columns from the address's on (CUTLASS
copy_traits_sm100.hpp; the ISA has words for the pairs of warps only). With .cta_group::2 each CTA of the pair copies
its own shared memory to its own TMEM. The thread's later MMAs run after the copy, and its commits wait for it; nothing
orders two copies, nor a copy behind an MMA (PTX ISA, pipelined tcgen05 instructions).

Not modelled, so refused: decompression, columns that are not a multiple of 4, a lane other than 0 (other than 0..31
for .4x256b), issue by the odd CTA of a pair.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles
from jax_bwgemm.emulator.descriptors import operand_chunks
from jax_bwgemm.emulator.memory import address_slot
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.tcgen05 import COPY
from jax_bwgemm.emulator.tmem import LANE_GRANULE
from jax_bwgemm.emulator.tmem_access import CTA_GROUPS, cta_group, use_group


@dataclasses.dataclass(frozen=True)
class _Shape:
    """`lanes[i, r]`: the i-th lane that row r goes to, relative to the address. `size`: bytes of a row."""

    lanes: np.ndarray
    size: int


def _replicas(first: np.ndarray, *offsets: int) -> np.ndarray:
    return first[None, :] + np.array(offsets)[:, None]


_ROWS = np.arange(128)
_SHAPES = {
    ("128x256b", ""): _Shape(_replicas(_ROWS, 0), 32),
    ("128x128b", ""): _Shape(_replicas(_ROWS, 0), 16),
    ("4x256b", ""): _Shape(_replicas(_ROWS[::32], 0), 32),  # one lane of each warp
    ("64x128b", "warpx2::02_13"): _Shape(_replicas(_ROWS[:64], 0, 64), 16),
    ("64x128b", "warpx2::01_23"): _Shape(_replicas(np.concatenate([_ROWS[:32], _ROWS[64:96]]), 0, 32), 16),
    ("32x128b", "warpx4"): _Shape(_replicas(_ROWS[:32], 0, 32, 64, 96), 16),
}


@handles("tcgen05.cp")
def _copy(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[taddr], s-desc`"""
    d.arity(2)
    named, casts = ({key[i] for key in _SHAPES} - {""} for i in (0, 1))
    d.only(mods, *CTA_GROUPS, *named, *casts)
    group = cta_group(d, mods)
    key = "".join(m for m in mods if m in named), "".join(m for m in mods if m in casts)
    if key not in _SHAPES:
        raise d.unsupported("requires a shape, and the multicast that belongs to it")
    shape = _SHAPES[key]
    slot, offset = address_slot(d, instr.operands[0])
    desc = d.src(instr.operands[1], 64)

    def run(w: Any) -> None:
        if len(w.active) != 1:
            raise w.fault("multiple-issue", f"{len(w.active)} lanes issue one copy each: elect one")
        use_group(w, group)
        if group == 2 and w.cta.rank & 1:
            raise w.fault("tmem", "a copy of cta_group::2 is issued by the odd CTA of the pair")
        _issue(w, w.cta.cluster.ctas[w.cta.rank : w.cta.rank + group], shape, w.uniform(slot) + offset, w.uniform(desc))

    return Effect(run)


def _issue(w: Any, ctas: list[Any], shape: _Shape, address: int, descriptor: int) -> None:
    lane, column = address >> 16, address & 0xFFFF
    count, rows = shape.size // 4, shape.lanes.shape[1]
    if column % 4 or lane > (31 if rows == 4 else 0):
        raise w.fault("tmem", f"a copy of {rows} rows to lane {lane}, column {column} is not modelled")
    sources = []
    for cta in ctas:
        cta.tmem.check(w, column, count)
        sources.append((cta, operand_chunks(w, cta, descriptor, rows, 1, False, True, shape.size)))
    columns = slice(column, column + count)

    def finish() -> None:
        for cta, chunks in sources:
            words = np.ascontiguousarray(cta.chunks[chunks]).view(np.uint32)
            for lanes in lane + shape.lanes:
                cta.tmem.data[lanes, columns] = words

    op = w.cta.cluster.new_op(w, "mma", finish, set(ctas), f"cp {rows}x{8 * shape.size}b")
    number = w.cta.cluster.tracker.event(w.gid, 0, op.bit, op.where)
    touched = (slice(lane // LANE_GRANULE, None, 2) if rows == 4 else slice(None), columns)
    for cta, chunks in sources:
        w.cta.cluster.tracker.read(cta.shadow, chunks, number, op.clock, ("cp", w.gid), True)
        w.cta.cluster.tracker.write(cta.tmem.shadow, touched, number, op.clock, False)
    w.mmas = [pair for pair in w.mmas if not pair[1].done]
    w.mmas.append((COPY, op))
    w.mma_ops |= 1 << op.bit
    w.tmem_copies |= 1 << op.bit
    w.cta.cluster.engine.issue(op)
