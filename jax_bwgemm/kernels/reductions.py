"""Reductions of an epilogue: sums or largest values over the rows or the columns that a warp has of a box.

The life of a `Fold`: `begin` with a register for every place that it keeps, `add` each value of the box, `end` with an
exchange between the lanes that have the same places, after which the warp has one value for each, and stores them as a
part of the reduction. XLA reduces the parts. Each is made in one order, so that its bits are always the same.

    kept along n   columns of the box; its part is that of the warp's rows      (l, m / rows of a warp, n)
    kept along m   the warp's rows; its part is that of the box's columns       (l, n / columns of a box, m)

In an exchange between lanes that differ in one bit, each keeps one half of the places and sends the other: of K places
and 2^i lanes K / 2 + K / 4 + ... values move, not i * K. Where one place is left, both keep it, and one stores it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_bwgemm.facts.epilogue import Reduction
from jax_bwgemm.kernels.epilogue import Run

IDENTITY = {"sum": 0.0, "max": -math.inf}


@dataclasses.dataclass(frozen=True)
class Side:
    """One dimension of a box as a warp has it. `places`: those of a thread's values, relative to its `first`; `lanes`:
    the bits in which lanes differ that have other places; `size`: of the result; `part`: which of all warps' parts this
    one is, if the dimension is reduced, of `parts`."""

    places: tuple[Any, ...]
    lanes: tuple[int, ...]
    first: Any
    size: Any
    part: Any
    parts: Any


@dataclasses.dataclass(frozen=True)
class Fold:
    """One reduction of a thread's values: `index` has for each value its places in the side that is `kept` and in the
    one that is reduced. `values` are registers, one for each place kept."""

    reduction: Reduction
    kept: Side
    reduced: Side
    index: tuple[tuple[int, int], ...]
    values: list[Any]
    is_inside: tuple[Any, ...]

    def add(self, i: int, value: Any) -> None:
        """The box's `i`-th value of the thread, if it is the result's."""
        keep, over = self.index[i]
        own = cutlass.select_(self.is_inside[over], value, Float32(IDENTITY[self.reduction.reducer]))
        self.values[keep] = self._both(self.values[keep], own)

    def end(self, target: cute.Pointer, batch: Any) -> None:
        """To `target`, all warps' parts of all matrices."""
        lane, places, writes = cute.arch.lane_idx(), list(self.kept.places), True
        values = list(self.values)
        for bit in self.reduced.lanes:
            is_second = (lane & bit) != 0
            if len(values) % 2:
                values = [self._both(x, cute.arch.shuffle_sync_bfly(x, offset=bit)) for x in values]
                writes = writes & ~is_second if writes is not True else ~is_second
                continue
            half = len(values) // 2
            sent = [cutlass.select_(is_second, x, y) for x, y in zip(values[:half], values[half:], strict=True)]
            own = [cutlass.select_(is_second, y, x) for x, y in zip(values[:half], values[half:], strict=True)]
            got = [cute.arch.shuffle_sync_bfly(x, offset=bit) for x in sent]
            values = [self._both(x, y) for x, y in zip(own, got, strict=True)]
            pairs = zip(places[:half], places[half:], strict=True)
            places = [cutlass.select_(is_second, Int32(y), Int32(x)) for x, y in pairs]
        row = Int64(batch) * self.reduced.parts + self.reduced.part
        inside = self.reduced.part < self.reduced.parts
        for place, value in zip(places, values, strict=True):
            at = self.kept.first + place
            is_own = inside & (at < self.kept.size)
            _store(target, row * self.kept.size + at, value, is_own if writes is True else is_own & writes)

    def _both(self, x: Any, y: Any) -> Any:
        return x + y if self.reduction.reducer == "sum" else cute.arch.fmax(x, y, nan=True)


def begin(reduction: Reduction, sides: dict[str, Side], runs: tuple[Run, ...], c_major: str) -> Fold:
    """`sides`: of n and m; `runs` are along `c_major`."""
    kept, reduced = sides[reduction.place], sides["m" if reduction.place == "n" else "n"]
    index: dict[int, tuple[int, int]] = {}
    along = itertools.count()
    for run in runs:
        for i, place in zip(range(run.width), along, strict=False):
            for across, line in enumerate(run.lines):
                index[line[i]] = (place, across) if reduction.place == c_major else (across, place)
    values: list[Any] = [Float32(IDENTITY[reduction.reducer]) for _ in kept.places]
    inside = tuple(reduced.first + place < reduced.size for place in reduced.places)
    return Fold(reduction, kept, reduced, tuple(index[i] for i in range(len(index))), values, inside)


def places_of(runs: tuple[Run, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of a thread's values: along the result's contiguous dimension, and across it."""
    return tuple(run.first + i for run in runs for i in range(run.width)), runs[0].across


@cute.jit
def _store(target: cute.Pointer, at: Int64, value: Float32, is_own: cutlass.Boolean) -> None:
    if is_own:
        cute.make_tensor(target + at, cute.make_layout(1))[0] = value
