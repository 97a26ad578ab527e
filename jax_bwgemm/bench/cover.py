"""`bench --cover`: what the catalogue has for products that nobody tuned. Needs no GPU: the cost model alone judges.

Over a stated distribution of products (`drawn`): what the best kernel that ships is predicted to lose to the best of
all tiles in the planner's lists, by dtypes and epilogue; which kernels would be worth their place, the one of the
greatest gain first; and which that ship the planner never chooses, on either device of a target. Or, as if nothing
shipped, which kernels to ship.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax_bwgemm.bench.cases import LAYERS, Case
from jax_bwgemm.cli.explain_choices import cases, choice
from jax_bwgemm.facts.arch import ARCHS, Arch, by_name
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.planner.cost import pass_us
from jax_bwgemm.planner.plan import plan

CLASSES = {
    "": 0.34,
    "->f32": 0.05,
    ":bias": 0.08,
    ":relu": 0.02,
    ":bias+relu": 0.03,
    ":bias+gelu": 0.06,
    ":bias+silu": 0.03,
    ":residual": 0.05,
    ":bias+residual": 0.04,
    ":bias+silu+residual": 0.02,
    ":f16": 0.12,
    ":f16:bias": 0.04,
    ":f16:bias+gelu": 0.03,
    ":e4m3->bf16": 0.05,
    ":f32": 0.04,
}  # as a case writes dtypes and epilogue, with their shares
KINDS = {"layer": 0.5, "random": 0.3, "square": 0.1, "batch": 0.1}
LARGEST = 16384
MIN_FLOPS = 10**6
UNSERVED = 2.0  # times the best tile's: what XLA takes for a product that no kernel computes; assumed


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A product of a class with the predicted microseconds of each of its kernels, whether they ship or not, and of
    what takes over where none does."""

    class_name: str
    case: Case
    times_us: Mapping[Variant, float]
    without_us: float

    @property
    def best_us(self) -> float:
        return min(self.times_us.values())

    def loss(self, ships: Iterable[Variant]) -> float:
        """Of the best that `ships`: 0.1 where it takes 10 % longer than the best of all."""
        mine = [self.times_us[own] for own in ships if own in self.times_us]
        return max(0.0, min([*mine, self.without_us]) / self.best_us - 1)


def main(num: int, device: str, seed: int, budget: int, anew: bool = False) -> int:
    """Prints the three lists, of `num` products a class and `budget` kernels that would be added; or, `anew`, what
    `budget` kernels to ship in place of all that does, and the loss that they leave."""
    if num < 1 or budget < 0:
        raise ValueError(f"`--cover` requires at least 1 product of each class, got {num}, and a budget, got {budget}")
    arch = by_name(device)
    products = drawn(num, seed, arch)
    ships = frozenset[Variant]() if anew else frozenset(catalogue(arch.targets))
    if not anew:
        _print_losses(products, ships, device)
    print("kernels that would be worth their place, with the expected loss behind each")
    named: list[Variant] = []
    for added, mean in additions(products, ships, budget):
        print(f"  {100 * mean:6.2f} % {added[0].name} and {len(added) - 1} of other majors")
        named += added
    if anew:
        _print_losses(products, named, device)
        return 0
    asked = [*dict.fromkeys([*(product.case for product in products), *cases()])]
    never = unused(asked, [own for own in ARCHS.values() if own.target == arch.target])
    print(f"{len(never)} of {len(ships)} kernels are chosen for none of {len(asked)} products")
    for tile, names in _by_tile(never).items():
        print(f"  {len(names):4} {tile}")
    return 0


def drawn(num: int, seed: int, arch: Arch) -> list[Drawn]:
    """`num` of each class that `arch` has kernels for."""
    found = []
    for i, name in enumerate(CLASSES):
        rng, count = random.Random(f"{seed} {i}"), 0
        for _ in range(8 * num):
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            case = _case(kind, name, rng)
            times_us = _times(case.fused, arch) if case.flops >= MIN_FLOPS else {}
            if times_us:
                found.append(Drawn(name, case, times_us, _without_us(case, arch, min(times_us.values()))))
                count += 1
            if count == num:
                break
    return found


def _without_us(case: Case, arch: Arch, best_us: float) -> float:
    """Of a kernel that ships without the epilogue, and XLA's pass over its result behind it; or of XLA alone."""
    plain = [us for own, us in _times(case.problem, arch).items() if own in _listed(arch.targets)]
    fused, size = case.fused, case.batch * case.m * case.n * DTYPE_BYTES[case.out_dtype]
    passes_us = pass_us(size * (2 + fused.epilogue.num_matrices), arch)
    return min([us + passes_us for us in plain if not fused.epilogue.is_identity] + [UNSERVED * best_us])


def by_class(products: Sequence[Drawn], ships: Iterable[Variant]) -> dict[str, list[float]]:
    """Losses."""
    kept, found = frozenset(ships), collections.defaultdict(list)
    for product in products:
        found[product.class_name].append(product.loss(kept & product.times_us.keys()))
    return dict(found)


def expected(products: Sequence[Drawn], ships: Iterable[Variant]) -> float:
    """The mean of the classes' mean losses, by their shares."""
    means = {name: statistics.fmean(losses) for name, losses in by_class(products, ships).items()}
    return sum(CLASSES[name] * mean for name, mean in means.items()) / sum(CLASSES[name] for name in means)


def additions(
    products: Sequence[Drawn], ships: Iterable[Variant], budget: int
) -> Iterator[tuple[tuple[Variant, ...], float]]:
    """Kernels that do not ship, of all majors of one tile at a time, that of the greatest gain a kernel first, and the
    expected loss with it: until `budget` kernels are named."""
    kept = frozenset(ships)
    counts = collections.Counter(product.class_name for product in products)
    whole = sum(CLASSES[name] for name in counts)
    shares = [CLASSES[product.class_name] / counts[product.class_name] / whole for product in products]
    losses = [product.loss(kept & product.times_us.keys()) for product in products]
    rows: dict[Variant, set[Variant]] = collections.defaultdict(set)
    offers: dict[Variant, list[tuple[int, float]]] = collections.defaultdict(list)  # products, and their losses with it
    for i, product in enumerate(products):
        for own in product.times_us.keys() - kept:
            rows[_row(own)].add(own)
            offers[_row(own)].append((i, product.loss([own])))

    def gain(row: Variant) -> float:
        return sum(shares[i] * max(0.0, losses[i] - loss) for i, loss in offers[row]) / len(rows[row])

    waiting = [(-gain(row), row.name, row) for row in rows]
    heapq.heapify(waiting)
    while budget > 0 and waiting:
        _, name, row = heapq.heappop(waiting)
        spared = gain(row)  # which has fallen since, maybe, and never rises
        if waiting and spared < -waiting[0][0]:
            heapq.heappush(waiting, (-spared, name, row))
            continue
        if spared <= 0:
            return
        added = rows[row]
        for i, loss in offers[row]:
            losses[i] = min(losses[i], loss)
        budget -= len(added)
        yield (
            tuple(sorted(added, key=lambda own: own.name)),
            sum(share * loss for share, loss in zip(shares, losses, strict=True)),
        )


def _row(own: Variant) -> Variant:
    """Of any majors of a and b."""
    return dataclasses.replace(own, a_major="k", b_major="n")


def unused(products: Sequence[Case], archs: Sequence[Arch]) -> list[Variant]:
    """Kernels that ship for the archs' one target, are chosen for none of `products`, by measured times or the model,
    and are not the only tile of their kind: that one is there so that there is one."""
    chosen = {choice(case, arch.name).variant for case in products for arch in archs}
    kinds = collections.Counter(_kind(own) for own in _listed(archs[0].targets))
    return [own for own in catalogue(archs[0].targets) if own not in chosen and kinds[_kind(own)] > 1]


def _kind(own: Variant) -> Variant:
    """A kernel but for its tile."""
    return dataclasses.replace(own, tile=Tile(64, 64, promoted=own.tile.promoted))


@functools.cache
def _listed(targets: tuple[str, ...]) -> frozenset[Variant]:
    return frozenset(catalogue(targets))


def _times(problem: Problem, arch: Arch) -> dict[Variant, float]:
    """None where XLA is known to be faster, or no tile is legal."""
    found = plan(problem, arch)
    legal = [own for own in found.candidates if own.cost and found.tile]
    return {
        variant_for(own.problem, own.tile, arch.target_of(own.problem.a_dtype)): own.cost.us
        for own in legal
        if own.cost
    }


def _case(kind: str, name: str, rng: random.Random) -> Case:
    """A product of a kind. Rows are log-uniform; of two in three products that are drawn freely, sizes are multiples of
    8. Epilogues belong to forward passes: without one, every third layer is a gradient."""
    rows, form, batch = _size(rng, 1), rng.choice(("nn", "nt")), 1
    k, n = rng.choice(LAYERS)
    is_plain = Case.from_str(f"1x1x1{name}").epilogue == ""
    if kind == "layer" and is_plain and rng.random() < 1 / 3:
        rows, n, k, form = rng.choice(((k, n, max(64, rows), "tn"), (rows, k, n, "nt")))
    elif kind == "random":
        step = rng.choice((1, 8, 8))
        rows, n, k = (_size(rng, step) for _ in range(3))
        form = rng.choice(("nn", "nt", "tn") if is_plain else ("nn", "nt"))
    elif kind == "square":
        rows = n = k = _size(rng, 64)
    elif kind == "batch":
        batch, rows, n, k = rng.choice((8, 32, 128)), *(rng.choice((64, 128, 256, 512, 1024, 2048)) for _ in range(3))
    return Case.from_str(f"{batch}*{rows}x{n}x{k}:{form}{name}" if batch > 1 else f"{rows}x{n}x{k}:{form}{name}")


def _size(rng: random.Random, step: int) -> int:
    return -(-round(2 ** rng.uniform(0, math.log2(LARGEST))) // step) * step


def _print_losses(products: Sequence[Drawn], ships: Iterable[Variant], device: str) -> None:
    print(f"{device}: predicted loss to the best tile of the planner's lists, by class")
    kept = frozenset(ships)
    for name, losses in by_class(products, kept).items():
        print(f"  {name or ':bf16':<22} {len(losses):4} {_text(losses)}")
    print(f"  of all, by their shares {100 * expected(products, kept):.2f} %")


def _text(losses: Sequence[float]) -> str:
    ordered = sorted(losses)
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return f"mean {100 * statistics.fmean(ordered):5.1f} %, 90th {100 * p90:5.1f} %, worst {100 * ordered[-1]:5.1f} %"


def _by_tile(kernels: Iterable[Variant]) -> dict[str, list[str]]:
    found = collections.defaultdict(list)
    for own in kernels:
        found[f"{own.a_dtype}->{own.out_dtype} {own.tile} {own.store}"].append(own.name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
