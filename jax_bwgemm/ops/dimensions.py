"""What JAX can prove of sizes that are symbols of `jax.export`: their bounds, and what divides them."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import Symbol, Symbols, sized
from jax_bwgemm.facts.tile import INT32_MAX

try:
    from jax.errors import InconclusiveDimensionOperation
except ImportError:  # jax 0.9
    from jax.core import InconclusiveDimensionOperation

_STEPS = sorted({odd * 2**i for odd in (1, 3, 5, 7) for i in range(13)} - {1}, reverse=True)  # that are looked for


def stand_in(problem: Problem) -> tuple[Problem, Symbols | None]:
    """Known sizes for those of `problem` that are symbols, with what these may be; None where there are none."""
    if problem.is_static:
        return problem, None
    dims = {name: getattr(problem, name) for name in ("m", "n", "k", "batch")}
    symbols = Symbols(**{name: _symbol(dim) for name, dim in dims.items() if jax.export.is_symbolic_dim(dim)})
    return sized(problem, symbols.middle), symbols


@functools.lru_cache(maxsize=1024)
def _symbol(dim: Any) -> Symbol:
    step = next((step for step in _STEPS if dim % step == 0), 1)
    least = _first(lambda size: not _is_sure(lambda: dim > size))
    most = _first(lambda size: _is_sure(lambda: dim <= size))
    return Symbol(str(dim), -(-least // step) * step, most // step * step if most <= INT32_MAX else None, step)


def _first(holds: Callable[[int], bool]) -> int:
    """The first size for which something holds that then holds for all larger ones, or one more than an int32."""
    return bisect.bisect_left(range(INT32_MAX + 1), True, key=holds)


def _is_sure(claim: Callable[[], bool]) -> bool:
    """Whether JAX can prove it."""
    try:
        return claim()
    except InconclusiveDimensionOperation:
        return False
