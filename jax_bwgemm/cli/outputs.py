"""Files that a command writes at its end are tried at its beginning: a wrong path costs nobody minutes of work."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def check_file(path: Path) -> None:
    """OSError unless `path` can be opened for writing; it and what it holds stay as they are. Its directory is made."""
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    if is_new:
        with contextlib.suppress(OSError):
            path.unlink()


def check_directory(path: Path) -> None:
    """OSError unless files can be made in `path`, which is made."""
    check_file(path / f".{os.getpid()}")
