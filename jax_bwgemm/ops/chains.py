"""Products of a jaxpr, JAX's and ours, and the pointwise equations that follow them. Knows no kernel, no price and no
device.

A chain ends where a value of it is read elsewhere: what a gradient keeps, for one, is never computed a second time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_bwgemm.facts.contraction import Contraction, of_dot_general
from jax_bwgemm.facts.epilogue import ACC, ACTIVATIONS, BIAS, FACTOR, RESIDUAL, UP, Epilogue, Input
from jax_bwgemm.facts.units import unit
from jax_bwgemm.ops.primitive import fused_matmul_p, matmul_p
from jax_bwgemm.ops.tracing import SPREADING, Leaf, Tree, UnfusableError, constant, epilogue_of, tree_of

Eqn = Any  # a `JaxprEqn`, whose variables have avals that JAX does not type
_RESULTS = ("bfloat16", "float16", "float32")
_POINTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erfc", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or",
    "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
}  # what XLA computes in one pass with what is before and behind it  # fmt: skip
_CASTS = ("pvary", "pcast")
UNITS = {
    unit(name, is_gated, has_bias): (name, is_gated, has_bias)
    for name in ACTIVATIONS
    for is_gated in (False, True)
    for has_bias in (False, True)
}  # what feed-forward blocks make of one product, or of two: the activation, whether it is gated, and has biases


@dataclasses.dataclass(frozen=True)
class Chain:
    """A product, or the two of a gated one, and what follows up to `out`, the result of the last of `members`.

    `members` and `products`: equations, the latter in the order in which the contraction has their b. What is
    transposed at once, as gradients of weights are, is a product whose result has its modes in that order.
    `operands`: what `epilogue` reads, with the modes of the contraction's `extras`. `is_passed_over`: what reads `out`
    is one pass of XLA's, which could do all of `epilogue`, too.
    """

    members: tuple[int, ...]
    products: tuple[int, ...]
    out: Any
    contraction: Contraction
    epilogue: Epilogue
    operands: tuple[Operand, ...]
    is_passed_over: bool


@dataclasses.dataclass(frozen=True)
class _Sum:
    """What the pointwise equations read of a product, and the equation that makes it: its own, or the one that
    transposes its result by `permutation` and alone reads it."""

    var: Any
    maker: int
    permutation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A variable without its dimensions `ones`, of size 1; `casts`: equations that make it vary over mesh axes, the
    last first, to be repeated for it."""

    var: Any
    ones: tuple[int, ...] = ()
    casts: tuple[Eqn, ...] = ()


def multiplies(eqn: Eqn) -> bool:
    return eqn.primitive in (matmul_p, fused_matmul_p) or eqn.primitive.name == "dot_general"


def is_product(eqn: Eqn) -> bool:
    """Whether it multiplies, and does nothing else: JAX's own, or one of ours, as the gradients of fused products have
    them, that asks for no tile and no order of summation."""
    if eqn.primitive is not matmul_p:
        return bool(eqn.primitive.name == "dot_general")
    params = eqn.params
    is_free = params["tile"] is None and not params["settings"].is_batch_invariant
    return bool(is_free and params["epilogue"].is_identity and not params["contraction"].symmetric)


def contraction_of(product: Eqn) -> Contraction:
    if "contraction" in product.params:
        found: Contraction = product.params["contraction"]
        return found
    a, b = (x.aval.ndim for x in product.invars)
    return of_dot_general(a, b, product.params["dimension_numbers"])


def chains(eqns: Sequence[Eqn], idx: int, outvars: Sequence[Any]) -> Iterator[Chain | str]:
    """Of the product `eqns[idx]` of a jaxpr with these `outvars`, first with a later one of the same a, then alone: the
    longest chain first. What ends it, and what cannot be fused, is said between, as text."""
    makers = {x: i for i, eqn in enumerate(eqns) for x in eqn.outvars}
    readers_of = readers(eqns, outvars)
    for other in _partners(eqns, idx):
        found: list[Chain] = []
        for products in ((idx, other), (other, idx)):
            own = _of_products(eqns, products, makers, readers_of)
            found += [chain for chain in own if isinstance(chain, Chain)]
        yield from sorted(found, key=lambda chain: (-len(chain.members), chain.epilogue not in UNITS))
    yield from _of_products(eqns, (idx,), makers, readers_of)


def _partners(eqns: Sequence[Eqn], idx: int) -> list[int]:
    """Products behind `eqns[idx]` that differ from it in b alone."""
    one = eqns[idx]

    def is_alike(eqn: Eqn) -> bool:
        if eqn.primitive is not one.primitive or eqn.params != one.params:
            return False
        avals = [x.aval for x in (one.invars[1], eqn.invars[1])]
        return eqn.invars[0] is one.invars[0] and avals[0].shape == avals[1].shape and avals[0].dtype == avals[1].dtype

    return [i for i in range(idx + 1, len(eqns)) if is_alike(eqns[i])]


def _of_products(
    eqns: Sequence[Eqn], products: tuple[int, ...], makers: Mapping[Any, int], readers: Mapping[Any, set[int]]
) -> Iterator[Chain | str]:
    sums = [_sum(eqns, i, readers) for i in products]
    trees, refusal = _cone(eqns, products, sums)
    if refusal:
        yield refusal
    for out in sorted(trees, key=lambda x: -makers[x]):
        if isinstance(trees[out], Leaf) or str(out.aval.dtype) not in _RESULTS:
            continue
        own = _ancestors(out, makers, trees, eqns)
        if not {x.maker for x in sums} <= set(own):
            continue
        own = sorted({*own, *products})
        if any(not readers[eqns[i].outvars[0]] <= set(own) for i in own[:-1]):
            yield "what is in it is read elsewhere, too"
            continue
        try:
            is_passed_over = _is_passed_over(out, own[-1], eqns, readers)
            contraction, epilogue, operands = _read_by(trees[out], products, sums, out.aval, eqns, makers)
            yield Chain(tuple(own), products, out, contraction, epilogue, operands, is_passed_over)
        except UnfusableError as error:
            yield str(error)


def _sum(eqns: Sequence[Eqn], idx: int, readers: Mapping[Any, set[int]]) -> _Sum:
    """Of a product with an `out_sharding`, its own result."""
    product: Any = eqns[idx].outvars[0]
    (reader,) = readers[product] if len(readers[product]) == 1 else (-1,)
    if reader < 0 or eqns[reader].primitive.name != "transpose" or eqns[idx].params["out_sharding"] is not None:
        return _Sum(product, idx, tuple(range(product.aval.ndim)))
    return _Sum(eqns[reader].outvars[0], reader, eqns[reader].params["permutation"])


def _cone(eqns: Sequence[Eqn], products: tuple[int, ...], sums: Sequence[_Sum]) -> tuple[dict[Any, Tree], str]:
    """What pointwise equations make of products, and the first reason why one is none of them."""
    trees: dict[Any, Tree] = {x.var: Leaf(x.var) for x in sums}
    constants = _constants(eqns)
    refusal = ""

    def read(x: Any) -> Tree:
        return constant(x) if isinstance(x, Literal) else constants.get(x, trees.get(x, Leaf(x)))

    for eqn in eqns[min(products) + 1 :]:
        if not any(not isinstance(x, Literal) and x in trees for x in eqn.invars):
            continue
        if any(x.aval.shape != sums[0].var.aval.shape for x in eqn.outvars):
            continue
        if multiplies(eqn):
            refusal = refusal or "another product reads it"
            continue
        try:
            trees[eqn.outvars[0]] = tree_of(eqn, [read(x) for x in eqn.invars])
        except UnfusableError as error:
            refusal = refusal or str(error)
    return trees, refusal


def _constants(eqns: Sequence[Eqn]) -> dict[Any, float]:
    """What is a literal repeated, converted, or told to vary over mesh axes, as in a `shard_map` all are."""
    found: dict[Any, float] = {}
    for eqn in eqns:
        is_cast = eqn.primitive.name == "convert_element_type" and str(eqn.outvars[0].aval.dtype) in _RESULTS
        if (is_cast or eqn.primitive.name in SPREADING) and (isinstance(x := eqn.invars[0], Literal) or x in found):
            with contextlib.suppress(UnfusableError):
                value = constant(x) if isinstance(x, Literal) else found[x]
                found[eqn.outvars[0]] = float(np.asarray(value).astype(eqn.outvars[0].aval.dtype))
    return found


def readers(eqns: Sequence[Eqn], outvars: Sequence[Any]) -> Mapping[Any, set[int]]:
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


def _is_passed_over(out: Any, idx: int, eqns: Sequence[Eqn], readers: Mapping[Any, set[int]]) -> bool:
    """Whether one pass of XLA's reads `out`, made by `eqns[idx]`, and is what all its readers are. It is not where a
    reduction before the next product, as of a norm, has XLA read it twice."""
    if any(i < 0 or not is_pointwise(eqns[i]) for i in readers[out]):
        return False
    end = next((i for i in range(idx + 1, len(eqns)) if is_product(eqns[i])), len(eqns))
    todo: list[Any] = [out]
    seen: set[int] = set()
    while todo:
        found = {i for i in readers[todo.pop()] if 0 <= i < end} - seen
        if any(eqns[i].primitive.name.startswith("reduce_") for i in found):
            return False
        seen |= found
        todo += [x for i in found if is_pointwise(eqns[i]) for x in eqns[i].outvars]
    return True


def is_pointwise(eqn: Eqn) -> bool:
    """Whether XLA makes a pass over its operands of it, together with others."""
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"):
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return all(map(is_pointwise, getattr(inner, "jaxpr", inner).eqns))
    is_constant = eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == ()
    return is_constant or eqn.primitive.name in _POINTWISE or eqn.primitive.name in _CASTS


def _read_by(
    tree: Tree, products: Sequence[int], sums: Sequence[_Sum], out: Any, eqns: Sequence[Eqn], makers: Mapping[Any, int]
) -> tuple[Contraction, Epilogue, tuple[Operand, ...]]:
    plain = contraction_of(eqns[products[0]])
    if len({x.permutation for x in sums}) > 1:
        raise UnfusableError("products of which one is transposed are no gated one")
    modes = "".join(plain.out[i] for i in sums[0].permutation)
    contraction = dataclasses.replace(plain, out=modes, num_bs=len(products))
    return read_by([tree], [x.var for x in sums], out, contraction, eqns, makers)


def read_by(
    trees: Sequence[Tree],
    sums: Sequence[Any],
    out: Any,
    contraction: Contraction,
    eqns: Sequence[Eqn],
    makers: Mapping[Any, int],
    dtypes: Sequence[str] = (),
    reductions: Sequence[tuple[str, str]] = (),
) -> tuple[Contraction, Epilogue, tuple[Operand, ...]]:
    """The epilogue that computes `trees`, of the aval `out`, from the variables `sums`, of each b: the contraction with
    its operands' modes, it, and these. `makers`: where variables are made; `dtypes`: an operand's, by default `out`'s;
    `reductions`: of the last trees, as `epilogue_of` has them. UnfusableError if there is none."""
    inputs = {Leaf(x): role for x, role in zip(sums, (ACC, UP), strict=False)}
    extras, operands = {}, {}  # by role
    for leaf in dict.fromkeys(leaf for tree in trees for leaf in _leaves(tree, list(inputs))):
        if leaf in inputs:
            continue
        operand, dims = _source(leaf.of, out, eqns, makers, dtypes or (str(out.dtype),))
        modes = "".join(contraction.out[i] for i in dims)
        place = "mn" if len(dims) == out.ndim else "m" if modes and set(modes) <= set(contraction.free_a) else "n"
        place = place if operand.var.aval.ndim else FACTOR.place
        like = {"mn": RESIDUAL, "one": FACTOR}.get(place, BIAS)
        role = _role(like, [x.role for x in inputs.values()])
        inputs[leaf], extras[role], operands[role] = Input(role, place), modes, operand
    epilogue = epilogue_of(trees, inputs, reductions)
    roles = [x.role for x in epilogue.operands]
    whole = dataclasses.replace(contraction, extras=tuple(extras[role] for role in roles))
    return whole, epilogue, tuple(operands[role] for role in roles)


def _leaves(tree: Tree, sums: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Those beside the first sums come first, in whichever order the user wrote them."""
    if isinstance(tree, Leaf):
        return (tree,)
    args = [] if isinstance(tree, float) else [_leaves(arg, sums) for arg in tree.args]
    args.sort(key=lambda own: min((i for i, x in enumerate(sums) if x in own), default=len(sums)))
    return tuple(dict.fromkeys(leaf for own in args for leaf in own))


def _role(like: Input, taken: Sequence[str]) -> str:
    """A second bias is called as a gated product's is, a third likewise, and matrices too."""
    role = like.role
    while role in taken:
        role += "_up"
    return role


def _source(
    x: Any, out: Any, eqns: Sequence[Eqn], makers: Mapping[Any, int], dtypes: Sequence[str]
) -> tuple[Operand, tuple[int, ...]]:
    """The smallest array of one of `dtypes` that `x` is made of by repeating it, and the dimension of `out` that each
    of its own is, but those of size 1. UnfusableError if there is none."""
    dims: tuple[int | None, ...] = tuple(
        i if size == own else None for i, (size, own) in enumerate(zip(x.aval.shape, out.shape, strict=False))
    )
    if x.aval.ndim == 0:
        return Operand(x), ()
    if x.aval.ndim != out.ndim:
        raise UnfusableError(f"an operand of shape {x.aval.shape} is neither a vector nor of the result's shape")
    found: tuple[Operand, tuple[int, ...]] | None = None
    casts: tuple[Eqn, ...] = ()
    while True:
        if str(x.aval.dtype) in dtypes:
            ones = tuple(j for j, i in enumerate(dims) if i is None)
            found = Operand(x, ones, casts), tuple(i for i in dims if i is not None)
        eqn = eqns[makers[x]] if x in makers else None
        before = None if eqn is None else dims if eqn.primitive.name in _CASTS else _before(eqn, dims)
        if eqn is None or before is None or isinstance(eqn.invars[0], Literal):
            break
        casts = (*casts, eqn) if eqn.primitive.name in _CASTS else casts
        x, dims = eqn.invars[0], before
    if found is None:
        raise UnfusableError(f"an operand of {x.aval.dtype}{list(x.aval.shape)} is none of {dtypes[0]}, repeated")
    return found


def _before(eqn: Eqn, dims: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """The dimensions of an equation's operand, from its result's; None if it does more than repeat that."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape if eqn.invars else ()
    if name == "convert_element_type":  # what rounds is no repetition
        given, made = (str(x.aval.dtype) for x in (eqn.invars[0], eqn.outvars[0]))
        return dims if given in _RESULTS and made in (given, "float32") else None
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
