"""What measured products teach beyond the cost model: a correction of the time that it predicts for a kernel.

The model says why a tile takes how long, and is off by what it leaves out, in ways that repeat. A forest of
regression trees, fitted to the kernel times of some thousand products (`python -m jax_bwgemm bench --calibrate`), adds
up what it has seen of kernels alike. It belongs to a family and to the constants of the model that it was fitted with:
beside others it is of no use, and there is none then. Reads a file that ships; measures nothing, chooses nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_bwgemm import _files
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.constants import Constants
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cost import Cost, roofline_us
from jax_bwgemm.planner.features import features, kernel_log, names

FORMAT = 2
SHIPPED = Path(__file__).parent / "calibrations"
MOST_BYTES = 2**22
NEAR = 1.75  # times the least predicted time: the best kernel of 3662 products was always within 1.69 times that
LEAF = -1  # in place of a feature

Judged = tuple[Tile, Problem, Cost]


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
    def of(cls, trees: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Trees:
        """Of each tree (asked, value), in the order of levels: the children of the i-th node that asks are 2 i + 1 and
        2 i + 2. ValueError for anything else."""
        shape = len(trees), max((len(asked) for asked, _ in trees), default=1)
        found = cls(np.full(shape, LEAF), np.zeros(shape), np.zeros(shape, np.intp), depth=0)
        for i, (asked, value) in enumerate(trees):
            inner = np.asarray(asked) != LEAF
            if len(asked) != len(value) or len(asked) != 2 * inner.sum() + 1:
                raise ValueError(f"a tree of {inner.sum()} questions requires one more leaf, got {len(asked)} nodes")
            children = 2 * np.cumsum(inner) - 1
            if (children[inner] <= np.flatnonzero(inner)).any() or not -1 <= min(asked) <= max(asked) < len(names()):
                raise ValueError("a tree requires its nodes by level, and features that there are")
            found.asked[i, : len(asked)], found.value[i, : len(asked)] = asked, value
            found.left[i, : len(asked)] = np.where(inner, children, np.arange(len(asked)))
        return dataclasses.replace(found, depth=_depth(found))

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """What all trees add, of each of the rows (row, feature)."""
        tree = np.arange(len(self.asked))
        at = np.zeros((len(rows), len(self.asked)), np.intp)
        for _ in range(self.depth):
            asked = self.asked[tree, at]
            goes_right = np.take_along_axis(rows, np.maximum(asked, 0), 1) > self.value[tree, at]
            at = self.left[tree, at] + (goes_right & (asked != LEAF))
        found: np.ndarray = self.value[tree, at].sum(1)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Of the kernels of one `family`, beside the model of these `constants`."""

    family: str
    constants: Constants
    trees: Trees

    def corrected(self, judged: Sequence[Judged], arch: Arch, least_us: float) -> list[Cost]:
        """With the times that are expected of the kernels of one product, of which the best at hand is predicted to
        take `least_us`. Those that are not `NEAR` enough to be chosen are corrected as what is corrected most of the
        others."""
        covered = [is_covered(tile, problem) for tile, problem, _ in judged]
        near = [i for i, (*_, cost) in enumerate(judged) if covered[i] and cost.us <= NEAR * least_us]
        if not near:
            return [cost for *_, cost in judged]
        rows = np.array([row(*judged[i], arch) for i in near])
        logs = dict(zip(near, self.trees.sums(rows).tolist(), strict=True))
        most = max(logs.values())
        return [
            _scaled(cost, logs.get(i, most), problem, arch) if covered[i] else cost
            for i, (_, problem, cost) in enumerate(judged)
        ]


def row(tile: Tile, problem: Problem, found: Cost, arch: Arch) -> np.ndarray:
    """The features of one kernel."""
    return np.fromiter(features(tile, problem, arch, found).values(), np.float64)


def is_covered(tile: Tile, problem: Problem) -> bool:
    """Whether kernels of this kind were measured: of 2-byte operands, multiplied once and stored once."""
    return DTYPE_BYTES[problem.a_dtype] == 2 and not (tile.promoted or tile.gated or tile.symmetric)


def of(arch: Arch) -> Calibration | None:
    """The one that ships for the family of `arch`, if that has the constants that it was fitted with: those of an H200
    serve an H100, too (docs/architecture.md)."""
    found = _shipped(arch.family.name)
    return found if found and found.constants == arch.constants else None


def load(path: Path) -> Calibration:
    """Raises ValueError for what is no calibration of this version."""
    try:
        fields: dict[str, Any] = _files.read_json(path, MOST_BYTES)
        if (fields["format"], tuple(fields["features"])) != (FORMAT, names()):
            raise ValueError("other features")
        thresholds, unit = list(fields["features"].values()), float(fields["leaf_unit"])
        trees = Trees.of([_tree(tree["asked"], tree["value"], thresholds, unit) for tree in fields["trees"]])
        return Calibration(fields["family"], Constants(**fields["constants"]), trees)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a calibration requires what `bench --calibrate` writes, got {path}: {error}") from None


def _tree(
    asked: list[int], value: list[int], thresholds: list[list[float]], unit: float
) -> tuple[list[int], list[float]]:
    """As `Trees.of` takes it: a file has positions of thresholds, and leaves in units."""
    said = (unit * x if feature == LEAF else thresholds[feature][x] for feature, x in zip(asked, value, strict=True))
    return asked, list(said)


@functools.lru_cache(maxsize=16)
def _shipped(family: str) -> Calibration | None:
    path = SHIPPED / f"{family}.json"
    if _files.stamp(path) is None:
        return None
    try:
        return load(path)
    except ValueError as error:
        warnings.warn(f"the cost model is not calibrated: {error}", stacklevel=2)
        return None


def _scaled(cost: Cost, log: float, problem: Problem, arch: Arch) -> Cost:
    kernel_us = max(math.exp(kernel_log(cost, arch) + log), roofline_us(problem, arch))
    us = kernel_us + cost.padding_us + arch.constants.launch_us
    return dataclasses.replace(cost, us=us, utilisation=cost.utilisation * cost.us / us)


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
