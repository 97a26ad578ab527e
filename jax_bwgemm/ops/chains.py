"""Products of a jaxpr and the pointwise equations that follow them. Knows no kernel, no price and no device.

A chain ends where a value of it is read elsewhere: what a gradient keeps, for one, is never computed a second time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jax_bwgemm.facts.contraction import Contraction, of_dot_general
from jax_bwgemm.facts.epilogue import ACC, BIAS, RESIDUAL, Epilogue, Input
from jax_bwgemm.ops.tracing import Leaf, Tree, UnfusableError, constant, epilogue_of, tree_of

Eqn = Any  # a `JaxprEqn`, whose variables have avals that JAX does not type
_RESULTS = ("bfloat16", "float16", "float32")
_POINTWISE = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "div",
    "eq", "erf", "erfc", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", "xor",
}  # what XLA computes in one pass with what is before and behind it  # fmt: skip
_CASTS = ("pvary", "pcast")


@dataclasses.dataclass(frozen=True)
class Chain:
    """A product, `eqns[members[0]]`, and what follows it up to `out`, the result of the last of `members`.

    `operands`: what `epilogue` reads, with the modes of the contraction's `extras`. `is_passed_over`: what reads
    `out` is pointwise, a pass of XLA's that could do all of `epilogue`, too.
    """

    members: tuple[int, ...]
    out: Any
    contraction: Contraction
    epilogue: Epilogue
    operands: tuple[Operand, ...]
    is_passed_over: bool


@dataclasses.dataclass(frozen=True)
class Operand:
    """A variable without its dimensions `ones`, of size 1; `casts`: equations that make it vary over mesh axes, the
    last first, to be repeated for it."""

    var: Any
    ones: tuple[int, ...] = ()
    casts: tuple[Eqn, ...] = ()


def chains(eqns: Sequence[Eqn], idx: int, outvars: Sequence[Any]) -> Iterator[Chain | str]:
    """Of the product `eqns[idx]` of a jaxpr with these `outvars`: the longest chain first. What ends it, and
    what cannot be fused, is said between, as text."""
    trees, refusal = _cone(eqns, idx)
    makers = {x: i for i, eqn in enumerate(eqns) for x in eqn.outvars}
    readers = _readers(eqns, outvars)
    members = {x: _ancestors(x, makers, trees, eqns) for x in trees}
    product = eqns[idx].outvars[0]
    if refusal:
        yield refusal
    for out in sorted(trees, key=lambda x: -makers[x]):
        if out is product or str(out.aval.dtype) not in _RESULTS:
            continue
        own = members[out]
        inner = [eqns[i].outvars[0] for i in own if eqns[i].outvars[0] is not out]
        if isinstance(trees[out], Leaf):
            continue
        if any(not readers[x] <= set(own) for x in inner):
            yield "what is in it is read elsewhere, too"
            continue
        try:
            is_passed_over = all(i >= 0 and is_pointwise(eqns[i]) for i in readers[out])
            yield _chain(eqns, own, out, trees[out], makers, is_passed_over)
        except UnfusableError as error:
            yield str(error)


def _cone(eqns: Sequence[Eqn], idx: int) -> tuple[dict[Any, Tree], str]:
    """What pointwise equations make of a product, and the first reason why one is none of them."""
    product = eqns[idx].outvars[0]
    trees: dict[Any, Tree] = {product: Leaf(product)}
    refusal = ""

    def read(x: Any) -> Tree:
        return constant(x) if isinstance(x, Literal) else trees.get(x, Leaf(x))

    for eqn in eqns[idx + 1 :]:
        if not any(not isinstance(x, Literal) and x in trees for x in eqn.invars):
            continue
        if any(x.aval.shape != product.aval.shape for x in eqn.outvars):
            continue
        try:
            trees[eqn.outvars[0]] = tree_of(eqn, [read(x) for x in eqn.invars])
        except UnfusableError as error:
            refusal = refusal or str(error)
    return trees, refusal


def _readers(eqns: Sequence[Eqn], outvars: Sequence[Any]) -> Mapping[Any, set[int]]:
    """The equations that read a variable; -1: it is a result."""
    found: dict[Any, set[int]] = collections.defaultdict(set)
    for i, eqn in enumerate(eqns):
        for x in eqn.invars:
            if not isinstance(x, Literal):
                found[x].add(i)
    for x in outvars:
        if not isinstance(x, Literal):
            found[x].add(-1)
    return found


def _ancestors(out: Any, makers: Mapping[Any, int], trees: Mapping[Any, Tree], eqns: Sequence[Eqn]) -> list[int]:
    """The equations of the cone that make `out`, in order."""
    found, todo = set(), [out]
    while todo:
        i = makers[todo.pop()]
        if i not in found:
            found.add(i)
            todo += [x for x in eqns[i].invars if not isinstance(x, Literal) and x in trees]
    return sorted(found)


def is_pointwise(eqn: Eqn) -> bool:
    """Whether XLA makes a pass over its operands of it, together with others."""
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call"):
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return all(map(is_pointwise, inner.jaxpr.eqns))
    is_constant = eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == ()
    return is_constant or eqn.primitive.name in _POINTWISE


def _chain(
    eqns: Sequence[Eqn], members: Sequence[int], out: Any, tree: Tree, makers: Mapping[Any, int], is_passed_over: bool
) -> Chain:
    dot = eqns[members[0]]
    a, b = dot.invars
    contraction = of_dot_general(a.aval.ndim, b.aval.ndim, dot.params["dimension_numbers"])
    read = read_by(tree, dot.outvars[0], out.aval, contraction, eqns, makers)
    return Chain(tuple(members), out, *read, is_passed_over)


def read_by(
    tree: Tree, product: Any, out: Any, contraction: Contraction, eqns: Sequence[Eqn], makers: Mapping[Any, int]
) -> tuple[Contraction, Epilogue, tuple[Operand, ...]]:
    """The epilogue that computes `tree`, of the aval `out`, from the variable `product`: with its operands' modes, and
    these. `makers`: of variables, the index of the equation. UnfusableError if there is none."""
    inputs, extras, operands = {Leaf(product): ACC}, {}, {}  # by role
    for leaf in _leaves(tree):
        if leaf.of is product:
            continue
        operand, dims = _source(leaf.of, out, eqns, makers)
        modes = "".join(contraction.out[i] for i in dims)
        place = "mn" if len(dims) == out.ndim else "m" if modes and set(modes) <= set(contraction.free_a) else "n"
        role = _role(RESIDUAL if place == "mn" else BIAS, [x.role for x in inputs.values()])
        inputs[leaf], extras[role], operands[role] = Input(role, place), modes, operand
    epilogue = epilogue_of(tree, inputs)
    roles = [x.role for x in epilogue.operands]
    whole = dataclasses.replace(contraction, extras=tuple(extras[role] for role in roles))
    return whole, epilogue, tuple(operands[role] for role in roles)


def _leaves(tree: Tree) -> tuple[Leaf, ...]:
    if isinstance(tree, Leaf):
        return (tree,)
    args = () if isinstance(tree, float) else tree.args
    return tuple(dict.fromkeys(leaf for arg in args for leaf in _leaves(arg)))


def _role(like: Input, taken: Sequence[str]) -> str:
    """A second bias or residual is one "too", and so on."""
    role = like.role
    while role in taken:
        role += "_too"
    return role


def _source(x: Any, out: Any, eqns: Sequence[Eqn], makers: Mapping[Any, int]) -> tuple[Operand, tuple[int, ...]]:
    """The smallest array of `out`'s dtype of which `x` is made by repeating it, and the dimension of `out` that each of
    its own is, but those of size 1. UnfusableError if there is none."""
    dims: tuple[int | None, ...] = tuple(
        i if size == own else None for i, (size, own) in enumerate(zip(x.aval.shape, out.shape, strict=False))
    )
    if x.aval.ndim == 0:
        raise UnfusableError("a scalar that is computed is no operand of an epilogue yet")
    if x.aval.ndim != out.ndim:
        raise UnfusableError(f"an operand of shape {x.aval.shape} is neither a vector nor of the result's shape")
    found: tuple[Operand, tuple[int, ...]] | None = None
    casts: tuple[Eqn, ...] = ()
    while True:
        if x.aval.dtype == out.dtype:
            ones = tuple(j for j, i in enumerate(dims) if i is None)
            found = Operand(x, ones, casts), tuple(i for i in dims if i is not None)
        eqn = eqns[makers[x]] if x in makers else None
        before = None if eqn is None else dims if eqn.primitive.name in _CASTS else _before(eqn, dims)
        if eqn is None or before is None or isinstance(eqn.invars[0], Literal):
            break
        casts = (*casts, eqn) if eqn.primitive.name in _CASTS else casts
        x, dims = eqn.invars[0], before
    if found is None:
        raise UnfusableError(f"an operand of {x.aval.dtype}{list(x.aval.shape)} is none of {out.dtype}, repeated")
    return found


def _before(eqn: Eqn, dims: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """The dimensions of an equation's operand, from its result's; None if it does more than repeat that."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape if eqn.invars else ()
    if name == "convert_element_type":
        return dims if str(eqn.invars[0].aval.dtype) in _RESULTS else None
    if name == "broadcast_in_dim":
        to = eqn.params["broadcast_dimensions"]
        is_whole = [shape[i] == eqn.params["shape"][j] for i, j in enumerate(to)]
        return tuple(dims[j] if whole else None for j, whole in zip(to, is_whole, strict=True))
    if name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None):
        result = eqn.outvars[0].aval.shape
        if [size for size in shape if size != 1] != [size for size in result if size != 1]:
            return None
        real = iter([dim for dim, size in zip(dims, result, strict=True) if size != 1])
        return tuple(None if size == 1 else next(real) for size in shape)
    return None
