"""`bench --lowering`: how long a program takes to be traced and lowered for CUDA, beside jnp's. Needs no GPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_bwgemm

NUM_PRODUCTS = 50
PROGRAMS = {"50 equal products": 1, "50 products of 25 shapes": 25}  # shapes


def main(rounds: int, device: str = "h200", num_products: int = NUM_PRODUCTS) -> int:
    """Prints medians of `rounds`, alternating, after a first one that finds the kernels."""
    with jax_bwgemm.config(device=device, on_fallback="ignore"):
        rows: dict[str, Callable[[Callable[..., Any]], Any]] = {
            name: functools.partial(lower, num_products, num_shapes) for name, num_shapes in PROGRAMS.items()
        }
        x = jnp.ones((64, 64), jnp.bfloat16)
        rows["one eager product of 64x64x64 on " + jax.default_backend()] = lambda op: op(x, x).block_until_ready()
        for name, row in rows.items():
            ours, jnps = medians_us([functools.partial(row, op) for op in (jax_bwgemm.matmul, jnp.dot)], rounds)
            print(f"{name:36} ours {ours:9.1f} us  jnp {jnps:9.1f} us  {ours / jnps:.2f} times", flush=True)
    return 0


def lower(num_products: int, num_shapes: int, op: Callable[..., Any]) -> Any:
    """A function that no cache has seen."""
    x = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((4096, 4096 + 128 * (i % num_shapes)), x.dtype) for i in range(num_products)]
    program = jax.jit(lambda x, weights: [op(x, w) for w in weights])
    return program.trace(x, weights).lower(lowering_platforms=("cuda",))


def medians_us(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if i:
                own.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(own) for own in times]
