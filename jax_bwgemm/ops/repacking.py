"""Emits a repack of an operand that a route asks for: our custom call, or off CUDA a call back to its emulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.interpreters import mlir

from jax_bwgemm.facts.recipe import Attribute
from jax_bwgemm.facts.repack import Shape
from jax_bwgemm.ops.calls import custom_call
from jax_bwgemm.ops.taking import is_static
from jax_bwgemm.runtime.artifacts import RepackEntry
from jax_bwgemm.runtime.decision import find_repack
from jax_bwgemm.runtime.ffi import REPACK_NAME


@dataclasses.dataclass(frozen=True)
class Repacker:
    """The repacks of one product: `device` as `decide` takes it, `pdl` as its plan has it."""

    device: str | None
    is_emulated: bool
    pdl: bool

    def emit(self, ctx: Any, kind: str, value: Any, aval: Any, out_aval: Any) -> Any | None:
        """The repacked `value`; None, and nothing emitted, where there is no kernel for it, or sizes are symbols: the
        call says how many CTAs there are."""
        if not is_static(out_aval):
            return None
        entry = find_repack(kind, aval.dtype.itemsize, out_aval.shape, self.device, self.is_emulated)
        if entry is None:
            return None
        own = ctx.replace(avals_in=[aval], avals_out=[out_aval])
        if self.is_emulated:
            return _emulation(own, value, entry)
        (result,) = custom_call(own, REPACK_NAME, [value], attributes(entry, out_aval.shape, self.pdl))
        return result


def attributes(entry: RepackEntry, out_shape: Shape, pdl: bool) -> dict[str, Attribute]:
    """The custom call's attributes; docs/architecture.md, "The custom calls"."""
    repack = entry.repack
    return {
        "variant": entry.name,
        "entry": entry.entry,
        "target": repack.target,
        "cubin_sha256": entry.cubin_sha256,
        "kind": repack.kind,
        "element_bytes": repack.element_bytes,
        "num_ctas": repack.num_ctas(out_shape),
        "num_threads": entry.num_threads,
        "smem_bytes": entry.smem_bytes,
        "pdl": int(pdl),
    }


def _emulation(ctx: Any, value: Any, entry: RepackEntry) -> Any:
    from jax_bwgemm.runtime.emulated import repacked  # here, so that `import jax_bwgemm` leaves the emulator out

    def call(source: np.ndarray) -> tuple[np.ndarray]:
        return (repacked(entry, source, ctx.avals_out[0].shape),)

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    (result,), _, _ = mlir.emit_python_callback(ctx, call, None, [value], ctx.avals_in, ctx.avals_out, **settings)
    return result
