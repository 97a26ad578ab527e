"""`bench --power SECONDS`: what long products take of the power limit, as energy a FLOP, each way for so many seconds.

Under continuous load a GPU lowers its clock until it meets its power limit, so that of two kernels the one with less
energy a FLOP is the faster one. Compared are the kernels that are predicted to be near the fastest, XLA's default, the
fastest one's tile orders, which move more or less through L2 and DRAM, and that kernel on operands of zeros, which
toggle no bit of multipliers and wires: what is left is the price of instructions and clocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.bench import machine
from jax_bwgemm.bench.candidates import Forms, gpu_arch, num_copies, operands, program
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.programs import compile_peer, make_operands
from jax_bwgemm.bench.report import Load
from jax_bwgemm.bench.sustained import sustain
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.decision import Decision, kernels

SHAPES = ("8192x8192x8192",)
NEAR = 1.2  # times the least predicted time: kernels of more are not tried
MOST_KERNELS = 10
LAUNCHES = 8  # of a call, so that the host keeps up
RASTERS = tuple(itertools.product((4, 8, 16), (0, 1), RASTER_ORDERS))  # group, along_n, order
ZEROS = ("a", "b", "ab")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute a product: a kernel as its plan says, on operands of which those in `zeros` are zeros."""

    name: str
    decision: Decision
    zeros: str = ""


def ways(case: Case, arch: Arch) -> list[Way]:
    """The kernels near the fastest, that first; then its orders, then its zeros. ValueError if there is no kernel."""
    near = _near(case, arch)
    first = near[0]
    own = [Way(_tile(decision), decision) for decision in near]
    orders = [Way(f"{_tile(first)}, {text}", decision) for text, decision in _orders(first)]
    return [*own, *orders, *(Way(f"{_tile(first)}, zeros in {zeros}", first, zeros) for zeros in ZEROS)]


def _near(case: Case, arch: Arch) -> list[Decision]:
    _, found = kernels(case.problem, arch)
    predicted = {id(decision): us for decision in found if (us := _predicted_us(decision)) is not None}
    if not predicted:
        raise ValueError(f"`--power` requires a product that has a kernel, got {case}")
    limit = NEAR * min(predicted.values())
    near = [decision for decision in found if predicted.get(id(decision), 2 * limit) <= limit]
    return sorted(near, key=lambda decision: predicted[id(decision)])[:MOST_KERNELS]


def _predicted_us(decision: Decision) -> float | None:
    chosen = decision.plan.chosen if decision.plan else None
    return chosen.cost.us if chosen and chosen.cost else None


def _orders(decision: Decision) -> Iterator[tuple[str, Decision]]:
    """Others than its own."""
    plan = decision.plan
    assert plan is not None  # a kernel at hand was planned
    for group, along_n, order in RASTERS:
        if (group, along_n, order) == (plan.raster_group, plan.raster_along_n, plan.raster_order):
            continue
        changed = dataclasses.replace(plan, raster_group=group, raster_along_n=along_n, raster_order=order)
        text = f"{order} of {group} {'columns' if along_n else 'rows'}"
        yield text, dataclasses.replace(decision, plan=changed)


def _tile(decision: Decision) -> str:
    plan = decision.plan
    assert plan is not None and plan.tile is not None
    return f"{plan.tile} swapped" if plan.swapped else str(plan.tile)


def main(seconds: float, shapes: Sequence[str] | None, path: Path | None, commit: str) -> int:
    if not seconds > 0:
        raise ValueError(f"`--power` requires seconds above 0, got {seconds}")
    arch = gpu_arch("`bench --power`")
    path = machine.result_path(path, "power", arch.name)
    facts = machine.describe(commit)
    loads: list[Load] = []
    for case in map(Case.from_str, shapes or SHAPES):
        print(f"{case}: {seconds:g} s each way", flush=True)
        for load in measure(case, arch, seconds):
            loads.append(load)
            print(line(load), flush=True)
            content = {
                "benchmark": "power",
                "machine": facts,
                "seconds": seconds,
                "loads": [_fields(load) for load in loads],
            }
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def measure(case: Case, arch: Arch, seconds: float) -> Iterator[Load]:
    """XLA's default first, then `ways`. One after the other: each is long enough to settle, and XLA's comes again last,
    by which a drift would show."""
    ffi.register(artifacts.launch_dirs())
    problem, copies = case.problem, num_copies(case.problem, arch.l2_bytes)
    inputs = make_operands(case, copies)
    (default,) = compile_peer("default", case, arch, inputs)
    xla = functools.partial(default.run, inputs)

    def settled(name: str, call: Callable[[], Any], products: int) -> Load:
        (load,) = sustain(case, {name: call}, products, seconds)
        return load

    yield settled("XLA", xla, copies)
    a, b, rest = operands(problem, copies)
    for way in ways(case, arch):
        given = _zeroed(a, "a" in way.zeros), _zeroed(b, "b" in way.zeros), rest
        launch_all = program(problem, [way.decision], copies, LAUNCHES)
        compiled = jax.jit(launch_all).lower(*given).compile()
        yield settled(way.name, functools.partial(compiled, *given), copies * -(-LAUNCHES // copies))
    yield settled("XLA again", xla, copies)


def _zeroed(values: list[Forms], is_zeroed: bool) -> list[Forms]:
    return [tuple(map(jnp.zeros_like, forms)) for forms in values] if is_zeroed else values


def line(load: Load) -> str:
    return (
        f"{load.product:52} {load.tflops:7.1f} TFLOP/s {load.power_w:6.1f} W {load.clock_mhz:6.0f} MHz "
        f"{load.temperature_c:4.0f} C {picojoules(load):6.3f} pJ/FLOP"
    )


def picojoules(load: Load) -> float:
    """A FLOP: W by TFLOP/s."""
    return load.power_w / load.tflops


def _fields(load: Load) -> dict[str, Any]:
    return dataclasses.asdict(load) | {"pj_per_flop": picojoules(load)}
