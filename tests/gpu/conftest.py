"""These tests need a Hopper or Blackwell GPU, the native library and its cubins; `make gpu-check` runs them."""

from __future__ import annotations

import os

import jax
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes may share the GPU

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime.decision import target_arch

if platforms := jax.config.jax_platforms:  # of JAX_PLATFORMS
    jax.config.update("jax_platforms", f"{platforms},cpu")  # where derivatives in float64 are computed
ARCH = target_arch(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if isinstance(ARCH, Arch):
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=f"no GPU that has kernels: {ARCH}"))


@pytest.fixture(scope="session")
def arch() -> Arch:
    assert isinstance(ARCH, Arch)
    return ARCH
