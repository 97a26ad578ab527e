"""One spawned process of the build: a batch of variants -> files and manifest entries, or the reasons why not.

The compiler is imported here and nowhere earlier, so a build with nothing to do never loads it.
"""

from __future__ import annotations

import dataclasses
import gc
import gzip
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm._files import write_atomically
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.variant import Variant, why_not_variant
from jax_bwgemm.kernels.aot import refusals, sass
from jax_bwgemm.kernels.aot.compiled import Compiled
from jax_bwgemm.kernels.aot.cubin import Facts, read_cubin
from jax_bwgemm.runtime.artifacts import CUBIN, PTX, Entry, RepackEntry


@dataclasses.dataclass(frozen=True)
class Failure:
    """A variant that must not ship, and why."""

    name: str
    reason: str


Kernel = Variant | Repack
Result = Entry | RepackEntry | Failure


def build_batch(variants: Sequence[Kernel], out: Path, digests: Mapping[str, str]) -> list[Result]:
    """Compiles, checks and writes `variants`, all of one target; one result each. `digests`: of their sources."""
    gc.disable()  # the DSL makes millions of short-lived objects: 0.61 s a kernel instead of 0.66, one core
    results: list[Result] = []
    good: list[tuple[Kernel, Compiled, Facts]] = []
    for variant in variants:
        try:
            compiled = _compile(variant)
            good.append((variant, compiled, read_cubin(compiled.cubin)))
        except Exception as error:  # whatever one kernel does to the compiler, the others are built and it is named
            results.append(Failure(variant.name, f"{type(error).__name__}: {error}"))
    codes = [facts.text for _, _, facts in good]
    opcodes = sass.disassemble(codes, variants[0].target) if good else []
    for (variant, compiled, facts), own in zip(good, opcodes, strict=True):
        results.append(
            _finish(variant, compiled, facts, sass.count(own, sass.kind_of(variant)), out, digests[variant.name])
        )
    gc.collect()
    return results


def _compile(variant: Kernel) -> Compiled:
    if isinstance(variant, Variant) and (reason := why_not_variant(variant)):
        raise ValueError(reason)
    from jax_bwgemm.kernels.aot.compile import compile_variant
    from jax_bwgemm.kernels.repack import compile_repack

    # CuTeDSL names dump files after argument types: kernels that share a directory overwrite each other's.
    with tempfile.TemporaryDirectory(prefix="jax_bwgemm_build_") as dump_dir:
        if isinstance(variant, Repack):
            return compile_repack(variant, Path(dump_dir))
        return compile_variant(variant, Path(dump_dir))


def _finish(
    variant: Kernel, compiled: Compiled, facts: Facts, counts: dict[str, int], out: Path, source_sha256: str
) -> Result:
    reason = refusals.why_refused(variant, compiled, facts, counts)
    if reason:
        return Failure(variant.name, reason)
    ptx = gzip.compress(compiled.ptx.encode(), mtime=0)
    write_atomically(out / f"{variant.name}.{CUBIN}", compiled.cubin)
    write_atomically(out / f"{variant.name}.{PTX}", ptx)
    digests = {
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "ptx_sha256": hashlib.sha256(ptx).hexdigest(),
    }
    return _entry(variant, compiled, facts, counts, digests | {"source_sha256": source_sha256})


def _entry(
    variant: Kernel, compiled: Compiled, facts: Facts, counts: dict[str, int], digests: dict[str, str]
) -> Entry | RepackEntry:
    common: dict[str, Any] = {
        "entry": compiled.entry,
        "num_threads": compiled.num_threads,
        "smem_bytes": compiled.smem_bytes,
        "registers": facts.registers,
        "spill_bytes": facts.stack_bytes,
        "sass": counts,
        "ptxas": facts.ptxas,
        **digests,
    }
    if isinstance(variant, Repack):
        return RepackEntry(repack=variant, **common)
    return Entry(
        variant=variant,
        num_stages=compiled.num_stages,
        tmem_cols=compiled.tmem_cols,
        recipe=Recipe(compiled.buffers, compiled.tensor_maps, refusals.lay_out(compiled.params)),
        **common,
    )
