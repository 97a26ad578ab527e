"""`bench --fit`: searches the constants of the cost model under which it would choose best among measured kernels.

Of files that `--regret` wrote, on Hopper so far. A random walk keeps what loses less: what the choices lose on average
and at worst, and how far predicted times scatter about measured ones. Prints the constants by their names in
`constants`; changes none.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from jax_bwgemm.bench import kernel_times, regret
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.constants import Constants
from jax_bwgemm.facts.padding import why_not_padded
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.plan import plan

PARAMETERS = {
    "start_cycles": (100, 20000),
    "meeting_cycles": (10, 10000),
    "torn_lines": (1, 2.2),
    "latency": (0.1, 4),
    "overlap": (1, 12),
    "memory_overlap": (1, 12),
    "l2_alone_bytes_per_clk": (30, 140),
    "exchange_cycles": (100, 20000),
    "exchange_cta_cycles": (10, 5000),
    "stream_cycles": (100, 20000),
    "stream_part": (0.2, 10),
    "stream_skew": (1, 1.5),
    "thread_store_cycles": (0.01, 1),
    "clock_idle_ghz": (1.98, 6),
    "clock_slope_ghz": (0.01, 4),
    "l2_read_bytes_per_clk": (20, 90),
    "row_cycles": (0.1, 10),
    "line_cycles": (0.1, 20),
    "turn_cycles": (10, 5000),
    "drain_cycles": (50, 5000),
    "store_bytes_per_clk": (8, 128),
    "box_cycles": (1, 400),
    "loop_cycles": (1, 500),
    "backlog_cycles": (1, 500),
    "direct_start_cycles": (500, 10000),
    "direct_round_cycles": (100, 10000),
    "direct_meeting_cycles": (100, 20000),
    "direct_step_cycles": (5, 1000),
    "direct_chunk_cycles": (1, 100),
    "direct_raw_cycles": (2, 300),
    "direct_element_cycles": (0.5, 100),
    "thin_start_cycles": (500, 20000),
    "thin_latency_cycles": (100, 5000),
    "thin_kib_cycles": (2, 200),
    "thin_fill_cycles": (100, 20000),
    "thin_meeting_cycles": (100, 20000),
}  # of `constants.Constants`: least, most
SCATTER_WEIGHT = 0.15
STEP = 0.25  # of a parameter's logarithm


def load(path: Path) -> tuple[Arch, list[Measured]]:
    """What `--regret N --json PATH` wrote, without products that are XLA's by now; as if each launch had written a
    memory of its own. ValueError for another file."""
    facts, products = kernel_times.load(path)
    own = [x for x in products if why_not_padded(x.problem) is None]
    has_own_results = facts.get("results") == kernel_times.OWN
    return by_name(facts.get("arch", "")), own if has_own_results else [kernel_times.with_own_results(x) for x in own]


def main(paths: Sequence[Path], steps: int, seed: int) -> int:
    arch, products = load(paths[0])[0], [product for path in paths for product in load(path)[1]]
    if not products:
        raise ValueError(f"`--fit` requires products that kernels of ours compute, got none in {list(map(str, paths))}")
    before = arch.constants
    after = search(arch, products, steps, seed)
    for name in PARAMETERS:
        print(f"{name:<24} {getattr(before, name):10.4g} -> {getattr(after, name):.4g}")
    for label, constants in (("before", before), ("after", after)):
        own = dataclasses.replace(arch, constants=constants)
        lost = regret.statistics([lost_by(product, own) for product in products])
        print(f"{label}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in lost.items()))
    return 0


def search(
    arch: Arch, products: Sequence[Measured], steps: int, seed: int, keep: Callable[[float], object] = lambda loss: None
) -> Constants:
    """The best constants found in so many steps from the arch's; `keep` hears of each improvement."""
    rng, best = random.Random(seed), arch.constants
    least = loss(best, arch, products)
    for _ in range(steps):
        names = rng.sample(list(PARAMETERS), rng.choice((1, 1, 2, 3)))
        tried = dataclasses.replace(best, **{name: _moved(getattr(best, name), name, rng) for name in names})
        if (found := loss(tried, arch, products)) < least:
            least, best = found, tried
            keep(found)
    return best


def loss(constants: Constants, arch: Arch, products: Sequence[Measured]) -> float:
    own = dataclasses.replace(arch, constants=constants)
    lost = [lost_by(product, own) for product in products]
    scatter = [
        math.log((found.us - found.padding_us - constants.launch_us) / us)
        for product in products
        for (tile, is_swapped), us in product.times_us.items()
        for found in [cost(tile, product.problem.transposed if is_swapped else product.problem, own)]
    ]
    mean, _, p90, _ = regret.statistics(lost).values()
    return mean + 0.3 * p90 + SCATTER_WEIGHT * statistics.pstdev(scatter)


def lost_by(product: Measured, arch: Arch, is_calibrated: bool = False) -> float:
    """What the model's choice among the measured kernels loses, all with what pads their operands: 0.1 if it takes 10 %
    longer than the fastest. `is_calibrated` as `plan` takes it."""
    among = [
        Candidate(tile, product.problem.transposed if is_swapped else product.problem, is_swapped)
        for tile, is_swapped in product.times_us
    ]
    chosen = plan(product.problem, arch, among=among, is_calibrated=is_calibrated)
    if chosen.tile is None:
        raise ValueError(f"times require a product that kernels can compute, got {product.problem}: {chosen.reason}")
    wholes_us = {
        (c.tile, c.swapped): product.times_us[c.tile, c.swapped] + c.cost.padding_us
        for c in chosen.candidates
        if c.cost
    }
    return wholes_us[chosen.tile, chosen.swapped] / min(wholes_us.values()) - 1


def _moved(value: float, name: str, rng: random.Random) -> float:
    low, high = PARAMETERS[name]
    return min(high, max(low, value * math.exp(rng.gauss(0, STEP))))
