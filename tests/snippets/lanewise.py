"""Instructions of one thread, many at a time: operands lane by lane, and the same operands for a whole warp.

The emulator has one path for registers that agree over a warp and another for those that do not: each case runs as
both.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.snippets.kit import Result, Snippet, Tolerance

NUM_UNIFORM = 40  # operand sets that also run with one CTA each


@dataclasses.dataclass(frozen=True)
class Op:
    """`lines` leave a register of `bits` in `result`. Operands of 16, 32, 64 bits come in %h1.., %r1.., %d11.. ."""

    label: str
    lines: str
    result: str
    bits: int
    expected: np.ndarray | None = None
    tolerance: Tolerance | None = None


def register(number: int, array: np.ndarray) -> str:
    return {2: f"%h{number}", 4: f"%r{number}", 8: f"%d{10 + number}"}[array.itemsize]


def lanewise(name: str, ops: list[Op], inputs: tuple[np.ndarray, ...]) -> list[Snippet]:
    """A kernel with a thread for each operand set, and one with a warp for each of a few."""
    sample = np.unique(np.linspace(0, len(inputs[0]) - 1, NUM_UNIFORM).astype(int))
    return [_snippet(name, ops, inputs, None), _snippet(f"{name}-uniform", ops, inputs, sample)]


def _snippet(name: str, ops: list[Op], inputs: tuple[np.ndarray, ...], sample: np.ndarray | None) -> Snippet:
    count = len(inputs[0]) if sample is None else len(sample)
    inputs = inputs if sample is None else tuple(np.ascontiguousarray(x[sample]) for x in inputs)
    body = f"mov.u32 %r400, {'%tid.x' if sample is None else '%ctaid.x'};\n"
    for i, array in enumerate(inputs):
        body += (
            _access(len(ops) + i, array.itemsize)
            + f"ld.global.b{8 * array.itemsize} {register(i + 1, array)}, [%d41];\n"
        )
    results = []
    for i, op in enumerate(ops):
        body += op.lines + "\n" + _access(i, op.bits // 8) + f"st.global.b{op.bits} [%d41], {op.result};\n"
        expected = op.expected if sample is None or op.expected is None else op.expected[sample]
        results.append(Result(op.label, np.full(count, 0xEE, f"u{op.bits // 8}"), expected, op.tolerance))
    if sample is None:
        return Snippet(name, body, tuple(results), inputs, threads=count)
    return Snippet(name, body, tuple(results), inputs, grid=(count, 1, 1))


def _access(param: int, size: int) -> str:
    return f"ld.param.b64 %d40, [p{param}]; mul.wide.u32 %d41, %r400, {size}; add.s64 %d41, %d40, %d41;\n"


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of up to 32 values."""
    return np.repeat(values, len(values)), np.tile(values, len(values))
