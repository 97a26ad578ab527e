"""Files that a command writes at its end, tried at its beginning: nobody measures for minutes to hear of a wrong path."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def check_file(path: Path) -> None:
    """OSError unless `path` can be opened for writing; it and what it holds stay as they are. Its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        with contextlib.suppress(OSError):
            path.unlink()


def check_directory(path: Path) -> None:
    """OSError unless files can be made in `path`, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    check_file(path / f".{os.getpid()}")
