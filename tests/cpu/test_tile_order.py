"""The persistent tile order visits every tile exactly once, whatever the group, the direction and the grid."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jax_bwgemm.kernels.scheduler import tile_coordinates, tile_order
from jax_bwgemm.planner.order import RASTER_ORDERS

small = st.integers(1, 9)


@given(
    tiles_m=small, tiles_n=small, batch=st.integers(1, 3), group=st.integers(1, 12), along_n=st.integers(0, 1),
    order=st.integers(0, 1),
)  # fmt: skip
def test_each_tile_once(tiles_m: int, tiles_n: int, batch: int, group: int, along_n: int, order: int) -> None:
    of = tile_order(tiles_m, tiles_n, group, along_n, order)
    visited = [tile_coordinates(i, of) for i in range(tiles_m * tiles_n * batch)]
    expected = {(m, n, b) for m in range(tiles_m) for n in range(tiles_n) for b in range(batch)}
    assert len(visited) == len(expected)
    assert set(visited) == expected
    assert [b for _, _, b in visited] == sorted(b for _, _, b in visited)


@given(tiles_m=small, tiles_n=small, group=st.integers(1, 12), along_n=st.integers(0, 1))
def test_a_snake_never_jumps(tiles_m: int, tiles_n: int, group: int, along_n: int) -> None:
    """From one group to the next it stays at its end, in whose row or column it then has both groups' tiles."""
    order = tile_order(tiles_m, tiles_n, group, along_n, 1)
    walked = [tile_coordinates(i, order)[:2] for i in range(tiles_m * tiles_n)]
    for before, after in itertools.pairwise(walked):
        assert abs(after[1 - along_n] - before[1 - along_n]) <= 1
        is_next_group = before[along_n] // group != after[along_n] // group
        assert not is_next_group or before[1 - along_n] == after[1 - along_n]


def test_every_order_has_a_code() -> None:
    assert RASTER_ORDERS == ("groups", "snake")  # what a kernel calls 0 and 1


@given(total=st.integers(1, 200), clusters=st.integers(1, 80))
def test_a_strided_grid_covers_every_index_once(total: int, clusters: int) -> None:
    grid = min(total, clusters)
    assert sorted(i for start in range(grid) for i in range(start, total, grid)) == list(range(total))


def test_groups_of_rows_are_walked_rows_first() -> None:
    order = [tile_coordinates(i, tile_order(3, 2, 2, 0, 0))[:2] for i in range(6)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_groups_of_columns_are_walked_columns_first() -> None:
    order = [tile_coordinates(i, tile_order(2, 3, 2, 1, 0))[:2] for i in range(6)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


def test_a_snake_walks_every_second_group_backwards() -> None:
    order = [tile_coordinates(i, tile_order(5, 2, 2, 0, 1))[:2] for i in range(10)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 1), (2, 0), (3, 0), (4, 0), (4, 1)]
    order = [tile_coordinates(i, tile_order(2, 3, 2, 1, 1))[:2] for i in range(6)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)]
