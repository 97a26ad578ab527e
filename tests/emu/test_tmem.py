"""tcgen05.ld and .st of every shape, and tcgen05.cp: which lane and column each bit goes to, and what orders them."""

from __future__ import annotations

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, UnsupportedInstruction
from tests.emu.layouts import image
from tests.emu.mma import A_AT, LAYOUT_SM100, MMA, copy_in, descriptor, run_tcgen05, signed, store_registers
from tests.emu.snippet import run_snippet

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def cell(shape: str, count: int, thread: int, register: int, bit: int) -> tuple[int, int]:
    """Lane and bit within the lane, by the strides in bits of CUTLASS's layouts (copy_traits_sm100.hpp, DstLayout)."""
    if shape == "32x32b":
        return thread, 32 * register + bit
    if shape == "16x32bx2":
        width = 64 * count
        at = thread % 16 * width + thread // 16 * width // 2 + 32 * register + bit
    elif shape == "16x64b":
        width = 64 * count
        at = thread % 2 * 8 * width + thread // 2 % 2 * 32 + thread // 4 * width + register * 64 + bit
    elif shape == "16x128b":
        width = 128 * count
        at = thread % 4 * 32 + thread // 4 * width + register % 2 * 8 * width + register // 2 * 128 + bit
    else:
        width = 256 * count
        value, half, turn = register % 2 * 32 + bit, register // 2 % 2, register // 4
        at = thread % 4 * 64 + thread // 4 * width + value + half * 8 * width + turn * 256
    return divmod(at, width)


TRANSFER = """
mov.u32 %r1, %tid.x; mov.b32 %r10, smem; mov.b32 %r20, 512; mov.b32 %r24, 0;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], %r20; bar.warp.sync -1; ld.shared.b32 %r23, [%r10];
{fill}
tcgen05.st.sync.aligned.32x32b.x64.b32 [%r23], {{{first}}}; tcgen05.wait::st.sync.aligned;
add.s32 %r25, %r23, {lane};
{body}
tcgen05.wait::ld.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r23, %r20;
"""
FILL = np.arange(32, dtype=np.uint32)[:, None] * 0x10000 + 0x7000_0000 + np.arange(64, dtype=np.uint32) * 7


def registers(count: int, first: int = 100) -> str:
    return ", ".join(f"%r{first + j}" for j in range(count))


def transfer(body: str, count: int, lane: int = 0, **options: bool) -> np.ndarray:
    """`body` finds FILL in lanes 0..31, columns 0..63; registers 200.. of each thread come back."""
    fill = "mul.lo.s32 %r30, %r1, 65536;" + "".join(
        f"add.s32 %r{100 + c}, %r30, {0x7000_0000 + 7 * c};" for c in range(64)
    )
    text = TRANSFER.format(fill=fill, first=registers(64), lane=lane << 16, body=body) + store_registers(count, 200)
    out = np.zeros((32, count), np.uint32)
    run_snippet(text, (out,), **options)
    return out


FORMS = [(shape, count, lane, packed) for shape in REGISTERS for count in (1, 2, 4) for packed in (False, True)
         for lane in ((0,) if shape == "32x32b" else (0, 16))]  # fmt: skip


def split_of(shape: str, count: int, packed: bool) -> str:
    return f", {count * (1 + packed)}" if shape == "16x32bx2" else ""


@pytest.mark.parametrize(("shape", "count", "lane", "packed"), FORMS)
def test_load(shape: str, count: int, lane: int, packed: bool) -> None:
    """With .pack::16b each 16 bits of the fragment are the low half of a column of their own."""
    regs = REGISTERS[shape] * count
    form = f"{shape}.x{count}{'.pack::16b' if packed else ''}.b32"
    body = f"tcgen05.ld.sync.aligned.{form} {{{registers(regs, 200)}}}, [%r25]{split_of(shape, count, packed)};"
    got = transfer(body, regs, lane)
    for thread in range(32):
        for register in range(regs):
            parts = [cell(shape, count, thread, register, bit) for bit in (0, 16)]
            if packed:
                low, high = (int(FILL[lane + row, bit // 16]) & 0xFFFF for row, bit in parts)
                assert got[thread, register] == low | high << 16
            else:
                assert got[thread, register] == FILL[lane + parts[0][0], parts[0][1] // 32]


@pytest.mark.parametrize(("shape", "count", "lane", "packed"), FORMS)
def test_store(shape: str, count: int, lane: int, packed: bool) -> None:
    """All else keeps what it had. The high halves under .unpack::16b are all ones."""
    regs = REGISTERS[shape] * count
    values = "".join(f"add.s32 %r{300 + j}, %r30, {1000 * j + 1};" for j in range(regs))
    form = f"{shape}.x{count}{'.unpack::16b' if packed else ''}.b32"
    body = f"{values} tcgen05.st.sync.aligned.{form} [%r25]{split_of(shape, count, packed)}, "
    body += f"{{{registers(regs, 300)}}}; tcgen05.wait::st.sync.aligned;"
    got = transfer(body + f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{registers(64, 200)}}}, [%r23];", 64, lane)
    expected = FILL.copy()
    for thread in range(32):
        for register in range(regs):
            value = 65536 * thread + 1000 * register + 1
            for half in (0, 1):
                row, bit = cell(shape, count, thread, register, 16 * half)
                if packed:
                    expected[lane + row, bit // 16] = 0xFFFF0000 | value >> 16 * half & 0xFFFF
                else:
                    expected[lane + row, bit // 32] = value
    assert (got == expected).all()


@pytest.mark.parametrize(
    ("instruction", "rule"),
    [
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r200}, [%r25], 1;", None),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r200}, [%r25];", None),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r200}, [%r25], %r1;", None),
        ("tcgen05.ld.sync.aligned.16x64b.x3.b32 {%r200, %r201, %r202}, [%r25];", None),
        ("tcgen05.ld.sync.aligned.16x64b.x1.unpack::16b.b32 {%r200}, [%r25];", None),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r200, %r201}, %r202, [%r25];", None),
        ("tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%r25], 1, {%r100, %r101};", None),
        ("tcgen05.st.sync.aligned.16x128b.x1.pack::16b.b32 [%r25], {%r100, %r101};", None),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r200}, [%r25], 511;", "uninitialised-read"),
        ("add.s32 %r26, %r25, 511; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r200}, [%r26];", "tmem"),
        ("add.s32 %r26, %r25, 524288; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r200}, [%r26];", "tmem"),
        ("tcgen05.st.sync.aligned.16x64b.x1.b32 [%r25], {%r100}; bar.sync 0;", "missing-tmem-wait"),
    ],
)
def test_load_and_store_rules(instruction: str, rule: str | None) -> None:
    with pytest.raises(UnsupportedInstruction if rule is None else Fault) as error:
        transfer(instruction, 1)
    assert rule is None or error.value.rule == rule  # type: ignore[attr-defined]


WARP_ROWS = {
    "128x256b": (0, 32, 64, 96),
    "128x128b": (0, 32, 64, 96),
    "64x128b.warpx2::02_13": (0, 32, 0, 32),
    "64x128b.warpx2::01_23": (0, 0, 32, 32),
    "32x128b.warpx4": (0, 0, 0, 0),
    "4x256b": (0, 1, 2, 3),
}  # the first source row that each warp's lanes get
CLEAR = """
READY: bar.sync 0; ld.shared.b32 %r60, [%r10+16]; shr.u32 %r61, %r1, 5; shl.b32 %r61, %r61, 21;
add.s32 %r62, %r60, %r61; mov.b32 %r70, 77;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r62], {%r70, %r70, %r70, %r70, %r70, %r70, %r70, %r70};
tcgen05.wait::st.sync.aligned; bar.sync 0;
"""


def run_copy(
    form: str, group: int = 1, span: int = 0, schedule: Schedule | None = None, lane: int = 0,
    doctor: tuple[str, str] = ("", ""),
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What each CTA's 128 lanes hold afterwards, where 77 was before, and each CTA's source."""
    rows, size = int(form.split("x")[0]), 32 if "256b" in form else 16
    source = np.random.default_rng(rows + span).integers(0, 256, (group, rows, size), np.uint8)
    lbo, sbo = (128 * -(-rows // 8), 128) if not span else (16, 8 * span)
    total = -(-max(rows, 8) * max(span, 32) // 2048) * 2048
    images = [image(part, span, False, lbo, sbo, 0x400 + A_AT, total) for part in source]
    count = size // 4
    load = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers(count)}}}, [%r28];"
    desc = signed(descriptor(A_AT, lbo, sbo, LAYOUT_SM100[span, 16], True))
    body = copy_in("p1", A_AT, total) + MMA.format(
        group=group, a_desc=desc, b_desc=0, idesc=0, mask=(1 << group) - 1, lane=lane << 16, load=load,
        mmas=f"tcgen05.cp.cta_group::{group}.{form} [%r50], %d10;",
    )  # fmt: skip
    body = body.replace("READY: bar.sync 0;", CLEAR).replace("%r27, %r50;", "%r27, %r23;") + store_registers(count, 100)
    assert doctor[0] in body
    out = np.zeros((group, 128, count), np.uint32)
    run_snippet(body.replace(*doctor), (out, np.concatenate(images)), threads=128, cluster=group, schedule=schedule)
    return out, source.view(np.uint32)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("form", WARP_ROWS)
def test_copy(form: str, group: int, span: int) -> None:
    lane = 31 if form == "4x256b" and span else 0
    for schedule in Schedule.standard(span)[:5:4]:
        got, source = run_copy(form, group, span, schedule, lane=lane)
        expected = np.full_like(got, 77)
        for warp, first in enumerate(WARP_ROWS[form]):
            if form == "4x256b":
                expected[:, 32 * warp + lane] = source[:, first]
            else:
                expected[:, 32 * warp : 32 * warp + 32] = source[:, first : first + 32]
        assert (got == expected).all()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
        ("WAIT: mbarrier.try_wait.parity.shared.b64 %p8, [%r10], 0; @%p8 bra OK; bra WAIT;", "",
         "race read-before-completion"),
        ("@%p6 bra ISSUED;", "@!%p1 bra ISSUED;", "multiple-issue"),
        ("tcgen05.cp", "add.s32 %r50, %r50, 2; tcgen05.cp", "tmem"),
        ("tcgen05.cp", "add.s32 %r50, %r50, 65536; tcgen05.cp", "tmem"),
        ("[%r50], %d10;", "[%r50], %d10; tcgen05.cp.cta_group::1.128x128b [%r50], %d10;", "overwrite-in-flight"),
        ("tcgen05.wait::st.sync.aligned; bar.sync 0;", "bar.sync 0;", "missing-tmem-wait"),
    ],
)  # fmt: skip
def test_copy_rules(old: str, new: str, rule: str) -> None:
    for schedule in Schedule.standard()[:2]:
        with pytest.raises(Fault) as error:
            run_copy("128x128b", schedule=schedule, doctor=(old, new))
        assert error.value.rule in rule.split(), error.value


@pytest.mark.parametrize(
    "form", ["64x128b", "32x128b", "128x256b.warpx4", "64x128b.warpx4", "128x256b.b8x16.b6x16_p32", "warpx4"]
)
def test_copies_that_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_copy("128x128b", doctor=("128x128b", form))


ISSUE = "tcgen05.mma.cta_group::1.kind::f16 [%r50], %d10,"
COPY_A = "add.s32 %r63, %r23, 256; tcgen05.cp.cta_group::1.128x256b [%r63], %d10;"


@pytest.mark.parametrize("schedule", Schedule.standard(5), ids=lambda s: s.name)
def test_an_mma_runs_after_the_copies_of_its_thread(schedule: Schedule) -> None:
    """A comes through a copy that nobody waits for."""
    new = COPY_A + ISSUE.replace("%d10", "[%r63]")
    got, expected = run_tcgen05("bf16", 1, 128, 64, False, False, 128, schedule=schedule, doctor=(ISSUE, new))
    assert (got == expected).all()


def test_a_copy_does_not_wait_for_the_mma_before_it() -> None:
    """The PTX ISA pairs copies with later MMAs, not MMAs with later copies."""
    copy = "tcgen05.cp.cta_group::1.128x256b [%r50], %d10; tcgen05.commit"
    with pytest.raises(Fault) as error:
        run_tcgen05("bf16", 1, 128, 64, False, False, 128, schedule=Schedule(), doctor=("tcgen05.commit", copy))
    assert error.value.rule == "overwrite-in-flight"


ALLOC = "mov.b32 %r10, smem;" + "".join(
    f"mov.b32 %r{20 + i}, {cols}; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+{4 * i}], %r{20 + i};"
    f"bar.warp.sync -1; ld.shared.b32 %r{30 + i}, [%r10+{4 * i}];" for i, cols in enumerate(("{}", "{}"))
) + "".join(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r{30 + i}, %r{20 + i};" for i in range(2))  # fmt: skip


def test_allocations_must_not_grow() -> None:
    """PTX ISA, tcgen05.alloc: the columns must not increase between two allocations of a CTA."""
    for first, second in ((64, 32), (128, 128)):
        run_snippet(ALLOC.format(first, second))
    with pytest.raises(Fault, match="64 columns after one of 32") as error:
        run_snippet(ALLOC.format(32, 64))
    assert error.value.rule == "tmem"


LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r200, %r201}, [%r25];"
WAIT = "tcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize(
    "body",
    [
        LOAD + "add.s32 %r202, %r201, 1;",
        LOAD + "mov.b64 %d1, {%r200, %r201};",
        LOAD + "setp.eq.u32 %p1, %r200, 0;",
        LOAD + "st.shared.b32 [%r10], %r200;",
        LOAD + "mov.b32 %r202, %r200;" + WAIT + "add.s32 %r203, %r202, 1;",
        LOAD + "mov.b32 %r200, 0;" + WAIT,
        LOAD + LOAD + WAIT,
        LOAD + "shfl.sync.idx.b32 %r202, %r200, 0, 31, -1;",
        LOAD + "setp.lt.u32 %p1, %r1, 5; @%p1 mov.b32 %r201, 7;" + WAIT,
        LOAD + "tcgen05.wait::st.sync.aligned; add.s32 %r202, %r201, 1;",
    ],
)
def test_registers_have_no_value_before_the_wait(body: str) -> None:
    with pytest.raises(Fault) as error:
        transfer(body, 2)
    assert error.value.rule == "register-in-flight", error.value


def test_registers_have_a_value_behind_the_wait() -> None:
    body = LOAD + LOAD.replace("%r20", "%r21").replace("[%r25]", "[%r25+2]") + WAIT + "add.s32 %r201, %r201, %r210;"
    assert (transfer(body, 2)[:, 1] == FILL[:, 1] + FILL[:, 2]).all()


def test_a_scoreboard_takes_the_place_of_the_wait() -> None:
    """Before the registers are read, not before the load is handed on."""
    got = transfer(LOAD + "add.s32 %r201, %r201, 1;", 2, tmem_scoreboard=True)
    assert (got[:, 1] == FILL[:, 1] + 1).all()
    with pytest.raises(Fault) as error:
        transfer(LOAD + "add.s32 %r201, %r201, 1; bar.sync 0;", 2, tmem_scoreboard=True)
    assert error.value.rule == "missing-tmem-wait"


def test_a_load_that_nobody_waits_for_is_not_handed_on() -> None:
    with pytest.raises(Fault) as error:
        transfer(LOAD + "bar.sync 0;", 2)
    assert error.value.rule == "missing-tmem-wait"
