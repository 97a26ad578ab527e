"""`gated_matmul`: a product with two matrices whose results make one, as a gated layer has it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_bwgemm.contract import check_tile, refuse, why_not_ours
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import unit
from jax_bwgemm.matmul import as_array, checked_params, of_one_dtype
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.ops.reference import by_matmul
from jax_bwgemm.ops.shape_rules import check_bias, check_real, contraction_of, viewed
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array


def gated_matmul(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    *,
    activation: str = "silu",
    bias_gate: ArrayLike | None = None,
    bias_up: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`activation(x @ w_gate + bias_gate) * (x @ w_up + bias_up)`, in float32 until it is rounded once.

    One kernel computes both products: it reads x once and writes one result. Where none does, or two are predicted to
    be done sooner, two kernels and XLA do. Under differentiation the kernel also returns both products, with their
    biases, in the output dtype (float8: bfloat16), from which the gradient is made.

    Args:
      x: array of shape (..., m, k).
      w_gate, w_up: arrays of shape (..., k, n), both of one shape and dtype. Halves of one array will do, but XLA
        copies them: keep them apart.
      activation: "silu" (SwiGLU), "gelu" (GeGLU, the tanh form), or another that `matmul` has.
      bias_gate, bias_up: arrays of shape (n,), both or none.
      out_dtype, precision, out_sharding, on_fallback, device, emulate: as `matmul`'s.
      tile: as `matmul`'s; one with `gated`, such as "128x256x64_cta1_cluster2x1_gated", of whose columns each matrix
        has half.

    Returns:
      An array of shape (..., m, n).

    Raises:
      ValueError: two matrices that differ, one bias, an unknown activation, integers, or what `matmul` refuses.
      TypeError, FallbackError: as `matmul`.

    Example:
      >>> x, w, v = (jnp.ones(shape, jnp.bfloat16) for shape in ((512, 256), (256, 128), (256, 128)))
      >>> jax.jit(jax_bwgemm.gated_matmul)(x, w, v).shape
      (512, 128)
    """
    x, w_gate = of_one_dtype(as_array("x", x), as_array("w_gate", w_gate))
    w_up = as_array("w_up", w_up).astype(w_gate.dtype) if getattr(w_up, "weak_type", False) else as_array("w_up", w_up)
    biases = check_pair(w_gate, w_up, bias_gate, bias_up)
    settings = resolve(on_fallback, device, emulate)
    params = checked_params(x, w_gate, out_dtype=out_dtype, tile=tile, precision=precision, out_sharding=out_sharding)
    params["epilogue"] = unit(activation, is_gated=True, has_bias=bool(biases))
    if not jnp.issubdtype(params["out_dtype"], jnp.inexact):
        raise ValueError(f"`gated_matmul` requires a floating result, got {params['out_dtype']}: pass `out_dtype=`")
    for name, array in (("x", x), ("w_gate", w_gate), *zip(("bias_gate", "bias_up"), biases, strict=False)):
        check_real(name, array, params["out_dtype"])
    for bias in biases:
        check_bias(bias, x.shape, w_gate.shape)
    static = tuple(params.items())
    operands = (x, w_gate, w_up, *biases)
    own = settings if is_ours(operands, params, settings) else None
    is_traced = any(isinstance(operand, jax.core.Tracer) for operand in operands)
    return (_gated if is_traced else _compiled)(operands, static, own)


def check_pair(w_gate: Array, w_up: Array, bias_gate: Any, bias_up: Any) -> tuple[Any, ...]:
    """The biases."""
    if w_gate.shape != w_up.shape or w_gate.dtype != w_up.dtype:
        got = f"{w_gate.dtype}{list(w_gate.shape)} and {w_up.dtype}{list(w_up.shape)}"
        raise ValueError(f"`w_gate` and `w_up` require one shape and dtype, got {got}")
    if (bias_gate is None) != (bias_up is None):
        given = "bias_up" if bias_gate is None else "bias_gate"
        raise ValueError(f"a gated product requires both biases or none, got only `{given}`: pass zeros for the other")
    return () if bias_gate is None else (bias_gate, bias_up)


def is_ours(operands: tuple[Any, ...], params: dict[str, Any], settings: Config) -> bool:
    """Whether kernels of ours compute such a product; if not, that is said. ValueError for a tile that cannot."""
    x, w_gate, *others = operands
    contraction, axes = gated_contraction(x.shape, w_gate.shape, params["epilogue"])
    shapes = [tuple(n for j, n in enumerate(y.shape) if j not in axes[i]) for i, y in enumerate((x, w_gate))]
    avals = [jax.ShapeDtypeStruct(s, y.dtype) for s, y in zip((*shapes, shapes[1]), (x, w_gate, w_gate), strict=True)]
    avals += [jax.ShapeDtypeStruct(jnp.shape(y), params["out_dtype"]) for y in others[1:]]
    problem = viewed(tuple(avals), contraction=contraction, **params)[1]
    if reason := why_not_ours(problem, params["precision"]):
        refuse(settings, problem, reason)
        return False
    if params["tile"] is not None:
        check_tile(params["tile"], problem, settings)
    return True


@functools.lru_cache(maxsize=1024)
def gated_contraction(x: tuple[int, ...], w: tuple[int, ...], epilogue: Epilogue) -> Any:
    """As `contraction_of`, of two b."""
    contraction, axes = contraction_of(x, w, epilogue)
    return dataclasses.replace(contraction, num_bs=2), axes


def _gated(operands: tuple[Array, ...], params: tuple[tuple[str, Any], ...], settings: Config | None) -> Array:
    """Without `settings` it is XLA's."""
    given = dict(params)
    x, w_gate, w_up, *biases = operands
    biases = [jnp.asarray(bias).astype(given["out_dtype"]) for bias in biases]
    if settings is None:
        return by_matmul(x, (w_gate, w_up), biases, **given)
    contraction, (axes_x, axes_w) = gated_contraction(x.shape, w_gate.shape, given["epilogue"])
    x = lax.squeeze(x, axes_x) if axes_x else x
    w_gate, w_up = (lax.squeeze(w, axes_w) if axes_w else w for w in (w_gate, w_up))
    return fused_product(x, w_gate, (w_up, *biases), contraction=contraction, settings=settings, **given)[0]


_compiled = jax.jit(_gated, static_argnames=("params", "settings"))
