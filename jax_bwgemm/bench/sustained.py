"""Continuous load: what a product reaches once clocks, power and temperature have settled. Knows no kernel."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_bwgemm.bench import machine
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.report import Load

HALVES = 2
QUEUED = 8  # calls ahead of the GPU: enough that it never waits, few enough for their results to fit
PERIOD_S = 1.0
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Stretch:
    calls: int
    seconds: float
    samples: list[dict[str, str]]


class Sampler:
    """`with` it, a thread asks nvidia-smi for `machine.NOW` once a PERIOD_S."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.samples: list[dict[str, str]] = []
        self._period_s = period_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            if sample := machine.query(machine.NOW):
                self.samples.append(sample)


def sustain(
    case: Case, calls: Mapping[str, Call], products_a_call: int, seconds: float, period_s: float = PERIOD_S
) -> list[Load]:
    """`seconds` of each of `calls`, in halves that alternate, so that both meet a warm device."""
    stretches: dict[str, list[_Stretch]] = {name: [] for name in calls}
    for _ in range(HALVES):
        for name, call in calls.items():
            stretches[name].append(_run(call, seconds / HALVES, period_s))
    flops_a_call = case.flops * products_a_call
    return [_load(case, name, parts, flops_a_call) for name, parts in stretches.items()]


def _run(call: Call, seconds: float, period_s: float) -> _Stretch:
    jax.block_until_ready(call())
    queue: collections.deque[Any] = collections.deque()
    num_calls, start = 0, time.perf_counter()
    with Sampler(period_s) as sampler:
        while time.perf_counter() - start < seconds:
            queue.append(call())
            num_calls += 1
            if len(queue) > QUEUED:
                jax.block_until_ready(queue.popleft())
        jax.block_until_ready(list(queue))
        elapsed = time.perf_counter() - start
    return _Stretch(num_calls, elapsed, sampler.samples)


def _load(case: Case, name: str, parts: Sequence[_Stretch], flops_a_call: int) -> Load:
    seconds = sum(part.seconds for part in parts)
    samples = [sample for part in parts for sample in part.samples]
    clock, power, temperature = (
        [machine.number(sample[field]) for sample in samples] or [0.0] for field in machine.NOW
    )
    return Load(
        shape=str(case),
        product=name,
        seconds=seconds,
        tflops=sum(part.calls for part in parts) * flops_a_call / seconds / 1e12,
        clock_mhz=statistics.mean(clock),
        power_w=statistics.mean(power),
        temperature_c=max(temperature),
        samples=len(samples),
    )
