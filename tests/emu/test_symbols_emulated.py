"""A kernel that was chosen for a range of sizes, at sizes of that range, launched with the same attributes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_bwgemm.emulator import Counters
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import Symbol, Symbols, sized
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.decision import Decision, decide
from jax_bwgemm.runtime.emulated import kernel_of
from tests.cases import relative_error
from tests.emu.shipped import why_any_missing

WHY_NOT = ffi.status() or why_any_missing("sm_100f", "sm_90a")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def run(decision: Decision, problem: Problem) -> tuple[np.ndarray, np.ndarray, Counters, dict[str, object]]:
    """(the result, what it should be, counters, attributes) of the kernel of a range, for one problem of it."""
    assert decision.plan is not None
    seen = problem.transposed if decision.plan.swapped else problem
    kernel = kernel_of(dataclasses.replace(decision, plan=dataclasses.replace(decision.plan, problem=seen)), seen, 4)
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(array.shape).astype(array.dtype)
        for array in kernel.request.operands[:: -1 if decision.plan.swapped else 1]
    )
    out, counters = kernel.run(*((b, a) if decision.plan.swapped else (a, b)))
    a, b = (x.astype(np.float64) for x in (a, b))
    a, b = a if problem.a_major == "k" else a.swapaxes(1, 2), b if problem.b_major == "n" else b.swapaxes(1, 2)
    return out, a[..., : problem.k] @ b[:, : problem.k], counters, dict(kernel.request.attributes)


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize(
    ("problem", "symbols", "sizes"),
    [
        (Problem(1, 136, 72), Symbols(m=Symbol("m", 1, 16)), [("m", 1), ("m", 7), ("m", 16)]),
        (Problem(65, 264, 136), Symbols(m=Symbol("m", 65, 600)), [("m", 65), ("m", 129), ("m", 300)]),
        (Problem(136, 72, 1, a_major="m"), Symbols(k=Symbol("k")), [("k", 1), ("k", 63), ("k", 200)]),
        (Problem(72, 136, 40, 2, a_batch=2), Symbols(batch=Symbol("b", 2, 9)), [("batch", 2), ("batch", 5)]),
    ],
)
def test_one_launch_for_all_sizes(
    device: str, problem: Problem, symbols: Symbols, sizes: list[tuple[str, int]]
) -> None:
    decision = decide(sized(problem, symbols.middle), device, None, is_emulated=True, symbols=symbols)
    assert decision.entry is not None, decision.reason
    said = []
    for size in sizes:
        out, want, counters, attributes = run(decision, sized(problem, (size,)))
        assert out.shape == want.shape and counters.mmas > 0
        assert relative_error(out.astype(np.float64), want) < 4e-3
        said.append(attributes)
    assert all(attributes == said[0] for attributes in said)
