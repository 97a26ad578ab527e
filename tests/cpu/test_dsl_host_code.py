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
from jax_bwgemm.arch import ARCHS, family_of
from jax_bwgemm.artifacts import PARAM_KINDS
from jax_bwgemm.tile import Tile, num_threads, smem_bytes, workspace_bytes
from jax_bwgemm.variant import Variant, tma_boxes

pytest.importorskip("cutlass", reason="needs CuTeDSL (the `build` extra)")

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parent.parent
M, N, K, BATCH = 272, 528, 208, 3
ALPHA = 0.75
ADDRESSES = {
    "a": 0x7F0000001000, "b": 0x7F0010002000, "c": 0x7F0020003000, "bias": 0x7F0030004000, "workspace": 0x7F0040005000,
}  # fmt: skip
STREAM = {"stream_tiles": 3, "stream_clusters": 5, "workspace": ADDRESSES["workspace"], "token": 0x0123456789ABCDEF}
INTS = {
    "m": M, "n": N, "k": K, "batch": BATCH, "a_batch_step": 1, "b_batch_step": 0,
    "raster_group": 5, "raster_along_n": 1, "raster_order": 1,
}  # fmt: skip
POLICIES = {"a_policy": 0x14F0000000000000, "b_policy": 0x12F0000000000000}  # evict_last, evict_first
SIZES = dict.fromkeys(("tma_a", "tma_b", "tma_c"), 128)
SIZES |= dict.fromkeys(("c", "a_policy", "b_policy", "workspace", "token", "bias"), 8)  # others: 4
# Bits 7-10 of the flags word of a tensor map, as a CUtensorMapDataType; CuTeDSL stores int32 as UINT32, the same bits
DESCRIPTOR_TYPES = {0: 0, 2: 3, 6: 6, 7: 7, 10: 9}
TFLOAT32, TF32_FLAG, ATOM_32_FLAG = 11, 1 << 16, 1 << 19
DESCRIPTOR_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}

BF16, F16, F32 = "bfloat16", "float16", "float32"
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
VARIANTS = [
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 256, cluster_m=2), "scale_bias"),
    Variant("sm_90a", F16, F16, F32, "m", "k", Tile(64, 128)),
    Variant("sm_90a", BF16, BF16, F16, "m", "n", Tile(128, 128, cluster_n=2), "bias"),
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 128), store="threads"),
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 256, cluster_m=2, stream_k=True), "scale_bias"),
    Variant("sm_90a", F32, F32, F32, "m", "k", Tile(128, 128, 32, cluster_n=2), c_major="m"),
    Variant("sm_100a", BF16, BF16, BF16, "k", "k", Tile(128, 256), "scale"),
    Variant("sm_100a", F16, F16, F32, "m", "n", PAIR, "scale_bias"),
    Variant("sm_100a", BF16, BF16, F32, "k", "n", Tile(128, 128), "scale_bias", store="threads"),
    Variant("sm_100a", BF16, BF16, BF16, "k", "n", PAIR, c_major="m"),
    Variant("sm_100a", BF16, BF16, BF16, "k", "n", Tile(128, 128, cluster_k=4)),
    Variant("sm_100a", BF16, BF16, BF16, "k", "n", Tile(256, 256, cta_group=2, cluster_m=4, cluster_n=4)),
    Variant("sm_100a", F32, F32, F32, "m", "n", Tile(128, 128, 32)),
    Variant("sm_100a", "float8_e4m3fn", "float8_e5m2", F16, "k", "k", Tile(128, 128, 128)),
    Variant("sm_100a", "int8", "uint8", "int32", "k", "n", Tile(128, 128, 128)),
]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("shape", ctypes.c_int32 * 3), ("strides", ctypes.c_int64 * 2)]


def _params(variant: Variant) -> list[tuple[str, int]]:
    kinds = ["tma_a", "tma_b", "tma_c" if variant.store == "tma" else "c", *INTS, *POLICIES]
    kinds += STREAM if variant.tile.stream_k else ()
    kinds += [kind for kind, step in (("alpha", "scale"), ("bias", "bias")) if step in variant.epilogue]
    return [(kind, SIZES.get(kind, 4)) for kind in kinds]


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

    counts = ctypes.c_int32(STREAM["stream_tiles"]), ctypes.c_int32(STREAM["stream_clusters"])
    stream = *counts, ctypes.c_uint64(STREAM["workspace"]), ctypes.c_int64(STREAM["token"])
    arguments = [
        tensor("a", M, K, BATCH, variant.a_major == "k"),
        tensor("b", N, K, 1, variant.b_major == "k"),
        tensor("c", M, N, BATCH, variant.c_major == "n"),
        *(ctypes.c_int32(value) for value in INTS.values()),
        *(ctypes.c_int64(value) for value in POLICIES.values()),
        *(stream if family_of(variant.target).name == "hopper" else ()),  # also where the kernel takes none of it
        ctypes.c_float(ALPHA),
        ctypes.c_uint64(ADDRESSES["bias"]),
        ctypes.c_int32(0),
    ]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    name = header.split("(void **args, int32_t num_args)")[0].split()[-1]
    getattr(library, name)(pointers, len(arguments))
    assert ctypes.c_int.in_dll(library, "jbw_num_launches").value == 1


def _our_plan(variant: Variant) -> ffi.LaunchPlan:
    tile, params, offset = variant.tile, [], 0
    for kind, size in _params(variant):
        align = min(size, 64)
        offset = -(-offset // align) * align
        params.append(ffi.Param(PARAM_KINDS.index(kind), offset, size))
        offset += size
    a_shape = (BATCH, M, K) if variant.a_major == "k" else (BATCH, K, M)
    b_shape = (1, K, N) if variant.b_major == "n" else (1, N, K)
    arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
    request = ffi.LaunchRequest(
        a=ffi.Buffer.of(variant.a_dtype, a_shape),
        b=ffi.Buffer.of(variant.b_dtype, b_shape),
        out=ffi.Buffer.of(variant.out_dtype, (BATCH, M, N) if variant.c_major == "n" else (BATCH, N, M)),
        bias=ffi.Buffer.of(variant.out_dtype, (N,)) if "bias" in variant.epilogue else ffi.Buffer.none(),
        workspace=ffi.Buffer.of("uint8", (workspace_bytes(tile, 64),)) if tile.stream_k else ffi.Buffer.none(),
        **{name: ord(getattr(variant, name)) for name in ("a_major", "b_major", "c_major")},
        **{name: getattr(tile, name) for name in ("cta_m", "mma_n", "cluster_m", "cluster_n", "cluster_k")},
        num_threads=num_threads(tile, variant.target),
        smem_bytes=smem_bytes(tile, variant.a_dtype, variant.out_dtype, arch),
        raster_group=INTS["raster_group"],
        raster_along_n=INTS["raster_along_n"],
        raster_order=INTS["raster_order"],
        a_l2=ffi.L2_CODES["evict_last"],
        b_l2=ffi.L2_CODES["evict_first"],
        alpha=ALPHA,
        stream_tiles=STREAM["stream_tiles"],
        stream_clusters=STREAM["stream_clusters"],
        token=STREAM["token"],
        param_bytes=offset,
        num_params=len(params),
        max_active_clusters=64,
    )
    for operand, (box, swizzle_bytes, swizzle_atom_bytes) in tma_boxes(variant).items():
        i = "abc".index(operand)
        request.box[i][:] = box
        request.swizzle_bytes[i], request.swizzle_atom_bytes[i] = swizzle_bytes, swizzle_atom_bytes
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
        if kind in ("c", "workspace", "bias"):  # the launcher writes the address at each launch
            assert struct.unpack("<Q", expected)[0] == ADDRESSES[kind]
        elif not kind.startswith("tma"):
            assert ours[offset : offset + size] == expected, kind
        offset += size


def test_tensor_maps(launched: tuple[Variant, ctypes.CDLL]) -> None:
    variant, library = launched
    plan = _our_plan(variant)
    theirs = (ctypes.c_ubyte * 128 * 32).in_dll(library, "jbw_params")
    for i, operand in enumerate(tma_boxes(variant)):
        decoded = _decode(bytes(theirs[i]))
        spec = plan.tensor_maps[i]
        assert decoded["address"] == ADDRESSES[operand]
        assert decoded["data_type"] == spec.data_type
        assert decoded["swizzle_bytes"] == spec.swizzle_bytes
        assert decoded["swizzle_atom_bytes"] == spec.swizzle_atom_bytes
        assert decoded["dims"] == tuple(spec.dims)
        assert decoded["box"] == tuple(spec.box)
        assert decoded["stride_bytes"] == tuple(spec.stride_bytes), operand


def _decode(raw: bytes) -> dict[str, Any]:
    """The fields of a rank-3 tensor map as CuTeDSL writes it; strides are in units of 16 bytes, sizes minus one."""
    (flags,) = struct.unpack_from("<I", raw, 8)
    assert (flags >> 4 & 7) + 1 == 3
    return {
        "address": struct.unpack_from("<Q", raw, 0)[0],
        "data_type": TFLOAT32 if flags & TF32_FLAG else DESCRIPTOR_TYPES[flags >> 7 & 15],
        "swizzle_bytes": DESCRIPTOR_SWIZZLES[flags >> 13 & 3],
        "swizzle_atom_bytes": 32 if flags & ATOM_32_FLAG else 16,
        "stride_bytes": tuple(16 * stride for stride in struct.unpack_from("<2I", raw, 12)),
        "dims": tuple(size + 1 for size in struct.unpack_from("<3I", raw, 32)),
        "box": tuple(size + 1 for size in raw[55:58]),
    }
