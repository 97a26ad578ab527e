"""`autotune`: which products it finds in a function, and what it times, keeps and says. The clock is a fake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.autotune import products
from jax_bwgemm.bench import candidates, finals
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import measured
from jax_bwgemm.runtime import rungs
from jax_bwgemm.runtime.decision import Decision, decide

H200 = ARCHS["h200"]


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = struct(64, 128), struct(128, 256)
FORWARD = Problem(64, 256, 128)


def matmul(a: Any, b: Any, **settings: Any) -> Any:
    return jax_bwgemm.matmul(a, b, **{"device": "h200", "on_fallback": "error"} | settings)


def found(f: Any, *args: Any, **kwargs: Any) -> set[Problem]:
    problems = products(f, args, kwargs, H200)
    assert len(set(problems)) == len(problems)
    return set(problems)


@pytest.fixture(autouse=True)
def _artifacts(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows it has no kernels of transposed products; the others count as good enough, so that no product but
    the fused one is considered."""
    monkeypatch.setattr(rungs, "CLEARLY", 10.0)


def test_one_product() -> None:
    assert found(matmul, X, W) == {FORWARD}
    assert found(lambda a, *, b: matmul(a, b), X, b=W) == {FORWARD}
    assert found(lambda a, b: matmul(a, b) + matmul(a + 1, b), X, W) == {FORWARD}
    assert found(lambda a, b: a.sum() + b.sum(), X, W) == set()


def test_what_was_lowered_before_is_found_again() -> None:
    jitted = jax.jit(matmul)
    for _ in range(2):
        assert found(jitted, X, W) == found(matmul, X, W) == {FORWARD}


def test_gradients_have_the_majors_of_the_lowering() -> None:
    def loss(a: Any, b: Any) -> Any:
        return matmul(a, b).astype(jnp.float32).sum()

    da = Problem(64, 128, 256, b_major="k")
    db = Problem(128, 256, 64, a_major="m")
    assert found(jax.grad(loss, argnums=(0, 1)), X, W) == {da, db}  # a sum needs no forward product
    assert found(jax.value_and_grad(loss), X, W) == {FORWARD, da}
    assert found(jax.checkpoint(loss), X, W) == {FORWARD}


def test_a_transpose_is_taken_from_before_it() -> None:
    assert found(lambda a, b: matmul(a, b.T), X, struct(256, 128)) == {Problem(64, 256, 128, b_major="k")}


def test_epilogues_and_batches() -> None:
    bias = struct(256)
    fused = Problem(64, 256, 128, epilogue=chain(1.0, True, "relu"))
    assert found(lambda a, b, c: matmul(a, b, bias=c, activation="relu"), X, W, bias) == {fused}
    batched = Problem(64, 256, 128, 3, a_batch=3, b_batch=3)
    assert found(jax.vmap(matmul), struct(3, 64, 128), struct(3, 128, 256)) == {batched}
    assert found(jax.vmap(matmul, in_axes=(0, None)), struct(3, 64, 128), W) == {Problem(192, 256, 128)}


def in_scan(a: Any, w: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (matmul(carry, w), None), a, length=3)[0]


def in_cond(a: Any, w: Any) -> Any:
    return jax.lax.cond(a[0, 0] > 0, lambda: matmul(a, w), lambda: matmul(a, w[:, :64]) @ w[:64])


def in_while(a: Any, w: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: matmul(c, w), a)


def in_custom_vjp(a: Any, w: Any) -> Any:
    @jax.custom_vjp
    def product(a: Any, w: Any) -> Any:
        return matmul(a, w)

    product.defvjp(lambda a, w: (product(a, w), (a, w)), lambda kept, ct: kept)
    return product(a, w)


def in_shard_map(a: Any, w: Any) -> Any:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))(a, w)


@pytest.mark.parametrize(
    ("f", "shapes"),
    [(in_scan, {(64, 128)}), (in_cond, {(64, 128), (64, 64)}), (in_while, {(64, 128)}), (in_custom_vjp, {(64, 128)}),
     (jax.jit(jax.checkpoint(in_scan)), {(64, 128)}), (in_shard_map, {(32, 128)})],
)  # fmt: skip
def test_products_are_found_wherever_they_are(f: Any, shapes: set[tuple[int, int]]) -> None:
    assert {(problem.m, problem.n) for problem in found(f, X, struct(128, 128))} == shapes


def test_a_given_tile_an_emulated_and_another_devices_product_are_left_out() -> None:
    assert found(lambda a, b: matmul(a, b, tile="128x256x64_cta1_cluster2x1"), X, W) == set()
    assert found(lambda a, b: matmul(a, b, device="b200"), X, W) == set()
    assert found(lambda a, b: matmul(a, b, device="h100"), X, W) == set()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Problem]:
    """An H200 whose kernels are the faster the worse the cost model finds them; the list of what it timed."""
    timed: list[Problem] = []

    def clock(problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int) -> list[float]:
        timed.append(problem)
        return [100.0 - i for i in range(len(decisions))]

    monkeypatch.setattr(candidates, "gpu_clock", clock)
    monkeypatch.setattr(finals, "alone", lambda *args: [9.9 if own == finals.XLA else 10.0 for own in args[1]])
    monkeypatch.setattr(candidates, "gpu_arch", lambda who: H200)
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path / "tables"))
    return timed


def test_it_times_once_and_the_planner_follows(gpu: list[Problem]) -> None:
    before = decide(FORWARD, "h200", None).plan
    report = jax_bwgemm.autotune(matmul, X, W)
    after = decide(FORWARD, "h200", None).plan
    assert before is not None and after is not None
    assert gpu == [FORWARD] and (before.source, after.source) == ("model", "measured")
    (product,) = report.timed
    was, now = (f"{plan.tile}{' swapped' * plan.swapped}" for plan in (before, after))
    assert (product.tile, product.modelled_tile) == (now, was)
    assert product.us < product.modelled_us and report.known == report.without_kernel == ()
    text = str(report)
    assert text.startswith(f"1 products timed, 0 known: {measured.user_path('h200')}")
    assert f"us with {product.tile}, {product.modelled_us:.1f} us with {product.modelled_tile}, 9.9 us with XLA" in text
    again = jax_bwgemm.autotune(matmul, X, W)
    assert gpu == [FORWARD] and again.timed == () and again.known == (measured.key(FORWARD),)


def test_a_function_traced_afterwards_runs_the_fastest(gpu: list[Problem]) -> None:
    def hlo() -> str:
        return jax.jit(lambda a, b: matmul(a, b)).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()

    before = hlo()
    (product,) = jax_bwgemm.autotune(matmul, X, W).timed
    assert f"_{product.tile}_identity" in hlo() and f"_{product.tile}_identity" not in before


def test_what_has_no_kernel_is_named(gpu: list[Problem]) -> None:
    x = struct(65, 65, dtype=jnp.int8)  # Hopper has none of an n-major b whose rows must be padded
    report = jax_bwgemm.autotune(lambda a: matmul(a, a, out_dtype=jnp.int32, on_fallback="ignore"), x)
    (name,) = report.without_kernel
    assert gpu == [] and report.timed == () and str(report).endswith(f"  {name}: no kernel at hand")
    assert not report.table.exists()


def test_borrowed_times_do_not_count_as_known(gpu: list[Problem]) -> None:
    jax_bwgemm.autotune(matmul, X, W)
    report = jax_bwgemm.autotune(lambda a, b, c: matmul(a, b, bias=c, activation="relu"), X, W, struct(256))
    assert len(report.timed) == 1 and len(gpu) == 2


def test_without_a_gpu_it_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="`autotune` requires a Hopper or Blackwell GPU, got none: no CUDA device"):
        jax_bwgemm.autotune(matmul, X, W)
