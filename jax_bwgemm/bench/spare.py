"""`bench --spare`: which kernels measured products would hardly miss. Of files that `--regret` wrote; needs no GPU.

A kernel that ships costs a second of the build and six thousand bytes. What it is worth is what the products that it
is the fastest for would lose with the next one. The kernel that is worth least goes first; then the others, with which
its products make do, are worth more.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.kernels.aot.catalog import catalogue

MOST = math.log(1.3)  # that a kernel is worth for one product: a single one does not keep it
MAX_LOSS = 0.003  # mean of all products: what is printed ends there

Times = Mapping[Variant, float]  # microseconds of a product's kernels


def main(paths: Sequence[Path]) -> int:
    products, target = list[Times](), ""
    for path in paths:
        arch, measured = load(path)
        target = arch.target
        ships = (of_what_ships(product, target) for product in measured)
        products += [by_variant(product, target) for product in ships if product.times_us]
    num = len({own for times_us in products for own in times_us})
    print(
        f"{len(products)} products, {num} kernels of {target} that ship; without each, and those before it, they lose"
    )
    for own, num_timed, loss in spared(products):
        if loss > MAX_LOSS:
            break
        print(f"  {100 * loss:5.3f} % {own.name}, which {num_timed} have timed")
    return 0


def of_what_ships(product: Measured, target: str) -> Measured:
    """With the kernels that are in the catalogue by now."""
    kept = {
        (tile, is_swapped): us
        for (tile, is_swapped), us in product.times_us.items()
        if _variant(product.problem, tile, is_swapped, target) in _listed(target)
    }
    return dataclasses.replace(product, times_us=kept)


def by_variant(product: Measured, target: str) -> dict[Variant, float]:
    """The least time of each kernel, which several tiles may name."""
    found: dict[Variant, float] = {}
    for (tile, is_swapped), us in product.times_us.items():
        own = _variant(product.problem, tile, is_swapped, target)
        found[own] = min(us, found.get(own, math.inf))
    return found


def spared(products: Sequence[Times]) -> Iterator[tuple[Variant, int, float]]:
    """Kernels, that first which is worth least; how many products have timed it; and the mean loss of all products
    without it and those before. The last one of a product stays. What few of its kind have timed counts as if all had.
    """
    ranked = [sorted((us, own.name) for own, us in times_us.items()) for times_us in products]
    kernels = {own.name: own for times_us in products for own in times_us}
    timed = collections.Counter(name for times_us in ranked for _, name in times_us)
    of_kind = collections.Counter(kind for times_us in products for kind in {_kind(own) for own in times_us})
    alive, lost = set(kernels), 0.0
    while True:
        worth, last = _worth(ranked, alive)
        free = alive - last
        if not free:
            return
        name = min(free, key=lambda name: (worth[name] * of_kind[_kind(kernels[name])] / timed[name], name))
        alive.remove(name)
        lost += worth[name]
        yield kernels[name], timed[name], math.expm1(lost / len(products))


def _worth(ranked: Iterable[Sequence[tuple[float, str]]], alive: set[str]) -> tuple[dict[str, float], set[str]]:
    """Of each kernel, the logarithms of what its products would lose with their next one; and those that are a
    product's last."""
    worth, last = collections.defaultdict[str, float](float), set()
    for times_us in ranked:
        first, *rest = (kernel for kernel in times_us if kernel[1] in alive)
        if rest:
            worth[first[1]] += min(MOST, math.log(rest[0][0] / first[0]))
        else:
            last.add(first[1])
    return worth, last


def _kind(own: Variant) -> tuple[str, ...]:
    return own.a_dtype, own.out_dtype, own.a_major, own.b_major, own.c_major, own.store


@functools.cache
def _listed(target: str) -> frozenset[Variant]:
    return frozenset(catalogue([target]))


@functools.cache
def _variant(problem: Problem, tile: Tile, is_swapped: bool, target: str) -> Variant:
    return variant_for(problem.transposed if is_swapped else problem, tile, target)
