"""Programs with mistakes: what the emulator cannot run it refuses in its own words, with the line."""

from __future__ import annotations

import pytest

from jax_bwgemm.emulator import EmulatorError, Fault, Launch, LaunchError, Memory, PtxSyntaxError, parse, run
from tests.emu import fuzz
from tests.emu.snippet import module_text, run_snippet

pytestmark = pytest.mark.long

PARTS, COUNT = 4, 150  # mutants of a part; 12 ms each


@pytest.mark.parametrize("seed", range(PARTS))
def test_mutants_run_or_are_refused(seed: int) -> None:
    """`python -m tests.emu.fuzz` tries as many as one likes."""
    found = [escape for escape in fuzz.escapes(COUNT, seed) if escape is not None]
    assert not found, [(escape.program, escape.place, str(escape.error)) for escape in found]


def test_programs_run_as_they_are() -> None:
    for program in fuzz.programs()[::9]:
        program.run(program.text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("@%p1 add.s32 %r1, 1, 2;", "uninitialised-register"),
        ("@!%p1 mov.b32 %r1, 2;", "uninitialised-register"),
        ("mov.u32 %r2, %tid.x; setp.lt.u32 %p2, %r2, 5; @%p2 bra ON; @%p1 bra ON; @%p1 ret; ON:",
         "uninitialised-register"),
        ("@%r1 mov.b32 %r2, 1;", "a guard requires a predicate register"),
        ("setp.eq.b32 %p2, %r1, 0;", "uninitialised-register"),
        ("mov.b32 %r2, 1; setp.ne.and.b32 %p2, %r2, 0, %p3;", "uninitialised-register"),
        ("mov.u32 %r2, %tid.x; setp.ne.u32 %p2, %r1, %r2;", "uninitialised-register"),
        ("mov.b32 %r2, 1; selp.b32 %r3, %r2, 7, %p1;", "uninitialised-register"),
        ("mov.u32 %r2, %tid.x; selp.b32 %r3, %r2, 7, %p1;", "uninitialised-register"),
        ("mov.b32 %r2, 0x80000000; mov.u32 %r3, %tid.x; mad.lo.s32 %r1, %r2, 1024, %r3;", ""),
        ("mapa.shared::cluster %r1, %r2, %r3;", "requires|not modelled"),
        ("cvt.u32 %r1, %r2;", "modifiers are missing"),
        ("setp.b32 %p1, 1, 2;", "one comparison"),
        ("setp.eq.and.u32 %p1, 1, 2;", "requires 4 operands"),
        ("shfl.sync %r1, 1, 2, 3, 4;", "modifiers are missing"),
        ("setmaxnreg.inc.sync.aligned.u32;", "operands are missing"),
        ("div.u32 %r1, 2;", "requires 3 operands"),
        ("add.f32 %r1, 1;", "requires 3 operands"),
        ("mul.wide.u64 %d1, 1, 2;", "for .wide 16 or 32"),
        ("add.s32 %r1, %d1, 2;", "a register of 32 bits is required, got %d1 of 64"),
        ("mov.b32 %r1, 1; add.s64 %d1, %r1, 2;", "a register of 64 bits is required"),
        ("add.s64 %r1, 1, 2;", "a register of 64 bits is required, got %r1 of 32"),
        ("mov.u64 %d1, %tid.x;", "unknown symbol `%tid.x` of 64 bits"),
        ("ld.shared.v2.b32 %r1, [smem];", "requires 2 registers, got 1"),
        ("ld.shared.b7 %r1, [smem];", "unknown type"),
        ("mov.b64 %d1, -8; ld.global.b32 %r1, [%d1];", "out-of-bounds"),
        ("mov.b32 %r1, -8; ld.shared.b32 %r2, [%r1];", "out-of-bounds"),
        ("add.s32 %r600, 1, 2;", "%r600"),
        ("mov.b32 %r1, 99999999999999999999999999;", "is no number|at most 64 bits"),
        ("mov.b32 %r1, 18446744073709551616;", "at most 64 bits"),
        ("mov.b32 %r1, 09;", "is no number"),
        ("ld.shared.b32 %r1, [smem+4294967296];", "an offset requires 32 bits"),
        ("mov.b32 %r1, }{;", "is missing|where an operand|unknown"),
        ("ON: ON: mov.b32 %r1, 1;", "a second label `ON`"),
        ("mov.b32 %r1, " + "{" * 100_000 + ";", "depth of at most 64"),
        ("{" * 10_000, "depth of at most 64"),
        ("mov.b32 %r1, " + "!" * 10_000 + "%p1;", "depth of at most 64"),
    ],
)  # fmt: skip
def test_mistakes(body: str, words: str) -> None:
    if not words:
        return run_snippet(body) and None
    with pytest.raises(EmulatorError, match=words) as error:
        run_snippet(body)
    assert "PTX line 9" in str(error.value) or "PTX line" in words


def test_a_leading_zero_is_octal() -> None:
    run_snippet("mov.b32 %r1, 010; setp.ne.u32 %p1, %r1, 8; @!%p1 bra OK; trap; OK:")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("%r<512>", "%r<300000000>", "PTX line 8: a kernel requires at most 65536 registers, got 300000096"),
        ("%r<512>", f"%r<{'9' * 5000}>", "PTX line 8: a number requires at most 20 digits, got 5000"),
        (".reg .b32", ".reg .b33", "PTX line 8: unknown type `.b33`"),
        ("smem[]", "smem[1000000000000]", "PTX line 4: a kernel requires at most 232448 bytes of shared memory"),
        (".b8 smem", ".x9 smem", "PTX line 4: unknown type `.x9`"),
        (".align 1024", ".align 48", "PTX line 4: `.align` requires a power of two, got 48"),
        (".align 1024", ".align 1073741824", "`kernel` requires at most 232448 bytes of shared memory"),
        ("(.param .b64 p0)", "(.param .align 0 .b64 p0)", "`.align` requires a power of two, got 0"),
        ("(.param .b64 p0)", "(.param .b8 p0[1000000])", "at most 32764 bytes of parameters, got 1000000"),
        ("(.param .b64 p0)", "(.param .pred p0)", "parameter without a type"),
        (".reqntid 32, 1, 1", ".reqntid 1, 1, 1, 1", "`.reqntid` requires 1 to 3 numbers, got 4"),
        (".reqntid 32, 1, 1", ".reqntid ,", "`.reqntid` requires 1 to 3 numbers, got 0"),
    ],
)
def test_limits_of_a_module(old: str, new: str, words: str) -> None:
    text = module_text("", (1,))
    assert old in text
    with pytest.raises((PtxSyntaxError, LaunchError), match=words):
        run(parse(text.replace(old, new)), Launch((1, 1, 1), (32, 1, 1), (1,)), Memory())


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch((1, 1, 1), (1000, 1000, 1), (1,)), "a block requires at most 1024 threads, got 1000000"),
        (Launch((1, 1, 1), (0, 1, 1), (1,)), r"a block requires 1 to \(1024, 1024, 64\) along x, y and z"),
        (Launch((1, 1, 1), (1, 1, 65), (1,)), "a block requires 1 to"),
        (Launch((1, 1 << 16, 1), (32, 1, 1), (1,)), "a grid requires 1 to"),
        (Launch((32, 1, 1), (32, 1, 1), (1,), (32, 1, 1)), "a cluster requires 1 to 16 CTAs"),
        (Launch((1, 1, 1), (32, 1, 1), (1,), (0, 1, 1)), "a cluster requires 1 to 16 CTAs"),
        (Launch((1, 1, 1), (32, 1, 1), (1,), smem_bytes=1 << 40), "232448 bytes of shared memory, got 1099511627776"),
        (Launch((1, 1, 1), (32, 1, 1), (1,), smem_bytes=-1), "232448 bytes of shared memory, got -1"),
        (Launch((1, 1, 1), (32, 1, 1), (1 << 64,)), "parameter 0 requires 8 bytes, got 18446744073709551616"),
    ],
)
def test_limits_of_a_launch(launch: Launch, words: str) -> None:
    text = module_text("", (1,)).replace(".reqntid 32, 1, 1", "")
    with pytest.raises(LaunchError, match=words):
        run(parse(text), launch, Memory())


def test_a_kernel_without_an_end() -> None:
    text = module_text("mov.b32 %r1, 1;", ()).replace("ret;", "")
    with pytest.raises(Fault, match="without ret or exit") as error:
        run(parse(text), Launch((1, 1, 1), (32, 1, 1), ()), Memory())
    assert error.value.rule == "no-exit" and error.value.where is not None and error.value.where.line == 9
