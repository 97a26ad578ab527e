"""In a checkout that has all that tests need, as `make test` makes one, a skipped test hides something: it fails. A
pytest plugin, which the environment switches on."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

SWITCH = "JAX_BWGEMM_COMPLETE"
EXCUSED = (
    r"tests/gpu/",  # a machine of its own
    "thread sanitizer",  # of the compiler and the kernel at hand
    "needs root",
)  # patterns of a test's path or reason


def _checked(report: Any) -> Any:
    """Of a test or a module."""
    why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    is_excused = any(re.search(pattern, text) for pattern in EXCUSED for text in (report.nodeid, why))
    if report.skipped and SWITCH in os.environ and not hasattr(report, "wasxfail") and not is_excused:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: `make test` requires all that tests need, got a skip: {why}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _checked((yield))
