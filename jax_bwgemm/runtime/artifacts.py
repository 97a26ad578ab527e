"""Which kernels are at hand: the manifests of the artifact directories, and the files or packs beside them. Never
touches CUDA.

Here is the boundary of what a disk may hold: a manifest or a kernel's file that is damaged, unreadable or another
build's is a sentence, and the next directory is asked. A checkout has loose files and one manifest; an installation
has packs, and a manifest an architecture, so that of the others' nothing is read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import overload

from jax_bwgemm import _files
from jax_bwgemm._files import FileError, Stamp
from jax_bwgemm.facts.arch import TARGETS
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import packs
from jax_bwgemm.runtime.manifest import (
    COMPILER,
    MANIFEST_NAME,
    MOST_MANIFEST_BYTES,
    REMEDY,
    Entry,
    Manifest,
    ManifestError,
    RepackEntry,
    listed,
    write_manifest,
)
from jax_bwgemm.runtime.packs import Pack

__all__ = [
    "COMPILER",
    "MANIFEST_NAME",
    "REMEDY",
    "Entry",
    "Manifest",
    "ManifestError",
    "RepackEntry",
    "listed",
    "write_manifest",
]

VARIABLE = "JAX_BWGEMM_ARTIFACTS"
CUBIN, PTX = "cubin", "ptx.gz"  # suffixes of a kernel's files
PACKS = {CUBIN: "{}.cubin", PTX: "{}.ptx"}  # of a target's
PACKED_MANIFEST = "{}.json"
MOST_KERNEL_BYTES = 2**26  # of a cubin, and of PTX before and after gzip: 2**18

State = tuple[tuple[str, Stamp | None, Stamp | None], ...]

_added: list[pathlib.Path] = []


def artifact_dirs() -> tuple[pathlib.Path, ...]:
    """Where cubins are looked for: the directories of `JAX_BWGEMM_ARTIFACTS`, else the package's own; then `add_dir`'s.

    An editable install has two package directories: the sources and what was built.
    """
    if named := [part for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]:
        return (*map(pathlib.Path, named), *_added)
    package = sys.modules[__name__.partition(".")[0]]
    own = [pathlib.Path(directory) / "_artifacts" for directory in package.__path__]
    return *([directory for directory in own if directory.is_dir()] or own[:1]), *_added


def or_variable() -> str:
    """What else mends directories without the kernels that are asked for: behind a remedy, where a variable names them,
    and a build or an installation goes elsewhere."""
    return f", or correct or unset {VARIABLE}" if os.environ.get(VARIABLE) else ""


def add_dir(directory: str | os.PathLike[str]) -> None:
    """Has cubins looked for in `directory` too, after all others, for the life of the process."""
    path = pathlib.Path(directory)
    if path not in _added:
        _added.append(path)


def launch_dirs() -> tuple[pathlib.Path, ...]:
    """Where the launcher looks for cubins: the artifact directories, then where packed ones were unpacked."""
    return *artifact_dirs(), *packs.directories()


def state() -> State:
    """Of all artifact directories, what changes with their manifests and with the files in them."""
    paths = map(os.fspath, artifact_dirs())
    return tuple((path, _files.stamp(path), _files.stamp(os.path.join(path, MANIFEST_NAME))) for path in paths)


def digests() -> tuple[str, ...]:
    """Of the manifests of all artifact directories, which are the same on all hosts that have the same kernels."""
    found = []
    for path in artifact_dirs():
        with contextlib.suppress(OSError, _files.FileError):  # whoever needs a kernel of it says so
            found.append(_files.sha256(path / MANIFEST_NAME, MOST_MANIFEST_BYTES))
    return tuple(found)


@overload
def find(kernel: Variant, suffix: str = CUBIN) -> Entry | str: ...
@overload
def find(kernel: Repack, suffix: str = CUBIN) -> RepackEntry | str: ...
def find(kernel: Variant | Repack, suffix: str = CUBIN) -> Entry | RepackEntry | str:
    """The entry of `kernel` in the first artifact directory that has it with its cubin, or with its PTX, as it was
    built; else one sentence why not."""
    found = _locate(kernel.name, suffix)
    return found if isinstance(found, str) else found[0]


@overload
def ready(kernel: Variant, suffix: str = CUBIN) -> Entry | str: ...
@overload
def ready(kernel: Repack, suffix: str = CUBIN) -> RepackEntry | str: ...
def ready(kernel: Variant | Repack, suffix: str = CUBIN) -> Entry | RepackEntry | str:
    """As `find`, before a launch: what is in a pack is a file, too, in one of `launch_dirs`."""
    found = _ready(kernel.name, suffix)
    return found if isinstance(found, str) else found[0]


def find_ptx(kernel: Variant | Repack) -> pathlib.Path | str:
    """The compressed PTX of the entry that `ready` of `PTX` finds, else one sentence why there is none."""
    found = _ready(kernel.name, PTX)
    return found if isinstance(found, str) else found[1]


def find_in(directory: pathlib.Path, variant: Variant, suffix: str = CUBIN) -> Entry | str:
    """As `find`, in the loose files of one directory."""
    found = _in_files(directory, variant.name, suffix)
    assert not isinstance(found, RepackEntry)  # these have other names
    return found


def sha256_of(name: str) -> str | None:
    """Of the cubin `name` that `ready` would find; None if there is none."""
    found = _ready(name, CUBIN)
    return None if isinstance(found, str) else found[0].cubin_sha256


def is_whole(directory: pathlib.Path, entry: Entry | RepackEntry) -> bool:
    """Whether all files of a kernel are there, as they were built."""
    return all(_why_not_whole(directory, entry, suffix) is None for suffix in (CUBIN, PTX))


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """One sentence for every cubin of the manifest that is missing or not what was built, and for PTX, which only the
    emulator misses, that is not what was built; raises `ManifestError`."""
    manifest, reasons = Manifest.load(directory), []
    for entry in manifest.kernels.values():
        has_ptx = _files.stamp(manifest.directory / f"{entry.name}.{PTX}") is not None
        reasons += [_why_not_whole(manifest.directory, entry, x) for x in (CUBIN, PTX) if x == CUBIN or has_ptx]
    return [reason for reason in reasons if reason]


def packed_targets(directory: pathlib.Path) -> list[str]:
    """The targets whose kernels a directory has in packs."""
    return [target for target in TARGETS if _files.stamp(directory / PACKED_MANIFEST.format(target)) is not None]


def verify_pack(directory: pathlib.Path, target: str) -> list[str]:
    """As `verify`, of the packs of one target: of each cubin, and of PTX as it is packed."""
    manifest = Manifest.load(directory, PACKED_MANIFEST.format(target))
    reasons: list[str] = []
    for name, entry in manifest.kernels.items():
        try:
            pack = Pack.load(directory, PACKS[CUBIN].format(target))
            pack.read(name)
        except FileError as error:
            return [*reasons, str(error)]  # it is one file: what follows says the same
        if pack.parts[name].sha256 != entry.cubin_sha256:
            reasons.append(_another_digest(pack, name, entry))
    try:
        Pack.load(directory, PACKS[PTX].format(target)).check()
    except FileError as error:
        reasons.append(str(error))
    return reasons


_Place = tuple[Entry | RepackEntry, pathlib.Path, Pack | None]  # the second: a file, or the directory of the pack


def _locate(name: str, suffix: str) -> _Place | str:
    reasons = []
    for place in _places(name, suffix):
        if not isinstance(place, str):
            return place
        reasons.append(place)
    return _joined(reasons)


def _ready(name: str, suffix: str) -> tuple[Entry | RepackEntry, pathlib.Path] | str:
    reasons = []
    for place in _places(name, suffix):
        if not isinstance(place, str):
            entry, path, pack = place
            try:
                return entry, pack.as_file(name, suffix) if pack else path
            except FileError as error:
                place = str(error)
        reasons.append(place)
    return _joined(reasons)


def _joined(reasons: list[str]) -> str:
    is_told = any(reason.endswith((REMEDY, packs.REMEDY)) for reason in reasons)
    return "; ".join(reasons) + (or_variable() if is_told else "")


def _places(name: str, suffix: str) -> Iterator[_Place | str]:
    """Of each directory in turn: where it has a kernel, as a file or in a pack, or why it has not."""
    packed = PACKED_MANIFEST.format(target_of(name))
    for directory in artifact_dirs():
        has_pack = _files.stamp(directory / packed) is not None
        if not has_pack or _files.stamp(directory / MANIFEST_NAME) is not None:
            found = _in_files(directory, name, suffix)
            yield found if isinstance(found, str) else (found, directory / f"{name}.{suffix}", None)
        if has_pack:
            yield _in_pack(directory, name, suffix)


def _in_files(directory: pathlib.Path, name: str, suffix: str) -> Entry | RepackEntry | str:
    entry = _entry(directory / MANIFEST_NAME, name)
    return entry if isinstance(entry, str) else _why_not_whole(directory, entry, suffix) or entry


def _in_pack(directory: pathlib.Path, name: str, suffix: str) -> _Place | str:
    """The pack as it is compressed is checked here, its cubin when it becomes a file."""
    target = target_of(name)
    entry = _entry(directory / PACKED_MANIFEST.format(target), name)
    if isinstance(entry, str):
        return entry
    try:
        pack = Pack.load(directory, PACKS[suffix].format(target))
        pack.check()
    except FileError as error:
        return str(error)
    if name not in pack.parts:
        return f"{pack.path} requires a part {name}, as its manifest says, got none; {packs.REMEDY}"
    if suffix == CUBIN and pack.parts[name].sha256 != entry.cubin_sha256:
        return _another_digest(pack, name, entry)
    return entry, directory, pack


def target_of(name: str) -> str:
    """The target that the name of a kernel begins with: sm_90a_..."""
    return "_".join(name.split("_", 2)[:2])


def _another_digest(pack: Pack, name: str, entry: Entry | RepackEntry) -> str:
    got = pack.parts[name].sha256
    return f"{name} in {pack.path} requires sha256 {entry.cubin_sha256}, got {got}; {packs.REMEDY}"


def _entry(path: pathlib.Path, name: str) -> Entry | RepackEntry | str:
    manifest = _read_cached(path, _files.stamp(path))
    try:
        found = manifest if isinstance(manifest, str) else manifest.find(name)
    except ManifestError as error:
        return str(error)
    return f"no cubin {name} in {path.parent}" if found is None else found


def _why_not_whole(directory: pathlib.Path, entry: Entry | RepackEntry, suffix: str) -> str | None:
    path = directory / f"{entry.name}.{suffix}"
    if _files.stamp(path) is None:
        return f"{path} is in the manifest but missing; {REMEDY}"
    try:
        digest = _files.sha256(path, MOST_KERNEL_BYTES)
    except FileError as error:
        return f"{error}; {REMEDY}"
    wanted = entry.cubin_sha256 if suffix == CUBIN else entry.ptx_sha256
    return None if digest == wanted else f"{path} requires sha256 {wanted}, got {digest}; {REMEDY}"


@functools.lru_cache(maxsize=16)
def _read_cached(path: pathlib.Path, stamp: Stamp | None) -> Manifest | str:
    """The manifest, or why there is none to use: a broken one is not read again for every kernel."""
    try:
        return Manifest.read(path)
    except ManifestError as error:
        return str(error)
