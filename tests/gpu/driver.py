"""The CUDA driver by ctypes, as much as a snippet needs: PTX in, tensor maps, one launch, results out."""

from __future__ import annotations

import ctypes as c
import functools
import time
from typing import Any

import numpy as np

from jax_bwgemm.emulator import TensorMap
from tests.snippets.kit import Snippet

HANG_S = 10.0
NOT_READY = 600
MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CUjit_option
# CUtensorMapDataType
TYPES = {
    "u8": 0, "s8": 0, "e4m3": 0, "e5m2": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7,
    "f64": 8, "bf16": 9, "tf32": 11,
}  # fmt: skip
SWIZZLES = {(0, 16): 0, (32, 16): 1, (64, 16): 2, (128, 16): 3, (128, 32): 4}  # (span, atom): CUtensorMapSwizzle


class CudaError(RuntimeError):
    """The driver refused, with its name for why."""


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
    return c.CDLL("libcuda.so.1")


def call(name: str, *args: Any) -> None:
    code = getattr(library(), name)(*args)
    if code:
        text = c.c_char_p()
        library().cuGetErrorName(code, c.byref(text))
        raise CudaError(f"{name}: {(text.value or b'?').decode()}")


@functools.cache
def context() -> c.c_void_p:
    """The primary context of device 0, shared with JAX."""
    handle, device = c.c_void_p(), c.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", c.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", c.byref(handle), device)
    return handle


def load(ptx: str) -> c.c_void_p:
    """Compiles a module; the log is in the error."""
    log, module = c.create_string_buffer(4096), c.c_void_p()
    keys = (c.c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
    values = (c.c_void_p * 2)(c.cast(log, c.c_void_p), c.c_void_p(len(log)))
    try:
        call("cuModuleLoadDataEx", c.byref(module), c.c_char_p(ptx.encode()), 2, keys, values)
    except CudaError as error:
        raise CudaError(f"{error}: {log.value.decode()}") from None
    return module


def encode(m: TensorMap) -> Any:
    """The driver's 128 bytes, 64-byte aligned."""
    rank = len(m.dims)
    room = c.create_string_buffer(128 + 64)
    at = -(-c.addressof(room) // 64) * 64
    out = (c.c_ubyte * 128).from_address(at)
    out.room = room
    dims, strides = (c.c_uint64 * rank)(*m.dims), (c.c_uint64 * max(rank - 1, 1))(*m.strides)
    box, steps = (c.c_uint32 * rank)(*m.box), (c.c_uint32 * rank)(*[1] * rank)
    call("cuTensorMapEncodeTiled", out, TYPES[m.element], rank, c.c_void_p(m.address), dims, strides, box, steps, 0,
         SWIZZLES[m.swizzle, m.swizzle_atom_bytes], 0, 0)  # fmt: skip
    return out


def execute(snippet: Snippet) -> tuple[np.ndarray, ...]:
    """The results, by the GPU. Raises `Hang` if the kernel runs for ten seconds."""
    call("cuCtxSetCurrent", context())
    arrays = snippet.arrays()
    buffers = [c.c_uint64() for _ in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        call("cuMemAlloc_v2", c.byref(buffer), c.c_size_t(array.nbytes))
        call("cuMemcpyHtoD_v2", buffer, array.ctypes.data_as(c.c_void_p), c.c_size_t(array.nbytes))
    maps = [encode(m.at(tuple(b.value for b in buffers))) for m in snippet.maps]
    module = load(snippet.text())
    _launch(module, snippet, [*buffers, *maps])
    for buffer, array in zip(buffers, arrays, strict=True):
        call("cuMemcpyDtoH_v2", array.ctypes.data_as(c.c_void_p), buffer, c.c_size_t(array.nbytes))
        call("cuMemFree_v2", buffer)
    call("cuModuleUnload", module)
    return arrays[: len(snippet.results)]


def _launch(module: c.c_void_p, snippet: Snippet, params: list[Any]) -> None:
    function = c.c_void_p()
    call("cuModuleGetFunction", c.byref(function), module, b"kernel")
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, snippet.smem_bytes)
    cluster = LaunchAttribute(CLUSTER_DIMENSION)
    cluster.value[:3] = snippet.cluster
    config = LaunchConfig((c.c_uint * 3)(*snippet.grid), (c.c_uint * 3)(snippet.threads, 1, 1), snippet.smem_bytes,
                          None, c.pointer(cluster), 1)  # fmt: skip
    pointers = (c.c_void_p * len(params))(*(c.addressof(p) for p in params))
    call("cuLaunchKernelEx", c.byref(config), function, pointers, None)
    _finish()


def _finish() -> None:
    """Polls the legacy stream, so that a kernel without end is noticed."""
    deadline = time.monotonic() + HANG_S
    while (code := library().cuStreamQuery(None)) == NOT_READY:
        if time.monotonic() > deadline:
            raise Hang("the kernel does not end")
        time.sleep(0.0002)
    if code:
        call("cuStreamSynchronize", None)
