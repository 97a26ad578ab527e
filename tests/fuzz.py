"""How much a run tries. JAX_BWGEMM_FUZZ says how many times as much random input as every run has, of other seeds
(`make test-hard`); and with it kernels run under every schedule (`make test-every`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

TIMES = int(os.environ.get("JAX_BWGEMM_FUZZ", "1"))
SEED = 0 if TIMES == 1 else int.from_bytes(os.urandom(4), "little")  # a failure prints what it met

fuzz = pytest.mark.fuzz


def rounds(count: int) -> int:
    """How many there are of a test that has `count` in every run."""
    return count * TIMES


def in_turn(things: Sequence[T], first: int, count: int) -> list[tuple[int, T]]:
    """`count` of them from `first` on, around, each with its place: kernel by kernel others. All where that is asked
    for."""
    kept = range(len(things)) if TIMES > 1 else (i % len(things) for i in range(first, first + count))
    return [(i, things[i]) for i in kept]
