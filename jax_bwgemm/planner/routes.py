"""How both operands of a product can reach a kernel: from before a transpose or as given, padded or transposed first,
or as they lie.

The door to that subject: `padding` has its rule, `repack` its kernels, and `taking` emits what a route says. Knows no
JAX: a lowering says which operands are transposes, and `has_repack` which repacks there are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.legality import is_read_swapped, why_not_on
from jax_bwgemm.facts.padding import contiguous, padded_shape, padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.repack import Shape
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cost import repack_us

HasRepack = Callable[[str, int, Shape], bool]  # of a kind ("pad", "transpose"), an element's bytes, the result's shape
Pair = tuple[bool, bool]  # of a and b


@dataclasses.dataclass(frozen=True)
class Route:
    """`problem` has the majors of the operands as a kernel gets them.

    `from_source`: which of a and b are taken from before their transpose. `as_given`: which are not, so that XLA makes
    the transpose. `transposes`: which a repack transposes, and pads on the way; until then they lie under the other
    major. `pads`: the kernel wants rows that TMA can step over.
    """

    problem: Problem
    from_source: Pair = (False, False)
    as_given: Pair = (False, False)
    transposes: Pair = (False, False)
    pads: bool = True

    def padding(self, idx: int) -> int:
        """Elements by which the contiguous dimension of operand 0 or 1 grows."""
        return padding(self.problem, "ab"[idx]) if self.pads else 0

    def to(self, tile: Tile | None) -> Route:
        """The same to a kernel with this tile."""
        return dataclasses.replace(self, pads=tile is None or not tile.direct)

    def transpose_us(self, arch: Arch) -> float:
        """Of the passes that transpose, XLA's and ours; those that pad are a part of a tile's cost."""
        flips = zip("ab", self.as_given, self.transposes, strict=True)
        return sum(repack_us(self.problem, x, arch) * (xlas + ours) for x, xlas, ours in flips)

    @property
    def has_passes(self) -> bool:
        """Whether anything goes over an operand before the kernel does."""
        return any((*self.as_given, *self.transposes, self.padding(0), self.padding(1)))

    def may_beat(self, other: Route) -> bool:
        """Whether it may cost less than `other`, which comes first: not with more elements that repacks transpose, nor
        with two passes over an operand."""
        is_passed_twice = any(self.as_given[i] and self.padding(i) for i in range(2))
        return self._transposed <= other._transposed and not is_passed_twice

    @property
    def _transposed(self) -> int:
        """Elements, by repacks."""
        return sum(_elements(self.problem, x) * flips for x, flips in zip("ab", self.transposes, strict=True))

    @property
    def _preference(self) -> tuple[int, list[Pair]]:
        """Few elements that repacks transpose before many; unpadded before padded, and of these without the transpose
        before with it."""
        return self._transposed, [(self.padding(i) > 0, not self.from_source[i]) for i in range(2)]


def routes(problem: Problem, is_transpose: Pair, arch: Arch, has_repack: HasRepack) -> list[Route]:
    """The best first, if all kernels took the same. `is_transpose`: which operands can be had from before a transpose,
    as `w` in `x @ w.T`; `problem` is what was asked, of operands as they are given."""
    if not problem.is_static:
        return [Route(problem)]
    found = [
        Route(flipped(problem, (a, b)), (a, b), (is_transpose[0] and not a, is_transpose[1] and not b))
        for a in ((True, False) if is_transpose[0] else (False,))
        for b in ((True, False) if is_transpose[1] else (False,))
    ]
    found += [more for route in found for more in _k_major(route, arch, has_repack)]
    return sorted(found, key=lambda route: route._preference)


def _k_major(route: Route, arch: Arch, has_repack: HasRepack) -> Iterator[Route]:
    """The same of operands that the device can read, where it cannot as they lie: one of them or both are k-major
    instead. The fewest bytes to transpose come first."""
    problem = route.problem
    if problem.is_empty or not why_not_on(problem, arch):
        return
    found: list[tuple[int, Route]] = []
    for majors in dict.fromkeys(((problem.a_major, "k"), ("k", problem.b_major), ("k", "k"))):
        other = dataclasses.replace(problem, a_major=majors[0], b_major=majors[1])
        if other == problem or (why_not_on(other, arch) and not is_read_swapped(other, arch)):
            continue
        flips = (problem.a_major != other.a_major, problem.b_major != other.b_major)
        made = [(padded_shape(other, x), _bytes(other, x)) for x, is_made in zip("ab", flips, strict=True) if is_made]
        if all(has_repack("transpose", size, shape) for shape, size in made):
            size = sum(math.prod(shape) * size for shape, size in made)
            found.append((size, dataclasses.replace(route, problem=other, transposes=flips)))
    yield from (other for _, other in sorted(found, key=lambda entry: entry[0]))


def flipped(problem: Problem, flips: Pair) -> Problem:
    """Of operands that lie under the other major."""
    a_major, b_major = problem.a_major, problem.b_major
    return dataclasses.replace(
        problem,
        a_major={"k": "m", "m": "k"}[a_major] if flips[0] else a_major,
        b_major={"k": "n", "n": "k"}[b_major] if flips[1] else b_major,
    )


def _elements(problem: Problem, operand: str) -> int:
    batch, rows, _ = padded_shape(problem, operand)
    return batch * rows * contiguous(problem, operand)


def _bytes(problem: Problem, operand: str) -> int:
    return DTYPE_BYTES[problem.a_dtype if operand == "a" else problem.b_dtype]
