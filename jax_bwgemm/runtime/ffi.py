"""The native library: found, loaded by ctypes, registered with XLA. Loads nothing until asked; knows no tile.

The structs mirror those of the C ABI. `launch_plan` is the very packing that the GPU sees, callable on any machine.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_bwgemm.facts.recipe import Attribute

TARGET_NAME = "jax_bwgemm_matmul_v2"
REPACK_NAME = "jax_bwgemm_repack_v2"
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

_MAX_BUFFERS = 16
_MAX_PARAMS = 64
_MAX_PARAM_BYTES = 4096
_ERROR_BYTES = 4096
_REMEDY = "reinstall jax_bwgemm, or build the library with `cmake -S ffi -B build/ffi && cmake --build build/ffi`"

_lock = threading.Lock()
_registered = False


class Buffer(ctypes.Structure):
    """A row-major buffer."""

    _fields_ = [("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 3)]

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> Buffer:
        return cls(DTYPE_CODES[dtype], len(shape), (ctypes.c_int64 * 3)(*shape[:3]))


class Buffers(ctypes.Structure):
    """Those of a custom call, operands first. Without any, a call site is created before its shapes are known."""

    _fields_ = [("all", ctypes.POINTER(Buffer)), ("num_operands", ctypes.c_int32), ("num_results", ctypes.c_int32)]

    @classmethod
    def of(cls, operands: Sequence[Buffer], results: Sequence[Buffer]) -> Buffers:
        every = (*operands, *results)
        return cls((Buffer * len(every))(*every), len(operands), len(results))


class _Value(ctypes.Union):
    _fields_ = [("i", ctypes.c_int32), ("f", ctypes.c_float), ("s", ctypes.c_char_p)]


class _Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("type", ctypes.c_int32), ("value", _Value)]

    @classmethod
    def of(cls, name: str, value: Attribute) -> _Attribute:
        kind, held = "ifs"[[int, float, str].index(type(value))], value.encode() if isinstance(value, str) else value
        return cls(name.encode(), ord(kind), _Value(**{kind: held}))


class Attributes(ctypes.Structure):
    """What a custom call says by name."""

    _fields_ = [("all", ctypes.POINTER(_Attribute)), ("count", ctypes.c_size_t)]

    @classmethod
    def of(cls, attributes: Mapping[str, Attribute]) -> Attributes:
        every = [_Attribute.of(name, value) for name, value in attributes.items()]
        return cls((_Attribute * len(every))(*every), len(every))


class TensorMapSpec(ctypes.Structure):
    """The arguments of one cuTensorMapEncodeTiled but its address; dimensions innermost first."""

    _fields_ = [
        ("data_type", ctypes.c_int32),  # CUtensorMapDataType
        ("swizzle_bytes", ctypes.c_int32),
        ("swizzle_atom_bytes", ctypes.c_int32),
        ("dims", ctypes.c_uint64 * 3),
        ("stride_bytes", ctypes.c_uint64 * 2),  # of dims[1] and dims[2]
        ("box", ctypes.c_uint32 * 3),
    ]


class BufferUse(ctypes.Structure):
    """What a launch does with one buffer: `map_offset`, `second_map_offset` and `pointer_offset` say where its
    descriptors and its address go in the parameter block, -1: nowhere."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("align_bytes", "map_offset", "second_map_offset", "pointer_offset")),
        ("map", TensorMapSpec),
        ("second_map", TensorMapSpec),
    ]


class LaunchPlan(ctypes.Structure):
    """What a launch is but its addresses: `params` holds zeros where descriptors and pointers go."""

    _fields_ = [
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        ("smem_bytes", ctypes.c_uint32),
        ("num_cluster_tiles", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("pdl", "num_buffers", "num_params", "param_bytes")),
        ("all_buffers", BufferUse * _MAX_BUFFERS),
        ("all_param_offsets", ctypes.c_int32 * _MAX_PARAMS),
        ("params", ctypes.c_ubyte * _MAX_PARAM_BYTES),
    ]

    @property
    def buffers(self) -> list[BufferUse]:
        """In the order of the custom call."""
        return list(self.all_buffers[: self.num_buffers])

    @property
    def param_offsets(self) -> list[int]:
        """In the kernel's order."""
        return list(self.all_param_offsets[: self.num_params])

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


def remedy() -> str:
    """What brings the library: where a variable names one, no other is looked for."""
    return f"correct or unset {LIBRARY_VARIABLE}" if os.environ.get(LIBRARY_VARIABLE) else _REMEDY


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


def launch_plan(
    attributes: Mapping[str, Attribute],
    operands: Sequence[Buffer],
    results: Sequence[Buffer],
    max_active_clusters: int,
    token: int = 1,
) -> LaunchPlan:
    """The launch of a custom call on a device; raises ValueError with the sentence that says what it requires.

    Args:
      attributes: what the custom call says by name (`launch.request`).
      operands, results: its buffers.
      max_active_clusters: how many clusters the device holds at once.
      token: the value of a raised flag in a workspace, not 0.
    """
    plan = LaunchPlan()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    said, buffers = Attributes.of(attributes), Buffers.of(operands, results)
    given = ctypes.byref(said), ctypes.byref(buffers), max_active_clusters, token
    if _load().jbw_launch_plan(*given, ctypes.byref(plan), error, _ERROR_BYTES):
        raise ValueError(error.value.decode(errors="replace"))
    return plan


def as_hlo(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    """`attributes` as `jax.ffi` takes them: int32, float32 and strings."""
    types = {int: np.int32, float: np.float32, str: str}
    return {name: types[type(value)](value) for name, value in attributes.items()}


def version() -> str:
    """The version of the package that the library was built for."""
    return str(_load().jbw_version().decode())


def api_minor() -> int:
    """The minor version of the XLA FFI headers that the library was built with."""
    return int(_load().jbw_ffi_api_minor())


def sha256(data: bytes) -> str:
    """The library's own digest, by which it recognises a cubin."""
    digest = ctypes.create_string_buffer(65)
    _load().jbw_sha256(data, len(data), digest)
    return digest.value.decode()


def tokens(first: int, count: int) -> list[int]:
    """The first `count` values of raised flags in a process that starts at `first`."""
    drawn = (ctypes.c_uint64 * count)()
    _load().jbw_tokens(first, drawn, count)
    return list(drawn)


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
    package = sys.modules[__name__.partition(".")[0]]
    return [pathlib.Path(directory) / "_lib" / LIBRARY_NAME for directory in package.__path__]


def _load() -> ctypes.CDLL:
    """The library, checked against this file and the running jaxlib; OSError with the sentence."""
    path = next((path for path in _candidates() if path.is_file()), None)
    if path is None:
        places = ", ".join(map(str, _candidates()))
        raise OSError(f"jax_bwgemm requires {LIBRARY_NAME}, got none at {places}: {remedy()}")
    return _open(path)


@functools.cache
def _open(path: pathlib.Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise OSError(f"jax_bwgemm requires a {path} that loads, got {error}: {remedy()}") from error
    if reason := _why_not_layout(library, path) or _why_not_minor(library.jbw_ffi_api_minor(), path):
        raise OSError(reason)
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Result and argument types; AttributeError if the library lacks one of them."""
    pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "jbw_version": (string, []),
        "jbw_ffi_api_minor": (ctypes.c_int, []),
        "jbw_struct_bytes": (None, [pointer] * 3),
        "jbw_set_artifact_dirs": (None, [pointer, size]),
        "jbw_launch_plan": (ctypes.c_int, [pointer, pointer, ctypes.c_int32, ctypes.c_uint64, pointer, string, size]),
        "jbw_sha256": (None, [string, size, pointer]),
        "jbw_tokens": (None, [ctypes.c_uint64, pointer, size]),
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
    sizes = (ctypes.c_size_t * 3)()
    library.jbw_struct_bytes(*(ctypes.byref(sizes, i * ctypes.sizeof(ctypes.c_size_t)) for i in range(3)))
    want, got = tuple(map(ctypes.sizeof, (_Attribute, Buffer, LaunchPlan))), tuple(sizes)
    if want == got:
        return None
    return f"{path} requires structs of {want} bytes, as this package has, got {got}: {remedy()}"


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
        type_name = target.replace(name, f"{name}_state")
        state = {part: capsule(getattr(library, f"jbw_{name}_{part}")()) for part in ("type_id", "type_info")}
        stages = {
            stage: capsule(getattr(library, f"jbw_{name}_{stage}"))
            for stage in ("instantiate", "initialize", "execute")
        }
        jax.ffi.register_ffi_type(type_name, state, platform=PLATFORM)  # type: ignore[arg-type]
        jax.ffi.register_ffi_target(target, stages, platform=PLATFORM)
