"""`accelerate`: a function whose products have what follows them in the same kernel, found in its jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jax_bwgemm import checkpoint_policies
from jax_bwgemm.facts.legality import why_not_dtypes
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.ops.blocks import block_of
from jax_bwgemm.ops.chains import Chain, Operand, chains, is_product, readers
from jax_bwgemm.ops.dimensions import stand_in
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.primitive import fused_matmul_p, is_linear, matmul_p
from jax_bwgemm.ops.shape_rules import explicit_sharding, has_partial_sums, named, of_rank, viewed
from jax_bwgemm.ops.taking import reshape_aval
from jax_bwgemm.runtime.attempts import expected
from jax_bwgemm.runtime.config import Config, current
from jax_bwgemm.runtime.rungs import Asked

P = ParamSpec("P")
R = TypeVar("R")

_INNER = {  # primitives that run a jaxpr, or several, as they are
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "scan", "while", "cond", "custom_jvp_call",
    "custom_vjp_call", "shard_map",
}  # fmt: skip
_REPEATED = ("convert_element_type", "reshape", "pvary", "pcast")  # of one operand, by each layer of a model
_THEIRS = jax.checkpoint_policies
_POLICIES = {policy: policy for policy in (None, _THEIRS.everything_saveable, _THEIRS.nothing_saveable)} | {
    _THEIRS.dots_saveable: checkpoint_policies.dots_saveable,
    _THEIRS.dots_with_no_batch_dims_saveable: checkpoint_policies.dots_with_no_batch_dims_saveable,
}  # with the one that knows our products, too
_POLICIES |= {policy: policy for policy in _POLICIES.values()}


def accelerate(fun: Callable[P, R]) -> Accelerated[P, R]:
    """`fun`, in which a kernel of this package computes a product and what follows it, where that is predicted to win.

    What may follow: a scale, a bias, an activation that `matmul` knows (from `jax.nn`, or written out the same way), a
    residual, in any order that a kernel has; and of two products of one array, what makes one of both, as a gated layer
    does. Where a product alone reads what such a kernel makes, as in a feed-forward block, both are one function, and
    its gradient is fused across them, as `mlp`'s and `gated_mlp`'s are: the second product is ours then, too. A sum
    that a loop carries, as of the gradients of a weight over batches, is a residual that the kernel stores its result
    over. In `fun` itself and in what it scans, branches, rematerialises, jits or maps over devices; JAX's products, and
    those of `matmul` and its derivatives that have no epilogue. All else is computed as before: products alone
    (`install` is for these), and where no kernel is at hand, or none is predicted to be faster than a product and XLA's
    pass over it. So where no GPU of ours is planned for, `fun` is left as it is.

    What is fused is computed in float32 and rounded once, where `fun` may round after every step: bfloat16 results
    differ in their last bits. A value that is read elsewhere too, such as what a gradient keeps, ends the chain, and
    is not computed again: to train, differentiate the accelerated loss, whose kernels keep what their derivatives need.
    Composes with `jax.jit`, `grad` on either side, `vmap` and shardings; like those it traces at every call, so have it
    inside of `jax.jit`. What a `jax.checkpoint` with a policy of one's own runs is left.

    Args:
      fun: a function without side effects, as for `jax.jit`, of pytrees of arrays; what is no array is passed as it is.

    Returns:
      A function of the same arguments and results, with a method `report` of these arguments, arrays or
      `jax.ShapeDtypeStruct`: an `AccelerationReport`, whose `str` says what was fused, and what not and why.

    Example:
      >>> step = jax.jit(jax.grad(jax_bwgemm.accelerate(loss)))
      >>> print(jax_bwgemm.accelerate(loss).report(params, batch))
    """
    if not callable(fun):
        raise TypeError(f"`accelerate` requires a function, got {type(fun).__name__}")
    return Accelerated(fun)


@dataclasses.dataclass(frozen=True)
class AcceleratedProduct:
    """A product of a function. `epilogue`: what follows it in its kernel; None if it is left as it was, and `reason`
    says why no more of what follows is fused. `where`: the user's line. `is_in_block`: whether it is one of a
    feed-forward block's, whose gradient is fused across its products."""

    problem: str
    epilogue: str | None
    reason: str | None
    where: str = ""
    is_in_block: bool = False

    def __str__(self) -> str:
        found = [f"fused with {self.epilogue}"] if self.epilogue else []
        found += ["in a block"] if self.is_in_block else []
        what = ", ".join(found) or "left alone"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.where + ': ' if self.where else ''}{self.problem}: {what}{reason}"


@dataclasses.dataclass(frozen=True)
class AccelerationReport:
    """The products of a function, in the order in which they stand; one of a function that is called twice is one."""

    products: tuple[AcceleratedProduct, ...]

    @property
    def num_fused(self) -> int:
        return sum(product.epilogue is not None for product in self.products)

    def __str__(self) -> str:
        title = f"products: {len(self.products)}, {self.num_fused} of them with an epilogue"
        return "\n".join([title, *(f"  {product}" for product in self.products)])


class Accelerated(Generic[P, R]):
    """What `accelerate` returns."""

    def __init__(self, fun: Callable[P, R]) -> None:
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        closed, arrays, out_tree, _ = self._rewritten(args, kwargs)
        results = map(_as_array, jaxpr_as_fun(closed)(*arrays), closed.out_avals)
        found: R = jax.tree.unflatten(out_tree, results)
        return found

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a function in a class is one of its methods."""
        return self if instance is None else Accelerated(types.MethodType(self._fun, instance))

    def report(self, *args: Any, **kwargs: Any) -> AccelerationReport:
        """What becomes of the products of a call with these arguments, or their shapes. Computes nothing."""
        return AccelerationReport(tuple(self._rewritten(args, kwargs)[3]))

    def _rewritten(self, args: Any, kwargs: Any) -> tuple[ClosedJaxpr, list[Any], Any, list[AcceleratedProduct]]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        idxs = [i for i, x in enumerate(leaves) if _is_array(x)]
        arrays = [leaves[i] for i in idxs]

        def flat(*arrays: Any) -> Any:
            own = list(leaves)
            for i, x in zip(idxs, arrays, strict=True):
                own[i] = x
            args, kwargs = jax.tree.unflatten(tree, own)
            return self._fun(*args, **kwargs)

        closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        rewriter = _Rewriter(dataclasses.replace(current(), on_fallback="ignore"))
        return rewriter.closed(closed), arrays, jax.tree.structure(out), rewriter.products


class _Rewriter:
    """Of one function; what its jaxpr shares, it shares still."""

    def __init__(self, settings: Config) -> None:
        self.products: list[AcceleratedProduct] = []
        self._settings = settings
        self._barred: str | None = None
        self._noted: dict[Any, int] = {}  # by its result, which of the products
        self._known: dict[Any, tuple[Any, Any]] = {}  # with what has the id, which must live as long

    def closed(self, closed: ClosedJaxpr, carry: slice = slice(0)) -> ClosedJaxpr:
        """`carry`: of a loop's body, the arguments that its first results are the next ones of."""
        key = id(closed), carry.start, carry.stop, self._barred
        if key not in self._known:
            carried = dict(zip(closed.jaxpr.invars[carry], closed.jaxpr.outvars, strict=False))
            jaxpr = self.jaxpr(closed.jaxpr, carried)
            own = closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)
            self._known[key] = closed, own
        found: ClosedJaxpr = self._known[key][1]
        return found

    def jaxpr(self, jaxpr: Jaxpr, carried: Mapping[Any, Any] | None = None) -> Jaxpr:
        """`carried`: arguments, and results that take their places."""
        eqns = [self._inner(eqn) for eqn in jaxpr.eqns]
        is_changed = any(x is not y for x, y in zip(eqns, jaxpr.eqns, strict=True))
        eqns = _merged(eqns, jaxpr.outvars)
        for product in [eqn.outvars[0] for eqn in eqns if is_product(eqn)]:
            idx = next((i for i, eqn in enumerate(eqns) if product in eqn.outvars), None)
            made = None if idx is None else self._fused(eqns, idx, jaxpr.outvars, carried or {})  # None: a gated one's
            is_changed |= made is not None
            eqns = made or eqns
        return jaxpr.replace(eqns=self._in_blocks(eqns, jaxpr.outvars)) if is_changed else jaxpr

    def _in_blocks(self, eqns: list[JaxprEqn], outvars: list[Any]) -> list[JaxprEqn]:
        """With one for both products of a feed-forward block of which the first was fused, in the place of the last."""
        found, read_by = dict(enumerate(eqns)), readers(eqns, outvars)
        for i, first in enumerate(eqns):
            own = [x for x in first.outvars if x in self._noted]
            if len(own) != 1 or len(read_by[own[0]]) != 1 or -1 in read_by[own[0]]:
                continue
            (idx,) = read_by[own[0]]
            if block := block_of(first, eqns[idx]):
                own += [x for x in block.outvars if x in self._noted]
                for product in map(self._noted.__getitem__, own):
                    self.products[product] = dataclasses.replace(self.products[product], is_in_block=True)
                found[idx] = block
                del found[i]
        return list(found.values())

    def _inner(self, eqn: JaxprEqn) -> JaxprEqn:
        """With what it runs rewritten."""
        name, params = eqn.primitive.name, dict(eqn.params)
        if name not in _INNER:
            return eqn
        policy, before = params.get("policy"), self._barred
        if policy in _POLICIES:
            params |= {"policy": _POLICIES[policy]} if "policy" in params else {}
        else:
            self._barred = f"a policy of `jax.checkpoint` that may know JAX's products alone, {_name(policy)}"
        own = {key: self._value(value, _carry(eqn, key)) for key, value in params.items()}
        self._barred = before
        return eqn.replace(params=own) if any(own[key] is not eqn.params[key] for key in own) else eqn

    def _value(self, value: Any, carry: slice = slice(0)) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.closed(value, carry)
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, tuple) and any(isinstance(x, ClosedJaxpr | Jaxpr) for x in value):
            own = tuple(map(self._value, value))
            return own if any(x is not y for x, y in zip(own, value, strict=True)) else value
        return value

    def _fused(
        self, eqns: list[JaxprEqn], idx: int, outvars: list[Any], carried: Mapping[Any, Any]
    ) -> list[JaxprEqn] | None:
        """The equations with the longest chain of a product in one that gains; None if none does."""
        reason, where = None, _line(eqns[idx])
        for found in chains(eqns, idx, outvars):
            asked = self._barred or (found if isinstance(found, str) else self._why_not(eqns, found))
            if isinstance(found, Chain) and not isinstance(asked, str):
                made = self._equations(eqns, found, _in_place(eqns, found, carried))
                self._note(found.out, AcceleratedProduct(str(asked), found.epilogue.kind, reason, where))
                return made
            reason = reason or textwrap.shorten(str(asked), 160)
        avals: list[Any] = [x.aval for x in eqns[idx].invars]
        a, b = (f"{aval.dtype}{list(aval.shape)}" for aval in avals)
        reason = reason or "nothing follows it that an epilogue has"
        self._note(eqns[idx].outvars[0], AcceleratedProduct(f"{a} by {b}", None, reason, where))
        return None

    def _note(self, out: Any, product: AcceleratedProduct) -> None:
        self._noted[out] = len(self.products)
        self.products.append(product)

    def _why_not(self, eqns: list[JaxprEqn], chain: Chain) -> str | Problem:
        """Why no kernel gains from computing all of `chain`, or the problem that it poses."""
        if chain.is_passed_over:
            return "XLA passes over what follows it anyway"
        if chain.out.aval.weak_type:
            return "its result is weakly typed, which a kernel's is not"
        members: list[Any] = [eqns[i] for i in chain.members]
        if any(has_partial_sums(x.aval.sharding) for eqn in members for x in (*eqn.invars, *eqn.outvars)):
            return "sums over a mesh are put off there (`reduced` or `unreduced`)"
        params = self._params(eqns, chain)
        dot = eqns[chain.products[0]]
        avals = [x.aval for x in (*_factors(eqns, chain), *(_bare(operand, dot, []) for operand in chain.operands))]
        view, problem = viewed(avals, **params)
        if reason := why_not_dtypes(problem) or why_not_precision(params["precision"], problem.a_dtype):
            return reason
        known, symbols = stand_in(problem)
        settings: Config = params["settings"]
        if problem.is_empty or (symbols and settings.is_emulated):
            return "its sizes are 0, or not known before it runs, as the emulator requires"
        if view.moves or not view.fuses:
            return "no kernel reads the operands as they lie"
        compiles = settings.compile_missing == "auto"
        attempt = expected(
            Asked(known, settings.planned_device, None, settings.is_emulated, compiles, view.has_other, symbols=symbols)
        )
        gains = attempt.is_fused or attempt.parts > 1  # the pass that adds up parts has the epilogue
        if gains and (attempt.entry is not None or attempt.is_missing):
            return problem
        return attempt.reason or "it is XLA's"

    def _params(self, eqns: list[JaxprEqn], chain: Chain) -> dict[str, Any]:
        """Of our primitive."""
        dot: Any = eqns[chain.products[0]]
        sharding = named(dot.params["out_sharding"])
        if sharding is not None:  # of the product alone: what is added to it may be sharded further
            sharding = explicit_sharding(chain.out.aval) or of_rank(sharding, chain.out.aval.ndim)
        return {
            "contraction": chain.contraction,
            "out_dtype": chain.out.aval.dtype,
            "epilogue": chain.epilogue,
            "precision": dot.params["precision"],
            "tile": None,
            "out_sharding": sharding,
            "settings": dot.params.get("settings", self._settings),
        }

    def _equations(self, eqns: list[JaxprEqn], chain: Chain, in_place: dict[str, int]) -> list[JaxprEqn]:
        """With one in the place of the chain's last."""
        last = chain.members[-1]
        made: list[JaxprEqn] = []
        dot = eqns[chain.products[0]]
        operands = [_bare(operand, dot, made) for operand in chain.operands]
        own = dot.replace(
            primitive=matmul_p if is_linear(chain.epilogue) else fused_matmul_p,
            invars=[*_factors(eqns, chain), *operands],
            outvars=[chain.out],
            params=self._params(eqns, chain) | in_place,
        )

        def placed() -> Iterator[JaxprEqn]:
            for i, eqn in enumerate(eqns):
                if i == last:
                    yield from (*made, own)
                elif i not in chain.members:
                    yield eqn

        return list(placed())


def _is_array(x: Any) -> bool:
    """An array, or its shape; not `np.float32`, a class that has both, too."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def _as_array(x: Any, aval: Any) -> Any:
    """A constant of a jaxpr, which is a NumPy array or a Python scalar there; the latter stays one, as weakly typed."""
    return x if isinstance(x, jax.Array) or aval.weak_type else jnp.asarray(x, aval.dtype)


def _merged(eqns: list[JaxprEqn], outvars: list[Any]) -> list[JaxprEqn]:
    """Without what another equation does already to what several read: each layer of a model casts its input."""
    same, kept = dict[Any, Any](), list[JaxprEqn]()
    known: dict[Any, Any] = {}
    for eqn in eqns:
        invars = [x if isinstance(x, Literal) else same.get(x, x) for x in eqn.invars]
        own = eqn.replace(invars=invars) if any(x is not y for x, y in zip(invars, eqn.invars, strict=True)) else eqn
        if own.primitive.name in _REPEATED and not isinstance(invars[0], Literal) and own.outvars[0] not in outvars:
            key = own.primitive, *invars, *sorted(own.params.items()), own.ctx
            first = known.setdefault(key, own.outvars[0])
            if first is not own.outvars[0]:
                same[own.outvars[0]] = first
                continue
        kept.append(own)
    return kept


def _carry(eqn: JaxprEqn, key: str) -> slice:
    """Of a param that is the body of a loop, those of its arguments that the loop carries; of any other, none."""
    params: Any = eqn.params
    if (eqn.primitive.name, key) == ("while", "body_jaxpr"):
        return slice(params["body_nconsts"], None)
    if (eqn.primitive.name, key) != ("scan", "jaxpr"):
        return slice(0)
    # Between what stays and what is taken apart, whose numbers versions of JAX say in different ways.
    body, given = params["jaxpr"], [*map(_ndim, eqn.invars)]
    num_apart = sum(ndim != own.ndim for ndim, own in zip(given, body.in_avals, strict=True))
    num = sum(_ndim(x) == own.ndim for x, own in zip(eqn.outvars, body.out_avals, strict=True))
    return slice(len(given) - num_apart - num, len(given) - num_apart)


def _ndim(x: Any) -> int:
    return int(x.aval.ndim)


def _in_place(eqns: list[JaxprEqn], chain: Chain, carried: Mapping[Any, Any]) -> dict[str, int]:
    """The param that says which operand of a chain its result may be stored over: what a loop carries, if the result is
    what it carries on, and nobody else reads it. XLA would copy it, once a turn, were it stored elsewhere."""
    for i, operand in enumerate(chain.operands):
        is_bare = not (operand.ones or operand.casts) and operand.var.aval.dtype == chain.out.aval.dtype
        if is_bare and carried.get(operand.var) is chain.out:
            readers = {j for j, eqn in enumerate(eqns) if any(x is operand.var for x in eqn.invars)}
            if readers <= set(chain.members):
                return {"in_place": i}
    return {}


def _factors(eqns: list[JaxprEqn], chain: Chain) -> list[Any]:
    """a, and the b of each product."""
    return [eqns[chain.products[0]].invars[0], *(eqns[i].invars[1] for i in chain.products)]


def _line(eqn: JaxprEqn) -> str:
    """The user's, as `explain` shows it."""
    found = re.match(r"(.*?):(\d+)", source_info_util.summarize(eqn.source_info))
    return f"{os.path.basename(found[1])}:{found[2]}" if found else ""


def _name(policy: Any) -> str:
    return str(getattr(policy, "__qualname__", policy))


def _bare(operand: Operand, product: Any, made: list[JaxprEqn]) -> Var:
    """The variable as the primitive takes it beside `product`, varying as the chain's does; the equations are appended
    to `made`."""
    x: Any = operand.var

    def through(f: Callable[[jax.Array], jax.Array]) -> None:
        nonlocal x
        with product.ctx.manager:
            (eqn,) = jax.make_jaxpr(f)(x.aval).jaxpr.eqns
        made.append(eqn.replace(invars=[x]))
        x = eqn.outvars[0]

    if operand.ones:
        through(lambda x: lax.squeeze(x, operand.ones))
    for eqn in reversed(operand.casts):
        to: Any = eqn.outvars[0].aval
        cast = Var(reshape_aval(to, x.aval.shape).update(dtype=x.aval.dtype))
        made.append(eqn.replace(invars=[x], outvars=[cast]))
        x = cast
    if x.aval.ndim == 0 and x.aval.dtype != jnp.float32:  # a scalar is a parameter of kernels
        through(lambda x: lax.convert_element_type(x, jnp.float32))
    found: Var = x
    return found
