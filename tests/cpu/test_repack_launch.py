"""The handler of repacks without a GPU: what it launches, and what it refuses, on the stand-in for the CUDA driver."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import struct
from typing import Any

import fake_machine
import jax.numpy as jnp
import numpy as np
import pytest
from fake_machine import (
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    STREAM,
    VARIANT,
    Machine,
)

from jax_bwgemm.facts.repack import NUM_THREADS, Repack
from jax_bwgemm.runtime import ffi

pytestmark = fake_machine.needs
SOURCE, OUT = 0x7F0000000006, 0x7F0000200010


@dataclasses.dataclass
class Request:
    attributes: dict[str, Any]
    sources: list[ffi.Buffer]
    outs: list[ffi.Buffer]

    @property
    def given(self) -> ffi.Buffers:
        return ffi.Buffers.of(self.sources, self.outs)


def request(kind="pad", dtype="bfloat16", shape=(2, 100, 33), pitch=None, source=None, out=None, **fields) -> Request:
    """Into rows of the next multiple of 16 bytes, if `pitch` is None."""
    repack = Repack("sm_90a", kind, np.dtype(jnp.dtype(dtype)).itemsize)
    batch, *rows_cols = shape
    slow, contiguous = rows_cols if kind == "pad" else rows_cols[::-1]
    step = 16 // repack.element_bytes
    out_shape = batch, slow, pitch or -(-contiguous // step) * step
    attributes = {
        "kind": kind,
        "element_bytes": repack.element_bytes,
        "num_ctas": repack.num_ctas(out_shape),
        "first_ctas": fields.get("num_ctas", repack.num_ctas(out_shape)),
        "num_threads": NUM_THREADS,
        "smem_bytes": repack.smem_bytes,
        "pdl": 0,
    }
    buffers = source or ffi.Buffer.of(dtype, shape), out or ffi.Buffer.of(dtype, out_shape)
    return Request(attributes | fields, [buffers[0]], [buffers[1]])


def both(first: Request, second: Request) -> Request:
    """Two pads in one launch."""
    ctas = [asked.attributes["num_ctas"] for asked in (first, second)]
    attributes = first.attributes | {"num_ctas": sum(ctas), "first_ctas": ctas[0]}
    return Request(attributes, first.sources + second.sources, first.outs + second.outs)


def create(machine: Machine, asked: Request, shows=True, **names: str) -> tuple[int, str, ctypes.c_void_p]:
    buffers = asked.given if shows else ffi.Buffers()
    return machine.create_from(machine.library.jbw_repack_call_create, asked.attributes, buffers, **names)


def initialize(machine: Machine, call: ctypes.c_void_p, asked: Request, device: int = 0) -> tuple[int, str]:
    buffers = asked.given
    return machine._status(machine.library.jbw_repack_call_initialize, call, device, ctypes.byref(buffers))


def execute(machine: Machine, call: ctypes.c_void_p, device=0, pointers=(SOURCE, OUT)) -> tuple[int, str]:
    pointers = (ctypes.c_void_p * len(pointers))(*pointers)
    return machine._status(machine.library.jbw_repack_call_execute, call, device, ctypes.c_void_p(STREAM), pointers)


def ready(machine: Machine, asked: Request) -> ctypes.c_void_p:
    code, sentence, call = create(machine, asked)
    assert (code, sentence) == (OK, "")
    sizes = [size for _, size in Repack("sm_90a", asked.attributes["kind"], 2).params]
    machine.driver.fake_params((ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)))
    assert initialize(machine, call, asked) == (OK, "")
    return call


@pytest.mark.parametrize(
    "asked, num_ctas, smem_bytes",
    [
        (request(pdl=1), 2, 0),
        (request(pitch=64), 4, 0),
        (request("transpose", "float8_e4m3fn", (2, 129, 33)), 4, 16384),
        (request("transpose", "float8_e4m3fn", (2, 129, 33), pitch=256), 4, 16384),
    ],
    ids=["pad", "pad to a line", "transpose", "transpose to a line"],
)
def test_a_launch(machine, asked, num_ctas, smem_bytes):
    call = ready(machine, asked)
    before = machine.library.jbw_execute_count()
    assert execute(machine, call) == (OK, "")
    launch = machine.launch()
    assert (list(launch.grid), list(launch.block)) == ([num_ctas, 1, 1], [NUM_THREADS, 1, 1])
    assert (launch.smem_bytes, list(launch.cluster), launch.pdl) == (smem_bytes, [0, 0, 0], asked.attributes["pdl"])
    assert (launch.stream, launch.function) == (STREAM, 0x2000)
    of_source = SOURCE, OUT, *asked.sources[0].dims, asked.outs[0].dims[2]
    assert struct.unpack_from("<2Q4i", bytes(launch.params)) == of_source
    if asked.attributes["kind"] == "transpose":
        assert launch.param_bytes == 32
    else:
        assert launch.param_bytes == 68
        assert struct.unpack_from("<2Q5i", bytes(launch.params), 32) == (0, 0, 0, 0, 0, 0, num_ctas)
    assert machine.library.jbw_execute_count() == before + 1
    machine.library.jbw_repack_call_destroy(call)


def test_two_pads_in_one_launch(machine):
    asked = both(request(shape=(1, 100, 33)), request(shape=(3, 7, 1030), pitch=1088))
    call = ready(machine, asked)
    assert execute(machine, call, pointers=(SOURCE, SOURCE + 66, OUT, OUT + 160)) == (OK, "")
    launch = machine.launch()
    assert (list(launch.grid), launch.param_bytes) == ([1 + 6, 1, 1], 68)  # 100 * 5 and 3 * 7 * 136 chunks, 512 a CTA
    params = SOURCE, OUT, 1, 100, 33, 40, SOURCE + 66, OUT + 160, 3, 7, 1030, 1088, 1
    assert struct.unpack_from("<2Q4i2Q5i", bytes(launch.params)) == params
    code, sentence = execute(machine, call, pointers=(SOURCE, SOURCE + 65, OUT, OUT + 160))
    assert code == INVALID_ARGUMENT and "`source` requires a pointer aligned to 2 bytes" in sentence


def test_a_second_pad_is_checked_as_the_first(machine):
    asked = both(request(), request(out=ffi.Buffer.of("bfloat16", (2, 100, 44))))
    code, message, _ = create(machine, asked)
    assert code == INVALID_ARGUMENT and re.search(SHAPE + r"\(2, 100, 44\)", message)


def test_a_second_device(machine):
    asked = request()
    call = ready(machine, asked)
    assert execute(machine, call, device=1)[0] == INTERNAL
    assert initialize(machine, call, asked, device=1) == (OK, "")
    assert execute(machine, call, device=1) == (OK, "")
    assert machine.calls("cuLibraryLoadData") == 1


BF16_BUFFER = functools.partial(ffi.Buffer.of, "bfloat16")
SHAPE = r"`out` requires shape \(2, 100, 40..64 in steps of 8\), got "


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"kind": "flip"}, "attribute `kind` requires pad or transpose, got 'flip'"),
        ({"kind": 1}, "attribute `kind` requires a string, got another type"),
        ({"element_bytes": 3}, "`element_bytes` requires 1, 2 or 4, got 3"),
        ({"element_bytes": 4}, "`source` requires elements of 4 bytes, got XLA FFI dtype 16"),
        ({"num_ctas": 0}, "`num_ctas` requires 1..2147483647, got 0"),
        ({"first_ctas": 3}, "`first_ctas` requires 1..2, got 3"),
        ({"first_ctas": 1}, "`first_ctas` requires all 2 of one source, got 1"),
        ({"num_threads": 2048}, "`num_threads` requires 1..1024, got 2048"),
        ({"smem_bytes": -1}, "`smem_bytes` requires 0..1048576, got -1"),
        ({"pdl": 2}, "`pdl` requires 0..1, got 2"),
        ({"source": ffi.Buffer(16, 2)}, "`source` requires a buffer of rank 3, got rank 2"),
        ({"source": BF16_BUFFER((0, 1, 1))}, "`source` requires sizes of 1..2147483519, got 0"),
        ({"source": BF16_BUFFER((1, 1, 2**31 - 1))}, "`source` requires sizes of 1..2147483519, got 2147483647"),
        ({"out": ffi.Buffer.of("float16", (2, 100, 40))}, "requires the dtype of `source`, XLA FFI dtype 16, got 10"),
        ({"out": BF16_BUFFER((2, 100, 44))}, SHAPE + r"\(2, 100, 44\)"),
        ({"out": BF16_BUFFER((2, 100, 32))}, SHAPE + r"\(2, 100, 32\)"),
        ({"out": BF16_BUFFER((2, 100, 72))}, SHAPE + r"\(2, 100, 72\)"),
        ({"out": BF16_BUFFER((1, 100, 40))}, SHAPE + r"\(1, 100, 40\)"),
        ({"out": BF16_BUFFER((2, 100, 2**31))}, "`out` requires sizes of 1..2147483519, got 2147483648"),
        (
            {"kind": "transpose", "out": BF16_BUFFER((2, 100, 40))},
            r"`out` requires shape \(2, 33, 104..128 in steps of 8\), got \(2, 100, 40\)",
        ),
        (
            {"source": BF16_BUFFER((2**16, 2**16, 1)), "out": BF16_BUFFER((2**16, 2**16, 8))},
            "`out` requires at most 2147483647 chunks of 16 bytes, got 65536 x 65536 x 1",
        ),
    ],
)
def test_refused(machine, fields, sentence):
    code, message, _ = create(machine, request(**fields))
    assert code == INVALID_ARGUMENT and re.search(sentence, message)
    if "source" in fields or "out" in fields:  # the same where XLA shows no buffers until later
        code, message, call = create(machine, request(**fields), shows=False)
        assert (code, message) == (OK, "")
        code, message = initialize(machine, call, request(**fields))
        assert code == INVALID_ARGUMENT and re.search(sentence, message)
        assert execute(machine, call)[0] == INTERNAL


@pytest.mark.parametrize(
    "kind, operands, results",
    [("pad", 0, 1), ("pad", 2, 1), ("pad", 1, 2), ("pad", 3, 3), ("transpose", 2, 2), ("transpose", 0, 0)],
)
def test_another_number_of_buffers(machine, kind, operands, results):
    asked = request(kind)
    buffers = ffi.Buffers.of(asked.sources * operands, asked.outs * results)
    code, message, call = machine.create_from(machine.library.jbw_repack_call_create, asked.attributes, buffers)
    if results == 0:  # XLA shows none before the call is initialized
        assert code == OK
        code, message = machine._status(machine.library.jbw_repack_call_initialize, call, 0, ctypes.byref(buffers))
    rule = "one operand, or two of a pad, and as many results"
    assert (code, message) == (INVALID_ARGUMENT, f"a repack requires {rule}, got {operands} and {results}")


def test_alignment(machine):
    """The source's elements, the result's 16 bytes."""
    call = ready(machine, request())
    code, sentence = execute(machine, call, pointers=(SOURCE + 1, OUT))
    assert code == INVALID_ARGUMENT and "`source` requires a pointer aligned to 2 bytes, got 0x7f0000000007" in sentence
    code, sentence = execute(machine, call, pointers=(SOURCE, OUT + 8))
    assert code == INVALID_ARGUMENT and "`out` requires a pointer aligned to 16 bytes" in sentence
    assert machine.calls("cuLaunchKernelEx") == 0


def test_a_cubin_that_is_not_there(machine):
    code, sentence, _ = create(machine, request(), variant="sm_90a_pad_16bit")
    assert code == FAILED_PRECONDITION and "requires sm_90a_pad_16bit.cubin in an artifact directory" in sentence


def test_a_failing_launch(machine):
    call = ready(machine, request())
    machine.driver.fake_fail(b"cuLaunchKernelEx", 700)
    code, sentence = execute(machine, call)
    assert code == INTERNAL and f"the launch of `{VARIANT}` requires success" in sentence
