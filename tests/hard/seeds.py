"""Legal custom calls as text, from which the random driver (`driver.cc`) makes illegal ones."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jax_bwgemm.runtime import ffi

sys.path.append(str(pathlib.Path(__file__).parents[1] / "cpu"))
import ffi_cases  # noqa: E402
import test_repack_launch  # noqa: E402

CUBIN = b"\x7fELF" + bytes(range(256))
VARIANT = "kernel_of_a_seed"
NAMES = dict(variant=VARIANT, entry="kernel_entry", target="sm_90a", cubin_sha256=hashlib.sha256(CUBIN).hexdigest())


def products() -> Iterator[ffi_cases.Call]:
    request = ffi_cases.request
    workspace = dict(workspace_bytes=4096 + 66 * ffi_cases.CLUSTER_BYTES, stream_tiles=24, stream_clusters=48)
    for majors, bias, residual in itertools.product(("kn", "kk", "mn", "mk"), (False, True), (False, True)):
        yield request(majors=majors, has_bias=bias, has_residual=residual)
    yield request(dtypes=("float16", "float16", "float32"), a_l2="evict_last", pdl=1)
    yield request(dtypes=("float32",) * 3)
    yield request(n=521, k=4000, majors="kk", dtypes=("int8", "uint8", "int32"), c_major="m")
    yield request(n=521, k=4000, majors="kk", dtypes=("int8", "uint8", "int32"), store="threads")
    yield request(m=1, n=16, k=8, batch=1, has_bias=True, cluster_m=1)
    yield request(batch=3, a_batch=1)
    yield request(batch=3, a_batch=1, b_batch=1, parts=3)
    yield request(cluster_m=4, cluster_n=4)
    yield request(cluster_m=1, cluster_k=4)
    yield request(**workspace)
    yield request(has_bias=True, has_residual=True, **workspace)
    yield ffi_cases.walk(request(**workspace), ("tiles", "group", "rows_multiplier", "stream_long_shift"))
    yield ffi_cases.walk(request(m=512, n=512, **workspace), ("triangle", "last_rows", "stream_first"))


def repacks() -> Iterator[test_repack_launch.Request]:
    request = test_repack_launch.request
    for kind, dtype in itertools.product(("pad", "transpose"), ("bfloat16", "float32", "int8")):
        yield request(kind, dtype)
    yield request(shape=(1, 1, 1), pdl=1)
    yield test_repack_launch.both(request(), request(shape=(3, 7, 1030)))


def text(kind: str, attributes: Mapping[str, Any], operands: list[ffi.Buffer], results: list[ffi.Buffer]) -> str:
    lines = [kind]
    for name, value in (NAMES | dict(attributes)).items():
        lines.append(f"{ {int: 'i', float: 'f', str: 's'}[type(value)] } {name} {value}")
    for role, buffers in (("operand", operands), ("result", results)):
        lines += [f"{role} {x.dtype} {x.rank} {' '.join(map(str, x.dims))}" for x in buffers]
    return "\n".join((*lines, "end", ""))


def write(directory: pathlib.Path) -> pathlib.Path:
    """The seeds' file, beside the cubin that they name."""
    (directory / f"{VARIANT}.cubin").write_bytes(CUBIN)
    seeds = [text("matmul", call.said, *call.given) for call in products()]
    seeds += [text("repack", call.attributes, call.sources, call.outs) for call in repacks()]
    path = directory / "seeds.txt"
    path.write_text("".join(seeds))
    return path
