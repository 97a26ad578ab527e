"""What stops a launch, and what is said: pointers, drivers, cubins, devices."""

import ctypes
import hashlib
import pathlib

import fake_machine
import ffi_cases
import pytest
from fake_machine import (
    CUBIN,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    NON_PORTABLE,
    OK,
    RESOURCE_EXHAUSTED,
    VARIANT,
    A,
    Machine,
)

from jax_bwgemm.runtime import ffi

pytestmark = fake_machine.needs


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


def test_a_driver_that_failed_to_load_is_tried_again(machine: Machine) -> None:
    _, _, call = machine.create(ffi_cases.request())
    machine.driver.fake_fail(b"cuDriverGetVersion", 100)
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    assert "requires a version, got CUDA_ERROR_FAKE of cuDriverGetVersion: install" in sentence
    machine.driver.fake_fail(b"cuDriverGetVersion", 0)
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")


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


@pytest.mark.parametrize(("target", "capability"), [("sm_90a", "9.0"), ("sm_100a", "10.0"), ("sm_100f", "10.0")])
def test_a_kernel_of_another_gpu(machine: Machine, target: str, capability: str) -> None:
    machine.driver.fake_set(b"major", 12)
    code, _, call = machine.create(ffi_cases.request(), target=target)
    assert code == OK
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == FAILED_PRECONDITION
    later = " or a later one of its family" if target == "sm_100f" else ""
    assert f"requires a GPU of compute capability {capability}{later} ({target}), got 12.0 on device 0" in sentence
    assert machine.calls("cuLibraryLoadData") == 0
    for setting, value in zip((b"major", b"minor"), capability.split("."), strict=True):
        machine.driver.fake_set(setting, int(value))
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")


@pytest.mark.parametrize(
    ("target", "minor", "runs"),
    [
        ("sm_90a", 3, False),
        ("sm_100a", 3, False),
        ("sm_100f", 3, True),
        ("sm_100f", 7, True),
        ("sm_100f", 1, False),  # Jetson Thor before CUDA 13
    ],
)
def test_a_familys_kernel_runs_on_what_comes_later_in_it(machine: Machine, target: str, minor: int, runs: bool) -> None:
    machine.driver.fake_set(b"major", 9 if target == "sm_90a" else 10)
    machine.driver.fake_set(b"minor", minor)
    _, _, call = machine.create(ffi_cases.request(), target=target)
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert (code, "requires a GPU of compute capability" in sentence) == (OK if runs else FAILED_PRECONDITION, not runs)


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
        (dict(target="sm_80"), "`target` requires one of sm_90a, sm_100a, sm_100f, got 'sm_80'"),
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
    bad, good = ffi_cases.request(k=4100), ffi_cases.request()
    code, sentence, _ = machine.create(bad)
    assert (code, "multiple of 16 bytes" in sentence) == (INVALID_ARGUMENT, True)
    code, _, call = machine.create(good, shows=False)
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


OUT_OF_MEMORY = 2


def test_a_device_without_memory_to_load_a_kernel(machine: Machine) -> None:
    """Loading says so, or the driver has room for no cluster and calls it a success; it goes on when there is some."""
    _, _, call = machine.create(ffi_cases.request())
    machine.driver.fake_fail(b"cuLibraryLoadData", OUT_OF_MEMORY)
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == RESOURCE_EXHAUSTED
    assert "requires memory to be loaded, got CUDA_ERROR_FAKE (as told): free some" in sentence
    machine.driver.fake_fail(b"cuLibraryLoadData", 0)
    machine.driver.fake_set(b"clusters", 0)
    machine.driver.fake_set(b"free_mib", 12)
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert code == RESOURCE_EXHAUSTED
    full = f"kernel `{VARIANT}` requires memory to be loaded on device 0, got less than 64 MiB free: free some"
    assert full in sentence
    machine.driver.fake_fail(b"cuMemGetInfo", 700)  # nobody knows
    assert machine.initialize(call, ffi_cases.request())[0] == FAILED_PRECONDITION
    machine.driver.fake_fail(b"cuOccupancyMaxActiveClusters", OUT_OF_MEMORY)
    code, sentence = machine.initialize(call, ffi_cases.request())
    assert (code, full in sentence) == (RESOURCE_EXHAUSTED, True)
    machine.driver.fake_fail(b"cuOccupancyMaxActiveClusters", 0)
    machine.driver.fake_set(b"clusters", 66)
    assert machine.initialize(call, ffi_cases.request()) == (OK, "")


def test_a_launch_without_memory(machine: Machine) -> None:
    call = machine.ready(ffi_cases.request())
    machine.driver.fake_fail(b"cuLaunchKernelEx", OUT_OF_MEMORY)
    code, sentence = machine.execute(call)
    assert code == RESOURCE_EXHAUSTED
    assert f"the launch of `{VARIANT}` requires memory, got CUDA_ERROR_FAKE (as told) on device 0 (grid" in sentence
    machine.driver.fake_fail(b"cuLaunchKernelEx", 0)
    assert machine.execute(call) == (OK, "")


@pytest.mark.parametrize("device", [-1, 2, 64])
def test_devices_that_are_not_there(machine: Machine, device: int) -> None:
    call = machine.ready(ffi_cases.request())
    assert machine.initialize(call, ffi_cases.request(), device)[0] == FAILED_PRECONDITION
    code, sentence = machine.execute(call, device)
    assert (code, "requires an Initialize on the same device" in sentence) == (INTERNAL, True)


def test_a_workspace_too_small_for_a_cluster(machine: Machine) -> None:
    request = ffi_cases.request(workspace_bytes=4096 + ffi_cases.CLUSTER_BYTES - 1)
    code, sentence, _ = machine.create(request)
    assert (code, "the workspace requires at least 266240 bytes" in sentence) == (INVALID_ARGUMENT, True)


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


def test_a_sentence_is_cut_to_the_room_it_has(machine: Machine) -> None:
    error = ctypes.create_string_buffer(b"#" * 8)
    call, plan = ffi_cases.request(cta_m=0), ffi.LaunchPlan()
    said, buffers = ffi.Attributes.of(call.said), ffi.Buffers.of(*call.given)
    given = [ctypes.byref(said), ctypes.byref(buffers), 66, ctypes.c_uint64(1), ctypes.byref(plan), error]
    assert machine.library.jbw_launch_plan(*given, ctypes.c_size_t(6)) == INVALID_ARGUMENT
    assert error.raw == b"`cta_\x00##\x00"
