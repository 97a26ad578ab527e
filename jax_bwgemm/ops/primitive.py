"""The primitives and their differentiation rules. Knows no device: that is `lowering`; `batching` has the vmap rules.

`matmul_p` is `alpha` times a contraction of two operands of any rank, linear in each. `fused_matmul_p` has an epilogue,
with operands and perhaps further results of its own, and is differentiated through `matmul_p`. See
docs/architecture.md, "The primitive's operands".
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
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Apply, Epilogue, Input, chain, split, steps
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.ops.precision import is_algorithm
from jax_bwgemm.ops.reference import aligned, finish, round_to
from jax_bwgemm.ops.shape_rules import _matmul_shape_rule, explicit_sharding, match_varying, of_rank

matmul_p = Primitive("bwgemm_matmul")
fused_matmul_p = Primitive("bwgemm_fused_matmul")


def product(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    """`alpha` times the contraction of a and b, in `out_dtype`.

    Params: `contraction`, `out_dtype`, `epilogue` (a scale at most), `precision` (canonical), `tile` (None: the
    planner's), `out_sharding` (over explicit mesh axes; None: as the operands') and `settings` (a `Config`).
    """
    out: jax.Array = matmul_p.bind(*match_varying(a, b), **_whole(params))
    return out


def fused_product(a: jax.Array, b: jax.Array, operands: Sequence[jax.Array], **params: Any) -> tuple[jax.Array, ...]:
    """The results of `epilogue`, all of the contraction's shape; `operands` as it names them, in `out_dtype`, with the
    modes that the contraction's `extras` say.

    Params: `product`'s, with any epilogue.
    """
    if is_linear(params["epilogue"]):
        return (product(a, b, **params),)
    return tuple(fused_matmul_p.bind(*match_varying(a, b, *operands), **_whole(params)))


def _whole(params: dict[str, Any]) -> dict[str, Any]:
    return params | {"out_sharding": of_rank(params["out_sharding"], len(params["contraction"].out))}


@functools.lru_cache(maxsize=1024)
def is_linear(epilogue: Epilogue) -> bool:
    """Whether it is a scale, or nothing."""
    return epilogue in (Epilogue(), chain(alpha=dict(epilogue.scalars).get("alpha", 1.0)))


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _compiled(*args: jax.Array, primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return primitive.bind(*args, **dict(params))


def _impl(primitive: Primitive, *args: jax.Array, **params: Any) -> Any:
    """Outside of `jax.jit`: compiles for the operands and runs, under `jax.disable_jit` too."""
    with jax.disable_jit(False):
        return _compiled(*args, primitive=primitive, params=tuple(sorted(params.items())))


def _matmul_transpose_a(ct: Any, a: Any, b: Any, *, contraction: Contraction, **params: Any) -> jax.Array:
    return _gradient(ct, b, a.aval, contraction=contraction.gradient_of_a, **params)


def _matmul_transpose_b(ct: Any, a: Any, b: Any, *, contraction: Contraction, **params: Any) -> jax.Array:
    return _gradient(a, ct, b.aval, contraction=contraction.gradient_of_b, **params)


def _gradient(x: Any, y: Any, aval: Any, *, out_dtype: Any, tile: Any, precision: Any, **params: Any) -> jax.Array:
    """x @ y as the cotangent of an operand `aval`, stored and sharded as that is: every factor stays where it is. The
    forward's `tile` says nothing about this product.

    A cotangent wider than the operands (`out_dtype=float32`) is rounded to their dtype: that is what the kernels
    multiply, and the gradient is rounded to it anyway. Not so to 8-bit floats: these are widened instead.
    """
    dtype = factor_dtype(aval.dtype, out_dtype)
    is_widened = dtype != aval.dtype
    if is_widened and is_algorithm(precision):
        precision = None  # it names the operands' dtype
    x, y = x.astype(dtype), y.astype(dtype)
    params |= {"tile": None, "precision": precision, "out_sharding": explicit_sharding(aval)}
    if not is_widened:
        return product(x, y, out_dtype=aval.dtype, **params)
    return round_to(product(x, y, out_dtype=jnp.dtype("float32"), **params), aval.dtype)


def factor_dtype(operand: Any, cotangent: Any) -> Any:
    """In which dtype the gradient of an operand is multiplied: its own, but the cotangent's, at least two bytes wide,
    for an 8-bit float."""
    if str(operand) not in FP8_DTYPES:
        return operand
    return jnp.dtype("bfloat16") if str(cotangent) in FP8_DTYPES else cotangent


def _fused_matmul_jvp(primals: Any, tangents: Any, *, epilogue: Epilogue, **params: Any) -> tuple[Any, Any]:
    """The tangent of what is affine in a, b and vectors goes through the derivative of what follows that; the tangents
    of the operands there come on top."""
    inner, outer = split(epilogue)
    contraction = params["contraction"]
    own = params | {"contraction": contraction.product}
    (out,) = _matmul_shape_rule(*map(jax.typeof, primals[:2]), epilogue=Epilogue(), **own)
    dots = {
        x: _spread(dot, modes, out, contraction)
        for x, modes, tangent in zip(epilogue.operands, contraction.extras, tangents[2:], strict=True)
        if (dot := _present(tangent)) is not None
    }
    terms = _product_terms(primals[:2], tangents[:2], epilogue=_scale(inner), **own)
    terms += [dots[x] for x in inner.operands if x in dots]
    others = {x: dots[x] for x in outer.operands if x in dots}
    added = _addends(outer)
    is_affine = not outer.seconds and len(added) == len(steps(outer.out) or (outer,))
    if outer.is_identity or is_affine or not (terms or set(others) - set(added)):
        outs: Sequence[jax.Array] = fused_product(primals[0], primals[1], primals[2:], epilogue=epilogue, **params)
        return list(outs), [_sum([*terms, *others.values()], outs[0])] * len(outs)
    derivative = _relu_with_derivative if _is_relu(outer) else _with_derivative
    tangent = functools.reduce(jnp.add, terms) if terms else None
    return derivative(_Fused(primals[:2], epilogue, primals[2:], params), tangent, others)


@dataclasses.dataclass(frozen=True)
class _Fused:
    """A fused product: its factors, its epilogue with what that reads, and its other params."""

    pair: tuple[Any, Any]
    epilogue: Epilogue
    values: Sequence[Any]
    params: dict[str, Any]

    def part(self, epilogue: Epilogue, dtype: Any) -> jax.Array:
        """With an epilogue that reads some of the same, in `dtype`."""
        known = dict(zip(self.epilogue.operands, zip(self.values, self._contraction.extras, strict=True), strict=True))
        own = [known[x] for x in epilogue.operands]
        contraction = dataclasses.replace(self._contraction, extras=tuple(modes for _, modes in own))
        params = self.params | {"contraction": contraction, "out_dtype": dtype}
        return fused_product(*self.pair, [value.astype(dtype) for value, _ in own], epilogue=epilogue, **params)[0]

    def operands(self, inputs: Sequence[Input]) -> list[jax.Array]:
        """In float32, aligned with the result."""
        known = dict(zip(self.epilogue.operands, aligned(self.values, self._contraction), strict=True))
        return [known[x].astype(jnp.float32) for x in inputs]

    @property
    def _contraction(self) -> Contraction:
        found: Contraction = self.params["contraction"]
        return found


def _product_terms(primals: Any, tangents: Any, **params: Any) -> list[jax.Array]:
    """Of the tangent of a product, one for each operand that has a tangent."""
    (a, b), (a_dot, b_dot) = primals, map(_present, tangents)
    terms = [] if a_dot is None else [product(a_dot, b, **params)]
    return terms + ([] if b_dot is None else [product(a, b_dot, **params)])


def _spread(x: jax.Array, modes: str, out: Any, contraction: Contraction) -> jax.Array:
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
    last = [step for step in reversed(steps(outer.out) or ()) if not outer.seconds]
    adding = itertools.takewhile(lambda step: step.op == "add", last)
    return tuple(x for step in adding for x in step.args[1:] if isinstance(x, Input))


def _is_relu(outer: Epilogue) -> bool:
    ops = [step.op for step in steps(outer.out) or ()]
    return ops[:1] == ["relu"] and len(ops) == 1 + len(_addends(outer)) and not outer.seconds


def _relu_with_derivative(fused: _Fused, tangent: Any, others: Any) -> tuple[Any, Any]:
    """The result tells where relu is flat; at 0 it is, as `jax.nn.relu` is.

    A residual hides which that is, and is added to the activation's float32: rounded once, as without differentiation.
    """
    (inner, outer), out_dtype = split(fused.epilogue), fused.params["out_dtype"]
    active = Epilogue(Apply("relu", (inner.out,)), inner.scalars)
    out = fused.part(active, jnp.dtype("float32") if outer.operands else out_dtype)
    terms = [] if tangent is None else [lax.select(out > 0, tangent, jnp.zeros_like(tangent))]
    for x in fused.operands(outer.operands):
        out = out + x
    out = round_to(out, out_dtype)
    return [out], [_sum([*terms, *others.values()], out)]


def _with_derivative(fused: _Fused, tangent: Any, others: Any) -> tuple[Any, Any]:
    """The derivative needs what goes in: the kernel returns that, in the result's dtype (at least two bytes wide; in
    float32 for several results), and XLA does the rest. What is kept for a gradient are the slopes, in that dtype."""
    (inner, outer), out_dtype = split(fused.epilogue), fused.params["out_dtype"]
    narrow = jnp.dtype("bfloat16") if str(out_dtype) in FP8_DTYPES else out_dtype
    wide = fused.part(inner, jnp.dtype("float32") if outer.seconds else narrow).astype(jnp.float32)
    rest = fused.operands(outer.operands)
    outs = finish(wide, outer, rest, out_dtype)
    added = _addends(outer)
    parts: list[tuple[Input | None, Any]] = [] if tangent is None else [(None, tangent)]
    parts += [(x, dot) for x, dot in others.items() if x not in added]
    tangents = [[dot for x, dot in others.items() if x in added] for _ in outs]
    for where, dot in parts:
        for terms, slope in zip(tangents, _slopes(wide, outer, rest, where), strict=True):
            terms.insert(0, (slope.astype(narrow) * dot.astype(narrow)).astype(out_dtype))
    return list(outs), [_sum(terms, out) for terms, out in zip(tangents, outs, strict=True)]


def _slopes(wide: jax.Array, outer: Epilogue, rest: Sequence[jax.Array], x: Input | None) -> tuple[jax.Array, ...]:
    """Of all results, in the sums or in an operand of what follows them."""
    idx = -1 if x is None else outer.operands.index(x)

    def results(value: jax.Array) -> tuple[jax.Array, ...]:
        own = list(rest)
        if idx >= 0:
            own[idx] = value
        return finish(wide if idx >= 0 else value, outer, own, jnp.dtype("float32"))

    value = wide if idx < 0 else jnp.broadcast_to(rest[idx], wide.shape)
    slopes: tuple[jax.Array, ...] = jax.jvp(results, (value,), (jnp.ones_like(value),))[1]
    return slopes


for _primitive in (matmul_p, fused_matmul_p):
    _primitive.def_impl(functools.partial(_impl, _primitive))
fused_matmul_p.multiple_results = True
fused_matmul_p.def_abstract_eval(_matmul_shape_rule)
matmul_p.def_abstract_eval(lambda *avals, **params: _matmul_shape_rule(*avals, **params)[0])
ad.defbilinear(matmul_p, _matmul_transpose_a, _matmul_transpose_b)
ad.primitive_jvps[fused_matmul_p] = _fused_matmul_jvp
