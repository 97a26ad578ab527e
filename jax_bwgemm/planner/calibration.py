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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.constants import Constants
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner import trees
from jax_bwgemm.planner.cost import Cost, roofline_us
from jax_bwgemm.planner.features import features, kernel_log, names
from jax_bwgemm.planner.trees import Trees

FORMAT = 2
SHIPPED = Path(__file__).parent / "calibrations"
NEAR = 1.75  # times the least predicted time: the best kernel of 3662 products was always within 1.69 times that

Judged = tuple[Tile, Problem, Cost]


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
    """Whether kernels of this kind were measured: of 2-byte operands, multiplied once and stored once, not thin."""
    is_other = tile.promoted or tile.gated or tile.symmetric or tile.is_thin
    return DTYPE_BYTES[problem.a_dtype] == 2 and not is_other


def of(arch: Arch) -> Calibration | None:
    """The one that ships for the family of `arch`, if that has the constants that it was fitted with: those of an H200
    serve an H100, too (docs/architecture.md)."""
    found = _shipped(arch.family.name)
    return found if found and found.constants == arch.constants else None


def load(path: Path) -> Calibration:
    """Raises ValueError for what is no calibration of this version."""

    def of(fields: dict[str, Any]) -> Calibration:
        return Calibration(fields["family"], Constants(**fields["constants"]), Trees.read(fields, names()))

    return trees.load(path, FORMAT, of, "a calibration requires what `bench --calibrate` writes")


@functools.lru_cache(maxsize=16)
def _shipped(family: str) -> Calibration | None:
    return trees.shipped(SHIPPED / f"{family}.json", load, "the cost model is not calibrated")


def _scaled(cost: Cost, log: float, problem: Problem, arch: Arch) -> Cost:
    kernel_us = max(math.exp(kernel_log(cost, arch) + log), roofline_us(problem, arch))
    us = kernel_us + cost.padding_us + arch.constants.launch_us
    return dataclasses.replace(cost, us=us, utilisation=cost.utilisation * cost.us / us)
