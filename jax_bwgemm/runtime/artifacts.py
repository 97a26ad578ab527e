"""The manifest beside the cubins: written by the build, read when a call is lowered. Never touches CUDA."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, overload

from jax_bwgemm._version import __version__
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant

FORMAT = 4
MANIFEST_NAME = "manifest.json"
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
            raise ManifestError(f"{where}: its fields require the name {variant.name}, got {fields['name']}")
        own = {k: fields[k] for k in _names(cls) - {"variant"}}
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
        if repack.name != fields["name"]:
            raise ManifestError(f"{where}: its fields require the name {repack.name}, got {fields['name']}")
        return cls(repack=repack, **{k: fields[k] for k in _names(cls) - {"repack"}})


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One artifact directory: its entries by name, those of products and those of repacks."""

    directory: pathlib.Path
    cutlass_dsl: str
    entries: dict[str, Entry]
    repacks: dict[str, RepackEntry]

    @property
    def kernels(self) -> dict[str, Entry | RepackEntry]:
        return self.entries | self.repacks

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Manifest:
        """Reads `manifest.json`. Raises `ManifestError` with a remedy if this version of the package cannot use it."""
        path = pathlib.Path(directory) / MANIFEST_NAME
        try:
            text = path.read_text()
        except OSError:
            raise ManifestError(f"no cubins: {path} cannot be read; {REMEDY}") from None
        return cls._parse(path, text)

    @classmethod
    def _parse(cls, path: pathlib.Path, text: str) -> Manifest:
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"{path} requires JSON, got {error}; {REMEDY}") from None
        for key, required in (("format", FORMAT), ("package_version", __version__)):
            if not isinstance(fields, dict) or fields.get(key) != required:
                got = fields.get(key) if isinstance(fields, dict) else None
                raise ManifestError(f"{path} requires {key} {required!r}, got {got!r}; {REMEDY}")
        _require_keys({"format", "package_version", "cutlass_dsl", "variants", "repacks"}, fields, str(path))
        entries = {entry["name"]: Entry.from_json(entry) for entry in fields["variants"]}
        repacks = {entry["name"]: RepackEntry.from_json(entry) for entry in fields["repacks"]}
        return cls(path.parent, fields["cutlass_dsl"], entries, repacks)


def write_manifest(
    directory: str | os.PathLike[str], entries: Iterable[Entry | RepackEntry], cutlass_dsl: str = ""
) -> pathlib.Path:
    """Writes `manifest.json` for this version of the package, sorted by name, by an atomic rename; returns its path."""
    kernels = sorted(entries, key=lambda entry: entry.name)
    fields = {"format": FORMAT, "package_version": __version__, "cutlass_dsl": cutlass_dsl}
    fields["variants"] = [entry.to_json() for entry in kernels if isinstance(entry, Entry)]
    fields["repacks"] = [entry.to_json() for entry in kernels if isinstance(entry, RepackEntry)]
    path = pathlib.Path(directory) / MANIFEST_NAME
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(fields, indent=1) + "\n")
    scratch.replace(path)
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


def state() -> tuple[tuple[str, int, int], ...]:
    """Of all artifact directories, what changes with their manifests and with the files in them."""
    paths = map(os.fspath, artifact_dirs())
    return tuple((path, _mtime_ns(path), _mtime_ns(os.path.join(path, MANIFEST_NAME))) for path in paths)


@overload
def find(kernel: Variant) -> Entry | str: ...
@overload
def find(kernel: Repack) -> RepackEntry | str: ...
def find(kernel: Variant | Repack) -> Entry | RepackEntry | str:
    """The entry of `kernel` in the first artifact directory that has it with its cubin, else one sentence why not."""
    found = _locate(kernel.name)
    return found if isinstance(found, str) else found[1]


def find_ptx(kernel: Variant | Repack) -> pathlib.Path | str:
    """The compressed PTX beside the cubin that `find` finds, else one sentence why there is none."""
    found = _locate(kernel.name)
    if isinstance(found, str):
        return found
    path = found[0] / f"{kernel.name}.ptx.gz"
    return path if path.exists() else f"{path} is missing; {REMEDY}"


def _locate(name: str) -> tuple[pathlib.Path, Entry | RepackEntry] | str:
    reasons = []
    for directory in artifact_dirs():
        manifest = _load_cached(directory, _mtime_ns(directory / MANIFEST_NAME))
        if isinstance(manifest, str):
            reasons.append(manifest)
            continue
        if (entry := manifest.kernels.get(name)) is None:
            reasons.append(f"no cubin {name} in {directory}")
        elif not (directory / f"{name}.cubin").exists():
            reasons.append(f"{directory / name}.cubin is in the manifest but missing; {REMEDY}")
        else:
            return directory, entry
    return "; ".join(reasons)


def sha256_of(name: str) -> str | None:
    """Of the cubin `name` that `find` would find; None if there is none."""
    found = _locate(name)
    return None if isinstance(found, str) else found[1].cubin_sha256


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """One sentence for every cubin of the manifest that is missing or not what was built; raises `ManifestError`."""
    manifest = Manifest.load(directory)
    reasons = []
    for entry in manifest.kernels.values():
        path = manifest.directory / f"{entry.name}.cubin"
        if not path.exists():
            reasons.append(f"{path} is in the manifest but missing; {REMEDY}")
        elif (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != entry.cubin_sha256:
            reasons.append(f"{path} requires sha256 {entry.cubin_sha256}, got {digest}; {REMEDY}")
    return reasons


@functools.lru_cache(maxsize=16)
def _load_cached(directory: pathlib.Path, mtime_ns: int) -> Manifest | str:
    """The manifest, or why there is none to use: a broken one is not read again for every kernel."""
    try:
        return Manifest.load(directory)
    except ManifestError as error:
        return str(error)


def _mtime_ns(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _build(cls: Any, fields: Mapping[str, Any], where: str) -> Any:
    _require_keys(_names(cls), fields, f"{where}, {cls.__name__}")
    return cls(**fields)


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
