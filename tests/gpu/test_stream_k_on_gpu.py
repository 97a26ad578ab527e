"""Hopper's stream-K on a GPU: forced streams, the same bits launch after launch, workspaces that meet."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import ACC
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner.streams import Stream
from jax_bwgemm.runtime.artifacts import Entry
from tests.cases import Case, activation_of, check_case, has
from tests.gpu.forced import forced
from tests.gpu.test_variants import ENTRIES

STREAMED = [entry for entry in ENTRIES if entry.variant.tile.stream_k]
PLAIN = [e for e in STREAMED if (e.variant.a_dtype, e.variant.epilogue, e.variant.store) == ("bfloat16", ACC, "tma")]
pytestmark = pytest.mark.skipif(not STREAMED, reason="no kernel of this GPU's target shares tiles")


def case_of(entry: Entry, tiles_m: int, tiles_n: int, k_tiles: int, batch: int = 1) -> Case:
    variant, tile = entry.variant, entry.variant.tile
    step = 16 // min(DTYPE_BYTES[variant.a_dtype], DTYPE_BYTES[variant.out_dtype]) - (variant.store == "threads")
    n = tiles_n * tile.cluster_n * tile.mma_n
    return Case(
        tiles_m * tile.cluster_m * tile.cta_m - step, n - step if n > step else n, k_tiles * tile.k_tile - step, batch,
        variant.a_dtype, variant.out_dtype, variant.a_major, variant.b_major,
        batch, 1, 1.5 if has(variant, "alpha") else 1.0, has(variant, "bias"),
        activation_of(variant), variant.b_dtype, variant.c_major, bool(variant.moves.matrices),
    )  # fmt: skip


def problem_of(case: Case) -> Problem:
    return Problem(
        case.m, case.n, case.k, case.batch, case.dtype, case.b_dtype or case.dtype, case.out_dtype, case.a_major,
        case.b_major, case.a_batch, case.b_batch, case.epilogue, case.c_major,
    )  # fmt: skip


@pytest.mark.parametrize("entry", STREAMED, ids=lambda e: e.name)
def test_any_stream(entry: Entry, arch: Arch) -> None:
    """Fewer tiles than clusters, and more; equal parts and shares across tiles; more clusters than there are, or than
    there are k tiles."""
    clusters = arch.max_clusters(entry.variant.tile.cluster_ctas)
    forms = (
        (1, 1, 24, Stream(1, 2)),
        (1, 3, 24, Stream(3, 20)),
        (2, 2, 5, Stream(4, clusters)),
        (1, 2, 40, Stream(2, 300)),
        (1, clusters + 2, 12, Stream(2, 12)),
        (1, clusters + 2, 12, Stream(clusters + 2, clusters)),
        (1, 2 * clusters + 5, 3, Stream(clusters + 5, clusters)),
    )
    for seed, (tiles_m, tiles_n, k_tiles, stream) in enumerate(forms):
        case = case_of(entry, tiles_m, tiles_n, k_tiles)
        operands = *case.inputs(seed), case.residual(seed)
        product = jax.jit(forced(entry, problem_of(case), arch, stream=stream))
        got = np.asarray(product(*(jnp.asarray(x) for x in operands if x is not None)))
        check_case(got if case.c_major == "n" else got.swapaxes(1, 2), case.reference(*operands), case)


@pytest.mark.parametrize("entry", PLAIN, ids=lambda e: e.name)
def test_the_same_bits_every_time(entry: Entry, arch: Arch) -> None:
    """Also between other products, whose workspaces take turns in the same memory, and in a loop on the device."""
    case, other = case_of(entry, 1, 3, 48), case_of(entry, 2, 1, 33)
    a, b = map(jnp.asarray, case.inputs(1)[:2])
    x, y = map(jnp.asarray, other.inputs(2)[:2])
    product = forced(entry, problem_of(case), arch, stream=Stream(3, 17))
    between = forced(entry, problem_of(other), arch, stream=Stream(2, 8))
    first = np.asarray(jax.jit(product)(a, b))

    @jax.jit
    def both(a: jax.Array, b: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return product(a, b), between(x, y), product(a, b)

    @functools.partial(jax.jit, static_argnums=2)
    def looped(a: jax.Array, b: jax.Array, times: int) -> jax.Array:
        start = jnp.zeros(first.shape, first.dtype)
        return jax.lax.fori_loop(0, times, lambda _, last: product(a + (0 * last[:, :1, :1]).astype(a.dtype), b), start)

    for _ in range(20):
        one, _, two = both(a, b, x, y)
        assert np.array_equal(np.asarray(one), first) and np.array_equal(np.asarray(two), first)
    assert np.array_equal(np.asarray(looped(a, b, 200)), first)
