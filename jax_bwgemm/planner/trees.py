"""Forests of regression trees: numbers that add up what was seen of things alike. They know no product."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_bwgemm import _files

LEAF = -1  # in place of a feature
MOST_BYTES = 2**22  # of a file
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """(tree, node) each, the root first: the position of the feature that a node asks for, or LEAF; up to which value
    it sends to its left child, whose right neighbour is the other one, or what a leaf adds; and the left child, a
    leaf's itself."""

    asked: np.ndarray
    value: np.ndarray
    left: np.ndarray
    depth: int

    @classmethod
    def read(cls, fields: dict[str, Any], names: Sequence[str]) -> Trees:
        """Of a file that asks for the features of these `names`: it has positions of thresholds, and leaves in units.
        ValueError, LookupError, TypeError or AttributeError for what is none."""
        if tuple(fields["features"]) != tuple(names):
            raise ValueError("other features")
        thresholds, unit = list(fields["features"].values()), float(fields["leaf_unit"])
        return cls.of([_tree(tree["asked"], tree["value"], thresholds, unit) for tree in fields["trees"]], len(names))

    @classmethod
    def of(cls, trees: Sequence[tuple[Sequence[int], Sequence[float]]], num_features: int) -> Trees:
        """Of each tree (asked, value), in the order of levels: the children of the i-th node that asks are 2 i + 1 and
        2 i + 2. ValueError for anything else."""
        shape = len(trees), max((len(asked) for asked, _ in trees), default=1)
        found = cls(np.full(shape, LEAF), np.zeros(shape), np.zeros(shape, np.intp), depth=0)
        for i, (asked, value) in enumerate(trees):
            inner = np.asarray(asked) != LEAF
            if len(asked) != len(value) or len(asked) != 2 * inner.sum() + 1:
                raise ValueError(f"a tree of {inner.sum()} questions requires one more leaf, got {len(asked)} nodes")
            children = 2 * np.cumsum(inner) - 1
            if (children[inner] <= np.flatnonzero(inner)).any() or not -1 <= min(asked) <= max(asked) < num_features:
                raise ValueError("a tree requires its nodes by level, and features that there are")
            found.asked[i, : len(asked)], found.value[i, : len(asked)] = asked, value
            found.left[i, : len(asked)] = np.where(inner, children, np.arange(len(asked)))
        return dataclasses.replace(found, depth=_depth(found))

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """What all trees add, of each of the rows (row, feature)."""
        asked, limit, left = self._flat
        num_rows, num_features = rows.shape
        flat, first = np.ascontiguousarray(rows).ravel(), num_features * np.arange(num_rows)[:, None]
        at = np.broadcast_to(self.asked.shape[1] * np.arange(len(self.asked)), (num_rows, len(self.asked)))
        for _ in range(self.depth):
            at = left.take(at) + (flat.take(first + asked.take(at)) > limit.take(at))
        found: np.ndarray = self.value.ravel().take(at).sum(1)
        return found

    @functools.cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(asked, limit, left) of all nodes in a row, of which a leaf asks for any feature and sends nothing on."""
        is_leaf = self.asked == LEAF
        left = self.left + self.asked.shape[1] * np.arange(len(self.asked))[:, None]
        return np.where(is_leaf, 0, self.asked).ravel(), np.where(is_leaf, np.inf, self.value).ravel(), left.ravel()


def load(path: Path, version: int, of: Callable[[dict[str, Any]], Made], rule: str) -> Made:
    """What `of` makes of a file's fields. ValueError, with the rule, for another format, or what `of` refuses."""
    try:
        fields: dict[str, Any] = _files.read_json(path, MOST_BYTES)
        if fields["format"] != version:
            raise ValueError(f"another format, {fields['format']}")
        return of(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{rule}, got {path}: {error}") from None


def shipped(path: Path, load: Callable[[Path], Made], otherwise: str) -> Made | None:
    """What is loaded of a file, if there is one; a damaged one is a warning that begins by what there is otherwise."""
    if _files.stamp(path) is None:
        return None
    try:
        return load(path)
    except ValueError as error:
        warnings.warn(f"{otherwise}: {error}", stacklevel=3)
        return None


def _tree(
    asked: list[int], value: list[int], thresholds: list[list[float]], unit: float
) -> tuple[list[int], list[float]]:
    """As `Trees.of` takes it."""
    said = (unit * x if feature == LEAF else thresholds[feature][x] for feature, x in zip(asked, value, strict=True))
    return asked, list(said)


def _depth(trees: Trees) -> int:
    """Of the deepest tree."""
    at, depth = trees.asked != LEAF, 0
    level = np.zeros_like(trees.left)
    for i in range(trees.asked.shape[1]):
        inner = np.flatnonzero(at[:, i])
        for side in (0, 1):
            level[inner, trees.left[inner, i] + side] = level[inner, i] + 1
        depth = max(depth, int(level[:, i].max(initial=0)))
    return depth
