"""wgmma: operands laid out element by element in shared memory, all majors, swizzles and types, D against NumPy.

Small integers make every sum exact, so hardware and emulator must agree bit for bit; random operands are bounded.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from tests.emu.layouts import image, strides
from tests.snippets.kit import BEGIN, Result, Snippet, Tolerance, copy_in

DTYPES = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2), "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8),
    "tf32": np.dtype(np.float32),
}  # fmt: skip
LAYOUTS = {0: 0, 128: 1, 64: 2, 32: 3}
A_AT, B_AT = 1024, 17 * 1024  # from 0x400


def operand(rng: np.random.Generator, rows: int, kind: str, exact: bool) -> np.ndarray:
    shape = (rows, 32 // DTYPES[kind].itemsize)
    if not exact:
        return rng.standard_normal(shape).astype(DTYPES[kind])
    return rng.integers(0 if kind == "u8" else -3, 4, shape).astype(DTYPES[kind])


def as_read(x: np.ndarray, kind: str) -> np.ndarray:
    """tf32 drops the low 13 bits of a float32."""
    return ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) if kind == "tf32" else x).astype(np.float64)


def descriptor(at: int, lbo: int, sbo: int, span: int) -> int:
    word = (0x400 + at) >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | LAYOUTS[span] << 62
    return word - (1 << 64) if word >> 63 else word


def in_shared(matrix: np.ndarray, mn_major: bool, span: int, at: int) -> tuple[np.ndarray, int]:
    """The bytes from `at` on, padded to whole turns of a copy, and the descriptor."""
    lbo, sbo, total = strides(len(matrix), matrix.itemsize, span, mn_major)
    octets = np.full(-(-total // 2048) * 2048, 0xFF, np.uint8)
    octets[:total] = image(matrix, span, mn_major, lbo, sbo, 0x400 + at, total)
    return octets, descriptor(at, lbo, sbo, span)


def accumulators(d: np.ndarray) -> np.ndarray:
    """(thread, register): j of t is row 16(t/32) + t%32/4 + 8(j/2%2), column 8(j/4) + 2(t%4) + j%2."""
    t, j = np.arange(128)[:, None], np.arange(d.shape[1] // 2)[None, :]
    return np.ascontiguousarray(d[16 * (t // 32) + t % 32 // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (t % 4) + j % 2])


A_WORDS = """
ld.param.b64 %d30, [p1]; shr.u32 %r50, %r1, 5; shl.b32 %r50, %r50, 4; and.b32 %r51, %r1, 31; shr.u32 %r52, %r51, 2;
add.s32 %r50, %r50, %r52; shl.b32 %r50, %r50, 5; and.b32 %r53, %r1, 3; shl.b32 %r53, %r53, 2; add.s32 %r50, %r50, %r53;
cvt.u64.u32 %d31, %r50; add.s64 %d32, %d30, %d31; ld.global.b32 %r60, [%d32]; ld.global.b32 %r61, [%d32+256];
ld.global.b32 %r62, [%d32+16]; ld.global.b32 %r63, [%d32+272];
"""  # four words of a row-major A of 32-byte rows: (t/4, t%4), 8 rows on, 4 words on, both


def mma(
    name: str, kind: str, n: int, a_mn: bool = False, b_mn: bool = False, span: int = 128, shift: int = 0,
    exact: bool = True, signs: tuple[int, int] = (1, 1), a_in_registers: bool = False, b_kind: str = "",
    saturates: bool = False,
) -> Snippet:  # fmt: skip
    """D = A B + A B, from a D that holds numbers which the first MMA must ignore. `shift`: bytes off 1024."""
    b_kind = b_kind or kind
    rng = np.random.default_rng(n + span)
    a, b = operand(rng, 64, kind, exact), operand(rng, n, b_kind, exact)
    (a_bytes, a_desc), (b_bytes, b_desc) = (
        in_shared(a, a_mn, span, A_AT + shift),
        in_shared(b, b_mn, span, B_AT + shift),
    )
    product = (as_read(a, kind) @ as_read(b, b_kind).T) * signs[0] * signs[1]
    integer = kind in ("s8", "u8")
    expected = accumulators(2 * product + 0.0).astype(np.int32 if integer else np.float32).view(np.uint32)
    regs = "{" + ", ".join(f"%r{100 + j}" for j in range(n // 2)) + "}"
    flags = "" if integer else f", {signs[0]}, {signs[1]}"
    if a.itemsize == 2:
        flags += f", {int(b_mn)}" if a_in_registers else f", {int(a_mn)}, {int(b_mn)}"
    source = "{%r60, %r61, %r62, %r63}" if a_in_registers else "%d10"
    types = f"{'satfinite.' * saturates}{'s32' if integer else 'f32'}.{kind}.{b_kind}"
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{a.shape[1]}.{types}"
    if a_in_registers:
        a_bytes = np.resize(a.view(np.uint8).reshape(-1), a_bytes.shape)
    body = BEGIN + copy_in(1, A_AT + shift, len(a_bytes), 128) + copy_in(2, B_AT + shift, len(b_bytes), 128)
    body += A_WORDS if a_in_registers else ""
    body += (
        f"mov.b64 %d10, {a_desc}; mov.b64 %d11, {b_desc}; setp.ne.b32 %p7, %r10, %r10; setp.eq.b32 %p8, %r10, %r10;\n"
    )
    body += "".join(f"add.s32 %r{100 + j}, %r1, {j};" for j in range(n // 2))
    body += f"""
    fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
    {opcode} {regs}, {source}, %d11, %p7{flags};
    {opcode} {regs}, {source}, %d11, %p8{flags};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    ld.param.b64 %d20, [p0]; mul.wide.u32 %d21, %r1, {2 * n}; add.s64 %d22, %d20, %d21;
    """ + "".join(f"st.global.b32 [%d22+{4 * j}], %r{100 + j};" for j in range(n // 2))  # fmt: skip
    result = Result("D", np.zeros((128, n // 2), np.uint32), expected, None if exact else bound(a, b))
    return Snippet(name, body, (result,), (a_bytes, b_bytes), threads=128, smem_bytes=60 * 1024)


def bound(a: np.ndarray, b: np.ndarray) -> Tolerance:
    """Sums of an MMA are truncated relative to the largest; of 8-bit floats an H200 keeps 12 bits."""
    largest = float(np.max(np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T))
    return Tolerance("f32", 2.0**-23, largest * (2.0**-12 if a.itemsize == 1 else 2.0**-21))


def snippets() -> list[Snippet]:
    majors = list(itertools.product((False, True), repeat=2))
    out = [
        mma(f"wgmma-{kind}-{'km'[a]}{'nk'[not b]}-{span}", kind, 64, a, b, span)
        for kind in ("bf16", "f16") for a, b in majors for span in (0, 32, 64, 128)
    ]  # fmt: skip
    out += [mma(f"wgmma-n{n}", "bf16", n, b_mn=n % 64 == 0) for n in (8, 16, 24, 96, 128, 192, 256)]
    out += [mma(f"wgmma-start-{shift}-{span}", "bf16", 64, True, False, span, shift)
            for span in (0, 32, 64, 128) for shift in (128, 256, 640)]  # fmt: skip
    out += [mma(f"wgmma-{kind}", kind, 32) for kind in ("e4m3", "e5m2", "s8", "u8", "tf32")]
    mixed = (("e4m3", "e5m2"), ("e5m2", "e4m3"), ("u8", "s8"), ("s8", "u8"))
    out += [mma(f"wgmma-{a}-{b}-{n}", a, n, b_kind=b) for a, b in mixed for n in (16, 32, 144, 176, 256)]
    out += [mma(f"wgmma-{k}-n{n}", k, n) for k in ("bf16", "e4m3", "s8", "tf32") for n in (160, 224, 240)]
    out += [mma(f"wgmma-satfinite-{k}", k, 48, saturates=True) for k in ("s8", "u8")]
    out += [mma(f"wgmma-few-rows-{k}-{n}", k, n, True, True, 2 * n) for k in ("bf16", "f16") for n in (16, 32)]
    out += [mma(f"wgmma-signs-{x}-{y}", "f16", 32, signs=(x, y)) for x, y in ((-1, 1), (1, -1), (-1, -1))]
    out += [
        mma(f"wgmma-registers-{kind}", kind, 32, a_in_registers=True) for kind in ("bf16", "f16", "e4m3", "tf32", "s8")
    ]
    return out + [mma(f"wgmma-random-{kind}", kind, 128, exact=False) for kind in ("bf16", "f16", "tf32", "e4m3")]
