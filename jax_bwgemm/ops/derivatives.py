"""How fused products are differentiated: through `matmul_p`, which is linear, and by the slopes of what follows it.

What is affine in the sums (a scale, a bias) goes through products alone. Of all else the derivative needs what goes in:
the kernel that computes the result returns that beside it, or relu's result tells. Only this is saved for a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.derivative import ONE, derivative
from jax_bwgemm.facts.epilogue import (
    ACC,
    UP,
    Apply,
    Const,
    Epilogue,
    Input,
    Node,
    Reduction,
    chain,
    inputs,
    split,
    steps,
)
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.ops.primitive import fused_matmul_p, fused_product, product
from jax_bwgemm.ops.reference import aligned, evaluate, finish, round_to
from jax_bwgemm.ops.shape_rules import _matmul_shape_rule, explicit_sharding, operand_dtypes
from jax_bwgemm.ops.slopes import apply_slopes

BEFORE = "before"  # the result that is what goes into a function; of a gated product one for each b
KEPT = {ACC: BEFORE, UP: f"{BEFORE}_up"}


@dataclasses.dataclass(frozen=True)
class Fused:
    """A fused product: its factors, its epilogue with what that reads, and its other params."""

    factors: Sequence[Any]
    epilogue: Epilogue
    values: Sequence[Any]
    params: dict[str, Any]

    @property
    def contraction(self) -> Contraction:
        found: Contraction = self.params["contraction"]
        return found

    @property
    def out(self) -> Any:
        """A result's aval."""
        params = self.params | {"contraction": self.contraction.product}
        return _matmul_shape_rule(*map(jax.typeof, self.factors[:2]), epilogue=Epilogue(), **params)[0]

    def results(self, epilogue: Epilogue, dtype: Any) -> tuple[jax.Array, ...]:
        """With an epilogue that reads some of the same, in `dtype`."""
        known = dict(zip(self.epilogue.operands, zip(self.values, self.contraction.extras, strict=True), strict=True))
        own = [known[x] for x in epilogue.operands]
        num_bs = 2 if epilogue.is_gated else 1
        extras = tuple(modes for _, modes in own)
        reduced = self.contraction.reduced if epilogue.reductions else ()
        contraction = dataclasses.replace(self.contraction, extras=extras, num_bs=num_bs, reduced=reduced)
        params = self.params | {"contraction": contraction, "out_dtype": dtype}
        a, b, *ups = self.factors
        read = zip(own, operand_dtypes(epilogue, dtype), strict=True)
        others = [*ups[: num_bs - 1], *(value.astype(as_given) for (value, _), as_given in read)]
        return fused_product(a, b, others, epilogue=epilogue, **params)

    def spread(self, x: Input) -> jax.Array:
        """What the epilogue reads, repeated to the shape of the result."""
        i = self.epilogue.operands.index(x)
        return spread(self.values[i], self.contraction.extras[i], self.out, self.contraction)


def _fused_matmul_jvp(primals: Any, tangents: Any, *, epilogue: Epilogue, **params: Any) -> tuple[Any, Any]:
    """The tangent of what is affine in the sums and vectors goes through the derivative of what follows that; the
    tangents of the operands there come on top."""
    params.pop("in_place", None)  # the tangent may read what a result would be stored over
    count = len(params["contraction"].factors)
    fused = Fused(primals[:count], epilogue, primals[count:], params)
    dots = {
        x: spread(dot, modes, fused.out, fused.contraction)
        for x, modes, tangent in zip(epilogue.operands, fused.contraction.extras, tangents[count:], strict=True)
        if (dot := _present(tangent)) is not None
    }
    if epilogue.is_gated:
        return _gated(fused, tangents[:count], dots)
    if fused.contraction.symmetric:
        return _symmetric(fused, tangents[0], dots)
    inner, outer = split(epilogue)
    terms = product_terms(fused, tangents[:2], _scale(inner))
    terms += [dots[x] for x in inner.operands if x in dots]
    others = {x: dots[x] for x in outer.operands if x in dots}
    added = _addends(outer)
    is_affine = outer.moves[1:] == (1, 0) and len(added) == len(steps(outer.out) or (outer,))
    if outer.is_identity or is_affine or not (terms or set(others) - set(added)):
        outs = fused_product(primals[0], primals[1], primals[2:], epilogue=epilogue, **params)
        return list(outs), [_sum([*terms, *others.values()], outs[0])] * len(outs)
    tangent = functools.reduce(jnp.add, terms) if terms else None
    if _is_relu(outer):
        return _relu(fused, inner, outer, tangent, others)
    return _of_function(fused, inner, outer, tangent, others)


def product_terms(fused: Fused, tangents: Any, epilogue: Epilogue, b: int = 1) -> list[jax.Array]:
    """Of the tangent of a product with the `b`-th factor, one for each operand that has a tangent."""
    a, own = fused.factors[0], fused.factors[b]
    a_dot, b_dot = map(_present, tangents)
    params = fused.params | {"contraction": fused.contraction.product, "epilogue": epilogue}
    terms = [] if a_dot is None else [product(a_dot, own, **params)]
    return terms + ([] if b_dot is None else [product(a, b_dot, **params)])


def spread(x: jax.Array, modes: str, out: Any, contraction: Contraction) -> jax.Array:
    """An epilogue's operand, or its tangent, repeated to the shape of the result `out`."""
    (x,) = aligned((x,), dataclasses.replace(contraction, extras=(modes,)))
    if x.shape == out.shape:
        return x
    return lax.broadcast_in_dim(x, out.shape, range(x.ndim), out_sharding=explicit_sharding(out))


def _present(tangent: Any) -> Any | None:
    return None if type(tangent) is ad.Zero else tangent


def _sum(terms: Sequence[jax.Array], primal: Any) -> Any:
    """The tangent of `primal`; a symbolic zero of no terms."""
    return functools.reduce(jnp.add, terms) if terms else ad.Zero(jax.typeof(primal).to_tangent_aval())


def _scale(inner: Epilogue) -> Epilogue:
    """What an affine epilogue does to a tangent of the sums."""
    return chain(alpha=dict(inner.scalars).get("alpha", 1.0))


def _addends(outer: Epilogue) -> tuple[Input, ...]:
    """Matrices that are added at the end: their tangents are the result's."""
    last = [step for step in reversed(steps(outer.out) or ()) if outer.moves[1:] == (1, 0)]
    adding = itertools.takewhile(lambda step: step.op == "add", last)
    return tuple(x for step in adding for x in step.args[1:] if isinstance(x, Input))


def _is_relu(outer: Epilogue) -> bool:
    ops = [step.op for step in steps(outer.out) or ()]
    return ops[:1] == ["relu"] and len(ops) == 1 + len(_addends(outer)) and outer.moves[1:] == (1, 0)


def _relu(fused: Fused, inner: Epilogue, outer: Epilogue, tangent: Any, others: Any) -> tuple[Any, Any]:
    """The result tells where relu is flat; at 0 it is, as `jax.nn.relu` is.

    A residual hides which that is, and is added to the activation's float32: rounded once, as without differentiation.
    """
    out_dtype = fused.params["out_dtype"]
    active = Epilogue(Apply("relu", (inner.out,)), inner.scalars)
    (out,) = fused.results(active, jnp.dtype("float32") if outer.operands else out_dtype)
    terms = [] if tangent is None else [lax.select(out > 0, tangent, jnp.zeros_like(tangent))]
    for x in outer.operands:
        out = out + fused.spread(x).astype(jnp.float32)
    out = round_to(out, out_dtype)
    return [out], [_sum([*terms, *others.values()], out)]


def _of_function(fused: Fused, inner: Epilogue, outer: Epilogue, tangent: Any, others: Any) -> tuple[Any, Any]:
    """`others`: the tangents of what the function reads beside the affine part, whose own is `tangent`."""
    out_dtype = fused.params["out_dtype"]
    if str(out_dtype) in FP8_DTYPES:  # too narrow for what goes in
        (wide,) = fused.results(inner, jnp.dtype("bfloat16"))
        rest = [fused.spread(x).astype(jnp.float32) for x in outer.operands]
        axes = fused.contraction.reduced_axes
        outs: Sequence[jax.Array] = finish((wide.astype(jnp.float32),), outer, rest, out_dtype, axes)
    else:
        outs, (wide,) = _beside(fused, ((BEFORE, inner.out),), out_dtype)
    parts = ([] if tangent is None else [(ACC, tangent)]) + list(others.items())
    return list(outs), _tangents(fused, outer, {ACC: wide}, parts, outs)


def _beside(
    fused: Fused, more: tuple[tuple[str, Node], ...], dtype: Any
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Its results, and `more` matrices from the same kernel, which may be among them."""
    epilogue, nodes = fused.epilogue, [node for _, node in fused.epilogue.results]
    num, new = len(nodes), tuple(x for x in more if x[1] not in nodes)
    outs = fused.results(dataclasses.replace(epilogue, seconds=(*epilogue.seconds, *new)), dtype)
    nodes += [node for _, node in new]
    return [*outs[:num], *outs[len(nodes) :]], tuple(outs[nodes.index(node)] for _, node in more)


def _gated(fused: Fused, tangents: Any, dots: Any) -> tuple[Any, Any]:
    """Of both sums, which the kernel returns beside the result."""
    epilogue, out_dtype = fused.epilogue, fused.params["out_dtype"]
    parts: list[tuple[Input, jax.Array]] = []
    for i, x in enumerate((ACC, UP)):
        terms = product_terms(fused, (tangents[0], tangents[1 + i]), Epilogue(), 1 + i)
        parts += [(x, functools.reduce(jnp.add, terms))] if terms else []
    wide_dtype = jnp.dtype("bfloat16") if str(out_dtype) in FP8_DTYPES else out_dtype
    outs, (gate, up) = _beside(fused, tuple((role, x) for x, role in KEPT.items()), wide_dtype)
    num = len(epilogue.results)
    outs = [*(round_to(out, out_dtype) for out in outs[:num]), *outs[num:]]
    return outs, _tangents(fused, epilogue, {ACC: gate, UP: up}, [*parts, *dots.items()], outs)


def _symmetric(fused: Fused, a_dot: Any, dots: Any) -> tuple[Any, Any]:
    """Of both factors, which are one: a product and its transpose. A gradient is (g + g^T) a, one product, too."""
    a, b = fused.factors
    outs = fused_product(a, b, fused.values, epilogue=fused.epilogue, **fused.params)
    known = dict(fused.epilogue.scalars)
    terms = [known["beta"] * dot for dot in dots.values()]
    if (tangent := _present(a_dot)) is not None:
        params = fused.params | {"contraction": fused.contraction.product, "tile": None}
        half = product(tangent, b, epilogue=chain(known.get("alpha", 1.0)), **params)
        terms += [half, _as_sharded(lax.transpose(half, fused.contraction.flip), fused.out)]
    return list(outs), [_sum(terms, outs[0])]


def _as_sharded(x: jax.Array, aval: Any) -> jax.Array:
    sharding = explicit_sharding(aval)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def _tangents(
    fused: Fused, outer: Epilogue, sums: dict[Input, jax.Array], parts: Sequence[tuple[Input, Any]], outs: Any
) -> list[Any]:
    """Of every result of `outer`, whose `sums` are known, from the tangents of what it reads."""
    if not parts:
        return [_sum([], out) for out in outs]
    read = [*sums, *outer.operands]
    nodes = [*(node for _, node in outer.results), *(x.node for x in outer.reductions)]
    matrix = [[_with_scalars(derivative(node, x), outer) for x, _ in parts] for node in nodes]
    saved = [x for x in read if any(x in inputs(slope) for row in matrix for slope in row)]
    values = [sums[x] if x in sums else fused.spread(x) for x in saved]
    found: Sequence[jax.Array]
    if all(slope == ONE for row in matrix for slope in row):
        found = [functools.reduce(jnp.add, [dot for _, dot in parts])] * len(outs)
    else:
        dtypes = [out.dtype for out in outs]  # of what is reduced float32
        found = apply_slopes(tuple(map(tuple, matrix)), [dot for _, dot in parts], values, saved, dtypes)
    num = len(outer.results)
    reduced = zip(outer.reductions, found[num:], fused.contraction.reduced_axes, strict=True)
    return [*found[:num], *(_of_reduction(fused, sums, *own) for own in reduced)]


def _of_reduction(
    fused: Fused, sums: dict[Input, jax.Array], own: Reduction, dot: jax.Array, axes: tuple[int, ...]
) -> jax.Array:
    """The tangent of a reduction, from that of what it reduces; of the largest, as JAX has it."""
    dot = dot.astype(jnp.float32)
    if own.reducer == "sum":
        return jnp.sum(dot, axes)
    node = _with_scalars(own.node, fused.epilogue)
    known = {x.role: sums[x] if x in sums else fused.spread(x) for x in inputs(node)}
    value = evaluate(node, {role: x.astype(jnp.float32) for role, x in known.items()})
    tangent: jax.Array = jax.jvp(lambda x: jnp.max(x, axes), (jnp.broadcast_to(value, dot.shape),), (dot,))[1]
    return tangent


def _with_scalars(node: Node, epilogue: Epilogue) -> Node:
    """Its scalars as the numbers that they are."""
    known = {Input(role, "scalar"): Const(value) for role, value in epilogue.scalars}
    if isinstance(node, Apply):
        return Apply(node.op, tuple(_with_scalars(arg, epilogue) for arg in node.args))
    return known.get(node, node) if isinstance(node, Input) else node


ad.primitive_jvps[fused_matmul_p] = _fused_matmul_jvp
