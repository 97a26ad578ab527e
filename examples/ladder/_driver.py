"""The CUDA driver by ctypes, as much as a rung needs: memory, cubins, tensor maps, launches, events.

Needs libcuda.so.1 and numpy. Knows no kernel: `_launch.Facts` says what is launched.
"""

from __future__ import annotations

import ctypes as c
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from _launch import Facts, Map

HANG_S = 20.0
PORTABLE_CLUSTER = 8  # CTAs; more must be asked for, CUDA C++ programming guide, thread block clusters
NOT_READY = 600  # CUDA_ERROR_NOT_READY
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
BFLOAT16, L2_128_BYTES = 9, 2  # CUtensorMapDataType, CUtensorMapL2promotion
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
MAP_BYTES = 128  # also what aligns it: CUtensorMap, CUDA 13

_INT, _SIZE, _U64, _POINTER, _OUT = c.c_int, c.c_size_t, c.c_uint64, c.c_void_p, c.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c.c_uint],
    "cuDriverGetVersion": [_OUT],
    "cuDeviceGetCount": [_OUT],
    "cuDeviceGet": [_OUT, _INT],
    "cuDeviceGetName": [_OUT, _INT, _INT],
    "cuDeviceGetAttribute": [_OUT, _INT, _INT],
    "cuDevicePrimaryCtxRetain": [_OUT, _INT],
    "cuDevicePrimaryCtxRelease_v2": [_INT],
    "cuCtxSetCurrent": [_POINTER],
    "cuGetErrorName": [_INT, _OUT],
    "cuMemAlloc_v2": [_OUT, _SIZE],
    "cuMemFree_v2": [_U64],
    "cuMemsetD8_v2": [_U64, c.c_ubyte, _SIZE],
    "cuMemcpyHtoD_v2": [_U64, _POINTER, _SIZE],
    "cuMemcpyDtoH_v2": [_POINTER, _U64, _SIZE],
    "cuModuleLoadData": [_OUT, _POINTER],
    "cuModuleGetFunction": [_OUT, _POINTER, c.c_char_p],
    "cuFuncSetAttribute": [_POINTER, _INT, _INT],
    "cuTensorMapEncodeTiled": [_OUT, _INT, c.c_uint32, _U64, *[_POINTER] * 4, *[_INT] * 4],
    "cuOccupancyMaxActiveClusters": [_OUT, _POINTER, _POINTER],
    "cuLaunchKernelEx": [_POINTER, _POINTER, _POINTER, _POINTER],
    "cuStreamQuery": [_POINTER],
    "cuEventCreate": [_OUT, c.c_uint],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuEventElapsedTime": [_OUT, _POINTER, _POINTER],
    "cuEventDestroy_v2": [_POINTER],
}  # cuda.h


class CudaError(RuntimeError):
    """The driver refused, with its name for why; or there is none."""


class Hang(CudaError):
    """The kernel does not end; the process must."""


class LaunchAttribute(c.Structure):
    _fields_ = [("id", c.c_int), ("pad", c.c_char * 4), ("value", c.c_uint * 16)]


class LaunchConfig(c.Structure):
    _fields_ = [
        ("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("smem_bytes", c.c_uint), ("stream", c.c_void_p),
        ("attrs", c.POINTER(LaunchAttribute)), ("num_attrs", c.c_uint),
    ]  # fmt: skip


@functools.cache
def library() -> c.CDLL:
    """libcuda, every function that is used here with the types of its arguments."""
    try:
        found = c.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from error
    for name, types in _SIGNATURES.items():
        if not hasattr(found, name):
            raise CudaError(f"a CUDA driver without {name}: Hopper's came with CUDA 12")
        getattr(found, name).argtypes = types
    return found


def call(name: str, *args: Any) -> None:
    code = getattr(library(), name)(*args)
    if code:
        text = c.c_char_p()
        library().cuGetErrorName(code, c.byref(text))
        raise CudaError(f"{name}: {(text.value or b'?').decode()}")


def arch() -> str:
    """What to compile for GPU 0, for example "sm_90a". `CudaError` without a driver or a GPU."""
    call("cuInit", 0)
    count, major, minor = c.c_int(), c.c_int(), c.c_int()
    call("cuDeviceGetCount", c.byref(count))
    if not count.value:
        raise CudaError("no GPU")
    call("cuDeviceGetAttribute", c.byref(major), CAPABILITY_MAJOR, 0)
    call("cuDeviceGetAttribute", c.byref(minor), CAPABILITY_MINOR, 0)
    return f"sm_{major.value}{minor.value}a"


class Gpu:
    """GPU 0, as a context: what is allocated in it is freed at its end."""

    def __enter__(self) -> Gpu:
        self.arch, handle, device = arch(), c.c_void_p(), c.c_int()
        self.buffers: list[int] = []
        call("cuDeviceGet", c.byref(device), 0)
        call("cuDevicePrimaryCtxRetain", c.byref(handle), device)
        call("cuCtxSetCurrent", handle)
        self.device = device.value
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:  # after an error the context may be unusable, and ends with the process
            for buffer in self.buffers:
                call("cuMemFree_v2", buffer)
            call("cuDevicePrimaryCtxRelease_v2", self.device)

    def describe(self) -> dict[str, str]:
        name, version = c.create_string_buffer(256), c.c_int()
        call("cuDeviceGetName", name, len(name), self.device)
        call("cuDriverGetVersion", c.byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"device": name.value.decode(), "arch": self.arch, "driver_cuda": cuda}

    def allocate(self, num_bytes: int) -> int:
        """Every byte 0xff: bfloat16 NaN."""
        address = c.c_uint64()
        call("cuMemAlloc_v2", c.byref(address), num_bytes)
        self.buffers.append(address.value)
        self.poison(address.value, num_bytes)
        return address.value

    def poison(self, address: int, num_bytes: int) -> None:
        call("cuMemsetD8_v2", address, 0xFF, num_bytes)

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.allocate(array.nbytes)
        call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)
        return address

    def download(self, address: int, into: np.ndarray) -> None:
        call("cuMemcpyDtoH_v2", into.ctypes.data, address, into.nbytes)

    def launcher(self, facts: Facts, cubin: bytes, shape: Sequence[int], addresses: Sequence[int]) -> Launcher:
        """Of c = a b^T of (m, n, k) = `shape`, with a, b and c at `addresses`."""
        module, function = c.c_void_p(), c.c_void_p()
        image = c.create_string_buffer(cubin, len(cubin) + 1)
        call("cuModuleLoadData", c.byref(module), c.addressof(image))
        call("cuModuleGetFunction", c.byref(function), module, facts.entry.encode())
        call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, facts.smem_bytes)
        if facts.cluster[0] * facts.cluster[1] * facts.cluster[2] > PORTABLE_CLUSTER:
            call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER, 1)
        return Launcher(function, _config(facts, function, shape), [_bytes(p) for p in facts.params(shape, addresses)])

    def wait(self) -> None:
        """Until all is done. Polls, so that a kernel without end is noticed: `Hang`."""
        deadline = time.monotonic() + HANG_S
        while (code := library().cuStreamQuery(None)) == NOT_READY:
            if time.monotonic() > deadline:
                raise Hang(f"the kernel does not end within {HANG_S:.0f} s")
            time.sleep(0.0002)
        if code:
            call("cuStreamQuery", None)


@dataclasses.dataclass
class Launcher:
    """A launch, packed once: the driver gets a pointer to each parameter."""

    function: c.c_void_p
    config: LaunchConfig
    params: list[np.ndarray]

    def __call__(self) -> None:
        pointers = (c.c_void_p * len(self.params))(*(param.ctypes.data for param in self.params))
        call("cuLaunchKernelEx", c.byref(self.config), self.function, pointers, None)


class Stopwatch:
    """Two events around a launch; read it when the GPU is done."""

    def __init__(self, launch: Launcher) -> None:
        self.events = [c.c_void_p(), c.c_void_p()]
        for event in self.events:
            call("cuEventCreate", c.byref(event), 0)
        call("cuEventRecord", self.events[0], None)
        launch()
        call("cuEventRecord", self.events[1], None)

    def us(self) -> float:
        elapsed_ms = c.c_float()
        call("cuEventElapsedTime", c.byref(elapsed_ms), *self.events)
        for event in self.events:
            call("cuEventDestroy_v2", event)
        return elapsed_ms.value * 1e3


def _config(facts: Facts, function: c.c_void_p, shape: Sequence[int]) -> LaunchConfig:
    """As many clusters as `Facts.grid` says; for a persistent kernel the driver says how many run at once."""
    cluster = LaunchAttribute(CLUSTER_DIMENSION)
    cluster.value[:3] = facts.cluster
    block = (c.c_uint * 3)(facts.num_threads, 1, 1)
    config = LaunchConfig((c.c_uint * 3)(*facts.cluster), block, facts.smem_bytes, None, c.pointer(cluster), 1)
    at_once = c.c_int()
    if facts.is_persistent:
        call("cuOccupancyMaxActiveClusters", c.byref(at_once), function, c.byref(config))
        if at_once.value < 1:
            raise CudaError(f"{facts.name}: the GPU runs no cluster of it")
    config.grid[:] = facts.grid(shape[0], shape[1], at_once.value)
    return config


def _bytes(param: Map | int) -> np.ndarray:
    """Of a kernel parameter. Of integers 64 bits: they serve those of 32 as well."""
    return np.array([param], np.int64) if isinstance(param, int) else encoded(param)


def encoded(tensor_map: Map) -> np.ndarray:
    """The driver's 128 bytes, aligned by hand."""
    room = np.zeros(2 * MAP_BYTES, np.uint8)
    start = -room.ctypes.data % MAP_BYTES
    out, rank = room[start : start + MAP_BYTES], len(tensor_map.dims)
    dims, strides = np.array(tensor_map.dims, np.uint64), np.array(tensor_map.strides, np.uint64)
    box, steps = np.array(tensor_map.box, np.uint32), np.ones(rank, np.uint32)
    pointers = [array.ctypes.data for array in (dims, strides, box, steps)]
    modes = 0, SWIZZLES[tensor_map.swizzle], L2_128_BYTES, 0  # interleave, swizzle, promotion, what lies outside
    call("cuTensorMapEncodeTiled", out.ctypes.data, BFLOAT16, rank, tensor_map.address, *pointers, *modes)
    return out
