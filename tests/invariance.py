"""Batch invariance: random products, and the bits of their rows among other numbers of rows, in batches, and divided
over devices. For a GPU (`tests/gpu/test_batch_invariance.py`), and in little for the emulator."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from tests.cases import DTYPES

DTYPE_TRIPLES = [
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    ("int8", "int8", "int32"),
]
EPILOGUES: list[dict[str, Any]] = [
    {}, {}, {"bias": True}, {"bias": True, "activation": "relu"}, {"activation": "gelu"},
    {"bias": True, "activation": "gelu"}, {"activation": "silu"}, {"residual": True}, {"alpha": 0.5, "bias": True},
]  # fmt: skip
ROWS = (1, 2, 7, 16, 33, 64, 65, 100, 128, 200, 256, 500, 513, 1000)


@dataclasses.dataclass(frozen=True)
class Case:
    """`majors`: how a and b are stored; `options` of `matmul`, where True stands for an array."""

    m: int
    n: int
    k: int
    dtypes: tuple[str, str, str]
    majors: str
    options: tuple[tuple[str, Any], ...]
    seed: int


def random_case(seed: int, largest: int = 4096) -> Case:
    rng = random.Random(seed)

    def size() -> int:
        return rng.choice(
            (rng.randint(1, 300), rng.choice((64, 128, 256, 768, 1024, 2048, 4096)), rng.randint(1, 4096))
        )

    dtypes = rng.choice(DTYPE_TRIPLES)
    epilogue = {} if dtypes[2] in ("int32", "float32") else rng.choice(EPILOGUES)
    m, n, k = (min(x, largest) for x in (max(64, size()), size(), size()))
    return Case(m, n, k, dtypes, rng.choice("km") + rng.choice("kn"), tuple(epilogue.items()), seed)


def differing(case: Case, **settings: Any) -> list[str]:
    """The ways of computing some rows whose bits are not those that the rows have among all; FallbackError where one is
    XLA's, unless `settings` say otherwise."""
    rng = np.random.default_rng(case.seed)
    a, b = _random(rng, (case.m, case.k), case.dtypes[0]), _random(rng, (case.k, case.n), case.dtypes[1])
    extras = {
        name: _random(rng, (case.n,) if name == "bias" else (case.m, case.n), case.dtypes[2])
        for name, value in case.options
        if value is True
    }
    product = functools.partial(_product, case, settings)
    whole = _bits(product(a, b, extras))
    found = []
    for name, rows, got in _ways(case, product, a, b, extras):
        if not np.array_equal(_bits(got), whole[rows]):
            found.append(name)
    return found


def _ways(case: Case, product: Any, a: Any, b: Any, extras: dict[str, Any]) -> Iterator[tuple[str, slice, Any]]:
    rng = random.Random(case.seed)
    for num in rng.sample(
        [num for num in ROWS if num < case.m] or [1], k=min(4, sum(num < case.m for num in ROWS) or 1)
    ):
        first = rng.randrange(case.m - num + 1)
        rows = slice(first, first + num)
        yield f"{num} rows from {first}", rows, product(a[rows], b, _of_rows(extras, rows))
    num = case.m // 3
    rows = slice(0, 3 * num)
    stack = a[rows].reshape(3, num, case.k)
    more = {name: x[rows].reshape(3, num, case.n) if name == "residual" else x for name, x in extras.items()}
    yield "a stack that shares b", rows, product(stack, b, more).reshape(3 * num, case.n)
    if case.k * case.n <= 2**22:
        repeated = np.repeat(b[None], 3, axis=0)
        yield "a batch", rows, product(stack, repeated, more).reshape(3 * num, case.n)
    if jax.device_count() > 1:
        yield from _meshes(case, product, a, b, extras)


def _meshes(case: Case, product: Any, a: Any, b: Any, extras: dict[str, Any]) -> Iterator[tuple[str, slice, Any]]:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    step = 16 // np.dtype(DTYPES[case.dtypes[2]]).itemsize  # elements: a device's columns have the whole's way to store
    specs = {"m": (P("x"), P()), "k": (P(None, "x"), P("x")), "n": (P(), P(None, "x"))}
    for name, (of_a, of_b) in specs.items():
        unit = 2 * (step if name == "n" else 1)
        if getattr(case, name) % unit or (name == "n" and case.n < 2 * unit):
            continue
        placed = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, of_a), (b, of_b)))
        whole = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in extras.items()}
        yield f"{name} over two devices", slice(0, case.m), product(*placed, whole)


def _product(case: Case, settings: dict[str, Any], a: Any, b: Any, extras: dict[str, Any]) -> Any:
    options = {name: value for name, value in case.options if value is not True}
    options |= {"out_dtype": case.dtypes[2], "deterministic": "batch", "on_fallback": "error"} | settings
    flips = case.majors[0] == "m" and a.ndim == 2, case.majors[1] == "k" and b.ndim == 2

    def call(a: Any, b: Any, extras: dict[str, Any]) -> Any:
        a, b = (x.T if flip else x for x, flip in zip((a, b), flips, strict=True))
        return jax_bwgemm.matmul(a, b, **extras, **options)

    stored = (_transposed(x) if flip else x for x, flip in zip((a, b), flips, strict=True))
    return jax.jit(call)(*stored, extras)


def _of_rows(extras: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: x[rows] if name == "residual" else x for name, x in extras.items()}


def _transposed(x: Any) -> Any:
    """On the host, where nothing is compiled for it, or where the shards of x are."""
    return np.ascontiguousarray(x.T) if isinstance(x, np.ndarray) else x.T.copy()


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype in ("int8", "int32"):
        return rng.integers(-100, 100, shape, np.int8).astype(dtype)
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def _bits(x: Any) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(f"uint{8 * x.itemsize}")
