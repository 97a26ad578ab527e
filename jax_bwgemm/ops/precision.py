"""What `precision` asks of a product, as `lax.dot_general` reads it, and whether the tensor cores keep it.

Knows no shape and no device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_PRESET = lax.DotAlgorithmPreset
_FP8_ALGORITHMS = (_PRESET.ANY_F8_ANY_F8_F32, _PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM)
ALGORITHMS = {
    "bfloat16": (_PRESET.BF16_BF16_F32,),
    "float16": (_PRESET.F16_F16_F32,),
    "float32": (_PRESET.TF32_TF32_F32,),
    "float8_e4m3fn": _FP8_ALGORITHMS,
    "float8_e5m2": _FP8_ALGORITHMS,
}  # what the kernels compute, for operands of a dtype


def canonical(precision: Any) -> Any:
    """`precision` as a param of `lax.dot_general_p`: None, two `lax.Precision`, or an algorithm.

    None is what `jax.default_matmul_precision` says here. Raises lax's own ValueError for anything else.
    """
    precision = tuple(precision) if isinstance(precision, list) else precision
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    try:
        return _canonical(precision, default)
    except TypeError:  # no cache has what cannot be hashed
        return _canonical.__wrapped__(precision, default)


@functools.lru_cache(maxsize=64)
def _canonical(precision: Any, default: Any) -> Any:
    """As lax itself does it; JAX has no public function for this, and traces with `default`."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    dims = (((1,), (0,)), ((), ()))
    jaxpr = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, dims, precision))(one, one)
    return jaxpr.eqns[0].params["precision"]


def for_xla(precision: Any) -> Any:
    """What XLA is asked in place of a canonical `precision`.

    The float8 algorithms are cuBLASLt's: JAX refuses them on CPUs, and XLA on GPUs cannot compile one of two
    float8_e5m2. A precision means to XLA the same of float8 operands: by "highest", sums that keep float32.
    """
    if precision not in _FP8_ALGORITHMS:
        return precision
    return (lax.Precision.HIGHEST,) * 2 if promotes(precision) else None


def is_algorithm(precision: Any) -> bool:
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def promotes(precision: Any) -> bool:
    """Whether a canonical `precision` asks that sums of float8 products keep float32, unlike the fast accumulation
    that None and `ANY_F8_ANY_F8_F32_FAST_ACCUM` allow."""
    return precision is not None and precision == _PRESET.ANY_F8_ANY_F8_F32


def why_not_precision(precision: Any, in_dtype: str) -> str | None:
    """None if a kernel for operands of `in_dtype` computes at least as precisely as a canonical `precision` asks.

    On GPUs JAX means TF32 by None, "default", "high" and "tensorfloat32", and float32 by "highest" and "float32"; for
    operands of other dtypes these mean nothing.
    """
    if is_algorithm(precision):
        legal = (*ALGORITHMS.get(in_dtype, ()), _PRESET.DEFAULT)
        if precision in legal:
            return None
        return f"`precision` requires {' or '.join(x.name for x in legal)} for {in_dtype} operands, got {precision}"
    if in_dtype == "float32" and precision is not None and lax.Precision.HIGHEST in precision:
        return "float32 operands are multiplied as TF32, which requires a `precision` below highest, got highest"
    return None
