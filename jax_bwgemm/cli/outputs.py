"""Files that a command writes at its end are tried at its beginning: a wrong path costs nobody minutes of work."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_file(path: Path) -> None:
    """OSError unless `path` can be opened for writing; it, what it holds and its directory stay as they are."""
    is_new = not path.exists()
    with _tried(path, path.parent):
        with path.open("ab"):
            pass
        if is_new:
            with contextlib.suppress(OSError):
                path.unlink()


def check_directory(path: Path) -> None:
    """OSError unless files can be made in `path`, which need not be there before, nor is it afterwards."""
    with _tried(path, path):
        tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def _tried(path: Path, directory: Path) -> Iterator[None]:
    """With the directory, of which what was made for it is removed again."""
    new = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        for place in new:
            with contextlib.suppress(OSError):
                place.rmdir()
