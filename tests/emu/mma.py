"""One tcgen05.mma after another on operand images laid out element by element; the pieces that wgmma shares."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from jax_bwgemm.emulator import Schedule
from tests.emu.layouts import image, strides
from tests.emu.snippet import run_snippet

DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "tf32": np.dtype(np.float32),
}
KINDS = {"f16": "f16", "bf16": "f16", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "u8": "i8", "tf32": "tf32"}
TYPE_CODES = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1, "s8": 1, "u8": 0, "tf32": 2}
LAYOUT_SM100 = {(0, 16): 0, (128, 16): 2, (64, 16): 4, (32, 16): 6, (128, 32): 1}  # (span, atom)
LAYOUT_SM90 = {0: 0, 128: 1, 64: 2, 32: 3}
A_AT, B_AT = 1024 + 256, 33 * 1024 + 256  # from the dynamic start at 0x400; not a multiple of 1024


def descriptor(at: int, lbo: int, sbo: int, layout: int, sm100: bool) -> int:
    low = (0x400 + at) >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32
    return low | (1 << 46 | layout << 61 if sm100 else layout << 62)


def copy_in(param: str, at: int, size: int) -> str:
    """128 threads copy their CTA's `size` bytes of a global array into shared memory."""
    lines = [
        f"ld.param.b64 %d1, [{param}]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.u32 %r30, %cluster_ctarank;",
        f"mad.lo.s32 %r31, %r30, {size}, %r2; cvt.u64.u32 %d2, %r31; add.s64 %d3, %d1, %d2;",
        "mov.b32 %r10, smem; add.s32 %r3, %r10, %r2;",
    ]
    for offset in range(0, size, 16 * 128):
        lines.append(f"ld.global.v2.b64 {{%d4, %d5}}, [%d3+{offset}];")
        lines.append(f"st.shared.v2.b64 [%r3+{at + offset}], {{%d4, %d5}};")
    return "\n".join(lines) + "\n"


def random_operand(rng: np.random.Generator, rows: int, kind: str) -> np.ndarray:
    k = 32 // DTYPES[kind].itemsize
    return rng.integers(0 if kind == "u8" else -3, 4, (rows, k)).astype(DTYPES[kind])


def padded(bytes_: np.ndarray, multiple: int) -> np.ndarray:
    out = np.full(-(-len(bytes_) // multiple) * multiple, 0xFF, np.uint8)
    out[: len(bytes_)] = bytes_
    return out


MMA = """
fence.proxy.async.shared::cta; setp.lt.u32 %p1, %r1, 32; mov.b32 %r20, 1;
elect.sync %r21|%p2, -1; and.pred %p3, %p1, %p2;
@%p3 mbarrier.init.shared.b64 [%r10], %r20; fence.mbarrier_init.release.cluster;
@!%p1 bra READY; mov.b32 %r22, 512;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r10+16], %r22;
READY: bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
ld.shared.b32 %r23, [%r10+16]; mov.u32 %r24, %cluster_ctarank;
add.s32 %r50, %r23, {lane};
setp.eq.b32 %p4, %r24, 0; and.pred %p5, %p3, %p4; not.pred %p6, %p5; @%p6 bra ISSUED;
mov.pred %p7, 0; mov.b64 %d10, {a_desc}; mov.b64 %d11, {b_desc};
mov.b32 %r26, {idesc}; mov.b16 %h1, {mask};
{mmas}
tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10], %h1;
ISSUED: WAIT: mbarrier.try_wait.parity.shared.b64 %p8, [%r10], 0; @%p8 bra OK; bra WAIT; OK:
shr.u32 %r27, %r1, 5; shl.b32 %r27, %r27, 21; add.s32 %r28, %r27, %r50;
{load}
tcgen05.wait::ld.sync.aligned; bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait; @!%p1 bra END;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r23, %r22; END:
"""


def store_registers(count: int, first: int) -> str:
    """Register j of thread t of CTA c goes to p0[(c * 128 + t) * count + j]."""
    lines = ["ld.param.b64 %d20, [p0]; mad.lo.s32 %r40, %r24, 128, %r1;", f"mul.wide.u32 %d21, %r40, {4 * count};"]
    lines += ["add.s64 %d22, %d20, %d21;"]
    lines += [f"st.global.b32 [%d22+{4 * j}], %r{first + j};" for j in range(count)]
    return "\n".join(lines)


def run_tcgen05(
    kind: str, group: int, m: int, n: int, a_mn: bool, b_mn: bool, span: int, lane: int = 0, steps: int = 1,
    schedule: Schedule | None = None, doctor: tuple[str, str] = ("", ""), a_lines: np.ndarray | None = None,
    b_kind: str = "", atom: int = 16, target: str = "sm_100a", inputs: tuple[np.ndarray, np.ndarray] | None = None,
    idesc_bits: int = 0, accumulate: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """D as the emulator leaves it in TMEM, as (rows, n), and the reference. `a_lines`: A comes from TMEM. `atom`: of
    the swizzle of MN-major operands."""
    b_kind = b_kind or kind
    rng = np.random.default_rng(m + n)
    a, b = inputs or (random_operand(rng, m, kind), random_operand(rng, n, b_kind))
    images = [in_shared(x, group, mn, span, atom if mn else 16, at) for x, mn, at in ((a, a_mn, A_AT), (b, b_mn, B_AT))]
    idesc = 2 << 4 if KINDS[kind] == "i8" else 1 << 4
    idesc |= TYPE_CODES[kind] << 7 | TYPE_CODES[b_kind] << 10 | a_mn << 15 | b_mn << 16 | n // 8 << 17 | m // 16 << 24
    half = m == 64
    columns = n // 2 if (group, m) == (2, 128) else n
    load, count = tmem_loads(columns, half)
    mma = f"tcgen05.mma.cta_group::{group}.kind::{KINDS[kind]} [%r50], %d10, %d11, %r26, %p7; mov.pred %p7, -1;\n"
    body = "".join(copy_in(f"p{i + 1}", at, len(images[i][0]) // group) for i, at in enumerate((A_AT, B_AT)))
    body += MMA.format(
        group=group, a_desc=signed(images[0][1]), b_desc=signed(images[1][1]), idesc=idesc | idesc_bits,
        mask=(1 << group) - 1, mmas=mma * steps, load=load, lane=lane << 16,
    )  # fmt: skip
    if accumulate:
        body = body.replace("mov.pred %p7, 0;", "mov.pred %p7, -1;")
    body += store_registers(count, 100)
    assert doctor[0] in body
    out = np.zeros((group, 128, count), np.uint32)
    arrays = (out, images[0][0], images[1][0])
    if a_lines is not None:
        body = body.replace("READY: bar.sync 0;", A_TO_TMEM).replace("[%r50], %d10,", "[%r50], [%r63],")
        arrays = (out, padded(a_lines, len(images[0][0])), images[1][0])
    body = body.replace(*doctor)
    run_snippet(body, arrays, threads=128, cluster=group, schedule=schedule, smem_bytes=80 * 1024, target=target)
    reference = steps * (a.astype(np.float64) @ b.astype(np.float64).T)
    return arrange(out.view(np.int32 if KINDS[kind] == "i8" else np.float32), m, n, group), reference


def in_shared(matrix: np.ndarray, group: int, mn: bool, span: int, atom: int, at: int) -> tuple[np.ndarray, int]:
    """The bytes of each CTA's rows from `at` on, and their descriptor."""
    rows = len(matrix) // group
    lbo, sbo, total = strides(rows, matrix.itemsize, span, mn, atom)
    parts = [matrix[c * rows : (c + 1) * rows] for c in range(group)]
    octets = [padded(image(part, span, mn, lbo, sbo, 0x400 + at, total, atom), 2048) for part in parts]
    return np.concatenate(octets), descriptor(at, lbo, sbo, LAYOUT_SM100[span, atom], True)


def tmem_loads(columns: int, half: bool) -> tuple[str, int]:
    """PTX that loads all columns into %r100 and on, in the largest pieces; and the number of registers."""
    piece = min(columns & -columns, 128)
    registers = piece // 2 if half else piece
    shape = f"16x256b.x{piece // 8}" if half else f"32x32b.x{piece}"
    lines = []
    for i in range(columns // piece):
        regs = ", ".join(f"%r{100 + i * registers + j}" for j in range(registers))
        lines.append(f"tcgen05.ld.sync.aligned.{shape}.b32 {{{regs}}}, [%r28+{i * piece}];")
    return "\n".join(lines), columns // piece * registers


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def arrange(out: np.ndarray, m: int, n: int, group: int) -> np.ndarray:
    """(CTA, thread, register) -> (row, column), by the layout tables of the PTX ISA (tcgen05 data path layouts)."""
    d = np.empty((m, n))
    rows = m // group
    for row, column in itertools.product(range(m), range(n)):
        cta, r = divmod(row, rows)
        if rows == 128:
            d[row, column] = out[cta, r, column]
        elif group == 2:
            d[row, column] = out[cta, r + 64 * (column >= n // 2), column % (n // 2)]
        else:
            warp, r16 = divmod(r, 16)
            thread = r16 % 8 * 4 + column % 8 // 2
            d[row, column] = out[cta, 32 * warp + thread, column // 8 * 4 + r16 // 8 * 2 + column % 2]
    return d


A_TO_TMEM = """
READY: bar.sync 0; ld.shared.b32 %r60, [%r10+16]; shr.u32 %r61, %r1, 5; shl.b32 %r61, %r61, 21;
add.s32 %r62, %r60, %r61; add.s32 %r62, %r62, 256; ld.param.b64 %d30, [p1]; mul.wide.u32 %d31, %r1, 32;
add.s64 %d32, %d30, %d31; ld.global.v4.b32 {%r70, %r71, %r72, %r73}, [%d32];
ld.global.v4.b32 {%r74, %r75, %r76, %r77}, [%d32+16];
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r62], {%r70, %r71, %r72, %r73, %r74, %r75, %r76, %r77};
tcgen05.wait::st.sync.aligned; add.s32 %r63, %r60, 256; bar.sync 0;
"""
