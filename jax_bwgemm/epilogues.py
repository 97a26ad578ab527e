"""`matmul(epilogue=)`: a product with any pointwise function of its sums behind it, and reductions of such."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bwgemm.contract import contract, leave
from jax_bwgemm.facts.contraction import of_matmul
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.ops.functions import traced
from jax_bwgemm.ops.reference import round_to, sums_dtype
from jax_bwgemm.ops.shape_rules import check_real, matmul_shape
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.config import Config

Array = jax.Array


def matmul_with(
    a: Array,
    b: Array,
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    *,
    out_dtype: Any,
    tile: Tile | None,
    precision: Any,
    out_sharding: Any,
    settings: Config,
) -> Any:
    """`epilogue(a @ b, *operands)`, in float32 (or wider, of wider operands); arrays of its shape are rounded once, to
    `out_dtype`, and what is made of their reductions is not.

    What a kernel cannot have is computed by XLA from the float32 product, as loudly as `settings` say.
    """
    if not callable(epilogue):
        raise TypeError(f"`epilogue` requires a function of the sums and the operands, got {type(epilogue).__name__}")
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"`epilogue` requires a floating `out_dtype`, got {out_dtype}: pass `out_dtype=jnp.float32`")
    shape = matmul_shape(a.shape, b.shape)
    values = [_operand(i, x, shape, out_dtype) for i, x in enumerate(operands)]
    contraction, *axes = of_matmul(a.shape, b.shape)
    a, b = (lax.squeeze(x, own) if own else x for x, own in zip((a, b), axes, strict=True))
    wide = sums_dtype(out_dtype)
    options = {"precision": precision, "out_sharding": out_sharding, "settings": settings}

    def product() -> Array:
        return contract(a, b, contraction=contraction, out_dtype=wide, tile=tile, **options)[0]

    with record.listed():  # nothing runs yet, and nothing need be said
        sums = jax.eval_shape(product)
    function = traced(epilogue, sums, values)
    found = function.bound(contraction) if wide == jnp.float32 else f"it is computed in {wide}"
    if isinstance(found, str):
        name = getattr(epilogue, "__name__", type(epilogue).__name__)
        leave(settings.on_fallback, f"the epilogue {name} of a product of {out_dtype}{list(shape)}", found)
        given = (x if x.dtype == jnp.bool_ else x.astype(wide) for x in values)
        leaves = jax.tree.leaves(epilogue(product(), *given))
        rounded = [round_to(x, out_dtype) if i in function.matrices else x for i, x in enumerate(leaves)]
        return jax.tree.unflatten(function.tree, rounded)
    results = contract(
        a,
        b,
        found.operands,
        contraction=found.contraction,
        epilogue=found.epilogue,
        out_dtype=out_dtype,
        tile=tile,
        **options,
    )
    return function.finished(results)


def _operand(i: int, x: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    name = f"operands[{i}]"
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        try:
            x = float(x)  # of any size, where JAX has 32 bits
        except OverflowError:
            raise ValueError(f"`{name}` requires a number that float32 has, got one of {x.bit_length()} bits") from None
    check_real(name, x, dtype)
    value: Any = np.asarray(x) if isinstance(x, numbers.Number) else jnp.asarray(x)  # a number stays known
    try:
        fits = jnp.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`{name}` requires a shape that broadcasts to the result's {shape}, got {value.shape}")
    found: Array = value
    return found
