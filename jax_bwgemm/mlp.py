"""`mlp` and `gated_mlp`: the two layers of a transformer's feed-forward block, fused forward and backward.

What JAX derives of each product alone stops at its edges. Here the product that makes the cotangent of the hidden
values turns it, in its registers, into the cotangents of what goes into the activation, and the second of two products
that make the input's cotangent adds the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.gated import check_pair
from jax_bwgemm.matmul import as_array, checked_params, contraction_of, of_one_dtype
from jax_bwgemm.ops.primitive import fused_product, product
from jax_bwgemm.ops.shape_rules import check_bias, check_real, explicit_sharding, match_varying, matmul_shape
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array


def mlp(
    x: Any,
    w_in: Any,
    w_out: Any,
    *,
    activation: str = "gelu",
    bias_in: Any = None,
    bias_out: Any = None,
    residual: Any = None,
    precision: Any = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`activation(x @ w_in + bias_in) @ w_out + bias_out + residual`; the hidden values are rounded to x's dtype.

    Differentiable in reverse mode: for a gradient the hidden values are kept and, unless the activation is relu, what
    goes into it, both in x's dtype (`jax.checkpoint` computes them again).

    Args:
      x: array of shape (..., k), bfloat16, float16 or float32.
      w_in, w_out: arrays of shape (k, f) and (f, n), of x's dtype.
      activation: one that `matmul` has.
      bias_in, bias_out: arrays of shape (f,) and (n,).
      residual: array of the result's shape.
      precision, on_fallback, device, emulate: as `matmul`'s.

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
    settings = resolve(on_fallback, device, emulate)
    return _block("mlp", x, (("w_in", w_in),), biases, w_out, bias_out, residual, activation, precision, settings)


def gated_mlp(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str = "silu",
    bias_gate: Any = None,
    bias_up: Any = None,
    bias_down: Any = None,
    residual: Any = None,
    precision: Any = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`gated_matmul(x, w_gate, w_up) @ w_down + bias_down + residual`, with `gated_matmul`'s activation and biases; the
    hidden values are rounded to x's dtype.

    Differentiable in reverse mode: for a gradient the hidden values are kept, and both products that make them, in x's
    dtype (`jax.checkpoint` computes them again).

    Args:
      x: array of shape (..., k), bfloat16, float16 or float32.
      w_gate, w_up, w_down: arrays of shape (k, f), (k, f) and (f, n), of x's dtype.
      activation: "silu", "gelu" or another that `matmul` has.
      bias_gate, bias_up: arrays of shape (f,), both or none.
      bias_down: array of shape (n,).
      residual: array of the result's shape.
      precision, on_fallback, device, emulate: as `matmul`'s.

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
    settings = resolve(on_fallback, device, emulate)
    weights = ("w_gate", gate), ("w_up", up)
    return _block("gated_mlp", x, weights, biases, w_down, bias_down, residual, activation, precision, settings)


@dataclasses.dataclass(frozen=True)
class _How:
    """What is fixed when it is traced: the activation, whether there are two first layers, how many biases they have,
    and whether the last has a bias and a residual."""

    activation: str
    is_gated: bool
    has_bias: bool
    after: Epilogue
    precision: Any
    settings: Config

    def params(self, dtype: Any) -> dict[str, Any]:
        how = {"precision": self.precision, "settings": self.settings}
        return {"out_dtype": dtype, "tile": None, "out_sharding": None} | how


def _block(
    name: str, x: Any, weights: Sequence[tuple[str, Any]], biases: Sequence[Any], w_out: Any, bias_out: Any,
    residual: Any, activation: str, precision: Any, settings: Config,
) -> Array:  # fmt: skip
    unit(activation)  # or an error
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
    first = checked_params(x, ws[0], precision=precision)
    last = checked_params(hidden, w_out, bias=bias_out, residual=residual, precision=precision)
    for bias in biases:
        check_real("bias", bias, x.dtype)
        check_bias(bias, x.shape, ws[0].shape)
    how = _How(activation, len(ws) > 1, bool(biases), last["epilogue"], first["precision"], settings)
    extras = tuple(jnp.asarray(y).astype(x.dtype) for y in (bias_out, residual) if y is not None)
    own_biases = tuple(jnp.asarray(y).astype(x.dtype) for y in biases)
    # Of one kind in a `shard_map`: what devices share is cast here, so that its cotangents are added up outside.
    leaves, tree = jax.tree.flatten((x, tuple(ws), own_biases, w_out, extras))
    return _mlp(how, *jax.tree.unflatten(tree, match_varying(*leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    how: _How, x: Array, ws: tuple[Array, ...], biases: tuple[Array, ...], w_out: Array, extras: tuple[Array, ...]
) -> Array:
    (h,) = _first(how, x, ws, biases, unit(how.activation, how.is_gated, how.has_bias))
    return _last(how, h, w_out, extras)


def _first(
    how: _How, x: Array, ws: tuple[Array, ...], biases: tuple[Array, ...], epilogue: Epilogue
) -> tuple[Array, ...]:
    """The hidden values, and what `epilogue` returns beside them."""
    contraction, _ = contraction_of(x.shape, ws[0].shape, epilogue)
    contraction = dataclasses.replace(contraction, num_bs=len(ws))
    params = how.params(x.dtype) | {"contraction": contraction, "epilogue": epilogue}
    return fused_product(x, ws[0], (*ws[1:], *biases), **params)


def _last(how: _How, h: Array, w_out: Array, extras: tuple[Array, ...]) -> Array:
    contraction, _ = contraction_of(h.shape, w_out.shape, how.after)
    return fused_product(h, w_out, extras, contraction=contraction, epilogue=how.after, **how.params(h.dtype))[0]


def _forward(how: _How, x: Array, ws: Any, biases: Any, w_out: Array, extras: Any) -> tuple[Array, Any]:
    h, *before = _first(how, x, ws, biases, kept(how.activation, how.is_gated, how.has_bias))
    return _last(how, h, w_out, extras), (x, ws, w_out, h, tuple(before))


def _backward(how: _How, residuals: Any, ct: Array) -> tuple[Any, ...]:
    x, ws, w_out, h, before = residuals
    back = pullback(how.activation, how.is_gated)
    last = contraction_of(h.shape, w_out.shape, Epilogue())[0]
    first = contraction_of(x.shape, ws[0].shape, Epilogue())[0]
    params = how.params(x.dtype)
    of_h = last.gradient_of_a
    read = dict(zip(("before", "before_up"), before or (h,), strict=False))
    operands = [read[y.role] for y in back.operands]
    sharding = {"out_sharding": explicit_sharding(jax.typeof(h))}
    cts = fused_product(
        ct, w_out, operands,
        **params | sharding | {"contraction": _reading(of_h, len(operands)), "epilogue": back},
    )  # fmt: skip
    w_out_ct = _gradient(h, ct, w_out, last.gradient_of_b, params)
    w_cts = tuple(_gradient(x, own, w, first.gradient_of_b, params) for own, w in zip(cts, ws, strict=True))
    x_ct = _gradient(cts[0], ws[0], x, first.gradient_of_a, params)
    for own, w in zip(cts[1:], ws[1:], strict=True):
        x_ct = _gradient(own, w, x, first.gradient_of_a, params, x_ct)
    biases = tuple(map(_summed, cts)) if how.has_bias else ()
    extras = tuple(_summed(ct) if y.place == "n" else ct for y in how.after.operands)
    return x_ct, w_cts, biases, w_out_ct, extras


def _reading(contraction: Contraction, matrices: int) -> Contraction:
    return dataclasses.replace(contraction, extras=(contraction.out,) * matrices)


def _gradient(
    a: Array, b: Array, of: Array, contraction: Contraction, params: dict[str, Any], added: Array | None = None
) -> Array:
    """a @ b, plus what is `added`, stored and sharded as what it is the cotangent `of`."""
    own = params | {"out_sharding": explicit_sharding(jax.typeof(of))}
    if added is None:
        return product(a, b, contraction=contraction, epilogue=Epilogue(), **own)
    epilogue = chain(has_residual=True)
    return fused_product(a, b, (added,), contraction=_reading(contraction, 1), epilogue=epilogue, **own)[0]


def _summed(ct: Array) -> Array:
    """Of a bias: the sum over all rows, in float32."""
    return jnp.sum(ct, tuple(range(ct.ndim - 1)), dtype=jnp.float32).astype(ct.dtype)


_mlp.defvjp(_forward, _backward)
