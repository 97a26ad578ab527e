"""Times of functions, in bursts with rests between them, taken alternately so that what is left of falling clocks meets
all alike. Knows no product."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_bwgemm import _files

MIN_ROUNDS, MAX_ROUNDS = 15, 101
HOST_BATCH = 20  # calls between two waits of the host clock
HEATS, LEADING = 3, 1.03  # rounds, behind which what takes so many times the least is measured no more
PAUSE = 5  # times as long as what was measured; not measured, at work for two sevenths of the time is below the limit
Measure = Callable[[], float]

_turn: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True)
class Sample:
    """Microseconds: the median of the rounds, and the middle half of them."""

    median_us: float
    low_us: float
    high_us: float
    rounds: int


def alternate(
    measures: Mapping[str, Measure], rounds: int, seconds: float = 0.0, now: Callable[[], float] = time.perf_counter
) -> dict[str, Sample]:
    """Takes one measurement of each in every round; who goes first changes from round to round.

    At least `rounds`, and further ones until `seconds` have passed or there are MAX_ROUNDS.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"`--rounds` requires at least {MIN_ROUNDS}, got {rounds}")
    times: dict[str, list[float]] = {name: [] for name in measures}
    start, num_rounds = now(), 0
    while num_rounds < rounds or (num_rounds < MAX_ROUNDS and now() - start < seconds):
        _take_round(measures, times, num_rounds)
        num_rounds += 1
    return {name: summarise(values) for name, values in times.items()}


def of_the_fastest(measures: Mapping[str, Measure], rounds: int) -> dict[str, float]:
    """Medians of `rounds` alternate measurements of each; of those that the first HEATS of them show to be slower than
    LEADING times the fastest, of these. No other process that takes turns measures meanwhile."""
    times: dict[str, list[float]] = {name: [] for name in measures}
    with turn():
        for i in range(min(HEATS, rounds)):
            _take_round(measures, times, i)
        limit = LEADING * min(map(statistics.median, times.values()))
        leading = {name: measures[name] for name, values in times.items() if statistics.median(values) <= limit}
        for i in range(HEATS, rounds):
            _take_round(leading, times, i)
    return {name: statistics.median(values) for name, values in times.items()}


def _take_round(measures: Mapping[str, Measure], times: dict[str, list[float]], round_idx: int) -> None:
    for name in _order(list(measures), round_idx):
        times[name].append(measures[name]())


def _order(names: list[str], round_idx: int) -> list[str]:
    """Backwards and forwards in turn, and starting one later after each pair."""
    first = round_idx // 2 % len(names)
    names = names[first:] + names[:first]
    return names if round_idx % 2 else names[::-1]


def summarise(times_us: list[float]) -> Sample:
    low, median, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return Sample(median, low, high, len(times_us))


def rest(work_us: float) -> None:
    """Behind `work_us` of a GPU's work, so that what comes next finds the clocks of a burst: under steady load a GPU at
    its power limit lowers them, until all large tiles take the same time (seen on an H200)."""
    time.sleep(PAUSE * 1e-6 * work_us)


def choose_clock() -> tuple[str, Callable[..., Measure]]:
    """(what it is, function of (jitted, num_products, *args) that makes a `Measure`): CUPTI, else the host's clock.

    The GPU rests behind each measurement.
    """
    host = f"host time of {HOST_BATCH} calls, launches included"
    try:
        kernel_clock(jax.jit(lambda x: x + 1), 1, jax.numpy.zeros(1024))()
    except Exception as error:  # an optional private tool: whatever it lacks here, the host's clock remains
        return f"{host} (no CUPTI: {error})", host_clock
    return "CUPTI kernel time", kernel_clock


def take_turns(path: Path) -> None:
    """From here on `kernel_times` waits until no other process that was told the same path is at it."""
    global _turn
    _turn = functools.partial(_files.locked, path)


def turn() -> contextlib.AbstractContextManager[object]:
    """While nothing else of the processes that take turns may be at the GPU: XLA, too, times kernels as it compiles."""
    return _turn()


def kernel_times(function: Any, rounds: int, *args: Any, rests: bool = False) -> list[tuple[str, float]]:
    """(symbol, microseconds) of every kernel that `rounds` calls run; if it `rests`, the GPU does so behind each. Two
    calls before them are not measured.

    ValueError without CUPTI, of which a process has one user at a time.
    """
    with turn():
        found = _kernel_times(function, rounds, args, rests)
    calls = found if rests or rounds > 1 else [found]
    return [(str(name), 1e3 * float(milliseconds)) for call in calls for name, milliseconds in call]


def _kernel_times(function: Any, rounds: int, args: Sequence[Any], rests: bool) -> list[Any]:
    """As the profiler has them: of each round a list, or, of one call of it, one of all kernels' (symbol,
    milliseconds)."""
    jax.block_until_ready(function(*args))  # here, so that its own errors are not taken for CUPTI's
    try:
        from jax.experimental.mosaic.gpu import profiler

        if not rests:
            return profiler.measure(function, aggregate=False, iterations=rounds)(*args)[1] or []
        measured, found = profiler.measure(function, aggregate=False), []
        for _ in range(rounds):
            found.append(measured(*args)[1] or [])
            rest(_total_us(found[-1]))
        return found
    except Exception as error:  # an optional private tool, that fails in ways of its own
        raise ValueError(
            f"timing single kernels requires CUPTI, which jax's own package for CUDA has: {error}"
        ) from error


def kernel_clock(function: Any, num_products: int, *args: Any) -> Measure:
    """Microseconds of all kernels that one call runs, a product; the call is made once before, unmeasured."""
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(function, aggregate=False)

    def measure() -> float:
        kernels = measured(*args)[1] or []
        if len(kernels) < num_products:
            raise RuntimeError(f"CUPTI requires a kernel for each of {num_products} products, got {len(kernels)}")
        total_us = _total_us(kernels)
        rest(total_us)
        return total_us / num_products

    return measure


def _total_us(kernels: Sequence[tuple[str, float]]) -> float:
    """Of CUPTI's milliseconds."""
    return 1e3 * sum(float(milliseconds) for _, milliseconds in kernels)


def host_clock(function: Any, num_products: int, *args: Any) -> Measure:
    def measure() -> float:
        jax.block_until_ready(function(*args))
        start = time.perf_counter()
        results = [function(*args) for _ in range(HOST_BATCH)]
        jax.block_until_ready(results)
        total_us = 1e6 * (time.perf_counter() - start)
        rest(total_us)
        return total_us / HOST_BATCH / num_products

    return measure
