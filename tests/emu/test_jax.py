"""`emulate=`: our PTX behind the JAX functions, under jit, grad and vmap; what it refuses and where XLA takes over."""

from __future__ import annotations

import functools
import gzip
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm import artifacts, emulated, ffi
from jax_bwgemm.config import FallbackError, FallbackWarning
from jax_bwgemm.decision import decide
from jax_bwgemm.emulator import Fault
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant
from tests.cases import check
from tests.emu.shipped import variants, why_missing

PAIR, SINGLE, HOPPER = "256x256x64_cta2_cluster2x1", "128x128x64_cta1_cluster1x1", "128x128x64_cta1_cluster2x1"
WHY_NOT = ffi.status() or next(filter(None, map(why_missing, variants("sm_100a") + variants("sm_90a"))), None)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

matmul = functools.partial(jax_bwgemm.matmul, emulate="sm_100a", on_fallback="error")


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def names(f: Callable[[], Any]) -> list[str]:
    """The kernels that were emulated to compute `f()`."""
    with emulated.recorded() as runs:
        jax.block_until_ready(f())
    return [run.name for run in runs]


@pytest.mark.parametrize(
    ("target", "tile"), [("sm_100a", PAIR), ("sm_100a", SINGLE), ("sm_90a", HOPPER), ("sm_103a", PAIR)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jit(target: str, tile: str, dtype: str) -> None:
    a, b = normal(0, 72, 136, dtype=dtype), normal(1, 136, 264, dtype=dtype)
    f = jax.jit(functools.partial(jax_bwgemm.matmul, tile=tile, emulate=target, on_fallback="error"))
    with emulated.recorded() as runs:
        out = f(a, b).block_until_ready()
    check(np.asarray(out), f64(a) @ f64(b), dtype)
    (run,) = runs
    assert run.name.startswith(target) and tile in run.name and run.counters.mmas > 0


def test_outside_of_jit_and_planned() -> None:
    """The planner chooses, from those of the record that stands for the target, or of `device`."""
    a, b = normal(0, 16, 64), normal(1, 64, 128)
    (name,) = names(lambda: jax_bwgemm.matmul(a, b, emulate="sm_90a", device="h100", on_fallback="error"))
    (variant,) = names(lambda: matmul(a, b))
    assert name.startswith("sm_90a_bf16_bf16_bf16_kn_") and variant.startswith("sm_100a_bf16_bf16_bf16_kn_")
    check(np.asarray(matmul(a, b)), f64(a) @ f64(b), "bfloat16")


def test_a_pair_loads_half_of_b() -> None:
    a, b = normal(0, 256, 128), normal(1, 128, 256)
    loaded = {}
    for tile in (PAIR, "128x256x64_cta1_cluster1x1"):
        with emulated.recorded() as runs:
            matmul(a, b, tile=tile).block_until_ready()
        loaded[tile] = runs[0].counters.tma_load_bytes["b", 0]
    assert 2 * loaded[PAIR] == loaded["128x256x64_cta1_cluster1x1"] == 128 * 256 * 2


def test_epilogue() -> None:
    a, b, bias = normal(0, 40, 72), normal(1, 72, 136), normal(2, 136)
    f = jax.jit(functools.partial(matmul, tile=PAIR, alpha=-0.5, activation="relu"))
    (name,) = names(lambda: f(a, b, bias=bias))
    assert name.endswith("_scale_bias_relu")
    want = np.maximum(-0.5 * (f64(a) @ f64(b)) + f64(bias), 0.0)
    check(np.asarray(f(a, b, bias=bias)), want, "bfloat16")


def test_grad() -> None:
    """Both cotangents run on kernels of their own majors; nothing is transposed."""
    a, b, ct = normal(0, 64, 72), normal(1, 72, 136), normal(2, 64, 136)

    def gradients() -> Any:
        return jax.jit(lambda a, b, ct: jax.vjp(matmul, a, b)[1](ct))(a, b, ct)

    with emulated.recorded() as runs:
        d_a, d_b = jax.block_until_ready(gradients())
    assert sorted(run.name.split("_")[5] for run in runs) == ["kk", "mn"]
    check(np.asarray(d_a), f64(ct) @ f64(b).T, "bfloat16")
    check(np.asarray(d_b), f64(a).T @ f64(ct), "bfloat16")


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_is_one_launch(axes: tuple[int | None, int | None]) -> None:
    a, b = (normal(i, *([3] if axis == 0 else []), 40, 40) for i, axis in enumerate(axes))
    f = jax.jit(jax.vmap(functools.partial(matmul, tile=SINGLE), axes))
    assert len(names(lambda: f(a, b))) == 1
    check(np.asarray(f(a, b)), f64(a) @ f64(b), "bfloat16")


@pytest.mark.parametrize("by", ["shard_map", "jit"])
def test_sharded_operands(by: str) -> None:
    """Callbacks of several devices at once; a compiled product whose operands XLA must gather first."""
    if len(jax.devices()) < 2:
        pytest.skip("needs several devices: collect tests/cpu too, which asks for 4")
    mesh, rows, whole = jax.make_mesh((2,), ("d",)), jax.P("d"), jax.P()
    a, b = normal(0, 64, 72), normal(1, 72, 40)
    f: Any = jax.shard_map(matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows) if by == "shard_map" else matmul
    out = jax.jit(f)(jax.device_put(a, jax.NamedSharding(mesh, rows)), b)
    check(np.asarray(out), f64(a) @ f64(b), "bfloat16")


def test_batch_and_float32() -> None:
    a, b = normal(0, 2, 3, 24, 72), normal(1, 3, 72, 40)
    out = matmul(a, b, out_dtype=jnp.float32, tile=PAIR)
    check(np.asarray(out), f64(a) @ f64(b), "float32")


def test_dot_general_takes_majors_as_they_are() -> None:
    a, b = normal(0, 72, 24), normal(1, 40, 72)
    dims = (((0,), (1,)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, emulate="sm_90a", on_fallback="error")
    (name,) = names(lambda: f(a, b))
    assert "_mk_" in name
    check(np.asarray(f(a, b)), f64(a).T @ f64(b).T, "bfloat16")


def test_transposed_operand_is_taken_from_before() -> None:
    a, b = normal(0, 24, 72), normal(1, 40, 72)
    (name,) = names(lambda: jax.jit(lambda a, b: matmul(a, b.T))(a, b))
    assert "_kk_" in name


def test_config_environment_and_the_keys_of_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function is not reused where another target, or none, is emulated."""
    a, b = normal(0, 16, 64), normal(1, 64, 64)
    f = jax.jit(functools.partial(jax_bwgemm.matmul, on_fallback="ignore"))
    assert names(lambda: f(a, b)) == []
    with jax_bwgemm.config(emulate="sm_90a"):
        (name,) = names(lambda: f(a, b))
        assert name.startswith("sm_90a")
        assert names(lambda: jax_bwgemm.matmul(a, b, emulate="off", on_fallback="ignore")) == []
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_100a")
    (name,) = names(lambda: jax_bwgemm.matmul(a, b, on_fallback="error"))
    assert name.startswith("sm_100a")


def test_bad_values() -> None:
    a, b = normal(0, 16, 64), normal(1, 64, 64)
    with pytest.raises(ValueError, match="`emulate` requires one of off, sm_90a, sm_100a, sm_103a, got 'b200'"):
        matmul(a, b, emulate="b200")
    with pytest.raises(ValueError, match="`emulate` 'sm_100a' requires the `device` b200, got 'h200'"):
        matmul(a, b, device="h200")
    with pytest.raises(ValueError, match="cannot compute .* on h200: `cta_group` requires 1 on sm_90a"):
        matmul(a, b, emulate="sm_90a", tile=PAIR)


def test_fallback_rules_where_no_kernel_fits() -> None:
    a, b = normal(0, 16, 64), normal(1, 64, 63)
    with pytest.raises(FallbackError, match="XLA computes 16x63x64 .*: TMA requires a row pitch"):
        matmul(a, b)
    with pytest.warns(FallbackWarning, match="TMA requires a row pitch"):
        out = matmul(a, b, on_fallback="warn")
    check(np.asarray(out), f64(a) @ f64(b), "bfloat16")
    assert matmul(a[:, :0], b[:0]).shape == (16, 63)


def test_explain() -> None:
    text = str(jax_bwgemm.explain(normal(0, 256, 128), normal(1, 128, 256), emulate="sm_100a"))
    assert "on b200" in text and "in the emulator of sm_100a; on CUDA `emulate` is refused" in text


PAIR_VARIANT = Variant("sm_100a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile.from_str(PAIR))


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """What was compiled before does not look for files again."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def own_artifacts(compiles_anew: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory with one kernel, a pair's; returns its PTX."""
    entry, ptx = artifacts.find(PAIR_VARIANT), artifacts.find_ptx(PAIR_VARIANT)
    assert not isinstance(entry, str) and not isinstance(ptx, str)
    artifacts.write_manifest(tmp_path, [entry])
    for suffix in (".cubin", ".ptx.gz"):
        shutil.copy(ptx.with_name(entry.name + suffix), tmp_path)
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    return tmp_path / ptx.name


def test_missing_ptx_falls_back(own_artifacts: pathlib.Path) -> None:
    own_artifacts.unlink()
    with pytest.raises(FallbackError, match="ptx.gz is missing; run `python -m jax_bwgemm build`"):
        matmul(normal(0, 16, 64), normal(1, 64, 64), tile=PAIR)


def test_missing_library_falls_back(
    compiles_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(FallbackError, match="requires libjax_bwgemm_ffi.so, got none at"):
        matmul(normal(0, 16, 64), normal(1, 64, 64))


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"no ptx"), gzip.compress(b"\xff")], ids=["gzip", "ptx", "text"]
)
def test_damaged_ptx_is_named(own_artifacts: pathlib.Path, content: bytes) -> None:
    own_artifacts.write_bytes(content)
    with pytest.raises(ValueError, match="ptx.gz requires PTX that the emulator can read, got .*; run `python"):
        matmul(normal(0, 16, 64), normal(1, 64, 64))


def test_a_broken_kernel_is_reported_through_jit(own_artifacts: pathlib.Path) -> None:
    """The emulator's report reaches the caller of a compiled function."""
    text = gzip.decompress(own_artifacts.read_bytes()).decode()
    own_artifacts.write_bytes(gzip.compress(text.replace("fence.proxy.async", "// fence.proxy.async").encode()))
    with pytest.raises(Exception, match=r"(?s)missing-proxy-fence.*CTA \d+ warp \d+, PTX line \d+"):
        jax.jit(matmul)(normal(0, 16, 64), normal(1, 64, 64)).block_until_ready()


def test_kernel_of_without_a_kernel() -> None:
    problem = Problem(16, 63, 64)
    with pytest.raises(ValueError, match="the emulator requires a kernel for 16x63x64 .*, got none: TMA requires"):
        emulated.kernel_of(decide(problem, "b200", None, is_emulated=True), problem)


def test_number_of_clusters() -> None:
    """One cluster walks every tile; the result does not depend on it."""
    problem = Problem(520, 264, 72)
    decision = decide(problem, "b200", Tile.from_str(PAIR), is_emulated=True)
    a, b = np.asarray(normal(0, 1, 520, 72)), np.asarray(normal(1, 1, 72, 264))
    one, all_ = (emulated.kernel_of(decision, problem, clusters) for clusters in (1, None))
    assert tuple(one.plan.grid) == (2, 1, 1) and tuple(all_.plan.grid) == (2, 1, 6)
    np.testing.assert_array_equal(one(a, b), all_(a, b))
    with pytest.raises(Fault, match="instruction-budget"):
        one.run(a, b, max_instructions=100)
