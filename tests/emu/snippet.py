"""Runs a few lines of PTX as a kernel: parameters are 64-bit addresses of NumPy arrays, or tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator import Counters, Launch, Memory, Schedule, TensorMap, parse, run

HEADER = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
.reqntid {threads}, 1, 1
{{
 .reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<512>; .reg .b64 %d<64>;
"""


def module_text(body: str, params: tuple[Any, ...], threads: int = 32, target: str = "sm_100a") -> str:
    """The text of a module whose kernel has the parameters p0, p1, ... and the body."""
    kinds = [".param .align 64 .b8 p{}[128]" if isinstance(p, TensorMap) else ".param .b64 p{}" for p in params]
    declared = ", ".join(kind.format(i) for i, kind in enumerate(kinds))
    return HEADER.format(target=target, params=declared, threads=threads) + body + "\nret;\n}\n"


def run_snippet(
    body: str,
    arrays: tuple[np.ndarray, ...] = (),
    maps: Any = None,
    threads: int = 32,
    cluster: int = 1,
    smem_bytes: int = 1 << 16,
    schedule: Schedule | None = None,
    target: str = "sm_100a",
    **options: Any,
) -> Counters:
    """`maps(addresses)` returns the tensor maps that follow the arrays among the parameters."""
    memory = Memory()
    addresses = tuple(memory.register(array, f"p{i}") for i, array in enumerate(arrays))
    params = addresses + tuple(maps(addresses) if maps else ())
    launch = Launch((cluster, 1, 1), (threads, 1, 1), params, (cluster, 1, 1), smem_bytes)
    return run(parse(module_text(body, params, threads, target)), launch, memory, schedule, **options)


STORE_LANE = """
ld.param.b64 %d60, [p0];
mov.u32 %r500, %tid.x;
mul.wide.u32 %d61, %r500, {size};
add.s64 %d62, %d60, %d61;
st.global.b{bits} [%d62], {value};
"""


def lanes_of(
    body: str, value: str, bits: int = 32, inputs: tuple[np.ndarray, ...] = (), threads: int = 32
) -> np.ndarray:
    """Runs `body` and returns register `value` of each thread. Inputs are p1, p2, ... and in %d1, %d2, ..."""
    out = np.zeros(threads, f"u{bits // 8}")
    loads = "".join(f"ld.param.b64 %d{i}, [p{i}];\n" for i in range(1, len(inputs) + 1))
    run_snippet(
        loads + body + STORE_LANE.format(size=bits // 8, bits=bits, value=value), (out, *inputs), threads=threads
    )
    return out


def load_lane(register: str, pointer: int, bits: int) -> str:
    """PTX that loads element %tid.x of input `pointer` into a register."""
    return (
        f"mov.u32 %r400, %tid.x; mul.wide.u32 %d40, %r400, {bits // 8}; add.s64 %d41, %d{pointer}, %d40;"
        f" ld.global.b{bits} {register}, [%d41];\n"
    )
