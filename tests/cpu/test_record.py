"""What is said of lowered products: warnings at the user's line, counts, the log, `explain` of a function."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from lowered import BF16, hlo, struct

import jax_bwgemm
from jax_bwgemm.runtime.config import FallbackWarning

X = jnp.ones((8, 16), BF16)


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    jax_bwgemm.stats(reset=True)


def line_of(text: str) -> int:
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return found


def product(x: jax.Array) -> jax.Array:
    return jax_bwgemm.matmul(x, x.T)  # the product


def test_a_fallback_points_at_the_users_line() -> None:
    """Where the product is, not where the function that has it is called or lowered; in a gradient, too."""
    for f in (product, jax.jit(lambda x: product(x)), jax.grad(lambda x: product(x).astype(jnp.float32).sum())):
        jax_bwgemm.runtime.config.forget_reported()
        with pytest.warns(FallbackWarning, match="its kernels need CUDA, got cpu; so it does all others here") as found:
            f(X)
        assert [(x.filename, x.lineno) for x in found] == [(__file__, line_of("the product"))]


def test_what_is_refused_before_tracing_points_there_too() -> None:
    with pytest.warns(FallbackWarning, match="operands require") as found:
        jax_bwgemm.matmul(X.astype("int32"), X.T)  # the refused
    assert [(x.filename, x.lineno) for x in found] == [(__file__, line_of("the refused"))]


def test_a_process_without_cuda_is_told_once() -> None:
    with pytest.warns(FallbackWarning):
        product(X[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product(X[:4])
    assert list(jax_bwgemm.stats().fallbacks.values()) == [1, 1]  # and counted nevertheless


def test_stats(artifacts_dir: Path) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax_bwgemm.matmul(x, w, device="h200", on_fallback="ignore")
        x = jax_bwgemm.matmul(x, w, device="h200", on_fallback="ignore")
        return jax_bwgemm.matmul(x.astype("float32"), w, device="h200", on_fallback="ignore")

    hlo(f, struct(512, 512), struct(512, 512))
    found = jax_bwgemm.stats()
    ((kernel, num),) = found.kernels.items()
    assert kernel.startswith("sm_90a_bf16_bf16_bf16_knn") and num == 2
    ((fallback, num),) = found.fallbacks.items()
    assert "float32*bfloat16->float32" in fallback and "operands require" in fallback and num == 1
    assert str(found).splitlines()[:2] == ["2 kernels lowered", f"     2 {kernel}"]
    assert jax_bwgemm.stats(reset=True) == found
    assert jax_bwgemm.stats() == jax_bwgemm.Stats({}, {})


def test_the_log(artifacts_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="jax_bwgemm"):
        hlo(lambda x: jax_bwgemm.matmul(x, x, device="h200"), struct(512, 512))  # the logged
    (record,) = [record for record in caplog.records if record.name == "jax_bwgemm"]
    where = f"test_record.py:{line_of('the logged')}"
    assert record.getMessage().startswith("512x512x512 bfloat16*bfloat16->bfloat16") and where in record.getMessage()


def test_explain_a_function(repacks_dir: Path) -> None:
    """Each product with its line, its share, and what is moved; XLA's with the reason."""

    def f(x: jax.Array, w: jax.Array, odd: jax.Array) -> jax.Array:
        y = jax_bwgemm.matmul(x, w, on_fallback="error")  # the first
        z = jax_bwgemm.matmul(x, odd)
        return y.astype("float32").sum() + z.sum() + jax_bwgemm.matmul(w, x, alpha=0.5).sum()

    operands = struct(4096, 1024), struct(1024, 4096), struct(1024, 1001)
    found = jax_bwgemm.explain(f, *operands, device="h200")
    assert [product.kernel is None for product in found.products] == [False, False, False]
    assert found.products[1].notes == ("b padded",)
    text = str(found)
    assert text.startswith("products: 3, 3 of them by our kernels, predicted to take ")
    assert all(f"test_record.py:{i}" in text for i in range(line_of("the first"), line_of("the first") + 3))
    shares = [line.split(" us, ")[1].split(" %")[0] for line in text.splitlines()[1:]]
    assert 98 <= sum(map(int, shares)) <= 102


@pytest.mark.parametrize("on_fallback", ["ignore", "error"])
def test_flops_are_those_of_xlas_products(artifacts_dir: Path, on_fallback: str) -> None:
    """Whoever computes them: XLA's cost analysis counts the same of its own, and -1 for a custom call."""
    dtype = "bfloat16" if on_fallback == "error" else "int32"  # which no kernel has
    x, w = struct(4, 512, 256, dtype=dtype), struct(256, 1024, dtype=dtype)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, on_fallback=on_fallback, device="h200")

    found, lowered = jax_bwgemm.explain(f, x, w, device="h200"), jax.jit(f).trace(x, w)
    flops = jax.jit(jnp.matmul).lower(x, w).cost_analysis()["flops"]
    assert found.flops == found.products[0].flops == flops == 2 * 4 * 512 * 256 * 1024
    width = jnp.dtype(dtype).itemsize
    assert found.min_bytes == width * (4 * 512 * 256 + 256 * 1024 + 4 * 512 * 1024)
    assert "(1.074 GFLOP, " in str(found).splitlines()[0]
    assert lowered.lower(lowering_platforms=("cuda",)).cost_analysis()["flops"] == (
        -1 if dtype == "bfloat16" else flops
    )


def test_flops_of_a_gradient_and_of_a_gated_product(artifacts_dir: Path) -> None:
    """Each once: of a gated product that is two, of the two."""
    x, w = struct(512, 256), struct(256, 1024)
    gradient = jax.value_and_grad(lambda x, w: jax_bwgemm.matmul(x, w).astype("float32").sum(), (0, 1))
    assert jax_bwgemm.explain(gradient, x, w, device="h200").flops == 3 * 2 * 512 * 256 * 1024
    gated = jax_bwgemm.explain(jax_bwgemm.gated_matmul, x, w, w, device="h200")
    assert gated.flops == 2 * 2 * 512 * 256 * 1024


def test_explain_of_a_function_raises_no_fallback(artifacts_dir: Path) -> None:
    x = struct(512, 512, dtype="int32")
    (found,) = jax_bwgemm.explain(lambda x: jax_bwgemm.matmul(x, x, on_fallback="error"), x, device="h200").products
    assert found.kernel is None and "operands require" in (found.reason or "")
    assert "XLA's, because operands require" in str(jax_bwgemm.explain(product, x, device="h200"))


def test_what_is_refused_before_tracing_is_explained_each_time() -> None:
    """Of a function that was traced before, too, and with its line."""

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, x, precision="highest")  # the explained

    x = jnp.ones((8, 8))
    with jax_bwgemm.config(device="h200", on_fallback="ignore"):
        inner(x)
    for _ in range(2):
        (found,) = jax_bwgemm.explain(lambda x: inner(x) + 1, x, device="h200").products
        assert found.kernel is None and found.where == f"test_record.py:{line_of('the explained')}"


def test_explain_a_function_under_install(artifacts_dir: Path) -> None:
    def f(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bqhd,bkhd->bhqk", q, k).sum() + (q.reshape(-1, 128) @ k.reshape(-1, 128).T).sum()

    x = struct(4, 256, 8, 128)
    assert jax_bwgemm.explain(f, x, x, device="h200").products == ()
    with jax_bwgemm.installed():
        first, second = jax_bwgemm.explain(f, x, x, device="h200").products
    assert first.kernel is None and "no kernel reads the operands as they lie" in (first.reason or "")
    assert second.kernel is not None and "8192x8192x128" in second.problem


def test_explain_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"of a function requires its arguments and `device` only, got \['tile'\]"):
        jax_bwgemm.explain(product, X, tile="big")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="two arrays, or a function and its arguments, got one array"):
        jax_bwgemm.explain(X)  # type: ignore[call-overload]


@pytest.mark.parametrize("is_installed", [False, True])
def test_profilers_are_told_problem_and_tile(artifacts_dir: Path, is_installed: bool) -> None:
    """Behind the path that JAX gives an operation."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return x @ w if is_installed else jax_bwgemm.matmul(x, w)

    def text() -> str:
        lowered = jax.jit(f).trace(struct(3, 512, 256), struct(256, 1024)).lower(lowering_platforms=("cuda",))
        return lowered.as_text("hlo", debug_info=True)

    with jax_bwgemm.config(device="h200"):
        if is_installed:
            with jax_bwgemm.installed():
                found = text()
        else:
            found = text()
    name = "dot_general" if is_installed else "bwgemm_matmul"
    assert re.search(f'op_name="jit\\(f\\)/layer/{name}/gemm_1536x1024x256_\\d+x\\d+x64_cta1_cluster', found)


@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_checkpoint_policies_know_our_products(name: str, activation: str | None) -> None:
    """Two products forward and four backward; with JAX's policy both would be computed again."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax_bwgemm.matmul(x, w, activation=activation)
        return jnp.sin(jax_bwgemm.matmul(x, w)).astype(jnp.float32).sum()

    def num(policy: object) -> int:
        f = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1))  # type: ignore[arg-type]
        return str(jax.make_jaxpr(f)(X[:, :8], X[:, :8])).count("matmul[")

    ours, jaxs = getattr(jax_bwgemm.checkpoint_policies, name), getattr(jax.checkpoint_policies, name)
    assert num(ours) == 6 < num(jaxs)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_policy_that_offloads_knows_our_products(activation: str | None) -> None:
    def num(policies: Any, *, batch: tuple[int, ...] = ()) -> int:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sin(jax_bwgemm.matmul(x, w, activation=activation)).astype(jnp.float32).sum()

        policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        x = jnp.ones((*batch, 8, 8), BF16)
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=policy), (0, 1)))(x, x)).count("device_put")

    assert num(jax_bwgemm.checkpoint_policies) == 2  # there and back
    assert num(jax_bwgemm.checkpoint_policies, batch=(4,)) == num(jax.checkpoint_policies) == 0


def test_a_policy_without_batches_computes_these_again() -> None:
    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sin(jax_bwgemm.matmul(q, k.mT)).astype(jnp.float32).sum()

    policy = jax_bwgemm.checkpoint_policies.dots_with_no_batch_dims_saveable
    q = jnp.ones((4, 8, 16), BF16)
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(scores, policy=policy), (0, 1)))(q, q)
    assert str(jaxpr).count("matmul[") == 4


def test_an_epilogue_that_is_xlas_is_said_and_counted() -> None:
    """Beside its product, of which it is no second one."""

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(a, b, epilogue=jnp.sin, on_fallback="ignore")  # the sine

    operands = struct(512, 512), struct(512, 512)
    found = jax_bwgemm.explain(f, *operands, device="h200")
    (beside, made) = found.products
    assert (beside.is_beside, beside.kernel, beside.flops) == (True, None, 0)
    assert beside.where.endswith(f":{line_of('the sine')}") and made.kernel is not None
    first, second, _ = str(found).splitlines()
    assert first.startswith("products: 1, 1 of them by our kernels")
    assert "the epilogue sin of a product of bfloat16[512, 512]: XLA's, because `sin` is no operation" in second
    jax.jit(f).trace(*operands)
    (told,) = jax_bwgemm.stats().fallbacks
    assert told.startswith("the epilogue sin of a product") and "`sin` is no operation" in told
