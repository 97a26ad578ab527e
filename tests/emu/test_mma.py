"""tcgen05.mma and wgmma on operand images laid out element by element; results against NumPy."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule
from tests.emu.layouts import image, strides
from tests.emu.snippet import run_snippet

DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "tf32": np.dtype(np.float32),
}
KINDS = {"f16": "f16", "bf16": "f16", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "tf32": "tf32"}
TYPE_CODES = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1, "s8": 1, "tf32": 2}
LAYOUT_SM100 = {0: 0, 128: 2, 64: 4, 32: 6}
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
    return rng.integers(-3, 4, (rows, k)).astype(DTYPES[kind])


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
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """D as the emulator leaves it in TMEM, as (rows, n), and the reference. `a_lines`: A comes from TMEM."""
    rng = np.random.default_rng(m + n)
    a, b = random_operand(rng, m, kind), random_operand(rng, n, kind)
    rows_a, rows_b = m // group, n // group
    images = []
    for matrix, rows, mn, at in ((a, rows_a, a_mn, A_AT), (b, rows_b, b_mn, B_AT)):
        lbo, sbo, total = strides(rows, a.itemsize, span, mn)
        parts = [image(matrix[c * rows : (c + 1) * rows], span, mn, lbo, sbo, 0x400 + at, total) for c in range(group)]
        images.append(
            (np.concatenate([padded(p, 2048) for p in parts]), descriptor(at, lbo, sbo, LAYOUT_SM100[span], True))
        )
    idesc = {"f16": 1, "bf16": 1, "e4m3": 1, "e5m2": 1, "tf32": 1, "s8": 2}[kind] << 4
    idesc |= TYPE_CODES[kind] << 7 | TYPE_CODES[kind] << 10 | a_mn << 15 | b_mn << 16 | n // 8 << 17 | m // 16 << 24
    half = rows_a == 64 and group == 1
    columns = n // 2 if rows_a == 64 and group == 2 else n
    count = columns if not half else n // 2
    regs = ", ".join(f"%r{100 + j}" for j in range(count))
    shape = f"16x256b.x{n // 8}" if half else f"32x32b.x{columns}"
    mma = f"tcgen05.mma.cta_group::{group}.kind::{KINDS[kind]} [%r50], %d10, %d11, %r26, %p7; mov.pred %p7, -1;\n"
    body = "".join(copy_in(f"p{i + 1}", at, len(images[i][0]) // group) for i, at in enumerate((A_AT, B_AT)))
    body += MMA.format(
        group=group, a_desc=signed(images[0][1]), b_desc=signed(images[1][1]), idesc=idesc, mask=(1 << group) - 1,
        mmas=mma * steps, load=f"tcgen05.ld.sync.aligned.{shape}.b32 {{{regs}}}, [%r28];", lane=lane << 16,
    )  # fmt: skip
    body += store_registers(count, 100)
    assert doctor[0] in body
    out = np.zeros((group, 128, count), np.uint32)
    arrays = (out, images[0][0], images[1][0])
    if a_lines is not None:
        body = body.replace("READY: bar.sync 0;", A_TO_TMEM).replace("[%r50], %d10,", "[%r50], [%r63],")
        arrays = (out, padded(a_lines, len(images[0][0])), images[1][0])
    run_snippet(body.replace(*doctor), arrays, threads=128, cluster=group, schedule=schedule, smem_bytes=80 * 1024)
    reference = steps * (a.astype(np.float64) @ b.astype(np.float64).T)
    return arrange(out.view(np.int32 if kind == "s8" else np.float32), m, n, group), reference


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


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), list(itertools.product([False, True], repeat=2)))
def test_tcgen05_layouts(span: int, a_mn: bool, b_mn: bool) -> None:
    got, expected = run_tcgen05("bf16", 1, 128, 64, a_mn, b_mn, span)
    assert (got == expected).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_tcgen05_kinds(kind: str) -> None:
    got, expected = run_tcgen05(kind, 1, 128, 64, False, False, 128, steps=2)
    assert (got == expected).all()


@pytest.mark.parametrize(("group", "m", "lane"), [(1, 128, 0), (1, 64, 0), (1, 64, 16), (2, 256, 0), (2, 128, 0)])
@pytest.mark.parametrize("schedule", Schedule.standard(3), ids=lambda s: s.name)
def test_tcgen05_shapes(group: int, m: int, lane: int, schedule: Schedule) -> None:
    got, expected = run_tcgen05("f16", group, m, 64, False, True, 64, lane, 3, schedule)
    assert (got == expected).all()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
        ("WAIT: mbarrier.try_wait.parity.shared.b64 %p8, [%r10], 0; @%p8 bra OK; bra WAIT;", "", "uninitialised-read"),
        ("@!%p1 bra END;", "bra END;", "tmem-leak"),
        ("mov.pred %p7, 0;", "mov.pred %p7, -1;", "uninitialised-read"),
        ("add.s32 %r28, %r27, %r50;", "add.s32 %r28, %r50, 2097152;", "tmem"),
        ("mov.b32 %r22, 512;", "mov.b32 %r22, 48;", "tmem"),
        ("mov.b32 %r22, 512;", "mov.b32 %r22, 32;", "tmem"),
        ("READY: bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;", "READY:", "race uninitialised-read"),
        ("tcgen05.wait::ld.sync.aligned; bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;", "", "race tmem"),
        ("@%p6 bra ISSUED;", "@!%p1 bra ISSUED;", "multiple-issue"),
    ],
)  # fmt: skip
def test_tcgen05_rules(old: str, new: str, rule: str) -> None:
    """One-CTA kernel, one thing taken away or changed."""
    for schedule in Schedule.standard()[:2]:
        with pytest.raises(Fault) as error:
            run_tcgen05("bf16", 1, 128, 64, False, False, 128, schedule=schedule, doctor=(old, new))
        assert error.value.rule in rule.split(), error.value


A_TO_TMEM = """
READY: bar.sync 0; ld.shared.b32 %r60, [%r10+16]; shr.u32 %r61, %r1, 5; shl.b32 %r61, %r61, 21;
add.s32 %r62, %r60, %r61; add.s32 %r62, %r62, 256; ld.param.b64 %d30, [p1]; mul.wide.u32 %d31, %r1, 32;
add.s64 %d32, %d30, %d31; ld.global.v4.b32 {%r70, %r71, %r72, %r73}, [%d32];
ld.global.v4.b32 {%r74, %r75, %r76, %r77}, [%d32+16];
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r62], {%r70, %r71, %r72, %r73, %r74, %r75, %r76, %r77};
tcgen05.wait::st.sync.aligned; add.s32 %r63, %r60, 256; bar.sync 0;
"""


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "tf32"])
def test_tcgen05_a_in_tmem(kind: str) -> None:
    """Each thread stores one row of A, 32 bytes, into its lane."""
    size = DTYPES[kind].itemsize
    a = random_operand(np.random.default_rng(128 + 64), 128, kind)
    lines = a.view(np.uint8).reshape(-1)
    got, expected = run_tcgen05(kind, 1, 128, 64, False, False, 128, a_lines=lines)
    assert size * a.shape[1] == 32 and (got == expected).all()


WGMMA = """
fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %d10, {a_desc}; mov.b64 %d11, {b_desc}; mov.pred %p7, 0;
{clear}
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind}.{kind} {{{regs}}}, %d10, %d11, %p7, {flags};
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind}.{kind} {{{regs}}}, %d10, %d11, 1, {flags};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mov.b32 %r24, 0;
"""


A_FROM_GLOBAL = """
ld.param.b64 %d30, [p1]; shr.u32 %r50, %r1, 5; shl.b32 %r50, %r50, 4; and.b32 %r51, %r1, 31; shr.u32 %r52, %r51, 2;
add.s32 %r50, %r50, %r52; shl.b32 %r50, %r50, 5; and.b32 %r53, %r1, 3; shl.b32 %r53, %r53, 2; add.s32 %r50, %r50, %r53;
cvt.u64.u32 %d31, %r50; add.s64 %d32, %d30, %d31; ld.global.b32 %r60, [%d32]; ld.global.b32 %r61, [%d32+256];
ld.global.b32 %r62, [%d32+16]; ld.global.b32 %r63, [%d32+272];
"""


def run_wgmma(
    kind: str, n: int, a_mn: bool, b_mn: bool, span: int, schedule: Schedule, doctor: tuple[str, str] = ("", ""),
    a_in_registers: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """D from the registers, as (64, n), and the reference."""
    rng = np.random.default_rng(n)
    a, b = random_operand(rng, 64, kind), random_operand(rng, n, kind)
    images = []
    for matrix, mn, at in ((a, a_mn, A_AT), (b, b_mn, B_AT)):
        lbo, sbo, total = strides(len(matrix), a.itemsize, span, mn)
        bytes_ = padded(image(matrix, span, mn, lbo, sbo, 0x400 + at, total), 2048)
        images.append((bytes_, descriptor(at, lbo, sbo, LAYOUT_SM90[span], False)))
    regs = ", ".join(f"%r{100 + j}" for j in range(n // 2))
    flags = "1, 1" + (f", {int(a_mn)}, {int(b_mn)}" if a.itemsize == 2 else "")
    body = copy_in("p1", A_AT, len(images[0][0])) + copy_in("p2", B_AT, len(images[1][0]))
    body += WGMMA.format(
        a_desc=signed(images[0][1]), b_desc=signed(images[1][1]), n=n, k=a.shape[1], kind=kind, regs=regs,
        d="s32" if kind == "s8" else "f32", flags=flags,
        clear="".join(f"mov.b32 %r{100 + j}, 0;" for j in range(n // 2)),
    ).replace(", 1, 1;", ";" if kind == "s8" else ", 1, 1;")  # fmt: skip
    body += store_registers(n // 2, 100)
    out = np.zeros((128, n // 2), np.uint32)
    assert doctor[0] in body
    arrays = (out, images[0][0], images[1][0])
    if a_in_registers:
        body = body.replace("wgmma.fence", A_FROM_GLOBAL + "wgmma.fence", 1)
        body = body.replace("%d10, %d11", "{%r60, %r61, %r62, %r63}, %d11").replace(", 1, 1, 0, 0;", ", 1, 1, 0;")
        arrays = (out, padded(a.view(np.uint8).reshape(-1), len(images[0][0])), images[1][0])
    run_snippet(body.replace(*doctor), arrays, threads=128, schedule=schedule, target="sm_90a", smem_bytes=80 * 1024)
    d = np.empty((64, n))
    values = out.view(np.int32 if kind == "s8" else np.float32)
    for row, column in itertools.product(range(64), range(n)):
        thread = 32 * (row // 16) + row % 8 * 4 + column % 8 // 2
        d[row, column] = values[thread, column // 8 * 4 + row % 16 // 8 * 2 + column % 2]
    return d, 2 * (a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), list(itertools.product([False, True], repeat=2)))
def test_wgmma_layouts(span: int, a_mn: bool, b_mn: bool) -> None:
    for schedule in Schedule.standard()[:2]:
        got, expected = run_wgmma("bf16", 64, a_mn, b_mn, span, schedule)
        assert (got == expected).all()


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_wgmma_a_in_registers(kind: str) -> None:
    """Each thread picks its words of A out of the unswizzled rows."""
    got, expected = run_wgmma(kind, 32, False, False, 128, Schedule(), a_in_registers=True)
    assert (got == expected).all()


@pytest.mark.parametrize("kind", ["f16", "e4m3", "e5m2", "s8"])
def test_wgmma_kinds(kind: str) -> None:
    got, expected = run_wgmma(kind, 32, False, False, 128, Schedule())
    assert (got == expected).all()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0;", "missing-proxy-fence"),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "fence.proxy.async.shared::cta;", "race uninitialised-read"),
        ("wgmma.wait_group.sync.aligned 0;", "", "register-in-flight"),
        ("wgmma.commit_group.sync.aligned;", "", "register-in-flight"),
        ("wgmma.fence.sync.aligned;", "", "missing-wgmma-fence"),
    ],
)
def test_wgmma_rules(old: str, new: str, rule: str) -> None:
    for schedule in Schedule.standard()[:2]:
        with pytest.raises(Fault) as error:
            run_wgmma("bf16", 32, False, False, 128, schedule, (old, new))
        assert error.value.rule in rule.split(), error.value
