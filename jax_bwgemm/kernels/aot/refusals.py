"""Why a compiled kernel must not ship: one function, one sentence a refusal. Runs no compiler and no tool."""

from __future__ import annotations

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.recipe import Leaf
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.variant import Variant, why_not_variant
from jax_bwgemm.kernels.aot import sass
from jax_bwgemm.kernels.aot.compiled import Compiled
from jax_bwgemm.kernels.aot.cubin import Facts

_MAX_ALIGN_BYTES = 64  # of a CUtensorMap; every smaller leaf is aligned to its own size


def why_refused(variant: Variant | Repack, compiled: Compiled, facts: Facts, counts: dict[str, int]) -> str | None:
    """None if the kernel is what `variant` and `compiled` say of it, else the first reason why not."""
    return (
        (why_not_variant(variant) if isinstance(variant, Variant) else None)
        or _why_not_resources(variant, compiled, facts)
        or sass.why_broken(counts, variant)
        or _why_not_params(compiled, facts)
    )


def lay_out(leaves: tuple[tuple[str, int], ...]) -> tuple[Leaf, ...]:
    """(source, size) in kernel order -> where each leaf lies in the launcher's block: natural alignment."""
    params, end = [], 0
    for source, size in leaves:
        offset = end + -end % min(size, _MAX_ALIGN_BYTES)
        params.append(Leaf(source, offset, size))
        end = offset + size
    return tuple(params)


def _why_not_resources(variant: Variant | Repack, compiled: Compiled, facts: Facts) -> str | None:
    if facts.stack_bytes:
        return f"a kernel requires no stack (no spills), got {facts.stack_bytes} bytes"
    if facts.entry != compiled.entry:
        return f"the cubin requires the kernel {compiled.entry}, got {facts.entry}"
    if facts.num_threads != compiled.num_threads:
        return f"the cubin requires {compiled.num_threads} threads a CTA, got {facts.num_threads}"
    limit = min(arch.smem_bytes for arch in ARCHS.values() if variant.target in arch.targets)
    if compiled.smem_bytes > limit:
        return f"dynamic shared memory requires at most {limit} bytes, got {compiled.smem_bytes}"
    return None


def _why_not_params(compiled: Compiled, facts: Facts) -> str | None:
    """The cubin may start its parameters anywhere in the constant bank (sm_90: 48 bytes in, so that a descriptor is
    64-byte aligned there); the driver adds that offset, so what counts is each leaf's place relative to the first.
    """
    first = facts.params[0][0] if facts.params else 0
    found = [(offset - first, size) for offset, size in facts.params]
    declared = [(param.offset, param.size) for param in lay_out(compiled.params)]
    if len(found) != len(declared):
        return f"the parameter block requires {len(declared)} leaves, got {len(found)} in the cubin"
    for (source, _), ours, theirs in zip(compiled.params, declared, found, strict=True):
        if ours != theirs:
            return f"parameter `{source}` requires (offset, size) {ours}, got {theirs} in the cubin"
    return None
