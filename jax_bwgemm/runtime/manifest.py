"""The manifest of kernels: what the build writes of each, read when a call is lowered.

Here is the boundary of what a manifest may hold: one that is damaged, unreadable or another build's is a sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax_bwgemm import _files
from jax_bwgemm._files import FileError
from jax_bwgemm._version import __version__
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant

FORMAT = 8
MANIFEST_NAME = "manifest.json"
MOST_MANIFEST_BYTES = 2**26  # of 1700 kernels: 2**22
REMEDY = "run `python -m jax_bwgemm build`"
COMPILER = "nvidia-cutlass-dsl==4.8.1 'nvidia-cuda-nvdisasm>=13'"  # packages that it needs: pyproject's extra `build`


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
        own: dict[str, Any] = dataclasses.asdict(self)
        del own["variant"]
        return {"name": self.name} | self.variant.to_json() | own | {"recipe": self.texts}

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
    """The same of a repack, whose parameter block is `Repack.params`."""

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
        own: dict[str, Any] = dataclasses.asdict(self)
        del own["repack"]
        return {"name": self.name} | dataclasses.asdict(self.repack) | own

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
    """One manifest: its entries by name, those of products and those of repacks. `read` is cheap: what an entry says is
    checked when it is asked for."""

    path: pathlib.Path
    cutlass_dsl: str
    _raw: Mapping[str, tuple[type[Entry | RepackEntry], Mapping[str, Any]]]
    _made: dict[str, Entry | RepackEntry] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def kernels(self) -> dict[str, Entry | RepackEntry]:
        """All of them, the products' first."""
        return {name: entry for name in self._raw if (entry := self.find(name))}

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.kernels.items() if isinstance(entry, Entry)}

    @functools.cached_property
    def repacks(self) -> dict[str, RepackEntry]:
        return {name: entry for name, entry in self.kernels.items() if isinstance(entry, RepackEntry)}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all kernels; their entries need not be right."""
        return tuple(self._raw)

    @property
    def cubins(self) -> tuple[str, ...]:
        """The sha256 of each cubin as it is written there, in the order of the names."""
        return tuple(str(fields.get("cubin_sha256", "")) for _, fields in self._raw.values())

    @property
    def directory(self) -> pathlib.Path:
        return self.path.parent

    def find(self, name: str) -> Entry | RepackEntry | None:
        """The entry of one kernel, None without one. Raises `ManifestError`."""
        if name not in self._made and name in self._raw:
            cls, fields = self._raw[name]
            with _refusals(self.path):
                self._made[name] = cls.from_json(fields)
        return self._made.get(name)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], name: str = MANIFEST_NAME) -> Manifest:
        """Reads all of it. Raises `ManifestError` with a remedy if this version of the package cannot use it."""
        manifest = cls.read(pathlib.Path(directory, name))
        assert manifest.kernels is not None  # each entry is checked
        return manifest

    @classmethod
    def read(cls, path: pathlib.Path) -> Manifest:
        """As `load`, but for what the entries say."""
        with _refusals(path):
            fields = _files.read_json(path, MOST_MANIFEST_BYTES)
            for key, required in (("format", FORMAT), ("package_version", __version__)):
                if not isinstance(fields, dict) or fields.get(key) != required:
                    got = fields.get(key) if isinstance(fields, dict) else None
                    raise ManifestError(f"{path} requires {key} {required!r}, got {got!r}; {REMEDY}")
            _require_keys({"format", "package_version", "cutlass_dsl", "variants", "repacks"}, fields, str(path))
            raw: dict[str, tuple[type[Entry | RepackEntry], Mapping[str, Any]]]
            raw = {str(entry["name"]): (Entry, entry) for entry in fields["variants"]}
            raw |= {str(entry["name"]): (RepackEntry, entry) for entry in fields["repacks"]}
            return cls(path, str(fields["cutlass_dsl"]), raw)


@contextlib.contextmanager
def _refusals(path: pathlib.Path) -> Iterator[None]:
    """Whatever a damaged manifest leads to becomes a `ManifestError`."""
    try:
        yield
    except ManifestError:
        raise
    except FileError as error:
        raise ManifestError(f"no cubins: {error}; {REMEDY}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # of no such form
        got = f"{type(error).__name__}: {error}"
        raise ManifestError(f"{path} requires what the build writes, got {got}; {REMEDY}") from None


def listed(directory: pathlib.Path) -> set[str]:
    """The names of the kernels that a manifest of any version lists; none where nothing can be read."""
    try:
        fields = _files.read_json(directory / MANIFEST_NAME, MOST_MANIFEST_BYTES)
        entries = [entry["name"] for key in ("variants", "repacks") for entry in fields.get(key, [])]
        return {name for name in entries if re.fullmatch(r"sm_\w+", name)}
    except (ValueError, TypeError, LookupError, AttributeError):
        return set()


def write_manifest(
    directory: str | os.PathLike[str],
    entries: Iterable[Entry | RepackEntry],
    cutlass_dsl: str = "",
    name: str = MANIFEST_NAME,
) -> pathlib.Path:
    """Writes a manifest for this version of the package, sorted by name, by an atomic rename; returns its path."""
    kernels = sorted(entries, key=lambda entry: entry.name)
    fields: dict[str, Any] = {"format": FORMAT, "package_version": __version__, "cutlass_dsl": cutlass_dsl}
    fields["variants"] = [entry.to_json() for entry in kernels if isinstance(entry, Entry)]
    fields["repacks"] = [entry.to_json() for entry in kernels if isinstance(entry, RepackEntry)]
    path = pathlib.Path(directory, name)
    _files.write_atomically(path, (json.dumps(fields, indent=1) + "\n").encode())
    return path


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
