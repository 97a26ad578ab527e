"""Files that may be missing, damaged, too large or somebody else's: read within bounds, written whole, locked.

What cannot be used is a `FileError` with a sentence, of which whoever asks makes a reason. Knows no format of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Stamp = tuple[int, ...]
MOST_XZ_MEMORY_BYTES = 2**27  # that xz may ask for: twice what its strongest preset does


class FileError(ValueError):
    """A file or a directory that cannot be used; the message names it and says why."""


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileError(f"{path} cannot be read: it is no regular file")
            content = file.read(min(status.st_size, most_bytes) + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise FileError(f"{path} requires at most {most_bytes} bytes, got more")
    return content


def _without_waiting(path: str, flags: int) -> int:
    """For who writes a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: Path, most_bytes: int) -> Any:
    """What a file of JSON holds."""
    content = read_bytes(path, most_bytes)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} requires JSON, got {error}") from None


def read_gzip(path: Path, most_bytes: int) -> bytes:
    """What a gzipped file holds, which is at most `most_bytes`, as the file itself is."""
    inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = inflater.decompress(read_bytes(path, most_bytes), most_bytes + 1)
    except zlib.error as error:
        raise FileError(f"{path} requires gzip, got {error}") from None
    if len(content) > most_bytes:
        raise FileError(f"{path} requires at most {most_bytes} bytes inside, got more")
    if not inflater.eof or inflater.unused_data:
        raise FileError(f"{path} requires gzip to its end, got {'more' if inflater.eof else 'less'}")
    return content


def read_xz(path: Path, most_bytes: int, num_bytes: int) -> bytes:
    """What a file of xz holds, which is `num_bytes`; the file itself is at most `most_bytes`."""
    try:
        import lzma  # which some Pythons are built without
    except ImportError as error:
        raise FileError(f"{path} requires a Python with lzma, got {error}: install another build of Python") from None
    try:
        inflater = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_XZ_MEMORY_BYTES)
        content = inflater.decompress(read_bytes(path, most_bytes), num_bytes + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise FileError(f"{path} requires xz, got {error}") from None
    if len(content) != num_bytes or not inflater.eof or inflater.unused_data:
        got = "more" if len(content) > num_bytes or inflater.unused_data else "less"
        raise FileError(f"{path} requires {num_bytes} bytes inside and nothing behind, got {got}")
    return content


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """What changes with a file or a directory; None where there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # there, perhaps, and not for us
        return (error.errno or 0,)
    return status.st_mtime_ns, status.st_ino, status.st_size


def sha256(path: Path, most_bytes: int) -> str:
    """Of a file's content, hashed once for each `stamp`."""
    return _sha256(path, most_bytes, stamp(path))


@functools.lru_cache(maxsize=8192)
def _sha256(path: Path, most_bytes: int, stamp: Stamp | None) -> str:
    return hashlib.sha256(read_bytes(path, most_bytes)).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, and an error, such as a full disk, leaves the old one alone. OSError."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    with contextlib.suppress(FileNotFoundError):
        scratch.unlink()
    try:
        with open(scratch, "xb") as file:  # which follows no link
            file.write(content)
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def is_scratch_of(name: str, names: set[str]) -> bool:
    """Whether a file of this name is what `write_atomically` of one of `names` left in a process that was killed."""
    parts = name.split(".")
    return any(".".join(parts[:-count]) in names and "".join(parts[-count:]).isdecimal() for count in (1, 2))


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock of a file, which it makes but neither empties nor follows if it is a link; the lock ends with the
    process at the latest. `on_wait` is called before waiting for another process. OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def cache_path(*parts: str) -> Path:
    """A place in the user's cache, `~/.cache/jax_bwgemm` or in `XDG_CACHE_HOME`, which need not be there."""
    bases = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    for base in filter(os.path.isabs, bases):
        return Path(base, "jax_bwgemm", *parts)
    raise FileError("a cache requires a home directory, got none: set XDG_CACHE_HOME to an absolute path")


def make_own(directory: Path) -> None:
    """Makes a directory of the user's cache, for the user alone; FileError where another could write there."""
    try:
        cache_path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in _parts(directory):
            part.mkdir(mode=0o700, exist_ok=True)
            check_own(part)
            part.chmod(0o700)
    except OSError as error:
        raise FileError(f"{directory} cannot be made: {error.strerror}") from None


def check_own(directory: Path) -> None:
    """FileError where a directory of the user's cache, or one on the way to it, is another user's or open to others."""
    for part in _parts(directory):
        try:
            link, status = part.lstat(), part.stat()
        except OSError as error:
            raise FileError(f"{part} cannot be read: {error.strerror}") from None
        if {link.st_uid, status.st_uid} != {os.geteuid()} or status.st_mode & 0o022:
            got = f"one of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
            rule = f"a directory of user {os.geteuid()} that nobody else can write to"
            raise FileError(f"{part} requires {rule}, got {got}: remove it, or set XDG_CACHE_HOME")


def _parts(directory: Path) -> list[Path]:
    """The directories from the cache's own down to this one."""
    root = cache_path()
    return [directory, *directory.parents][: len(directory.parts) - len(root.parts) + 1][::-1]
