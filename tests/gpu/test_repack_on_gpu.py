"""The repack kernels on the GPU, byte by byte against NumPy; and the products that need them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.repack import ELEMENT_BYTES, KINDS, Repack
from jax_bwgemm.ops.repacking import attributes
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.decision import target_arch

ARCH = target_arch(None)
TARGET = ARCH.target if isinstance(ARCH, Arch) else "sm_90a"
ALL = [Repack(TARGET, kind, size) for kind, size in itertools.product(KINDS, ELEMENT_BYTES)]
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}
SIZES = (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000)
SHAPES = [(1 + i % 3, rows, SIZES[(4 * i + 1) % len(SIZES)]) for i, rows in enumerate(SIZES)]
SHAPES += [(1, 4095, 4093), (2, 3, 50257), (1, 50257, 3), (70000, 1, 1), (3, 1021, 1031)]

matmul = functools.partial(jax_bwgemm.matmul, on_fallback="error")


@pytest.fixture(autouse=True)
def on_a_gpu(arch: Arch) -> None:
    """Every test of this file runs our kernels."""
    ffi.register(artifacts.launch_dirs())


def expected(repack: Repack, source: np.ndarray, step_bytes: int) -> np.ndarray:
    """With zeros to the next multiple of `step_bytes`."""
    moved = source if repack.kind == "pad" else source.swapaxes(1, 2)
    return np.pad(moved, ((0, 0), (0, 0), (0, -moved.shape[2] % (step_bytes // repack.element_bytes))))


@pytest.mark.parametrize("repack", ALL, ids=lambda repack: repack.name)
def test_against_numpy(repack: Repack) -> None:
    """From the middle of a larger array, which XLA hands over as it is; into a result that held other bytes."""
    entry = artifacts.ready(repack)
    assert not isinstance(entry, str), entry
    unsigned = f"uint{8 * repack.element_bytes}"  # bytes that no conversion of a NaN changes
    for i, shape in enumerate(SHAPES):
        start, rng = i % (16 // repack.element_bytes), np.random.default_rng(i)
        flat = rng.integers(0, 256, (start + int(np.prod(shape)) + 3) * repack.element_bytes, np.uint8).view(unsigned)
        source = flat[start : start + int(np.prod(shape))].reshape(shape)
        want = expected(repack, source, 128 if i % 2 else 16)
        result = jax.ShapeDtypeStruct(want.shape, jnp.dtype(DTYPES[repack.element_bytes]))
        call = jax.ffi.ffi_call(ffi.REPACK_NAME, result)

        @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
        def repacked(
            flat: jax.Array, poison: jax.Array, call=call, shape=shape, start=start, result=result
        ) -> jax.Array:
            flat = jax.lax.bitcast_convert_type(flat, result.dtype)
            source = flat[start : start + int(np.prod(shape))].reshape(shape)
            return call(source, **ffi.as_hlo(attributes(entry, [result.shape], False)))

        poison = jnp.full(result.shape, 0x5A, result.dtype)
        got = np.asarray(repacked(jnp.asarray(flat), poison)).view(unsigned)
        np.testing.assert_array_equal(got, want, f"{repack.name} {shape} from element {start} to {want.shape}")


@pytest.mark.parametrize("size", ELEMENT_BYTES)
def test_two_sources(size: int) -> None:
    """Of any sizes, in one launch."""
    entry, rng = artifacts.ready(Repack(TARGET, "pad", size)), np.random.default_rng(size)
    assert not isinstance(entry, str), entry
    for pair in zip(SHAPES, SHAPES[::-1], strict=True):
        sources = [rng.integers(0, 256, (*shape, size), np.uint8).view(f"uint{8 * size}")[..., 0] for shape in pair]
        want = [expected(entry.repack, source, step) for source, step in zip(sources, (16, 128), strict=True)]
        dtype = jnp.dtype(DTYPES[size])  # which kernels take
        results = [jax.ShapeDtypeStruct(x.shape, dtype) for x in want]
        said = ffi.as_hlo(attributes(entry, [x.shape for x in want], False))
        got = jax.ffi.ffi_call(ffi.REPACK_NAME, results)(*(jnp.asarray(x.view(dtype)) for x in sources), **said)
        for out, own in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(out).view(own.dtype), own, str(pair))


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_than_an_int32_counts(kind: str) -> None:
    """Against XLA's own pad and transpose, on the device."""
    repack, shape = Repack(TARGET, kind, 1), (1, 50_000, 50_001)
    entry = artifacts.ready(repack)
    assert not isinstance(entry, str), entry
    rows = jax.random.bits(jax.random.key(0), (1, shape[1], 1), jnp.uint8)
    cols = jax.random.bits(jax.random.key(1), (1, 1, shape[2]), jnp.uint8)
    source = rows ^ cols  # to make random bits of the whole shape takes 10 GB: too many beside other test processes
    moved = source if kind == "pad" else source.mT
    want = jnp.pad(moved, ((0, 0), (0, 0), (0, -moved.shape[2] % 128)))
    call = jax.ffi.ffi_call(ffi.REPACK_NAME, jax.ShapeDtypeStruct(want.shape, jnp.uint8))
    assert jnp.array_equal(call(source, **ffi.as_hlo(attributes(entry, [want.shape], False))), want)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def relative_error(got: jax.Array, a: jax.Array, b: jax.Array) -> float:
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("m, n, k", [(67, 71, 9), (127, 129, 131), (1023, 1021, 1019), (4095, 65, 33)])
@pytest.mark.usefixtures("large_products")  # direct kernels take small ones as they are, as those of few rows
def test_a_product_of_odd_sizes(m: int, n: int, k: int) -> None:
    a, b = normal(0, m, k), normal(1, k, n)
    before = ffi.execute_count()
    out = jax.block_until_ready(jax.jit(matmul)(a, b))
    assert ffi.execute_count() - before == 2  # one launch repacks both operands
    assert relative_error(out, a, b) < 4e-3


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2")])
@pytest.mark.parametrize(("n", "k"), [(1040, 1024), (1040, 1000), (1041, 1024), (1041, 1000)])
def test_a_float8_product_with_n_major_b(dtypes: tuple[str, str], n: int, k: int) -> None:
    """Only what must be padded is repacked; Hopper's b is transposed on the way then."""
    a, b = normal(0, 512, k, dtype=dtypes[0]), normal(1, k, n, dtype=dtypes[1])
    before = ffi.execute_count()
    out = jax.block_until_ready(jax.jit(functools.partial(matmul, out_dtype=jnp.bfloat16))(a, b))
    assert ffi.execute_count() - before == 1 + int(k % 16 > 0) + int(n % 16 > 0)
    assert relative_error(out, a, b) < 1e-2


def test_a_float8_product_of_which_none_is_k_major() -> None:
    """Hopper transposes the smaller operand."""
    assert isinstance(ARCH, Arch)
    options = {"preferred_element_type": jnp.bfloat16, "on_fallback": "error"}
    for m, n in ((512, 1040), (1040, 512)):
        a, b = normal(0, 1024, m, dtype="float8_e4m3fn"), normal(1, 1024, n, dtype="float8_e4m3fn")
        product = functools.partial(jax_bwgemm.dot_general, dimension_numbers=(((0,), (0,)), ((), ())), **options)
        before = ffi.execute_count()
        out = jax.block_until_ready(jax.jit(product)(a, b))
        assert ffi.execute_count() - before == 1 + int(ARCH.family.name == "hopper")
        assert relative_error(out, a.T, b) < 1e-2


def test_int8_of_any_major_is_exact() -> None:
    rng = np.random.default_rng(0)
    for m, n, k in ((300, 516, 777), (300, 528, 777), (8, 528, 784), (4097, 2064, 1040)):
        a, b = (jnp.asarray(rng.integers(-128, 128, shape, np.int8)) for shape in ((m, k), (k, n)))
        out = jax.jit(functools.partial(matmul, out_dtype=jnp.int32))(a, b)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(a, np.int64) @ np.asarray(b, np.int64))


@pytest.mark.usefixtures("large_products")
def test_a_chain_that_overlaps() -> None:
    """Each product starts while the one before may still run: a repack must wait for what it reads."""
    x, w = normal(0, 129, 129), normal(1, 129, 129) / 129**0.5

    def chain(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(20):
            x = product(x, w)
        return x

    got, want = (np.asarray(jax.jit(chain, static_argnums=0)(f, x, w), np.float64) for f in (matmul, jnp.matmul))
    assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want)
    again = [np.asarray(jax.jit(chain, static_argnums=0)(matmul, x, w)).view(np.uint16) for _ in range(10)]
    assert all(np.array_equal(again[0], other) for other in again)


@pytest.mark.usefixtures("large_products")
def test_a_command_buffer_captures_repacks() -> None:
    """Eager, traced, then replayed: the third and fourth run execute no handler at all."""
    function = jax.jit(matmul, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    a, b = normal(0, 512, 250), normal(1, 250, 512)
    counts = []
    for _ in range(4):
        before = ffi.execute_count()
        out = jax.block_until_ready(function(a, b))
        counts.append(ffi.execute_count() - before)
        assert relative_error(out, a, b) < 4e-3
        del out  # the same output address again: a moved buffer is traced anew
    assert counts == [2, 2, 0, 0]


@pytest.mark.usefixtures("large_products")
def test_gradients_of_odd_sizes() -> None:
    a, b, ct = normal(0, 65, 33), normal(1, 33, 127), normal(2, 65, 127)
    d_a, d_b = jax.jit(lambda a, b, ct: jax.vjp(matmul, a, b)[1](ct))(a, b, ct)
    assert relative_error(d_a, ct, b.T) < 4e-3
    assert relative_error(d_b, a.T, ct) < 4e-3
