"""The manifest beside the cubins: written by the build, read when a call is lowered. Never touches CUDA.

Here is the boundary of what a disk may hold: a manifest or a kernel's file that is damaged, unreadable or another
build's is a sentence, and the next directory is asked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any, overload

from jax_bwgemm import _files
from jax_bwgemm._files import FileError, Stamp
from jax_bwgemm._version import __version__
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant

FORMAT = 6
MANIFEST_NAME = "manifest.json"
CUBIN, PTX = "cubin", "ptx.gz"  # suffixes of a kernel's files
MOST_MANIFEST_BYTES = 2**26  # of 1600 kernels: 2**22
MOST_KERNEL_BYTES = 2**26  # of a cubin, and of PTX before and after gzip: 2**18
REMEDY = "run `python -m jax_bwgemm build`"

_added: list[pathlib.Path] = []


class ManifestError(ValueError):
    """A manifest or a cubin that this version cannot use; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the launcher and a maintainer need to know of one cubin."""

    variant: Variant
    entry: str
    num_threads: int
    smem_bytes: int
    num_stages: int
    tmem_cols: int
    recipe: Recipe
    registers: int
    spill_bytes: int
    sass: dict[str, int]
    ptxas: str
    cubin_sha256: str
    ptx_sha256: str  # of the file, as it is compressed
    source_sha256: str

    @functools.cached_property
    def name(self) -> str:
        return self.variant.name

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The recipe's, which every custom call says."""
        return self.recipe.texts()

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and texts; the variant's fields stand beside the entry's own."""
        fields = dataclasses.asdict(self) | {"recipe": self.texts, "variant": self.variant.to_json()}
        return {"name": self.name} | fields.pop("variant") | fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Entry:
        """The inverse of `to_json`. A missing or unknown key, or a name that is not the variant's, is an error."""
        where = f"variant {fields.get('name', '?')}"
        _require_keys({"name"} | _names(Variant) | _names(cls) - {"variant"}, fields, where)
        _require_keys(_names(Tile), fields["tile"], f"{where}, Tile")
        try:
            variant = Variant.from_json({k: fields[k] for k in _names(Variant)})
        except ValueError as error:
            raise ManifestError(f"{where}: {error}; {REMEDY}") from None
        if variant.name != fields["name"]:
            raise ManifestError(f"{where}: its fields require the name {variant.name}, got {fields['name']}; {REMEDY}")
        own = {k: fields[k] for k in _names(cls) - {"variant"}}
        _require_types(cls, own, where)
        return cls(variant=variant, **own | {"recipe": _recipe(fields["recipe"], where)})


@dataclasses.dataclass(frozen=True)
class RepackEntry:
    """The same of a repack, whose parameter block is `repack.PARAMS`."""

    repack: Repack
    entry: str
    num_threads: int
    smem_bytes: int
    registers: int
    spill_bytes: int
    sass: dict[str, int]
    ptxas: str
    cubin_sha256: str
    ptx_sha256: str  # of the file, as it is compressed
    source_sha256: str

    @property
    def name(self) -> str:
        return self.repack.name

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dictionaries; the repack's fields stand beside the entry's own."""
        fields = dataclasses.asdict(self)
        return {"name": self.name} | fields.pop("repack") | fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RepackEntry:
        """The inverse of `to_json`. A missing or unknown key, or a name that is not the repack's, is an error."""
        where = f"repack {fields.get('name', '?')}"
        _require_keys({"name"} | _names(Repack) | _names(cls) - {"repack"}, fields, where)
        repack = Repack(**{k: fields[k] for k in _names(Repack)})
        _require_types(Repack, dataclasses.asdict(repack), where)
        if repack.name != fields["name"]:
            raise ManifestError(f"{where}: its fields require the name {repack.name}, got {fields['name']}; {REMEDY}")
        own = {k: fields[k] for k in _names(cls) - {"repack"}}
        _require_types(cls, own, where)
        return cls(repack=repack, **own)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One artifact directory: its entries by name, those of products and those of repacks."""

    directory: pathlib.Path
    cutlass_dsl: str
    entries: dict[str, Entry]
    repacks: dict[str, RepackEntry]

    @functools.cached_property
    def kernels(self) -> dict[str, Entry | RepackEntry]:
        return self.entries | self.repacks

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Manifest:
        """Reads `manifest.json`. Raises `ManifestError` with a remedy if this version of the package cannot use it."""
        path = pathlib.Path(directory) / MANIFEST_NAME
        try:
            return cls._parse(path, _files.read_json(path, MOST_MANIFEST_BYTES))
        except ManifestError:
            raise
        except FileError as error:
            raise ManifestError(f"no cubins: {error}; {REMEDY}") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # of no such form
            got = f"{type(error).__name__}: {error}"
            raise ManifestError(f"{path} requires what the build writes, got {got}; {REMEDY}") from None

    @classmethod
    def _parse(cls, path: pathlib.Path, fields: Any) -> Manifest:
        for key, required in (("format", FORMAT), ("package_version", __version__)):
            if not isinstance(fields, dict) or fields.get(key) != required:
                got = fields.get(key) if isinstance(fields, dict) else None
                raise ManifestError(f"{path} requires {key} {required!r}, got {got!r}; {REMEDY}")
        _require_keys({"format", "package_version", "cutlass_dsl", "variants", "repacks"}, fields, str(path))
        entries = {entry["name"]: Entry.from_json(entry) for entry in fields["variants"]}
        repacks = {entry["name"]: RepackEntry.from_json(entry) for entry in fields["repacks"]}
        return cls(path.parent, fields["cutlass_dsl"], entries, repacks)


def listed(directory: pathlib.Path) -> set[str]:
    """The names of the kernels that a manifest of any version lists; none where nothing can be read."""
    try:
        fields = _files.read_json(directory / MANIFEST_NAME, MOST_MANIFEST_BYTES)
        entries = [entry["name"] for key in ("variants", "repacks") for entry in fields.get(key, [])]
        return {name for name in entries if re.fullmatch(r"sm_\w+", name)}
    except (ValueError, TypeError, LookupError, AttributeError):
        return set()


def write_manifest(
    directory: str | os.PathLike[str], entries: Iterable[Entry | RepackEntry], cutlass_dsl: str = ""
) -> pathlib.Path:
    """Writes `manifest.json` for this version of the package, sorted by name, by an atomic rename; returns its path."""
    kernels = sorted(entries, key=lambda entry: entry.name)
    fields = {"format": FORMAT, "package_version": __version__, "cutlass_dsl": cutlass_dsl}
    fields["variants"] = [entry.to_json() for entry in kernels if isinstance(entry, Entry)]
    fields["repacks"] = [entry.to_json() for entry in kernels if isinstance(entry, RepackEntry)]
    path = pathlib.Path(directory) / MANIFEST_NAME
    _files.write_atomically(path, (json.dumps(fields, indent=1) + "\n").encode())
    return path


def artifact_dirs() -> tuple[pathlib.Path, ...]:
    """Where cubins are looked for: the directories of `JAX_BWGEMM_ARTIFACTS`, else the package's own; then `add_dir`'s.

    An editable install has two package directories: the sources and what was built.
    """
    if named := [part for part in os.environ.get("JAX_BWGEMM_ARTIFACTS", "").split(os.pathsep) if part]:
        return (*map(pathlib.Path, named), *_added)
    package = sys.modules[__name__.partition(".")[0]]
    own = [pathlib.Path(directory) / "_artifacts" for directory in package.__path__]
    return *([directory for directory in own if directory.is_dir()] or own[:1]), *_added


def add_dir(directory: str | os.PathLike[str]) -> None:
    """Has cubins looked for in `directory` too, after all others, for the life of the process."""
    path = pathlib.Path(directory)
    if path not in _added:
        _added.append(path)


def state() -> tuple[tuple[str, Stamp | None, Stamp | None], ...]:
    """Of all artifact directories, what changes with their manifests and with the files in them."""
    paths = map(os.fspath, artifact_dirs())
    return tuple((path, _files.stamp(path), _files.stamp(os.path.join(path, MANIFEST_NAME))) for path in paths)


@overload
def find(kernel: Variant, suffix: str = CUBIN) -> Entry | str: ...
@overload
def find(kernel: Repack, suffix: str = CUBIN) -> RepackEntry | str: ...
def find(kernel: Variant | Repack, suffix: str = CUBIN) -> Entry | RepackEntry | str:
    """The entry of `kernel` in the first artifact directory that has it with its cubin, or with its PTX, as it was
    built; else one sentence why not."""
    found = _locate(kernel.name, suffix)
    return found if isinstance(found, str) else found[1]


def find_ptx(kernel: Variant | Repack) -> pathlib.Path | str:
    """The compressed PTX of the entry that `find` of `PTX` finds, else one sentence why there is none."""
    found = _locate(kernel.name, PTX)
    return found if isinstance(found, str) else found[0] / f"{kernel.name}.{PTX}"


def find_in(directory: pathlib.Path, variant: Variant, suffix: str = CUBIN) -> Entry | str:
    """As `find`, in one directory."""
    found = _find_in(directory, variant.name, suffix)
    assert not isinstance(found, RepackEntry)  # these have other names
    return found


def _find_in(directory: pathlib.Path, name: str, suffix: str) -> Entry | RepackEntry | str:
    manifest = _load_cached(directory, _files.stamp(directory / MANIFEST_NAME))
    if isinstance(manifest, str):
        return manifest
    if (entry := manifest.kernels.get(name)) is None:
        return f"no cubin {name} in {directory}"
    return _why_not_whole(directory, entry, suffix) or entry


def sha256_of(name: str) -> str | None:
    """Of the cubin `name` that `find` would find; None if there is none."""
    found = _locate(name, CUBIN)
    return None if isinstance(found, str) else found[1].cubin_sha256


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


def _locate(name: str, suffix: str) -> tuple[pathlib.Path, Entry | RepackEntry] | str:
    reasons = []
    for directory in artifact_dirs():
        found = _find_in(directory, name, suffix)
        if not isinstance(found, str):
            return directory, found
        reasons.append(found)
    return "; ".join(reasons)


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
def _load_cached(directory: pathlib.Path, stamp: Stamp | None) -> Manifest | str:
    """The manifest, or why there is none to use: a broken one is not read again for every kernel."""
    try:
        return Manifest.load(directory)
    except ManifestError as error:
        return str(error)


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _require_types(cls: Any, fields: Mapping[str, Any], where: str) -> None:
    """Of a dataclass: words, numbers, and counts by a word."""
    for name, value in fields.items():
        hint = _hints(cls)[name]
        if hint == dict[str, int]:
            is_right = isinstance(value, dict) and all(type(count) is int for count in value.values())
        else:
            is_right = hint not in (int, str) or type(value) is hint
        if not is_right:
            raise ManifestError(f"{where} requires another {name!r} than {value!r}; {REMEDY}")


def _recipe(texts: Mapping[str, str], where: str) -> Recipe:
    _require_keys(_names(Recipe), texts, f"{where}, `recipe`")
    try:
        return Recipe.from_texts(texts)
    except ValueError as error:
        raise ManifestError(f"{where}: {error}; {REMEDY}") from None


def _require_keys(required: set[str], fields: Mapping[str, Any], where: str) -> None:
    if missing := sorted(required - fields.keys()):
        raise ManifestError(f"{where} requires the key {missing[0]!r}, got none; {REMEDY}")
    if unknown := sorted(fields.keys() - required):
        raise ManifestError(f"{where} requires no key {unknown[0]!r}, got one; {REMEDY}")
