"""`bench --fit`: searches the constants of the cost model under which it would choose best among measured kernels.

Of files that `--regret` wrote on Hopper. A random walk keeps what loses less: what the choices lose on average and at
worst, and how far predicted times scatter about measured ones. Prints the constants as `cost` and `arch` name them;
changes neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm import cost as model
from jax_bwgemm.arch import Arch, by_name
from jax_bwgemm.bench import regret
from jax_bwgemm.padding import why_not_padded
from jax_bwgemm.plan import Candidate, plan
from jax_bwgemm.problem import Epilogue, Problem
from jax_bwgemm.tile import Tile

HOPPER = "hopper"
PARAMETERS: tuple[tuple[str, Any, float, float], ...] = (
    ("START_CYCLES", HOPPER, 100, 20000),
    ("MEETING_CYCLES", HOPPER, 10, 10000),
    ("TORN_LINES", HOPPER, 1, 2.2),
    ("LATENCY", HOPPER, 0.1, 4),
    ("OVERLAP", HOPPER, 1, 12),
    ("MEMORY_OVERLAP", HOPPER, 1, 12),
    ("L2_ALONE_BYTES_PER_CLK", HOPPER, 30, 140),
    ("EXCHANGE_CYCLES", 0, 100, 20000),
    ("EXCHANGE_CYCLES", 1, 10, 5000),
    ("STREAM_CYCLES", None, 100, 20000),
    ("STREAM_PART", None, 0.2, 10),
    ("STREAM_SKEW", None, 1, 1.5),
    ("HOPPER_THREAD_STORE_CYCLES", None, 0.01, 1),
    ("HOPPER_CLOCK", 0, 1.98, 6),
    ("HOPPER_CLOCK", 1, 0.01, 4),
    ("l2_read_bytes_per_clk", Arch, 20, 90),
)  # name, place in it, least, most; the last one is the Arch's
SCATTER_WEIGHT = 0.15
STEP = 0.25  # of a parameter's logarithm

Values = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product and its kernels' times."""

    problem: Problem
    times_us: dict[tuple[Tile, bool], float]


def load(path: Path) -> tuple[Arch, list[Measured]]:
    """What `--regret N --json PATH` wrote, without products that are XLA's by now. ValueError for another file."""
    try:
        fields = json.loads(path.read_text())
        if fields["format"] != regret.FORMAT:
            raise ValueError(f"format {regret.FORMAT}, got {fields['format']!r}")
        products = [_measured(product) for product in fields["products"]]
        return by_name(fields["facts"]["arch"]), [p for p in products if why_not_padded(p.problem) is None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`--fit` requires a file that `--regret --json` wrote, got {path}: {error}") from error


def main(paths: Sequence[Path], steps: int, seed: int) -> int:
    arch, products = load(paths[0])[0], [product for path in paths for product in load(path)[1]]
    if not products:
        raise ValueError(f"`--fit` requires products that kernels of ours compute, got none in {list(map(str, paths))}")
    before = current(arch)
    after = search(arch, products, steps, seed)
    for (name, place, *_), old, new in zip(PARAMETERS, before, after, strict=True):
        where = "" if place in (None, Arch) else f"[{place!r}]"
        print(f"{name + where:<36} {old:10.4g} -> {new:.4g}")
    for label, values in (("before", before), ("after", after)):
        with using(values, arch) as own:
            lost = regret.statistics([lost_by(product, own) for product in products])
        print(f"{label}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in lost.items()))
    return 0


def search(
    arch: Arch, products: Sequence[Measured], steps: int, seed: int, keep: Callable[[float], object] = lambda loss: None
) -> Values:
    """The best values found in so many steps from the present ones; `keep` hears of each improvement."""
    rng, best = random.Random(seed), current(arch)
    least = loss(best, arch, products)
    for _ in range(steps):
        values = list(best)
        for i in rng.sample(range(len(values)), rng.choice((1, 1, 2, 3))):
            _, _, low, high = PARAMETERS[i]
            values[i] = min(high, max(low, values[i] * math.exp(rng.gauss(0, STEP))))
        if (found := loss(tuple(values), arch, products)) < least:
            least, best = found, tuple(values)
            keep(found)
    return best


def loss(values: Values, arch: Arch, products: Sequence[Measured]) -> float:
    with using(values, arch) as own:
        lost = [lost_by(product, own) for product in products]
        scatter = [
            math.log((found.us - found.padding_us - model.LAUNCH_US) / us)
            for product in products
            for (tile, is_swapped), us in product.times_us.items()
            for found in [model.cost(tile, product.problem.transposed if is_swapped else product.problem, own)]
        ]
    mean, _, p90, _ = regret.statistics(lost).values()
    return mean + 0.3 * p90 + SCATTER_WEIGHT * statistics.pstdev(scatter)


def lost_by(product: Measured, arch: Arch) -> float:
    """What the model's choice among the measured kernels loses: 0.1 if it takes 10 % longer than the fastest."""
    among = [
        Candidate(tile, product.problem.transposed if is_swapped else product.problem, is_swapped)
        for tile, is_swapped in product.times_us
    ]
    chosen = plan(product.problem, arch, among=among)
    if chosen.tile is None:
        raise ValueError(f"`--fit` requires products that kernels can compute, got {product.problem}: {chosen.reason}")
    return product.times_us[chosen.tile, chosen.swapped] / min(product.times_us.values()) - 1


def current(arch: Arch) -> Values:
    return tuple(
        arch.l2_read_bytes_per_clk
        if place is Arch
        else getattr(model, name)
        if place is None
        else getattr(model, name)[place]
        for name, place, _, _ in PARAMETERS
    )


@contextlib.contextmanager
def using(values: Values, arch: Arch) -> Iterator[Arch]:
    """The model has these values, and `arch` as well, while the block lasts."""
    before = {name: getattr(model, name) for name, place, _, _ in PARAMETERS if place is not Arch}
    own = arch
    try:
        for (name, place, _, _), value in zip(PARAMETERS, values, strict=True):
            if place is Arch:
                own = dataclasses.replace(own, l2_read_bytes_per_clk=value)
            else:
                setattr(model, name, _with(getattr(model, name), place, value))
        yield own
    finally:
        for name, old in before.items():
            setattr(model, name, old)


def _with(constant: Any, place: Any, value: float) -> Any:
    """A constant, but for what it has at `place`."""
    if place is None:
        return value
    if isinstance(constant, dict):
        return constant | {place: value}
    return tuple(value if i == place else old for i, old in enumerate(constant))


def _measured(fields: dict[str, Any]) -> Measured:
    problem = Problem(**fields["problem"] | {"epilogue": Epilogue(**fields["problem"]["epilogue"])})
    times = {(Tile.from_str(kernel["tile"]), kernel["swapped"]): kernel["measured_us"] for kernel in fields["kernels"]}
    return Measured(problem, times)
