"""Sizes that only a run knows: what they may be, and whether a kernel is right for all of them. Knows no JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jax_bwgemm.facts.legality import why_not_sizes
from jax_bwgemm.facts.padding import TMA_ALIGN_BYTES
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile

PART_ENDS = (16, 64, 256, 1024, 4096)  # of the parts of a range that have kernels of their own
USUAL_MOST, USUAL_SPAN = 8192, 4  # how far a size without a bound is thought to reach, or how many times its least
NUM_SAMPLES = 3  # of a part, at which a tile is judged

Sizes = tuple[tuple[str, int], ...]  # of the symbolic dimensions of a problem, by their names


@dataclasses.dataclass(frozen=True)
class Symbol:
    """Any multiple of `step` from `least` to `most`; None: no bound is known. `text` is what the user wrote. Of a whole
    range both are such multiples, of its parts they need not be."""

    text: str
    least: int = 1
    most: int | None = None
    step: int = 1

    def __str__(self) -> str:
        most = f"to {self.most}" if self.most else "on"
        return f"{self.text} from {self.at(0)} {most}"

    def at(self, share: float) -> int:
        """The size that lies that share of the way, from 0 to 1, from the least to the most, in a geometric sense."""
        least = max(self.least, 1)
        most = self.most or max(USUAL_MOST, USUAL_SPAN * least)
        size = least * (most / least) ** share
        return max(-(-self.least // self.step), int(size / self.step + 1e-6)) * self.step


@dataclasses.dataclass(frozen=True)
class Symbols:
    """Of a problem, by its own names; a size that is known is None."""

    m: Symbol | None = None
    n: Symbol | None = None
    batch: Symbol | None = None
    k: Symbol | None = None

    def __str__(self) -> str:
        return ", ".join(str(symbol) for _, symbol in self.named())

    @property
    def transposed(self) -> Symbols:
        return dataclasses.replace(self, m=self.n, n=self.m)

    @property
    def divided(self) -> str:
        """The dimension whose range has parts."""
        return next(self.named())[0]

    @property
    def parts(self) -> tuple[Symbols, ...]:
        """The same for each part of a range: kernels that are good for few rows are not for many."""
        name, symbol = next(self.named())
        ends = [end for end in PART_ENDS if end >= symbol.at(0) and (symbol.most is None or end < symbol.most)]
        spans = zip((symbol.least, *(end + 1 for end in ends)), (*ends, symbol.most), strict=True)
        own = (dataclasses.replace(symbol, least=least, most=most) for least, most in spans)
        return tuple(dataclasses.replace(self, **{name: part}) for part in own)

    def up_to(self, later: Symbols) -> Symbols:
        """This part of a range and all up to the end of a later one."""
        symbol, end = getattr(self, self.divided), getattr(later, self.divided)
        return dataclasses.replace(self, **{self.divided: dataclasses.replace(symbol, most=end.most)})

    @functools.cached_property
    def samples(self) -> tuple[Sizes, ...]:
        """From the least sizes to the most, in a geometric progression."""
        return tuple(dict.fromkeys(self._at(i / (NUM_SAMPLES - 1)) for i in range(NUM_SAMPLES)))

    @property
    def middle(self) -> Sizes:
        """What stands for all."""
        return self._at(0.5)

    @property
    def bounds(self) -> Sizes:
        """The largest sizes, of those that have a bound."""
        return tuple((name, symbol.most // symbol.step * symbol.step) for name, symbol in self.named() if symbol.most)

    def named(self) -> Iterator[tuple[str, Symbol]]:
        found = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ((name, symbol) for name, symbol in found if symbol is not None)

    def _at(self, share: float) -> Sizes:
        return tuple((name, symbol.at(share)) for name, symbol in self.named())


def sized(problem: Problem, sizes: Sizes) -> Problem:
    """With these sizes; a batch is that of the operands that have one of their own."""
    known: dict[str, Any] = dict(sizes)
    if (batch := known.get("batch")) is not None:
        known |= {x: batch for x in ("a_batch", "b_batch") if getattr(problem, x) != 1}
    return dataclasses.replace(problem, **known)


def why_not_positive(symbols: Symbols) -> str | None:
    """One sentence where there may be nothing to multiply: that is XLA's to know."""
    for name, symbol in symbols.named():
        if symbol.least < 1:
            return f"a kernel requires sizes of at least 1, got {symbol.text} for {name}, which may be 0: constrain it"
    return None


def why_not_all(tile: Tile, problem: Problem, symbols: Symbols) -> str | None:
    """None if `tile`, which computes `problem`, computes it for all that its symbols may be, else one sentence. Of a
    symbol without a bound the launcher knows the limits, and refuses a program that is compiled for more."""
    return _why_not_rows(problem, symbols) or why_not_sizes(tile, sized(problem, symbols.bounds))


def _why_not_rows(problem: Problem, symbols: Symbols) -> str | None:
    """Rows whose size is a symbol are not padded: TMA must be able to step over them, whatever it is."""
    lying = (("a", problem.a_major, problem.a_dtype), ("b", problem.b_major, problem.b_dtype))
    for name, dim, dtype in (*lying, ("the result", problem.c_major, problem.out_dtype)):
        symbol: Symbol | None = getattr(symbols, dim)
        elements = TMA_ALIGN_BYTES // DTYPE_BYTES[dtype]
        if symbol is not None and symbol.step % elements:
            rule = f"rows of a multiple of {elements} elements where their size is a symbol"
            remedy = f"constrain it, as by `mod({symbol.text}, {elements}) == 0`"
            return f"TMA requires {rule}, got {symbol.text} for {name}: {remedy}"
    return None
