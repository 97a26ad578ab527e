"""`bench --calibrate-xla`: fits what XLA is expected to take (`planner/xla`) to results of `bench`, and says how far
off is what is expected by the formula and by trees, over products that these were not fitted to.

Of each row the time by XLA's default flags counts, which is what a product that is left to XLA gets.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jax_bwgemm.bench import forest, report
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import xla
from jax_bwgemm.planner.trees import Trees

FOLDS = 10
NUM_TREES, LEAVES, DEPTH, LEAST_IN_LEAF = 300, 64, 12, 8
RATE, SAMPLE, FEATURE_SHARE = 0.05, 0.8, 0.5  # a tree's weight; the part of the products, and of features at a node


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one product that XLA computed: its kind and features, and the logarithm of what it took over the formula."""

    kind: str
    row: np.ndarray
    log: float


def main(paths: Sequence[Path], out: Path | None, seed: int) -> int:
    """Prints how far off is what is expected, and writes `out`, by default the file that ships."""
    files = {path.name: load(path) for path in paths}
    (family, *others) = dict.fromkeys(arch.family.name for arch, _ in files.values())
    if others:
        raise ValueError(f"`--calibrate-xla` requires devices of one family, got {' and '.join((family, *others))}")
    products = [product for _, measured in files.values() for product in measured]
    if len(products) < FOLDS:
        raise ValueError(f"`--calibrate-xla` requires at least {FOLDS} products, got {len(products)}")
    for label, left in (("the formula alone", [x.log for x in products]), ("trees of others", crossed(products, seed))):
        print(f"{label}:")
        for kind, logs in _by_kind(products, left).items():
            half, nine_tenths = off_by(logs)
            print(
                f"  {kind}: half of {len(logs)} within {100 * half:.0f} %, nine tenths within {100 * nine_tenths:.0f} %"
            )
    path = out or xla.SHIPPED / f"{family}_xla.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = {name: len(measured) for name, (_, measured) in files.items()}
    path.write_text(text(grown(products, seed), family, counts, seed))
    print(f"wrote {path}")
    return 0


def load(path: Path) -> tuple[Arch, list[Measured]]:
    """Of a result of `bench`. ValueError for any other file."""
    result = report.load(path)
    arch = by_name(result.arch)
    each = ((row.case.fused, row.default.us) for row in result.rows)
    return arch, [measured(problem, us, arch) for problem, us in each if xla.is_covered(problem)]


def measured(problem: Problem, us: float, arch: Arch) -> Measured:
    return Measured(xla.kind_of(problem), xla.row(problem, arch), math.log(us / xla.formula_us(problem, arch)))


def crossed(products: Sequence[Measured], seed: int) -> list[float]:
    """What is left of the logarithms beside trees that were grown from other products."""
    left = dict.fromkeys(range(len(products)), 0.0)
    for fold in forest.folds(len(products), FOLDS, seed):
        held_out = set(fold)
        trees = grown([x for i, x in enumerate(products) if i not in held_out], seed)
        sums = trees.sums(np.array([products[i].row for i in fold]))
        left |= {i: products[i].log - log for i, log in zip(fold, sums.tolist(), strict=True)}
    return list(left.values())


def grown(products: Sequence[Measured], seed: int) -> Trees:
    """ValueError without LightGBM."""
    wanted = {
        "objective": "regression_l1", "num_leaves": LEAVES, "max_depth": DEPTH, "min_data_in_leaf": LEAST_IN_LEAF,
        "learning_rate": RATE, "bagging_fraction": SAMPLE, "feature_fraction_bynode": FEATURE_SHARE,
    }  # fmt: skip
    rows, logs = np.array([x.row for x in products]), np.array([x.log for x in products])
    trees = forest.grown(rows, logs, np.ones(len(logs)), wanted, NUM_TREES, seed, "--calibrate-xla")
    return Trees.of(trees, len(xla.names()))


def off_by(logs: Iterable[float]) -> tuple[float, float]:
    """What half and nine tenths of the products are off at most: 0.1 for what took 1.1 times what was expected, or was
    expected to take that of what it took."""
    tenths = statistics.quantiles(map(abs, logs), n=10, method="inclusive")
    return math.expm1(tenths[4]), math.expm1(tenths[8])


def _by_kind(products: Sequence[Measured], logs: Sequence[float]) -> dict[str, list[float]]:
    """All of them first; kinds of which there are several."""
    found = collections.defaultdict[str, list[float]](list)
    for product, log in zip(products, logs, strict=True):
        found["all"].append(log)
        found[product.kind].append(log)
    return {kind: logs for kind, logs in found.items() if len(logs) > 1}


def text(trees: Trees, family: str, files: dict[str, int], seed: int) -> str:
    """Of the file that ships."""
    head = {
        "format": xla.FORMAT,
        "family": family,
        "command": f"python -m jax_bwgemm bench --seed {seed} --calibrate-xla FILE ...",
        "products": files,
        "formula": xla.formula(),
    }
    return forest.text(head, trees, xla.names())
