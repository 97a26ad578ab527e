"""What follows a product, as an expression over named inputs. Knows no chip, no tile and no JAX.

An `Epilogue` says what each result is, in float32 before the one rounding to its dtype. The expression has four
readers, and no other statement of what an operation means: `reference` evaluates it in JAX, `kernels.epilogue` as steps
on registers, `cost` counts what it takes, and `label` names it. An operation is an entry in `OPS`, in `reference.OPS`,
in `derivative.SLOPES` if it is differentiated and, if kernels have it, in `kernels.epilogue.OPS` (an activation) or
`kernels.expression.ARITHMETIC`.

    alpha * acc + bias, through relu, plus residual      add(relu(add(mul(acc, alpha), bias:n)), residual:mn)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

# Of an input: sums; a number that the host knows at run time; one that lies on the device, float32; a vector along n
# or m; a matrix.
PLACES = ("acc", "scalar", "one", "n", "m", "mn")
REDUCERS = ("sum", "max")
SUMS = ("acc", "up", "left")  # roles of sums: a @ b, a @ up of a gated product, and left @ b of that one's transpose


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on float32. For each element: the special functions (MUFU) that it takes where the result may be
    wrong by 2**-12 of its argument (`coarse`) and where not (`fine`), and other instructions that no MMA hides."""

    num_args: int
    coarse: int = 0
    fine: int = 0
    instructions: int = 0


_ARITHMETIC = {
    "add": Op(2),
    "sub": Op(2),
    "mul": Op(2),
    "div": Op(2, 1, 1, 8),
    "max": Op(2),
    "min": Op(2),
    "neg": Op(1),
    "abs": Op(1),
    "square": Op(1),
    "exp": Op(1, 1, 1),
    "log": Op(1, 1, 1),
    "sqrt": Op(1, 1, 1, 4),
    "rsqrt": Op(1, 1, 1, 4),
    "erf": Op(1, 1, 1, 20),
    "gt": Op(2),  # 1 where the first is greater, else 0
    "ge": Op(2),
    "eq": Op(2),
    "where": Op(3),  # the second where the first is not 0, else the third
}
_ACTIVATIONS = {
    "relu": Op(1),
    "gelu": Op(1, 1, 2),  # the tanh form, x * sigmoid(...)
    "silu": Op(1, 1, 2),
    "sigmoid": Op(1, 1, 2),
    "tanh": Op(1, 1, 2, 8),
    "gelu_exact": Op(1, 1, 1, 24),  # by erf
    "squared_relu": Op(1),
    "leaky_relu": Op(1),
}
OPS = _ARITHMETIC | _ACTIVATIONS
REDUCED = Op(1, instructions=3)  # a value of a reduction: bounds, the fold, and its share of what lanes exchange
ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class Input:
    """`role`: by what name callers, kernels and errors know it. A vector or a matrix has the result's dtype, a number
    on the device is float32."""

    role: str
    place: str

    def __post_init__(self) -> None:
        if self.place not in PLACES or not re.fullmatch("[a-z_]+", self.role):
            raise ValueError(f"an input requires a role of lower case and a place of {PLACES}, got {self!r}")

    def __str__(self) -> str:
        return self.role if self.place in ("acc", "scalar") else f"{self.role}:{self.place}"


@dataclasses.dataclass(frozen=True)
class Const:
    """A number that is compiled in."""

    value: float

    def __str__(self) -> str:
        return repr(float(self.value))


@dataclasses.dataclass(frozen=True)
class Apply:
    op: str
    args: tuple[Node, ...]

    def __post_init__(self) -> None:
        if self.op not in OPS or len(self.args) != OPS[self.op].num_args:
            raise ValueError(f"an operation requires one of {', '.join(OPS)} with its arguments, got {self}")

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


Node = Input | Const | Apply
ACC, ALPHA = Input("acc", "acc"), Input("alpha", "scalar")
UP = Input("up", "acc")  # the sums of a gated product's second b
BIAS, RESIDUAL, BETA = Input("bias", "n"), Input("residual", "mn"), Input("beta", "scalar")
FACTOR = Input("factor", "one")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A result that is a vector along `place`, "n" or "m", and float32: over the other dimension, of each matrix of a
    batch, the sum or the largest of `node`, whose values are not rounded."""

    role: str
    reducer: str
    place: str
    node: Node

    def __post_init__(self) -> None:
        if self.reducer not in REDUCERS or self.place not in ("n", "m"):
            raise ValueError(f"a reduction requires one of {REDUCERS} along n or m, got {self!r}")

    def __str__(self) -> str:
        return f"{self.reducer}:{self.place}({self.node})"


AXPBY = Apply("add", (Apply("mul", (ACC, ALPHA)), Apply("mul", (RESIDUAL, BETA))))


class Moves(NamedTuple):
    """How many matrices of the result's shape an epilogue reads, and how many it makes: what a store carries box by
    box; and how many vectors it reduces them to."""

    matrices: int = 0
    results: int = 1
    reductions: int = 0

    @property
    def planes(self) -> int:
        """Boxes of one place that share its store buffers, where results take the place of what was read."""
        return max(self.matrices, self.results) if self.matrices else 1


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """`out` is the result; `scalars` the values of its scalar inputs, by role; `seconds` further results of the same
    shape and dtype, by role; `reductions` come last."""

    out: Node = ACC
    scalars: tuple[tuple[str, float], ...] = ()
    seconds: tuple[tuple[str, Node], ...] = ()
    reductions: tuple[Reduction, ...] = ()

    def __post_init__(self) -> None:
        wanted = {node.role for node in self._inputs() if node.place == "scalar"}
        if {role for role, _ in self.scalars} != wanted:
            raise ValueError(f"`scalars` requires values of {sorted(wanted)}, got {self.scalars}")

    @functools.cached_property
    def operands(self) -> tuple[Input, ...]:
        """The numbers on the device, vectors and matrices that it reads, in the order in which primitives and kernels
        take them."""
        return tuple(node for node in self._inputs() if node.place not in ("acc", "scalar"))

    @property
    def results(self) -> tuple[tuple[str, Node], ...]:
        """The matrices."""
        return (("out", self.out), *self.seconds)

    @property
    def is_identity(self) -> bool:
        return self == Epilogue()

    @property
    def returns_sums(self) -> bool:
        """Whether all that it returns beside its result is the sums: these may be rounded before what follows them."""
        return [node for _, node in self.seconds] == [ACC] and not self.reductions

    @functools.cached_property
    def num_matrices(self) -> int:
        """How many matrices of the result's shape it reads."""
        return sum(node.place == "mn" for node in self.operands)

    @functools.cached_property
    def is_gated(self) -> bool:
        """Whether it reads the sums of a second b."""
        return any(node.place == "acc" and node != ACC for node in self._inputs())

    @functools.cached_property
    def moves(self) -> Moves:
        return Moves(self.num_matrices, len(self.results), len(self.reductions))

    @property
    def kind(self) -> str:
        """The name under which kernels are compiled: what is done, not the scalars' values."""
        seconds = (f"{role}_{label(node)}" for role, node in self.seconds)
        return "_".join(
            (label(self.out), *seconds, *(f"{x.reducer}{x.place}_{label(x.node)}" for x in self.reductions))
        )

    @property
    def transposed(self) -> Epilogue:
        """Of the transposed product."""
        seconds = tuple((role, _transposed(node)) for role, node in self.seconds)
        other = {"n": "m", "m": "n"}
        reductions = (dataclasses.replace(x, place=other[x.place], node=_transposed(x.node)) for x in self.reductions)
        return Epilogue(_transposed(self.out), self.scalars, seconds, tuple(reductions))

    def ops(self) -> Iterator[Op]:
        """Of what is reduced, those that no result has, and the reduction itself."""
        for _, node in self.results:
            yield from (OPS[inner.op] for inner in _walk(node) if isinstance(inner, Apply))
        known = {inner for _, node in self.results for inner in _walk(node)}
        for x in self.reductions:
            yield from (OPS[inner.op] for inner in _walk(x.node) if isinstance(inner, Apply) and inner not in known)
            yield REDUCED

    def _inputs(self) -> tuple[Input, ...]:
        nodes = *(node for _, node in self.results), *(x.node for x in self.reductions)
        return tuple(dict.fromkeys(x for node in nodes for x in inputs(node)))


def chain(
    alpha: float = 1.0, has_bias: bool = False, activation: str | None = None, has_residual: bool = False
) -> Epilogue:
    """`activation(alpha * acc + bias) + residual`: what `matmul` offers. ValueError for an unknown activation."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"`activation` requires None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    out: Node = ACC
    if alpha != 1.0:
        out = Apply("mul", (out, ALPHA))
    if has_bias:
        out = Apply("add", (out, BIAS))
    if activation is not None:
        out = Apply(activation, (out,))
    if has_residual:
        out = Apply("add", (out, RESIDUAL))
    return Epilogue(out, (("alpha", alpha),) if alpha != 1.0 else ())


def axpby(alpha: float = 1.0, beta: float = 0.0, has_residual: bool = False) -> Epilogue:
    """`alpha * acc + beta * residual`, as BLAS has it, both numbers at run time; without a residual, a scale."""
    if not has_residual:
        return chain(alpha)
    return Epilogue(AXPBY, (("alpha", alpha), ("beta", beta)))


def inputs(node: Node) -> tuple[Input, ...]:
    """All that it reads, each once, in the order of their first use."""
    return tuple(dict.fromkeys(inner for inner in _walk(node) if isinstance(inner, Input)))


def steps(node: Node) -> tuple[Apply, ...] | None:
    """From the sums outwards, if each operation takes what the one before gave and nothing else but inputs."""
    found: list[Apply] = []
    while isinstance(node, Apply):
        if not all(isinstance(arg, Input) and arg != ACC for arg in node.args[1:]):
            return None
        found.append(node)
        node = node.args[0]
    return tuple(reversed(found)) if node == ACC else None


def in_place(epilogue: Epilogue) -> tuple[Apply, ...] | None:
    """The steps of a chain that needs the sums' own registers only: a scale, sums with a vector, activations, and last
    a sum with a matrix. Else None."""
    found = steps(epilogue.out)
    if epilogue.seconds or epilogue.reductions or found is None:
        return None
    for i, step in enumerate(found):
        other = step.args[-1]
        place = other.place if isinstance(other, Input) and len(step.args) > 1 else ""
        is_last = i == len(found) - 1
        kinds = {"mul": ("scalar",), "add": ("n", "m", "mn") if is_last else ("n", "m")}
        if step.op not in ACTIVATIONS and place not in kinds.get(step.op, ()):
            return None
    roles = [x.role for step in found for x in step.args[1:] if isinstance(x, Input)]
    return found if len(roles) == len(set(roles)) else None


def label(node: Node) -> str:
    """Readable, of a chain: the roles of what is added or multiplied, and the operations. A digest, of all else."""
    if node in (UP, AXPBY):
        return UP.role if node == UP else "axpby"
    found, names = steps(node), []
    for step in found or ():
        known = {"scale": ("mul", (ALPHA,)), "bias": ("add", (BIAS,)), "residual": ("add", (RESIDUAL,))}
        known |= {"gate": ("mul", (UP,)), "factor": ("mul", (FACTOR,))}
        own = step.op, tuple(_upright(arg) for arg in step.args[1:])
        names.append(next((name for name, what in known.items() if what == own), step.op if not own[1] else ""))
    if found is None or "" in names:
        return f"expr{hashlib.sha256(str(node).encode()).hexdigest()[:12]}"
    return "_".join(names) or "identity"


def split(epilogue: Epilogue) -> tuple[Epilogue, Epilogue]:
    """What is affine in the sums, scale and sums with vectors; and what follows, in which the sums are its result.

    Their order is the epilogue's, and what follows one step after another; else the first is the sums themselves.
    """
    found = steps(epilogue.out)
    if epilogue.seconds or epilogue.reductions or found is None:
        return Epilogue(), epilogue
    first = next((i for i, step in enumerate(found) if not _is_affine(step)), len(found))
    inner, outer = (_of_steps(part) for part in (found[:first], found[first:]))
    return Epilogue(inner, epilogue.scalars), Epilogue(outer)


def unfused(epilogue: Epilogue) -> tuple[Epilogue, Epilogue]:
    """What a product has, and what follows it in a pass of its own, whose sums are its result. A product alone, if its
    result need not be rounded; what goes into a function, if that is wanted, rounded, beside the function's result."""
    inner, outer = split(Epilogue(epilogue.out, epilogue.scalars))
    has_one = len(epilogue.seconds) == 1 and not epilogue.reductions
    if has_one and epilogue.seconds[0][1] == inner.out and not epilogue.is_gated:
        return inner, Epilogue(outer.out, seconds=((epilogue.seconds[0][0], ACC),))
    return Epilogue(), epilogue


def _is_affine(step: Apply) -> bool:
    places = {"add": ("scalar", "n", "m"), "mul": ("scalar",)}.get(step.op, ())
    return isinstance(other := step.args[-1], Input) and other.place in places


def _of_steps(found: tuple[Apply, ...]) -> Node:
    node: Node = ACC
    for step in found:
        node = Apply(step.op, (node, *step.args[1:]))
    return node


_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|inf\b|nan\b)"


def parse(text: str) -> Node:
    """The inverse of `str`. ValueError for anything else."""
    tokens = re.findall(rf"{_NUMBER}|[a-z_]+(?::(?:one|mn|m|n))?|[(),]", text)
    node = _parse(tokens)
    if tokens or str(node) != text:
        raise ValueError(f"an expression requires the form 'relu(add(acc, bias:n))', got {text!r}")
    return node


def _parse(tokens: list[str]) -> Node:
    name = tokens.pop(0) if tokens else ""
    if re.fullmatch(_NUMBER, name):
        return Const(float(name))
    if not tokens or tokens[0] != "(":
        role, _, place = name.partition(":")
        return Input(role, place or ("acc" if role in SUMS else "scalar"))
    args: list[Node] = []
    while tokens and tokens.pop(0) in ("(", ","):
        args.append(_parse(tokens))
    return Apply(name, tuple(args))


def _walk(node: Node) -> Iterator[Node]:
    """The node and what is in it, innermost first, from left to right."""
    for arg in node.args if isinstance(node, Apply) else ():
        yield from _walk(arg)
    yield node


def _transposed(node: Node) -> Node:
    if isinstance(node, Apply):
        return Apply(node.op, tuple(map(_transposed, node.args)))
    if isinstance(node, Const):
        return node
    role = {"up": "left", "left": "up"}.get(node.role, node.role) if node.place == "acc" else node.role
    return Input(role, {"m": "n", "n": "m"}.get(node.place, node.place))


def _upright(node: Node) -> Node:
    """A vector as it is named: along n."""
    return Input(node.role, "n") if isinstance(node, Input) and node.place == "m" else node
