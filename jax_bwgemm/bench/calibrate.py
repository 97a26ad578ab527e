"""`bench --calibrate`: fits the correction of the cost model's times (`planner/calibration`) to measured kernels, and
says what the planner's choices lose with it and without, over products that it was not fitted to.

Of files that `--regret` wrote. A time counts the more, the closer it is to its product's best, for those are what is
chosen from; what takes twice as long, not at all. A file may say by the `weight` of its facts that its products count
less, or more: those of kernels some of which are others by now, or of all that ship.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_bwgemm.bench import forest, kernel_times, regret
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.constants import Constants
from jax_bwgemm.planner import calibration
from jax_bwgemm.planner.calibration import Calibration, row
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.features import kernel_log, names
from jax_bwgemm.planner.streams import idle
from jax_bwgemm.planner.trees import Trees

FOLDS = 5
NUM_TREES, DEPTH, LEAVES, LEAST_IN_LEAF, BINS = 420, 16, 400, 15, 63
RATE, SAMPLE, FEATURE_SHARE = 0.06, 0.8, 0.5  # a tree's weight; the part of the kernels, and of features at a node
SHARPNESS, SLOWEST = 4.0, 2.0  # of weights; times the best: of no account
SHARED = 0.3  # of what all kernels of a product are off by, which no choice between them depends on


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Of one product: (kernel, feature); and of each kernel the logarithm of what was measured over what was predicted,
    and the microseconds that it took, and that its operands' padding takes."""

    rows: np.ndarray
    logs: np.ndarray
    measured_us: np.ndarray
    padding_us: np.ndarray
    weight: float = 1.0

    @property
    def wholes_us(self) -> np.ndarray:
        whole: np.ndarray = self.measured_us + self.padding_us
        return whole

    def reach(self, constants: Constants) -> float:
        """What is predicted of the fastest kernel, in times of the least that is predicted of any."""
        predicted_us = self.measured_us * np.exp(-self.logs) + self.padding_us + constants.launch_us
        found: float = predicted_us[int(self.wholes_us.argmin())] / predicted_us.min()
        return found

    def lost(self, logs: np.ndarray) -> float:
        """By choosing the kernel of the least time if `logs` are the corrections: 0.1 if it takes 10 % longer."""
        expected_us = self.measured_us * np.exp(logs - self.logs) + self.padding_us
        chosen: float = self.wholes_us[int(expected_us.argmin())] / self.wholes_us.min() - 1
        return chosen


def main(paths: Sequence[Path], out: Path | None, seed: int) -> int:
    """Prints the losses, and writes `out`, by default the calibration that ships."""
    files = [load(path) for path in paths]
    archs = list(dict.fromkeys(arch for arch, _ in files))
    (family, constants), *others = dict.fromkeys((arch.family.name, arch.constants) for arch in archs)
    if others:
        given = " and ".join(arch.name for arch in archs)
        raise ValueError(f"`--calibrate` requires devices of one family and its constants, got {given}")
    products = [
        kernels(product, arch, weight)
        for (arch, measured), weight in zip(files, map(_weight, paths), strict=True)
        for product in measured
    ]
    if len(products) < FOLDS:
        raise ValueError(f"`--calibrate` requires at least {FOLDS} measured products, got {len(products)}")
    by_others = crossed(products, seed)
    choices = [i for i, product in enumerate(products) if len(product.logs) > 1]  # of one kernel, nothing is lost
    model = [products[i].lost(np.zeros(len(products[i].logs))) for i in choices]
    calibrated = [by_others[i] for i in choices]
    for label, losses in (("the model alone", model), ("calibrated by other products", calibrated)):
        said = ", ".join(f"{name} {100 * value:.2f} %" for name, value in regret.statistics(losses).items())
        print(f"{label}: {said} of {len(losses)} products")
    farthest = max(product.reach(constants) for product in products)
    print(f"the fastest is predicted within {farthest:.2f} times the least; corrected up to {calibration.NEAR} times")
    path = out or calibration.SHIPPED / f"{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = Calibration(family, constants, Trees.of(grown(products, seed), len(names())))
    counts = {path.name: len(measured) for path, (_, measured) in zip(paths, files, strict=True)}
    path.write_text(text(found, counts, seed))
    print(f"wrote {path}")
    return 0


def _weight(path: Path) -> float:
    """Of a file's products."""
    return float(kernel_times.load(path)[0].get("weight", 1.0))


def kernels(product: Measured, arch: Arch, weight: float = 1.0) -> Kernels:
    """The measured kernels of a product that may be chosen."""
    found = []
    for (tile, is_swapped), us in product.times_us.items():
        own = product.problem.transposed if is_swapped else product.problem
        if (idle(tile, own, arch), is_swapped) in product.times_us:
            continue
        predicted = cost(tile, own, arch)
        found.append(
            (row(tile, own, predicted, arch), math.log(us) - kernel_log(predicted, arch), us, predicted.padding_us)
        )
    rows, logs, measured_us, padding_us = (np.array(column, np.float64) for column in zip(*found, strict=True))
    return Kernels(rows, logs, measured_us, padding_us, weight)


def crossed(products: Sequence[Kernels], seed: int) -> list[float]:
    """What is lost by product, each with trees that were grown from others."""
    losses = dict.fromkeys(range(len(products)), 0.0)
    for fold in forest.folds(len(products), FOLDS, seed):
        held_out = set(fold)
        trees = Trees.of(grown([x for i, x in enumerate(products) if i not in held_out], seed), len(names()))
        losses |= {i: products[i].lost(trees.sums(products[i].rows)) for i in fold}
    return list(losses.values())


def grown(products: Sequence[Kernels], seed: int) -> list[forest.Tree]:
    """Trees as `Trees.of` takes them. ValueError without LightGBM."""
    slower = [product.wholes_us / product.wholes_us.min() for product in products]
    counts = [x <= SLOWEST for x in slower]
    groups = np.repeat(np.arange(len(products)), [own.sum() for own in counts])
    rows, logs, weights = (
        np.concatenate([x[own] for x, own in zip(columns, counts, strict=True)])
        for columns in (
            [p.rows for p in products],
            [p.logs for p in products],
            [p.weight * x**-SHARPNESS for p, x in zip(products, slower, strict=True)],
        )
    )
    wanted = {
        "num_leaves": LEAVES, "max_depth": DEPTH, "min_data_in_leaf": LEAST_IN_LEAF,
        "max_bin": BINS, "learning_rate": RATE, "bagging_fraction": SAMPLE, "feature_fraction_bynode": FEATURE_SHARE,
    }  # fmt: skip
    return forest.grown(rows, logs, weights, wanted, NUM_TREES, seed, "--calibrate", groups, SHARED)


def text(found: Calibration, files: dict[str, int], seed: int) -> str:
    """Of the file that ships."""
    head = {
        "format": calibration.FORMAT,
        "family": found.family,
        "command": f"python -m jax_bwgemm bench --seed {seed} --calibrate FILE ...",
        "products": files,
        "constants": dataclasses.asdict(found.constants),
    }
    return forest.text(head, found.trees, names())
