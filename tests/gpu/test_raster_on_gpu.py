"""Every tile order on a GPU: it moves tiles between clusters and waves, never a bit of the result."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.epilogue import ACC
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.runtime.artifacts import Entry
from tests.cases import check_case
from tests.emu.matmul import case_of
from tests.gpu.forced import forced
from tests.gpu.test_variants import ENTRIES

PLAIN = [
    entry
    for entry in ENTRIES
    if (entry.variant.a_dtype, entry.variant.out_dtype, entry.variant.epilogue) == ("bfloat16", "bfloat16", ACC)
    and entry.variant.a_major + entry.variant.b_major == "kn"
]
pytestmark = pytest.mark.skipif(not PLAIN, reason="no GPU that has kernels, or no cubins")


@pytest.mark.parametrize("entry", PLAIN, ids=lambda e: e.name)
def test_every_order(entry: Entry, arch: Arch) -> None:
    """More than two waves; the last group is not full, and the matrices share b."""
    variant, tile = entry.variant, entry.variant.tile
    clusters = arch.max_clusters(tile.cluster_ctas)
    odd = int(variant.store == "threads")
    rows, cols = 7, -(-clusters // 7) + 1
    m, n = rows * tile.cluster_m * tile.cta_m - 8 - odd, cols * tile.cluster_n * tile.mma_n - 8 - odd
    case = case_of(variant, m, n, 2 * tile.k_tile + 16, 2, 1)
    a, b, _ = case.inputs(1)
    problem = Problem(m, n, case.k, 2, a_batch=2, b_batch=1, c_major=variant.c_major)
    results = [
        np.asarray(
            jax.jit(forced(entry, problem, arch, raster_order=order, raster_group=group, raster_along_n=along_n))(
                jnp.asarray(a), jnp.asarray(b)
            )
        )
        for order, (group, along_n) in itertools.product(RASTER_ORDERS, ((1, 0), (3, 0), (3, 1), (8, 1)))
    ]
    got = results[0] if variant.c_major == "n" else results[0].swapaxes(1, 2)
    check_case(got, case.reference(a, b, None), case)
    assert all(np.array_equal(results[0].view(np.uint16), other.view(np.uint16)) for other in results[1:])
