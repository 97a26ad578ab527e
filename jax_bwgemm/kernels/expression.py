"""Any expression of an epilogue on a thread's registers, with one or several results: value by value, each operation of
it once. `epilogue` has the chains that need no other registers than the sums'."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
from cutlass import Float32, cute

from jax_bwgemm.facts import epilogue as facts
from jax_bwgemm.facts.epilogue import Const, Input, Node
from jax_bwgemm.kernels.epilogue import LOG2_E, OPS, AddVector, Box, Chain, Run


def _flag(is_true: Any) -> Any:
    return cutlass.select_(is_true, Float32(1.0), Float32(0.0))


def _exp(v: Any) -> Any:
    return cute.math.exp2(v * LOG2_E, approx=True)


# What `epilogue.OPS` has no step for; approximations are within 2**-20 of themselves.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": lambda x, y: cute.arch.fmax(x, y, nan=True),
    "min": lambda x, y: -cute.arch.fmax(-x, -y, nan=True),
    "neg": lambda x: -x,
    "abs": lambda x: cute.math.absf(x),
    "square": lambda x: x * x,
    "exp": _exp,
    "log": lambda x: cute.math.log2(x, approx=True) * math.log(2.0),
    "sqrt": lambda x: cute.math.sqrt(x),
    "rsqrt": lambda x: cute.math.rsqrt(x, approx=True),
    "erf": cute.math.erf,
    "gt": lambda x, y: _flag(x > y),
    "ge": lambda x, y: _flag(x >= y),
    "eq": lambda x, y: _flag(x == y),
    "where": lambda x, y, z: cutlass.select_(x != 0.0, y, z),
}


class Expression:
    """What `Chain` is, of anything else."""

    def __init__(self, epilogue: facts.Epilogue, c_major: str, is_coarse: bool) -> None:
        self.epilogue, self.is_coarse = epilogue, is_coarse
        vectors = [x for x in epilogue.operands if x.place in ("m", "n")]
        self.along = tuple(x for x in vectors if x.place == c_major)
        self.across = tuple(x for x in vectors if x.place != c_major)
        self.matrices = tuple(x for x in epilogue.operands if x.place == "mn")
        self.ones = tuple(x for x in epilogue.operands if x.place == "one")
        self.reads = bool(self.along or self.ones)
        self.reductions = epilogue.reductions
        self.wide_params = (*(x.role for x in self.ones), *(x.role for x in self.reductions))  # where float32 lies

    @property
    def params(self) -> tuple[str, ...]:
        """As `Chain.params`: scalars, then numbers on the device and vectors, then what parts of reductions are stored
        to."""
        vectors = (x.role for x in (*self.ones, *self.along, *self.across))
        return *(role for role, _ in self.epilogue.scalars), *vectors, *(x.role for x in self.reductions)

    def load(self, runs: tuple[Run, ...], first: Any, size: Any, args: dict[str, Any]) -> tuple[Any, ...]:
        numbers = (cute.make_tensor(args[x.role], cute.make_layout(1))[0] for x in self.ones)
        return *numbers, *(AddVector(x.role, 1.0).load(runs, first, size, args) for x in self.along)

    def apply(self, box: Box, loaded: tuple[Any, ...], args: dict[str, Any]) -> tuple[cute.Tensor, ...]:
        known = self._inputs(box, loaded, args)
        results = tuple(cute.make_rmem_tensor(cute.size(box.sums[0]), Float32) for _ in self.epilogue.results)
        for i in range(cute.size(box.sums[0])):
            done: dict[Node, Any] = {x: value(i) for x, value in known.items()}
            for result, (_, node) in zip(results, self.epilogue.results, strict=True):
                result[i] = self._value(node, done)
            for fold, x in zip(box.folds, self.reductions, strict=True):
                fold.add(i, self._value(x.node, done))
        return results

    def _value(self, node: Node, done: dict[Node, Any]) -> Any:
        """Of one place; `done`: what is known there."""
        if isinstance(node, Const):
            return Float32(node.value)
        if node not in done:
            assert not isinstance(node, Input)  # all of them are known
            args = [self._value(arg, done) for arg in node.args]
            own = ARITHMETIC.get(node.op) or OPS[node.op](self.is_coarse, False).value
            done[node] = own(*args)
        return done[node]

    def _inputs(self, box: Box, loaded: tuple[Any, ...], args: dict[str, Any]) -> dict[Node, Callable[[int], Any]]:
        """Of each input, its value at a place."""
        known: dict[Node, Callable[[int], Any]] = {}
        for x, sums in zip((facts.ACC, facts.UP), box.sums, strict=False):
            known[x] = sums.__getitem__
        for role, _ in self.epilogue.scalars:
            known[Input(role, "scalar")] = functools.partial(_same, args[role])
        places = {i: at for at, own in enumerate(box.runs) for i in _indices(own)}
        for x, number in zip(self.ones, loaded, strict=False):
            known[x] = functools.partial(_same, number)
        for x, runs in zip(self.along, loaded[len(self.ones) :], strict=True):
            known[x] = functools.partial(_along, box.runs, runs, places)
        for x in self.across:
            known[x] = self._across(args[x.role], box).__getitem__
        for x, terms in zip(self.matrices, box.matrices(), strict=True):
            known[x] = functools.partial(_float, terms)
        return known

    def _across(self, vector: cute.Pointer, box: Box) -> dict[int, Any]:
        """By value, that of its line; lines past the end read the last one instead, and are never stored."""
        found: dict[int, Any] = {}
        for line, place in enumerate(box.runs[0].across):
            at = cutlass.min(box.first_across + place, box.size_across - 1)
            value = Float32(cute.make_tensor(vector + at, cute.make_layout(1))[0])
            found |= {i: value for run in box.runs for i in run.lines[line]}
        return found


def _same(value: Any, _: int) -> Any:
    return value


def _float(values: Any, i: int) -> Any:
    return Float32(values[i])


def _indices(run: Run) -> Iterator[int]:
    return itertools.chain.from_iterable(run.lines)


def _along(runs: tuple[Run, ...], loaded: Any, places: dict[int, int], i: int) -> Any:
    """Of the value i, what was loaded for its place along the contiguous dimension; `places`: its run."""
    at = places[i]
    line = next(line for line in runs[at].lines if i in line)
    return Float32(loaded[at][line.index(i)])


def epilogue_of(epilogue: facts.Epilogue, c_major: str, is_coarse: bool) -> Chain | Expression:
    """A chain where it can be one, for that needs the fewest registers."""
    found = facts.in_place(epilogue)
    if found is None or any(x.place not in (c_major, "mn") for x in epilogue.operands):
        return Expression(epilogue, c_major, is_coarse)
    return Chain(found, is_coarse)
