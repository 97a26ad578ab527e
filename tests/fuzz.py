"""Tests of random input: a few rounds of them in every run, many in `make test-hard`, where JAX_BWGEMM_FUZZ says how
many times as many, of other seeds than everywhere."""

from __future__ import annotations

import os

import pytest

TIMES = int(os.environ.get("JAX_BWGEMM_FUZZ", "1"))
SEED = 0 if TIMES == 1 else int.from_bytes(os.urandom(4), "little")  # a failure prints what it met

fuzz = pytest.mark.fuzz


def rounds(count: int) -> int:
    """How many there are of a test that has `count` in every run."""
    return count * TIMES
