"""The Hopper loops on a GPU, beside each other: checked, then timed in turns. Needs numpy and the CUDA driver.

Knows neither CuTeDSL nor the package: the kernels come as cubins with the facts to launch them.
"""

from __future__ import annotations

import datetime
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from _bfloat16 import BOUND, POISON, normal, product, relative_error
from _driver import CudaError, Gpu, Launcher, Stopwatch
from _launch import Facts

REPEATS, SAMPLE_ROWS = 20, 64
WARM_UP_S, CLOCK_S = 0.5, 5.0  # at least; at most, while nvidia-smi answers
CLOCKS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", "driver_version")

Programs = Sequence[tuple[Facts, bytes]]


def measure(programs: Programs, shape: tuple[int, int, int], commit: str = "") -> dict[str, Any]:
    """Time and error of each for c = a b^T of (m, n, k) = `shape`, random normal. SystemExit if one is wrong."""
    m, n, k = shape
    with Gpu() as gpu:
        for facts, _ in programs:
            if facts.arch != gpu.arch:
                raise CudaError(f"{facts.name} requires a GPU of {facts.arch}, got {gpu.arch}")
        a, b, rows = normal(m, k, 0), normal(n, k, 1), np.sort(np.random.default_rng(2).permutation(m)[:SAMPLE_ROWS])
        exact, c = product(a[rows], b), np.empty((m, n), np.uint16)
        addresses = gpu.upload(a), gpu.upload(b), gpu.allocate(c.nbytes)
        launchers = [gpu.launcher(facts, cubin, shape, addresses) for facts, cubin in programs]
        errors = []
        for (facts, _), launch in zip(programs, launchers, strict=True):
            gpu.poison(addresses[2], c.nbytes)
            launch()
            gpu.wait()
            gpu.download(addresses[2], c)
            errors.append(_error(facts.name, c, rows, exact))
        clocks = _warm_up(gpu, launchers)
        times = _times(gpu, launchers)
        machine = gpu.describe()
    found = [_row(facts.name, shape, us, error) for (facts, _), us, error in zip(programs, times, errors, strict=True)]
    for row in found:
        row["times_naive"] = found[0]["us"] / row["us"]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()  # noqa: UP017 (also before Python 3.11)
    how = {"shape": "x".join(map(str, shape)), "inputs": "normal", "repeats": REPEATS, "statistic": "median, in turns"}
    return {"format": 1, **machine, "clocks": clocks, "date": date, "commit": commit, **how, "rows": found}


def _error(name: str, c: np.ndarray, rows: np.ndarray, exact: np.ndarray) -> float:
    missing = int((c == POISON).sum())
    if missing:
        raise SystemExit(f"{name}: every element of c must be written, got {missing} of {c.size} that are not")
    error = relative_error(c[rows], exact)
    if not error <= BOUND:
        raise SystemExit(f"{name}: the relative error requires at most {BOUND:.1e}, got {error:.1e}")
    return error


def _warm_up(gpu: Gpu, launchers: Sequence[Launcher]) -> dict[str, str]:
    """Keeps the GPU busy for a while; the clocks that nvidia-smi, where there is one, saw meanwhile."""
    start = time.monotonic()
    query = None
    while True:
        for launch in launchers:
            launch()
        gpu.wait()
        elapsed = time.monotonic() - start
        if elapsed >= WARM_UP_S / 2 and query is None:
            query = _ask_clocks()
        is_answered = query is None or query.poll() is not None
        if elapsed >= WARM_UP_S and (is_answered or elapsed >= CLOCK_S):
            return _answer(query) if query and is_answered else {}


def _ask_clocks() -> subprocess.Popen[str] | None:
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", "--id=0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _answer(query: subprocess.Popen[str]) -> dict[str, str]:
    text, _ = query.communicate()
    return dict(zip(CLOCKS, (value.strip() for value in text.split(",")))) if query.returncode == 0 else {}  # noqa: B905


def _times(gpu: Gpu, launchers: Sequence[Launcher]) -> list[list[float]]:
    """REPEATS times of each in microseconds, in turns: what the clock does, it does to all."""
    rounds = [[Stopwatch(launch) for launch in launchers] for _ in range(REPEATS)]
    gpu.wait()
    return [list(times) for times in zip(*([watch.us() for watch in each] for each in rounds), strict=True)]


def _row(name: str, shape: tuple[int, int, int], times: list[float], error: float) -> dict[str, Any]:
    us, (m, n, k) = statistics.median(times), shape
    tflops = 2 * m * n * k / us * 1e-6
    return {"name": name, "us": us, "low_us": min(times), "high_us": max(times), "tflops": tflops, "error": error}


def show(result: dict[str, Any]) -> None:
    """As a table."""
    clocks = ", ".join(f"{name} {value}" for name, value in result["clocks"].items()) or "no nvidia-smi: clock unknown"
    print(f"{result['device']} ({result['arch']}, CUDA {result['driver_cuda']} driver), {result['date']}")
    print(f"under load: {clocks}")
    print(f"{result['shape']}, bfloat16, random normal; median of {result['repeats']}, in turns\n")
    print(f"{'loop':26}{'us':>9}{'low':>9}{'high':>9}{'TFLOP/s':>9}{'x naive':>9}{'error':>10}")
    for row in result["rows"]:
        times = "".join(f"{row[name]:9.1f}" for name in ("us", "low_us", "high_us"))
        print(f"{row['name']:26}{times}{row['tflops']:9.1f}{row['times_naive']:9.2f}{row['error']:10.1e}")
