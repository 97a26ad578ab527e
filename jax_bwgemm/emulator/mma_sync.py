"""mma.sync: a warp multiplies 16 rows of A by 8 columns of B, all of it in registers (PTX ISA, mma.m16n8k16).

As `wgmma` says of its sums, hardware keeps fewer bits of a sum's parts; where sums are exact, they agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles, whole_warp
from jax_bwgemm.emulator.descriptors import operand_matrix, sums_of_products
from jax_bwgemm.emulator.syntax import Instr
from jax_bwgemm.emulator.wgmma import a_words, columns_of, from_registers, to_registers

_SHAPE = ["aligned", "m16n8k16", "row", "col", "f32"]


@handles("mma.sync")
def _mma(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`{d}, {a}, {b}, {c}`: 4 registers of float32, 4 and 2 of pairs of k, 4 of float32."""
    d.arity(4)
    kind = mods[5] if len(mods) == 8 else ""
    if mods != [*_SHAPE, kind, kind, "f32"] or kind not in ("bf16", "f16"):
        raise d.unsupported("requires .aligned.m16n8k16.row.col.f32.type.type.f32 of bf16 or f16")
    dests = tuple(d.dest(o) for o in d.items(instr.operands[0]))
    a, b, c = ([d.src(o, 32) for o in d.items(operand)] for operand in instr.operands[1:])
    if (len(dests), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise d.unsupported("requires 4 registers of D, 4 of A, 2 of B and 4 of C")

    @whole_warp
    def run(w: Any) -> int | None:
        product = sums_of_products(operand_matrix(a_words(_columns(w, a)), kind, False), _b(w, b, kind), False)
        sums = from_registers(_columns(w, c)).view(np.float32) + product
        for slot, row in zip(dests, to_registers(sums.view(np.uint32)), strict=True):
            w.put(slot, row, 32)
        return None

    return Effect(run, tuple((slot, 32) for slot in dests))


def _columns(w: Any, slots: list[int]) -> np.ndarray:
    return columns_of([w.value(slot) for slot in slots])


def _b(w: Any, slots: list[int], kind: str) -> np.ndarray:
    """(8 columns, 16 terms): register i of lane t has column t/4, word t%4 + 4*i."""
    words = np.ascontiguousarray(_columns(w, slots).reshape(2, 8, 4).transpose(1, 0, 2)).reshape(8, 8)
    return operand_matrix(words, kind, False)
