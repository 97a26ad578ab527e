"""The persistent tile order visits every tile exactly once, whatever the group, the direction and the grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jax_bwgemm.kernels.scheduler import TileOrder, tile_coordinates

small = st.integers(1, 9)


@given(tiles_m=small, tiles_n=small, batch=st.integers(1, 3), group=small, along_n=st.integers(0, 1))
def test_each_tile_once(tiles_m: int, tiles_n: int, batch: int, group: int, along_n: int) -> None:
    visited = [
        tile_coordinates(i, TileOrder(tiles_m, tiles_n, group, along_n)) for i in range(tiles_m * tiles_n * batch)
    ]
    expected = {(m, n, b) for m in range(tiles_m) for n in range(tiles_n) for b in range(batch)}
    assert len(visited) == len(expected)
    assert set(visited) == expected


@given(total=st.integers(1, 200), clusters=st.integers(1, 80))
def test_a_strided_grid_covers_every_index_once(total: int, clusters: int) -> None:
    grid = min(total, clusters)
    assert sorted(i for start in range(grid) for i in range(start, total, grid)) == list(range(total))


def test_groups_of_rows_are_walked_rows_first() -> None:
    order = [tile_coordinates(i, TileOrder(3, 2, 2, 0))[:2] for i in range(6)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_groups_of_columns_are_walked_columns_first() -> None:
    order = [tile_coordinates(i, TileOrder(2, 3, 2, 1))[:2] for i in range(6)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
