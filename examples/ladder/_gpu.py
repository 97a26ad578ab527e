"""A rung on a GPU: compiled here, launched by the driver."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
from _common import Rung, compile_rung
from _driver import CudaError, Gpu, Stopwatch, arch

WARM_UP = 3


def gpu_arch() -> str | None:
    """What to compile for GPU 0, for example "sm_100a"; None without a driver or a GPU."""
    try:
        return arch()
    except CudaError:
        return None


def on_this_gpu(rung: Rung) -> Rung | None:
    """The rung for GPU 0, if that is of its family: sm_100a also runs, compiled as sm_103a, on a GPU of that."""
    arch = gpu_arch()
    return dataclasses.replace(rung, arch=arch) if arch and arch[:-2] == rung.arch[:-2] else None


def run(rung: Rung, a: np.ndarray, b: np.ndarray, repeats: int = 0) -> tuple[np.ndarray, float]:
    """C = A B^T, which starts as NaN, and the mean time of `repeats` launches in microseconds."""
    c = np.empty((a.shape[0], b.shape[0]), ml_dtypes.bfloat16)
    kernel = compile_rung(rung)
    with Gpu() as gpu:
        addresses = gpu.upload(a), gpu.upload(b), gpu.allocate(c.nbytes)
        shape = a.shape[0], b.shape[0], a.shape[1]
        launch = gpu.launcher(rung.facts(kernel.entry), kernel.cubin, shape, addresses)
        for _ in range(WARM_UP if repeats else 1):
            launch()
        times = [Stopwatch(launch) for _ in range(repeats)]
        gpu.wait()
        gpu.download(addresses[2], c)
        return c, float(np.mean([each.us() for each in times])) if times else 0.0
