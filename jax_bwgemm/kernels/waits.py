"""Waits that to the compiler write registers: those that an MMA or a load writes behind the compiler's back."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm, vector
from cutlass.cutlass_dsl import dsl_user_op


def wait_for_registers(instruction: str, values: cute.Tensor) -> None:
    """`instruction`, a wait of PTX, behind which `values`, registers of 32 bits, are what was written to them. The
    DSL's own waits say nothing of registers: the compiler may read them before."""
    words = cute.recast_tensor(values, Int32)
    words.store(_behind(words.load(), instruction))


@dsl_user_op
def _behind(words: cute.TensorSSA, instruction: str, *, loc: Any = None, ip: Any = None) -> cute.TensorSSA:
    count, at = cute.size(words.shape), {"loc": loc, "ip": ip}
    before = [vector.extract(words, [], [i], **at) for i in range(count)]
    kind = before[0].type
    after = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * count),
        before,
        instruction,
        ",".join(["=r"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )
    parts = [llvm.extractvalue(kind, after, [i], **at) for i in range(count)]
    return cute.TensorSSA(vector.from_elements(words.type, parts, **at), words.shape, words.dtype)
