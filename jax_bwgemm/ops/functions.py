"""A user's function of the sums as an epilogue: checked to be pointwise, and bound to what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import ACC, Epilogue, inputs
from jax_bwgemm.ops.chains import is_pointwise, read_by
from jax_bwgemm.ops.tracing import JITS, Leaf, Tree, UnfusableError, constant, tree_of


@dataclasses.dataclass(frozen=True)
class Bound:
    """An epilogue and what it reads: `operands`, with the modes of the contraction's `extras`."""

    contraction: Contraction
    epilogue: Epilogue
    operands: tuple[jax.Array, ...]


def bound(
    function: Callable[..., Any], sums: jax.ShapeDtypeStruct, operands: Sequence[jax.Array], contraction: Contraction
) -> Bound | str:
    """`function(sums, *operands)`, all in float32, as an epilogue; or why no kernel can have it.

    What depends on no sums is computed before, but for pointwise equations of the result's shape. Arrays that the
    function closes over are operands, too. ValueError if it is not pointwise in the sums, or returns anything but one
    array of their shape.
    """
    wide = [x if x.dtype == jnp.bool_ else x.astype(jnp.float32) for x in operands]
    traced, result = jax.make_jaxpr(function, return_shape=True)(sums, *wide)
    closed = ClosedJaxpr(_inlined(traced.jaxpr), traced.consts)
    if not isinstance(result, jax.ShapeDtypeStruct) or result.shape != sums.shape:
        got = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", result)
        raise ValueError(f"`epilogue` requires a function that returns one array of shape {sums.shape}, got {got}")
    jaxpr = closed.jaxpr
    acc, (out,) = jaxpr.invars[0], jaxpr.outvars
    try:
        tree = constant(out) if isinstance(out, Literal) else _trees(closed, operands)[out]
        makers = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in eqn.outvars}
        whole, epilogue, read = read_by(tree, [acc], acc.aval, contraction, jaxpr.eqns, makers, ("float32", "bool"))
    except UnfusableError as error:
        return str(error)
    if ACC not in inputs(epilogue.out):
        return "it does not read the sums"
    given = dict(zip(jaxpr.invars[1:], operands, strict=True)) | dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values = _values(closed, [operand.var for operand in read], given, wide)
    bare = tuple(lax.squeeze(x, operand.ones) for x, operand in zip(values, read, strict=True))
    return Bound(whole, epilogue, bare)


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    """With what it jits in its place."""
    eqns: list[Any] = []

    def run(inner: Any, known: dict[Any, Any]) -> list[Any]:
        def read(x: Any) -> Any:
            return x if isinstance(x, Literal) else known.get(x, x)

        for eqn in inner.eqns:
            args, closed = [read(x) for x in eqn.invars], eqn.params.get("jaxpr")
            if eqn.primitive.name in JITS and not closed.consts:
                outs = run(closed.jaxpr, dict(zip(closed.jaxpr.invars, args, strict=True)))
            else:
                outs = [Var(x.aval) for x in eqn.outvars]
                eqns.append(eqn.replace(invars=args, outvars=outs))
            known |= zip(eqn.outvars, outs, strict=True)
        return [read(x) for x in inner.outvars]

    outvars = run(jaxpr, {})
    found: Jaxpr = jaxpr.replace(eqns=eqns, outvars=outvars)
    return found


def _trees(closed: ClosedJaxpr, operands: Sequence[jax.Array]) -> dict[Any, Tree]:
    """Of what is pointwise and of the sums' shape, and of scalars that are known. ValueError for what is not pointwise,
    but depends on the sums."""
    jaxpr = closed.jaxpr
    acc: Any = jaxpr.invars[0]
    given = zip((*jaxpr.invars[1:], *jaxpr.constvars), (*operands, *closed.consts), strict=True)
    trees: dict[Any, Tree] = {
        x: Leaf(x) if jnp.shape(value) or isinstance(value, Tracer) else float(value) for x, value in given
    }
    trees[acc] = Leaf(acc)
    after = {acc}  # the sums, and what is made of them
    shape = acc.aval.shape

    def read(x: Any) -> Tree:
        return constant(x) if isinstance(x, Literal) else trees.get(x, Leaf(x))

    for eqn in jaxpr.eqns:
        outs: list[Any] = list(eqn.outvars)
        depends = any(not isinstance(x, Literal) and x in after for x in eqn.invars)
        is_whole = all(x.aval.shape == shape for x in outs)
        if depends and not (is_whole and is_pointwise(eqn)):
            raise ValueError(
                f"`epilogue` requires a function that is pointwise in the sums, got `{_culprit(eqn)}`: apply that to "
                "the result of `matmul`"
            )
        after |= set(outs) if depends else set()
        try:
            args = [read(x) for x in eqn.invars]
            if is_whole or all(isinstance(arg, float) for arg in args):
                trees[outs[0]] = tree_of(eqn, args)
        except UnfusableError:
            if depends:
                raise
    return trees


def _culprit(eqn: Any) -> str:
    """The name of what is not pointwise."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    others = [own for own in inner.jaxpr.eqns if not is_pointwise(own)] if isinstance(inner, ClosedJaxpr) else []
    return _culprit(others[0]) if others else eqn.primitive.name


def _values(
    closed: ClosedJaxpr, wanted: Sequence[Any], given: dict[Any, jax.Array], wide: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Of variables: as they were given, or computed by XLA from those."""
    todo = [x for x in wanted if x not in given]
    if not todo:
        return tuple(given[x] for x in wanted)
    jaxpr, needed, eqns = closed.jaxpr, set(todo), []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            eqns.append(eqn)
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    names = jaxpr.debug_info.with_unknown_names()
    own = jaxpr.replace(eqns=eqns[::-1], outvars=todo, debug_info=names)
    made = jaxpr_as_fun(ClosedJaxpr(own, closed.consts))(jnp.zeros(()), *wide)  # nothing reads the sums
    known = given | dict(zip(todo, made, strict=True))
    return tuple(known[x] for x in wanted)
