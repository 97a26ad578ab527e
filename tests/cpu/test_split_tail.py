"""The split tail without a kernel: its tile's name, what is legal, the workspace, the number of parts, the plan."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.arch import ARCHS, Arch
from jax_bwgemm.cost import cost, tail_parts, tail_tiles
from jax_bwgemm.legality import why_not
from jax_bwgemm.plan import plan
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import FLAG_BYTES, MAX_CLUSTER_CTAS, SHIPPED_TILES, Tile, workspace_bytes

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PROBLEM = Problem(4096, 4096, 4096)
WHOLE = Tile(128, 256, cluster_m=2)
TAIL = dataclasses.replace(WHOLE, split_tail=True)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (TAIL, "128x256x64_cta1_cluster2x1_tail"),
        (Tile(64, 128, 128, split_tail=True), "64x128x128_cta1_cluster1x1_tail"),
        (Tile(64, 128, pingpong=True, split_tail=True), "64x128x64_cta1_cluster1x1_pingpong_tail"),
        (Tile(64, 128, cluster_k=2, split_tail=True), "64x128x64_cta1_cluster1x1x2_tail"),
    ],
)
def test_text(tile: Tile, text: str) -> None:
    """What is not legal has a name, too."""
    assert str(tile) == text and Tile.from_str(text) == tile
    with pytest.raises(ValueError, match="`tile` requires the form"):
        Tile.from_str(text + "_tail")


@pytest.mark.parametrize(
    ("tile", "arch", "sentence"),
    [
        (TAIL, H200, None),
        (Tile(256, 128, cluster_n=2, split_tail=True), ARCHS["h100"], None),
        (
            Tile(128, 256, split_tail=True),
            B200,
            "`split_tail` requires sm_90a: the Blackwell kernel has no workspace yet, got True",
        ),
        (
            Tile(128, 128, pingpong=True, split_tail=True),
            H200,
            "`split_tail` requires cluster_k 1 and no ping-pong, got 128x128x64_cta1_cluster1x1_pingpong_tail",
        ),
        (
            Tile(128, 128, cluster_k=2, split_tail=True),
            H200,
            "`split_tail` requires cluster_k 1 and no ping-pong, got 128x128x64_cta1_cluster1x1x2_tail",
        ),
    ],
)
def test_why_not(tile: Tile, arch: Arch, sentence: str | None) -> None:
    assert why_not(tile, PROBLEM, arch) == sentence


def test_workspace_bytes() -> None:
    """4096 bytes of flags, and 128 KiB for 128x256 of float32 in each of 132 CTAs."""
    assert workspace_bytes(TAIL, 66) == 4096 + 132 * 131072 == 17305600
    assert workspace_bytes(Tile(64, 32, split_tail=True), 3) == 4096 + 3 * 8192
    assert workspace_bytes(WHOLE, 66) == 0


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_flags_fit(arch: Arch) -> None:
    """8 bytes for each of two groups of every CTA that runs at once."""
    for tile in (tile for tile in SHIPPED_TILES["hopper"] if tile.split_tail):
        assert 16 * arch.max_clusters(tile.cluster_ctas) * tile.cluster_ctas <= FLAG_BYTES
    assert 16 * MAX_CLUSTER_CTAS <= FLAG_BYTES


@pytest.mark.parametrize(
    ("sizes", "tiles", "parts"),
    [
        # 1042 cycles a k tile: 1024 of wgmma beside 565 * 1.31 of loads, (1024^6.5 + 740^6.5)^(1/6.5); 2120 to meet,
        # 6554 for the 128 KiB of each part but the last one. 20 * 20 - 6 * 66 tiles of 79 k tiles:
        ((5000, 5000, 5000), 4, 4),  # 27 * 1042 + 15228 in 3 parts, 20 * ... + 21782 in 4, 16 * ... + 28336 in 5
        ((1024, 1024, 65536), 16, 4),  # all that 66 clusters allow 16 tiles
        ((8192, 8192, 8192), 34, 1),  # 1024 - 15 * 66: not even two clusters for each
        ((4096, 4096, 4096), 58, 1),
        ((256, 256, 64), 1, 1),  # one k tile
        ((256, 256, 4096), 1, 3),  # 64 k tiles of 1025: 32 * 1025 + 8674 in 2, 22 * ... + 15228 in 3, 16 * ... + 21782
        ((256 * 66, 256, 65536), 0, 1),  # whole waves
    ],
)
def test_parts_on_an_h200(sizes: tuple[int, int, int], tiles: int, parts: int) -> None:
    problem = Problem(*sizes)
    assert (tail_tiles(TAIL, problem, H200), tail_parts(TAIL, problem, H200)) == (tiles, parts)
    assert tail_parts(WHOLE, problem, H200) == 1
    if parts == 1:
        assert cost(TAIL, problem, H200) == cost(WHOLE, problem, H200)
    else:
        assert cost(TAIL, problem, H200).us < cost(WHOLE, problem, H200).us


@pytest.mark.parametrize("sizes", [(5000, 5000, 5000), (1024, 1024, 65536)])
def test_a_tail_is_split_where_it_gains(sizes: tuple[int, int, int]) -> None:
    chosen = plan(Problem(*sizes), H200)
    assert chosen.tile is not None and chosen.tile.split_tail
    assert chosen.tail_parts == tail_parts(chosen.tile, chosen.problem, H200) > 1


def test_plans() -> None:
    """Where tiles fill their waves, or nearly, the tile without a workspace wins the tie."""
    for sizes in ((8192, 8192, 8192), (4096, 4096, 4096)):
        chosen = plan(Problem(*sizes), H200)
        assert chosen.tile == WHOLE and chosen.tail_parts == 1
    small = plan(Problem(256, 256, 4096), H200, TAIL)
    assert (small.tail_parts, small.pdl) == (3, False)
    assert plan(Problem(256, 256, 64), H200, TAIL).pdl
    assert not plan(Problem(256, 256, 4096), H200, WHOLE).pdl
