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
from fake_artifacts import fake_entry

from jax_bwgemm.facts.arch import arch_of, family_of
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, places
from jax_bwgemm.planner.order import RASTER_ORDERS
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.streams import Stream
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.launch import request
from tests.cases import fused, has
from tests.walks import order_leaves, share_leaves

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="needs CuTeDSL (the `build` extra)")

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parent.parent
M, N, K, BATCH = 272, 528, 208, 3
ALPHA = 0.75
CLUSTERS = 64
ADDRESSES = {
    "a": 0x7F0000001000, "b": 0x7F0010002000, "c": 0x7F0020003000, "bias": 0x7F0030004000, "workspace": 0x7F0040005000,
}  # fmt: skip
STREAM_TILES, STREAM_CLUSTERS = 3, 5
STREAM = {"workspace": ADDRESSES["workspace"], "token": 0x0123456789ABCDEF}
INTS = {"m": M, "n": N, "k": K, "batch": BATCH, "a_batch_step": 1, "b_batch_step": 0, "k_step": 0}
RASTER_GROUP, RASTER = 5, {"raster_along_n": 1, "raster_order": 1}
POLICIES = {"a_policy": 0x14F0000000000000, "b_policy": 0x12F0000000000000, "c_policy": 0x1000000000000000}
# evict_last, evict_first, normal
SIZES = dict.fromkeys(("tma_a", "tma_b", "tma_c"), 128)
SIZES |= dict.fromkeys(("c", "a_policy", "b_policy", "c_policy", "workspace", "token", "bias"), 8)  # others: 4
ROLES = {"a": "a", "b": "b", "c": "out"}  # of the operands as CuTeDSL's host code takes them
# Bits 7-10 of the flags word of a tensor map, as a CUtensorMapDataType; CuTeDSL stores int32 as UINT32, the same bits
DESCRIPTOR_TYPES = {0: 0, 2: 3, 6: 6, 7: 7, 10: 9}
TFLOAT32, TF32_FLAG, ATOM_32_FLAG = 11, 1 << 16, 1 << 19
DESCRIPTOR_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}

BF16, F16, F32 = "bfloat16", "float16", "float32"
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
VARIANTS = [
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 256, cluster_m=2), fused("scale_bias")),
    Variant("sm_90a", F16, F16, F32, "m", "k", Tile(64, 128)),
    Variant("sm_90a", BF16, BF16, F16, "m", "n", Tile(128, 128, cluster_n=2), fused("bias")),
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 128), store="threads"),
    Variant("sm_90a", BF16, BF16, BF16, "k", "n", Tile(128, 256, cluster_m=2, stream_k=True), fused("scale_bias")),
    Variant("sm_90a", F32, F32, F32, "m", "k", Tile(128, 128, 32, cluster_n=2), c_major="m"),
    Variant("sm_100f", BF16, BF16, BF16, "k", "k", Tile(128, 256), fused("scale")),
    Variant("sm_100f", F16, F16, F32, "m", "n", PAIR, fused("scale_bias")),
    Variant("sm_100f", BF16, BF16, F32, "k", "n", Tile(128, 128), fused("scale_bias"), store="threads"),
    Variant("sm_100f", BF16, BF16, BF16, "k", "n", PAIR, c_major="m"),
    Variant("sm_100f", BF16, BF16, BF16, "k", "n", Tile(128, 128, cluster_k=4)),
    Variant("sm_100f", BF16, BF16, BF16, "k", "n", Tile(256, 256, cta_group=2, cluster_m=4, cluster_n=4)),
    Variant("sm_100f", F32, F32, F32, "m", "n", Tile(128, 128, 32)),
    Variant("sm_100f", "float8_e4m3fn", "float8_e5m2", F16, "k", "k", Tile(128, 128, 128)),
    Variant("sm_100a", "int8", "uint8", "int32", "k", "n", Tile(128, 128, 128)),
]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("shape", ctypes.c_int32 * 3), ("strides", ctypes.c_int64 * 2)]


def _params(variant: Variant) -> list[tuple[str, int]]:
    order, shares = _walk(variant)
    kinds = ["tma_a", "tma_b", "tma_c" if variant.store == "tma" else "c", *INTS, *order, *POLICIES]
    kinds += (*shares, *STREAM) if variant.tile.stream_k else ()
    kinds += [kind for kind in ("alpha", "bias") if has(variant, kind)]
    return [(kind, SIZES.get(kind, 4)) for kind in kinds]


def _walk(variant: Variant) -> tuple[dict[str, int], dict[str, int]]:
    """What the launcher says of the tiles, and of a stream of them, in the order of the kernel."""
    tile = variant.tile
    tiles = -(-M // (tile.cluster_m * tile.cta_m)), -(-N // (tile.cluster_n * tile.out_n)), BATCH
    k_tiles, num_tiles = -(-K // tile.k_tile), tiles[0] * tiles[1] * BATCH
    clusters = min(max(num_tiles, STREAM_CLUSTERS if tile.stream_k else 1), CLUSTERS)
    shares = share_leaves(num_tiles, k_tiles, clusters, STREAM_TILES, STREAM_CLUSTERS)
    return order_leaves(tiles, k_tiles, RASTER_GROUP, RASTER["raster_along_n"]) | RASTER, shares


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v.name)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Entry, ctypes.CDLL]:
    """What the build says of one variant, and CuTeDSL's host code for it, run once."""
    variant: Variant = request.param
    directory = tmp_path_factory.mktemp("dsl_host")
    environment = {**os.environ, "CUTE_DSL_ARCH": variant.target, "PYTHONPATH": str(REPOSITORY)}
    fields = json.dumps(variant.to_json())
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
    recipe = Recipe.from_texts(json.loads((directory / "recipe.json").read_text()))
    return dataclasses.replace(fake_entry(variant), recipe=recipe), library


def _run(library: ctypes.CDLL, variant: Variant, header: str) -> None:
    params = _params(variant)
    ctypes.c_int.in_dll(library, "jbw_num_params").value = len(params)
    (ctypes.c_int * 64).in_dll(library, "jbw_param_sizes")[: len(params)] = [size for _, size in params]

    def tensor(name: str, first: int, second: int, batch: int, second_is_contiguous: bool) -> Any:
        pitch = second if second_is_contiguous else first
        shape = (ctypes.c_int32 * 3)(first, second, batch)
        return _Tensor(ADDRESSES[name], shape, (ctypes.c_int64 * 2)(pitch, first * second))

    order, shares = _walk(variant)
    stream = (
        *map(ctypes.c_uint32, shares.values()),
        ctypes.c_uint64(STREAM["workspace"]),
        ctypes.c_int64(STREAM["token"]),
    )
    arguments = [
        tensor("a", M, K, BATCH, variant.a_major == "k"),
        tensor("b", N, K, 1, variant.b_major == "k"),
        tensor("c", M, N, BATCH, variant.c_major == "n"),
        *(ctypes.c_int32(value) for value in INTS.values()),
        *(ctypes.c_uint32(value) for value in order.values()),
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


def _our_plan(entry: Entry) -> ffi.LaunchPlan:
    variant = entry.variant
    scalars = tuple((role, ALPHA) for role, _ in variant.steps.scalars)
    problem = Problem(
        M, N, K, BATCH, variant.a_dtype, variant.b_dtype, variant.out_dtype, variant.a_major, variant.b_major,
        a_batch=BATCH, b_batch=1, epilogue=Epilogue(variant.epilogue, scalars), c_major=variant.c_major,
    )  # fmt: skip
    arch = arch_of(variant.target)
    plan = Plan(
        problem, arch, (), variant.tile, raster_group=RASTER_GROUP, raster_along_n=RASTER["raster_along_n"],
        raster_order=RASTER_ORDERS[RASTER["raster_order"]], a_l2="evict_last", b_l2="evict_first",
        stream=Stream(STREAM_TILES, STREAM_CLUSTERS),
    )  # fmt: skip
    made = request(plan, entry, CLUSTERS)
    operands, results = ([ffi.Buffer.of(x.dtype, x.shape) for x in arrays] for arrays in (made.operands, made.results))
    return ffi.launch_plan(made.attributes, operands, results, CLUSTERS, STREAM["token"])


def test_launch_configuration(launched: tuple[Entry, ctypes.CDLL]) -> None:
    entry, library = launched
    plan = _our_plan(entry)
    assert list((ctypes.c_uint32 * 3).in_dll(library, "jbw_block")) == list(plan.block)
    # CuTeDSL launches a cluster of one without the attribute; we say (1, 1, 1)
    cluster = list((ctypes.c_uint32 * 3).in_dll(library, "jbw_cluster"))
    assert (cluster if any(cluster) else [1, 1, 1]) == list(plan.cluster)
    assert ctypes.c_uint64.in_dll(library, "jbw_smem_bytes").value == plan.smem_bytes


def test_parameter_bytes(launched: tuple[Entry, ctypes.CDLL]) -> None:
    """Where each leaf lies, and its bytes: that of an address holds none before the launch."""
    entry, library = launched
    plan = _our_plan(entry)
    ours, offsets = plan.param_block, []
    theirs = (ctypes.c_ubyte * 128 * 64).in_dll(library, "jbw_params")
    offset = 0
    for i, (kind, size) in enumerate(_params(entry.variant)):
        align = min(size, 64)
        offset = -(-offset // align) * align
        offsets.append(offset)
        expected = bytes(theirs[i])[:size]
        if kind in ("c", "workspace", "bias"):  # the launcher writes the address at each launch
            assert struct.unpack("<Q", expected)[0] == ADDRESSES[kind]
        elif not kind.startswith("tma"):
            assert ours[offset : offset + size] == expected, kind
        if kind in ADDRESSES or kind.startswith("tma"):
            use = plan.buffers[places(entry.variant)[ROLES.get(kind.removeprefix("tma_"), kind)]]
            assert (use.map_offset if kind.startswith("tma") else use.pointer_offset) == offset, kind
            assert not any(ours[offset : offset + size]), kind
        offset += size
    assert (plan.param_offsets, plan.param_bytes) == (offsets, offset)


def test_tensor_maps(launched: tuple[Entry, ctypes.CDLL]) -> None:
    entry, library = launched
    plan = _our_plan(entry)
    theirs = (ctypes.c_ubyte * 128 * 64).in_dll(library, "jbw_params")
    at = places(entry.variant)
    assert [plan.buffers[at[ROLES[x]]].map_offset >= 0 for x in "abc"] == [True, True, entry.variant.store == "tma"]
    for i, operand in enumerate("abc" if entry.variant.store == "tma" else "ab"):
        decoded = _decode(bytes(theirs[i]))
        spec = plan.buffers[at[ROLES[operand]]].map
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
