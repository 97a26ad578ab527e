"""Emits a custom call of the XLA FFI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir

from jax_bwgemm.facts.recipe import Attribute


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    said: Mapping[str, Attribute],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[Any]:
    """The results of a call that says `said`, in int32, float32 and strings. All buffers are row-major. `aliases`: over
    which operand a result is stored, which XLA copies before if it is read behind the call."""
    attributes = {name: _attribute(value) for name, value in said.items()}  # JAX's own way to make them takes thrice as
    # long, for a dozen numbers a product
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=dict(aliases or {}), backend_config=attributes)
    return rule(ctx, *operands)


def _attribute(value: Attribute) -> Any:
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F32Type.get(), value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
