"""The Python side of the native library: why it is not available, registration, and what XLA sees of it."""

import concurrent.futures
import ctypes
import importlib
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.runtime import ffi

needs_library = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
ATTRIBUTES: dict[str, Any] = dict(
    variant="absent", entry="kernel", target="sm_90a", cubin_sha256="0" * 64,
    **{name: np.int32(value) for name, value in dict(
        cta_m=128, mma_n=256, out_n=256, cluster_m=2, cluster_n=1, cluster_k=1, num_threads=384, smem_bytes=232448,
        stream_tiles=0, stream_clusters=1, tile_grid=0, pdl=1, raster_group=8,
    ).items()},
    a_l2="evict_last", alpha=np.float32(1),
    buffers="a:bfloat16[l?,m,k+]%16 b:bfloat16[l?,k,n+]%16 -> out:bfloat16[l,m,n]%16",
    tensor_maps="0:bf16[64,128,1]/128/16 1:bf16[64,128,1]/128/16 2:bf16[64,64,1]/128/16",
    params="tma:0@0+128 tma:1@128+128 tma:2@256+128 int:raster_group[1..]@384+4 l2:a_l2@392+8 float:alpha@400+4",
)  # fmt: skip


def _call(call_target: str, **attributes: Any) -> Any:
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 256, 64), (1, 64, 256)))
    out = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16)
    return jax.jit(lambda a, b: jax.ffi.ffi_call(call_target, out)(a, b, **attributes)).trace(a, b)


def test_a_missing_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(tmp_path / "none.so"))
    reason = ffi.status()
    assert reason is not None
    assert (
        f"requires libjax_bwgemm_ffi.so, got none at {tmp_path}/none.so: correct or unset JAX_BWGEMM_LIBRARY" in reason
    )
    with pytest.raises(RuntimeError, match="requires libjax_bwgemm_ffi.so"):
        ffi.register([tmp_path])


def test_a_file_that_is_no_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.so"
    path.write_text("not ELF")
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(path))
    assert f"requires a {path} that loads, got" in str(ffi.status())


@needs_library
def test_a_library_of_newer_headers_than_the_runtimes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, minor = shutil.copy(ffi._load()._name, tmp_path / "library.so"), ffi.api_minor()
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(path))
    monkeypatch.setattr(ffi, "_runtime_api_minor", lambda: minor - 1)
    reason = ffi.status()
    assert reason is not None
    assert f"requires a jaxlib with XLA FFI API 0.{minor} or newer, got 0.{minor - 1}" in reason


@needs_library
def test_a_library_of_other_structs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copy(ffi._load()._name, tmp_path / "library.so")
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(path))
    monkeypatch.setattr(ffi, "LaunchPlan", ctypes.c_int)
    assert "bytes, as this package has, got" in str(ffi.status())


def test_the_runtimes_minor_version_is_found() -> None:
    minor = ffi._runtime_api_minor()
    assert minor is not None and minor >= 3


@needs_library
def test_the_library_is_of_this_version() -> None:
    assert ffi.version() == importlib.import_module("jax_bwgemm._version").__version__


@needs_library
def test_registering_again_is_fine(tmp_path: pathlib.Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ffi.register, [[tmp_path]] * 8)) == [None] * 8


@needs_library
def test_the_call_lowers_for_cuda_on_this_host(tmp_path: pathlib.Path) -> None:
    ffi.register([tmp_path])
    text = _call(ffi.TARGET_NAME, **ATTRIBUTES).lower(lowering_platforms=("cuda",)).as_text()
    assert f"stablehlo.custom_call @{ffi.TARGET_NAME}(%arg0, %arg1)" in text
    assert "cluster_m = 2 : i32" in text


@pytest.fixture(scope="session")  # XLA knows a type once a process, and a worker may come back to this file
def cpu_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The handler under the CPU platform, where XLA runs Instantiate as it does for a GPU (and shows it no buffers)."""
    if (reason := ffi.status()) is not None:
        pytest.skip(reason)
    jax.devices("cpu")
    # A copy, since a type's identity belongs to one platform.
    library = ctypes.CDLL(shutil.copy(ffi._load()._name, tmp_path_factory.mktemp("cpu") / "library.so"))
    names = {"type_id": "jbw_matmul_type_id", "type_info": "jbw_matmul_type_info"}
    for name in names.values():
        getattr(library, name).restype = ctypes.c_void_p
    state = {key: jax.ffi.pycapsule(getattr(library, name)()) for key, name in names.items()}
    stages = {stage: jax.ffi.pycapsule(getattr(library, f"jbw_matmul_{stage}")) for stage in ("instantiate", "execute")}
    jax.ffi.register_ffi_type("jbw_test_state", state, platform="cpu")
    jax.ffi.register_ffi_target("jbw_test", stages, platform="cpu")
    return "jbw_test"


@pytest.mark.parametrize("missing", sorted(ATTRIBUTES))
def test_every_attribute_is_required(cpu_target: str, missing: str) -> None:
    attributes = {name: value for name, value in ATTRIBUTES.items() if name != missing}
    sentence = f"INVALID_ARGUMENT: attribute `{missing}` requires .*got none"
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        _call(cpu_target, **attributes).lower().compile()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(cta_m=128), "attribute `cta_m` requires an int32, got another type: the Python package"),
        (dict(alpha=1.0), "attribute `alpha` requires a float32, got another type"),
        (dict(entry=np.int32(1)), "attribute `entry` requires a string, got another type"),
        (dict(params=np.zeros(3)), "attribute `params` requires a string, got another type"),
        (dict(raster_group=True), "attribute `raster_group` requires an int32, got another type"),
        (dict(raster_group=np.int32(0)), "`raster_group` requires 1..2147483647, got 0"),
        (dict(params="tma:0@0"), "`params` requires texts such as tma:0@0+128 or int:name[0..1]@404+4, got tma:0@0"),
        (dict(params="tma:0@0+128"), "`params` requires `tma:1` or `ptr:1`, which take `b`, got neither: rebuild"),
        (dict(buffers="a"), "`buffers` requires texts such as a:bfloat16[l?,m,k+]%16, got a: rebuild"),
        (dict(tensor_maps="0"), "`tensor_maps` requires texts such as 0:bf16[64,128,1]/128/16, got 0: rebuild"),
        (dict(tensor_maps=""), "parameter `tma:0` requires a text in `tensor_maps`, got none"),
        (dict(tensor_maps="0:bf16[64,128,1]/128/0"), "the swizzle atom of `a` requires 16 bytes, or 32 in a span"),
        (dict(cluster_n=np.int32(0)), "`cluster_n` requires 1..16, got 0"),
        (dict(cluster_k=np.int32(16)), "`cluster_m * cluster_n * cluster_k` requires 1..16, got 32"),
        (dict(a_l2="first"), "`a_l2` requires normal, evict_first or evict_last, got 'first'"),
        (dict(a_l2=np.int32(1)), "attribute `a_l2` requires a string, got another type"),
        (dict(pdl=True), "attribute `pdl` requires an int32, got another type"),
    ],
)
def test_an_attribute_that_is_off(cpu_target: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        _call(cpu_target, **(ATTRIBUTES | change)).lower().compile()
    assert "INVALID_ARGUMENT" in str(error.value)
    assert sentence in str(error.value)


def test_a_missing_cubin_is_the_machines_fault(cpu_target: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="FAILED_PRECONDITION: kernel `absent` requires absent.cubin"):
        _call(cpu_target, **ATTRIBUTES).lower().compile()
