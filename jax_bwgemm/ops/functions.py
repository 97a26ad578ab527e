"""A user's function of the sums as an epilogue: checked to be pointwise, but for the reductions that it returns, and
bound to what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
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

_REDUCERS = {"reduce_sum": "sum", "reduce_max": "max"}


@dataclasses.dataclass(frozen=True)
class Bound:
    """An epilogue and what it reads: `operands`, with the modes of the contraction's `extras`."""

    contraction: Contraction
    epilogue: Epilogue
    operands: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the sums and `operands`, which it has in float32, as a jaxpr. Of its results, a pytree `tree`, the
    `matrices` are pointwise in the sums; all others are made of `reductions`, equations that add up what is pointwise
    in them, or take the largest."""

    closed: ClosedJaxpr
    operands: tuple[jax.Array, ...]
    tree: Any
    matrices: tuple[int, ...]
    reductions: tuple[Any, ...]

    @property
    def is_single(self) -> bool:
        """Whether it returns one array, of the sums' shape."""
        return bool(self.tree == jax.tree.structure(0))

    def bound(self, contraction: Contraction) -> Bound | str:
        """As an epilogue of `contraction`; or why no kernel can have it.

        What depends on no sums is computed before, but for pointwise equations of the result's shape. Arrays that the
        function closes over are operands, too.
        """
        jaxpr = self.closed.jaxpr
        acc, outs = jaxpr.invars[0], [jaxpr.outvars[i] for i in self.matrices]
        makers = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in eqn.outvars}
        reduced = tuple(_left(contraction, eqn) for eqn in self.reductions)
        places = [_place(contraction, modes) for modes in reduced]
        reducers = [_REDUCERS[eqn.primitive.name] for eqn in self.reductions]
        contraction = dataclasses.replace(contraction, reduced=reduced)
        try:
            known = _trees(self.closed, self.operands)
            whole = [*outs, *(eqn.invars[0] for eqn in self.reductions)]
            trees = [constant(x) if isinstance(x, Literal) else known[x] for x in whole]
            contraction, epilogue, read = read_by(
                trees, [acc], acc.aval, contraction, jaxpr.eqns, makers, ("float32", "bool"),
                tuple(zip(reducers, places, strict=True)),
            )  # fmt: skip
        except UnfusableError as error:
            return str(error)
        if any(ACC not in inputs(node) for _, node in epilogue.results):
            return "it does not read the sums"
        values = self._given([operand.var for operand in read])
        bare = tuple(lax.squeeze(x, operand.ones) for x, operand in zip(values, read, strict=True))
        return Bound(contraction, epilogue, bare)

    def finished(self, results: Sequence[jax.Array]) -> Any:
        """What it returns, from the results of its epilogue: what is made of reductions is XLA's."""
        outvars, num = self.closed.jaxpr.outvars, len(self.matrices)
        leaves = dict(zip(self.matrices, results, strict=False))
        others = [i for i in range(len(outvars)) if i not in leaves]
        reduced = {
            eqn.outvars[0]: x.astype(eqn.outvars[0].aval.dtype)
            for eqn, x in zip(self.reductions, results[num:], strict=True)
        }
        leaves |= zip(others, self._evaluated([outvars[i] for i in others], reduced), strict=True)
        return jax.tree.unflatten(self.tree, [leaves[i] for i in range(len(outvars))])

    def _given(self, wanted: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The values of variables that read no sums: as they were given, or computed by XLA from those."""
        jaxpr = self.closed.jaxpr
        known = dict(zip(jaxpr.invars[1:], self.operands, strict=True))
        known |= zip(jaxpr.constvars, self.closed.consts, strict=True)
        todo = [x for x in wanted if x not in known]
        known |= zip(todo, self._evaluated(todo, {}), strict=True)
        return tuple(known[x] for x in wanted)

    def _evaluated(self, wanted: Sequence[Any], known: Mapping[Any, jax.Array]) -> list[jax.Array]:
        """The values of variables that read no sums, but through what is `known`."""
        if not wanted:
            return []
        jaxpr = self.closed.jaxpr
        eqns, _ = _needed(jaxpr, wanted, known)
        own = jaxpr.replace(eqns=eqns, invars=[*known, *jaxpr.invars[1:]], outvars=list(wanted))
        found: list[jax.Array] = jaxpr_as_fun(ClosedJaxpr(own, self.closed.consts))(
            *known.values(), *map(_wide, self.operands)
        )
        return found


def traced(function: Callable[..., Any], sums: jax.ShapeDtypeStruct, operands: Sequence[jax.Array]) -> Function:
    """`function(sums, *operands)`. ValueError if it returns no array of the sums' shape, or anything that is neither
    pointwise in the sums nor made of such reductions."""
    made, results = jax.make_jaxpr(function, return_shape=True)(sums, *map(_wide, operands))
    jaxpr = _inlined(made.jaxpr)
    if eqn := next((eqn for eqn in jaxpr.eqns if eqn.effects), None):
        raise ValueError(
            f"`epilogue` requires a function without effects, got `{eqn.primitive.name}`: apply that to the result of "
            "`matmul`"
        )
    after, reduced = _dependents(jaxpr)
    matrices = []
    for i, (x, (path, result)) in enumerate(zip(jaxpr.outvars, jax.tree.leaves_with_path(results), strict=True)):
        if not isinstance(x, Literal) and x in reduced:
            continue
        if jnp.issubdtype(result.dtype, jnp.complexfloating):
            raise ValueError(f"`epilogue` requires real results, got {_shown(result)}: return its real part")
        if result.shape != sums.shape:
            name = f"result{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"`epilogue` requires results that are made of the sums, got {_shown(result)} as {name}, which is not: "
                "compute it outside"
            )
        matrices.append(i)
    if not matrices:
        got = jax.tree.map(_shown, results)
        raise ValueError(f"`epilogue` requires a function that returns an array of shape {sums.shape}, got {got}")
    _, needed = _needed(jaxpr, [x for i, x in enumerate(jaxpr.outvars) if i not in matrices], after)
    reductions = [eqn for eqn in jaxpr.eqns if eqn.outvars[0] in needed and _is_reduction(eqn, after)]
    tree = jax.tree.structure(results)
    return Function(ClosedJaxpr(jaxpr, made.consts), tuple(operands), tree, tuple(matrices), tuple(reductions))


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
    """Of what is pointwise and of the sums' shape, and of scalars that are known."""
    jaxpr = closed.jaxpr
    acc: Any = jaxpr.invars[0]
    given = zip((*jaxpr.invars[1:], *jaxpr.constvars), (*operands, *closed.consts), strict=True)
    num = len(operands)  # a scale that was computed is read from the device, and has no kernel for each value
    trees: dict[Any, Tree] = {
        x: float(value) if _is_known(value) and not (i < num and isinstance(value, jax.Array)) else Leaf(x)
        for i, (x, value) in enumerate(given)
    }
    trees[acc] = Leaf(acc)
    after, _ = _dependents(jaxpr)

    def read(x: Any) -> Tree:
        return constant(x) if isinstance(x, Literal) else trees.get(x, Leaf(x))

    for eqn in jaxpr.eqns:
        out: Any = eqn.outvars[0]
        try:
            args = [read(x) for x in eqn.invars]
            if out.aval.shape == acc.aval.shape or all(isinstance(arg, float) for arg in args):
                trees[out] = tree_of(eqn, args)
        except UnfusableError:
            if out in after:
                raise
    return trees


def _is_known(value: Any) -> bool:
    """Whether it is a real number, not a random key, that can be read now."""
    dtype = jnp.result_type(value)
    is_real = dtype == jnp.bool_ or (jnp.issubdtype(dtype, jnp.number) and not jnp.iscomplexobj(value))
    return is_real and not jnp.shape(value) and not isinstance(value, Tracer)


def _dependents(jaxpr: Jaxpr) -> tuple[set[Any], dict[Any, str]]:
    """The sums and what is pointwise in them; and what is made of reductions of that, with the name of one. ValueError
    for what is neither."""
    acc: Any = jaxpr.invars[0]
    after, reduced = {acc}, dict[Any, str]()
    for eqn in jaxpr.eqns:
        read = [x for x in eqn.invars if not isinstance(x, Literal)]
        names = [reduced[x] for x in read if x in reduced]
        if any(x in after for x in read):
            if _is_reduction(eqn, after) and not names:
                reduced[eqn.outvars[0]] = eqn.primitive.name
                continue
            outs: list[Any] = list(eqn.outvars)
            is_whole = all(x.aval.shape == acc.aval.shape for x in outs)
            if names or not (is_whole and is_pointwise(eqn)):
                raise ValueError(
                    "`epilogue` requires a function that is pointwise in the sums, got "
                    f"`{names[0] if names else _culprit(eqn)}`: apply that to the result of `matmul`"
                )
            after |= set(outs)
        elif names:
            reduced |= dict.fromkeys(eqn.outvars, names[0])
    return after, reduced


def _is_reduction(eqn: Any, after: set[Any]) -> bool:
    return eqn.primitive.name in _REDUCERS and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in after


def _needed(jaxpr: Jaxpr, wanted: Sequence[Any], known: Container[Any]) -> tuple[list[Any], set[Any]]:
    """The equations that make what is `wanted` of what is `known`, and all that they make or read."""
    eqns, found = [], {x for x in wanted if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(x in found and x not in known for x in eqn.outvars):
            eqns.append(eqn)
            found |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return eqns[::-1], found


def _left(contraction: Contraction, eqn: Any) -> str:
    """The modes of the result that a reduction leaves."""
    return "".join(mode for i, mode in enumerate(contraction.out) if i not in eqn.params["axes"])


def _place(contraction: Contraction, modes: str) -> str:
    """Along which dimension a kernel leaves them: m if n can be reduced, be it that XLA reduces m then; else n."""
    return "m" if contraction.free_b and not set(contraction.free_b) & set(modes) else "n"


def _wide(x: jax.Array) -> jax.Array:
    """As a function has an operand."""
    return x if x.dtype == jnp.bool_ else x.astype(jnp.float32)


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _culprit(eqn: Any) -> str:
    """The name of what is not pointwise."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    others = [own for own in inner.jaxpr.eqns if not is_pointwise(own)] if isinstance(inner, ClosedJaxpr) else []
    return _culprit(others[0]) if others else eqn.primitive.name
