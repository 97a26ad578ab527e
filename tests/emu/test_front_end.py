"""Parsing and decoding: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_bwgemm.emulator import (
    Launch,
    LaunchError,
    Memory,
    PtxSyntaxError,
    TensorMap,
    UnsupportedInstruction,
    parse,
    run,
)
from tests.emu.snippet import module_text, run_snippet


def test_entry_facts() -> None:
    text = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 a, .param .align 64 .b8 b[128], .param .u64 .ptr .global .align 16 c, .param .u8 d)
.maxntid 128, 1, 1
.minnctapersm 1
{ ret; }
"""
    entry = parse(text).entry
    assert [(p.offset, p.size) for p in entry.params] == [(0, 4), (64, 128), (192, 8), (200, 1)]
    assert entry.block is None and entry.max_threads == 128


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("frobnicate.b32 %r1, %r2;", UnsupportedInstruction, "line 9: `frobnicate.b32 %r1, %r2`: unknown opcode"),
        ("add.s32.sat %r1, %r2, %r3;", UnsupportedInstruction, "unknown integer type"),
        ("add.weird.s32 %r1, %r2, %r3;", UnsupportedInstruction, "unknown modifier `.weird`"),
        ("mov.b32 %r1, %nosuch;", UnsupportedInstruction, "unknown symbol|not modelled"),
        ("bra NOWHERE;", UnsupportedInstruction, "unknown label"),
        ("mov.b32 %r1, [;", PtxSyntaxError, "line 9"),
        ("mov.b32 %r1 %r2;", PtxSyntaxError, "`,` is missing"),
        ("add.s32 %r1, %r2;", UnsupportedInstruction, "requires 3 operands"),
        ("tcgen05.shift.cta_group::1.down [%r1];", UnsupportedInstruction, "unknown opcode"),
        ("mbarrier.test_wait.b64 %p1, [%r1], %d1;", UnsupportedInstruction, "requires .parity"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
            UnsupportedInstruction,
            "requires .aligned.m16n8k16",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
            UnsupportedInstruction,
            "requires 4 registers of D",
        ),
        ("min.relu.u32 %r1, %r2, %r3;", UnsupportedInstruction, "unknown modifier `.relu`"),
    ],
)
def test_refusals_name_line_and_reason(body: str, error: type[Exception], words: str) -> None:
    with pytest.raises((error, LaunchError), match=words):
        run_snippet(body)


def test_unclosed_kernel() -> None:
    with pytest.raises(PtxSyntaxError, match="`}` is missing"):
        parse(module_text("mov.b32 %r1, 1;", ()).rstrip()[:-1])


def test_launch_facts_are_checked() -> None:
    module = parse(module_text("", (1,)))
    with pytest.raises(LaunchError, match="requires a block of"):
        run(module, Launch((1, 1, 1), (64, 1, 1), (1,)), Memory())
    with pytest.raises(LaunchError, match="requires 1 parameters, got 0"):
        run(module, Launch((1, 1, 1), (32, 1, 1), ()), Memory())
    with pytest.raises(LaunchError, match="multiples of the cluster"):
        run(module, Launch((3, 1, 1), (32, 1, 1), (1,), (2, 1, 1)), Memory())
    with pytest.raises(LaunchError, match="requires 8 bytes of parameters, got 4"):
        run(module, Launch((1, 1, 1), (32, 1, 1), b"1234"), Memory())
    with pytest.raises(LaunchError, match="C-contiguous"):
        Memory().register(np.zeros((4, 4))[:, ::2], "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 8}, "multiple of 16"),
        ({"strides": (24,)}, "multiples of 16 bytes"),
        ({"box": (64, 257)}, "box extents"),
        ({"box": (4, 8)}, "inner box of a multiple of 16"),
        ({"box": (128, 8)}, "within the swizzle span"),
        ({"swizzle": 48}, "swizzle of 0, 32, 64 or 128"),
    ],
)
def test_tensor_map_rules(change: dict[str, object], words: str) -> None:
    facts: dict[str, Any] = {"address": 0, "dims": (64, 64), "strides": (128,), "box": (64, 8)} | change
    with pytest.raises(LaunchError, match=words):
        TensorMap(**facts)
