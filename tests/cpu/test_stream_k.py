"""Stream-K without a kernel: its tile's name, what is legal, the workspace, the shares, what is shared, the plan."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.geometry import num_tiles
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.resources import FLAG_BYTES, workspace_bytes
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import MAX_CLUSTER_CTAS, Tile
from jax_bwgemm.kernels.scheduler import cluster_of, num_pieces, piece_of, share_of
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.measured import Record, Time, key
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.planner.streams import NO_STREAM, best_stream, idle
from tests.walks import stream

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PROBLEM = Problem(4096, 4096, 4096)
WHOLE = Tile(128, 256, cluster_m=2)
STREAMED = dataclasses.replace(WHOLE, stream_k=True)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (STREAMED, "128x256x64_cta1_cluster2x1_streamk"),
        (Tile(64, 128, 128, stream_k=True), "64x128x128_cta1_cluster1x1_streamk"),
        (Tile(64, 128, pingpong=True, stream_k=True), "64x128x64_cta1_cluster1x1_pingpong_streamk"),
        (Tile(64, 128, cluster_k=2, stream_k=True), "64x128x64_cta1_cluster1x1x2_streamk"),
    ],
)
def test_text(tile: Tile, text: str) -> None:
    """What is not legal has a name, too."""
    assert str(tile) == text and Tile.from_str(text) == tile
    with pytest.raises(ValueError, match="`tile` requires the form"):
        Tile.from_str(text + "_streamk")


@pytest.mark.parametrize(
    ("tile", "arch", "sentence"),
    [
        (STREAMED, H200, None),
        (Tile(256, 128, cluster_n=2, stream_k=True), ARCHS["h100"], None),
        (
            Tile(128, 256, stream_k=True),
            B200,
            "`stream_k` requires sm_90a: the Blackwell kernel has no workspace yet, got True",
        ),
        (
            Tile(128, 128, pingpong=True, stream_k=True),
            H200,
            "`stream_k` requires cluster_k 1 and no ping-pong, got 128x128x64_cta1_cluster1x1_pingpong_streamk",
        ),
        (
            Tile(128, 128, cluster_k=2, stream_k=True),
            H200,
            "`stream_k` requires cluster_k 1 and no ping-pong, got 128x128x64_cta1_cluster1x1x2_streamk",
        ),
    ],
)
def test_why_not(tile: Tile, arch: Arch, sentence: str | None) -> None:
    assert why_not(tile, PROBLEM, arch) == sentence


def test_workspace_bytes() -> None:
    """4096 bytes of flags, and 128 KiB for 128x256 of float32 in each of 132 CTAs."""
    assert workspace_bytes(STREAMED, 66) == 4096 + 132 * 131072 == 17305600
    assert workspace_bytes(Tile(64, 32, stream_k=True), 3) == 4096 + 3 * 8192
    assert workspace_bytes(WHOLE, 66) == 0


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_flags_fit(arch: Arch) -> None:
    """8 bytes for each of two groups of every CTA that runs at once."""
    for tile in (tile for tile in SHIPPED_TILES["hopper"] if tile.stream_k):
        assert 16 * arch.max_clusters(tile.cluster_ctas) * tile.cluster_ctas <= FLAG_BYTES
    assert 16 * MAX_CLUSTER_CTAS <= FLAG_BYTES


SHARES = [(1, 1, 1), (3, 2, 7), (2, 5, 7), (5, 12, 7), (4, 16, 4), (7, 66, 64), (74, 66, 79), (3, 9, 2), (1, 132, 7)]


@pytest.mark.parametrize(("tiles", "clusters", "k_tiles"), SHARES)
def test_shares(tiles: int, clusters: int, k_tiles: int) -> None:
    """The pieces of all shares are the stream, each k tile once; they differ by at most one in length; and whoever has
    the end of a tile knows who has what comes before."""
    made = stream(tiles + 5, k_tiles, clusters + 2, tiles, clusters)
    shares = [share_of(made, c) for c in range(clusters)]
    assert not any(num_pieces(share_of(made, c)) for c in (clusters, clusters + 1))  # they have whole tiles alone
    lengths = [share.end - share.begin for share in shares]
    assert max(lengths) - min(lengths) <= 1 and sum(lengths) == tiles * k_tiles
    owners: dict[tuple[int, int], int] = {}
    for c, share in enumerate(shares):
        pieces = [piece_of(share, i) for i in range(num_pieces(share))]
        assert [p.tile_idx for p in pieces] == sorted({5 + k // k_tiles for k in range(share.begin, share.end)})[::-1]
        assert all(p.is_end for p in pieces[1:]) and not any(p.parts for p in pieces[:-1] if p.is_end)
        for p in pieces:
            assert p.k_count > 0 and p.is_end == (p.k_first + p.k_count == k_tiles)
            owners |= {(p.tile_idx, k): c for k in range(p.k_first, p.k_first + p.k_count)}
    assert len(owners) == tiles * k_tiles
    for c, share in enumerate(shares):
        for p in (piece_of(share, i) for i in range(num_pieces(share))):
            before = {owners[p.tile_idx, k] for k in range(p.k_first)}
            assert before == set(range(c - p.parts, c))
            assert all(
                cluster_of(made, (p.tile_idx - 5) * k_tiles + k) == owners[p.tile_idx, k] for k in range(k_tiles)
            )


@pytest.mark.parametrize(
    ("sizes", "tiles", "shared"),
    [
        ((5000, 5000, 5000), 400, {4, 70}),  # 20 * 20 = 6 * 66 + 4
        ((1024, 1024, 65536), 16, {16}),
        ((8192, 8192, 8192), 1024, {0, 34, 100}),  # 15 * 66 + 34
        ((256, 256, 64), 1, {0}),  # one k tile
        ((256, 256, 4096), 1, {1}),
        ((256 * 66, 256, 65536), 66, {0}),  # whole waves
    ],
)
def test_streams_on_an_h200(sizes: tuple[int, int, int], tiles: int, shared: set[int]) -> None:
    problem = Problem(*sizes)
    stream = best_stream(STREAMED, problem, H200)
    assert num_tiles(STREAMED, problem) == tiles and stream.tiles in shared
    assert (stream.clusters > 1) == (stream.tiles > 0) and stream.clusters <= 66
    assert best_stream(WHOLE, problem, H200) == NO_STREAM
    if stream == NO_STREAM:
        later_us = 2 * H200.constants.stream_start_cycles / (H200.clock_ghz * 1e3)
        assert 0 < cost(STREAMED, problem, H200).us - cost(WHOLE, problem, H200).us < later_us, "it starts later"
    else:
        assert cost(STREAMED, problem, H200).us < cost(WHOLE, problem, H200).us


def test_no_stream_that_int32_cannot_count() -> None:
    """132 + 60 tiles of 2^25 k tiles."""
    long = Problem(128 * 192, 256, 2**31 - 64)
    assert best_stream(Tile(128, 256, stream_k=True), long, H200) == NO_STREAM


@pytest.mark.parametrize("sizes", [(8192, 8192, 8192), (1024, 1024, 65536)])
def test_tiles_are_shared_where_it_gains(sizes: tuple[int, int, int]) -> None:
    chosen = plan(Problem(*sizes), H200)
    assert chosen.tile is not None and chosen.tile.stream_k
    assert chosen.stream == best_stream(chosen.tile, chosen.problem, H200) != NO_STREAM


def test_plans() -> None:
    """A kernel whose clusters wait for each other starts when the one before it has ended."""
    small = plan(Problem(256, 256, 4096), H200, STREAMED)
    assert (small.stream.tiles, small.pdl) == (1, False)
    assert plan(Problem(256, 256, 64), H200, STREAMED).pdl
    assert not plan(Problem(256, 256, 4096), H200, WHOLE).pdl


@pytest.mark.parametrize("measured_us", [None, 100.0])
def test_a_stream_of_nothing_gives_way_to_the_kernel_that_has_none(measured_us: float | None) -> None:
    """4096x6144 is 32 x 24 tiles of 128x256, whose last wave of 108 single CTAs of 132 gains nothing by being divided;
    with a time of its own it is a candidate as before, and forced it is taken."""
    problem, tile = Problem(4096, 6144, 4096), Tile(128, 256, stream_k=True)
    without = dataclasses.replace(tile, stream_k=False)
    assert best_stream(tile, problem, H200) == NO_STREAM and idle(tile, problem, H200) == without
    assert idle(without, problem, H200) is None and idle(tile, Problem(4096, 256, 65536), H200) is None
    times = (
        () if measured_us is None else (Time(str(tile), False, measured_us, ""), Time(str(without), False, 120.0, ""))
    )
    found = plan(problem, H200, record=Record(key(problem), "", times) if times else None)
    (reason,) = [c.reason for c in found.candidates if c.tile == tile and not c.swapped]
    if measured_us is None:
        assert reason is not None and "divide no tile between clusters" in reason and found.tile != tile
    else:
        assert reason is None and found.tile == tile
    assert plan(problem, H200, tile).tile == tile
