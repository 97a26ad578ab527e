"""`contract`: a product of operands of any rank and its epilogue, for layers whose shapes are not `matmul`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.matmul import refuse, why_not_ours
from jax_bwgemm.ops.precision import canonical, for_xla
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.ops.reference import aligned, dot, finish
from jax_bwgemm.ops.shape_rules import named, viewed
from jax_bwgemm.runtime.config import Config


def contract(
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array] = (),
    *,
    contraction: Contraction,
    out_dtype: Any,
    settings: Config,
    epilogue: Epilogue | None = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The result of `epilogue`, in `out_dtype`; `operands` are what it reads, with the modes of `contraction.extras`.

    What is not ours is XLA's, from a product in float32 (or wider), as loudly as `settings` say.
    """
    given: dict[str, Any] = {
        "contraction": contraction,
        "out_dtype": jnp.dtype(out_dtype),
        "epilogue": epilogue or Epilogue(),
        "precision": canonical(precision),
        "out_sharding": named(out_sharding),
    }
    operands = [x.astype(out_dtype) for x in operands]
    problem = viewed((a, b, *operands), **given)[1]
    if reason := why_not_ours(problem, given["precision"]):
        refuse(settings, problem, reason)
        return _by_xla(a, b, operands, **given)
    return fused_product(a, b, operands, settings=settings, tile=None, **given)[0]


def _by_xla(
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    *,
    contraction: Contraction,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any,
    out_sharding: Any,
) -> jax.Array:
    is_plain = epilogue.is_identity and str(out_dtype) not in FP8_DTYPES
    acc_dtype = out_dtype if is_plain else jnp.promote_types(out_dtype, jnp.float32)
    acc = dot(a, b, contraction, acc_dtype, for_xla(precision), out_sharding)
    return acc if is_plain else finish(acc, epilogue, aligned(operands, contraction), out_dtype)[0]
