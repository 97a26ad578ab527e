"""mma.sync: fragments of A, B and C in registers, as the PTX ISA deals them, and D against NumPy.

Small integers make every sum exact, so hardware and emulator must agree bit for bit; random operands are bounded.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.snippets.kit import BEGIN, Result, Snippet, Tolerance

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
LANES = range(32)


def a_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """(row, k)."""
    return lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2) + half


def b_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """(k, column)."""
    return 2 * (lane % 4) + 8 * register + half, lane // 4


def d_place(lane: int, register: int) -> tuple[int, int]:
    """(row, column)."""
    return lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2


def pairs(matrix: np.ndarray, registers: int, place) -> np.ndarray:
    """(register, lane) words."""
    words = np.zeros((registers, 32, 2), matrix.dtype)
    for register, lane, half in np.ndindex(words.shape):
        words[register, lane, half] = matrix[place(lane, register, half)]
    return words.view(np.uint32)[..., 0]


def sums(matrix: np.ndarray) -> np.ndarray:
    """(register, lane) of float32."""
    return np.array([[matrix[d_place(lane, register)] for lane in LANES] for register in range(4)], np.float32)


def load(param: int, first: int, count: int) -> str:
    loads = "".join(f"ld.global.b32 %r{first + i}, [%d3+{128 * i}];" for i in range(count))
    return f"ld.param.b64 %d1, [p{param}]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; {loads}\n"


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def mma(kind: str, exact: bool) -> Snippet:
    """D = A B + C, into C's registers, twice."""
    rng = np.random.default_rng(DTYPES[kind].num)
    shapes = (16, 16), (16, 8), (16, 8)
    make = (lambda shape: rng.integers(-3, 4, shape)) if exact else rng.standard_normal
    a, b = (make(shape).astype(DTYPES[kind]) for shape in shapes[:2])
    c = make(shapes[2]).astype(np.float32)
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    body = BEGIN + load(1, 20, 4) + load(2, 24, 2) + load(3, 30, 4)
    body += f"{opcode} {names(30, 4)}, {names(20, 4)}, {names(24, 2)}, {names(30, 4)};\n" * 2
    body += "ld.param.b64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;\n"
    body += "".join(f"st.global.b32 [%d3+{128 * i}], %r{30 + i};" for i in range(4))
    want = sums(c + 2 * (a.astype(np.float64) @ b.astype(np.float64)))
    bound = None if exact else Tolerance(absolute=1e-4)
    result = Result("sums", np.zeros((4, 32), np.uint32), want.view(np.uint32), bound)
    inputs = pairs(a, 4, a_place), pairs(b, 2, b_place), sums(c).view(np.uint32)
    return Snippet(f"mma-sync-{kind}{'' if exact else '-random'}", body, (result,), inputs)


def snippets() -> list[Snippet]:
    return [mma(kind, exact) for kind in DTYPES for exact in (True, False)]
