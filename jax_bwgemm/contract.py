"""`contract`: a product of operands of any rank and its epilogue, by ours or by XLA; and what is asked first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.facts.arch import ARCHS, by_name
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.legality import why_not_anyhow, why_not_dtypes
from jax_bwgemm.facts.problem import INT8_DTYPES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.ops.precision import canonical, why_not_precision
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.ops.reference import reference
from jax_bwgemm.ops.shape_rules import named, operand_dtypes, viewed
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.config import Config, caller, report_fallback


def contract(
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array] = (),
    *,
    contraction: Contraction,
    out_dtype: Any,
    settings: Config,
    epilogue: Epilogue | None = None,
    tile: Tile | None = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> tuple[jax.Array, ...]:
    """The results of `epilogue`, its matrices in `out_dtype`; `operands` are what it reads, with the modes of
    `contraction.extras`.

    What is not ours is XLA's, from a product in float32 (or wider), as loudly as `settings` say. ValueError where
    `tile` computes it in no way.
    """
    given: dict[str, Any] = {
        "contraction": contraction,
        "out_dtype": jnp.dtype(out_dtype),
        "epilogue": epilogue or Epilogue(),
        "precision": canonical(precision),
        "out_sharding": named(out_sharding),
    }
    given_as = operand_dtypes(given["epilogue"], given["out_dtype"])
    operands = [x.astype(dtype) for x, dtype in zip(operands, given_as, strict=True)]
    problem = viewed((a, b, *operands), **given)[1]
    if reason := why_not_ours(problem, given["precision"]):
        refuse(settings, problem, reason)
        return reference(a, b, *operands, **given)
    if tile is not None:
        check_tile(tile, problem, settings)
    return fused_product(a, b, operands, settings=settings, tile=tile, **given)


def check_tile(tile: Tile, problem: Problem, settings: Config) -> None:
    """ValueError where `tile` computes the product in no way on the planned device, or on any, where that is open: also
    in a process whose products are XLA's."""
    if not problem.is_static or problem.is_empty:
        return
    device = settings.planned_device
    if reason := why_not_anyhow(tile, problem, (by_name(device),) if device else ARCHS.values()):
        raise ValueError(f"`tile` {tile} cannot compute {problem} {reason}")


def why_not_ours(problem: Problem, precision: Any) -> str | None:
    """What is asked before anything is traced: whether some kernel of ours computes such a product."""
    reason = why_not_dtypes(problem) or why_not_precision(precision, problem.a_dtype)
    if reason and problem.epilogue.is_identity and {problem.a_dtype, problem.b_dtype} <= set(INT8_DTYPES):
        return f"{reason}; pass int32 to use a kernel"
    return reason


def refuse(settings: Config, problem: Problem, reason: str) -> None:
    """Before anything is traced: a product that is XLA's on any device. Of what JAX makes of it later, such as its
    gradients, nothing is noted."""
    made = record.Product(str(problem), reason=reason, flops=problem.flops, min_bytes=problem.min_bytes)
    _leave(made, settings.on_fallback, settings.why_aloud(reason))


def leave(policy: str, what: str, reason: str) -> None:
    """To XLA, while it is traced: what belongs to a product, as its epilogue does, or is none, as some einsums are."""
    _leave(record.Product(what, reason=reason, is_beside=True), policy, reason)


def _leave(made: record.Product, policy: str, reason: str) -> None:
    name, line = caller()
    record.note(dataclasses.replace(made, where=f"{os.path.basename(name)}:{line}"))
    report_fallback(policy, made.problem, reason)
