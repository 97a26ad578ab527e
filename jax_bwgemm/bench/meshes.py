"""Products over all GPUs of this machine: ours against `jnp`, alternately, with the collectives of either.

Rows are products and gradients of a dense layer and of an MLP, divided by `jax.jit` over automatic axes, over explicit
ones, or by hand in a `shard_map`. Times are the wall clock's, of calls in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.facts.arch import Arch

AXIS = "x"
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
SHARDED, WHOLE, LAST = P(AXIS), P(), P(None, AXIS)

Fun = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """`of` makes the program of a matmul; `flops` of one forward pass. `out`: how a `shard_map` stacks the result."""

    name: str
    of: Callable[[Fun], Fun]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    flops: float
    kind: str = "jit"
    result: P | None = None
    num_gradients: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Microseconds a call, medians of `rounds`; `ratio`: jnp's by ours; `limit_us`: a GPU's arithmetic at its peak."""

    name: str
    ours_us: float
    jnp_us: float
    ratio: float
    limit_us: float
    error: float
    ours: tuple[str, ...]
    jnp: tuple[str, ...]
    rounds: int


M, N, K, F = 8192, 4096, 4096, 14336


def rows() -> list[Row]:
    """The same for any number of GPUs, over which each dimension is divided."""
    product, layer = ((M, K), (K, N)), ((4, M // 4, K), (K, N))
    batch, mlp = ((16, 1024, 1024), (16, 1024, 4096)), ((M, K), (K, F), (F, K))
    flops, mlp_flops = 2.0 * M * N * K, 4.0 * M * K * F
    placed = {"m": (SHARDED, WHOLE), "n": (WHOLE, LAST), "k": (LAST, SHARDED)}
    parallel = (WHOLE, LAST, SHARDED)
    found = [Row(f"{at}-sharded", _same, product, specs, flops) for at, specs in placed.items()]
    found += [
        Row("k-sharded, result m-sharded", _same, product, placed["k"], flops, result=SHARDED),
        Row("(B, S, D) @ (D, F)", _same, layer, placed["m"], flops),
        Row("batch-sharded", _same, batch, (SHARDED, SHARDED), 2.0 * 16 * 1024 * 1024 * 4096),
        Row("data-parallel gradient", _gradient, product, placed["m"], flops, num_gradients=2),
        Row("FSDP gradient", _gradient, product, (SHARDED, SHARDED), flops, num_gradients=2),
        Row("tensor-parallel MLP", _mlp, mlp, parallel, mlp_flops),
        Row("tensor-parallel MLP, gradient", _mlp_gradient, mlp, parallel, mlp_flops, num_gradients=3),
    ]
    explicit = [row for row in found if row.name in ("m-sharded", "n-sharded", "data-parallel gradient")]
    found += [dataclasses.replace(row, kind="explicit") for row in explicit]
    found += [
        Row("tensor-parallel MLP", _explicit_mlp, mlp, parallel, mlp_flops, "explicit"),
        Row("tensor-parallel MLP, gradient", _explicit_mlp_gradient, mlp, parallel, mlp_flops, "explicit", None, 3),
        Row("m-sharded", _same, product, placed["m"], flops, "shard_map", SHARDED),
        Row("n-sharded", _same, product, placed["n"], flops, "shard_map", LAST),
        Row("tensor-parallel MLP", _mapped_mlp, mlp, parallel, mlp_flops, "shard_map", WHOLE),
        Row("tensor-parallel MLP, gradient", _mapped_mlp, mlp, parallel, mlp_flops, "shard_map", WHOLE, 3),
    ]
    return found


def measure(row: Row, arch: Arch, rounds: int, seconds: float = 0.0) -> Measured:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType[_axis_type(row)],))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16), NamedSharding(mesh, spec))
            for shape, spec in zip(row.shapes, row.specs, strict=True)
        ]
        ours = functools.partial(jax_bwgemm.matmul, on_fallback="warn")  # of what is left to XLA
        programs = [_compile(row, mesh, matmul, operands) for matmul in (ours, plain)]
        error = difference(*(program(*operands) for program in programs))
        measures = {name: timing.host_clock(x, 1, *operands) for name, x in zip(("ours", "jnp"), programs, strict=True)}
        samples = timing.alternate(measures, rounds, seconds)
    ours_us, jnp_us = samples["ours"].median_us, samples["jnp"].median_us
    own, others = map(collectives, programs)
    passes = {0: 1.0, 2: 3.0, 3: 3.0}[row.num_gradients]
    limit_us = passes * row.flops / (jax.device_count() * arch.peak_tflops * 1e6)
    name, taken = f"{row.kind}: {row.name}", samples["ours"].rounds
    return Measured(name, ours_us, jnp_us, jnp_us / ours_us, limit_us, error, own, others, taken)


def main(rounds: int, path: Path | None, commit: str, seconds: float = 0.0) -> int:
    arch = candidates.gpu_arch("`bench --meshes`", at_least=2)
    path = machine.result_path(path, "meshes", f"{arch.name}x{jax.device_count()}")
    found: list[dict[str, Any]] = []
    content = {"benchmark": "meshes", "machine": machine.describe(commit), "calls": timing.HOST_BATCH, "rows": found}
    for row in rows():
        measured = measure(row, arch, rounds, seconds)
        print(line(measured), flush=True)
        found.append(dataclasses.asdict(measured))
        path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def line(measured: Measured) -> str:
    alike = "the same" if measured.ours == measured.jnp else f"{_named(measured.ours)}; jnp: {_named(measured.jnp)}"
    times = f"{measured.ours_us:8.1f} {measured.jnp_us:8.1f} {measured.ratio:6.3f} {measured.limit_us:8.1f}"
    return f"{measured.name:42} {times}  {alike}"


def _named(collectives: Sequence[str]) -> str:
    return ", ".join(collectives) or "none"


def _axis_type(row: Row) -> str:
    return "Explicit" if row.kind == "explicit" else "Auto"


def _compile(row: Row, mesh: Any, matmul: Fun, operands: Sequence[jax.Array]) -> Any:
    program, sharding = row.of(matmul), None
    if row.kind == "shard_map":
        program = jax.shard_map(program, mesh=mesh, in_specs=row.specs, out_specs=row.result)
        program = loss_gradient(program, row.num_gradients) if row.num_gradients else program
    elif row.result is not None:
        sharding = NamedSharding(mesh, row.result)
    return jax.jit(program, out_shardings=sharding).lower(*operands).compile()


def collectives(program: Any) -> tuple[str, ...]:
    """Of a compiled program, sorted."""
    return tuple(sorted(re.findall(rf"\b({COLLECTIVES})(?:-start)?\(", program.as_text())))


def difference(ours: Any, theirs: Any) -> float:
    """The largest one, relative to the largest value."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    found = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in pairs]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in found)


def plain(a: jax.Array, b: jax.Array, activation: str | None = None, **settings: Any) -> jax.Array:
    out = jnp.matmul(a, b, **settings)
    return out if activation is None else getattr(jax.nn, activation)(out)


def _same(matmul: Fun) -> Fun:
    return matmul


def loss_gradient(f: Fun, num: int) -> Fun:
    return jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), tuple(range(num)))


def _gradient(matmul: Fun) -> Fun:
    return loss_gradient(matmul, 2)


def _mlp(matmul: Fun) -> Fun:
    return lambda x, up, down: matmul(matmul(x, up, activation="relu"), down)


def _mlp_gradient(matmul: Fun) -> Fun:
    return loss_gradient(_mlp(matmul), 3)


def _explicit_mlp(matmul: Fun) -> Fun:
    return lambda x, up, down: matmul(matmul(x, up, activation="relu"), down, out_sharding=WHOLE)


def _explicit_mlp_gradient(matmul: Fun) -> Fun:
    return loss_gradient(_explicit_mlp(matmul), 3)


def _mapped_mlp(matmul: Fun) -> Fun:
    return lambda x, up, down: jax.lax.psum(_mlp(matmul)(x, up, down), AXIS)
