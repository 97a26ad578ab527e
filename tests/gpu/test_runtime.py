"""The handler in its surroundings: command buffers, threads, streams, slices, transformations, wrong devices."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import ffi
from tests.cases import ACTIVATIONS, gate_error

matmul = functools.partial(jax_bwgemm.matmul, on_fallback="error")


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def assert_close(got: jax.Array, expected: jax.Array, relative: float = 0.01) -> None:
    got64, expected64 = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(got64 - expected64) <= relative * np.linalg.norm(expected64)


@pytest.fixture(autouse=True)
def on_a_gpu(arch: Arch) -> None:
    """Every test of this file runs our kernels."""


def test_our_kernel_ran() -> None:
    a, b = normal(0, 256, 256), normal(1, 256, 256)
    before = ffi.execute_count()
    assert_close(jax.jit(matmul)(a, b), jnp.dot(a, b))
    assert ffi.execute_count() == before + 1


@pytest.mark.parametrize(
    "a_shape, b_shape",
    [((256, 128), (128, 64)), ((3, 40, 128), (128, 64)), ((3, 40, 128), (3, 128, 64)), ((40, 128), (3, 128, 64)),
     ((128,), (128, 64)), ((64, 128), (128,)), ((2, 1, 16, 128), (3, 128, 8)), ((5, 128), (128, 8))],
)  # fmt: skip
def test_shapes_of_jnp_matmul(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(0, *a_shape), normal(1, *b_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = jax.jit(jax_bwgemm.matmul)(a, b)
    expected = jnp.matmul(a, b)
    assert got.shape == expected.shape
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_run_our_kernels(dtype: str) -> None:
    a, b, ct = normal(0, 264, 136, dtype=dtype), normal(1, 136, 520, dtype=dtype), normal(2, 264, 520, dtype=dtype)

    def loss(product: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum((product(a, b) * ct).astype(jnp.float32))

    before = ffi.execute_count()
    ours = jax.jit(jax.grad(functools.partial(loss, matmul), (0, 1)))(a, b)
    jax.block_until_ready(ours)
    assert ffi.execute_count() - before == 2  # dA and dB; the product itself is dead code
    for got, expected in zip(ours, jax.grad(functools.partial(loss, jnp.matmul), (0, 1))(a, b), strict=True):
        assert_close(got, expected)


def test_a_gradient_holds_no_transpose_of_an_operand() -> None:
    a, b = normal(0, 512, 256), normal(1, 256, 384)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(matmul(a, b)).astype(jnp.float32))

    text = jax.jit(jax.grad(loss, (0, 1))).lower(a, b).compile().as_text()
    assert text.count("jax_bwgemm_matmul_v2") >= 3
    assert " transpose(" not in text
    assert " copy(" not in text


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_fused_epilogue_and_its_gradient(activation: str) -> None:
    x, w, bias = normal(0, 300, 256), normal(1, 256, 392), normal(2, 392)
    alpha = 0.5 if activation == "relu" else 1.0  # with which there are kernels

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return matmul(x, w, alpha=alpha, bias=bias, activation=activation)

    def peer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        linear = alpha * jnp.dot(x, w, preferred_element_type=jnp.float32) + bias
        return getattr(jax.nn, activation)(linear).astype(x.dtype)

    assert_close(jax.jit(ours)(x, w, bias), peer(x, w, bias))
    gradients = [
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args).astype(jnp.float32) ** 2), (0, 1, 2)))(x, w, bias)
        for f in (ours, peer)
    ]
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, 0.02)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_residual_and_its_gradient(activation: str | None, arch: Arch) -> None:
    """In the kernel: one launch, of no float32 result; under vmap one for all."""
    x, w, bias, r = normal(0, 3, 300, 256), normal(1, 256, 392), normal(2, 392), normal(3, 3, 300, 392)

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array, r: jax.Array) -> jax.Array:
        return matmul(x, w, bias=bias, activation=activation, residual=r)

    def peer(x: jax.Array, w: jax.Array, bias: jax.Array, r: jax.Array) -> jax.Array:
        linear = jnp.matmul(x, w, preferred_element_type=jnp.float32) + bias
        return ((getattr(jax.nn, activation)(linear) if activation else linear) + r).astype(x.dtype)

    mapped = jax.jit(jax.vmap(ours, (0, None, None, 0)))
    kind = "_".join(filter(None, ("bias", activation, "residual")))
    (variant,) = re.findall(r'variant = "(\w+)"', mapped.lower(x, w, bias, r).as_text())
    assert variant.startswith(f"{arch.target}_bf16_bf16_bf16_") and variant.endswith(f"_{kind}")
    assert_close(mapped(x, w, bias, r), peer(x, w, bias, r))
    grads = [
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args).astype(jnp.float32) ** 2), (0, 1, 2, 3)))(x, w, bias, r)
        for f in (ours, peer)
    ]
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, 0.03)


def test_relu_keeps_nan_and_makes_zeros_positive() -> None:
    """Its -0 is a row of zeros, scaled; ptxas makes the maximum and the rounding one instruction."""
    x = normal(0, 64, 64).at[3, 5].set(jnp.nan).at[4].set(0.0)
    out = np.asarray(matmul(x, normal(1, 64, 64), alpha=-1.0, activation="relu"), np.float32)
    assert np.isnan(out[3]).all() and not np.isnan(np.delete(out, 3, 0)).any()
    assert not out[4].any() and not np.signbit(np.delete(out, 3, 0)).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gates_of_any_magnitude(activation: str, dtype: str) -> None:
    """Products of one term, which are exact, from next to nothing to infinity, element by element."""
    rng = np.random.default_rng(0)
    column = rng.standard_normal(4096) * 2.0 ** rng.integers(-12, 12, 4096)
    column[:4] = 60000.0, -60000.0, np.inf, -np.inf
    x = jnp.zeros((4096, 64), dtype).at[:, 17].set(column.astype(dtype))
    w = jnp.zeros((64, 512), dtype).at[17].set(1.0)
    before = ffi.execute_count()
    got = np.asarray(jax.jit(functools.partial(matmul, activation=activation))(x, w), np.float64)
    assert ffi.execute_count() == before + 1
    exact = np.asarray(x[4:, 17], np.float64)[:, None]
    want = ACTIVATIONS[activation](exact)
    ulp, least = (2.0**-8, 0.0) if dtype == "bfloat16" else (2.0**-11, 2.0**-25)
    bound = ulp * np.abs(want) + least + (1 + ulp) * gate_error(exact, activation, dtype)
    print(f"{np.max(np.abs(got[4:] - want) / bound):.3f} of the bound")
    assert (np.abs(got[4:] - want) <= bound).all()
    largest = float(jnp.asarray(60000.0, dtype))
    np.testing.assert_array_equal(got[:4, 0], [largest, 0.0, np.inf, np.nan])


def test_a_command_buffer_captures_the_call() -> None:
    """Eager, traced, then replayed: the third and fourth run execute no handler at all."""
    options = {"xla_gpu_graph_min_graph_size": 1}
    function = jax.jit(matmul, compiler_options=options)
    a, b = normal(0, 512, 512), normal(1, 512, 512)
    counts, expected = [], np.asarray(jnp.dot(a, b), np.float32)
    for _ in range(4):
        before = ffi.execute_count()
        out = jax.block_until_ready(function(a, b))
        counts.append(ffi.execute_count() - before)
        assert_close(out, expected)
        del out  # the same output address again: a moved buffer is traced anew
    assert counts == [1, 1, 0, 0]


def test_eight_threads() -> None:
    function = jax.jit(matmul)
    a, b = normal(0, 384, 512), normal(1, 512, 256)
    expected = np.asarray(function(a, b)).view(np.uint16)

    def many(_: int) -> bool:
        return all(np.array_equal(np.asarray(function(a, b)).view(np.uint16), expected) for _ in range(100))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(8)))


def on_stream(stream: int, function: Any) -> Any:
    """`function` on a stream of its own; `compute_on` became a decorator in jax 0.11."""
    from jax.experimental import compute_on

    kind = f"gpu_stream:{stream}"
    if "out_memory_spaces" in inspect.signature(compute_on.compute_on).parameters:
        return compute_on.compute_on(function, compute_type=kind, out_memory_spaces=jax.memory.Space.Device)

    def wrapped(*args: jax.Array) -> Any:
        with compute_on.compute_on(kind):
            return jax.jit(function)(*args)

    return wrapped


def test_two_streams() -> None:
    """Two products beside each other, each told to take a stream of its own."""
    a, b, c = normal(0, 1024, 1024), normal(1, 1024, 1024), normal(2, 1024, 1024)

    @jax.jit
    def both(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        return on_stream(1, matmul)(a, b), on_stream(2, matmul)(a, c)

    for _ in range(20):
        x, y = both(a, b, c)
        assert_close(x, jnp.dot(a, b))
        assert_close(y, jnp.dot(a, c))


def test_a_scan_over_stacked_weights() -> None:
    x, weights = normal(0, 128, 256), normal(1, 6, 256, 256) * 0.06

    def run(product: Callable[..., jax.Array]) -> jax.Array:
        return jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (product(x, w), None), x, ws)[0])(x, weights)

    assert_close(run(matmul), run(jnp.matmul), 0.03)


def flattened() -> tuple[jax.Array, jax.Array, Any]:
    """x, and weights in a flat array at an offset of 6 bytes: no tensor map can take them where they are."""
    flat, unravel = ravel_pytree({"b": normal(0, 3), "w": normal(1, 256, 128)})
    return normal(2, 64, 256), flat, unravel


def test_flattened_weights() -> None:
    """XLA would hand over the middle of the flat array; the lowering sees the slice and has it copied."""
    x, flat, unravel = flattened()
    assert_close(jax.jit(lambda x, flat: matmul(x, unravel(flat)["w"]))(x, flat), jnp.dot(x, unravel(flat)["w"]))


def test_flattened_weights_behind_a_function() -> None:
    """XLA inlines the call, but the lowering has seen that the function may be handed a slice."""
    x, flat, unravel = flattened()
    inner = jax.jit(lambda x, w: matmul(x, w))
    got = jax.jit(lambda x, flat: inner(x, unravel(flat)["w"]))(x, flat)
    assert_close(got, jnp.dot(x, unravel(flat)["w"]))


def test_a_pointer_that_is_only_element_aligned_is_refused_with_the_remedy() -> None:
    """Of a function that was lowered for a whole array, JAX does not ask again when it is handed a slice."""
    x, flat, unravel = flattened()
    inner = jax.jit(lambda x, w: matmul(x, w))

    def run(wrap: Any) -> jax.Array:
        both = jax.jit(lambda x, w, flat: (inner(x, w), inner(x, wrap(unravel(flat)["w"]))))
        return jax.block_until_ready(both(x, unravel(flat)["w"], flat))[1]

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"16 bytes.*optimization_barrier"):
        run(lambda w: w)
    assert_close(run(jax.lax.optimization_barrier), jnp.dot(x, unravel(flat)["w"]))


def test_a_result_in_the_middle_of_an_array() -> None:
    """At an offset of 6 bytes, where TMA cannot store; and stacked by a scan, where it does so in place."""
    x, w, big = normal(0, 64, 256), normal(1, 256, 128), jnp.zeros(64 * 128 + 8, jnp.bfloat16)
    got = jax.jit(lambda x, w, big: big.at[3 : 3 + 64 * 128].set(matmul(x, w).reshape(-1)))(x, w, big)
    assert_close(got[3:-5].reshape(64, 128), jnp.dot(x, w))
    assert not np.asarray(got[:3], np.float32).any() and not np.asarray(got[-5:], np.float32).any()
    weights = normal(2, 5, 256, 128)
    stacked = jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (x, matmul(x, w)), x, ws)[1])(x, weights)
    assert_close(stacked, jnp.matmul(x, weights))


@pytest.mark.parametrize("shape", [(64, 65, 100), (63, 127, 99), (1, 1, 1), (300, 513, 1001)])
def test_any_pitch(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = normal(0, m, k), normal(1, k, n)
    assert_close(jax.jit(matmul)(a, b), jnp.dot(a, b))


def test_few_rows_are_the_columns_of_the_transpose() -> None:
    a, b = normal(0, 8, 4096), normal(1, 4096, 4096)
    assert "swapped" in str(jax_bwgemm.explain(a, b)) or jax_bwgemm.explain(a, b).plan.swapped
    assert_close(jax.jit(matmul)(a, b), jnp.dot(a, b))


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_sizes(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    got = jax.jit(matmul)(normal(0, m, k), normal(1, k, n))
    assert got.shape == (m, n)
    assert not np.asarray(got, np.float32).any()


@pytest.mark.parametrize("shape", [(65544, 64, 32776), (65544, 32776, 64)], ids=["operand", "result"])
def test_more_than_2_31_elements(shape: tuple[int, int, int]) -> None:
    """Offsets are 64-bit: an operand, or the result, of more elements than an int32 counts."""
    m, n, k = shape
    assert m * max(n, k) > 2**31
    a, b = (
        jax.random.bits(jax.random.key(i), s, jnp.uint8).astype(jnp.bfloat16) for i, s in enumerate([(m, k), (k, n)])
    )
    got = jax.jit(matmul)(a, b)
    for rows in (slice(0, 8), slice(m // 2, m // 2 + 8), slice(m - 8, m)):
        assert_close(got[rows], jnp.dot(a[rows], b))


def test_a_kernel_for_another_gpu_is_refused() -> None:
    a, b = normal(0, 256, 256), normal(1, 256, 256)
    other = "b200" if jax.devices()[0].compute_capability == "9.0" else "h200"
    if jax_bwgemm.explain(a, b, device=other).variant is None:
        pytest.skip(f"no kernel for a {other} is built here, only those for its own GPU")
    with pytest.raises(jax.errors.JaxRuntimeError, match="compute capability"):
        jax.block_until_ready(jax.jit(functools.partial(matmul, device=other))(a, b))
    assert_close(jax.jit(matmul)(a, b), jnp.dot(a, b))  # and the process goes on


def test_vmap_runs_one_kernel() -> None:
    a, b = normal(0, 5, 64, 128), normal(1, 128, 96)
    before = ffi.execute_count()
    got = jax.block_until_ready(jax.jit(jax.vmap(matmul, (0, None)))(a, b))
    assert ffi.execute_count() - before == 1
    assert_close(got, jnp.matmul(a, b))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_one_process_two_devices() -> None:
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    a, b = normal(0, 512, 256), normal(1, 256, 384)
    rows = PartitionSpec("d", None)
    sharded = jax.jit(jax.shard_map(matmul, mesh=mesh, in_specs=(rows, PartitionSpec(None, None)), out_specs=rows))
    for _ in range(10):
        assert_close(sharded(a, b), jnp.dot(a, b))
    second = jax.device_put(a, jax.devices()[1]), jax.device_put(b, jax.devices()[1])
    assert_close(jax.jit(matmul)(*second), jnp.dot(*second))
