"""Collective matmul over all GPUs of this machine: overlapped and not, against the bound of what cannot be faster.

Rows are a tensor-parallel layer that gathers its rows, one that scatters them, and the MLP of both with its gradient.
Each is measured as rings beside our kernels under several sets of XLA's flags (in the MLP, rows stay in the ring's
order), as a collective before or behind one product of ours or of `jnp`, and as XLA's own collective matmul (its
"windowed einsum", under `jit`); alternately with the products alone and the collectives alone. The larger of these two
is the bound. Times are the wall clock's, of calls in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.bench.meshes import AXIS, LAST, SHARDED, collectives, difference, loss_gradient, plain

Fun = Callable[..., Any]
Specs = tuple[P, ...]
# Compiler options under which our rings are measured. NCCL's transfers hold SMs on which a persistent kernel beside
# them counts. The last two have permutes copied instead, by copy engines; which has an effect depends on the jaxlib.
FLAG_SETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "latency-hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "memcpy": {"xla_gpu_use_memcpy_local_p2p": True},
    "peer-memory": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
}
WINDOWED = {"xla_gpu_threshold_for_windowed_einsum_mib": 0, "xla_gpu_multi_streamed_windowed_einsum": True}
OURS, PARTS = "ours, ", "alone: "
COLUMNS = ("overlapped", "flags", "not", "jnp", "XLA's own", "products", "transfers", "not / overlapped", "of bound")


@dataclasses.dataclass(frozen=True)
class Row:
    """`kind`: "gather" (x of m x k, w of k x n), "scatter" (likewise) or "mlp" (m x k, k x n, n x k)."""

    kind: str
    m: int
    n: int
    k: int
    has_gradient: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.m}x{self.n}x{self.k}{', gradient' if self.has_gradient else ''}"

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        pair = ((self.m, self.k), (self.k, self.n))
        return (*pair, (self.n, self.k)) if self.kind == "mlp" else pair

    @property
    def specs(self) -> tuple[Specs, P]:
        """Of the operands and of the result."""
        known = {
            "gather": ((SHARDED, LAST), LAST),
            "scatter": ((LAST, SHARDED), SHARDED),
            "mlp": ((SHARDED, LAST, SHARDED), SHARDED),
        }
        return known[self.kind]

    def program(self, up: Fun, down: Fun) -> Fun:
        """Of a layer that gathers and one that scatters."""
        both = lambda x, w, v: down(up(x, w, activation="relu"), v)  # noqa: E731
        return {"gather": up, "scatter": down, "mlp": both}[self.kind]

    def differentiated(self, f: Fun) -> Fun:
        return loss_gradient(f, len(self.shapes)) if self.has_gradient else f


ROWS = (
    Row("gather", 8192, 14336, 4096),
    Row("gather", 8192, 6144, 4096),
    Row("gather", 2048, 14336, 4096),
    Row("scatter", 8192, 4096, 14336),
    Row("scatter", 8192, 4096, 4096),
    Row("scatter", 2048, 4096, 14336),
    Row("mlp", 8192, 14336, 4096),
    Row("mlp", 8192, 14336, 4096, has_gradient=True),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Microseconds a call, medians. `times_us`: of every way; `left_out`: why a way is not there. `error`: of the ring
    to the product behind the collective. `moved`: the ring's collectives."""

    name: str
    times_us: dict[str, float]
    products_us: float
    transfers_us: float
    error: float
    moved: tuple[str, ...]
    left_out: dict[str, str]

    @property
    def fastest(self) -> str:
        """The set of flags under which our rings are."""
        ours = {name: us for name, us in self.times_us.items() if name.removeprefix(OURS) in FLAG_SETS}
        return min(ours, key=lambda name: ours[name])

    @property
    def bound_us(self) -> float:
        return max(self.products_us, self.transfers_us)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"bound_us": self.bound_us, "fastest": self.fastest}


def measure(row: Row, rounds: int) -> Measured:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        operands = _normal(mesh, row.shapes, row.specs[0])
        programs, left_out = _ways(row, mesh, operands)
        ring, behind = (programs[OURS + name] for name in ("default", "not overlapped"))
        error = difference(ring(*operands), behind(*operands))
        measures = {name: timing.host_clock(program, 1, *operands) for name, program in programs.items()}
        parts = _parts(row, mesh)
        measures |= {PARTS + name: timing.host_clock(program, 1, *given) for name, (program, given) in parts.items()}
        samples = timing.alternate(measures, rounds)
    times = {name: sample.median_us for name, sample in samples.items()}
    passes = 2 if row.has_gradient else 1  # a gather's gradient scatters, and the other way round
    transfers = passes * sum(times[PARTS + name] for name in parts if name != "products")
    ways = {name: us for name, us in times.items() if not name.startswith(PARTS)}
    return Measured(str(row), ways, times[PARTS + "products"], transfers, error, collectives(ring), left_out)


def main(rounds: int, path: Path | None, commit: str) -> int:
    arch, num = candidates.gpu_arch("`bench --collectives`", at_least=2), jax.device_count()
    path = machine.result_path(path, "collectives", f"{arch.name}x{num}")
    content: dict[str, Any] = {
        "benchmark": "collectives",
        "machine": machine.describe(commit),
        "rounds": rounds,
        "calls": timing.HOST_BATCH,
    }
    content["rows"] = []
    print(f"| us, {num} x {arch.name} | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}")
    for row in ROWS:
        measured = measure(row, rounds)
        print(line(measured), flush=True)
        content["rows"].append(measured.as_dict())
        path.write_text(json.dumps(content, indent=1) + "\n")  # now: of what comes next, flags may end the process
    print(f"wrote {path}")
    return 0


def line(measured: Measured) -> str:
    """A row of a markdown table."""
    times = measured.times_us
    ours_us, plain_us = times[measured.fastest], times[OURS + "not overlapped"]
    cells = [
        f"{ours_us:.1f}",
        measured.fastest.removeprefix(OURS),
        *(f"{times[name]:.1f}" if name in times else "none" for name in (OURS + "not overlapped", "jnp", "XLA's own")),
        f"{measured.products_us:.1f}",
        f"{measured.transfers_us:.1f}",
        f"{plain_us / ours_us:.3f}",
        f"{100 * measured.bound_us / ours_us:.0f} %",
    ]
    return f"| {measured.name} | {' | '.join(cells)} |"


def _ours(*operands: jax.Array, **settings: Any) -> jax.Array:
    out: jax.Array = jax_bwgemm.matmul(*operands, on_fallback="error", **settings)
    return out


def _ways(row: Row, mesh: Any, operands: Sequence[jax.Array]) -> tuple[dict[str, Any], dict[str, str]]:
    """The compiled programs, and why others are left out: flags that this jax or this machine does not know."""
    settings: dict[str, Any] = {"axis_name": AXIS, "on_fallback": "error"}
    up = functools.partial(jax_bwgemm.all_gather_matmul, in_order=row.kind == "gather", **settings)
    overlapped = row.program(up, functools.partial(jax_bwgemm.matmul_reduce_scatter, **settings))
    ways: dict[str, tuple[Fun, Mapping[str, Any]]] = {
        OURS + name: (_mapped(row, mesh, overlapped), flags) for name, flags in FLAG_SETS.items()
    }
    ways[OURS + "not overlapped"] = _mapped(row, mesh, row.program(*_behind(_ours))), {}
    ways["jnp"] = _mapped(row, mesh, row.program(*_behind(plain))), {}
    ways["XLA's own"] = _partitioned(row, mesh), WINDOWED
    programs, left_out = {}, {}
    for name, (f, flags) in ways.items():
        try:
            program = jax.jit(f, compiler_options=dict(flags)).lower(*operands).compile()
            jax.block_until_ready(program(*operands))
            programs[name] = program
        except Exception as error:
            if not flags:
                raise
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return programs, left_out


def _behind(matmul: Fun) -> tuple[Fun, Fun]:
    """A product behind an all-gather, and a reduce-scatter behind a product."""

    def up(x: jax.Array, w: jax.Array, **settings: Any) -> jax.Array:
        out: jax.Array = matmul(lax.all_gather(x, AXIS, tiled=True), w, **settings)
        return out

    def down(x: jax.Array, w: jax.Array) -> jax.Array:
        out: jax.Array = lax.psum_scatter(matmul(x, w), AXIS, tiled=True)
        return out

    return up, down


def _mapped(row: Row, mesh: Any, f: Fun) -> Fun:
    specs, out = row.specs
    return row.differentiated(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))


def _partitioned(row: Row, mesh: Any) -> Fun:
    """By XLA, of `jnp`'s products."""
    program, sharding = row.program(plain, plain), NamedSharding(mesh, row.specs[1])
    return row.differentiated(lambda *operands: lax.with_sharding_constraint(program(*operands), sharding))


def _parts(row: Row, mesh: Any) -> dict[str, tuple[Any, Sequence[jax.Array]]]:
    """The products alone, of gathered rows and without adding up; and each collective alone, of what it moves."""
    num = jax.device_count()
    (x, *others), (spec, *rest) = row.shapes, row.specs[0]
    whole = x if row.kind == "scatter" else (num * x[0], x[1])  # every device has rows of its own, all of them
    out = LAST if row.kind == "gather" else SHARDED

    def compiled(f: Fun, shapes: Sequence[tuple[int, ...]], specs: Specs, out: P, has_gradient: bool = False) -> Any:
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)
        operands = _normal(mesh, shapes, specs)
        f = row.differentiated(f) if has_gradient else f
        return jax.jit(f).lower(*operands).compile(), operands

    products = row.program(_ours, _ours)
    found = {"products": compiled(products, (whole, *others), (spec, *rest), out, has_gradient=True)}
    if row.kind != "scatter":
        gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
        found["gather"] = compiled(gather, (x,), (SHARDED,), SHARDED)
    if row.kind != "gather":
        scatter = functools.partial(lax.psum_scatter, axis_name=AXIS, tiled=True)
        found["scatter"] = compiled(scatter, ((num * row.m, others[-1][1]),), (SHARDED,), SHARDED)
    return found


def _normal(mesh: Any, shapes: Sequence[tuple[int, ...]], specs: Sequence[P]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jax.device_put(jnp.asarray(rng.standard_normal(shape, np.float32) / 8, jnp.bfloat16), NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
