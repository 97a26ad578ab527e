"""tcgen05.mma and wgmma: layouts, shapes and types against NumPy, and what their rules catch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, UnsupportedInstruction
from tests.emu.layouts import image, strides
from tests.emu.mma import (
    A_AT,
    B_AT,
    DTYPES,
    LAYOUT_SM90,
    copy_in,
    descriptor,
    padded,
    random_operand,
    run_tcgen05,
    signed,
    store_registers,
)
from tests.emu.snippet import run_snippet


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


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("s8", "u8"), ("u8", "s8"), ("f16", "bf16")])
@pytest.mark.parametrize(("group", "m"), [(1, 64), (1, 128), (2, 128), (2, 256)])
def test_tcgen05_mixed_types(a: str, b: str, group: int, m: int) -> None:
    got, expected = run_tcgen05(a, group, m, 128, False, True, 64, b_kind=b)
    assert (got == expected).all()


@pytest.mark.parametrize("kind", ["bf16", "tf32", "e4m3", "u8"])
@pytest.mark.parametrize(
    ("group", "m", "n"),
    [(1, 64, 8), (1, 64, 48), (1, 64, 256), (1, 128, 16), (1, 128, 176), (1, 128, 256), (2, 128, 32), (2, 128, 160),
     (2, 128, 256), (2, 256, 32), (2, 256, 224), (2, 256, 256)],
)  # fmt: skip
def test_tcgen05_columns(kind: str, group: int, m: int, n: int) -> None:
    got, expected = run_tcgen05(kind, group, m, n, False, False, 128, steps=2)
    assert (got == expected).all()


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize(("kind", "group", "m"), [("e5m2", 1, 128), ("s8", 2, 256), ("e4m3", 2, 128), ("u8", 1, 64)])
def test_tcgen05_8_bit_rows(kind: str, group: int, m: int, span: int) -> None:
    """MN-major operands of bytes; swizzles that B's few columns fill."""
    n = max(span * group, 32)
    got, expected = run_tcgen05(kind, group, m, n, span <= m // group, True, span)
    assert (got == expected).all()


@pytest.mark.parametrize(("a_mn", "b_mn"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 32), (1, 64, 96), (2, 128, 64), (2, 256, 192)])
def test_tcgen05_tf32_rows(a_mn: bool, b_mn: bool, group: int, m: int, n: int) -> None:
    """MN-major TF32 lies in 32-byte swizzle atoms, and in no other layout; nothing else lies so."""
    got, expected = run_tcgen05("tf32", group, m, n, a_mn, b_mn, 128, atom=32)
    assert (got == expected).all()
    for kind, atom in (("tf32", 16), ("bf16", 32)):
        with pytest.raises(Fault, match="32-byte swizzle atoms are the only layout of MN-major 32-bit elements"):
            run_tcgen05(kind, 1, 128, 64, a_mn, b_mn, 128, atom=atom)


@pytest.mark.parametrize(
    ("m", "n", "kind", "bits", "words"),
    [
        (128, 24, "bf16", 0, "not a shape of cta_group::1"),
        (64, 40, "s8", 0, "40 columns with 64 rows"),
        (128, 32, "s8", 1 << 13, "integers are not negated"),
        (128, 32, "bf16", 1 << 3, "is not modelled"),
        (128, 32, "tf32", 2 << 4, "is not modelled"),
        (128, 32, "bf16", 1 << 2, "is not modelled"),
    ],
)
def test_tcgen05_shapes_that_there_are_not(m: int, n: int, kind: str, bits: int, words: str) -> None:
    with pytest.raises(Fault, match=words):
        run_tcgen05(kind, 1, m, n, False, False, 128, idesc_bits=bits)


@pytest.mark.parametrize("saturates", [False, True])
def test_tcgen05_integers_at_their_limit(saturates: bool) -> None:
    """2^31 - 1 stands in D before an MMA of ones: 32 more wrap around, or bit 3 of the descriptor holds them."""
    ones = np.ones((128, 32), np.int8), np.ones((32, 32), np.int8)
    start = "mov.b32 %r70, 2147483647; add.s32 %r71, %r23, %r72; " + "".join(
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r71+{j}], {{%r70}}; " for j in range(32)
    )
    before = "ld.shared.b32 %r23, [%r10+16]; shr.u32 %r72, %r1, 5; shl.b32 %r72, %r72, 21; " + start
    doctor = (
        "barrier.cluster.arrive; barrier.cluster.wait;\nld.shared",
        f"{before} tcgen05.wait::st.sync.aligned; bar.sync 0; mov.pred %p20, -1;\nld.shared",
    )
    got, _ = run_tcgen05(
        "s8", 1, 128, 32, False, False, 128, inputs=ones, idesc_bits=saturates << 3, doctor=doctor,
        accumulate=True,
    )  # fmt: skip
    assert (got == (2**31 - 1 if saturates else 31 - 2**31)).all()


@pytest.mark.parametrize("target", ["sm_103a", "sm_100f"])
def test_who_has_no_integer_mma(target: str) -> None:
    """ptxas 13.0: Feature '.kind::i8' not supported on .target 'sm_103a'; nor is it one of the family's."""
    run_tcgen05("e4m3", 1, 128, 32, False, False, 128, target=target)
    with pytest.raises(UnsupportedInstruction, match=rf"{target} has no tcgen05.mma.kind::i8"):
        run_tcgen05("s8", 1, 128, 32, False, False, 128, target=target)


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
        ("bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait; @!%p1 bra END;", "@!%p1 bra END;", "race tmem"),
        ("@%p6 bra ISSUED;", "@!%p1 bra ISSUED;", "multiple-issue"),
    ],
)  # fmt: skip
def test_tcgen05_rules(old: str, new: str, rule: str) -> None:
    """One-CTA kernel, one thing taken away or changed."""
    for schedule in Schedule.standard()[:2]:
        with pytest.raises(Fault) as error:
            run_tcgen05("bf16", 1, 128, 64, False, False, 128, schedule=schedule, doctor=(old, new))
        assert error.value.rule in rule.split(), error.value


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
    ("old", "new"),
    [
        ("m64n32k16", "m64n36k16"),
        ("f32.bf16.bf16", "f32.bf16.f16"),
        ("f32.bf16.bf16", "s32.bf16.bf16"),
        ("f32.bf16.bf16", "f32.e4m3.e4m3"),
        (", 1, 1, 0, 0;", ", 1, 1, 0;"),
        ("m64n32k16", "m64n32k16.satfinite"),
    ],
)
def test_wgmma_forms_that_there_are_not(old: str, new: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_wgmma("bf16", 32, False, False, 128, Schedule(), (old, new))


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


@pytest.mark.parametrize(
    ("behind", "rule"),
    [("wgmma.fence.sync.aligned;", "missing-wgmma-fence"), ("wgmma.commit_group.sync.aligned;", "register-in-flight")],
)
def test_wgmma_registers_of_a_are_left_alone(behind: str, rule: str) -> None:
    """A register of A written between the fence and the wgmma, and before the wgmma is waited for."""
    for schedule in Schedule.standard()[:2]:
        with pytest.raises(Fault) as error:
            doctor = behind, f"{behind} mov.b32 %r61, 0;"
            run_wgmma("bf16", 32, False, False, 128, schedule, doctor, a_in_registers=True)
        assert error.value.rule == rule, error.value


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("kind", "n"),
    [(kind, n) for kind in ("e4m3", "e5m2", "s8", "u8") for n in (8, 24, 40) if kind[0] == "e" or n < 40],
)
def test_columns_that_end_within_16_bytes(kind: str, span: int, n: int) -> None:
    """An MN-major B of 8-bit elements, N % 16 = 8. kind::i8 has no 40 columns."""
    got, expected = run_tcgen05(kind, 1, 64, n, False, True, span)
    assert (got == expected).all()


@pytest.mark.parametrize("bits", [1 << 13, 1 << 14, 3 << 13])
def test_a_negated_sum_of_zeros_is_positive(bits: int) -> None:
    zeros = np.zeros((128, 16), DTYPES["bf16"]), np.zeros((64, 16), DTYPES["bf16"])
    got, _ = run_tcgen05("bf16", 1, 128, 64, False, False, 128, inputs=zeros, idesc_bits=bits)
    assert not np.signbit(got).any()


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10], %h1;"


def test_a_commit_before_one_that_is_awaited() -> None:
    """Commits of a thread arrive in order: what is waited for last stands for all. Without that wait it is a fault."""
    early = "mov.b32 %r90, 1; mbarrier.init.shared.b64 [%r10+32], %r90; fence.mbarrier_init.release.cluster;"
    early += COMMIT.replace("[%r10]", "[%r10+32]")
    for schedule in Schedule.standard(4):
        got, expected = run_tcgen05("bf16", 1, 128, 64, False, False, 128, schedule=schedule,
                                    doctor=(COMMIT, early + COMMIT))  # fmt: skip
        assert (got == expected).all()
    with pytest.raises(Fault) as error:
        run_tcgen05("bf16", 1, 128, 64, False, False, 128, doctor=(COMMIT, COMMIT + early))
    assert error.value.rule == "exit-in-flight"
