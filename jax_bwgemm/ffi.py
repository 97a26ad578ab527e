"""The native library: found, loaded by ctypes, registered with XLA. Loads nothing until asked; knows no tile.

The structs mirror `ffi/launch_plan.h`. `launch_plan` is the very packing that the GPU sees, callable on any machine.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax

TARGET_NAME = "jax_bwgemm_matmul_v1"
REPACK_NAME = "jax_bwgemm_repack_v1"
PLATFORM = "CUDA"  # "cuda" is accepted by jax and never registered
LIBRARY_NAME = "libjax_bwgemm_ffi.so"
LIBRARY_VARIABLE = "JAX_BWGEMM_LIBRARY"
DTYPE_CODES = {
    "int8": 2,
    "int32": 4,
    "uint8": 6,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}  # XLA_FFI_DataType
L2_CODES = {"normal": 0, "evict_first": 1, "evict_last": 2}
RASTER_CODES = {"groups": 0, "snake": 1}

_MAX_PARAMS = 24
_MAX_PARAM_BYTES = 1024
_ERROR_BYTES = 4096
_REMEDY = "reinstall jax_bwgemm, or build the library with `cmake -S ffi -B build/ffi && cmake --build build/ffi`"

_lock = threading.Lock()
_registered = False


class Buffer(ctypes.Structure):
    """A row-major buffer; `rank` -1 says that there is none."""

    _fields_ = [("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 3)]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Buffer:
        return cls(DTYPE_CODES[dtype], len(shape), (ctypes.c_int64 * 3)(*shape[:3]))

    @classmethod
    def none(cls) -> Buffer:
        return cls(0, -1)


class Param(ctypes.Structure):
    """One leaf of the kernel parameter block; `kind` is a position in `param_kinds()`."""

    _fields_ = [("kind", ctypes.c_int32), ("offset", ctypes.c_int32), ("size", ctypes.c_int32)]


class LaunchRequest(ctypes.Structure):
    """One custom call: its buffers, its attributes, and `max_active_clusters` of the device."""

    _fields_ = [
        *((name, Buffer) for name in ("a", "b", "out", "bias", "residual", "workspace")),
        *((name, ctypes.c_int32) for name in ("a_major", "b_major", "c_major")),  # ord("k"), ord("m"), ord("n")
        *((name, ctypes.c_int32) for name in ("cta_m", "mma_n", "cluster_m", "cluster_n", "cluster_k")),
        *((name, ctypes.c_int32) for name in ("num_threads", "smem_bytes")),
        *((name, ctypes.c_int32) for name in ("raster_group", "raster_along_n", "raster_order")),
        *((name, ctypes.c_int32) for name in ("a_l2", "b_l2", "stream_tiles", "stream_clusters", "pdl")),
        ("alpha", ctypes.c_float),
        ("token", ctypes.c_uint64),  # the value of a raised flag in the workspace
        ("box", ctypes.c_int32 * 3 * 3),  # of a, b, out (and residual); innermost first; zeros where no tensor map is
        ("swizzle_bytes", ctypes.c_int32 * 3),
        ("swizzle_atom_bytes", ctypes.c_int32 * 3),
        ("param_bytes", ctypes.c_int32),
        ("num_params", ctypes.c_int32),
        ("params", Param * _MAX_PARAMS),
        ("max_active_clusters", ctypes.c_int32),
    ]

    def __init__(self, **fields: Any) -> None:
        absent = {name: Buffer.none() for name in ("bias", "residual", "workspace")}
        super().__init__(**(absent | {"stream_clusters": 1} | fields))


class TensorMapSpec(ctypes.Structure):
    """The arguments of one cuTensorMapEncodeTiled but its address; dimensions innermost first."""

    _fields_ = [
        ("data_type", ctypes.c_int32),  # CUtensorMapDataType
        ("swizzle_bytes", ctypes.c_int32),
        ("swizzle_atom_bytes", ctypes.c_int32),
        ("dims", ctypes.c_uint64 * 3),
        ("stride_bytes", ctypes.c_uint64 * 2),  # of dims[1] and dims[2]
        ("box", ctypes.c_uint32 * 3),
        ("param_offset", ctypes.c_int32),  # -1: the kernel takes a pointer in its place
    ]


class LaunchPlan(ctypes.Structure):
    """What a launch is but its addresses: `params` holds zeros where descriptors and pointers go."""

    _fields_ = [
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        ("smem_bytes", ctypes.c_uint32),
        ("num_cluster_tiles", ctypes.c_int64),
        ("tensor_maps", TensorMapSpec * 4),  # of a, b, out, residual
        ("c_offset", ctypes.c_int32),  # -1: a tensor map in its place
        ("bias_offset", ctypes.c_int32),  # -1: no bias
        ("workspace_offset", ctypes.c_int32),  # -1: none
        ("out_align_bytes", ctypes.c_int32),
        ("pdl", ctypes.c_int32),
        ("num_params", ctypes.c_int32),
        ("param_offsets", ctypes.c_int32 * _MAX_PARAMS),  # in the kernel's order
        ("param_bytes", ctypes.c_int32),
        ("params", ctypes.c_ubyte * _MAX_PARAM_BYTES),
    ]

    @property
    def param_block(self) -> bytes:
        return bytes(self.params)[: self.param_bytes]


def status() -> str | None:
    """None if the library can be registered, else one sentence that says why not and what to do."""
    try:
        _load()
    except OSError as error:
        return str(error)
    return None


def register(artifact_dirs: Iterable[str | os.PathLike[str]]) -> None:
    """Makes the custom call known to XLA and tells it where cubins are, first directory first.

    May be called any number of times from any thread; the last call's directories count. Raises RuntimeError with
    `status()`'s sentence if there is no usable library.
    """
    global _registered
    if (reason := status()) is not None:
        raise RuntimeError(reason)
    library = _load()
    with _lock:
        directories = [os.fsencode(directory) for directory in artifact_dirs]
        library.jbw_set_artifact_dirs((ctypes.c_char_p * len(directories))(*directories), len(directories))
        if not _registered:
            _register_with_xla(library)
            _registered = True


def launch_plan(request: LaunchRequest) -> LaunchPlan:
    """The launch of `request`; raises ValueError with the sentence that says what it requires."""
    plan = LaunchPlan()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    if _load().jbw_launch_plan(ctypes.byref(request), ctypes.byref(plan), error, _ERROR_BYTES):
        raise ValueError(error.value.decode(errors="replace"))
    return plan


def version() -> str:
    """The version of the package that the library was built for."""
    return str(_load().jbw_version().decode())


def api_minor() -> int:
    """The minor version of the XLA FFI headers that the library was built with."""
    return int(_load().jbw_ffi_api_minor())


def param_kinds() -> tuple[str, ...]:
    """The parameter kinds that the library packs; a code is a position."""
    names = map(_load().jbw_param_kind, itertools.count())
    return tuple(name.decode() for name in itertools.takewhile(lambda name: name is not None, names))


def sha256(data: bytes) -> str:
    """The library's own digest, by which it recognises a cubin."""
    digest = ctypes.create_string_buffer(65)
    _load().jbw_sha256(data, len(data), digest)
    return digest.value.decode()


def execute_count() -> int:
    """How often the handler's Execute ran in this process; a command buffer that is replayed does not run it."""
    return int(_load().jbw_execute_count())


def timing_start(capacity: int) -> None:
    """Records the next `capacity` Executes, until `timing_read`."""
    _load().jbw_timing_start(capacity)


def timing_read(capacity: int) -> list[tuple[int, int]]:
    """Stops recording; (own, total) nanoseconds per Execute: total includes cuLaunchKernelEx, own does not."""
    own, total = (ctypes.c_int64 * capacity)(), (ctypes.c_int64 * capacity)()
    count = min(capacity, _load().jbw_timing_read(own, total, capacity))
    return list(zip(own[:count], total[:count], strict=True))


def _candidates() -> list[pathlib.Path]:
    if chosen := os.environ.get(LIBRARY_VARIABLE):
        return [pathlib.Path(chosen)]
    # An editable install has two package directories: the sources and what was built.
    package = sys.modules[__name__.rpartition(".")[0]]
    return [pathlib.Path(directory) / "_lib" / LIBRARY_NAME for directory in package.__path__]


def _load() -> ctypes.CDLL:
    """The library, checked against this file and the running jaxlib; OSError with the sentence."""
    path = next((path for path in _candidates() if path.is_file()), None)
    if path is None:
        places = ", ".join(map(str, _candidates()))
        raise OSError(f"jax_bwgemm requires {LIBRARY_NAME}, got none at {places}: {_REMEDY}")
    return _open(path)


@functools.cache
def _open(path: pathlib.Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise OSError(f"jax_bwgemm requires a {path} that loads, got {error}: {_REMEDY}") from error
    if reason := _why_not_layout(library, path) or _why_not_minor(library.jbw_ffi_api_minor(), path):
        raise OSError(reason)
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Result and argument types; AttributeError if the library lacks one of them."""
    pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "jbw_version": (string, []),
        "jbw_ffi_api_minor": (ctypes.c_int, []),
        "jbw_struct_bytes": (None, [pointer, pointer]),
        "jbw_param_kind": (string, [ctypes.c_int]),
        "jbw_set_artifact_dirs": (None, [pointer, size]),
        "jbw_launch_plan": (ctypes.c_int, [pointer, pointer, string, size]),
        "jbw_sha256": (None, [string, size, pointer]),
        "jbw_execute_count": (ctypes.c_uint64, []),
        "jbw_timing_start": (None, [size]),
        "jbw_timing_read": (size, [pointer, pointer, size]),
        "jbw_matmul_type_id": (pointer, []),
        "jbw_matmul_type_info": (pointer, []),
        "jbw_repack_type_id": (pointer, []),
        "jbw_repack_type_info": (pointer, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _why_not_layout(library: ctypes.CDLL, path: pathlib.Path) -> str | None:
    request, plan = ctypes.c_size_t(), ctypes.c_size_t()
    library.jbw_struct_bytes(ctypes.byref(request), ctypes.byref(plan))
    want, got = (ctypes.sizeof(LaunchRequest), ctypes.sizeof(LaunchPlan)), (request.value, plan.value)
    if want == got:
        return None
    return f"{path} requires structs of {want} bytes, as this package has, got {got}: {_REMEDY}"


def _why_not_minor(minor: int, path: pathlib.Path) -> str | None:
    """XLA refuses a library that was built with newer headers than its own, and drops what is registered after it."""
    runtime = _runtime_api_minor()
    if runtime is None or minor <= runtime:
        return None
    return (
        f"{path} requires a jaxlib with XLA FFI API 0.{minor} or newer, got 0.{runtime}: update jaxlib, or build the "
        "library against this one (delete the build folder first)"
    )


def _runtime_api_minor() -> int | None:
    """The XLA FFI minor version of the running jaxlib; None where its headers are not installed."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    found = re.search(r"#define\s+XLA_FFI_API_MINOR\s+(\d+)", header.read_text())
    return int(found.group(1)) if found else None


def _register_with_xla(library: ctypes.CDLL) -> None:
    """A state's type first: a target that uses an unknown type is refused."""
    capsule: Callable[[object], object] = jax.ffi.pycapsule
    for name, target in (("matmul", TARGET_NAME), ("repack", REPACK_NAME)):
        state = {part: capsule(getattr(library, f"jbw_{name}_{part}")()) for part in ("type_id", "type_info")}
        stages = {
            stage: capsule(getattr(library, f"jbw_{name}_{stage}"))
            for stage in ("instantiate", "initialize", "execute")
        }
        jax.ffi.register_ffi_type(f"jax_bwgemm_{name}_state_v1", state, platform=PLATFORM)  # type: ignore[arg-type]
        jax.ffi.register_ffi_target(target, stages, platform=PLATFORM)
