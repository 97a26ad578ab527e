"""What a case computes, as JAX functions of its operands: with our kernels, or as plain JAX. Knows no clock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_bwgemm
from jax_bwgemm.bench.cases import EPILOGUE_ACTIVATIONS, Case
from jax_bwgemm.problem import ACTIVATIONS

Product = Callable[..., Any]
FUNCTIONS: dict[str, Product] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def plain(case: Case, dot: Product | None = None) -> Product:
    """The formula as one would write it; `dot` is a product (a, b) -> a @ b of `out_dtype`, `jnp.matmul` by default."""
    dot = dot or functools.partial(jnp.matmul, preferred_element_type=jnp.dtype(case.out_dtype))

    def product(a: Any, b: Any, up: Any = None, bias: Any = None, residual: Any = None) -> Any:
        a, b = _as_matrices(case, a, b)
        if up is not None:
            return jax.nn.silu(dot(a, b)) * dot(a, _as_matrices(case, a, up)[1])
        return _finish(case.steps, dot(a, b), bias, residual)

    return product


def ours(case: Case, on_fallback: str) -> Product:
    """`jax_bwgemm.matmul` with as much of the epilogue as it takes, in order; the rest is plain JAX."""
    matmul = functools.partial(jax_bwgemm.matmul, out_dtype=jnp.dtype(case.out_dtype), on_fallback=on_fallback)
    if case.epilogue == "swiglu":
        return plain(case, matmul)
    rest = _not_fused(case.steps)
    activation = next((step for step in case.steps if step in ACTIVATIONS), None)

    def product(a: Any, b: Any, bias: Any = None, residual: Any = None) -> Any:
        a, b = _as_matrices(case, a, b)
        fused = matmul(a, b, bias=bias, activation=activation, residual=None if "residual" in rest else residual)
        return _finish(rest, fused, None, residual)

    return product


def _not_fused(steps: tuple[str, ...]) -> tuple[str, ...]:
    """From the first activation that `matmul` lacks on: what comes after it cannot be fused either."""
    lacking = [step in EPILOGUE_ACTIVATIONS and step not in ACTIVATIONS for step in steps]
    return steps[lacking.index(True) :] if True in lacking else ()


def _finish(steps: tuple[str, ...], x: Any, bias: Any, residual: Any) -> Any:
    for step in steps:
        x = FUNCTIONS[step](x) if step in FUNCTIONS else x + {"bias": bias, "residual": residual}[step]
    return x


def _as_matrices(case: Case, a: Any, b: Any) -> tuple[Any, Any]:
    a = a.swapaxes(-1, -2) if case.form[0] == "t" else a
    return a, b.swapaxes(-1, -2) if case.form[1] == "t" else b
