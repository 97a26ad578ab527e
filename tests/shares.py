"""A share of the longest tests, all of which take longer than a change should wait: JAX_BWGEMM_SHARE=7/3 has the second
of three (7 leaves 1), by the tests' names. A pytest plugin."""

from __future__ import annotations

import os
import re
import zlib

import pytest

SWITCH = "JAX_BWGEMM_SHARE"


def share_of(text: str) -> tuple[int, int]:
    """(which, of how many). Raises pytest.UsageError."""
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", text, re.ASCII)
    if match is None:
        raise pytest.UsageError(f"{SWITCH} requires a form like 7/3, the remainder of 7 of 3 shares, got {text!r}")
    turn, count = map(int, match.groups())
    return turn % count, count


def in_share(name: str, share: tuple[int, int]) -> bool:
    which, count = share
    return zlib.crc32(name.encode()) % count == which


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SWITCH not in os.environ:
        return
    share = share_of(os.environ[SWITCH])
    kept = [item for item in items if item.get_closest_marker("long") is None or in_share(item.nodeid, share)]
    others = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = kept
