"""Packs: the cubins of one architecture, or their PTX, in one solid xz file, as an installation has them.

`<name>.xz` holds all parts, one behind the other, compressed together; `<name>.json` says where each begins and ends,
its size and its sha256. PTX lies there in `steps`, and is read as it was. A pack is opened once, within the bounds that
its index says; whoever needs a file, such as the launcher, gets a part as one. Knows no kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_bwgemm import _files
from jax_bwgemm._files import FileError, Stamp
from jax_bwgemm.runtime.steps import from_steps, to_steps

FORMAT = 2
MOST_INDEX_BYTES = 2**24  # of 1050 parts: 2**18
MOST_PACKED_BYTES = 2**26  # of 1050 cubins: 2**20
MOST_BYTES = 2**28  # and opened: 2**25
REMEDY = "reinstall jax_bwgemm"

_lock = threading.Lock()
_directories: list[Path] = []  # that hold parts as files
_placed: dict[tuple[Any, ...], tuple[Path, Stamp | None]] = {}  # the files, as they were found right
_temporary: dict[int, Path] = {}  # by process: a fork makes its own


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one name's bytes are in an opened pack. `size` and `sha256` are theirs once they are read."""

    offset: int
    length: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Pack:
    """The index of a pack. `num_bytes` and `sha256` are of all parts together, and of the file as it is compressed;
    `in_steps`: all parts are texts in steps."""

    path: Path
    num_bytes: int
    sha256: str
    in_steps: bool
    parts: Mapping[str, Part]

    @classmethod
    def load(cls, directory: Path, name: str) -> Pack:
        """Reads the index alone, once for each of its states. FileError if it cannot be used."""
        path = directory / f"{name}.json"
        return _load(path, _files.stamp(path))

    def check(self) -> None:
        """FileError unless the file is what was packed."""
        with _remedied():
            digest = _files.sha256(self.path, MOST_PACKED_BYTES)
            if digest != self.sha256:
                raise FileError(f"{self.path} requires sha256 {self.sha256}, got {digest}")

    def read(self, name: str) -> bytes:
        """The bytes of a part, which have its digest. FileError."""
        self.check()
        part = self._part(name)
        with _remedied(), _lock:  # opened once, whoever asks
            everything = _opened(self.path, _files.stamp(self.path), self.num_bytes)
        content = everything[part.offset : part.offset + part.length]
        if self.in_steps:
            content = from_steps(content.decode("utf-8", "replace")).encode()
        if (digest := hashlib.sha256(content).hexdigest()) != part.sha256:
            raise FileError(f"{name} in {self.path} requires sha256 {part.sha256}, got {digest}; {REMEDY}")
        return content

    def as_file(self, name: str, suffix: str) -> Path:
        """A part as the file `<name>.<suffix>`, compressed if that ends with gz: in the user's cache, where it stays,
        else in a temporary directory, which ends with this process. FileError where neither can be written."""
        part, is_gzip, reasons = self._part(name), suffix.endswith("gz"), []
        key = os.getpid(), self.path, self.sha256, name, suffix
        if (known := _placed.get(key)) and _files.stamp(known[0]) == known[1]:
            return known[0]
        for make in (self._cache, _make_temporary):
            try:
                path = make() / f"{name}.{suffix}"
            except (FileError, OSError) as error:
                reasons.append(str(error))
                continue
            if not _holds(path, is_gzip, part):
                content = self.read(name)
                try:
                    _files.write_atomically(path, gzip.compress(content, 1, mtime=0) if is_gzip else content)
                except OSError as error:
                    reasons.append(str(error))
                    continue
            if path.parent not in _directories:
                _directories.append(path.parent)
            _placed[key] = path, _files.stamp(path)
            return path
        rule, got = f"{name} of {self.path} requires a place for a file", "; ".join(reasons)
        raise FileError(f"{rule}, got none: {got}; set XDG_CACHE_HOME or TMPDIR")

    def _cache(self) -> Path:
        directory = _files.cache_path(f"{self.path.stem}-{self.sha256[:16]}")
        _files.make_own(directory)
        return directory

    def _part(self, name: str) -> Part:
        if name not in self.parts:
            raise FileError(f"{self.path} requires a part {name}, got none; {REMEDY}")
        return self.parts[name]


@contextlib.contextmanager
def _remedied() -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raise FileError(f"{error}; {REMEDY}") from None


def directories() -> tuple[Path, ...]:
    """Where `as_file` has put files in this process."""
    return tuple(_directories)


def write(directory: Path, name: str, parts: Mapping[str, bytes], unit_bytes: int = 1, in_steps: bool = False) -> None:
    """Writes a pack, the index last. `unit_bytes`: 1 of text, 16 of Hopper's and Blackwell's instructions: where a byte
    lies in its unit then says as much of it as the one before does. `in_steps`: of PTX. Parts that are alike pack best
    side by side. ValueError for what steps cannot say."""
    # Imported where packs are opened or written: some Pythons are built without it.
    import lzma

    packed_parts = [to_steps(x.decode()).encode() if in_steps else x for x in parts.values()]
    everything, position_bits = b"".join(packed_parts), unit_bytes.bit_length() - 1
    context = {"lc": 4 - position_bits, "lp": position_bits, "pb": position_bits}  # lc + lp are at most 4
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, **context}]
    packed = lzma.compress(everything, filters=filters)
    index, offset = [], 0
    for (part, content), own in zip(parts.items(), packed_parts, strict=True):
        index.append([part, offset, len(own), len(content), hashlib.sha256(content).hexdigest()])
        offset += len(own)
    facts = {"format": FORMAT, "bytes": offset, "sha256": hashlib.sha256(packed).hexdigest(), "in_steps": in_steps}
    fields = facts | {"parts": index}
    _files.write_atomically(directory / f"{name}.xz", packed)
    _files.write_atomically(directory / f"{name}.json", (json.dumps(fields, indent=0) + "\n").encode())


@functools.lru_cache(maxsize=16)
def _load(path: Path, stamp: Stamp | None) -> Pack:
    with _remedied():
        fields = _files.read_json(path, MOST_INDEX_BYTES)
    try:
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']!r}")
        parts = {name: Part(*where) for name, *where in fields["parts"]}
        pack = Pack(path.with_suffix(".xz"), fields["bytes"], fields["sha256"], fields["in_steps"], parts)
        _check_types(pack)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FileError(f"{path} requires the index of a pack of format {FORMAT}, got {got}; {REMEDY}") from None
    return pack


def _check_types(pack: Pack) -> None:
    numbers: list[Any] = [x for part in pack.parts.values() for x in (part.offset, part.length, part.size)]
    texts: list[Any] = [pack.sha256, *pack.parts, *(part.sha256 for part in pack.parts.values())]
    are_numbers = all(type(x) is int and x >= 0 for x in (pack.num_bytes, *numbers))
    if not are_numbers or any(type(x) is not str for x in texts) or type(pack.in_steps) is not bool:
        raise ValueError("a value of another type")
    if pack.num_bytes > MOST_BYTES or any(part.offset + part.length > pack.num_bytes for part in pack.parts.values()):
        raise ValueError(f"parts that end behind its {pack.num_bytes} bytes, of which {MOST_BYTES} are the most")


@functools.lru_cache(maxsize=2)  # the cubins and the PTX of one architecture
def _opened(path: Path, stamp: Stamp | None, num_bytes: int) -> bytes:
    return _files.read_xz(path, MOST_PACKED_BYTES, num_bytes)


def _holds(path: Path, is_gzip: bool, part: Part) -> bool:
    """Whether a file is the part that it is named after."""
    read: Callable[[Path, int], bytes] = _files.read_gzip if is_gzip else _files.read_bytes
    try:
        return hashlib.sha256(read(path, max(part.size, 2**10))).hexdigest() == part.sha256
    except FileError:
        return False


def _make_temporary() -> Path:
    with _lock:
        pid = os.getpid()
        if not (directory := _temporary.get(pid)) or not directory.is_dir():
            directory = _temporary[pid] = Path(tempfile.mkdtemp(prefix="jax_bwgemm-"))
            atexit.register(_remove, directory, pid)
        return directory


def _remove(directory: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
