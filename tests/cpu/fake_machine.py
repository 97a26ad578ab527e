"""The stages that XLA calls, on a stand-in for the CUDA driver: our library beside it, both fresh."""

import ctypes
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator

import pytest

from jax_bwgemm import ffi

COMPILER = shutil.which("c++")
needs = [
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


def read_map(params: bytes, offset: int) -> dict[str, object]:
    """What the fake driver writes in place of a descriptor."""
    numbers = struct.unpack_from("<6Q3I6i", params, offset)
    names = ("rank", "dtype", "interleave", "swizzle", "l2_promotion", "oob")
    head = {"address": numbers[0], "dims": numbers[1:4], "strides": numbers[4:6], "box": numbers[6:9]}
    return head | dict(zip(names, numbers[9:], strict=True))
