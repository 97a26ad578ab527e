"""The primitives and their differentiation rules. Knows no device: that is `lowering`; `batching` has the vmap rules.

`matmul_p` is `alpha * (a @ b)`, linear in each operand. `fused_matmul_p` adds a bias, an activation, a residual or some
of them and is differentiated through `matmul_p`. Operands and majors are those of docs/architecture.md, "The
primitive's operands".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_bwgemm.precision import is_algorithm
from jax_bwgemm.problem import FP8_DTYPES
from jax_bwgemm.reference import activate, apply_epilogue, round_to
from jax_bwgemm.shape_rules import _matmul_shape_rule, extras, match_varying

Derivative = Callable[[jax.Array], jax.Array]

matmul_p = Primitive("bwgemm_matmul")
fused_matmul_p = Primitive("bwgemm_fused_matmul")


def product(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    """`alpha * (a @ b)` of shape (l, m, n), in `out_dtype`.

    Params: `a_major`, `b_major`, `out_dtype`, `alpha`, `precision` (canonical), `tile` (None: the planner's), and the
    fields of a `Config`.
    """
    return matmul_p.bind(*match_varying(a, b), **params)


def fused_product(
    a: jax.Array, b: jax.Array, bias: jax.Array | None, residual: jax.Array | None = None, **params: Any
) -> jax.Array:
    """`activation(alpha * (a @ b) + bias) + residual`; `bias` is (n,) and `residual` (l, m, n), both in `out_dtype`.

    Params: `product`'s and `activation`.
    """
    rest = [x for x in (bias, residual) if x is not None]
    if not rest and params["activation"] is None:
        return product(a, b, **_linear(params))
    return fused_matmul_p.bind(*match_varying(a, b, *rest), **params)


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


def _gradient(x: Any, y: Any, aval: Any, *, out_dtype: Any, tile: Any, precision: Any, **params: Any) -> jax.Array:
    """x @ y as the cotangent of an operand `aval`. The forward's `tile` says nothing about this product.

    A cotangent wider than the operands (`out_dtype=float32`) is rounded to their dtype: that is what the kernels
    multiply, and the gradient is rounded to it anyway. Not so to 8-bit floats: these are widened instead.
    """
    dtype = _factor_dtype(aval.dtype, out_dtype)
    is_widened = dtype != aval.dtype
    if is_widened and is_algorithm(precision):
        precision = None  # it names the operands' dtype
    x, y = x.astype(dtype), y.astype(dtype)
    params |= {"tile": None, "precision": precision}
    is_summed = aval.shape[0] == 1 and max(x.shape[0], y.shape[0]) > 1
    if not (is_summed or is_widened):
        return product(x, y, out_dtype=aval.dtype, **params)
    gradient = product(x, y, out_dtype=jnp.dtype("float32"), **params)
    return round_to(jnp.sum(gradient, axis=0, keepdims=True) if is_summed else gradient, aval.dtype)


def _factor_dtype(operand: Any, cotangent: Any) -> Any:
    """In which dtype the gradient of an operand is multiplied: its own, but the cotangent's, at least two bytes wide,
    for an 8-bit float."""
    if str(operand) not in FP8_DTYPES:
        return operand
    return jnp.dtype("bfloat16") if str(cotangent) in FP8_DTYPES else cotangent


def _fused_matmul_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    """The tangent of the linear part, times the activation's derivative; the residual's comes on top."""
    a, b, *rest = primals
    a_dot, b_dot, *rest_dots = (None if type(t) is ad.Zero else t for t in tangents)
    dot_of_rank = dict(zip(map(jnp.ndim, rest), rest_dots, strict=True))
    bias_dot, residual_dot = dot_of_rank.get(1), dot_of_rank.get(3)
    linear = _linear(params)
    terms = []
    if a_dot is not None:
        terms.append(product(a_dot, b, **linear))
    if b_dot is not None:
        terms.append(product(a, b_dot, **linear))
    is_needed = bool(terms) or bias_dot is not None
    out, derivative = _with_derivative(primals, is_needed=is_needed, **params)
    if bias_dot is not None:
        terms.append(jnp.broadcast_to(bias_dot, out.shape))
    if is_needed:
        terms = [derivative(functools.reduce(jnp.add, terms))]
    if residual_dot is not None:
        terms.append(residual_dot)
    return out, functools.reduce(jnp.add, terms)


def _with_derivative(
    primals: Any, *, is_needed: bool, activation: str | None, out_dtype: Any, **params: Any
) -> tuple[jax.Array, Derivative]:
    """The result, and the activation's derivative as a linear function of tangents."""
    (a, b), (bias, residual) = primals[:2], extras(primals)
    if activation is None or not is_needed:
        return fused_product(a, b, bias, residual, activation=activation, out_dtype=out_dtype, **params), _identity
    with_derivative = _relu_with_derivative if activation == "relu" else _gated_with_derivative
    return with_derivative(a, b, bias, residual, activation=activation, out_dtype=out_dtype, **params)


def _identity(tangent: jax.Array) -> jax.Array:
    return tangent


def _relu_with_derivative(
    a: Any, b: Any, bias: Any, residual: Any, *, out_dtype: Any, **params: Any
) -> tuple[jax.Array, Derivative]:
    """The result tells where relu is flat; at 0 it is, as `jax.nn.relu` is.

    A residual hides which that is, and is added to the activation's float32: rounded once, as without differentiation.
    """

    def mask(tangent: jax.Array) -> jax.Array:
        return lax.select(active > 0, tangent, jnp.zeros_like(tangent))

    if residual is None:
        active = fused_product(a, b, bias, out_dtype=out_dtype, **params)
        return active, mask
    f32 = jnp.dtype("float32")
    active = fused_product(a, b, None if bias is None else bias.astype(f32), out_dtype=f32, **params)
    return round_to(active + residual.astype(f32), out_dtype), mask


def _gated_with_derivative(
    a: Any, b: Any, bias: Any, residual: Any, *, activation: str, out_dtype: Any, **params: Any
) -> tuple[jax.Array, Derivative]:
    """gelu's and silu's derivatives need what goes in: the kernel returns that, in the result's dtype (at least two
    bytes wide), and XLA does the rest. What is kept for a gradient is the derivative, in the same dtype."""
    dtype = jnp.dtype("bfloat16") if str(out_dtype) in FP8_DTYPES else out_dtype
    bias = None if bias is None else bias.astype(dtype)
    x = fused_product(a, b, bias, activation=None, out_dtype=dtype, **params)
    wide = x.astype(jnp.float32)
    _, slope = jax.jvp(functools.partial(activate, activation=activation), (wide,), (jnp.ones_like(wide),))
    slope = slope.astype(dtype)
    out = apply_epilogue(wide, None, residual, alpha=1.0, activation=activation, out_dtype=out_dtype)
    return out, lambda tangent: (slope * tangent.astype(dtype)).astype(tangent.dtype)


for _primitive in (matmul_p, fused_matmul_p):
    _primitive.def_impl(functools.partial(_impl, _primitive))
    _primitive.def_abstract_eval(_matmul_shape_rule)
ad.defbilinear(matmul_p, _matmul_transpose_a, _matmul_transpose_b)
ad.primitive_jvps[fused_matmul_p] = _fused_matmul_jvp
