"""Fixtures for machines without a GPU."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator

import jax
import pytest
from fake_artifacts import catalogue, layers, repacks, write_fake_artifacts
from fake_machine import fake_driver, machine  # noqa: F401 - fixtures

from jax_bwgemm import config
from jax_bwgemm.facts.tile import FEW
from jax_bwgemm.planner.candidates import SWAPPED_ROWS
from jax_bwgemm.runtime.artifacts import Entry

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; takes effect when the backend starts


@pytest.fixture(scope="session")
def _catalogue_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("artifacts")
    write_fake_artifacts(directory, catalogue())
    return directory


@pytest.fixture
def artifacts_dir(_catalogue_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A catalogue whose kernels can be planned and lowered for, but not launched. It has no repacks. Products of more
    than few rows are computed as they are: `swapped_rows` is for those that are not."""
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(_catalogue_dir))
    monkeypatch.setattr("jax_bwgemm.planner.candidates.SWAPPED_ROWS", FEW)
    return _catalogue_dir


@pytest.fixture
def swapped_rows(artifacts_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax_bwgemm.planner.candidates.SWAPPED_ROWS", SWAPPED_ROWS)


@pytest.fixture
def repacks_dir(artifacts_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The repacks beside that catalogue."""
    write_fake_artifacts(tmp_path, repacks())
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", f"{artifacts_dir}{os.pathsep}{tmp_path}")
    return tmp_path


@pytest.fixture
def layers_on_h200(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planned for an H200 whose kernels are those of dense layers, by a fallback that would raise."""
    write_fake_artifacts(tmp_path, layers())
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    with config(device="h200", on_fallback="error"):
        yield


@pytest.fixture
def no_artifacts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def have(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the only kernels that there are."""

    def write(*entries: Entry) -> None:
        write_fake_artifacts(tmp_path, entries)
        monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))

    return write
