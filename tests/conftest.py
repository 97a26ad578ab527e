"""Fixtures for every machine."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Iterator

import pytest

from jax_bwgemm.planner import candidates, sooner
from jax_bwgemm.runtime import attempts
from jax_bwgemm.runtime.config import forget_reported
from tests.completeness import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks
from tests.shares import pytest_collection_modifyitems  # noqa: F401 - hook

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it of what it runs in the background: tests
    signal.signal(signal.SIGINT, signal.default_int_handler)  # interrupt what they start, which would inherit that


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings and no measured times from outside, no compiling on demand, no decisions of other tests; and every
    test sees its warnings."""
    monkeypatch.delenv("JAX_BWGEMM_ON_FALLBACK", raising=False)
    monkeypatch.delenv("JAX_BWGEMM_DEVICE", raising=False)
    monkeypatch.delenv("JAX_BWGEMM_EMULATE", raising=False)
    monkeypatch.setenv("JAX_BWGEMM_TABLES", os.devnull)  # has no files: no measured times of the user's
    monkeypatch.setenv("JAX_BWGEMM_COMPILE_MISSING", "never")  # a missing kernel is what most tests ask about
    monkeypatch.setattr(sooner, "xla_us", lambda *_: None)  # tests' products are for kernels; test_sooner has it
    forget_reported()
    attempts.forget()  # some tests replace the planner
    yield
    forget_reported()


MOST_BYTES = 2 << 30  # of a worker, which would take 4 GB in the end


@pytest.fixture(autouse=True, scope="module")
def _memory() -> Iterator[None]:
    """What a module has compiled serves the next ones, until it is too much."""
    yield
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    if pages * resource.getpagesize() > MOST_BYTES and (jax := sys.modules.get("jax")):
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
            trim(0)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA may compute without a word."""
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "ignore")


@pytest.fixture
def large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is small to the planner: for tests that want the kernels of large ones without waiting for large ones."""
    monkeypatch.setattr(candidates, "DIRECT_FLOPS", 0.0)
    monkeypatch.setattr(candidates, "DIRECT_TERMS", 0)
