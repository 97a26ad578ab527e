"""From a cubin to a launch without a GPU: the stages that XLA calls, on a stand-in for the CUDA driver."""

import concurrent.futures
import contextlib
import ctypes
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator

import ffi_cases
import pytest

from jax_bwgemm import ffi

COMPILER = shutil.which("c++")
pytestmark = [
    pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status())),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]
OK, INVALID_ARGUMENT, FAILED_PRECONDITION, INTERNAL = 0, 3, 9, 13
NON_PORTABLE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
VARIANT = "sm_90a_variant"
CUBIN = b"\x7fELF" + bytes(range(256)) * 4
A, B, OUT, BIAS, STREAM = 0x7F0000000000, 0x7F0000100000, 0x7F0000200010, 0x7F0000300020, 0x5000
RESIDUAL, WORKSPACE = 0x7F0000400030, 0x7F0000500040
POINTERS = {"a": A, "b": B, "out": OUT, "bias": BIAS, "residual": RESIDUAL, "workspace": WORKSPACE}


class KernelNames(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("variant", "entry", "target", "cubin_sha256")]


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("pdl", ctypes.c_int32),
        ("param_bytes", ctypes.c_int32),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 1024),
    ]


class Machine:
    """A fresh copy of our library (with its own caches) beside a fresh copy of the fake driver."""

    def __init__(self, directory: pathlib.Path, fake: pathlib.Path) -> None:
        self.artifacts = directory / "artifacts"
        self.artifacts.mkdir()
        (self.artifacts / f"{VARIANT}.cubin").write_bytes(CUBIN)
        self.driver = ctypes.CDLL(shutil.copy(fake, directory / "libcuda.so.1"))
        self.driver.fake_launch.restype = ctypes.POINTER(Launch)
        self.driver.fake_occupancy_cluster.restype = ctypes.POINTER(ctypes.c_uint32)
        self.library = ctypes.CDLL(shutil.copy(ffi._load()._name, directory / "library.so"))
        self.library.jbw_execute_count.restype = ctypes.c_uint64
        self.set_directories(self.artifacts)

    def set_directories(self, *directories: pathlib.Path) -> None:
        names = [os.fsencode(directory) for directory in directories]
        self.library.jbw_set_artifact_dirs((ctypes.c_char_p * len(names))(*names), ctypes.c_size_t(len(names)))

    def _status(self, function: Callable[..., int], *arguments: object) -> tuple[int, str]:
        error = ctypes.create_string_buffer(4096)
        code = function(*arguments, error, ctypes.c_size_t(len(error)))
        return code, error.value.decode()

    def create(self, request: ffi.LaunchRequest, **names: str) -> tuple[int, str, ctypes.c_void_p]:
        defaults = dict(variant=VARIANT, entry="kernel_entry", target="sm_90a")
        defaults["cubin_sha256"] = hashlib.sha256(CUBIN).hexdigest()
        packed = KernelNames(**{name: value.encode() for name, value in (defaults | names).items()})
        call = ctypes.c_void_p()
        create = self.library.jbw_call_create
        return *self._status(create, ctypes.byref(packed), ctypes.byref(request), ctypes.byref(call)), call

    def initialize(self, call: ctypes.c_void_p, request: ffi.LaunchRequest, device: int = 0) -> tuple[int, str]:
        return self._status(self.library.jbw_call_initialize, call, device, ctypes.byref(request))

    def execute(self, call: ctypes.c_void_p, device: int = 0, **pointers_: int) -> tuple[int, str]:
        pointers = [ctypes.c_void_p(pointer) for pointer in (STREAM, *(POINTERS | pointers_).values())]
        return self._status(self.library.jbw_call_execute, call, device, *pointers)

    def ready(self, request: ffi.LaunchRequest) -> ctypes.c_void_p:
        code, sentence, call = self.create(request)
        assert (code, sentence) == (OK, "")
        sizes = [param.size for param in request.params[: request.num_params]]
        self.driver.fake_params((ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)))
        assert self.initialize(call, request) == (OK, "")
        return call

    def calls(self, function: str) -> int:
        return int(self.driver.fake_calls(function.encode()))

    def launch(self) -> Launch:
        return self.driver.fake_launch().contents


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("fake_cuda") / "libcuda.so.1"
    source = pathlib.Path(__file__).parent / "fake_cuda" / "fake_cuda.cc"
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


@pytest.fixture
def machine(tmp_path: pathlib.Path, fake_driver: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", str(tmp_path / "libcuda.so.1"))
    yield Machine(tmp_path, fake_driver)


def _read_map(params: bytes, offset: int) -> dict[str, object]:
    """What the fake driver writes in place of a descriptor."""
    numbers = struct.unpack_from("<6Q3I6i", params, offset)
    names = ("rank", "dtype", "interleave", "swizzle", "l2_promotion", "oob")
    head = {"address": numbers[0], "dims": numbers[1:4], "strides": numbers[4:6], "box": numbers[6:9]}
    return head | dict(zip(names, numbers[9:], strict=True))


def test_a_launch(machine: Machine) -> None:
    request = ffi_cases.request(dtypes=("float16", "float16", "float32"), has_bias=True, a_l2=2, b_l2=1)
    call = machine.ready(request)
    assert machine.execute(call) == (OK, "")
    launch = machine.launch()
    assert (list(launch.grid), list(launch.block)) == ([2, 1, 24], [384, 1, 1])
    assert (list(launch.cluster), launch.pdl, launch.smem_bytes) == ([2, 1, 1], 0, 232448)
    assert (launch.stream, launch.function, launch.param_bytes) == (STREAM, 0x2000, 3 * 128 + 9 * 4 + 3 * 8)
    params = bytes(launch.params)[: launch.param_bytes]
    assert struct.unpack_from("<8i2QfQ", params, 384) == (
        1000, 520, 4096, 2, 1, 1, 8, 1, 0x14F0000000000000, 0x12F0000000000000, 0.5, BIAS
    )  # fmt: skip
    common = {"rank": 3, "interleave": 0, "swizzle": 3, "l2_promotion": 2, "oob": 0}
    assert _read_map(params, 0) == common | {
        "address": A, "dims": (4096, 1000, 2), "strides": (8192, 8192000), "box": (64, 128, 1), "dtype": 6
    }  # fmt: skip
    assert _read_map(params, 128) == common | {
        "address": B, "dims": (520, 4096, 2), "strides": (1040, 4259840), "box": (64, 128, 1), "dtype": 6
    }  # fmt: skip
    assert _read_map(params, 256) == common | {
        "address": OUT, "dims": (520, 1000, 2), "strides": (2080, 2080000), "box": (32, 64, 1), "dtype": 7
    }  # fmt: skip
    machine.library.jbw_call_destroy(call)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_residual(machine: Machine, has_bias: bool) -> None:
    request = ffi_cases.request(has_bias=has_bias, has_residual=True)
    call = machine.ready(request)
    assert machine.execute(call, **({} if has_bias else {"bias": 6})) == (OK, "")
    params = bytes(machine.launch().params)
    out, residual = (_read_map(params, offset) for offset in (256, 384))
    assert (out["address"], residual["address"]) == (OUT, RESIDUAL)
    assert residual == out | {"address": RESIDUAL}
    assert struct.unpack_from("<3i", params, 512) == (1000, 520, 4096)
    assert machine.calls("cuTensorMapEncodeTiled") == 4
    machine.driver.fake_fail(b"cuTensorMapEncodeTiled", 700)
    assert machine.execute(call)[0] == INTERNAL


def test_a_split_tail(machine: Machine) -> None:
    """A second result: its address, and a token of the call's own, the same in every launch of it."""
    size = 4096 + 66 * ffi_cases.CLUSTER_BYTES
    request = ffi_cases.request(workspace_bytes=size, tail_parts=2)
    tokens = []
    for call in [machine.ready(request) for _ in range(3)]:
        for at in (WORKSPACE, WORKSPACE + 4096):
            assert machine.execute(call, workspace=at) == (OK, "")
            parts, address, token = struct.unpack_from("<iQQ", bytes(machine.launch().params), 432)
            assert (parts, address, list(machine.launch().grid)) == (2, at, [2, 1, 48])
            tokens.append(token)
    assert tokens[::2] == tokens[1::2] and len(set(tokens)) == 3
    code, sentence = machine.execute(call, workspace=WORKSPACE + 8)
    assert (code, "`workspace` requires a pointer aligned to 16 bytes" in sentence) == (INVALID_ARGUMENT, True)
    assert machine.execute(machine.ready(ffi_cases.request()), workspace=1) == (OK, "")  # nobody takes it


def test_a_workspace_too_small_for_a_cluster(machine: Machine) -> None:
    request = ffi_cases.request(workspace_bytes=4096 + ffi_cases.CLUSTER_BYTES - 1)
    code, sentence, _ = machine.create(request)
    assert (code, "the workspace requires rank 1 and at least 266240 bytes" in sentence) == (INVALID_ARGUMENT, True)


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


def test_a_device_without_room_for_a_large_cluster(machine: Machine) -> None:
    request = ffi_cases.request(cluster_m=4, cluster_n=4)
    _, _, call = machine.create(request)
    machine.driver.fake_set(b"clusters", 0)
    code, sentence = machine.initialize(call, request)
    assert code == FAILED_PRECONDITION
    assert f"kernel `{VARIANT}` requires room for a cluster of 4x4x1 CTAs on device 0, got 0" in sentence
    machine.driver.fake_fail_attribute(NON_PORTABLE, 801)
    code, sentence = machine.initialize(call, request)
    assert code == FAILED_PRECONDITION
    assert f"kernel `{VARIANT}` requires a cluster of 4x4x1 CTAs on device 0, got CUDA_ERROR_FAKE (as told)" in sentence


@pytest.mark.parametrize(("dtype", "bytes_"), [("bfloat16", 2), ("float32", 4), ("float8_e5m2", 1)])
def test_threads_store_to_a_pointer(machine: Machine, dtype: str, bytes_: int) -> None:
    """No tensor map, so any row pitch and any address that elements may have."""
    request = ffi_cases.request(m=7, n=5, dtypes=("bfloat16", "bfloat16", dtype), has_bias=True, store="threads")
    request.b.dims[2] = 8
    call = machine.ready(request)
    assert machine.execute(call, out=OUT + 3 * bytes_) == (OK, "")
    params = bytes(machine.launch().params)[: machine.launch().param_bytes]
    assert struct.unpack_from("<Q2i", params, 256) == (OUT + 3 * bytes_, 7, 5)
    assert _read_map(params, 128)["dims"] == (8, 4096, 2)
    assert machine.calls("cuTensorMapEncodeTiled") == 2
    if bytes_ > 1:
        code, sentence = machine.execute(call, out=OUT + 1)
        assert (code, f"`out` requires a pointer aligned to {bytes_} bytes" in sentence) == (INVALID_ARGUMENT, True)


def test_tf32_operands_and_their_swizzle(machine: Machine) -> None:
    request = ffi_cases.request(majors="mn", dtypes=("float32", "float32", "float32"))
    request.swizzle_atom_bytes[0] = request.swizzle_atom_bytes[1] = 32
    assert machine.execute(machine.ready(request)) == (OK, "")
    maps = [_read_map(bytes(machine.launch().params), at) for at in (0, 128, 256)]
    # TFLOAT32, 128B_ATOM_32B for what is loaded; FLOAT32, 128B for what is stored
    assert [(m["dtype"], m["swizzle"]) for m in maps] == [(11, 4), (11, 4), (7, 3)]


def test_integer_operands(machine: Machine) -> None:
    request = ffi_cases.request(n=521, k=4000, majors="kk", dtypes=("int8", "uint8", "int32"), c_major="m")
    assert machine.execute(machine.ready(request)) == (OK, "")
    maps = [_read_map(bytes(machine.launch().params), at) for at in (0, 128, 256)]
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
        assert _read_map(bytes(machine.launch().params), 0)["address"] == a


@pytest.mark.parametrize("operand", ["a", "b", "out", "bias", "residual"])
def test_a_misaligned_pointer(machine: Machine, operand: str) -> None:
    call = machine.ready(ffi_cases.request(has_bias=True, has_residual=True))
    code, sentence = machine.execute(call, **{operand: A + 6})
    assert code == INVALID_ARGUMENT
    assert f"`{operand}` requires a pointer aligned to 16 bytes, got 0x7f0000000006" in sentence
    assert "jax.lax.optimization_barrier" in sentence and "xla_gpu_enable_dynamic_slice_fusion" in sentence
    assert machine.calls("cuLaunchKernelEx") == 0


def test_without_a_driver_only_initialize_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "/nonexistent/libcuda.so.1")
    code, _, call = machine.create(ffi_cases.request())
    assert code == OK
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    assert "requires the NVIDIA driver's library /nonexistent/libcuda.so.1" in sentence
    assert "install an NVIDIA driver" in sentence


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    machine.driver.fake_set(b"version", 11080)
    _, _, call = machine.create(ffi_cases.request())
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    assert "requires support of CUDA 12.0 or newer, got CUDA 11.8: install" in sentence


@pytest.mark.parametrize("symbol", ["cuLibraryLoadData", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"])
def test_a_driver_that_lacks_a_symbol(machine: Machine, symbol: str) -> None:
    machine.driver.fake_hide(symbol.encode())
    _, _, call = machine.create(ffi_cases.request())
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    assert f"the driver requires a {symbol}, got none" in sentence


def test_a_library_that_is_no_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBCUDA", "libm.so.6")
    _, _, call = machine.create(ffi_cases.request())
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert (code, "requires a cuDriverGetVersion, got none in libm.so.6" in sentence) == (FAILED_PRECONDITION, True)


@pytest.mark.parametrize(("target", "capability"), [("sm_90a", "9.0"), ("sm_100a", "10.0"), ("sm_103a", "10.3")])
def test_a_kernel_of_another_gpu(machine: Machine, target: str, capability: str) -> None:
    machine.driver.fake_set(b"major", 12)
    code, _, call = machine.create(ffi_cases.request(), target=target)
    assert code == OK
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    assert f"requires a GPU of compute capability {capability} ({target}), got 12.0 on device 0" in sentence
    assert machine.calls("cuLibraryLoadData") == 0
    for setting, value in zip((b"major", b"minor"), capability.split("."), strict=True):
        machine.driver.fake_set(setting, int(value))
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")


def test_a_corrupted_cubin(machine: Machine) -> None:
    (machine.artifacts / f"{VARIANT}.cubin").write_bytes(CUBIN[:-1])
    code, sentence, call = machine.create(ffi_cases.request())
    assert (code, call.value) == (FAILED_PRECONDITION, None)
    assert f"requires the sha256 of its manifest, {hashlib.sha256(CUBIN).hexdigest()}, got " in sentence
    assert f"rebuild it with `python -m jax_bwgemm build --arch sm_90a --only {VARIANT}`" in sentence


def test_the_first_directory_with_the_right_cubin(machine: Machine, tmp_path: pathlib.Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / f"{VARIANT}.cubin").write_bytes(b"stale")
    machine.set_directories(tmp_path / "nowhere", stale, machine.artifacts)
    machine.ready(ffi_cases.request())


def test_a_missing_cubin(machine: Machine, tmp_path: pathlib.Path) -> None:
    code, sentence, _ = machine.create(ffi_cases.request(), variant="other")
    assert code == FAILED_PRECONDITION
    assert f"requires other.cubin in an artifact directory, got none in [{machine.artifacts}]: build it" in sentence
    machine.set_directories()
    code, sentence, _ = machine.create(ffi_cases.request())
    assert (code, "got none in []: build it" in sentence) == (FAILED_PRECONDITION, True)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (dict(target="sm_80"), "`target` requires one of sm_90a, sm_100a, sm_103a, got 'sm_80'"),
        (dict(variant="../x"), "`variant` requires the name of a kernel, got '../x'"),
        (dict(variant=""), "`variant` requires the name of a kernel, got ''"),
        (dict(entry=""), "`entry` requires the name of a kernel symbol"),
    ],
)
def test_names_that_cannot_be(machine: Machine, names: dict[str, str], sentence: str) -> None:
    code, got, _ = machine.create(ffi_cases.request(), **names)
    assert code == INVALID_ARGUMENT
    assert sentence in got


def test_shapes_are_checked_as_soon_as_they_are_known(machine: Machine) -> None:
    bad, unknown = ffi_cases.request(k=4100), ffi_cases.request()
    unknown.a = ffi.Buffer.none()
    code, sentence, _ = machine.create(bad)
    assert (code, "multiple of 16 bytes" in sentence) == (INVALID_ARGUMENT, True)
    code, _, call = machine.create(unknown)
    assert code == OK
    code, sentence = machine.initialize(call, bad)
    assert (code, "multiple of 16 bytes" in sentence) == (INVALID_ARGUMENT, True)
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")
    assert machine.execute(call) == (OK, "")


@pytest.mark.parametrize(
    ("function", "code", "sentence"),
    [
        ("cuDeviceGet", FAILED_PRECONDITION, "a launch requires device 0, got CUDA_ERROR_FAKE (as told)"),
        ("cuDeviceGetAttribute", FAILED_PRECONDITION, "device 0 requires a compute capability, got CUDA_ERROR_FAKE"),
        ("cuLibraryLoadData", FAILED_PRECONDITION, "from a driver of CUDA 13.0: update the driver"),
        ("cuLibraryGetKernel", INTERNAL, "requires a symbol kernel_entry, got CUDA_ERROR_FAKE (as told): rebuild"),
        ("cuKernelSetAttribute", FAILED_PRECONDITION, "requires 232448 bytes of shared memory on device 0"),
        ("cuOccupancyMaxActiveClusters", FAILED_PRECONDITION, "requires room for a cluster of 2x1x1 CTAs on device 0"),
    ],
)
def test_initialize_says_what_failed_and_may_be_repeated(
    machine: Machine, function: str, code: int, sentence: str
) -> None:
    machine.driver.fake_fail(function.encode(), 700)
    _, _, call = machine.create(ffi_cases.request())
    got = machine.initialize(call, ffi_cases.request())
    assert (got[0], sentence in got[1]) == (code, True), got
    machine.driver.fake_fail(function.encode(), 0)
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")
    # A library whose kernel was not found is unloaded again.
    assert machine.calls("cuLibraryUnload") == (function == "cuLibraryGetKernel")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("cuTensorMapEncodeTiled", "the tensor map of `a` requires legal arguments, got CUDA_ERROR_FAKE (as told)"),
        ("cuLaunchKernelEx", f"the launch of `{VARIANT}` requires success, got CUDA_ERROR_FAKE (as told) on device 0"),
    ],
)
def test_execute_says_what_failed(machine: Machine, function: str, sentence: str) -> None:
    call = machine.ready(ffi_cases.request())
    machine.driver.fake_fail(function.encode(), 700)
    code, got = machine.execute(call)
    assert (code, sentence in got) == (INTERNAL, True), got


@pytest.mark.parametrize("device", [-1, 2, 64])
def test_devices_that_are_not_there(machine: Machine, device: int) -> None:
    call = machine.ready(ffi_cases.request())
    assert machine.initialize(call, ffi_cases.request(), device)[0] == FAILED_PRECONDITION
    code, sentence = machine.execute(call, device)
    assert (code, "requires an Initialize on the same device" in sentence) == (INTERNAL, True)


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


def test_a_sentence_is_cut_to_the_room_it_has(machine: Machine) -> None:
    error = ctypes.create_string_buffer(b"#" * 8)
    request = ffi_cases.request(cta_m=0)
    plan = ffi.LaunchPlan()
    library = machine.library
    arguments = [ctypes.byref(request), ctypes.byref(plan), error]
    assert library.jbw_launch_plan(*arguments, ctypes.c_size_t(6)) == INVALID_ARGUMENT
    assert error.raw == b"`cta_\x00##\x00"
