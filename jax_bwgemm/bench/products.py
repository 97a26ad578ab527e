"""What a case computes, as JAX functions of its operands: with our kernels, or as plain JAX. Knows no clock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_bwgemm
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.facts.epilogue import ACTIVATIONS
from jax_bwgemm.ops.reference import OPS

Product = Callable[..., Any]


def plain(case: Case, dot: Product | None = None) -> Product:
    """The formula as one would write it; `dot` is a product (a, b) -> a @ b of `out_dtype`, `jnp.matmul` by default."""
    dot = dot or functools.partial(jnp.matmul, preferred_element_type=jnp.dtype(case.out_dtype))

    def product(a: Any, b: Any, up: Any = None, bias: Any = None, residual: Any = None) -> Any:
        a, b = _as_matrices(case, a, b)
        if up is not None:
            return jax.nn.silu(dot(a, b)) * dot(a, _as_matrices(case, a, up)[1])
        return _finish(dot(a, b), case.steps, bias, residual)

    return product


def ours(case: Case, on_fallback: str) -> Product:
    """`jax_bwgemm.matmul` with the epilogue; of swiglu, `gated_matmul`."""
    settings: dict[str, Any] = {"out_dtype": jnp.dtype(case.out_dtype), "on_fallback": on_fallback}
    activation = next((step for step in case.steps if step in ACTIVATIONS), None)

    def product(a: Any, b: Any, up: Any = None, bias: Any = None, residual: Any = None) -> Any:
        a, b = _as_matrices(case, a, b)
        if up is not None:
            return jax_bwgemm.gated_matmul(a, b, _as_matrices(case, a, up)[1], activation="silu", **settings)
        return jax_bwgemm.matmul(a, b, bias=bias, activation=activation, residual=residual, **settings)

    return product


def _finish(x: Any, steps: tuple[str, ...], bias: Any, residual: Any) -> Any:
    for step in steps:
        x = OPS[step](x) if step in ACTIVATIONS else x + {"bias": bias, "residual": residual}[step]
    return x


def _as_matrices(case: Case, a: Any, b: Any) -> tuple[Any, Any]:
    a = a.swapaxes(-1, -2) if case.form[0] == "t" else a
    return a, b.swapaxes(-1, -2) if case.form[1] == "t" else b
