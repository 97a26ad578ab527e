"""The primitives and their differentiation rules. Knows no device: that is `lowering`; `batching` has the vmap rules.

`matmul_p` is `alpha * (a @ b)`, linear in each operand. `fused_matmul_p` adds a bias, an activation or both and is
differentiated through `matmul_p`. Operands and majors are those of docs/architecture.md, "The primitive's operands".
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_bwgemm.shape_rules import _matmul_shape_rule, match_varying

matmul_p = Primitive("bwgemm_matmul")
fused_matmul_p = Primitive("bwgemm_fused_matmul")


def product(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    """`alpha * (a @ b)` of shape (l, m, n), in `out_dtype`.

    Params: `a_major`, `b_major`, `out_dtype`, `alpha`, `tile` (None: the planner's), `on_fallback`, `device`,
    `emulate`.
    """
    return matmul_p.bind(*match_varying(a, b), **params)


def fused_product(a: jax.Array, b: jax.Array, bias: jax.Array | None, **params: Any) -> jax.Array:
    """`activation(alpha * (a @ b) + bias)`; `bias` is (n,) in `out_dtype`. Params: `product`'s and `activation`."""
    if bias is None and params["activation"] is None:
        return product(a, b, **_linear(params))
    operands = (a, b) if bias is None else (a, b, bias)
    return fused_matmul_p.bind(*match_varying(*operands), **params)


def _linear(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "activation"}


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _compiled(*args: jax.Array, primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> jax.Array:
    return primitive.bind(*args, **dict(params))


def _impl(primitive: Primitive, *args: jax.Array, **params: Any) -> jax.Array:
    """Outside of `jax.jit`: compiles for the operands and runs, under `jax.disable_jit` too."""
    with jax.disable_jit(False):
        return _compiled(*args, primitive=primitive, params=tuple(sorted(params.items())))


def _matmul_transpose_a(ct: Any, a: Any, b: Any, *, a_major: str, b_major: str, **params: Any) -> jax.Array:
    """dA = ct @ B^T, stored as A is: (l, m, k) directly, or (l, k, m) as B @ ct^T. Every factor stays where it is."""
    if a_major == "k":
        return _gradient(ct, b, a.aval, a_major="k", b_major="k" if b_major == "n" else "n", **params)
    return _gradient(b, ct, a.aval, a_major="k" if b_major == "n" else "m", b_major="k", **params)


def _matmul_transpose_b(ct: Any, a: Any, b: Any, *, a_major: str, b_major: str, **params: Any) -> jax.Array:
    """dB = A^T @ ct, stored as B is: (l, k, n) directly, or (l, n, k) as ct^T @ A."""
    if b.aval.shape[0] == 1 and a_major == "k" and a.shape[0] == ct.shape[0]:
        a, ct = _stack_rows(a), _stack_rows(ct)  # a shared b sums over l, which joins the contracted m
    if b_major == "n":
        return _gradient(a, ct, b.aval, a_major="m" if a_major == "k" else "k", b_major="n", **params)
    return _gradient(ct, a, b.aval, a_major="m", b_major="n" if a_major == "k" else "k", **params)


def _stack_rows(x: jax.Array) -> jax.Array:
    return x.reshape(1, x.shape[0] * x.shape[1], x.shape[2])


def _gradient(x: Any, y: Any, aval: Any, *, out_dtype: Any, tile: Any, **params: Any) -> jax.Array:
    """x @ y as the cotangent of an operand `aval`. The forward's `tile` says nothing about this product.

    A cotangent wider than the operands (`out_dtype=float32`) is rounded to their dtype: that is what the kernels
    multiply, and the gradient is rounded to it anyway.
    """
    x, y = x.astype(aval.dtype), y.astype(aval.dtype)
    if aval.shape[0] == 1 and max(x.shape[0], y.shape[0]) > 1:
        summands = product(x, y, out_dtype=jnp.dtype("float32"), tile=None, **params)
        return jnp.sum(summands, axis=0, keepdims=True).astype(aval.dtype)
    return product(x, y, out_dtype=aval.dtype, tile=None, **params)


def _fused_matmul_jvp(primals: Any, tangents: Any, *, activation: str | None, **params: Any) -> tuple[Any, Any]:
    """The tangent of the linear part, masked where the activation is flat; relu is flat at 0, as `jax.nn.relu` is."""
    a, b, *bias = primals
    out = fused_product(a, b, bias[0] if bias else None, activation=activation, **params)
    a_dot, b_dot, *bias_dot = (None if type(t) is ad.Zero else t for t in tangents)
    terms = []
    if a_dot is not None:
        terms.append(product(a_dot, b, **params))
    if b_dot is not None:
        terms.append(product(a, b_dot, **params))
    if bias_dot and bias_dot[0] is not None:
        terms.append(jnp.broadcast_to(bias_dot[0], out.shape))
    tangent = functools.reduce(jnp.add, terms)
    return out, tangent if activation is None else lax.select(out > 0, tangent, jnp.zeros_like(tangent))


for _primitive in (matmul_p, fused_matmul_p):
    _primitive.def_impl(functools.partial(_impl, _primitive))
    _primitive.def_abstract_eval(_matmul_shape_rule)
ad.defbilinear(matmul_p, _matmul_transpose_a, _matmul_transpose_b)
ad.primitive_jvps[fused_matmul_p] = _fused_matmul_jvp
