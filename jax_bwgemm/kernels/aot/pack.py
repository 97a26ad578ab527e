"""From a directory of built kernels to what an installation has of them: of each target a manifest and two packs.

`runtime/packs` reads and writes a pack, `runtime/artifacts` finds a kernel in it. Never imports the compiler.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from jax_bwgemm import _files
from jax_bwgemm.facts.arch import TARGETS
from jax_bwgemm.runtime import packs
from jax_bwgemm.runtime.artifacts import (
    CUBIN,
    MOST_KERNEL_BYTES,
    PACKED_MANIFEST,
    PACKS,
    Entry,
    Manifest,
    ManifestError,
    RepackEntry,
    target_of,
    verify,
    verify_pack,
    write_manifest,
)

INSTRUCTION_BYTES = 16  # in a cubin, since Volta


def pack(source: Path, out: Path) -> dict[str, int]:
    """Packs all that the manifest of `source` lists, {target: its kernels}, and removes the packs of other targets.

    ValueError if `source` has no manifest or a file of it is not what was built; OSError where `out` cannot be written.
    """
    manifest = Manifest.load(source)
    if wrong := verify(source):
        raise ValueError(f"packs require kernels as they were built: {wrong[0]}")
    by_target: dict[str, list[Entry | RepackEntry]] = {target: [] for target in TARGETS}
    for entry in sorted(manifest.kernels.values(), key=_alike):
        by_target[target_of(entry.name)].append(entry)
    out.mkdir(parents=True, exist_ok=True)
    for target, entries in by_target.items():
        if _is_packed(out, target, entries):
            continue
        if entries:
            for suffix, name in PACKS.items():
                parts = {entry.name: _content(source, entry.name, suffix) for entry in entries}
                is_code = suffix == CUBIN
                packs.write(out, name.format(target), parts, INSTRUCTION_BYTES if is_code else 1, not is_code)
            write_manifest(out, entries, manifest.cutlass_dsl, PACKED_MANIFEST.format(target))
        else:
            _remove(out, target)
    return {target: len(entries) for target, entries in by_target.items() if entries}


def _alike(entry: Entry | RepackEntry) -> tuple[str, str]:
    """Kernels of one tile have most code in common."""
    return str(entry.variant.tile) if isinstance(entry, Entry) else "", entry.name


def _is_packed(out: Path, target: str, entries: list[Entry | RepackEntry]) -> bool:
    """Whether these very kernels are there as they would be packed again, which takes a minute for all."""
    try:
        manifest = Manifest.load(out, PACKED_MANIFEST.format(target))
        return manifest.kernels == {entry.name: entry for entry in entries} and not verify_pack(out, target)
    except ManifestError:
        return False


def _content(source: Path, name: str, suffix: str) -> bytes:
    """PTX is packed as text, which packs better."""
    read = _files.read_bytes if suffix == CUBIN else _files.read_gzip
    return read(source / f"{name}.{suffix}", MOST_KERNEL_BYTES)


def _remove(out: Path, target: str) -> None:
    names = [name.format(target) for name in PACKS.values()]
    for file in (PACKED_MANIFEST.format(target), *(f"{name}.{x}" for name in names for x in ("json", "xz"))):
        with contextlib.suppress(FileNotFoundError):
            (out / file).unlink()
