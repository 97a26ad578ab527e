"""The split tail: the last tiles, divided along k between clusters that meet in global memory."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.tile import FLAG_BYTES, Tile
from jax_bwgemm.variant import Variant
from tests.cases import DTYPES, Case, check_case
from tests.emu.matmul import TOKEN, Facts, case_of, poisoned_workspace, run_matmul

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

BF16, F32 = "bfloat16", "float32"
SMALL = Tile(64, 32, split_tail=True)
TILES = [
    SMALL,
    Tile(128, 32, cluster_m=2, split_tail=True),
    Tile(256, 32, cluster_n=2, split_tail=True),
    Tile(128, 64, split_tail=True),
]


@functools.cache
def kernel(
    tile: Tile, out: str = F32, epilogue: str = "identity", store: str = "tma", c_major: str = "n", dtype: str = BF16
) -> tuple[Variant, Module, Facts]:
    majors = ("k", "n") if dtype == BF16 else ("k", "k")
    variant = Variant("sm_90a", dtype, dtype, out, *majors, tile, epilogue, c_major, store)
    return variant, *compiled(variant)


def run_tail(
    of: tuple[Variant, Module, Facts], case: Case, clusters: int, parts: int, schedule: Schedule, seed: int = 0
) -> np.ndarray:
    """Checked against float64; every flag that went up was taken down."""
    variant, module, facts = of
    a, b, bias = case.inputs(seed)
    workspace = poisoned_workspace(variant.tile, clusters)
    out, _ = run_matmul(
        module, facts, a, b, case.alpha, bias, None, clusters, 2, seed % 2, schedule, parts, workspace,
        strict_tmem_wait=True, max_instructions=10**7,
    )  # fmt: skip
    check_case(out, case.reference(a, b, bias), case)
    assert (workspace.view(np.uint64)[: FLAG_BYTES // 8] != TOKEN).all()
    return out


def num_raised(clusters: int, tiles: int, parts: int, k_tiles: int) -> int:
    """Parts that meet in the workspace, by the rule of docs/architecture.md."""
    rest = tiles % clusters
    return rest * (min(parts, k_tiles, clusters // rest) - 1) if rest else 0


@pytest.mark.parametrize("parts", range(1, 10))
def test_any_number_of_parts(parts: int) -> None:
    """5 tiles of 7 k tiles on 1 to 12 clusters: no tail, one tile, several; all tiles are the tail from 6 on."""
    case = case_of(kernel(SMALL)[0], 64 * 5 - 8, 32, 64 * 7 - 16)
    schedules = itertools.cycle(Schedule.standard(parts))
    for clusters in (1, 2, 3, 4, 5, 7, 12):
        run_tail(kernel(SMALL), case, clusters, parts, next(schedules), parts)


@pytest.mark.parametrize("k", [8, 64, 72, 136, 520])
def test_fewer_k_tiles_than_parts(k: int) -> None:
    for clusters, schedule in zip((5, 12), Schedule.standard(k)[:2], strict=True):
        run_tail(kernel(SMALL), case_of(kernel(SMALL)[0], 120, 56, k), clusters, 9, schedule, k)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_and_clusters(tile: Tile) -> None:
    """One and two warpgroups of one and two slabs; clusters along m and n; shared and own batches; partial edges."""
    variant = kernel(tile)[0]
    m, n = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    for seed, (clusters, parts) in enumerate(((4, 2), (4, 4), (7, 2))):
        case = case_of(variant, m + 8, n - 8, 200 + 64 * seed, 3 if seed % 2 else 1, 3)
        run_tail(kernel(tile), case, clusters, parts, Schedule.standard(seed)[4 - seed], seed)


OTHERS = [
    (Tile(64, 64, split_tail=True), BF16, "scale_bias_relu", "tma", "n", BF16),
    (Tile(128, 64, cluster_m=2, split_tail=True), F32, "bias", "tma", "n", BF16),
    (Tile(64, 64, split_tail=True), BF16, "identity", "tma", "m", BF16),
    (Tile(128, 64, split_tail=True), BF16, "scale", "threads", "n", BF16),
    (Tile(64, 32, 128, split_tail=True), "int32", "identity", "tma", "n", "int8"),
    (Tile(64, 64, 128, split_tail=True), "float8_e4m3fn", "identity", "tma", "n", "float8_e4m3fn"),
]


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: "-".join(map(str, form)))
def test_epilogues_and_ways_out(form: tuple[Tile, str, str, str, str, str]) -> None:
    """Of the whole sum only. What is held for the next tile's main loop is held for a part's, too."""
    of, odd = kernel(*form), int(form[3] == "threads")
    tile = form[0]
    for seed, (clusters, parts) in enumerate(((2, 2), (3, 3), (8, 2))):
        case = case_of(of[0], tile.cluster_m * tile.cta_m * 3 - 16, tile.mma_n + 16 - odd, 5 * tile.k_tile)
        run_tail(of, case, clusters, parts, Schedule.standard(seed)[4 - seed], seed)


def test_the_same_bits_every_time() -> None:
    """Under every schedule, and launch after launch on one workspace that nobody clears."""
    variant, module, facts = kernel(SMALL)
    case = case_of(variant, 64 * 3, 32, 64 * 9)
    a, b, _ = case.inputs(5)
    workspace = poisoned_workspace(SMALL, 8)
    results = [
        run_matmul(module, facts, a, b, max_clusters=8, tail_parts=2, schedule=schedule, workspace=workspace)[0]
        for schedule in 2 * Schedule.standard(3)
    ]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    whole, _ = run_matmul(module, facts, a, b, max_clusters=8, tail_parts=1)
    assert not np.array_equal(whole, results[0]) and np.allclose(whole, results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("parts", "k_tiles"), [(2, 5), (3, 8), (4, 4), (5, 7), (6, 9)])
def test_the_order_of_the_sum(parts: int, k_tiles: int) -> None:
    """The last part's sum, plus the first part's, the second's, and so on, each addition rounded to float32. The first
    parts have the odd k tiles. Whole numbers of one scale a part make all else exact."""
    _, module, facts = kernel(SMALL)
    rng = np.random.default_rng(parts)
    pieces = np.array_split(np.arange(k_tiles), parts)
    scale = np.repeat(2.0 ** rng.integers(-14, 15, parts), [64 * len(piece) for piece in pieces])
    a = (rng.integers(-100, 101, (1, 64, 64 * k_tiles)) * scale).astype(DTYPES[BF16])
    b = rng.integers(-9, 10, (1, 64 * k_tiles, 32)).astype(DTYPES[BF16])
    out, _ = run_matmul(module, facts, a, b, max_clusters=parts, tail_parts=parts)
    sums = [
        (a[0, :, 64 * p[0] : 64 * (p[-1] + 1)].astype(np.float64) @ b[0, 64 * p[0] : 64 * (p[-1] + 1)].astype(float))
        for p in pieces
    ]
    assert all((s == s.astype(np.float32)).all() for s in sums)
    in_order = [parts - 1, *range(parts - 1)]
    assert np.array_equal(out[0], added(sums, in_order))
    if parts > 2:
        assert not np.array_equal(out[0], added(sums, range(parts)))


def added(sums: list[np.ndarray], order: range | list[int]) -> np.ndarray:
    first, *rest = (sums[i].astype(np.float32) for i in order)
    return functools.reduce(np.add, rest, first)


def test_what_meets_in_the_workspace() -> None:
    """As many accumulators as there are parts but the last ones, each at its cluster's place."""
    _, module, facts = kernel(SMALL)
    case = case_of(kernel(SMALL)[0], 64 * 5, 32, 64 * 4)
    a, b, _ = case.inputs()
    for clusters, parts in ((3, 1), (3, 2), (4, 4), (5, 9), (12, 2), (16, 9)):
        workspace = poisoned_workspace(SMALL, clusters)
        run_matmul(module, facts, a, b, max_clusters=clusters, tail_parts=parts, workspace=workspace)
        slots = workspace[FLAG_BYTES // 4 :].reshape(clusters, -1)
        used = (~np.isnan(slots)).all(1)
        assert used.tolist() == [i < num_raised(clusters, 5, parts, 4) for i in range(clusters)]
        assert np.isnan(slots[~used]).all()
