"""Every shipped kernel of this GPU's target, forced one by one, on random inputs at edge sizes.

The output buffer is poisoned with NaN (a donated argument that the result takes over), the reference is float64.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm import artifacts
from jax_bwgemm.arch import Arch
from jax_bwgemm.artifacts import Entry, Manifest
from jax_bwgemm.decision import target_arch
from jax_bwgemm.primitive import fused_product
from jax_bwgemm.tile import Tile

ARCH = target_arch(None)
# Half a unit in the last place of the output; and what each MMA of depth 16 adds: the tensor cores truncate the
# partial sum, whose largest magnitude is about that of the largest result. The term grows with k: a first one, with
# sqrt(k) * 2**-18, was exceeded by up to 1.17 times on an H200 at k = 592 with float32 results.
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
MMA_K, MMA_ROUNDING = 16, 2.0**-22


def _entries() -> list[Entry]:
    if not isinstance(ARCH, Arch):
        return []
    manifests = [Manifest.load(d) for d in artifacts.artifact_dirs() if (d / "manifest.json").exists()]
    return [e for manifest in manifests for e in manifest.entries.values() if e.variant.target == ARCH.target]


ENTRIES = _entries()


def edge_shapes(tile: Tile) -> list[tuple[int, int, int, int]]:
    """(m, n, k, l): one element of everything, one less and one more than a tile, whole clusters, many k tiles."""
    m, n, k = tile.cta_m, tile.mma_n, tile.k_tile
    return [
        (8, 8, 8, 1),
        (m - 8, n - 8, k - 8, 2),
        (m + 8, n + 8, k + 8, 1),
        (tile.cluster_m * m, tile.cluster_n * n, 3 * k, 1),
        (3 * m + 40, 2 * n + 24, 9 * k + 16, 3),
        (5 * m, 7 * n, 2 * k, 2),
    ]


@pytest.mark.skipif(not ENTRIES, reason="no GPU that has kernels, or no cubins: run `python -m jax_bwgemm build`")
def test_the_manifest_covers_every_tile_of_the_target() -> None:
    from jax_bwgemm.arch import family
    from jax_bwgemm.tile import SHIPPED_TILES

    assert isinstance(ARCH, Arch)
    assert {e.variant.tile for e in ENTRIES} == set(SHIPPED_TILES[family(ARCH.target)])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_against_float64(entry: Entry) -> None:
    for i, shape in enumerate(edge_shapes(entry.variant.tile)):
        _check(entry, shape, seed=i)


@pytest.mark.parametrize("m", [1, 7, 63, 65, 127, 129, 257])
def test_any_number_of_rows(m: int) -> None:
    """m has no alignment to keep where a is k-major: every row count is a kernel's."""
    entries = [e for e in ENTRIES if e.variant.a_major == "k" and e.variant.epilogue == "identity"]
    for entry in entries[:: max(1, len(entries) // 8)]:
        _check(entry, (m, 136, 200, 1), seed=m)


def _check(entry: Entry, shape: tuple[int, int, int, int], seed: int) -> None:
    variant = entry.variant
    (m, n, k, batch), kind = shape, variant.epilogue.split("_")
    rng = np.random.default_rng(seed)
    shapes = ((batch, m, k), (batch if seed % 2 else 1, k, n), (n,))
    a, b, bias = (rng.standard_normal(s, np.float32) for s in shapes)
    a, b = (jnp.asarray(x).astype(variant.a_dtype) for x in (a, b))
    bias_in = jnp.asarray(bias).astype(variant.out_dtype) if "bias" in kind else None
    alpha = 1.5 if "scale" in kind else 1.0
    expected = alpha * (np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    accumulation = -(-k // MMA_K) * MMA_ROUNDING * np.max(np.abs(expected))
    if bias_in is not None:
        expected = expected + np.asarray(bias_in, np.float64)
    if "relu" in kind:
        expected = np.maximum(expected, 0.0)

    product = functools.partial(
        fused_product,
        a_major=variant.a_major,
        b_major=variant.b_major,
        out_dtype=jnp.dtype(variant.out_dtype),
        alpha=alpha,
        activation="relu" if "relu" in kind else None,
        tile=variant.tile,
        on_fallback="error",
        device=None,
        emulate="off",
    )

    @functools.partial(jax.jit, donate_argnums=3, keep_unused=True)
    def poisoned(a: jax.Array, b: jax.Array, bias: jax.Array | None, poison: jax.Array) -> jax.Array:
        return product(a, b, bias)

    a = a if variant.a_major == "k" else a.swapaxes(1, 2)
    b = b if variant.b_major == "n" else b.swapaxes(1, 2)
    poison = jnp.full((batch, m, n), jnp.nan, variant.out_dtype)
    got = np.asarray(poisoned(a, b, bias_in, poison), np.float64)
    bound = HALF_ULP[variant.out_dtype] * np.abs(expected) + accumulation
    worst = np.max(np.abs(got - expected) / bound)
    print(f"{worst:.3f} of the bound: {entry.name} {shape}")
    assert worst <= 1.0, f"{entry.name} {shape}: {worst:.2f} times the bound"


@dataclasses.dataclass(frozen=True)
class _Tally:
    ours: float
    peer: float


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_as_accurate_as_jnp_dot(dtype: str, arch: Arch) -> None:
    from jax_bwgemm import matmul

    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((1024, 1024), np.float32)).astype(dtype) for _ in range(2))
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)

    def error(x: jax.Array) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64) - expected) / np.linalg.norm(expected))

    tally = _Tally(error(matmul(a, b, on_fallback="error")), error(jnp.dot(a, b)))
    assert tally.ours <= 1.05 * tally.peer


def test_the_same_bits_every_time(arch: Arch) -> None:
    from jax_bwgemm import matmul

    a, b = (jax.random.normal(jax.random.key(i), (1000, 1000), jnp.bfloat16) for i in range(2))
    function = jax.jit(functools.partial(matmul, on_fallback="error"))
    first = np.asarray(function(a, b)).view(np.uint16)
    for _ in range(20):
        assert np.array_equal(np.asarray(function(a, b)).view(np.uint16), first)
