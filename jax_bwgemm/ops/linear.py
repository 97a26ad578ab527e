"""A linear function with a transpose of its own, for a backward pass that is fused as JAX would not derive it.

A `jax.custom_jvp` whose tangent is such a function has both modes: `jax.custom_vjp` has no forward mode, and
`jax.custom_derivatives.linear_call` no derivative and no vmap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array

linear_p = Primitive("bwgemm_linear")


class Linear(Protocol):
    """What it computes from what is `saved`; frozen and hashable, as a param is."""

    def tangent(self, saved: Sequence[Array], dots: Sequence[Array | None]) -> Array:
        """Of the result, from the operands' tangents, `dots`: None of those that have none."""

    def cotangents(self, saved: Sequence[Array], ct: Array) -> Sequence[Array]:
        """Of all operands, from the result's."""


def apply_linear(function: Linear, saved: Sequence[Array], dots: Sequence[Array | None]) -> Array:
    """`function.tangent(saved, dots)`, transposed as `function.cotangents`. Second derivatives are JAX's of both."""
    is_given = tuple(dot is not None for dot in dots)
    given = (dot for dot in dots if dot is not None)
    out: Array = linear_p.bind(*saved, *given, function=function, is_given=is_given)
    return out


def _parts(args: Sequence[Any], is_given: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
    """What is saved, and the tangents."""
    num_saved = len(args) - sum(is_given)
    given = iter(args[num_saved:])
    return list(args[:num_saved]), [next(given) if has else None for has in is_given]


def _tangent(*args: Array, function: Linear, is_given: tuple[bool, ...]) -> Array:
    return function.tangent(*_parts(args, is_given))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moved = [jnp.zeros_like(p) if type(t) is ad.Zero else t for p, t in zip(primals, tangents, strict=True)]
    return jax.jvp(functools.partial(_tangent, **params), tuple(primals), tuple(moved))


def _transpose(ct: Any, *args: Any, function: Linear, is_given: tuple[bool, ...]) -> list[Any]:
    saved, dots = _parts(args, is_given)
    cts = [None] * len(dots) if type(ct) is ad.Zero else function.cotangents(saved, ct)
    own = [x for x, has in zip(cts, is_given, strict=True) if has]
    wanted = [ad.is_undefined_primal(x) for x in args[len(saved) :]]
    return [None] * len(saved) + [x if is_wanted else None for x, is_wanted in zip(own, wanted, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function under vmap: where what it takes is mapped. What it returns is in front."""

    function: Linear
    saved: tuple[int | None, ...]
    dots: tuple[int | None, ...]

    def tangent(self, saved: Sequence[Array], dots: Sequence[Array | None]) -> Array:
        out: Array = jax.vmap(self.function.tangent, (list(self.saved), list(self.dots)))(list(saved), list(dots))
        return out

    def cotangents(self, saved: Sequence[Array], ct: Array) -> Sequence[Array]:
        cts = jax.vmap(self.function.cotangents, (list(self.saved), 0))(list(saved), ct)
        return [x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim) for x, dim in zip(cts, self.dots, strict=True)]


def _batch_rule(args: Any, dims: Any, *, function: Linear, is_given: tuple[bool, ...]) -> Any:
    saved, dots = _parts(dims, is_given)
    return linear_p.bind(*args, function=_Mapped(function, tuple(saved), tuple(dots)), is_given=is_given), 0


linear_p.def_impl(_tangent)
linear_p.def_abstract_eval(
    lambda *avals, **params: jax.make_jaxpr(functools.partial(_tangent, **params))(*avals).out_avals[0]
)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch_rule
mlir.register_lowering(linear_p, mlir.lower_fun(_tangent, multiple_results=False))
