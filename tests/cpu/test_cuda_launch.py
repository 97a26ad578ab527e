"""From a cubin to a launch without a GPU: the stages that XLA calls, on a stand-in for the CUDA driver."""

import concurrent.futures
import contextlib
import ctypes
import struct

import fake_machine
import ffi_cases
import pytest
from fake_machine import (
    BIAS,
    INTERNAL,
    INVALID_ARGUMENT,
    NON_PORTABLE,
    OK,
    OUT,
    RESIDUAL,
    STREAM,
    WORKSPACE,
    A,
    B,
    Machine,
    read_map,
)

from jax_bwgemm.runtime import ffi

pytestmark = fake_machine.needs


def test_a_launch(machine: Machine) -> None:
    request = ffi_cases.request(
        dtypes=("float16", "float16", "float32"),
        has_bias=True,
        a_l2="evict_last",
        b_l2="evict_first",
        c_l2="evict_last",
    )
    call = machine.ready(request)
    assert machine.execute(call) == (OK, "")
    launch = machine.launch()
    assert (list(launch.grid), list(launch.block)) == ([2, 1, 24], [384, 1, 1])
    assert (list(launch.cluster), launch.pdl, launch.smem_bytes) == ([2, 1, 1], 0, 232448)
    assert (launch.stream, launch.function, launch.param_bytes) == (STREAM, 0x2000, 3 * 128 + 10 * 4 + 4 * 8)
    params = bytes(launch.params)[: launch.param_bytes]
    assert struct.unpack_from("<9i3QfQ", params, 384) == (
        1000, 520, 4096, 2, 1, 1, 8, 1, 1, 0x14F0000000000000, 0x12F0000000000000,
        0x14F0000000000000, 0.5, BIAS,
    )  # fmt: skip
    common = {"rank": 3, "interleave": 0, "swizzle": 3, "l2_promotion": 2, "oob": 0}
    assert read_map(params, 0) == common | {
        "address": A, "dims": (4096, 1000, 2), "strides": (8192, 8192000), "box": (64, 128, 1), "dtype": 6
    }  # fmt: skip
    assert read_map(params, 128) == common | {
        "address": B, "dims": (520, 4096, 2), "strides": (1040, 4259840), "box": (64, 128, 1), "dtype": 6
    }  # fmt: skip
    assert read_map(params, 256) == common | {
        "address": OUT, "dims": (520, 1000, 2), "strides": (2080, 2080000), "box": (32, 64, 1), "dtype": 7
    }  # fmt: skip
    machine.library.jbw_call_destroy(call)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_residual(machine: Machine, has_bias: bool) -> None:
    request = ffi_cases.request(has_bias=has_bias, has_residual=True)
    call = machine.ready(request)
    assert machine.execute(call, **({} if has_bias else {"bias": 6})) == (OK, "")
    params = bytes(machine.launch().params)
    out, residual = (read_map(params, offset) for offset in (256, 384))
    assert (out["address"], residual["address"]) == (OUT, RESIDUAL)
    assert residual == out | {"address": RESIDUAL}
    assert struct.unpack_from("<3i", params, 512) == (1000, 520, 4096)
    assert machine.calls("cuTensorMapEncodeTiled") == 4
    machine.driver.fake_fail(b"cuTensorMapEncodeTiled", 700)
    assert machine.execute(call)[0] == INTERNAL


def test_a_stream_k(machine: Machine) -> None:
    """A second result: its address, and a token of the call's own, the same in every launch of it."""
    size = 4096 + 66 * ffi_cases.CLUSTER_BYTES
    request = ffi_cases.request(workspace_bytes=size, stream_tiles=24, stream_clusters=48)
    tokens = []
    for call in [machine.ready(request) for _ in range(3)]:
        for at in (WORKSPACE, WORKSPACE + 4096):
            assert machine.execute(call, workspace=at) == (OK, "")
            *stream, address, token = struct.unpack_from("<iiQQ", bytes(machine.launch().params), 444)
            assert (stream, address, list(machine.launch().grid)) == ([24, 48], at, [2, 1, 48])
            tokens.append(token)
    assert tokens[::2] == tokens[1::2] and len(set(tokens)) == 3
    code, sentence = machine.execute(call, workspace=WORKSPACE + 8)
    assert (code, "`workspace` requires a pointer aligned to 16 bytes" in sentence) == (INVALID_ARGUMENT, True)
    assert machine.execute(machine.ready(ffi_cases.request()), workspace=1) == (OK, "")  # nobody takes it


@pytest.mark.parametrize("first", [0, 1, 2**63, 0x9E3779B97F4A7C15, 2**64 - 0x9E3779B97F4A7C15])
def test_tokens_are_no_lowered_flag_and_all_distinct(first: int) -> None:
    """The first value or the second one would be 0 where the source starts at 0 or a step before it."""
    drawn = ffi.tokens(first, 10_000)
    assert 0 not in drawn and len(set(drawn)) == 10_000
    assert first in (0, drawn[0])


@pytest.mark.parametrize(("cluster_m", "cluster"), [(1, [0, 0, 0]), (2, [2, 1, 1])])
def test_a_kernel_may_start_before_the_one_before_it_ends(machine: Machine, cluster_m: int, cluster: list[int]) -> None:
    call = machine.ready(ffi_cases.request(cluster_m=cluster_m, pdl=1))
    assert machine.execute(call) == (OK, "")
    launch = machine.launch()
    assert (launch.pdl, list(launch.cluster)) == (1, cluster)


def test_a_cluster_that_divides_k(machine: Machine) -> None:
    machine.driver.fake_set(b"clusters", 5)
    call = machine.ready(ffi_cases.request(cluster_m=1, cluster_k=4))
    assert machine.driver.fake_occupancy_cluster()[:3] == [1, 1, 4]
    assert machine.execute(call) == (OK, "")
    assert (list(machine.launch().cluster), list(machine.launch().grid)) == ([1, 1, 4], [1, 1, 20])


@pytest.mark.parametrize(
    ("cluster", "allowed"), [((4, 2, 1), -1), ((2, 1, 4), -1), ((4, 4, 1), 1), ((2, 1, 8), 1), ((1, 1, 16), 1)]
)
def test_large_clusters_are_allowed_first(machine: Machine, cluster: tuple[int, int, int], allowed: int) -> None:
    """The fake driver refuses to count or to launch more than 8 CTAs that were not."""
    fields = dict(zip(("cluster_m", "cluster_n", "cluster_k"), cluster, strict=True))
    call = machine.ready(ffi_cases.request(**fields))
    assert [machine.driver.fake_kernel_attribute(device, NON_PORTABLE) for device in (0, 1)] == [allowed, -1]
    assert machine.execute(call) == (OK, "")
    assert tuple(machine.launch().cluster) == cluster


@pytest.mark.parametrize(("dtype", "bytes_"), [("bfloat16", 2), ("float32", 4), ("float8_e5m2", 1)])
def test_threads_store_to_a_pointer(machine: Machine, dtype: str, bytes_: int) -> None:
    """No tensor map, so any row pitch and any address that elements may have."""
    request = ffi_cases.request(m=7, n=5, dtypes=("bfloat16", "bfloat16", dtype), has_bias=True, store="threads")
    request.b.dims[2] = 8
    call = machine.ready(request)
    assert machine.execute(call, out=OUT + 3 * bytes_) == (OK, "")
    params = bytes(machine.launch().params)[: machine.launch().param_bytes]
    assert struct.unpack_from("<Q2i", params, 256) == (OUT + 3 * bytes_, 7, 5)
    assert read_map(params, 128)["dims"] == (8, 4096, 2)
    assert machine.calls("cuTensorMapEncodeTiled") == 2
    if bytes_ > 1:
        code, sentence = machine.execute(call, out=OUT + 1)
        assert (code, f"`out` requires a pointer aligned to {bytes_} bytes" in sentence) == (INVALID_ARGUMENT, True)


def test_tf32_operands_and_their_swizzle(machine: Machine) -> None:
    request = ffi_cases.request(majors="mn", dtypes=("float32", "float32", "float32"))
    request.maps["a"].swizzle_atom_bytes = request.maps["b"].swizzle_atom_bytes = 32
    assert machine.execute(machine.ready(request)) == (OK, "")
    maps = [read_map(bytes(machine.launch().params), at) for at in (0, 128, 256)]
    # TFLOAT32, 128B_ATOM_32B for what is loaded; FLOAT32, 128B for what is stored
    assert [(m["dtype"], m["swizzle"]) for m in maps] == [(11, 4), (11, 4), (7, 3)]


def test_integer_operands(machine: Machine) -> None:
    request = ffi_cases.request(n=521, k=4000, majors="kk", dtypes=("int8", "uint8", "int32"), c_major="m")
    assert machine.execute(machine.ready(request)) == (OK, "")
    maps = [read_map(bytes(machine.launch().params), at) for at in (0, 128, 256)]
    assert [(m["dtype"], m["box"]) for m in maps] == [(0, (128, 128, 1)), (0, (128, 128, 1)), (3, (32, 64, 1))]
    assert maps[2]["dims"] == (1000, 521, 2)


def test_a_single_cta_is_launched_without_a_cluster(machine: Machine) -> None:
    call = machine.ready(ffi_cases.request(cluster_m=1))
    assert machine.execute(call) == (OK, "")
    assert list(machine.launch().grid) == [1, 1, 48]
    assert list(machine.launch().cluster) == [0, 0, 0]


def test_the_grid_is_limited_by_the_clusters_that_the_device_holds(machine: Machine) -> None:
    machine.driver.fake_set(b"clusters", 7)
    call = machine.ready(ffi_cases.request())
    assert machine.execute(call) == (OK, "")
    assert list(machine.launch().grid) == [2, 1, 7]


def test_addresses_change_between_executes(machine: Machine) -> None:
    call = machine.ready(ffi_cases.request())
    for a in (A, A + 4096, A):
        assert machine.execute(call, a=a) == (OK, "")
        assert read_map(bytes(machine.launch().params), 0)["address"] == a


def test_eight_threads_initialize_once_a_device(machine: Machine) -> None:
    request = ffi_cases.request()
    _, _, call = machine.create(request)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda at: machine.initialize(call, request, at % 2), range(64)))
    assert set(results) == {(OK, "")}
    assert machine.calls("cuLibraryLoadData") == 1
    assert machine.calls("cuKernelSetAttribute") == machine.calls("cuOccupancyMaxActiveClusters") == 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda at: machine.execute(call, at % 2), range(64))) == {(OK, "")}


def test_call_sites_share_a_library(machine: Machine) -> None:
    calls = [machine.ready(ffi_cases.request(m=m)) for m in (512, 1024, 512)]
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuKernelSetAttribute") == 1
    for call in calls:
        machine.library.jbw_call_destroy(call)
    assert machine.calls("cuLibraryUnload") == 0


def test_statistics(machine: Machine) -> None:
    call = machine.ready(ffi_cases.request())
    library, capacity = machine.library, 4
    own, total = (ctypes.c_int64 * capacity)(), (ctypes.c_int64 * capacity)()
    read = lambda: library.jbw_timing_read(own, total, ctypes.c_size_t(capacity))  # noqa: E731
    assert read() == 0
    library.jbw_timing_start(ctypes.c_size_t(3))
    with contextlib.ExitStack() as stack:
        stack.callback(library.jbw_call_destroy, call)
        for _ in range(5):
            machine.execute(call)
    assert library.jbw_execute_count() == 5
    assert read() == 3
    assert all(0 < own[at] < total[at] for at in range(3))
