"""The benchmark itself: for each shape, ours and jnp.dot in one process, alternately, on the same inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm import ffi
from jax_bwgemm.arch import Arch
from jax_bwgemm.bench import accuracy, machine, report, timing
from jax_bwgemm.bench.cases import DEFAULT, Case, rotation
from jax_bwgemm.bench.table import show
from jax_bwgemm.config import FallbackError
from jax_bwgemm.decision import decide, target_arch

RESULTS = Path(__file__).parent / "results"
HANDLER_CALLS = 10_000
HANDLER_SIZE = 256
Product = Callable[[Any, Any], Any]


def main(shapes: Sequence[str] | None, rounds: int, out: Path | None, commit: str = "") -> int:
    """Measures `shapes`, prints a table, writes a result file. ValueError without a GPU that has kernels."""
    cases = [Case.from_str(text) for text in shapes or DEFAULT]
    arch = target_arch(None)
    if isinstance(arch, str):
        raise ValueError(f"`bench` requires a Hopper or Blackwell GPU, got none: {arch}")
    result = measure_all(cases, arch, rounds, commit)
    show(result)
    path = out or RESULTS / f"{arch.name}.json"
    report.save(result, path)
    print(f"wrote {path}")
    return 1 if result.skipped else 0


def measure_all(cases: Sequence[Case], arch: Arch, rounds: int, commit: str = "") -> report.Result:
    handler = measure_handler()  # first: CUPTI, once attached, makes every driver call slower
    method, clock = timing.choose_clock()
    rows, skipped = [], {}
    for case in cases:
        try:
            rows.append(measure_case(case, arch, rounds, clock))
            print(*report.cells(rows[-1]), sep="  ", flush=True)
        except FallbackError as error:
            skipped[str(case)] = str(error)
    return report.Result(arch.name, method, rounds, machine.describe(commit), handler, tuple(rows), skipped)


def measure_case(case: Case, arch: Arch, rounds: int, clock: Callable[..., timing.Measure]) -> report.Row:
    copies = rotation(case, arch.l2_bytes)
    a, b = _operands(case.a_shape, copies, 0), _operands(case.b_shape, copies, 1)
    products = {"ours": _form(_ours, case), "peer": _form(jnp.matmul, case)}
    errors = _errors(case, products, a[0], b[0])
    measures = {name: clock(jax.jit(_each(product)), copies, a, b) for name, product in products.items()}
    samples = timing.alternate(measures, rounds)
    now = machine.query(machine.NOW)
    decision = decide(case.problem, None, None)
    ours, peer = samples["ours"], samples["peer"]
    return report.Row(
        shape=str(case),
        variant=decision.entry.name if decision.entry else "",
        rotation=copies,
        ours_us=ours.median_us,
        ours_low_us=ours.low_us,
        ours_high_us=ours.high_us,
        peer_us=peer.median_us,
        peer_low_us=peer.low_us,
        peer_high_us=peer.high_us,
        limit_us=report.limit_us(case.problem, arch),
        tflops=case.problem.flops / ours.median_us / 1e6,
        ours_error=errors["ours"],
        peer_error=errors["peer"],
        clock=now,
    )


def measure_handler() -> dict[str, float]:
    """What our handler takes of a call, by its own clock: all of Execute, and Execute without cuLaunchKernelEx."""
    a, b = (_operands((HANDLER_SIZE, HANDLER_SIZE), 1, seed)[0] for seed in (0, 1))
    function = jax.jit(_ours)
    jax.block_until_ready(function(a, b))
    ffi.timing_start(HANDLER_CALLS)
    for _ in range(HANDLER_CALLS):
        result = function(a, b)
    jax.block_until_ready(result)
    times_ns = ffi.timing_read(HANDLER_CALLS)
    own, total = (statistics.median(times) / 1e3 for times in zip(*times_ns, strict=True))
    return {"own_us": own, "total_us": total, "calls": float(len(times_ns))}


def _ours(a: Any, b: Any) -> Any:
    return jax_bwgemm.matmul(a, b, on_fallback="error")


def _form(product: Product, case: Case) -> Product:
    def formed(a: Any, b: Any) -> Any:
        a = a.swapaxes(-1, -2) if case.form[0] == "t" else a
        b = b.swapaxes(-1, -2) if case.form[1] == "t" else b
        return product(a, b)

    return formed


def _each(product: Product) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    return lambda a, b: [product(x, y) for x, y in zip(a, b, strict=True)]


def _operands(shape: tuple[int, ...], copies: int, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), copies)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]


def _errors(case: Case, products: dict[str, Product], a: jax.Array, b: jax.Array) -> dict[str, float]:
    rows, expected = accuracy.reference_rows(case, np.asarray(a), np.asarray(b))
    results = {name: np.asarray(jax.jit(product)(a, b)) for name, product in products.items()}
    return {name: accuracy.relative_error(case, result, rows, expected) for name, result in results.items()}
