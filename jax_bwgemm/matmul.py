"""`matmul`: argument checks and the canonical form of its operands. Knows no primitive rule, no device and no HLO."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bwgemm.config import Config, report_fallback, resolve
from jax_bwgemm.primitive import fused_product
from jax_bwgemm.problem import ACTIVATIONS, Problem
from jax_bwgemm.reference import apply_epilogue
from jax_bwgemm.shape_rules import broadcast_batch, check_bias, matmul_shape, problem_of, result_dtype
from jax_bwgemm.tile import Tile, why_not_dtypes

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the primitive takes: `a` (la, m, k) or (la, k, m), `b` (lb, k, n) or (lb, n, k), as the majors say."""

    a: Array
    b: Array
    a_major: str = "k"
    b_major: str = "n"

    def problem(self, bias: Array | None, params: dict[str, Any]) -> Problem:
        operands = (self.a, self.b) if bias is None else (self.a, self.b, bias)
        return problem_of(operands, a_major=self.a_major, b_major=self.b_major, **params)

    def multiply(self, bias: Array | None, params: dict[str, Any], settings: Config) -> Array:
        """Binds the primitive: (l, m, n)."""
        majors = {"a_major": self.a_major, "b_major": self.b_major}
        bound = dataclasses.asdict(settings) | {"device": settings.planned_device}
        return fused_product(self.a, self.b, bias, **majors, **params, **bound)


def matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    alpha: float = 1.0,
    bias: Any = None,
    activation: str | None = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
) -> Array:
    """`activation(alpha * (a @ b) + bias)`, accumulated in float32 and rounded once.

    Shapes follow `jnp.matmul`: vectors, matrices, and stacks of matrices whose batch dimensions broadcast. bfloat16
    and float16 products run on this package's kernels on Hopper and Blackwell GPUs; everything else, and every problem
    that no kernel can do, is computed by XLA with the same result, and `on_fallback` decides how loudly. Works under
    `jit`, `grad`, `jvp`, `vmap`, `linear_transpose`, `checkpoint`, `scan` and `shard_map`.

    Args:
      a: array of shape (k,) or (..., m, k).
      b: array of shape (k,) or (..., k, n).
      out_dtype: bfloat16, float16 or float32; None for what `jnp.matmul` returns. If it is wider than the operands, the
        gradients round the incoming cotangent to the operands' dtype (scale the loss of a float16 model).
      alpha: a Python number.
      bias: array of shape (n,), rounded to the output dtype.
      activation: None or "relu".
      tile: a `Tile` or its name, such as "128x256x64_cta1_cluster2x1", for this product but not for its gradients; None
        lets the planner choose.
      on_fallback: "warn" (once per problem and reason), "ignore" or "error"; None for the `config`'s.
      device: "h100", "h200", "b200" or "b300"; None for the `config`'s, else the CUDA device of this process.
      emulate: "sm_90a", "sm_100a" or "sm_103a": on platforms other than CUDA the kernels of this target run, slowly and
        checked, in the PTX emulator; "off" for XLA; None for the `config`'s. A target is refused on CUDA.

    Returns:
      An array of `jnp.matmul`'s shape.

    Raises:
      ValueError: shapes that do not fit, a `tile` that cannot compute the problem, or `emulate` on CUDA.
      TypeError: an operand that is no array, or an `alpha` that is no number.
      FallbackError: XLA would take over, under `on_fallback="error"`.

    Example:
      >>> x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
      >>> jax.jit(jax_bwgemm.matmul)(x, w).shape
      (512, 128)
    """
    a, b = as_array("a", a), as_array("b", b)
    settings = resolve(on_fallback, device, emulate)
    shape = matmul_shape(a.shape, b.shape)
    params = checked_params(a, b, out_dtype=out_dtype, alpha=alpha, bias=bias, activation=activation, tile=tile)
    if bias is not None:
        bias = jnp.asarray(bias).astype(params["out_dtype"])
    operands = stack(a, b)
    problem = operands.problem(bias, params)
    if reason := why_not_dtypes(problem):
        report_fallback(settings.on_fallback, str(problem), reason)
        return _matmul_by_xla(a, b, bias, **params)
    return operands.multiply(bias, params, settings).reshape(shape)


def checked_params(
    a: Any, b: Any, *, out_dtype: Any, alpha: Any, bias: Any, activation: str | None, tile: Tile | str | None
) -> dict[str, Any]:
    """The primitive's params that the caller chooses, or an error that quotes the argument."""
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"`alpha` requires a Python number, got {alpha!r}; multiply by an array afterwards")
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` requires one of {ACTIVATIONS}, got {activation!r}")
    if bias is not None:
        check_bias(bias, a.shape, b.shape)
    tile = Tile.from_str(tile) if isinstance(tile, str) else tile
    dtype = result_dtype(a.dtype, b.dtype, out_dtype)
    return {"out_dtype": dtype, "alpha": float(alpha), "activation": activation, "tile": tile}


def stack(a: Array, b: Array) -> Operands:
    """Reshapes to the primitive's operands; copies only a batch that has to be repeated.

    A vector `b` is taken as the rows, so that the result is contiguous; a shared `b` meets all rows of `a` at once.
    """
    if b.ndim == 1:
        return Operands(b.reshape(1, 1, b.size), a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1]), b_major="k")
    a = a[None] if a.ndim == 1 else a
    batch = broadcast_batch(a.shape[:-2], b.shape[:-2])
    a, b = _flat_batch(a, batch), _flat_batch(b, batch)
    if b.shape[0] == 1:
        a = a.reshape(1, a.shape[0] * a.shape[1], a.shape[2])
    return Operands(a, b)


def _flat_batch(x: Array, batch: tuple[int, ...]) -> Array:
    """(l, rows, cols), or (1, rows, cols) for a matrix that the whole batch shares."""
    num, matrix = math.prod(x.shape[:-2]), x.shape[-2:]
    if num != 1 and x.shape[:-2] != batch:
        x, num = jnp.broadcast_to(x, (*batch, *matrix)), math.prod(batch)
    return x.reshape(num, *matrix)


def as_array(name: str, x: Any) -> Array:
    """As `jnp.matmul` takes them: arrays and scalars, but no lists."""
    is_array = (hasattr(x, "shape") and hasattr(x, "dtype")) or hasattr(x, "__jax_array__")
    if not is_array and not isinstance(x, numbers.Number):
        raise TypeError(f"`{name}` requires an array, got {type(x).__name__}")
    return jnp.asarray(x)


def _matmul_by_xla(
    a: Array, b: Array, bias: Array | None, *, out_dtype: np.dtype, alpha: float, activation: str | None, tile: Any
) -> Array:
    """For dtypes that are not ours. An epilogue is evaluated in float32, or wider where the result is."""
    if alpha == 1.0 and activation is None and bias is None:
        return jnp.matmul(a, b, preferred_element_type=out_dtype)
    acc = jnp.matmul(a, b, preferred_element_type=jnp.promote_types(out_dtype, jnp.float32))
    return apply_epilogue(acc, bias, alpha=alpha, activation=activation, out_dtype=out_dtype)
