"""`bench --gram`: symmetric products against XLA's `a @ a.T` with sets of flags, and Muon's iteration against the same
written with `@`, alternately; of products, every symmetric tile."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.bench.peers import FLAG_SETS
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.gram import MUON
from jax_bwgemm.planner.cost import roofline_us

SHAPES = ((8192, 8192), (4096, 4096), (2048, 2048), (4096, 16384), (16384, 4096), (1024, 4096))  # of a: m, k
ITERATIONS = ((4096, 4096), (2048, 8192), (1024, 4096))


@dataclasses.dataclass(frozen=True)
class Row:
    """Functions of one array of `shape` by name, of which "ours" is what the ratios are to, and the `limit_us` of any
    kernel, if it is a product."""

    name: str
    shape: tuple[int, int]
    limit_us: float | None
    ours: Mapping[str, Callable[[jax.Array], jax.Array]]
    plain: Callable[[jax.Array], jax.Array]


def rows(arch: Arch) -> list[Row]:
    tiles = [tile for tile in SHIPPED_TILES[arch.family.name] if tile.symmetric]
    of_tiles = {str(tile): functools.partial(jax_bwgemm.gram, tile=tile) for tile in tiles}
    ours = {"ours": jax_bwgemm.gram, "matmul": lambda a: jax_bwgemm.matmul(a, a.T)} | of_tiles
    products = [
        Row("gram", (m, k), roofline_us(Problem(m, m, k, b_major="k", symmetric=True), arch), ours, lambda a: a @ a.T)
        for m, k in SHAPES
    ]
    iterations = [Row("newton_schulz", x, None, {"ours": jax_bwgemm.newton_schulz}, plain_steps) for x in ITERATIONS]
    return [*products, *iterations]


def plain_steps(x: jax.Array, steps: int = 5) -> jax.Array:
    """Muon's iteration as it is published, in bfloat16."""
    a, b, c = MUON
    x = x / (jnp.linalg.norm(x.astype(jnp.float32)).astype(x.dtype) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def main(rounds: int, path: Path | None, commit: str) -> int:
    arch = candidates.gpu_arch("`bench --gram`")
    path = machine.result_path(path, "gram", arch.name)
    method, clock = timing.choose_clock()
    content: dict[str, Any] = {
        "benchmark": "gram",
        "machine": machine.describe(commit),
        "method": method,
        "rounds": rounds,
        "rows": [],
    }
    print(f"{method}; ratios are of the time to ours")
    for row in rows(arch):
        times = measure(row, clock, rounds)
        said = {"name": row.name, "shape": row.shape, "limit_us": row.limit_us}
        content["rows"].append(said | {"times_us": times})
        print(line(row, times), flush=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def line(row: Row, times: Mapping[str, float]) -> str:
    """Ours in microseconds, what part of the limit that is, and all others' times to it."""
    m, n = row.shape
    limit = "" if row.limit_us is None else f" limit {row.limit_us:.1f} us, {row.limit_us / times['ours']:.0%};"
    ratios = ", ".join(f"{name} {us / times['ours']:.3f}" for name, us in times.items() if name != "ours")
    return f"{row.name} of {m}x{n}: ours {times['ours']:.1f} us;{limit} {ratios}"


def measure(row: Row, clock: Any, rounds: int) -> dict[str, float]:
    a = jnp.asarray(np.random.default_rng(0).standard_normal(row.shape, np.float32), jnp.bfloat16)

    def compiled(f: Callable[[jax.Array], jax.Array], flags: str = "default") -> Any:
        return jax.jit(lambda x: f(x), compiler_options=dict(FLAG_SETS[flags])).lower(a).compile()

    programs = {name: compiled(f) for name, f in row.ours.items()}
    programs |= {name: compiled(row.plain, name) for name in FLAG_SETS}
    samples = timing.alternate({name: clock(program, 1, a) for name, program in programs.items()}, rounds, 0.0)
    return {name: sample.median_us for name, sample in samples.items()}
