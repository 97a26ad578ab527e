"""What happens to sums before they are stored, composed at compile time: a chain of steps, or any expression.

A chain (`facts.epilogue.in_place`) has a step for each operation, which works in place on float32 values in registers.
All else, with several results or sums, is an `Expression`: the same operations, value by value. The life of both:
`load` what is read along the result's contiguous dimension, once for a tile or a box, perhaps before the values are
there; `apply` it to the values of each box, at whose end what it reduces leaves (`reductions`). They know nothing of
warpgroups or TMEM: the kernel describes where a thread's values lie with `Run`s, so one serves wgmma and tcgen05
fragments alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import cutlass
from cutlass import cute

from jax_bwgemm.facts.epilogue import Apply, Input, Reduction


@dataclasses.dataclass(frozen=True)
class Run:
    """`width` neighbouring places along the result's contiguous dimension (columns, or rows of an m-major one), from
    `first` on, relative to the thread's first; for each line across, the indices of its values there, and in `across`
    its own place, relative to the thread's first."""

    first: Any
    width: int
    lines: tuple[tuple[int, ...], ...]
    across: tuple[Any, ...]


FRAGMENT_LANES = (16, 8, 4), (2, 1)  # bits of a lane that choose its row and its pair of columns in a fragment


def fragment_runs(elements: int, width: int, to_second: Any = 8, count: int = 1) -> tuple[Run, ...]:
    """`count` wgmma fragments or 16x256b TMEM loads, 16 rows below each other: pairs of columns every 8, for a thread's
    first row and the one `to_second` further (PTX ISA, wgmma.mma_async, matrix D). `width`: 2, or 1 where a pair of a
    bias may lie across a load's alignment."""
    runs = []
    across = tuple(16 * i + row for i in range(count) for row in (0, to_second))
    for j in range(elements // count // 4):
        starts = range(4 * j, elements, elements // count)
        rows = tuple((start + i, start + i + 1) for start in starts for i in (0, 2))
        runs += [Run(8 * j + i, width, tuple(row[i : i + width] for row in rows), across) for i in range(0, 2, width)]
    return tuple(runs)


def fragment_row_runs(elements: int, to_second: int, is_paired: bool = False) -> tuple[Run, ...]:
    """The same fragment for an m-major result: a thread's first row, and the one `to_second` further. `is_paired`: of
    both rows first one column and then the other."""
    halves = [[i for i in range(elements) if (i % 2 if is_paired else i // 2 % 2) == half] for half in range(2)]
    cols = tuple(8 * (i // 2) + i % 2 for i in range(elements // 2))
    return tuple(Run(half * to_second, 1, tuple((i,) for i in own), cols) for half, own in enumerate(halves))


class Step:
    """One that reads nothing; `param` is the role of its run-time parameter, if it has one, else empty."""

    param = ""

    def load(self, runs: tuple[Run, ...], first: Any, size: Any, args: dict[str, Any]) -> tuple[Any, ...]:
        return ()

    def apply(self, values: cute.Tensor, runs: tuple[Run, ...], loaded: Any, args: dict[str, Any]) -> None:
        raise NotImplementedError


class Scale(Step):
    """v *= a scalar."""

    def __init__(self, param: str) -> None:
        self.param = param

    def apply(self, values: cute.Tensor, runs: tuple[Run, ...], loaded: Any, args: dict[str, Any]) -> None:
        values.store(values.load() * args[self.param])


class AddVector(Step):
    """v = factor * (v + vector[place]), rounded once. Places past the end read the last legal run instead: what they
    become is never stored."""

    def __init__(self, param: str, factor: float) -> None:
        self.param, self.factor = param, factor

    def load(self, runs: tuple[Run, ...], first: Any, size: Any, args: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._load(run, first, size, args[self.param]) for run in runs)

    def _load(self, run: Run, first: Any, size: Any, bias: cute.Pointer) -> cute.Tensor:
        start = cute.assume(cutlass.min(first + run.first, size - run.width), divby=run.width)
        loaded = cute.make_rmem_tensor(run.width, bias.value_type)
        cute.autovec_copy(cute.make_tensor(bias + start, cute.make_layout(run.width)), loaded)
        return loaded

    def apply(self, values: cute.Tensor, runs: tuple[Run, ...], loaded: Any, args: dict[str, Any]) -> None:
        for run, bias in zip(runs, loaded, strict=True):
            terms = [cutlass.Float32(bias[i]) * self.factor for i in range(run.width)]
            for line in run.lines:
                for element, term in zip(line, terms, strict=True):
                    values[element] = cute.math.fma(values[element], self.factor, term)


class Unary(Step):
    """v = value(v)."""

    def value(self, v: Any) -> Any:
        raise NotImplementedError

    def apply(self, values: cute.Tensor, runs: tuple[Run, ...], loaded: Any, args: dict[str, Any]) -> None:
        for i in range(cute.size(values)):
            values[i] = self.value(values[i])


class Gate(Unary):
    """v *= sigmoid(linear * v + cubic * v**3): an infinity times no slope is NaN, as in JAX, and NaN stays NaN.

    An SM has 16 special functions a clock, for which a Hopper tile's tensor cores may wait; and where another warp
    multiplies meanwhile, it loses a clock to every instruction (on an H200). Coarse takes one special function for each
    value: wrong by 2**-12 of v at most (tanh.approx, PTX ISA), where bfloat16 rounds a large v by up to 2**-8.
    Else it takes two: within 2**-20 of positive results, and 2**-18 for v > -4.

    Coarse is (1 + tanh(x / 2)) / 2 times v, which takes v / 2 only: `is_halved` has the step before it give that.
    """

    def __init__(self, linear: float, cubic: float, is_coarse: bool, is_halved: bool) -> None:
        self.linear, self.cubic = linear, cubic
        self.is_coarse, self.is_halved = is_coarse, is_halved

    def value(self, v: Any) -> Any:
        if self.is_coarse:
            half = v if self.is_halved else v * 0.5
            x = _odd(half, self.linear, 4 * self.cubic)
            return cute.math.fma(half, cute.math.tanh(x, approx=True), half)
        x = _odd(v, -LOG2_E * self.linear, -LOG2_E * self.cubic)
        return v * cute.arch.rcp_approx(1.0 + cute.math.exp2(x, approx=True, ftz=True))


def _odd(v: Any, linear: float, cubic: float) -> Any:
    """linear * v + cubic * v**3."""
    return v * (cute.math.fma(v * v, cubic, linear) if cubic else linear)


class Each(Unary):
    """v = f(v)."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def value(self, v: Any) -> Any:
        return self.function(v)


def _relu(v: Any) -> Any:
    """NaN stays NaN, and -0 becomes +0, as in jax.nn.relu; ptxas makes it a part of the rounding to 16 bits."""
    return cute.arch.fmax(v, 0.0, nan=True)


def _sigmoid(v: Any) -> Any:
    """Within 2**-20 of itself until that is tiny."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(v * -LOG2_E, approx=True, ftz=True))


def _coarse_sigmoid(v: Any) -> Any:
    return cute.math.fma(cute.math.tanh(v * 0.5, approx=True), 0.5, 0.5)


def _gelu_exact(v: Any) -> Any:
    half = v * 0.5
    return cute.math.fma(half, cute.math.erf(v * math.sqrt(0.5)), half)


def _squared_relu(v: Any) -> Any:
    positive = cute.arch.fmax(v, 0.0, nan=True)
    return positive * positive


LOG2_E = math.log2(math.e)
GELU = 2 * math.sqrt(2 / math.pi)  # the tanh form: (1 + tanh(x / 2)) / 2 is a sigmoid

# Of an operation, the step for a coarse result or not; `is_halved` as `Gate` has it.
OPS: dict[str, Callable[[bool, bool], Unary]] = {
    "relu": lambda is_coarse, is_halved: Each(_relu),
    "gelu": lambda is_coarse, is_halved: Gate(GELU, 0.044715 * GELU, is_coarse, is_halved),
    "silu": lambda is_coarse, is_halved: Gate(1.0, 0.0, is_coarse, is_halved),
    "sigmoid": lambda is_coarse, is_halved: Each(_coarse_sigmoid if is_coarse else _sigmoid),
    "tanh": lambda is_coarse, is_halved: Each(lambda v: cute.math.tanh(v, approx=is_coarse)),
    "gelu_exact": lambda is_coarse, is_halved: Each(_gelu_exact),
    "squared_relu": lambda is_coarse, is_halved: Each(_squared_relu),
    "leaky_relu": lambda is_coarse, is_halved: Each(lambda v: cute.arch.fmax(v, v * 0.01, nan=True)),
}
GATES = ("gelu", "silu")


def _steps(found: Sequence[Apply], is_coarse: bool) -> Iterator[Step]:
    """Of the expression's own steps; a matrix, which is added last, comes with its box."""
    for i, step in enumerate(found):
        halves_next = is_coarse and i + 1 < len(found) and found[i + 1].op in GATES
        is_halved = is_coarse and i > 0 and found[i - 1].op == "add"
        operand = step.args[-1]
        if len(step.args) == 1:
            yield OPS[step.op](is_coarse, is_halved)
        elif isinstance(operand, Input) and step.op == "mul":
            yield Scale(operand.role)
        elif isinstance(operand, Input) and operand.place != "mn":
            yield AddVector(operand.role, 0.5 if halves_next else 1.0)


class Folds(Protocol):
    """What a reduction takes of a box: its `i`-th value."""

    def add(self, i: int, value: Any) -> None: ...


Matrices = Callable[[], tuple[cute.Tensor, ...]]  # a box of each that the epilogue reads: its registers, when needed


class Chain:
    """Steps in place, one after the other. `reads`: whether there is anything to load."""

    def __init__(self, found: Sequence[Apply], is_coarse: bool) -> None:
        self.steps = tuple(_steps(found, is_coarse))
        self.reads = any(isinstance(step, AddVector) for step in self.steps)
        self.reductions: tuple[Reduction, ...] = ()
        self.wide_params: tuple[str, ...] = ()

    @property
    def params(self) -> tuple[str, ...]:
        """Roles of the run-time parameters, in kernel order (docs/architecture.md, kernel parameter block)."""
        return tuple(step.param for step in self.steps if step.param)

    def load(self, runs: tuple[Run, ...], first: Any, size: Any, args: dict[str, Any]) -> tuple[Any, ...]:
        """Registers with what every step reads; `first` is the thread's first place along the result's contiguous
        dimension, of `size`."""
        return tuple(step.load(runs, first, size, args) for step in self.steps)

    def apply(self, box: Box, loaded: tuple[Any, ...], args: dict[str, Any]) -> tuple[cute.Tensor, ...]:
        """The results of a box; `loaded` is what `load` gave for the same runs."""
        values = box.sums[0]
        for step, own in zip(self.steps, loaded, strict=True):
            step.apply(values, box.runs, own, args)
        for terms in box.matrices():
            add_terms(values, terms)
        return (values,)


@dataclasses.dataclass(frozen=True)
class Box:
    """A thread's values of a box: the `sums` of each b, where they lie (`first_across` of `size_across` places), the
    matrices' there, and what they are reduced to."""

    sums: tuple[cute.Tensor, ...]
    runs: tuple[Run, ...]
    matrices: Matrices
    first_across: Any
    size_across: Any
    folds: tuple[Folds, ...] = ()


def add_terms(sums: cute.Tensor, terms: cute.Tensor) -> None:
    """Element by element, in one order; by fours, for the compiler keeps more bytes than that in local memory."""
    four = cute.make_layout(4)
    for i in range(0, cute.size(sums), 4):
        own = cute.make_tensor(sums.iterator + i, four)
        own.store(own.load() + cute.make_tensor(terms.iterator + i, four).load().to(sums.element_type))
