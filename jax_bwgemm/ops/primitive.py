"""The primitives and their differentiation rules. Knows no device: that is `lowering`; `batching` has the vmap rules.

`matmul_p` is `alpha` times a contraction of two operands of any rank, linear in each. `fused_matmul_p` has an epilogue,
with operands and perhaps further results of its own, and is differentiated through `matmul_p`. See
docs/architecture.md, "The primitive's operands".
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.ops.precision import is_algorithm
from jax_bwgemm.ops.reference import aligned, finish, round_to, sums_dtype
from jax_bwgemm.ops.shape_rules import _matmul_shape_rule, explicit_sharding, match_varying, of_rank, sharded_alike

# What JAX says of where a product comes from, in a profile or a report, is the user's line.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)

matmul_p = Primitive("bwgemm_matmul")
fused_matmul_p = Primitive("bwgemm_fused_matmul")


def product(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    """`alpha` times the contraction of a and b, in `out_dtype`.

    Params: `contraction`, `out_dtype`, `epilogue` (a scale at most), `precision` (canonical), `tile` (None: the
    planner's), `out_sharding` (over explicit mesh axes; None: as the operands') and `settings` (a `Config`).
    """
    out: jax.Array = matmul_p.bind(*match_varying(a, b), **_whole(params))
    return out


def fused_product(a: jax.Array, b: jax.Array, operands: Sequence[jax.Array], **params: Any) -> tuple[jax.Array, ...]:
    """The results of `epilogue`, all of the contraction's shape; `operands` as it names them, in `out_dtype`, with the
    modes that the contraction's `extras` say.

    Params: `product`'s, with any epilogue, and perhaps `in_place`: which of `operands`, shaped as the result is, a
    kernel may store its first result over, for nobody reads it behind it, as what a loop adds up in. Derivatives drop
    it. Of a symmetric contraction, b is a: it is linear in neither.
    """
    if is_linear(params["epilogue"]) and not params["contraction"].symmetric:
        return (product(a, b, **params),)
    args, params = match_varying(a, b, *operands), _whole(params)
    count = len(params["contraction"].factors)
    avals = list(map(jax.typeof, args))
    extras, sharding = sharded_alike(args[count:], avals, params["contraction"], params["out_sharding"])
    return tuple(fused_matmul_p.bind(*args[:count], *extras, **params | {"out_sharding": sharding}))


def _whole(params: dict[str, Any]) -> dict[str, Any]:
    return params | {"out_sharding": of_rank(params["out_sharding"], len(params["contraction"].out))}


@functools.lru_cache(maxsize=1024)
def is_linear(epilogue: Epilogue) -> bool:
    """Whether it is a scale, or nothing."""
    return epilogue in (Epilogue(), chain(alpha=dict(epilogue.scalars).get("alpha", 1.0)))


def compiled(primitive: Primitive) -> Callable[..., Any]:
    """What runs it outside of `jax.jit`: compiles for the operands, under `jax.disable_jit` too.

    JAX knows its own primitives by `_apply_primitive`: where one makes a NaN, `jax_debug_nans` names it, and does not
    run it again op by op, which would be this function again.
    """

    def bind(*args: jax.Array, params: tuple[tuple[str, Any], ...]) -> Any:
        return primitive.bind(*args, **dict(params))

    bind.__name__ = bind.__qualname__ = primitive.name
    bind._apply_primitive = True  # type: ignore[attr-defined]
    run = jax.jit(bind, static_argnames="params")

    def impl(*args: jax.Array, **params: Any) -> Any:
        with jax.disable_jit(False):
            return run(*args, params=tuple(sorted(params.items())))

    return impl


def _matmul_transpose_a(ct: Any, a: Any, b: Any, *, contraction: Contraction, **params: Any) -> jax.Array:
    return _gradient(ct, b, a.aval, contraction=contraction.gradient_of_a, **params)


def _matmul_transpose_b(ct: Any, a: Any, b: Any, *, contraction: Contraction, **params: Any) -> jax.Array:
    return _gradient(a, ct, b.aval, contraction=contraction.gradient_of_b, **params)


def _gradient(x: Any, y: Any, aval: Any, *, out_dtype: Any, tile: Any, precision: Any, **params: Any) -> jax.Array:
    """x @ y as the cotangent of an operand `aval`, stored and sharded as that is: every factor stays where it is. The
    forward's `tile` says nothing about this product.

    A cotangent wider than the operands (`out_dtype=float32`) is rounded to their dtype: that is what the kernels
    multiply, and the gradient is rounded to it anyway. Not so to 8-bit floats: these are widened instead.
    """
    dtype = factor_dtype(aval.dtype, out_dtype)
    is_widened = dtype != aval.dtype
    if is_widened and is_algorithm(precision):
        precision = None  # it names the operands' dtype
    x, y = x.astype(dtype), y.astype(dtype)
    params |= {"tile": None, "precision": precision, "out_sharding": explicit_sharding(aval)}
    if not is_widened:
        return product(x, y, out_dtype=aval.dtype, **params)
    return round_to(product(x, y, out_dtype=jnp.dtype("float32"), **params), aval.dtype)


def factor_dtype(operand: Any, cotangent: Any) -> Any:
    """In which dtype the gradient of an operand is multiplied: its own, but the cotangent's, at least two bytes wide,
    for an 8-bit float."""
    if str(operand) not in FP8_DTYPES:
        return operand
    return jnp.dtype("bfloat16") if str(cotangent) in FP8_DTYPES else cotangent


def _fused_transpose(cts: Any, *args: Any, contraction: Contraction, epilogue: Epilogue, **params: Any) -> list[Any]:
    """In what the results are linear in, which is for JAX to see: of the product as its own, and the epilogue by JAX's
    operations."""
    asked = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    count, out_dtype = len(contraction.factors), params["out_dtype"]
    bare = dataclasses.replace(contraction, extras=(), num_bs=1, reduced=(), symmetric=False)
    own = params | {"contraction": bare, "epilogue": Epilogue(), "out_dtype": sums_dtype(out_dtype), "tile": None}
    own.pop("in_place", None)

    def unfused(*values: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(asked, values, strict=True))
        a, *others = (given.get(i, x) for i, x in enumerate(args))
        bs, extras = others[: count - 1], others[count - 1 :]
        sums = [product(a, b, **own) for b in bs]
        return finish(sums, epilogue, aligned(extras, contraction), out_dtype, contraction.reduced_axes)

    found = iter(jax.linear_transpose(unfused, *(args[i].aval for i in asked))(tuple(map(ad.instantiate_zeros, cts))))
    return [next(found) if i in asked else None for i in range(len(args))]


for _primitive in (matmul_p, fused_matmul_p):
    _primitive.def_impl(compiled(_primitive))
fused_matmul_p.multiple_results = True
fused_matmul_p.def_abstract_eval(_matmul_shape_rule)
matmul_p.def_abstract_eval(lambda *avals, **params: _matmul_shape_rule(*avals, **params)[0])
ad.defbilinear(matmul_p, _matmul_transpose_a, _matmul_transpose_b)
ad.primitive_transposes[fused_matmul_p] = _fused_transpose

try:
    # The primitives whose results `checkify.float_checks` looks at: no public name yet.
    from jax._src.checkify import error_checks, nan_error_check

    error_checks.update({p: functools.partial(nan_error_check, p) for p in (matmul_p, fused_matmul_p)})
except ImportError:  # these checks then see a NaN where JAX first computes with it
    pass
