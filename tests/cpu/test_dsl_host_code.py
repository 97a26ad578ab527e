"""Our launch plan against the host code that CuTeDSL itself generates for the same kernel.

The object that `export_to_c` writes is linked against stubs of the CUDA symbols it calls, run on made-up addresses,
and what it would have launched is compared: parameter bytes, tensor maps, block, cluster and shared memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
from typing import Any

import pytest

from jax_bwgemm import ffi
from jax_bwgemm.arch import ARCHS
from jax_bwgemm.artifacts import PARAM_KINDS
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import STORE_SWIZZLE_BYTES, SWIZZLE_BYTES, Tile, load_box, num_threads, smem_bytes, store_box
from jax_bwgemm.variant import Variant

pytest.importorskip("cutlass", reason="needs CuTeDSL (the `build` extra)")

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parent.parent
M, N, K, BATCH = 264, 520, 200, 3
ALPHA = 0.75
ADDRESSES = {"a": 0x7F0000001000, "b": 0x7F0010002000, "c": 0x7F0020003000, "bias": 0x7F0030004000}
INTS = {
    "m": M, "n": N, "k": K, "batch": BATCH, "a_batch_step": 1, "b_batch_step": 0,
    "raster_group": 5, "raster_along_n": 1,
}  # fmt: skip
DESCRIPTOR_TYPES = {6: "float16", 7: "float32", 10: "bfloat16"}  # bits 7-10 of the flags word of a tensor map
DESCRIPTOR_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}

VARIANTS = [
    Variant("sm_90a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(128, 256, cluster_m=2), "scale_bias"),
    Variant("sm_90a", "float16", "float16", "float32", "m", "k", Tile(64, 128), "identity"),
    Variant("sm_90a", "bfloat16", "bfloat16", "float16", "m", "n", Tile(128, 128, cluster_n=2), "bias"),
    Variant("sm_100a", "bfloat16", "bfloat16", "bfloat16", "k", "k", Tile(128, 256), "scale"),
    Variant(
        "sm_100a", "float16", "float16", "float32", "m", "n", Tile(256, 256, cta_group=2, cluster_m=2), "scale_bias"
    ),
]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("shape", ctypes.c_int32 * 3), ("strides", ctypes.c_int64 * 2)]


def _params(variant: Variant) -> list[tuple[str, int]]:
    kinds = [("tma_a", 128), ("tma_b", 128), ("tma_c", 128), *((name, 4) for name in INTS)]
    kinds += [("alpha", 4)] if "scale" in variant.epilogue else []
    return kinds + ([("bias", 8)] if "bias" in variant.epilogue else [])


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v.name)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Variant, ctypes.CDLL]:
    """CuTeDSL's host code for one variant, run once."""
    variant: Variant = request.param
    directory = tmp_path_factory.mktemp("dsl_host")
    environment = {**os.environ, "CUTE_DSL_ARCH": variant.target, "PYTHONPATH": str(REPOSITORY)}
    fields = json.dumps(dataclasses.asdict(variant))
    script = str(HERE / "dsl_host" / "export.py")
    subprocess.run([sys.executable, script, str(directory), fields], env=environment, check=True)
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    shared = directory / "host.so"
    stubs = str(HERE / "dsl_host" / "stubs.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", shared, stubs, directory / "host.o"], check=True
    )
    library = ctypes.CDLL(str(shared))
    _run(library, variant, (directory / "host.h").read_text())
    return variant, library


def _run(library: ctypes.CDLL, variant: Variant, header: str) -> None:
    params = _params(variant)
    ctypes.c_int.in_dll(library, "jbw_num_params").value = len(params)
    (ctypes.c_int * 32).in_dll(library, "jbw_param_sizes")[: len(params)] = [size for _, size in params]

    def tensor(name: str, first: int, second: int, batch: int, second_is_contiguous: bool) -> Any:
        pitch = second if second_is_contiguous else first
        shape = (ctypes.c_int32 * 3)(first, second, batch)
        return _Tensor(ADDRESSES[name], shape, (ctypes.c_int64 * 2)(pitch, first * second))

    arguments = [
        tensor("a", M, K, BATCH, variant.a_major == "k"),
        tensor("b", N, K, 1, variant.b_major == "k"),
        tensor("c", M, N, BATCH, True),
        *(ctypes.c_int32(value) for value in INTS.values()),
        ctypes.c_float(ALPHA),
        ctypes.c_uint64(ADDRESSES["bias"]),
        ctypes.c_int32(0),
    ]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    name = header.split("(void **args, int32_t num_args)")[0].split()[-1]
    getattr(library, name)(pointers, len(arguments))
    assert ctypes.c_int.in_dll(library, "jbw_num_launches").value == 1


def _our_plan(variant: Variant) -> ffi.LaunchPlan:
    tile, in_bytes = variant.tile, DTYPE_BYTES[variant.a_dtype]
    params, offset = [], 0
    for kind, size in _params(variant):
        align = min(size, 64)
        offset = -(-offset // align) * align
        params.append(ffi.Param(PARAM_KINDS.index(kind), offset, size))
        offset += size
    a_shape = (BATCH, M, K) if variant.a_major == "k" else (BATCH, K, M)
    b_shape = (1, K, N) if variant.b_major == "n" else (1, N, K)
    has_bias = "bias" in variant.epilogue
    arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
    request = ffi.LaunchRequest(
        a=ffi.Buffer.of(variant.a_dtype, a_shape),
        b=ffi.Buffer.of(variant.b_dtype, b_shape),
        out=ffi.Buffer.of(variant.out_dtype, (BATCH, M, N)),
        bias=ffi.Buffer.of(variant.out_dtype, (N,)) if has_bias else ffi.Buffer.none(),
        a_major=ord(variant.a_major),
        b_major=ord(variant.b_major),
        cta_m=tile.cta_m,
        mma_n=tile.mma_n,
        cluster_m=tile.cluster_m,
        cluster_n=tile.cluster_n,
        num_threads=num_threads(tile, variant.target),
        smem_bytes=smem_bytes(tile, in_bytes, arch.smem_bytes),
        raster_group=INTS["raster_group"],
        raster_along_n=INTS["raster_along_n"],
        alpha=ALPHA,
        param_bytes=offset,
        num_params=len(params),
        max_active_clusters=64,
    )
    boxes = (
        load_box(tile, "a", variant.a_major, in_bytes),
        load_box(tile, "b", variant.b_major, in_bytes),
        store_box(tile, variant.out_dtype, variant.target),
    )
    for i, box in enumerate(boxes):
        request.box[i][:] = [*box, 1]
        request.swizzle_bytes[i] = STORE_SWIZZLE_BYTES if i == 2 else SWIZZLE_BYTES
    request.params[: len(params)] = params
    return ffi.launch_plan(request)


def test_launch_configuration(launched: tuple[Variant, ctypes.CDLL]) -> None:
    variant, library = launched
    plan = _our_plan(variant)
    assert list((ctypes.c_uint32 * 3).in_dll(library, "jbw_block")) == list(plan.block)
    # CuTeDSL launches a cluster of one without the attribute; we say (1, 1, 1)
    cluster = list((ctypes.c_uint32 * 3).in_dll(library, "jbw_cluster"))
    assert (cluster if any(cluster) else [1, 1, 1]) == list(plan.cluster)
    assert ctypes.c_uint64.in_dll(library, "jbw_smem_bytes").value == plan.smem_bytes


def test_parameter_bytes(launched: tuple[Variant, ctypes.CDLL]) -> None:
    variant, library = launched
    ours = _our_plan(variant).param_block
    theirs = (ctypes.c_ubyte * 128 * 32).in_dll(library, "jbw_params")
    offset = 0
    for i, (kind, size) in enumerate(_params(variant)):
        align = min(size, 64)
        offset = -(-offset // align) * align
        expected = bytes(theirs[i])[:size]
        if kind == "bias":  # the launcher writes the address at each launch
            assert struct.unpack("<Q", expected)[0] == ADDRESSES["bias"]
        elif not kind.startswith("tma"):
            assert ours[offset : offset + size] == expected, kind
        offset += size


def test_tensor_maps(launched: tuple[Variant, ctypes.CDLL]) -> None:
    variant, library = launched
    plan = _our_plan(variant)
    theirs = (ctypes.c_ubyte * 128 * 32).in_dll(library, "jbw_params")
    dtypes = (variant.a_dtype, variant.b_dtype, variant.out_dtype)
    for i, (operand, dtype) in enumerate(zip("abc", dtypes, strict=True)):
        decoded = _decode(bytes(theirs[i]))
        spec = plan.tensor_maps[i]
        assert decoded["address"] == ADDRESSES[operand]
        assert decoded["dtype"] == dtype
        assert decoded["swizzle_bytes"] == spec.swizzle_bytes
        assert decoded["dims"] == tuple(spec.dims)
        assert decoded["box"] == tuple(spec.box)
        assert decoded["stride_bytes"] == tuple(spec.stride_bytes), operand


def _decode(raw: bytes) -> dict[str, Any]:
    """The fields of a rank-3 tensor map as CuTeDSL writes it; strides are in units of 16 bytes, sizes minus one."""
    (flags,) = struct.unpack_from("<I", raw, 8)
    assert (flags >> 4 & 7) + 1 == 3
    return {
        "address": struct.unpack_from("<Q", raw, 0)[0],
        "dtype": DESCRIPTOR_TYPES[flags >> 7 & 15],
        "swizzle_bytes": DESCRIPTOR_SWIZZLES[flags >> 13 & 3],
        "stride_bytes": tuple(16 * stride for stride in struct.unpack_from("<2I", raw, 12)),
        "dims": tuple(size + 1 for size in struct.unpack_from("<3I", raw, 32)),
        "box": tuple(size + 1 for size in raw[55:58]),
    }
