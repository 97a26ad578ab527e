"""m-major results of direct tiles whose columns begin on 16 bytes, and the buffer in which a warp turns its own."""

from __future__ import annotations

import re

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.geometry import ceil_div
from jax_bwgemm.facts.resources import direct_smem_bytes, exchange_bytes, num_stages, storing_warps
from jax_bwgemm.facts.shipped import HOPPER_DIRECT, HOPPER_DIRECT_SPLIT
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused
from tests.emu.matmul import case_of, facts_of

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels import column_store  # noqa: E402 - needs cutlass
from tests.emu.check_variant import compiled, run_case  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass


def variant(m: int, n: int, majors: str, dtype: str = "bfloat16", cluster_k: int = 1) -> Variant:
    tile = Tile(m, n, cluster_k=cluster_k, direct=True)
    return Variant("sm_90a", *(dtype,) * 3, *majors, tile, fused("identity", "m"), "m", "threads")


VARIANTS = [
    variant(64, 16, "kk"),
    variant(64, 32, "mn", "float16"),
    variant(64, 64, "kn"),
    variant(128, 48, "mk"),
    variant(64, 32, "kk", cluster_k=4),
]


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """Whole columns (a multiple of 8 rows) that end within a warp's rows, with them or with the tile, and others; few
    columns and many; two matrices; sums of one k tile, two (by way of the L1 cache) and more."""
    tile = of.tile
    shapes = [
        (8, 1, 16),
        (tile.cta_m - 8, tile.mma_n, 64),
        (tile.cta_m + 24, tile.mma_n + 3, 72),
        (tile.cta_m + 16, tile.mma_n - 5, 300),
        (tile.cta_m + 3, tile.mma_n + 1, 72),
    ]
    module, facts = compiled(of)
    for seed, (m, n, k) in enumerate(shapes):
        case = case_of(of, m, n, max(k, 64 * tile.cluster_k + 8 if tile.cluster_k > 1 else k), 1, 1 + seed % 2)
        run_case(module, facts, case, Schedule.standard(seed)[seed % 5], seed=seed)


@pytest.mark.parametrize("which", ["has been read", "has been written"])
def test_a_column_waits_for_its_warp(which: str) -> None:
    """Of a tile of two boxes, the buffer is written again once all lanes have read it, and read once all wrote it."""
    of = variant(64, 128, "kk")
    found = compiled_kernel(of)
    (first, second), syncs = _stores(found.ptx), [m for m in re.finditer(r"bar\.warp\.sync[^;]*;", found.ptx)]
    if which == "has been written":
        sync = next(m for m in syncs if m.start() > first)
    else:
        sync = [m for m in syncs if first < m.start() < second][-1]
    changed = parse(found.ptx[: sync.start()] + found.ptx[sync.end() :])
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(changed, facts_of(of, found), case_of(of, 64, 128, 64), schedule)
        assert fault.value.rule == "race"


def _stores(ptx: str) -> tuple[int, int]:
    """Where the aligned kernel, which comes first, stores the first and the second box: the last stmatrix of each."""
    places = [m.start() for m in re.finditer("stmatrix", ptx)]
    each = len(places) // 4  # two boxes of two kernels
    return places[each - 1], places[each]


@pytest.mark.parametrize("cols", [16, 32, 48, 64])
def test_no_banks_conflict(cols: int) -> None:
    """Every half of a column has its own place. A matrix is 8 columns of one half; 8 lanes read both halves of 4."""
    places = [column_store.place(col, half, cols) for col in range(cols) for half in (0, 1)]
    assert sorted(places) == list(range(0, column_store.buffer_bytes(cols), 16))
    for half in (0, 1):
        for first in range(0, cols, 8):
            banks = [column_store.place(first + i, half, cols) // 16 % 8 for i in range(8)]
            assert sorted(banks) == list(range(8))
    for first in range(0, cols, 4):
        banks = [column_store.place(first + i // 2, i % 2, cols) // 16 % 8 for i in range(8)]
        assert sorted(banks) == list(range(8))


def test_buffers_fit_in_the_least_launch() -> None:
    """Of a launch with a single stage, or of all where CTAs divide k, beside the sums that they exchange."""
    arch = by_name("h100")
    for tile in (*HOPPER_DIRECT, *HOPPER_DIRECT_SPLIT):
        stages = 1 if tile.cluster_k == 1 else num_stages(tile, "bfloat16", "bfloat16", arch)
        room = direct_smem_bytes(tile, "bfloat16", "bfloat16", arch.target, stages)
        buffers = storing_warps(tile, arch.target) * column_store.buffer_bytes(16 * ceil_div(tile.mma_n, 16))
        assert exchange_bytes(tile) + buffers <= room, tile
