"""ldmatrix and stmatrix: one, two or four matrices, straight or transposed, rows in any order."""

from __future__ import annotations

import numpy as np

from tests.snippets.kit import BEGIN, Result, Snippet, copy_in, copy_out

NUM_ROWS = 32


def rows(count: int, seed: int) -> np.ndarray:
    """A place for each row that a lane may name: lanes beyond those of the matrices repeat earlier ones."""
    order = np.random.default_rng(seed).permutation(NUM_ROWS).astype(np.uint32)
    return np.resize(order[: 8 * count], 32)


def fragments(matrices: np.ndarray, trans: bool) -> np.ndarray:
    """(register, lane): lane t holds elements (t/4, 2(t%4)) and the one beside it, or below it."""
    out = np.empty((len(matrices), 32), np.uint32)
    for i, matrix in enumerate(matrices):
        m = matrix.T if trans else matrix
        for t in range(32):
            out[i, t] = int(m[t // 4, 2 * (t % 4)]) | int(m[t // 4, 2 * (t % 4) + 1]) << 16
    return out


def addresses(order: np.ndarray, param: int) -> str:
    return (
        f"ld.param.b64 %d1, [p{param}]; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2; ld.global.b32 %r2, [%d3];"
        " shl.b32 %r2, %r2, 4; add.s32 %r3, %r10, %r2;\n"
    )


def names(count: int) -> str:
    return "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"


def ldmatrix(count: int, trans: bool) -> Snippet:
    image = np.random.default_rng(count).integers(0, 1 << 16, (NUM_ROWS, 8)).astype(np.uint16)
    order = rows(count, count + 10 * trans)
    expected = fragments(image[order[: 8 * count]].reshape(count, 8, 8), trans)
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    body = BEGIN + copy_in(1, 0, 512, 32) + addresses(order, 2) + "bar.warp.sync -1;"
    body += f"{opcode} {names(count)}, [%r3]; ld.param.b64 %d4, [p0]; add.s64 %d5, %d4, %d2;\n"
    body += "".join(f"st.global.b32 [%d5+{128 * i}], %r{20 + i};" for i in range(count))
    start = np.zeros((count, 32), np.uint32)
    return Snippet(
        f"ldmatrix-x{count}{'-trans' * trans}", body, (Result("fragments", start, expected),), (image, order)
    )


def stmatrix(count: int, trans: bool) -> Snippet:
    rng = np.random.default_rng(count)
    values = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    order = rows(count, count + 20 * trans)
    expected = np.full((NUM_ROWS, 8), 0x1111, np.uint16)
    for i in range(count):
        for t in range(32):
            for h in range(2):
                at = (t // 4, 2 * (t % 4) + h)
                row, column = at[::-1] if trans else at
                expected[order[8 * i + row], column] = values[i, t] >> 16 * h & 0xFFFF
    opcode = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    body = BEGIN + copy_in(1, 0, 512, 32) + addresses(order, 3) + "bar.warp.sync -1;"
    body += "ld.param.b64 %d4, [p2]; add.s64 %d5, %d4, %d2;\n"
    body += "".join(f"ld.global.b32 %r{20 + i}, [%d5+{128 * i}];" for i in range(count))
    body += f"{opcode} [%r3], {names(count)}; bar.warp.sync -1;\n" + copy_out(0, 0, 512, 32)
    image = np.full((NUM_ROWS, 8), 0x1111, np.uint16)
    start = np.zeros((NUM_ROWS, 8), np.uint16)
    return Snippet(
        f"stmatrix-x{count}{'-trans' * trans}", body, (Result("shared", start, expected),), (image, values, order)
    )


def snippets() -> list[Snippet]:
    return [make(count, trans) for make in (ldmatrix, stmatrix) for count in (1, 2, 4) for trans in (False, True)]
