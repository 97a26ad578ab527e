"""Programs that another process runs: what they name, and what that process is told."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from fake_artifacts import fake_entry
from lowered import W, X, matmul, struct

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts

TILE = "128x256x64_cta1_cluster2x1"


def exported(f=lambda a, b: matmul(a, b, tile=TILE), *operands):
    checks = jax_bwgemm.export.disabled_checks()
    return jax.export.export(jax.jit(f), platforms=("cuda",), disabled_checks=checks)(*(operands or (X, W)))


def test_a_program_names_its_kernels(artifacts_dir: Path) -> None:
    variant = Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile.from_str(TILE))
    (kernel,) = jax_bwgemm.export.kernels(exported())
    assert (kernel.name, kernel.cubin_sha256) == (variant.name, fake_entry(variant).cubin_sha256)
    twice = exported(lambda a, b: matmul(matmul(a, b, tile=TILE), b.T, tile=TILE))
    assert len(jax_bwgemm.export.kernels(twice)) == 2  # of two majors
    assert jax_bwgemm.export.kernels(jax.jit(lambda x: x + 1).lower(1.0)) == ()


def test_repacks_are_kernels_too(repacks_dir: Path) -> None:
    names = [kernel.name for kernel in jax_bwgemm.export.kernels(exported(matmul, X, struct(256, 1001)))]
    assert "sm_90a_pad_16bit" in names and len(names) == 2


def test_kernels_at_hand_are_registered(artifacts_dir: Path) -> None:
    jax_bwgemm.export.register(exported())
    jax_bwgemm.export.register()


def test_a_missing_kernel_is_a_sentence(artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported()
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    (kernel,) = jax_bwgemm.export.kernels(program)
    remedy = f"{kernel.name} is in none of {tmp_path}: run python -m jax_bwgemm build --only '{kernel.name}'"
    with pytest.raises(ValueError, match=f"requires the kernels that it names: {re.escape(remedy)}"):
        jax_bwgemm.export.register(program)


def test_a_kernel_of_another_build_is_a_sentence(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported()
    monkeypatch.setattr(artifacts, "sha256_of", lambda name: "0" * 64)
    with pytest.raises(ValueError, match="is here in another build, 000000000000, than the .* export it again"):
        jax_bwgemm.export.register(program)


def test_without_a_library(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_bwgemm.runtime import decision, ffi

    monkeypatch.setattr(decision, "_cuda_devices", lambda: [object()])
    monkeypatch.setattr(ffi, "status", lambda: "the library is gone")
    with pytest.raises(RuntimeError, match="the library is gone"):
        jax_bwgemm.export.register()
