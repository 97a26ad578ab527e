"""The stages that XLA calls, on a stand-in for the CUDA driver: our library beside it, both fresh."""

import ctypes
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ffi_cases
import pytest

from jax_bwgemm.runtime import ffi

COMPILER = shutil.which("c++")
needs = [
    pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status())),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, INTERNAL = 0, 3, 8, 9, 13
NON_PORTABLE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
VARIANT = "sm_90a_variant"
CUBIN = b"\x7fELF" + bytes(range(256)) * 4
A, B, OUT, BIAS, STREAM = 0x7F0000000000, 0x7F0000100000, 0x7F0000200010, 0x7F0000300020, 0x5000
RESIDUAL, WORKSPACE = 0x7F0000400030, 0x7F0000500040
POINTERS = {"a": A, "b": B, "out": OUT, "bias": BIAS, "residual": RESIDUAL, "workspace": WORKSPACE}


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
        ("params", ctypes.c_ubyte * 4096),
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
        self._roles: dict[int | None, tuple[str, ...]] = {}  # of each created call's buffers

    def set_directories(self, *directories: pathlib.Path) -> None:
        names = [os.fsencode(directory) for directory in directories]
        self.library.jbw_set_artifact_dirs((ctypes.c_char_p * len(names))(*names), ctypes.c_size_t(len(names)))

    def _status(self, function: Callable[..., int], *arguments: object) -> tuple[int, str]:
        error = ctypes.create_string_buffer(4096)
        code = function(*arguments, error, ctypes.c_size_t(len(error)))
        return code, error.value.decode()

    def create(self, call: ffi_cases.Call, shows: bool = True, **names: str) -> tuple[int, str, ctypes.c_void_p]:
        """`shows`: the buffers, as some versions of XLA do not."""
        buffers = ffi.Buffers.of(*call.given) if shows else ffi.Buffers()
        made = self.create_from(self.library.jbw_call_create, call.said, buffers, **names)
        self._roles[made[2].value] = tuple(call.rules)
        return made

    def create_from(
        self, create: Any, attributes: Mapping[str, Any], buffers: ffi.Buffers, **names: str
    ) -> tuple[int, str, ctypes.c_void_p]:
        known = dict(variant=VARIANT, entry="kernel_entry", target="sm_90a")
        known["cubin_sha256"] = hashlib.sha256(CUBIN).hexdigest()
        said, created = ffi.Attributes.of(known | attributes | names), ctypes.c_void_p()
        return *self._status(create, ctypes.byref(said), ctypes.byref(buffers), ctypes.byref(created)), created

    def initialize(self, created: ctypes.c_void_p, call: ffi_cases.Call, device: int = 0) -> tuple[int, str]:
        buffers = ffi.Buffers.of(*call.given)
        return self._status(self.library.jbw_call_initialize, created, device, ctypes.byref(buffers))

    def execute(self, created: ctypes.c_void_p, device: int = 0, **pointers: int) -> tuple[int, str]:
        roles = self._roles[created.value]
        every = (ctypes.c_void_p * len(roles))(*((POINTERS | pointers)[role] for role in roles))
        return self._status(self.library.jbw_call_execute, created, device, ctypes.c_void_p(STREAM), every)

    def ready(self, call: ffi_cases.Call) -> ctypes.c_void_p:
        code, sentence, created = self.create(call)
        assert (code, sentence) == (OK, "")
        sizes = [size for _, _, size in call.leaves]
        self.driver.fake_params((ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)))
        assert self.initialize(created, call) == (OK, "")
        return created

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
