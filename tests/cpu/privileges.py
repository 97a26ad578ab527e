"""Directories that this process may not enter, also where the tests run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def forbidden(directory: Path) -> Iterator[None]:
    """Nobody may read or enter `directory` while the block lasts."""
    mode = directory.stat().st_mode
    directory.chmod(0)
    euid = os.geteuid()
    if euid == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(euid)
        directory.chmod(mode)
