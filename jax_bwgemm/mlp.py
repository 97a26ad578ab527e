"""`mlp` and `gated_mlp`: the two layers of a transformer's feed-forward block, fused forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_bwgemm.facts.units import unit
from jax_bwgemm.gated import check_pair
from jax_bwgemm.matmul import as_array, checked_params, of_one_dtype
from jax_bwgemm.ops.feed_forward import Block, feed_forward
from jax_bwgemm.ops.shape_rules import (
    check_bias,
    check_real,
    contraction_of,
    match_varying,
    matmul_shape,
    of_rank,
    sharded_alike,
)
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array


def mlp(
    x: ArrayLike,
    w_in: ArrayLike,
    w_out: ArrayLike,
    *,
    activation: str = "gelu",
    bias_in: ArrayLike | None = None,
    bias_out: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    precision: PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`activation(x @ w_in + bias_in) @ w_out + bias_out + residual`; the hidden values are rounded to x's dtype.

    Differentiable in both modes: for a gradient the hidden values are kept and, unless the activation is relu, what
    goes into it, both in x's dtype (`jax.checkpoint` computes them again).

    Args:
      x: array of shape (..., k), bfloat16, float16 or float32.
      w_in, w_out: arrays of shape (k, f) and (f, n), of x's dtype.
      activation: one that `matmul` has.
      bias_in, bias_out: arrays of shape (f,) and (n,).
      residual: array of the result's shape.
      precision, out_sharding, on_fallback, device, emulate: as `matmul`'s.

    Returns:
      An array of shape (..., n), of x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown activation, or what `matmul` refuses.
      TypeError, FallbackError: as `matmul`.

    Example:
      >>> x, w, v = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 128, 64), (64, 256), (256, 64)))
      >>> jax.jit(jax_bwgemm.mlp)(x, w, v, residual=x).shape
      (4, 128, 64)
    """
    biases = () if bias_in is None else (bias_in,)
    how = {"precision": precision, "out_sharding": out_sharding}
    settings = resolve(on_fallback, device, emulate)
    return _block("mlp", x, (("w_in", w_in),), biases, w_out, bias_out, residual, activation, how, settings)


def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    activation: str = "silu",
    bias_gate: ArrayLike | None = None,
    bias_up: ArrayLike | None = None,
    bias_down: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    precision: PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`gated_matmul(x, w_gate, w_up) @ w_down + bias_down + residual`, with `gated_matmul`'s activation and biases; the
    hidden values are rounded to x's dtype.

    Differentiable in both modes: for a gradient the hidden values are kept, and both products that make them, in x's
    dtype (`jax.checkpoint` computes them again).

    Args:
      x: array of shape (..., k), bfloat16, float16 or float32.
      w_gate, w_up, w_down: arrays of shape (k, f), (k, f) and (f, n), of x's dtype.
      activation: "silu", "gelu" or another that `matmul` has.
      bias_gate, bias_up: arrays of shape (f,), both or none.
      bias_down: array of shape (n,).
      residual: array of the result's shape.
      precision, out_sharding, on_fallback, device, emulate: as `matmul`'s.

    Returns:
      An array of shape (..., n), of x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, one bias, an unknown activation, or what `matmul` refuses.
      TypeError, FallbackError: as `matmul`.

    Example:
      >>> shapes = (4, 128, 64), (64, 256), (64, 256), (256, 64)
      >>> x, gate, up, down = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
      >>> jax.jit(jax_bwgemm.gated_mlp)(x, gate, up, down, residual=x).shape
      (4, 128, 64)
    """
    gate, up = as_array("w_gate", w_gate), as_array("w_up", w_up)
    biases = check_pair(gate, up, bias_gate, bias_up)
    how = {"precision": precision, "out_sharding": out_sharding}
    settings = resolve(on_fallback, device, emulate)
    weights = ("w_gate", gate), ("w_up", up)
    return _block("gated_mlp", x, weights, biases, w_down, bias_down, residual, activation, how, settings)


def _block(
    name: str, x: Any, weights: Sequence[tuple[str, Any]], biases: Sequence[Any], w_out: Any, bias_out: Any,
    residual: Any, activation: str, how: dict[str, Any], settings: Config,
) -> Array:  # fmt: skip
    x, w_out = of_one_dtype(as_array("x", x), as_array("w_out", w_out))
    ws = [of_one_dtype(x, as_array(role, w))[1] for role, w in weights]
    if any(w.dtype != x.dtype for w in (*ws, w_out)) or str(x.dtype) not in ("bfloat16", "float16", "float32"):
        got = ", ".join(str(w.dtype) for w in (x, *ws, w_out))
        raise ValueError(f"`{name}` requires operands of one dtype, bfloat16, float16 or float32, got {got}")
    for w in (*ws, w_out):
        if w.ndim != 2 or x.ndim < 1:
            raise ValueError(f"`{name}` requires an array of rank 1 or more and matrices, got {x.shape} and {w.shape}")
    hidden = jax.ShapeDtypeStruct(matmul_shape(x.shape, ws[0].shape), x.dtype)
    matmul_shape(hidden.shape, w_out.shape)
    last = checked_params(hidden, w_out, bias=bias_out, residual=residual, **how)
    for bias in biases:
        check_real("bias", bias, x.dtype)
        check_bias(bias, x.shape, ws[0].shape)
    kind = activation, len(ws) > 1, bool(biases)
    block = Block(*kind, last["epilogue"], last["precision"], last["out_sharding"], settings)
    biases = [jnp.asarray(y).astype(x.dtype) for y in biases]
    extras = [jnp.asarray(y).astype(x.dtype) for y in (bias_out, residual) if y is not None]
    block, added = _sharded_alike(block, x, ws, biases, w_out, extras)
    # Of one kind in a `shard_map`: what devices share is cast here, so that its cotangents are added up outside.
    return feed_forward(block, *match_varying(x, *ws, *added[0], w_out, *added[1]))


def _sharded_alike(
    block: Block, x: Array, ws: Sequence[Array], biases: Sequence[Array], w_out: Array, extras: Sequence[Array]
) -> tuple[Block, tuple[Sequence[Array], Sequence[Array]]]:
    """Over explicit mesh axes: with the result's sharding, and what is added as what it is added to."""
    epilogue = unit(block.activation, block.is_gated, block.has_bias)
    first = dataclasses.replace(contraction_of(x.shape, ws[0].shape, epilogue)[0], num_bs=len(ws))
    biases, sharding = sharded_alike(biases, list(map(jax.typeof, (x, *ws, *biases))), first, None)
    h = jax.typeof(x).update(shape=matmul_shape(x.shape, ws[0].shape))
    h = h if sharding is None else h.update(sharding=sharding)
    last, _ = contraction_of(h.shape, w_out.shape, block.after)
    avals = [h, *map(jax.typeof, (w_out, *extras))]
    extras, sharding = sharded_alike(extras, avals, last, of_rank(block.out_sharding, h.ndim))
    return dataclasses.replace(block, out_sharding=sharding), (biases, extras)
