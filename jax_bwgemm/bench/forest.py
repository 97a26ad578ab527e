"""Grows forests of regression trees by LightGBM, and writes them as `planner/trees` reads them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_bwgemm.planner.trees import LEAF, Trees

DIGITS, LEAF_UNIT = 5, 0.0005  # of a threshold, and of what a leaf adds, of which hundreds are added
Tree = tuple[list[int], list[float]]


def grown(
    rows: np.ndarray,
    logs: np.ndarray,
    weights: np.ndarray,
    wanted: dict[str, Any],
    num_trees: int,
    seed: int,
    command: str,
    groups: np.ndarray | None = None,
    shared: float = 1.0,
) -> list[Tree]:
    """That add up to the `logs` of the `rows` (row, feature), as `Trees.of` takes them; `wanted` are LightGBM's
    parameters. With `groups`, numbers from 0 on, it is by least squares, and what all rows of one are off by counts
    `shared` times. ValueError without LightGBM, for the `command` that asks for it."""
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: of a library that it loads
        needs = "LightGBM (pip install lightgbm), which loads gcc's libgomp"
        raise ValueError(f"`{command}` requires {needs}, got none: {error}") from None
    if groups is not None:
        wanted = wanted | {"objective": functools.partial(_slopes, groups=groups, shared=shared)}
    always = {  # one thread: several of libgomp's have waited for each other without end on a busy machine
        "num_threads": 1, "bagging_freq": 1, "min_sum_hessian_in_leaf": 0.01, "deterministic": True,
        "force_row_wise": True, "verbose": -1, "seed": seed,
    }  # fmt: skip
    forest = lightgbm.train(wanted | always, lightgbm.Dataset(rows, logs, weight=weights), num_trees)
    return [_by_level(tree["tree_structure"]) for tree in forest.dump_model()["tree_info"]]


def _slopes(found: np.ndarray, data: Any, groups: np.ndarray, shared: float) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivatives of half the weighted squares of what is off."""
    weights, off = data.get_weight(), found - data.get_label()
    of_group = np.bincount(groups, weights * off) / np.bincount(groups, weights)
    return weights * (off - (1 - shared) * of_group[groups]), weights


def folds(num: int, count: int, seed: int) -> list[list[int]]:
    """Positions of `num` things in `count` parts, each of which is held out in its turn."""
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return [order[i::count] for i in range(count)]


def _by_level(root: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Of LightGBM's, whose leaves are weighted."""
    asked, value, level = list[int](), list[float](), [root]
    while level:
        below = []
        for node in level:
            is_leaf = "leaf_value" in node
            asked.append(LEAF if is_leaf else node["split_feature"])
            value.append(node["leaf_value"] if is_leaf else float(f"{node['threshold']:.{DIGITS}g}"))
            below += [] if is_leaf else [node["left_child"], node["right_child"]]
        level = below
    return asked, value


def text(head: dict[str, Any], trees: Trees, names: Sequence[str]) -> str:
    """JSON with a line for each feature, its thresholds, and for each tree: of a node that asks the position of its
    threshold, of a leaf what it adds in units."""
    each = list(zip(trees.asked.tolist(), trees.value.tolist(), strict=True))
    nodes = {node for tree in each for node in zip(*tree, strict=True)}
    thresholds = [sorted(x for feature, x in nodes if feature == i) for i in range(len(names))]
    positions = {(i, x): at for i, values in enumerate(thresholds) for at, x in enumerate(values)}
    features = (f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in zip(names, thresholds, strict=True))
    lines = (_line(*tree, positions) for tree in each)
    start = json.dumps(head | {"leaf_unit": LEAF_UNIT}, indent=1).removesuffix("\n}")
    return start + ',\n "features": {\n' + ",\n".join(features) + '\n },\n "trees": [\n' + ",\n".join(lines) + "\n]}\n"


def _line(asked: list[int], value: list[float], positions: dict[tuple[int, float], int]) -> str:
    size = 2 * sum(x != LEAF for x in asked) + 1
    nodes = list(zip(asked, value, strict=True))[:size]
    said = [round(x / LEAF_UNIT) if feature == LEAF else positions[feature, x] for feature, x in nodes]
    return json.dumps({"asked": asked[:size], "value": said}, separators=(",", ":"))
