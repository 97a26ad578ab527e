"""Programs that another process runs: what they name, and what that process is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from fake_artifacts import fake_entry
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
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


def test_a_program_over_a_mesh(artifacts_dir: Path) -> None:
    """Is XLA's but for a `shard_map` of all axes: what divides a kernel is a callback into this process."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = P("d"), P()
    x, w = (
        jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=NamedSharding(mesh, s))
        for z, s in zip((X, W), specs, strict=True)
    )
    reason = "an exported program divides no kernel over a mesh, which takes a callback .*: map over all axes with"
    with pytest.warns(jax_bwgemm.FallbackWarning, match=reason):
        program = exported(lambda x, w: jax_bwgemm.matmul(x, w, device="h200"), x, w)
    assert jax_bwgemm.export.kernels(program) == () and "stablehlo.dot_general" in program.mlir_module()
    with jax_bwgemm.config(device="h200", on_fallback="error"), jax_bwgemm.installed():  # without a word
        program = exported(lambda x, w: x @ w, x, w)
    assert jax_bwgemm.export.kernels(program) == () and "stablehlo.dot_general" in program.mlir_module()
    mapped = jax.shard_map(matmul, mesh=mesh, in_specs=specs, out_specs=P("d"))
    assert len(jax_bwgemm.export.kernels(exported(lambda x, w: mapped(x, w), x, w))) == 1


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


@pytest.mark.parametrize(
    "wrong", ["x", "", b"", 0, lambda x: x], ids=["text", "no text", "bytes", "number", "function"]
)
def test_what_is_no_program(wrong: Any) -> None:
    for call in (jax_bwgemm.export.register, jax_bwgemm.export.kernels):
        with pytest.raises(TypeError, match="`exported` requires a `jax.export.Exported` or a .*, got .*; of bytes"):
            call(wrong)
    with pytest.raises(TypeError, match="`exported` requires .*, got NoneType"):
        jax_bwgemm.export.kernels(None)


def test_without_a_library(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_bwgemm.runtime import decision, ffi

    monkeypatch.setattr(decision, "_cuda_devices", lambda: [object()])
    monkeypatch.setattr(ffi, "status", lambda: "the library is gone")
    with pytest.raises(RuntimeError, match="the library is gone"):
        jax_bwgemm.export.register()
