"""Forests of regression trees: what they add up, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.planner.trees import LEAF, Trees

NUM_FEATURES = 40
# x0 <= 1 ? (x2 <= 5 ? 10 : 20) : 30
SMALL = ([0, 2, LEAF, LEAF, LEAF], [1.0, 5.0, 30.0, 10.0, 20.0])


@pytest.mark.parametrize(("x0", "x2", "want"), [(1, 5, 10), (1, 6, 20), (1.5, 5, 30), (0, 0, 10), (2, 9, 30)])
def test_a_tree(x0: float, x2: float, want: float) -> None:
    rows = np.zeros((1, NUM_FEATURES))
    rows[0, [0, 2]] = x0, x2
    assert Trees.of([SMALL], NUM_FEATURES).sums(rows).tolist() == [want]
    assert Trees.of([SMALL, ([LEAF], [0.5])], NUM_FEATURES).sums(rows).tolist() == [want + 0.5]


def test_a_forest_adds_up_what_its_trees_say() -> None:
    rng = np.random.default_rng(0)
    trees = [_grown(rng) for _ in range(20)]
    rows = rng.random((50, NUM_FEATURES))
    want = [sum(_walk(tree, values) for tree in trees) for values in rows]
    np.testing.assert_allclose(Trees.of(trees, NUM_FEATURES).sums(rows), want)


def _grown(rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """By level; every second node of the first fifteen asks."""
    asked, value, waiting = list[int](), list[float](), 1
    while waiting:
        asks = len(asked) < 15 and (rng.random() < 0.6 or not asked)
        asked.append(int(rng.integers(NUM_FEATURES)) if asks else LEAF)
        value.append(float(rng.random()))
        waiting += 1 if asks else -1
    return asked, value


def _walk(tree: tuple[list[int], list[float]], values: np.ndarray) -> float:
    asked, value = tree
    at = 0
    while asked[at] != LEAF:
        before = sum(x != LEAF for x in asked[:at])
        at = 2 * before + (1 if values[asked[at]] <= value[at] else 2)
    return value[at]


@pytest.mark.parametrize(
    "tree",
    [([0], [1.0]), ([0, LEAF], [1.0, 2.0]), ([LEAF, LEAF], [1.0, 2.0]), ([LEAF], [1.0, 2.0]), ([], []),
     ([999, LEAF, LEAF], [1.0] * 3), ([-2, LEAF, LEAF], [1.0] * 3), ([LEAF, 0, LEAF], [1.0] * 3)],
)  # fmt: skip
def test_what_is_no_tree_is_refused(tree: tuple[list[int], list[float]]) -> None:
    with pytest.raises(ValueError, match="a tree"):
        Trees.of([tree], NUM_FEATURES)
