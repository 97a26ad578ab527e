"""A linear map from place to place, whose slopes are expressions of what is saved: derivatives of an epilogue.

`slopes_p` takes tangents (or cotangents) and saved arrays, all of one shape. It is a primitive so that only what it
reads is saved for a gradient, not the slopes themselves, and so that what fuses products finds it whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_bwgemm.facts.epilogue import Const, Input, Node
from jax_bwgemm.ops.primitive import compiled
from jax_bwgemm.ops.reference import evaluate, round_to
from jax_bwgemm.ops.shape_rules import match_varying

slopes_p = Primitive("bwgemm_slopes")
slopes_p.multiple_results = True

Matrix = tuple[tuple[Node, ...], ...]  # of slopes: a row for each result, in it one for each tangent


def apply_slopes(
    slopes: Matrix, tangents: Sequence[jax.Array], saved: Sequence[jax.Array], inputs: Sequence[Input], dtypes: Any
) -> tuple[jax.Array, ...]:
    """Result i is the sum over j of `slopes[i][j]` times tangent j, in float32, rounded once to `dtypes[i]`. `inputs`:
    what the expressions call `saved`."""
    params = {"slopes": slopes, "inputs": tuple(inputs), "dtypes": tuple(dtypes)}
    return tuple(slopes_p.bind(*match_varying(*tangents, *saved), **params))


def _reference(*args: jax.Array, slopes: Matrix, inputs: Sequence[Input], dtypes: Any) -> tuple[jax.Array, ...]:
    num = len(slopes[0])
    tangents = [x.astype(jnp.float32) for x in args[:num]]
    known = {x.role: value.astype(jnp.float32) for x, value in zip(inputs, args[num:], strict=True)}
    found = []
    for row, dtype in zip(slopes, dtypes, strict=True):
        terms = [_times(slope, known, tangent) for slope, tangent in zip(row, tangents, strict=True)]
        found.append(round_to(functools.reduce(jnp.add, terms), dtype))
    return tuple(found)


def _times(slope: Node, known: dict[str, jax.Array], tangent: jax.Array) -> jax.Array:
    if isinstance(slope, Const):
        return tangent * slope.value
    return evaluate(slope, known) * tangent


def _shape_rule(*avals: Any, slopes: Matrix, inputs: Any, dtypes: Any) -> Any:
    if len({x.shape for x in avals}) != 1 or len(avals) != len(slopes[0]) + len(inputs):
        raise ValueError(f"`slopes_p` requires arrays of one shape, got {', '.join(str(x.shape) for x in avals)}")
    return [avals[0].update(dtype=jnp.dtype(dtype), weak_type=False) for dtype in dtypes]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    num = len(params["slopes"][0])
    outs = slopes_p.bind(*primals, **params)
    linear = [_instantiated(t, p) for t, p in zip(tangents[:num], primals[:num], strict=True)]
    dots = list(slopes_p.bind(*linear, *primals[num:], **params))
    if any(type(t) is not ad.Zero for t in tangents[num:]):  # a second derivative: JAX's, of the expressions
        moved = [_instantiated(t, p) for t, p in zip(tangents[num:], primals[num:], strict=True)]
        of_saved = functools.partial(_reference, *primals[:num], **params)
        dots = [x + y for x, y in zip(dots, jax.jvp(of_saved, tuple(primals[num:]), tuple(moved))[1], strict=True)]
    return outs, dots


def _instantiated(tangent: Any, primal: Any) -> Any:
    return jnp.zeros_like(primal) if type(tangent) is ad.Zero else tangent


def _transpose(cts: Any, *args: Any, slopes: Matrix, inputs: Any, dtypes: Any) -> Any:
    """The transposed matrix, of those tangents that are asked for."""
    num = len(slopes[0])
    rows = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    wanted = [j for j, x in enumerate(args[:num]) if ad.is_undefined_primal(x)]
    found: list[Any] = [None] * len(args)
    if not rows:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    matrix = tuple(tuple(slopes[i][j] for i in rows) for j in wanted)
    own = apply_slopes(matrix, [cts[i] for i in rows], args[num:], inputs, [args[j].aval.dtype for j in wanted])
    for j, ct in zip(wanted, own, strict=True):
        found[j] = ct
    return found


def _batch_rule(args: Any, dims: Any, **params: Any) -> Any:
    """All with the mapped dimension in front."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    outs = slopes_p.bind(*moved, **params)
    return outs, [0] * len(outs)


slopes_p.def_impl(compiled(slopes_p))
slopes_p.def_abstract_eval(_shape_rule)
ad.primitive_jvps[slopes_p] = _jvp
ad.primitive_transposes[slopes_p] = _transpose
batching.primitive_batchers[slopes_p] = _batch_rule
mlir.register_lowering(slopes_p, mlir.lower_fun(_reference, multiple_results=True))
