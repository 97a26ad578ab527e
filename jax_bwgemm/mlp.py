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
from jax.custom_derivatives import SymbolicZero

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.gated import check_pair
from jax_bwgemm.matmul import as_array, checked_params, contraction_of, of_one_dtype
from jax_bwgemm.ops.derivatives import Fused, product_terms, spread
from jax_bwgemm.ops.linear import apply_linear
from jax_bwgemm.ops.primitive import fused_product, product
from jax_bwgemm.ops.reference import finish
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
    out_sharding: Any = None,
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
    out_sharding: Any = None,
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


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block but for its operands: x, the first weights, as many biases or none, the last weight, and what is added.

    Saved for its derivatives are x, all weights, the hidden values, and what goes into them.
    """

    activation: str
    is_gated: bool
    has_bias: bool
    after: Epilogue
    precision: Any
    out_sharding: Any
    settings: Config

    def first(self, operands: Sequence[Array], epilogue: Epilogue) -> tuple[Array, ...]:
        """The hidden values, and what `epilogue` returns beside them."""
        x, ws, biases, *_ = self._split(operands)
        contraction, _ = contraction_of(x.shape, ws[0].shape, epilogue)
        contraction = dataclasses.replace(contraction, num_bs=len(ws))
        params = self._params(x.dtype) | {"contraction": contraction, "epilogue": epilogue}
        return fused_product(x, ws[0], (*ws[1:], *biases), **params)

    def last(self, h: Array, operands: Sequence[Array]) -> Array:
        *_, w_out, extras = self._split(operands)
        contraction, _ = contraction_of(h.shape, w_out.shape, self.after)
        params = self._last_params(h.dtype) | {"contraction": contraction, "epilogue": self.after}
        return fused_product(h, w_out, extras, **params)[0]

    def forward(self, operands: Sequence[Array]) -> tuple[Array, list[Array]]:
        """With what is saved."""
        h, *before = self.first(operands, kept(self.activation, self.is_gated, self.has_bias))
        x, ws, _, w_out, _ = self._split(operands)
        return self.last(h, operands), [x, *ws, w_out, h, *before]

    def tangent(self, saved: Sequence[Array], dots: Sequence[Array | None]) -> Array:
        x, ws, w_out, h, read = self._saved(saved)
        x_dot, w_dots, bias_dots, w_out_dot, extra_dots = self._split(dots)
        params, h_dots = self._params(x.dtype), []
        for i, w in enumerate(ws):
            dot = _tangent((x, w), (x_dot, w_dots[i]), bias_dots[i : i + 1], params)
            if dot is not None:
                h_dots.append(finish((dot.astype(jnp.float32),), self.pullback, read, jnp.float32)[i])
        h_dot = functools.reduce(jnp.add, h_dots).astype(h.dtype) if h_dots else None
        out = _tangent((h, w_out), (h_dot, w_out_dot), extra_dots, self._last_params(x.dtype))
        assert out is not None  # there is a tangent, or there is no call
        return out

    def cotangents(self, saved: Sequence[Array], ct: Array) -> Sequence[Array]:
        """The cotangent of the hidden values becomes those of what goes into them in the registers of its product."""
        x, ws, w_out, h, read = self._saved(saved)
        last = contraction_of(h.shape, w_out.shape, Epilogue())[0]
        first = contraction_of(x.shape, ws[0].shape, Epilogue())[0]
        params = self._params(x.dtype)
        back = pullback(self.activation, self.is_gated, self.has_bias)
        contraction = _reading(last.gradient_of_a, len(read))
        contraction = dataclasses.replace(contraction, reduced=(contraction.out[-1],) * len(back.reductions))
        of_h = params | {"contraction": contraction, "epilogue": back}
        found = fused_product(ct, w_out, read, **of_h | {"out_sharding": explicit_sharding(jax.typeof(h))})
        cts, biases = found[: len(ws)], [x.astype(h.dtype) for x in found[len(ws) :]]
        w_out_ct = _gradient(h, ct, w_out, last.gradient_of_b, params)
        w_cts = [_gradient(x, own, w, first.gradient_of_b, params) for own, w in zip(cts, ws, strict=True)]
        x_ct = _gradient(cts[0], ws[0], x, first.gradient_of_a, params)
        for own, w in zip(cts[1:], ws[1:], strict=True):
            x_ct = _gradient(own, w, x, first.gradient_of_a, params, x_ct)
        return [x_ct, *w_cts, *biases, w_out_ct, *(_summed(ct) if y.place == "n" else ct for y in self.after.operands)]

    def _split(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        num = 2 if self.is_gated else 1
        num_biases = num if self.has_bias else 0
        x, *rest = operands
        return x, rest[:num], rest[num : num + num_biases], rest[num + num_biases], rest[num + num_biases + 1 :]

    def _saved(self, saved: Sequence[Array]) -> tuple[Any, ...]:
        """And what `pullback` reads: what goes in, or of relu the hidden values."""
        num = 2 if self.is_gated else 1
        x, *rest = saved
        w_out, h, *before = rest[num:]
        read = dict(zip(("before", "before_up"), before or (h,), strict=False))
        return x, rest[:num], w_out, h, [read[y.role] for y in self.pullback.operands]

    @property
    def pullback(self) -> Epilogue:
        return pullback(self.activation, self.is_gated)

    def _params(self, dtype: Any) -> dict[str, Any]:
        how = {"precision": self.precision, "settings": self.settings}
        return {"out_dtype": dtype, "tile": None, "out_sharding": None} | how

    def _last_params(self, dtype: Any) -> dict[str, Any]:
        return self._params(dtype) | {"out_sharding": self.out_sharding}


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
    block = _Block(*kind, last["epilogue"], last["precision"], last["out_sharding"], settings)
    biases = [jnp.asarray(y).astype(x.dtype) for y in biases]
    extras = [jnp.asarray(y).astype(x.dtype) for y in (bias_out, residual) if y is not None]
    # Of one kind in a `shard_map`: what devices share is cast here, so that its cotangents are added up outside.
    return _mlp(block, *match_varying(x, *ws, *biases, w_out, *extras))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mlp(block: _Block, *operands: Array) -> Array:
    (h,) = block.first(operands, unit(block.activation, block.is_gated, block.has_bias))
    return block.last(h, operands)


def _mlp_jvp(block: _Block, operands: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Array]:
    out, saved = block.forward(operands)
    dots = [None if isinstance(dot, SymbolicZero) else dot for dot in tangents]
    return out, apply_linear(block, saved, dots)


def _tangent(factors: Any, dots: Any, added: Sequence[Array | None], params: dict[str, Any]) -> Array | None:
    """Of a product and what is added to it, along n or everywhere, from those tangents that there are."""
    contraction, _ = contraction_of(*(x.shape for x in factors), Epilogue())
    fused = Fused(factors, Epilogue(), (), params | {"contraction": contraction})
    terms = product_terms(fused, dots, Epilogue())
    terms += [spread(x, contraction.out[-x.ndim :], fused.out, contraction) for x in added if x is not None]
    return functools.reduce(jnp.add, terms) if terms else None


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


_mlp.defjvp(_mlp_jvp, symbolic_zeros=True)
