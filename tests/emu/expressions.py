"""Runs kernels of any expression, of several matrices and results, and of two b, in the emulator, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.bench.accuracy import evaluate
from jax_bwgemm.emulator import Schedule
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.problem import COARSE_DTYPES
from jax_bwgemm.facts.variant import Variant
from tests.cases import DTYPES
from tests.emu.matmul import Facts, poisoned, poisoned_parts, run_matmul

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}


def check_expression(
    variant: Variant, module: Module, facts: Facts, shape: tuple[int, int, int], schedule: Schedule, seed: int = 0,
    stream: tuple[int, int] = (0, 1), scalars: dict[str, float] | None = None, max_clusters: int = 2, **options: Any,
) -> None:  # fmt: skip
    """Every element of every result within a few roundings of its own terms; of two matrices that share a."""
    (m, n, k), batch, rng, epilogue = shape, 2, np.random.default_rng(seed), variant.steps
    scalars = dict(epilogue.scalars) if scalars is None else scalars

    def random(*size: int, of: str = variant.out_dtype, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size, np.float32) * scale).astype(DTYPES[of])

    a = random(1, *((m, k) if variant.a_major == "k" else (k, m)), of=variant.a_dtype)
    stored_b = batch, *((k, n) if variant.b_major == "n" else (n, k))
    b, up = (random(*stored_b, of=variant.b_dtype, scale=0.125) for _ in range(2))
    stored = (batch, m, n) if variant.c_major == "n" else (batch, n, m)
    sizes, dtypes = {"one": (1,), "n": (n,), "m": (m,), "mn": stored}, {"one": "float32"}
    others = {x.role: random(*sizes[x.place], of=dtypes.get(x.place, variant.out_dtype)) for x in epilogue.operands}
    others |= {role: poisoned(stored, variant.out_dtype) for role, _ in epilogue.seconds}
    others |= poisoned_parts(variant, batch, m, n) | ({"up": up} if variant.tile.gated else {})
    first, _ = run_matmul(
        module, facts, a, b, 1.0, None, None, max_clusters, 2, 0, schedule, stream, others=others, scalars=scalars,
        **options,
    )  # fmt: skip

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        left = x if variant.a_major == "k" else x.swapaxes(1, 2)
        return left.astype(np.float64) @ (y if variant.b_major == "n" else y.swapaxes(1, 2)).astype(np.float64)

    values = {"acc": product(a, b), "up": product(a, up), **scalars}
    for x in epilogue.operands:
        array = others[x.role].astype(np.float64)
        if x.place == "m":
            array = array[:, None]
        values[x.role] = array.swapaxes(1, 2) if x.place == "mn" and variant.c_major == "m" else array
    coarse = 2.0**-9 if variant.out_dtype in COARSE_DTYPES else 2.0**-14
    terms = 1 + sum(np.abs(x).max() for x in values.values() if np.ndim(x))
    for role, node in epilogue.results:
        got = first if role == "out" else others[role] if variant.c_major == "n" else others[role].swapaxes(1, 2)
        want = np.broadcast_to(evaluate(node, values), got.shape)
        wrong = np.abs(got.astype(np.float64) - want) > EPS[variant.out_dtype] * np.abs(want) + coarse * terms
        assert not wrong.any(), (role, np.argwhere(wrong)[:4], got[wrong][:4], want[wrong][:4])
    for own in epilogue.reductions:
        over, reduced = (1 if own.place == "n" else 2), np.sum if own.reducer == "sum" else np.max
        reach = coarse * terms * (first.shape[over] if own.reducer == "sum" else 1)
        want = reduced(np.broadcast_to(evaluate(own.node, values), first.shape), over)
        error = np.abs(reduced(others[own.role].astype(np.float64), 1) - want)
        assert error.max() <= reach, (own.role, error.max(), reach)  # NaN, too: where no warp has stored
