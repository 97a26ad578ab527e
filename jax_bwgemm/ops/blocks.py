"""Two products of a jaxpr that are a feed-forward block: what a unit makes of one, or of two, and a last product alone
reads. Knows no price."""

from __future__ import annotations

import dataclasses
import functools
import string
from typing import Any

import jax
from jax.extend import source_info_util

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.ops.chains import UNITS, contraction_of, multiplies
from jax_bwgemm.ops.feed_forward import Block, feed_forward
from jax_bwgemm.ops.primitive import fused_matmul_p
from jax_bwgemm.ops.shape_rules import contraction_of as of_matrices

Eqn = Any  # a `JaxprEqn`, whose variables have avals that JAX does not type
_ADDED = [chain(has_bias=has_bias, has_residual=added) for has_bias in (False, True) for added in (False, True)]
_DTYPES = {"bfloat16", "float16", "float32"}


def block_of(first: Eqn, last: Eqn) -> Eqn | None:
    """The equation that computes both, of which `last` alone reads what `first` makes; None if they are no block."""
    kind = UNITS.get(first.params["epilogue"]) if first.primitive is fused_matmul_p else None
    after = last.params.get("epilogue", Epilogue()) if multiplies(last) else None
    if kind is None or after not in _ADDED:
        return None
    num_bs = 2 if kind[1] else 1
    x, *ws = first.invars[: 1 + num_bs]
    h, w_out, *extras = last.invars
    operands = [x, *ws, *first.invars[1 + num_bs :], w_out, *extras]
    if h is not first.outvars[0] or any(y is h for y in (w_out, *extras)) or not _is_of_one_dtype(first, last):
        return None
    if not (_is_of_matrices(first, num_bs) and _is_of_matrices(last) and _is_done_alike(first.params, last.params)):
        return None
    how = (last.params["precision"], last.params["out_sharding"], first.params["settings"])
    # In the context of a `shard_map`, over which constants vary, and on the user's line.
    with first.ctx.manager, source_info_util.user_context(first.source_info.traceback):
        made = jax.make_jaxpr(functools.partial(feed_forward, Block(*kind, after, *how)))(*(y.aval for y in operands))
    (eqn,) = made.jaxpr.eqns
    found: Eqn = eqn.replace(invars=operands, outvars=last.outvars, source_info=first.source_info)
    return found


def _is_of_one_dtype(first: Eqn, last: Eqn) -> bool:
    found = {str(y.aval.dtype) for eqn in (first, last) for y in (*eqn.invars, *eqn.outvars)}
    return len(found) == 1 and found <= _DTYPES


def _is_of_matrices(eqn: Eqn, num_bs: int = 1) -> bool:
    """Whether it multiplies rows of any rank by matrices, as `x @ w` does."""
    a, b = (y.aval.shape for y in eqn.invars[:2])
    if len(b) != 2 or a[-1:] != b[:1]:
        return False
    wanted, _ = of_matrices(a, b, eqn.params.get("epilogue", Epilogue()))
    return _named_alike(contraction_of(eqn)) == _named_alike(dataclasses.replace(wanted, num_bs=num_bs))


def _named_alike(contraction: Contraction) -> Contraction:
    """With the letters of modes in the order in which they come up."""
    letters = dict.fromkeys(contraction.a + contraction.b)
    names = str.maketrans({letter: string.ascii_letters[i] for i, letter in enumerate(letters)})
    own = {name: getattr(contraction, name).translate(names) for name in ("a", "b", "out")}
    return dataclasses.replace(contraction, **own, extras=tuple(x.translate(names) for x in contraction.extras))


def _is_done_alike(first: dict[str, Any], last: dict[str, Any]) -> bool:
    is_free = first["out_sharding"] is None and first["tile"] is None and last.get("tile") is None
    is_ours = last.get("settings", first["settings"]) == first["settings"] and "in_place" not in last
    return bool(is_free and is_ours and first["precision"] == last["precision"])
