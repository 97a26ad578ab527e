"""`matmul`: argument checks and the canonical form of its operands. Knows no primitive rule, no device and no HLO."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_bwgemm.contract import check_tile, refuse, why_not_ours
from jax_bwgemm.epilogues import matmul_with
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.ops.precision import canonical
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.ops.reference import by_matmul
from jax_bwgemm.ops.shape_rules import (
    check_array,
    check_bias,
    check_real,
    check_residual,
    contraction_of,
    matmul_shape,
    named,
    result_dtype,
    viewed,
)
from jax_bwgemm.runtime.config import Config, resolve

Array = jax.Array
Shape = tuple[int, ...]
Operand = TypeVar("Operand", jax.Array, jax.ShapeDtypeStruct)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: DTypeLike | None = None,
    alpha: float = 1.0,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    precision: PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
    deterministic: str | None = None,
) -> Array:
    """`activation(alpha * (a @ b) + bias) + residual`, accumulated in float32 (integers: int32; float8 on Hopper: see
    `precision`) and rounded once.

    Shapes follow `jnp.matmul`: vectors, matrices, and stacks of matrices whose batch dimensions broadcast. On Hopper
    and Blackwell GPUs this package's kernels compute products of two bfloat16, two float16, two float32 (as TF32), any
    two of float8_e4m3fn and float8_e5m2, and any two of int8 and uint8 into int32. Everything else, and every problem
    that no kernel can do, is computed by XLA with the same result, and `on_fallback` decides how loudly. Where only the
    epilogue has no kernel, one computes the product in float32 and XLA the rest, and a product that XLA is expected to
    be done with sooner is left to it: `explain` says so, and it is no fallback. Works under `jit`, `grad`, `jvp`,
    `vmap`, `linear_transpose`, `checkpoint`, `scan` and `shard_map`, and of sharded operands: every device computes its
    part, and what moves is what `jnp.matmul` moves.

    A float8 result saturates at the largest finite value; NaN stays NaN. The gradient of a float8 operand is multiplied
    in the cotangent's dtype, and in bfloat16 if that is float8 too, before it is rounded to the operand's, saturating.

    Args:
      a: array of shape (k,) or (..., m, k).
      b: array of shape (k,) or (..., k, n).
      out_dtype: bfloat16, float16, float32 or a float8; int32 for integers. None for what `jnp.matmul` returns: the
        dtype of two equal operands (so an int8 product wraps around, and is XLA's), an error for two float8 that
        differ. If it is wider than operands of two bytes, the gradients round the incoming cotangent to the operands'
        dtype (scale the loss of a float16 model).
      alpha: a Python number.
      bias: array of shape (n,), rounded to the output dtype; added to integers as an integer, as a residual is.
      activation: None, "relu", "gelu" (the tanh form, as `jax.nn.gelu` has it by default), "silu" (swish); or
        "sigmoid", "tanh", "gelu_exact" (by erf), "squared_relu", "leaky_relu" (slope 0.01), of which no kernel ships:
        they are compiled on demand, or XLA's. Kernels compute gelu and silu from float32, for bfloat16 and float8
        results within 2**-12 of their argument, for others within 2**-18 of the result until that is tiny. Under
        differentiation in `a`, `b` or `bias`, the kernel of any but relu also returns its argument, rounded to the
        output dtype (float8: bfloat16): of that the derivative is made, and it is all that a gradient keeps.
      residual: array of the result's shape (nothing broadcasts), rounded to the output dtype; added last, in float32.
      epilogue: a function that is called with the float32 product and the `operands`, in place of `alpha`, `bias`,
        `activation` and `residual`; it is traced, and must be pointwise in the product, all of it in float32: to
        convert to bfloat16 or float16 in it, and back, changes nothing. It may return several arrays of
        the product's shape, as any pytree, and beside them sums and largest values of such, `jnp.sum(y, axis)` and
        `jnp.max(y, axis)` over any axes: kernels reduce rows or columns of what is in their registers, in one order.
        These are float32, of values that are not rounded, and anything may be made of them (a mean, a norm), by XLA;
        but nothing of the product's own shape may read them. What kernels have no operation for is said, and XLA
        computes it from the float32 product. Its derivative is JAX's, of a largest value from what is reduced as
        rounded to the output dtype (float8: bfloat16).
      operands: arrays that broadcast to the result's shape, for `epilogue`, which gets them in float32: vectors along m
        or n and matrices, rounded to the output dtype, as a bias is, and as what the function makes of such alone.
        Scalars, such as a scale that was computed, are float32; a number of Python's or NumPy's is a part of the
        function.
      precision: as for `lax.dot_general`, for float32 operands: None takes `jax.default_matmul_precision`; "highest"
        ("float32") is XLA's, as are algorithms other than TF32_TF32_F32; all else is TF32, as in JAX on these GPUs.
        For float8, Hopper's tensor cores keep some 12 bits of a sum (Blackwell's float32); the algorithm
        ANY_F8_ANY_F8_F32 has them sum 128 products at a time, and these sums added in float32 (`docs/numerics.md`).
      out_sharding: as for `jnp.matmul`: a `NamedSharding`, or a `PartitionSpec` on the mesh that `jax.set_mesh` made
        current, of the result over explicit mesh axes; None for what follows from the operands'.
      tile: a `Tile` or its name, such as "128x256x64_cta1_cluster2x1", for this product but not for its gradients; None
        lets the planner choose.
      on_fallback: "warn" (once per problem and reason), "ignore" or "error"; None for the `config`'s.
      device: "h100", "h200", "b200" or "b300"; None for the `config`'s, else the CUDA device of this process.
      emulate: "sm_90a", "sm_100f" or "sm_100a": on platforms other than CUDA the kernels of this target run, slowly and
        checked, in the PTX emulator; "off" for XLA; None for the `config`'s. A target is refused on CUDA.
      deterministic: "run" or "batch", as for `config`, which None takes it from.

    Returns:
      An array of `jnp.matmul`'s shape; of an `epilogue` what that returns, arrays of this shape in the output dtype.

    Raises:
      ValueError: shapes that do not fit, an `epilogue` that is not pointwise but for sums and largest values, or that
        returns no array of the product's shape, or another one that the product has no part in, operands that need an
        `out_dtype`, complex numbers for a real result, a `precision` that lax does not know, a `tile` that cannot
        compute the problem on the `device` (or on any, where that is open), or not as `deterministic` says, or
        `emulate` on CUDA.
      TypeError: an operand that is no array of numbers, an `out_dtype` or a `tile` that is none, an `alpha` that is no
        number, or `operands` that are no sequence.
      FallbackError: XLA would take over, under `on_fallback="error"`.

    Example:
      >>> x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
      >>> jax.jit(jax_bwgemm.matmul)(x, w).shape
      (512, 128)
      >>> y = jax_bwgemm.matmul(x, w, epilogue=lambda acc, b, r: jax.nn.silu(acc + b) * r, operands=(bias, gate))
      >>> y, amax = jax_bwgemm.matmul(x, w, epilogue=lambda acc: (acc, jnp.max(jnp.abs(acc))))
    """
    a, b = as_array("a", a), as_array("b", b)
    weak = out_dtype is None and is_weak(a) and is_weak(b)
    a, b = of_one_dtype(a, b)
    settings = resolve(on_fallback, device, emulate, deterministic=deterministic)
    if not isinstance(operands, Sequence):
        raise TypeError(f"`operands` requires a sequence of arrays, got {type(operands).__name__}: pass (operand,)")
    if epilogue is not None or operands:
        if epilogue is None or alpha != 1.0 or any(x is not None for x in (bias, activation, residual)):
            raise ValueError(
                "`operands` requires an `epilogue`, and that no `alpha`, `bias`, `activation` or `residual` beside it: "
                "make them a part of the function"
            )
        own = checked_params(a, b, out_dtype=out_dtype, tile=tile, precision=precision, out_sharding=out_sharding)
        own.pop("epilogue")
        for name, x in (("a", a), ("b", b)):
            check_real(name, x, own["out_dtype"])
        fused: Array = matmul_with(a, b, epilogue, operands, settings=settings, **own)  # of several, a tuple
        return fused
    steps: dict[str, Any] = {"alpha": alpha, "bias": bias, "activation": activation, "residual": residual}
    params = checked_params(
        a, b, out_dtype=out_dtype, **steps, tile=tile, precision=precision, out_sharding=out_sharding
    )
    for name, x in (("a", a), ("b", b)):
        check_real(name, x, params["out_dtype"])
    given = (("bias", bias), ("residual", residual))
    static, extras = tuple(params.items()), tuple(as_array(name, x) for name, x in given if x is not None)
    weak = weak and all(map(is_weak, extras))
    reason = _why_not_ours(a.dtype, b.dtype, static)
    if reason:
        refuse(settings, posed((a, b, *extras), params), reason)
    elif params["tile"] is not None:
        check_tile(params["tile"], posed((a, b, *extras), params), settings)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (a, b, *extras))
    # Not in a trace: jax 0.11 lowers an inlined function apart, where nobody sees of what its operands are transposes.
    return (_matmul if is_traced else _compiled)(a, b, extras, static, None if reason else settings, weak)


def _matmul(
    a: Array,
    b: Array,
    extras: tuple[Any, ...],
    params: tuple[tuple[str, Any], ...],
    settings: Config | None,
    weak: bool = False,
) -> Array:
    """Without `settings` it is XLA's. `weak`: it is weakly typed, as its operands are."""
    if weak:
        return weakly_typed(_matmul(a, b, extras, params, settings))
    given = dict(params)
    extras = tuple(jnp.asarray(x).astype(given["out_dtype"]) for x in extras)
    if settings is None:
        return by_matmul(a, (b,), extras, **given)
    contraction, (axes_a, axes_b) = contraction_of(a.shape, b.shape, given["epilogue"])
    a, b = (lax.squeeze(x, axes) if axes else x for x, axes in ((a, axes_a), (b, axes_b)))
    return fused_product(a, b, extras, contraction=contraction, settings=settings, **given)[0]


_compiled = jax.jit(_matmul, static_argnames=("params", "settings", "weak"))


def posed(operands: Sequence[Any], params: dict[str, Any]) -> Problem:
    """The `Problem` of a, b and what the epilogue names, of which only shapes and dtypes are read."""
    contraction, axes = contraction_of(operands[0].shape, operands[1].shape, params["epilogue"])
    shapes = [jnp.shape(x) for x in operands]
    for i in range(2):
        shapes[i] = tuple(size for j, size in enumerate(shapes[i]) if j not in axes[i])
    avals = (jax.ShapeDtypeStruct(shape, jnp.result_type(x)) for shape, x in zip(shapes, operands, strict=True))
    return viewed(tuple(avals), contraction=contraction, **params)[1]


def checked_params(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    alpha: Any = 1.0,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    tile: Tile | str | None = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> dict[str, Any]:
    """The primitive's params that the caller chooses, or an error that quotes the argument."""
    dtype = result_dtype(a.dtype, b.dtype, out_dtype)
    if bias is not None:
        check_real("bias", bias, dtype)
        check_bias(bias, a.shape, b.shape)
    if residual is not None:
        check_real("residual", residual, dtype)
        check_residual(residual, matmul_shape(a.shape, b.shape))
    tile = tile if tile is None or isinstance(tile, Tile) else Tile.from_str(tile)
    epilogue = chain(python_number("alpha", alpha), bias is not None, activation, residual is not None)
    return {
        "out_dtype": dtype,
        "epilogue": epilogue,
        "tile": tile,
        "precision": canonical(precision),
        "out_sharding": named(out_sharding),
    }


def python_number(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"`{name}` requires a Python number, got {x!r}; multiply by an array afterwards")
    try:
        return float(x)
    except OverflowError:
        rule = f"a number of at most {sys.float_info.max:.2g}, which a float holds"
        raise ValueError(f"`{name}` requires {rule}, got a larger {type(x).__name__}: scale in steps") from None


@functools.lru_cache(maxsize=1024)
def _why_not_ours(a_dtype: Any, b_dtype: Any, params: tuple[tuple[str, Any], ...]) -> str | None:
    """`why_not_ours` of any sizes."""
    given = dict(params)
    dtypes = str(a_dtype), str(b_dtype), str(given["out_dtype"])
    return why_not_ours(Problem(1, 1, 1, 1, *dtypes, epilogue=given["epilogue"]), given["precision"])


def as_array(name: str, x: Any) -> Array:
    """As `jnp.matmul` takes them: arrays of numbers and scalars, but no lists. TypeError for all else."""
    check_array(name, x)
    if _is_shape(x):
        raise TypeError(f"`{name}` requires an array, got {x}: `explain` and `jax.eval_shape` take those")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def of_one_dtype(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """A weakly typed operand, as `jnp.full(shape, 1.0)` is, takes the other's dtype where JAX promotes to that. Also of
    what stands for an array."""
    if a.dtype == b.dtype or not (is_weak(a) or is_weak(b)):
        return a, b
    dtype = jax.eval_shape(lambda *x: jnp.zeros((), jnp.result_type(*x)), a, b).dtype
    found: list[Any] = [
        x.astype(dtype) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, dtype) for x in (a, b)
    ]
    return found[0], found[1]


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def is_weak(x: Any) -> bool:
    return bool(jax.typeof(x).weak_type)


def weakly_typed(x: Array) -> Array:
    """As JAX types what is made of Python's numbers alone: where it meets another array, that one's dtype holds."""
    out: Array = lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    return out
