"""Stream-K: the last tiles, divided along k between clusters that meet in global memory."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.resources import FLAG_BYTES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import DTYPES, Case, check_case, fused
from tests.emu.matmul import TOKEN, Facts, case_of, poisoned_workspace, run_matmul

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

BF16, F32 = "bfloat16", "float32"
SMALL = Tile(64, 32, stream_k=True)
TILES = [
    SMALL,
    Tile(128, 32, cluster_m=2, stream_k=True),
    Tile(256, 32, cluster_n=2, stream_k=True),
    Tile(64, 32, cluster_n=4, stream_k=True),
    Tile(192, 32, cluster_m=2, cluster_n=2, stream_k=True),
    Tile(128, 64, stream_k=True),
    Tile(64, 96, stream_k=True),
    Tile(64, 256, stream_k=True),
]


@functools.cache
def kernel(
    tile: Tile, out: str = F32, epilogue: str = "identity", store: str = "tma", c_major: str = "n", dtype: str = BF16
) -> tuple[Variant, Module, Facts]:
    majors = ("k", "n") if dtype == BF16 else ("k", "k")
    variant = Variant("sm_90a", dtype, dtype, out, *majors, tile, fused(epilogue, c_major), c_major, store)
    return variant, *compiled(variant)


def run_stream(
    of: tuple[Variant, Module, Facts],
    case: Case,
    clusters: int,
    stream: tuple[int, int],
    schedule: Schedule,
    seed: int = 0,
) -> np.ndarray:
    """Checked against float64; every flag that went up was taken down."""
    variant, module, facts = of
    a, b, bias = case.inputs(seed)
    workspace = poisoned_workspace(variant.tile, clusters)
    out, _ = run_matmul(
        module, facts, a, b, case.alpha, bias, case.residual(seed), clusters, 2, seed % 2, schedule, stream, workspace,
        max_instructions=10**7,
    )  # fmt: skip
    check_case(out, case.reference(a, b, bias, case.residual(seed)), case)
    assert (workspace.view(np.uint64)[: FLAG_BYTES // 8] != TOKEN).all()
    return out


def shares(clusters: int, tiles: int, stream: tuple[int, int], k_tiles: int) -> list[tuple[int, int]]:
    """(begin, end) of each cluster's share, in k tiles of the stream, by the rule of docs/architecture.md."""
    total, sharing = min(stream[0], tiles) * k_tiles, min(stream[1], clusters)
    lengths = [len(share) for share in np.array_split(np.arange(total), sharing)] + [0] * (clusters - sharing)
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def leavers(clusters: int, tiles: int, stream: tuple[int, int], k_tiles: int) -> list[bool]:
    """Whether each cluster leaves a part: where its share ends within a tile."""
    return [begin < end and end % k_tiles > 0 for begin, end in shares(clusters, tiles, stream, k_tiles)]


@pytest.mark.parametrize("tiles", range(7))
def test_any_stream(tiles: int) -> None:
    """The last 0 to 5 (and one more than there are) of 5 tiles of 7 k tiles, on 1 to 12 clusters, of which as many
    as there are, or fewer, or more, share."""
    case = case_of(kernel(SMALL)[0], 64 * 5 - 8, 32, 64 * 7 - 16)
    schedules = itertools.cycle(Schedule.standard(tiles))
    for clusters, sharing in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 3), (7, 7), (12, 12), (12, 10), (3, 12)):
        run_stream(kernel(SMALL), case, clusters, (tiles, sharing), next(schedules), sharing)


@pytest.mark.parametrize("k", [8, 64, 72, 136, 520])
def test_fewer_k_tiles_than_clusters(k: int) -> None:
    for clusters, schedule in zip((5, 12), Schedule.standard(k)[:2], strict=True):
        run_stream(kernel(SMALL), case_of(kernel(SMALL)[0], 120, 56, k), clusters, (4, clusters), schedule, k)


def test_more_parts_than_lanes() -> None:
    """One warp looks at all flags: 35 of them, of a tile of 36 k tiles."""
    case = case_of(kernel(SMALL)[0], 64, 32, 64 * 36)
    run_stream(kernel(SMALL), case, 36, (1, 36), Schedule.standard(1)[4])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_and_clusters(tile: Tile) -> None:
    """One and two warpgroups of one and two slabs; clusters along m and n; shared and own batches; partial edges."""
    variant = kernel(tile)[0]
    m, n = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    for seed, (clusters, stream) in enumerate(((4, (4, 4)), (4, (2, 4)), (7, (5, 7)))):
        case = case_of(variant, m + 8, n - 8, 200 + 64 * seed, 3 if seed % 2 else 1, 3)
        run_stream(kernel(tile), case, clusters, stream, Schedule.standard(seed)[4 - seed], seed)


OTHERS = [
    (Tile(64, 64, stream_k=True), BF16, "scale_bias_relu", "tma", "n", BF16),
    (Tile(128, 64, cluster_m=2, stream_k=True), F32, "bias", "tma", "n", BF16),
    (Tile(64, 64, stream_k=True), BF16, "identity", "tma", "m", BF16),
    (Tile(128, 64, stream_k=True), BF16, "scale", "threads", "n", BF16),
    (Tile(64, 32, 128, stream_k=True), "int32", "identity", "tma", "n", "int8"),
    (Tile(64, 64, 128, stream_k=True), "float8_e4m3fn", "identity", "tma", "n", "float8_e4m3fn"),
    (Tile(64, 32, stream_k=True), BF16, "residual", "tma", "m", BF16),
    (Tile(128, 64, cluster_m=2, stream_k=True), F32, "bias_silu_residual", "tma", "n", BF16),
]


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: "-".join(map(str, form)))
def test_epilogues_and_ways_out(form: tuple[Tile, str, str, str, str, str]) -> None:
    """Of the whole sum only. What is held for the next tile's main loop is held for a piece's, too."""
    of, odd = kernel(*form), int(form[3] == "threads")
    tile = form[0]
    for seed, (clusters, stream) in enumerate(((2, (3, 2)), (4, (2, 4)), (8, (6, 8)))):
        case = case_of(of[0], tile.cluster_m * tile.cta_m * 3 - 16, tile.mma_n + 16 - odd, 5 * tile.k_tile)
        run_stream(of, case, clusters, stream, Schedule.standard(seed)[4 - seed], seed)


def test_the_same_bits_every_time() -> None:
    """Under every schedule, and launch after launch on one workspace that nobody clears."""
    variant, module, facts = kernel(SMALL)
    case = case_of(variant, 64 * 3, 32, 64 * 9)
    a, b, _ = case.inputs(5)
    workspace = poisoned_workspace(SMALL, 8)
    results = [
        run_matmul(module, facts, a, b, max_clusters=8, stream=(3, 7), schedule=schedule, workspace=workspace)[0]
        for schedule in 2 * Schedule.standard(3)
    ]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    whole, _ = run_matmul(module, facts, a, b, max_clusters=8)
    assert not np.array_equal(whole, results[0]) and np.allclose(whole, results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("parts", "k_tiles"), [(2, 5), (3, 8), (4, 4), (5, 7), (6, 9)])
def test_the_order_of_the_sum(parts: int, k_tiles: int) -> None:
    """The end's sum, plus the first part's, the second's, and so on, each addition rounded to float32. The first
    shares have the odd k tiles. Whole numbers of one scale a part make all else exact."""
    _, module, facts = kernel(SMALL)
    rng = np.random.default_rng(parts)
    pieces = np.array_split(np.arange(k_tiles), parts)
    scale = np.repeat(2.0 ** rng.integers(-14, 15, parts), [64 * len(piece) for piece in pieces])
    a = (rng.integers(-100, 101, (1, 64, 64 * k_tiles)) * scale).astype(DTYPES[BF16])
    b = rng.integers(-9, 10, (1, 64 * k_tiles, 32)).astype(DTYPES[BF16])
    out, _ = run_matmul(module, facts, a, b, max_clusters=parts, stream=(1, parts))
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
    """An accumulator for each cluster whose share ends within a tile, at its place."""
    _, module, facts = kernel(SMALL)
    case = case_of(kernel(SMALL)[0], 64 * 5, 32, 64 * 4)
    a, b, _ = case.inputs()
    for clusters, stream in (
        (3, (0, 3)),
        (3, (2, 3)),
        (4, (1, 4)),
        (4, (5, 4)),
        (5, (5, 5)),
        (12, (5, 10)),
        (16, (5, 16)),
    ):
        workspace = poisoned_workspace(SMALL, clusters)
        run_matmul(module, facts, a, b, max_clusters=clusters, stream=stream, workspace=workspace)
        slots = workspace[FLAG_BYTES // 4 :].reshape(clusters, -1)
        used = (~np.isnan(slots)).all(1)
        assert used.tolist() == leavers(clusters, 5, stream, 4)
        assert np.isnan(slots[~used]).all()
