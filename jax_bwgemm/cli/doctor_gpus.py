"""What `doctor` finds with a driver: its version, the GPUs by their properties, and products on the first of them.

The driver is asked without a context; the products run in a process of their own, which a GPU that hangs or faults
takes no one else along with.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from jax_bwgemm.cli.doctor_checks import LIBCUDA_VARIABLE, Finding
from jax_bwgemm.facts.arch import Arch, detect

# The first CUDA whose driver loads the cubins of a GPU's target: 12.0 has cuLibraryLoadData and cuLaunchKernelEx, 12.9
# knows Blackwell's family, B200s and B300s alike (their release notes).
OLDEST_DRIVER = {"sm_90a": (12, 0), "sm_100f": (12, 9)}
TRIAL_TIMEOUT_S = 300.0
_CUDA_ERROR_NO_DEVICE = 100
_NUM_SMS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device as its driver describes it."""

    name: str
    compute_capability: str
    num_sms: int
    memory_bytes: int

    @property
    def arch(self) -> Arch | str:
        """Its record, else why there is none."""
        return detect(self.name, self.compute_capability, self.num_sms)

    def __str__(self) -> str:
        size = f"{self.num_sms} SMs, {self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.name}, compute capability {self.compute_capability}, {size}"


class _Refused(Exception):
    """A function of the driver returned an error."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} requires 0, got error {code} of the CUDA driver")
        self.code = code


class Driver:
    """The CUDA driver, as much as needs no context. OSError where there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get(LIBCUDA_VARIABLE) or "libcuda.so.1")

    def version(self) -> tuple[int, int]:
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def gpus(self) -> list[Gpu]:
        """Those that this process may use."""
        count = ctypes.c_int()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGetCount", ctypes.byref(count))
        except _Refused as error:
            if error.code == _CUDA_ERROR_NO_DEVICE:
                return []
            raise
        return [self._gpu(i) for i in range(count.value)]

    def _gpu(self, ordinal: int) -> Gpu:
        device, memory_bytes, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetName", name, len(name), device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory_bytes), device)
        num_sms, major, minor = (self._attribute(x, device) for x in (_NUM_SMS, _MAJOR, _MINOR))
        return Gpu(name.value.decode(errors="replace"), f"{major}.{minor}", num_sms, memory_bytes.value)

    def _attribute(self, attribute: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise _Refused(name, code)


def examine() -> tuple[list[Finding], list[Arch]]:
    """The driver and its GPUs, and the records of those that have kernels."""
    try:
        driver = Driver()
    except OSError as error:
        remedy = f"correct or unset {LIBCUDA_VARIABLE}" if os.environ.get(LIBCUDA_VARIABLE) else None
        return [Finding("driver", "warning", f"none, so XLA computes on the CPU: {error}", remedy)], []
    try:
        version, gpus = driver.version(), driver.gpus()
    except (_Refused, AttributeError) as error:
        remedy = "nvidia-smi should say more: reinstall the driver, or restart the machine"
        return [Finding("driver", "problem", str(error), remedy)], []
    archs = [gpu.arch for gpu in gpus]
    ours = [arch for arch in archs if isinstance(arch, Arch)]
    findings = [_driver(version, ours), *map(_gpu, range(len(gpus)), gpus)]
    if not gpus:
        findings.append(Finding("gpu", "warning", "none that this process may use", "see CUDA_VISIBLE_DEVICES"))
    return findings, ours


def _driver(version: tuple[int, int], archs: list[Arch]) -> Finding:
    text = "CUDA {}.{}".format(*version)
    needed = max((OLDEST_DRIVER[arch.target], arch.target) for arch in archs) if archs else ((12, 0), "any target")
    if version >= needed[0]:
        return Finding("driver", "ok", text)
    rule = "the kernels for {} require a driver of CUDA {}.{}".format(needed[1], *needed[0])
    return Finding("driver", "problem" if archs else "warning", f"{rule}, got {text}", "update the driver")


def _gpu(ordinal: int, gpu: Gpu) -> Finding:
    if isinstance(gpu.arch, Arch):
        return Finding("gpu", "ok", f"{ordinal}: {gpu}, planned as {gpu.arch.name}")
    return Finding("gpu", "warning", f"{ordinal}: {gpu}: XLA's own dot, because {gpu.arch}")


def trials(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Iterator[Finding]:
    """One product a dtype on the first GPU, and a command buffer that captures one."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # beside a program that has the memory
    environment |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", "jax_bwgemm.cli.doctor_trials"]
    try:
        done = run(command, env=environment, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding(
            "products", "problem", f"products on the GPU took more than {TRIAL_TIMEOUT_S:g} s", "see nvidia-smi"
        )
        return
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield Finding(**json.loads(line))
    if done.returncode:
        why = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        yield Finding("products", "problem", f"products on the GPU require exit status 0, got {why}: {said}")
