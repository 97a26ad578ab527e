"""Emits a repack of an operand that a route asks for: our custom call, or off CUDA a call back to its emulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

    def emit(
        self, ctx: Any, kind: str, values: Sequence[Any], avals: Sequence[Any], out_avals: Sequence[Any]
    ) -> Sequence[Any] | None:
        """The repacked `values`, all by one launch; None, and nothing emitted, where there is no kernel for one, or
        sizes are symbols: the call says how many CTAs there are."""
        entry = None
        for aval, out_aval in zip(avals, out_avals, strict=True):
            if not is_static(out_aval):
                return None
            entry = find_repack(kind, aval.dtype.itemsize, out_aval.shape, self.device, self.is_emulated)
            if entry is None:
                return None
        assert entry is not None  # there is a value to repack
        own, shapes = ctx.replace(avals_in=list(avals), avals_out=list(out_avals)), [x.shape for x in out_avals]
        if self.is_emulated:
            return _emulation(own, values, entry, shapes)
        return custom_call(own, REPACK_NAME, values, attributes(entry, shapes, self.pdl))


def attributes(entry: RepackEntry, out_shapes: Sequence[Shape], pdl: bool) -> dict[str, Attribute]:
    """The custom call's attributes; docs/architecture.md, "The custom calls"."""
    repack, ctas = entry.repack, [entry.repack.num_ctas(shape) for shape in out_shapes]
    return {
        "variant": entry.name,
        "entry": entry.entry,
        "target": repack.target,
        "cubin_sha256": entry.cubin_sha256,
        "kind": repack.kind,
        "element_bytes": repack.element_bytes,
        "num_ctas": sum(ctas),
        "first_ctas": ctas[0],
        "num_threads": entry.num_threads,
        "smem_bytes": entry.smem_bytes,
        "pdl": int(pdl),
    }


def _emulation(ctx: Any, values: Sequence[Any], entry: RepackEntry, out_shapes: Sequence[Shape]) -> Sequence[Any]:
    from jax_bwgemm.runtime.emulated import repacked  # here, so that `import jax_bwgemm` leaves the emulator out

    def call(*sources: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(repacked(entry, sources, out_shapes))

    settings: dict[str, Any] = {"has_side_effect": False, "returns_token": False}
    results, _, _ = mlir.emit_python_callback(ctx, call, None, values, ctx.avals_in, ctx.avals_out, **settings)
    return results
