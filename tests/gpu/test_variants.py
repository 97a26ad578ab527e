"""Every shipped kernel of this GPU's target, forced one by one, on random inputs at edge sizes.

The output buffer is poisoned with NaN (a donated argument that the result takes over), the reference is float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.bench.accuracy import evaluate
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import in_place
from jax_bwgemm.facts.problem import COARSE_DTYPES, DTYPE_BYTES, FP8_DTYPES, Problem
from jax_bwgemm.facts.shipped import BUILT_TILES
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts
from jax_bwgemm.runtime.artifacts import Entry, Manifest
from jax_bwgemm.runtime.decision import target_arch
from tests.cases import GATES, Case, activation_of, gate_error, has
from tests.gpu.forced import all_forced, forced

ARCH = target_arch(None)
# Half a unit in the last place of the output; and what each MMA adds: the tensor cores truncate the partial sum, whose
# largest magnitude is about that of the largest result. The term grows with k: a first one, with sqrt(k) * 2**-18, was
# exceeded by up to 1.17 times on an H200 at k = 592 with float32 results. Of 1-byte floats they keep fewer bits.
HALF_ULP = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 2.0**-23,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int32": 0.0,
}
SUBNORMAL = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}  # half of the smallest one
TF32_BITS = np.uint32(0xFFFFE000)
MMA_K_BYTES, MMA_ROUNDING, FP8_MMA_ROUNDING = 32, 2.0**-22, 2.0**-13


def _entries() -> list[Entry]:
    if not isinstance(ARCH, Arch):
        return []
    manifests = [Manifest.load(d) for d in artifacts.artifact_dirs() if (d / "manifest.json").exists()]
    return [e for manifest in manifests for e in manifest.entries.values() if e.variant.target == ARCH.target]


ALL = _entries()
OF_TWO = [e for e in ALL if not e.variant.tile.symmetric]  # operands; test_gram_on_gpu has those of one
ENTRIES = [e for e in OF_TWO if in_place(e.variant.steps) is not None]  # of `activation(alpha * acc + bias) + residual`
OTHERS = [e for e in OF_TWO if e not in ENTRIES]  # of other expressions, several results, two b


def edge_shapes(variant: Variant) -> list[tuple[int, int, int, int]]:
    """(m, n, k, l): next to nothing, one less and one more than a tile, whole clusters, many k tiles."""
    tile, step = variant.tile, 16 // min(DTYPE_BYTES[variant.a_dtype], DTYPE_BYTES[variant.out_dtype])
    m, n, k = tile.cta_m, tile.out_n, tile.k_tile
    shapes = [
        (step, step, step, 1),
        (m - step, max(n - step, step), k - step, 2),
        (m + step, n + step, k + step, 1),
        (tile.cluster_m * m, tile.cluster_n * n, 3 * k, 1),
        (3 * m + 2 * step, 2 * n + 3 * step, 9 * k + step, 3),
        (5 * m, 7 * n, 2 * k, 2),
    ]
    if variant.store == "tma":
        return shapes
    odd = [(m + 1, n + 1, k + 3, batch) for m, n, k, batch in shapes]  # no pitch is a multiple of 16 bytes
    if not tile.direct:
        return odd
    return [*odd, *((m + 2, n + 2, k + 2, batch) for m, n, k, batch in shapes[1:5]), *shapes[2:5]]  # all of 4; of 16


@pytest.mark.skipif(not ENTRIES, reason="no GPU that has kernels, or no cubins: run `python -m jax_bwgemm build`")
def test_the_manifest_covers_every_tile_of_the_target() -> None:
    assert isinstance(ARCH, Arch)
    tiles = {dataclasses.replace(e.variant.tile, k_tile=64) for e in ALL}
    family = ARCH.family.name
    assert tiles >= {tile for own in BUILT_TILES for tile in own[family]}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_against_float64(entry: Entry) -> None:
    for i, shape in enumerate(edge_shapes(entry.variant)):
        _check(entry, shape, seed=i)


@pytest.mark.parametrize("entry", OTHERS, ids=lambda e: e.name)
def test_expressions_against_float64(entry: Entry) -> None:
    """Every element of every result, within its own rounding and those of what it is made from."""
    for i, shape in enumerate(edge_shapes(entry.variant)):
        _check_expression(entry, shape, seed=i)


def _check_expression(entry: Entry, shape: tuple[int, int, int, int], seed: int) -> None:
    assert isinstance(ARCH, Arch)
    variant, (m, n, k, batch), rng = entry.variant, shape, np.random.default_rng(seed)
    b_batch, epilogue = (batch if seed % 2 else 1), variant.steps
    problem = Problem(
        m, n, k, batch, variant.a_dtype, variant.b_dtype, variant.out_dtype, variant.a_major, variant.b_major,
        batch, b_batch, epilogue, variant.c_major,
    )  # fmt: skip

    def random(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.dtype(dtype))

    a = random((batch, *((m, k) if variant.a_major == "k" else (k, m))), variant.a_dtype)
    stored_b = (b_batch, *((k, n) if variant.b_major == "n" else (n, k)))
    bs = [random(stored_b, variant.b_dtype, k**-0.5) for _ in range(problem.num_bs)]
    extras = [random(x.shape, x.dtype) for x in problem.extras]
    results = jax.jit(all_forced(entry, problem, ARCH))(*map(jnp.asarray, (a, *bs, *extras)))
    left = a.astype(np.float64) if variant.a_major == "k" else a.astype(np.float64).swapaxes(1, 2)
    rights = [b.astype(np.float64) if variant.b_major == "n" else b.astype(np.float64).swapaxes(1, 2) for b in bs]
    known = dict(zip(("acc", "up"), (left @ right for right in rights), strict=False))
    turned = {x.role for x in epilogue.operands if x.place == "mn" and variant.c_major == "m"}
    known |= dict(epilogue.scalars) | {
        x.role: (y.swapaxes(1, 2) if x.role in turned else y).astype(np.float64)
        for x, y in zip(problem.extras, extras, strict=True)
    }
    terms = 1 + sum(np.abs(x) for x in known.values())
    loss = 2.0**-9 if variant.out_dtype in COARSE_DTYPES else 2.0**-12
    for stored, (role, node) in zip(results, epilogue.results, strict=False):
        got = stored if variant.c_major == "n" else stored.swapaxes(1, 2)
        want = evaluate(node, known)
        error = np.abs(np.asarray(got, np.float64) - want) / (
            HALF_ULP[variant.out_dtype] * np.abs(want) + loss * terms**2
        )
        assert error.max() <= 1, f"{role} of {entry.name} at {shape}: {error.max():.3g} of the bound"
    for got, x in zip(results[len(epilogue.results) :], epilogue.reductions, strict=True):
        over, reduced = (1 if x.place == "n" else 2), np.sum if x.reducer == "sum" else np.max
        reach = reduced(np.broadcast_to(loss * terms**2, (batch, m, n)), over)
        want = reduced(np.broadcast_to(evaluate(x.node, known), (batch, m, n)), over)
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= reach).all(), f"{x.role} of {entry.name} at {shape}: {(error / reach).max():.3g} of the bound"


@pytest.mark.parametrize("m", [1, 7, 63, 65, 127, 129, 257])
def test_any_number_of_rows(m: int) -> None:
    """m has no alignment to keep where a is k-major: every row count is a kernel's."""
    entries = [e for e in ENTRIES if (e.variant.a_major, e.variant.c_major) == ("k", "n")]
    for entry in entries[:: max(1, len(entries) // 8)]:
        _check(entry, (m, 144, 208, 1), seed=m)


@pytest.mark.parametrize("k", [16, 200, 1032])
def test_a_residual_of_many_tiles(k: int) -> None:
    """A CTA has several, after main loops of one stage, in which the next residual is hardly there, or of many."""
    for entry in (e for e in ENTRIES if e.variant.moves.matrices):
        _check(entry, (1032, 2056, k, 3), seed=k)


@pytest.mark.parametrize("rest", [*range(1, 9), 15])
def test_any_alignment_of_rows(rest: int) -> None:
    """Where threads store the rows of a result, each begins `rest` elements behind the one before, modulo 16 bytes, and
    ends amid a tile, behind one, or before one is full; a second matrix begins anywhere."""
    for entry in (e for e in ENTRIES if (e.variant.store, e.variant.c_major) == ("threads", "n")):
        tile = entry.variant.tile
        for i, n in enumerate((rest, tile.mma_n - 16 + rest, tile.mma_n + rest, 5 * tile.mma_n // 2 + rest)):
            _check(entry, (tile.cta_m + 37, n, tile.k_tile + 16, 2), seed=i)


@pytest.mark.parametrize("entry", ENTRIES[::12], ids=lambda e: e.name)
def test_results_that_the_cache_lets_go(entry: Entry) -> None:
    """With the policy for stores of a result that does not fit into the L2 cache."""
    _check(entry, (520, 784, 208, 2), 1, c_l2="evict_first")


def _check(entry: Entry, shape: tuple[int, int, int, int], seed: int, **settings: Any) -> None:
    assert isinstance(ARCH, Arch)
    variant, (m, n, k, batch) = entry.variant, shape
    case = Case(
        m, n, k, batch, variant.a_dtype, variant.out_dtype, variant.a_major, variant.b_major,
        batch, batch if seed % 2 else 1, 1.5 if has(variant, "alpha") else 1.0, has(variant, "bias"),
        activation_of(variant), variant.b_dtype, variant.c_major, bool(variant.moves.matrices),
    )  # fmt: skip
    problem = Problem(
        m, n, k, batch, variant.a_dtype, variant.b_dtype, variant.out_dtype, variant.a_major, variant.b_major,
        case.a_batch, case.b_batch, case.epilogue, variant.c_major,
    )  # fmt: skip
    product = forced(entry, problem, ARCH, **settings)

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def poisoned(operands: list[jax.Array], poison: jax.Array) -> jax.Array:
        return product(*operands)

    a, b, bias = case.inputs(seed)
    if variant.a_dtype == "float32":  # rounded to TF32 already, so that the bound is the sums' alone
        a, b = ((x.view(np.uint32) & TF32_BITS).view(np.float32) for x in (a, b))
    residual = case.residual(seed)
    operands = [jnp.asarray(x) for x in (a, b, bias, residual) if x is not None]
    stored = (batch, m, n) if variant.c_major == "n" else (batch, n, m)
    poison = -(2**30) - 1 if variant.out_dtype == "int32" else jnp.nan
    got = np.asarray(poisoned(operands, jnp.full(stored, poison, variant.out_dtype)), np.float64)
    got = got if variant.c_major == "n" else got.swapaxes(1, 2)
    expected = case.reference(a, b, bias, residual)
    per_mma = MMA_K_BYTES // DTYPE_BYTES[variant.a_dtype]
    rounding = FP8_MMA_ROUNDING if variant.a_dtype in FP8_DTYPES else MMA_ROUNDING
    summed, steepest, gate_errors = expected, 1.0, 0.0
    if activation_of(variant) in GATES:
        summed = dataclasses.replace(case, activation=None).reference(a, b, bias)
        steepest, gate_errors = 1.13, gate_error(summed, activation_of(variant), variant.out_dtype)  # gelu's slope
    accumulation = 0.0 if variant.out_dtype == "int32" else -(-k // per_mma) * rounding * np.max(np.abs(summed))
    bound = HALF_ULP[variant.out_dtype] * np.abs(expected) + SUBNORMAL.get(variant.out_dtype, 0.0)
    bound += steepest * accumulation + (1 + HALF_ULP[variant.out_dtype]) * gate_errors
    wrong = np.abs(got - expected) > bound
    share = np.max(np.abs(got - expected) / np.maximum(bound, np.finfo(np.float64).tiny))
    print(f"{share:.3f} of the bound: {entry.name} {shape}")
    assert np.isfinite(got).all() and not wrong.any(), f"{entry.name} {shape}: {np.argwhere(wrong)[:4].tolist()}"


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


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_same_bits_every_time(has_residual: bool, arch: Arch) -> None:
    from jax_bwgemm import matmul

    a, b, r = (jax.random.normal(jax.random.key(i), (1000, 1000), jnp.bfloat16) for i in range(3))
    function = jax.jit(functools.partial(matmul, residual=r if has_residual else None, on_fallback="error"))
    first = np.asarray(function(a, b)).view(np.uint16)
    for _ in range(20):
        assert np.array_equal(np.asarray(function(a, b)).view(np.uint16), first)
