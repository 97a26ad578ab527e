"""What docs/hopper.md says a sooner first load is worth, by the times of one sample's kernels before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

import jax_bwgemm.bench
from jax_bwgemm.bench.kernel_times import load
from jax_bwgemm.facts.tile import Tile

RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
HOPPER_PAGE = (Path(__file__).parent.parent.parent / "docs" / "hopper.md").read_text()


def test_what_a_sooner_first_load_is_worth() -> None:
    """The table of docs/hopper.md: the same products' kernels, timed before and after."""
    names = "h200_any_again_held_out.json", "h200_any_sooner_held_out.json"
    before, now = ({product.problem: product.times_us for product in load(RESULTS / name)[1]} for name in names)
    assert before.keys() == now.keys()
    kinds: dict[str, Callable[[Tile], bool]] = {
        "ping-pong": lambda tile: tile.pingpong,
        "stream-K": lambda tile: tile.stream_k,
        "other tiles by TMA": lambda tile: not (tile.pingpong or tile.stream_k),
    }
    ratios = [
        (kernel[0], us, us / now[problem][kernel])
        for problem, times in before.items()
        for kernel, us in times.items()
        if kernel in now[problem]
    ]
    rows = {"direct, which did not change": [(us, x) for tile, us, x in ratios if tile.direct]} | {
        name: [(us, x) for tile, us, x in ratios if not tile.direct and is_it(tile)] for name, is_it in kinds.items()
    }
    for name, found in rows.items():
        bounds = (0.0, 3.0, 6.0, 12.0, math.inf)
        medians = [float(np.median([x for us, x in found if low <= us < high])) for low, high in pairwise(bounds)]
        line = f"| {name} | " + " | ".join(f"{median:.3f}" for median in medians) + " |"
        assert line in HOPPER_PAGE, line
    fastest = [math.log(min(before[problem].values()) / min(now[problem].values())) for problem in before]
    assert f"takes {100 * (1 - math.exp(-np.mean(fastest))):.1f} % less (geometric mean)" in HOPPER_PAGE
