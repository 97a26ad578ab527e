"""Pointwise parts of a jaxpr as an epilogue's expressions.

What an operation looks like in a jaxpr is what JAX traces of its meaning in `reference.OPS`: so whatever kernels learn
is known here, too. Functions that are jitted inside are looked through; one with a derivative of its own (custom_jvp)
is an operation only as a whole, since its derivative may be another. Knows no shape, no kernel and no device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Sharding

from jax_bwgemm.facts.epilogue import ACC, ALPHA, UP, Apply, Const, Epilogue, Input, Node, Reduction
from jax_bwgemm.facts.epilogue import OPS as KNOWN_OPS
from jax_bwgemm.ops.reference import OPS

MAX_SIZE = 256  # of a tree, in which what is used twice stands twice
_COMMUTATIVE = ("add", "mul", "max", "min")
_FLAG = "flag"  # of what is true: 1, else 0
_MIRRORED = {"lt": "gt", "le": "ge"}
_SAME = {"add_any": "add"}  # the sum of two cotangents
SPREADING = ("broadcast_in_dim", "pvary", "pcast")  # a constant is what it was
_FLOATS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What an expression reads: a variable of a jaxpr, or the name of a hole in a pattern."""

    of: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A primitive of JAX's by its name, with what else decides what it computes."""

    name: str
    args: tuple[Tree, ...]

    @functools.cached_property
    def size(self) -> int:
        return 1 + sum(arg.size if isinstance(arg, Call) else 1 for arg in self.args)


Tree = Leaf | Call | float
JITS, _CUSTOM = ("jit", "pjit"), "custom_jvp_call"
_PLACES = ("in_shardings", "out_shardings")
_DECIDING = {"integer_pow": ("y",)}  # the params that decide what a primitive computes


class UnfusableError(ValueError):
    """Its text says what is no epilogue's, by JAX's name."""


def tree_of(eqn: Any, args: Sequence[Tree], names: frozenset[str] | None = None) -> Tree:
    """Of the result of a pointwise equation, whose operands are `args`. UnfusableError if it is none.

    Conversions between floats are none: an epilogue is in float32, and rounded once. `names`: of the primitives that
    operations are made of, which are those of the patterns.
    """
    names = _names() if names is None else names
    name = _SAME.get(eqn.primitive.name, eqn.primitive.name)
    if len(eqn.outvars) != 1:
        raise UnfusableError(f"`{name}` has {len(eqn.outvars)} results")
    if name in JITS:
        if any(isinstance(x, Sharding) for key in _PLACES for x in eqn.params.get(key, ())):
            raise UnfusableError("a jitted function with shardings of its own is no operation of an epilogue")
        (found,) = trees_of(eqn.params["jaxpr"], args, names)
        return found
    if name == _CUSTOM:
        inner = eqn.params["call_jaxpr"]
        (found,) = trees_of(inner, args, names)
        # Functions that compute the same may have different derivatives: so the name says whose it is, and where.
        return _checked(Call(f"{name} of {inner.jaxpr.debug_info.func_src_info}", (found,)))
    if name == "copy" or (name in SPREADING and isinstance(args[0], float)):
        return args[0]
    if name == "convert_element_type":
        return _converted(args[0], *(str(x.aval.dtype) for x in (*eqn.invars, *eqn.outvars)))
    if name not in names and _MIRRORED.get(name) not in names:
        raise UnfusableError(f"`{name}` is no operation of an epilogue")
    if name in _MIRRORED:
        return _checked(Call(_MIRRORED[name], tuple(args[::-1])))
    if name == "select_n":
        args = [_nonzero(args[0]), *args[1:]]
    if name == "integer_pow" and eqn.params["y"] == 2:
        return _checked(Call("square", tuple(args)))
    own = [eqn.params[param] for param in _DECIDING.get(name, ())]
    return _checked(Call("_".join(map(str, (name, *own))), tuple(args)))


def _converted(tree: Tree, given: str, dtype: str) -> Tree:
    if given == "bool" and dtype in _FLOATS:
        return Call(_FLAG, (tree,))
    if not isinstance(tree, float) and not {given, dtype} <= set(_FLOATS):
        raise UnfusableError(f"`convert_element_type` from {given} to {dtype} is no operation of an epilogue")
    return tree


def _nonzero(predicate: Tree) -> Tree:
    """What is chosen by, in the one form: that a number is not 0."""
    if isinstance(predicate, Call) and predicate.name == "ne" and predicate.args[1] == 0.0:
        return predicate
    return Call("ne", (Call(_FLAG, (predicate,)), 0.0))


def trees_of(jaxpr: ClosedJaxpr, args: Sequence[Tree], names: frozenset[str] | None = None) -> list[Tree]:
    """Of the results of a jaxpr, every equation of which is pointwise."""
    inner = jaxpr.jaxpr
    known: dict[Any, Tree] = dict(zip(inner.constvars, map(_constant, jaxpr.consts), strict=True))
    known |= zip(inner.invars, args, strict=True)

    def read(x: Any) -> Tree:
        return constant(x) if isinstance(x, Literal) else known[x]

    for eqn in inner.eqns:
        known[eqn.outvars[0]] = tree_of(eqn, [read(x) for x in eqn.invars], names)
    return [read(x) for x in inner.outvars]


def constant(literal: Any) -> float:
    """UnfusableError if it is no scalar."""
    return _constant(literal.val)


def _constant(value: Any) -> float:
    dtype, shape = jnp.result_type(value), np.shape(value)
    if shape != () or not jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.complexfloating):
        raise UnfusableError(f"a constant of {dtype}{list(shape)} is no scalar of an epilogue")
    return float(value)


def _checked(call: Call) -> Call:
    if call.size > MAX_SIZE:
        raise UnfusableError(f"an expression of more than {MAX_SIZE} operations is no epilogue")
    return call


class _AnyName(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """How an operation looks: a tree with holes for its arguments."""

    op: str
    tree: Call
    holes: tuple[Leaf, ...]


def _gelu(x: jax.Array) -> jax.Array:
    """As its paper writes it, and models that do not call `jax.nn.gelu` do."""
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@functools.lru_cache(maxsize=1)
def _patterns() -> tuple[_Pattern, ...]:
    """The largest first, so that silu is found before the multiplication in it. In a jaxpr, constants have been rounded
    to the dtype that it was traced with."""
    found: dict[_Pattern, None] = {}
    for op, function in (*OPS.items(), ("gelu", _gelu)):
        holes = tuple(map(Leaf, range(KNOWN_OPS[op].num_args)))
        for dtype in _FLOATS:
            one = jax.ShapeDtypeStruct((2,), jnp.dtype(dtype))
            (tree,) = trees_of(jax.make_jaxpr(function)(*[one] * len(holes)), holes, _AnyName())
            if isinstance(tree, Call):
                found[_Pattern(op, tree, holes)] = None
    return tuple(sorted(found, key=lambda pattern: -pattern.tree.size))


@functools.lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    """Of the primitives in the patterns."""

    def names(tree: Tree) -> set[str]:
        if not isinstance(tree, Call):
            return set()
        bare = next((name for name in _DECIDING if tree.name.startswith(name)), tree.name)
        return {bare}.union(*map(names, tree.args))

    return frozenset().union(*(names(pattern.tree) for pattern in _patterns()))


def epilogue_of(
    trees: Sequence[Tree], inputs: Mapping[Leaf, Input], reductions: Sequence[tuple[str, str]] = ()
) -> Epilogue:
    """Its results, and then what `reductions` (reducer, place) reduce, are the `trees`, which read `inputs`.
    UnfusableError names what is no operation of an epilogue."""
    scalars: dict[str, float] = {}

    def node(tree: Tree) -> Node:
        if isinstance(tree, float):  # two zeros are one to every cache
            return Apply("neg", (Const(0.0),)) if tree == 0 and math.copysign(1, tree) < 0 else Const(tree)
        if isinstance(tree, Call) and tree.name == _FLAG and isinstance(tree.args[0], Leaf):
            tree = tree.args[0]  # an operand is 1 where it is true
        if isinstance(tree, Leaf):
            return inputs[tree]
        pattern, holes = _matched(tree)
        args = [holes[hole] for hole in pattern.holes]
        if pattern.op in _COMMUTATIVE and not _reads(ACC, args[0], inputs) and not _reads_up_alone(args, inputs):
            args.reverse()  # a chain reads the sums first
        if (by := _scale(pattern.op, args, inputs)) is not None:
            return scaled(by)
        if pattern.op == "sub" and not _reads(ACC, args[0], inputs) and (by := scale_of(args[1])) is not None:
            return Apply("add", (scaled(-by), node(args[0])))  # a chain adds
        return Apply(pattern.op, tuple(map(node, args)))

    def scale_of(tree: Tree) -> float | None:
        if not isinstance(tree, Call):
            return 1.0 if _is_acc(tree, inputs) else None
        pattern, holes = _matched(tree)
        return _scale(pattern.op, [holes[hole] for hole in pattern.holes], inputs)

    def scaled(by: float) -> Node:
        """Kernels take a scale as a parameter, but no second one."""
        if scalars.setdefault(ALPHA.role, by) == by:
            return Apply("mul", (ACC, ALPHA))
        return Apply("mul", (ACC, Const(by)))

    names, num = string.ascii_lowercase, len(trees) - len(reductions)
    if len(trees) > len(names):
        raise UnfusableError(f"an epilogue of {len(trees)} results has no names for them")
    nodes = list(map(node, trees))
    seconds = tuple((f"result_{x}", own) for x, own in zip(names[1:], nodes[1:num], strict=False))
    reduced = zip(names, reductions, nodes[num:], strict=False)
    found = tuple(Reduction(f"reduced_{x}", *how, own) for x, how, own in reduced)
    return Epilogue(nodes[0], tuple(scalars.items()), seconds, found)


def _matched(tree: Call) -> tuple[_Pattern, dict[Leaf, Tree]]:
    for pattern in _patterns():
        if (found := _unify(pattern.tree, tree, {})) is not None:
            return pattern, found
    if tree.name == "integer_pow_3":  # in no larger pattern
        return _matched(Call("mul", (Call("square", tree.args), *tree.args)))
    if any(isinstance(arg, float) and math.isnan(arg) for arg in tree.args):
        raise UnfusableError("a constant that is no number (nan) is none of an epilogue")
    if tree.name == _FLAG:
        raise UnfusableError("a comparison's result as a number is no operation of an epilogue: `jnp.where` chooses")
    if tree.name.startswith(_CUSTOM):
        raise UnfusableError("a function with a derivative of its own (`custom_jvp`) is no operation of an epilogue")
    raise UnfusableError(f"`{tree.name}` is no operation of an epilogue")


def _unify(pattern: Tree, tree: Tree, holes: dict[Leaf, Tree]) -> dict[Leaf, Tree] | None:
    """What stands in the place of each hole; None where the two differ."""
    if isinstance(pattern, Leaf):
        return holes | {pattern: tree} if holes.get(pattern, tree) == tree else None
    if not isinstance(pattern, Call) or not isinstance(tree, Call):
        return holes if pattern == tree else None
    if pattern.name != tree.name or len(pattern.args) != len(tree.args):
        return None
    orders = [tree.args, tree.args[::-1]] if tree.name in _COMMUTATIVE else [tree.args]
    for args in orders:
        found: dict[Leaf, Tree] | None = holes
        for one, other in zip(pattern.args, args, strict=True):
            found = found if found is None else _unify(one, other, found)
        if found is not None:
            return found
    return None


def _scale(op: str, args: Sequence[Tree], inputs: Mapping[Leaf, Input]) -> float | None:
    """By what the sums are multiplied, in any order, or divided, if that is as exact; None if it is anything else."""
    if len(args) != 2 or op not in ("mul", "div"):
        return None
    args = args[::-1] if op == "mul" and isinstance(args[0], float) else args
    by = args[1]
    if not isinstance(by, float) or not _is_acc(args[0], inputs):
        return None
    if op == "mul":
        return by
    return 1 / by if by and math.isfinite(by) and abs(math.frexp(by)[0]) == 0.5 else None


def _reads(role: Input, tree: Tree, inputs: Mapping[Leaf, Input]) -> bool:
    if isinstance(tree, Call):
        return any(_reads(role, arg, inputs) for arg in tree.args)
    return isinstance(tree, Leaf) and inputs[tree] == role


def _reads_up_alone(args: Sequence[Tree], inputs: Mapping[Leaf, Input]) -> bool:
    """Whether the first argument reads the second product's sums, and no other one reads any."""
    first, *others = args
    return _reads(UP, first, inputs) and not any(_reads(x, arg, inputs) for x in (ACC, UP) for arg in others)


def _is_acc(tree: Tree, inputs: Mapping[Leaf, Input]) -> bool:
    return isinstance(tree, Leaf) and inputs[tree] == ACC
