"""`emulate=`: our PTX behind the JAX functions, under jit, grad and vmap; what it refuses and where XLA takes over."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.emulator import Fault
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import attempts, decision, emulated, ffi
from jax_bwgemm.runtime.config import FallbackError, FallbackWarning
from jax_bwgemm.runtime.decision import decide
from tests.cases import BOUNDS, TF32_BOUND, Case, check, check_case, relative_error
from tests.emu.shipped import why_any_missing

PAIR, SINGLE, HOPPER = "256x256x64_cta2_cluster2x1", "128x128x64_cta1_cluster1x1", "128x256x64_cta1_cluster2x1"
WHY_NOT = ffi.status() or why_any_missing("sm_100f", "sm_90a")
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.usefixtures("large_products"),
]

matmul = functools.partial(jax_bwgemm.matmul, emulate="sm_100f", on_fallback="error")


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
    ("target", "tile"), [("sm_100f", PAIR), ("sm_100f", SINGLE), ("sm_90a", "128x256x64_cta1_cluster2x1")]
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


def test_a_stream_k() -> None:
    """One tile in parts, of a plan's number; the workspace is the callback's."""
    a, b = normal(0, 250, 2048), normal(1, 2048, 128)
    tile = "128x128x64_cta1_cluster2x1_streamk"
    f = jax.jit(functools.partial(jax_bwgemm.matmul, tile=tile, emulate="sm_90a", on_fallback="error"))
    with emulated.recorded() as runs:
        out = f(a, b).block_until_ready()
    check(np.asarray(out), f64(a) @ f64(b), "bfloat16")
    (run,) = runs
    assert tile in run.name and len({cta for _, cta in run.counters.tma_load_bytes}) > 2


def test_outside_of_jit_and_planned() -> None:
    """The planner chooses, from those of the record that stands for the target, or of `device`."""
    a, b = normal(0, 72, 64), normal(1, 64, 128)
    (name,) = names(lambda: jax_bwgemm.matmul(a, b, emulate="sm_90a", device="h100", on_fallback="error"))
    (variant,) = names(lambda: matmul(a, b))
    assert name.startswith("sm_90a_bf16_bf16_bf16_") and variant.startswith("sm_100f_bf16_bf16_bf16_knn_")
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


@pytest.fixture
def model_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measured times have no swapped kernel for so little work."""
    monkeypatch.setattr(calibration, "of", lambda arch: None)
    attempts.forget()
    yield
    attempts.forget()


@pytest.mark.parametrize(
    ("target", "dtype", "m"), [("sm_90a", "bfloat16", 5), ("sm_100f", "bfloat16", 16), ("sm_90a", "float32", 72)]
)
def test_a_bias_of_a_swapped_product(target: str, dtype: str, m: int, model_alone: None) -> None:
    """Few rows are an MMA's columns, and Hopper reads a row-major float32 w as its A only: the bias is its rows'."""
    a, b, bias = normal(0, m, 72, dtype=dtype), normal(1, 72, 136, dtype=dtype), normal(2, 136, dtype=dtype)
    f = jax.jit(functools.partial(matmul, activation="relu", emulate=target))
    (name,) = names(lambda: f(a, b, bias=bias))
    assert "_mkm_" in name and name.endswith("_bias_relu")
    case = Case(m, 136, 72, dtype=dtype, out_dtype=dtype, has_bias=True, activation="relu")
    want = case.reference(np.asarray(a)[None], np.asarray(b)[None], np.asarray(bias))[0]
    check_case(np.asarray(f(a, b, bias=bias)), want, case)


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_gate_and_its_gradient(activation: str, target: str) -> None:
    """Fused; differentiated, the kernel returns the gate's argument, which is rounded, as are slope and cotangent."""
    a, b, bias, ct = normal(0, 104, 72), normal(1, 72, 136), normal(2, 136), normal(3, 104, 136)
    f = jax.jit(lambda a, b, bias: matmul(a, b, bias=bias, activation=activation, emulate=target))
    (name,) = names(lambda: f(a, b, bias))
    assert name.endswith(f"_bias_{activation}")
    case = Case(104, 136, 72, has_bias=True, activation=activation)
    stored = np.asarray(a)[None], np.asarray(b)[None], np.asarray(bias)
    check(np.asarray(f(a, b, bias)), case.reference(*stored)[0], "bfloat16")

    def gradients() -> Any:
        return jax.jit(lambda *args: jax.vjp(f, *args)[1](ct))(a, b, bias)

    assert sorted(_majors(name) for name in names(gradients)) == ["kk", "kn", "mn"]
    d_a, d_b, d_bias = gradients()
    slope = f64(ct) * case.slope(*stored)[0]
    check(np.asarray(d_a), slope @ f64(b).T, "bfloat16", 3)
    check(np.asarray(d_b), f64(a).T @ slope, "bfloat16", 3)
    assert relative_error(np.asarray(d_bias), slope.sum(0)) < 0.05  # summed in bfloat16


def _majors(name: str) -> str:
    """The product's, of a kernel that computes it or its transpose."""
    a, b, c = name.split("_")[5]
    return a + b if c == "n" else {"k": "k", "n": "m"}[b] + {"k": "k", "m": "n"}[a]


@pytest.mark.parametrize(
    ("target", "tile"),
    [("sm_100f", SINGLE), ("sm_100f", PAIR), ("sm_90a", SINGLE), ("sm_90a", "128x128x64_cta1_cluster2x1_pingpong")],
)
@pytest.mark.parametrize("steps", ["residual", "bias_relu_residual"])
def test_residual(steps: str, target: str, tile: str) -> None:
    """By TMA, in the kernel; sizes that end inside boxes, and more than one tile."""
    a, b, bias, residual = normal(0, 2, 140, 72), normal(1, 72, 264), normal(2, 264), normal(3, 2, 140, 264)
    is_fused = steps != "residual"
    f = jax.jit(functools.partial(matmul, emulate=target, tile=tile, activation="relu" if is_fused else None))
    with emulated.recorded() as runs:
        out = f(a, b, bias=bias if is_fused else None, residual=residual).block_until_ready()
    (run,) = runs
    assert run.name.endswith(f"_{steps}") and run.counters.tma_load_bytes["r", 0] > 0
    product = f64(a) @ f64(b)
    want = (np.maximum(product + f64(bias), 0.0) if is_fused else product) + f64(residual)
    check(np.asarray(out), want, "bfloat16")


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_residual_under_vmap_and_grad(target: str) -> None:
    """One launch for all; backwards, the products of one without a residual, and the cotangent."""
    a, b, residual = normal(0, 3, 40, 64), normal(1, 64, 72), normal(2, 3, 40, 72)
    f = jax.jit(lambda a, b, r: jax.vmap(lambda a, r: matmul(a, b, residual=r, emulate=target, tile=SINGLE))(a, r))
    (name,) = names(lambda: f(a, b, residual))
    assert name.endswith("_residual")
    check(np.asarray(f(a, b, residual)), f64(a) @ f64(b) + f64(residual), "bfloat16")
    ct = normal(3, 3, 40, 72)
    d_a, d_b, d_r = jax.jit(lambda a, b, r, ct: jax.vjp(f, a, b, r)[1](ct))(a, b, residual, ct)
    np.testing.assert_array_equal(np.asarray(d_r), np.asarray(ct))
    check(np.asarray(d_a), f64(ct) @ f64(b).T, "bfloat16")
    check(np.asarray(d_b), np.einsum("vmk,vmn->kn", f64(a), f64(ct)), "bfloat16")


@pytest.mark.parametrize(("target", "n"), [("sm_90a", 136), ("sm_90a", 133), ("sm_100f", 133)])
def test_an_epilogue_without_a_kernel(target: str, n: int) -> None:
    """The kernel's float32, and one rounding by XLA: none ships with these steps, nor can any where rows are odd."""
    m, k = 80, 72
    a, b, residual = normal(0, m, k), normal(1, k, n), normal(2, m, n)
    f = jax.jit(functools.partial(matmul, emulate=target, activation="relu"))
    *repacks, name = names(lambda: f(a, b, residual=residual))
    majors = ("knn", "mkm")  # as it is, or as its transpose
    assert name.startswith(tuple(f"{target}_bf16_bf16_f32_{own}_" for own in majors)) and "_identity" in name
    assert repacks == [f"{target}_pad_16bit"] * (n % 8 > 0)
    want = np.maximum(f64(a) @ f64(b), 0.0) + f64(residual)
    check(np.asarray(f(a, b, residual=residual)), want, "bfloat16")


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_relu_keeps_nan_and_makes_zeros_positive(target: str) -> None:
    """As jax.nn.relu does: its -0 is a row of zeros, scaled."""
    a, b = normal(0, 64, 64).at[3, 5].set(jnp.nan).at[4].set(0.0), normal(1, 64, 64)
    f = jax.jit(functools.partial(matmul, emulate=target, alpha=-1.0, activation="relu"))
    assert names(lambda: f(a, b))[0].endswith("_scale_relu")
    out = np.asarray(f(a, b), np.float32)
    assert np.isnan(out[3]).all() and not np.isnan(np.delete(out, 3, 0)).any()
    assert not out[4].any() and not np.signbit(np.delete(out, 3, 0)).any()


def test_grad() -> None:
    """Both cotangents run on kernels of their own majors; nothing is transposed."""
    a, b, ct = normal(0, 72, 80), normal(1, 80, 136), normal(2, 72, 136)

    def gradients() -> Any:
        return jax.jit(lambda a, b, ct: jax.vjp(matmul, a, b)[1](ct))(a, b, ct)

    with emulated.recorded() as runs:
        d_a, d_b = jax.block_until_ready(gradients())
    assert sorted(run.name.split("_")[5] for run in runs) == ["kkn", "mnn"]
    check(np.asarray(d_a), f64(ct) @ f64(b).T, "bfloat16")
    check(np.asarray(d_b), f64(a).T @ f64(ct), "bfloat16")


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_is_one_launch(axes: tuple[int | None, int | None]) -> None:
    a, b = (normal(i, *([3] if axis == 0 else []), 40, 40) for i, axis in enumerate(axes))
    f = jax.jit(jax.vmap(functools.partial(matmul, tile=SINGLE), axes))
    assert len(names(lambda: f(a, b))) == 1
    check(np.asarray(f(a, b)), f64(a) @ f64(b), "bfloat16")


@pytest.mark.parametrize("by", ["shard_map", "jit"])
@pytest.mark.parametrize("k", [72, 70])
def test_sharded_operands(by: str, k: int) -> None:
    """Callbacks of several devices at once; a compiled product whose operands XLA must gather first."""
    if len(jax.devices()) < 2:
        pytest.skip("needs several devices: collect tests/cpu too, which asks for 4")
    mesh, rows, whole = jax.make_mesh((2,), ("d",)), jax.P("d"), jax.P()
    a, b = normal(0, 160, k), normal(1, k, 72)
    f: Any = jax.shard_map(matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows) if by == "shard_map" else matmul
    out = jax.jit(f)(jax.device_put(a, jax.NamedSharding(mesh, rows)), b)
    check(np.asarray(out), f64(a) @ f64(b), "bfloat16")


def test_batch_and_float32() -> None:
    a, b = normal(0, 2, 3, 24, 72), normal(1, 3, 72, 40)
    out = matmul(a, b, out_dtype=jnp.float32, tile=PAIR)
    check(np.asarray(out), f64(a) @ f64(b), "float32")


def of_case(case: Case, **kwargs: Any) -> tuple[np.ndarray, np.ndarray, list[emulated.Run]]:
    """The result in the emulator, the float64 reference and what ran."""
    a, b, _ = case.inputs()
    f = jax.jit(functools.partial(matmul, out_dtype=case.out_dtype, **kwargs))
    with emulated.recorded() as runs:
        out = f(a, b).block_until_ready()
    return np.asarray(out), case.reference(a, b, None), runs


@pytest.mark.parametrize(
    "case",
    [
        Case(40, 72, 100, dtype="float32", out_dtype="float32"),
        Case(40, 80, 160, dtype="float8_e4m3fn", b_dtype="float8_e5m2"),
        Case(40, 80, 160, dtype="float8_e4m3fn", out_dtype="float8_e4m3fn"),
        Case(40, 80, 160, dtype="int8", b_dtype="int8", out_dtype="int32"),
        Case(40, 80, 160, dtype="int8", b_dtype="uint8", out_dtype="int32"),
    ],
    ids=str,
)
def test_dtypes(case: Case) -> None:
    out, want, runs = of_case(case)
    assert len(runs) == 1 and runs[0].counters.mmas > 0
    assert out.dtype == case.out_dtype
    check_case(out, want, case)


def test_float8_result_saturates() -> None:
    a, b = jnp.full((16, 64), 20.0, jnp.float8_e4m3fn), jnp.full((64, 32), 20.0, jnp.float8_e4m3fn)
    (name,) = names(lambda: matmul(a, b))
    assert "_e4m3_e4m3_e4m3_" in name
    np.testing.assert_array_equal(f64(matmul(a, b)), np.full((16, 32), 448.0))


@pytest.mark.parametrize("majors", ["kn", "kk", "mn"])
@pytest.mark.parametrize("shape", [(17, 63, 33), (130, 1, 70), (3, 129, 64)], ids=str)
def test_rows_that_tma_cannot_step_over(shape: tuple[int, int, int], majors: str) -> None:
    """Padded operands, and a result that threads store; nothing is computed by XLA."""
    m, n, k = shape
    a, b = normal(0, m, k), normal(1, k, n)
    stored = a.T if majors[0] == "m" else a, b.T if majors[1] == "k" else b
    dims = (((0 if majors[0] == "m" else 1,), (1 if majors[1] == "k" else 0,)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, emulate="sm_100f", on_fallback="error", tile=SINGLE)
    with emulated.recorded() as runs:
        out = jax.jit(lambda x, y: f(x, y, dims))(*stored).block_until_ready()
    check(np.asarray(out), f64(a) @ f64(b), "bfloat16")
    # One column is the row of a product with a^T: its result is contiguous.
    kernels = majors if n > 1 else "k" + {"k": "k", "m": "n"}[majors[0]]
    assert runs[-1].name.split("_")[5] == f"{kernels}n" and runs[-1].name.endswith("_threads")
    contiguous = (k if majors[0] == "k" else m, k if n == 1 or majors[1] == "k" else n)
    assert [made.name for made in runs[:-1]] == ["sm_100f_pad_16bit"] * any(size % 8 for size in contiguous)


@pytest.mark.parametrize("shape", [(8, 264, 136), (5, 136, 70), (64, 128, 64)], ids=str)
def test_swapped_operands(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """C^T = B^T A^T, and the caller sees C."""

    def swapping(problem: Problem, arch: Any, tile: Any, missing: Any, **_: Any) -> Any:
        return plan(problem, arch, tile, missing, [c for c in candidates(problem, arch) if c.swapped])

    m, n, k = shape
    a, b = normal(0, m, k), normal(1, k, n)
    monkeypatch.setattr(decision, "plan", swapping)
    *repacks, name = names(lambda: jax.jit(lambda a, b: matmul(a, b))(a, b))
    assert "_mkm_" in name
    assert repacks == ["sm_100f_pad_16bit"] * ((k % 8 > 0) + (n % 8 > 0))
    check(np.asarray(jax.jit(lambda a, b: matmul(a, b))(a, b)), f64(a) @ f64(b), "bfloat16")


def test_float8_gradients() -> None:
    """The factors are widened to bfloat16; the gradient is rounded from float32."""
    a, b = normal(0, 72, 80, dtype="float8_e4m3fn"), normal(1, 80, 144, dtype="float8_e5m2")
    ct = normal(2, 72, 144)
    with emulated.recorded() as runs:
        f = functools.partial(matmul, out_dtype=jnp.bfloat16)
        d_a, d_b = jax.block_until_ready(jax.jit(lambda a, b, ct: jax.vjp(f, a, b)[1](ct))(a, b, ct))
    assert [run.name.split("_")[2:5] for run in runs] == [["bf16", "bf16", "f32"]] * 2
    check(np.asarray(d_a), f64(ct) @ f64(b).T, "float8_e4m3fn")
    check(np.asarray(d_b), f64(a).T @ f64(ct), "float8_e5m2")


def test_dot_general_takes_majors_as_they_are() -> None:
    a, b = normal(0, 72, 80), normal(1, 40, 72)
    dims = (((0,), (1,)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, emulate="sm_90a", on_fallback="error")
    (name,) = names(lambda: f(a, b))
    assert _majors(name) == "mk"
    check(np.asarray(f(a, b)), f64(a).T @ f64(b).T, "bfloat16")


def test_transposed_operand_is_taken_from_before() -> None:
    a, b = normal(0, 80, 72), normal(1, 40, 72)
    (name,) = names(lambda: jax.jit(lambda a, b: matmul(a, b.T))(a, b))
    assert "_kkn_" in name


def test_config_environment_and_the_keys_of_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function is not reused where another target, or none, is emulated."""
    a, b = normal(0, 16, 64), normal(1, 64, 64)
    f = jax.jit(functools.partial(jax_bwgemm.matmul, on_fallback="ignore"))
    assert names(lambda: f(a, b)) == []
    with jax_bwgemm.config(emulate="sm_90a"):
        (name,) = names(lambda: f(a, b))
        assert name.startswith("sm_90a")
        assert names(lambda: jax_bwgemm.matmul(a, b, emulate="off", on_fallback="ignore")) == []
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_100f")
    (name,) = names(lambda: jax_bwgemm.matmul(a, b, on_fallback="error"))
    assert name.startswith("sm_100f")


def test_bad_values() -> None:
    a, b = normal(0, 16, 64), normal(1, 64, 64)
    with pytest.raises(ValueError, match="`emulate` requires one of off, sm_90a, sm_100f, sm_100a, got 'b200'"):
        matmul(a, b, emulate="b200")
    with pytest.raises(ValueError, match="`emulate` 'sm_100f' requires the `device` b200, b300, got 'h200'"):
        matmul(a, b, device="h200")
    with pytest.raises(ValueError, match="cannot compute .* on h200: `cta_group` requires 1 on sm_90a"):
        matmul(a, b, emulate="sm_90a", tile=PAIR)


def test_fallback_rules_where_no_kernel_fits() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (16, 64), np.int8), rng.integers(-128, 128, (64, 63), np.int8)
    product = functools.partial(matmul, a, b, out_dtype=jnp.int32)
    lacks = "sm_100f has no tensor core instruction for int8"
    with pytest.raises(FallbackError, match=f"XLA computes 16x63x64 .*: {lacks}"):
        product(emulate="sm_100f", device="b300")
    with pytest.warns(FallbackWarning, match=lacks):
        out = product(emulate="sm_100f", device="b300", on_fallback="warn")
    assert np.array_equal(out, a.astype(np.int32) @ b.astype(np.int32))
    x, w = normal(0, 16, 64, dtype="float32"), normal(1, 64, 63, dtype="float32")
    with pytest.raises(FallbackError, match="requires a `precision` below highest"):
        matmul(x, w, precision="highest")
    assert matmul(x[:, :0], w[:0]).shape == (16, 63)


def test_results_of_odd_rows() -> None:
    """Both orders of the operands, in TF32 and float8: threads store what TMA cannot step over."""
    for dtype, out, bound in (("float32", "float32", TF32_BOUND), ("float8_e4m3fn", "bfloat16", BOUNDS["bfloat16"])):
        a, b = (normal(i, *shape, dtype="float32").astype(dtype) for i, shape in enumerate(((72, 80), (80, 131))))
        for x, w in ((a, b), (b.T, a.T)):
            got = matmul(x, w, emulate="sm_90a", out_dtype=out)
            assert relative_error(np.asarray(got), f64(x) @ f64(w)) <= bound


def test_explain() -> None:
    text = str(jax_bwgemm.explain(normal(0, 256, 128), normal(1, 128, 256), emulate="sm_100f"))
    assert "on b200" in text and "in the emulator of sm_100f; on CUDA `emulate` is refused" in text


def test_kernel_of_without_a_kernel() -> None:
    problem = Problem(16, 64, 64, a_dtype="int8", b_dtype="int8", out_dtype="int32", a_major="m")
    with pytest.raises(
        ValueError, match="the emulator requires a kernel for 16x64x64 .*, got none: sm_90a requires a k-major b"
    ):
        emulated.kernel_of(decide(problem, "h200", None, is_emulated=True), problem)


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


def test_the_order_of_a_plan() -> None:
    """It reaches the kernel's parameters, and no bit of the result."""
    problem = Problem(1288, 264, 72)
    decision = decide(problem, "h200", Tile.from_str(HOPPER), is_emulated=True)
    assert decision.plan is not None and decision.entry is not None
    a, b = np.asarray(normal(0, 1, 1288, 72)), np.asarray(normal(1, 1, 72, 264))
    offset = next(leaf.offset for leaf in decision.entry.recipe.params if leaf.source.startswith("int:raster_order"))
    results = []
    for code, order in enumerate(RASTER_ORDERS):
        changed = dataclasses.replace(decision.plan, raster_group=2, raster_order=order)
        kernel = emulated.kernel_of(dataclasses.replace(decision, plan=changed), problem, 2)
        assert kernel.plan.param_block[offset : offset + 4] == struct.pack("<i", code)
        results.append(kernel(a, b)[0])
    np.testing.assert_array_equal(*results)
    check(results[0], f64(a) @ f64(b), "bfloat16")
