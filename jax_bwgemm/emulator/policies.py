"""L2 cache policies (`.L2::cache_hint`). Caches are not modelled; a policy that nobody makes is a kernel's mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_bwgemm.emulator.decode import Decoder
from jax_bwgemm.emulator.syntax import Imm, Operand

# createpolicy.fractional with fraction 1: evict_normal, evict_first, evict_last (CUTLASS, TMA::CacheHintSm90)
POLICIES = (0x1000_0000_0000_0000, 0x12F0_0000_0000_0000, 0x14F0_0000_0000_0000)


def policy_check(d: Decoder, operand: Operand) -> Callable[[Any], None]:
    """What to call before the access. A 0 must be written out in the kernel: CuTeDSL's way to say that none is."""
    slot = d.src(operand, 64)
    known = (*POLICIES, 0) if _is_zero(d, operand) else POLICIES

    def check(w: Any) -> None:
        value = w.uniform(slot, "cache policy")
        if value not in known:
            names = ", ".join(map(hex, known))
            raise w.fault("cache-policy", f"an L2 cache policy requires one of {names}, got {value:#x}")

    return check


def _is_zero(d: Decoder, operand: Operand) -> bool:
    """Whether the operand is 0, or a register that is only ever set to 0."""
    if isinstance(operand, Imm):
        return operand.value == 0
    writes = [i for i in d.entry.body if i.operands and i.operands[0] == operand and not i.opcode.startswith("st")]
    return bool(writes) and all(i.opcode.startswith("mov") and i.operands[1] == Imm(0) for i in writes)
