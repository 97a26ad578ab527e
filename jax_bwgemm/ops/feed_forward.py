"""A feed-forward block: one product or a gated one, an activation, and a product of what these make, with a backward
pass that is fused across both.

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
from jax.extend import source_info_util

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.ops.derivatives import Fused, product_terms, spread
from jax_bwgemm.ops.linear import apply_linear
from jax_bwgemm.ops.primitive import fused_product, product
from jax_bwgemm.ops.reference import finish
from jax_bwgemm.ops.shape_rules import contraction_of, explicit_sharding
from jax_bwgemm.runtime.config import Config

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Block:
    """A block but for its operands: x, the first weights, as many biases or none, the last weight, and what is added.

    Saved for its derivatives are x, all weights, the hidden values, and what goes into them. `where`: the traceback of
    who calls it, of which JAX sees nothing in the function of a `custom_jvp`.
    """

    activation: str
    is_gated: bool
    has_bias: bool
    after: Epilogue
    precision: Any
    out_sharding: Any
    settings: Config
    where: Any = dataclasses.field(default=None, compare=False, repr=False)

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


def feed_forward(block: Block, *operands: Array) -> Array:
    """Of x, the first weights, their biases, the last weight, and what is added: `Block` says how many there are."""
    found: Array = _feed_forward(dataclasses.replace(block, where=source_info_util.current().traceback), *operands)
    return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _feed_forward(block: Block, *operands: Array) -> Array:
    with source_info_util.user_context(block.where):
        (h,) = block.first(operands, unit(block.activation, block.is_gated, block.has_bias))
        return block.last(h, operands)


def _jvp(block: Block, operands: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Array]:
    out, saved = block.forward(operands)
    dots = [None if isinstance(dot, SymbolicZero) else dot for dot in tangents]
    return out, apply_linear(block, saved, dots)


_feed_forward.defjvp(_jvp, symbolic_zeros=True)


def _tangent(factors: Any, dots: Any, added: Sequence[Array | None], params: dict[str, Any]) -> Array | None:
    """Of a product and what is added to it, along n or everywhere, from those tangents that there are."""
    a, b = (x.shape for x in factors)
    contraction, _ = contraction_of(a, b, Epilogue())
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
