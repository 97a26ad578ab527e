"""Times every kernel at hand that computes a product, several in one program, told apart by CUPTI's symbols.

Several, since compiling takes longer than running: they run one after the other, in every round anew. But no more than
`BURST_US` at a stretch, with a rest behind it (`timing.rest`): under steady load, what is left to choose by is noise.
Each is launched several times in a row, and the first half of its times is dropped: behind other kernels a short one
takes three launches until it is as fast as it stays, behind a rest a long one two (seen on an H200). One that is too
long for that runs alone, as in a benchmark. So a stretch is that short because the next kernel in it would find the
clocks lower. Of many stretches, those that are slow by their first round are left at that.

Device time alone: operands come padded where a kernel wants them so. Keeps nothing.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bwgemm.bench import timing
from jax_bwgemm.bench.cases import MAX_ROTATION
from jax_bwgemm.bench.kernel_times import result_bytes
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import contiguous, padded_shape
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.measured import CUBIN_DIGITS, Record, Time, key, now
from jax_bwgemm.planner.order import raster
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.decision import Decision, kernels, target_arch
from jax_bwgemm.runtime.launch import request

BURST_US, MAX_IN_A_ROW = 1000.0, 8  # of the roofline: what a stretch takes at least; launches of a kernel in it
RESULT_BYTES = 2**30  # of a stretch's results: several processes have such programs at a time
SLOW = 1.2  # times as long as the fastest by the first round: not timed again
POOL = 4_194_301  # random numbers that operands repeat: odd, so that rows differ
Forms = tuple[jax.Array, ...]  # one operand's, padded and, where that differs, not
Clock = Callable[[Problem, Sequence[Decision], Arch, int], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One product: what the planner would choose without these times, and the microseconds of every kernel at hand, and
    of XLA, if that was timed, too."""

    problem: Problem
    modelled: Plan
    decisions: tuple[Decision, ...]
    times_us: tuple[float, ...]
    xla_us: float | None = None

    @property
    def wholes_us(self) -> tuple[float, ...]:
        """With what is predicted of padding their operands, which not every kernel wants."""
        return tuple(us + self._padding_us(i) for i, us in enumerate(self.times_us))

    @property
    def fastest(self) -> int:
        """Position of the kernel with the least time, its padding included."""
        return self.wholes_us.index(min(self.wholes_us))

    @property
    def modelled_idx(self) -> int:
        """Position of the planner's choice."""
        wanted = self.modelled.tile, self.modelled.swapped
        return next(i for i in range(len(self.times_us)) if self._choice(i) == wanted)

    @property
    def regret(self) -> float:
        """What the planner's choice loses: 0.1 if it takes 10 % longer than the fastest."""
        return self.wholes_us[self.modelled_idx] / self.wholes_us[self.fastest] - 1

    @property
    def record(self) -> Record:
        """For a table of times, as of now."""
        times = (Time(*self._text(i), us, self._cubin(i), self._order(i)) for i, us in enumerate(self.times_us))
        return Record(key(self.problem), now(), tuple(sorted(times, key=lambda time: time.us)), self.xla_us)

    def name(self, i: int) -> str:
        """The tile of kernel `i`, "swapped" behind it if it computes the transposed product."""
        tile, is_swapped = self._text(i)
        return f"{tile} swapped" if is_swapped else tile

    def _choice(self, i: int) -> tuple[Any, bool]:
        own = self.decisions[i].plan
        assert own is not None  # a kernel at hand was planned
        return own.tile, own.swapped

    def _padding_us(self, i: int) -> float:
        own = self.decisions[i].plan
        chosen = own.chosen if own else None
        return chosen.cost.padding_us if chosen and chosen.cost else 0.0

    def _text(self, i: int) -> tuple[str, bool]:
        tile, is_swapped = self._choice(i)
        return str(tile), is_swapped

    def _order(self, i: int) -> tuple[int, int] | None:
        """Of the tiles of kernel `i`, if it is not the planner's."""
        own = self.decisions[i].plan
        assert own is not None and own.tile is not None  # a kernel at hand was planned
        order = own.raster_group, own.raster_along_n
        return None if order == raster(own.tile, own.problem, own.arch) else order

    def _cubin(self, i: int) -> str:
        entry = self.decisions[i].entry
        assert entry is not None  # it is a kernel at hand
        return entry.cubin_sha256[:CUBIN_DIGITS]


def gpu_arch(who: str, at_least: int = 1) -> Arch:
    """The record of this process's GPU, or of its GPUs; ValueError that names who needs so many."""
    arch = target_arch(None)
    if isinstance(arch, str):
        reason = arch.partition(";")[0]  # behind it is what helps who only plans
        raise ValueError(f"{who} requires a Hopper or Blackwell GPU, got none: {reason}")
    if jax.device_count() < at_least:
        raise ValueError(f"{who} requires at least {at_least} GPUs, got {jax.devices()}")
    return arch


def time_kernels(
    problem: Problem, arch: Arch, rounds: int, clock: Clock | None = None, slowest: float = math.inf
) -> Timed | None:
    """The times of all kernels that compute `problem`, medians of `rounds`, but of those that are predicted to take
    more than `slowest` times the least; None where there is none at hand."""
    modelled, decisions = kernels(problem, arch)
    if not decisions:
        return None
    expected = [_predicted_us(decision) for decision in decisions]
    limit = slowest * min(expected)
    decisions = [decision for decision, us in zip(decisions, expected, strict=True) if us <= limit]
    times_us = (clock or gpu_clock)(problem, decisions, arch, rounds)
    return Timed(problem, modelled, tuple(decisions), tuple(times_us))


def _predicted_us(decision: Decision) -> float:
    assert decision.plan is not None  # a kernel at hand was planned
    (candidate,) = decision.plan.candidates
    return candidate.cost.us if candidate.cost else 0.0


def gpu_clock(
    problem: Problem, decisions: Sequence[Decision], arch: Arch, rounds: int, most: int | None = None
) -> list[float]:
    """Microseconds of each kernel by CUPTI; `most` kernels at a stretch: 1 for launches of one kernel, which has one
    symbol. RuntimeError if it saw another number of launches than there were."""
    if reason := ffi.status():
        raise ValueError(f"timing kernels requires the library that launches them: {reason}")
    ffi.register(artifacts.launch_dirs())
    copies = num_copies(problem, arch.l2_bytes)
    values = operands(problem, copies)
    num = min(most or len(decisions), len(decisions))
    size, in_a_row = burst(num, roofline_us(problem, arch), result_bytes(problem))
    parts = [decisions[i : i + size] for i in range(0, len(decisions), size)]
    programs = [jax.jit(program(problem, part, copies, in_a_row)).lower(*values) for part in parts]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda lowered: lowered.compile(), programs))

    def measure(i: int, rounds: int) -> list[float]:
        found = timing.kernel_times(compiled[i], rounds, *values, rests=len(parts) > 1)
        return _medians(parts[i], launch_order(len(parts[i]), copies, in_a_row), found, rounds)

    if len(parts) == 1:
        return measure(0, rounds)
    first = [measure(i, 1) for i in range(len(parts))]
    limit = SLOW * min(map(min, first))
    return [us for i, once in enumerate(first) for us in (measure(i, rounds) if min(once) <= limit else once)]


def burst(num_kernels: int, least_us: float, bytes_each: int) -> tuple[int, int]:
    """(how many kernels run without a rest, launches of each in a row), where no launch takes less than `least_us` and
    each writes so many bytes."""
    launches = min(int(BURST_US / least_us), RESULT_BYTES // bytes_each)
    in_a_row = max(1, min(MAX_IN_A_ROW, launches))
    return max(1, min(num_kernels, launches // in_a_row)), in_a_row


def _medians(
    decisions: Sequence[Decision], order: Sequence[int], found: Sequence[tuple[str, float]], rounds: int
) -> list[float]:
    """Of each kernel, without the first half of its launches in each round. `order`: a round's, by kernel."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for symbol, us in found:
        times[symbol].append(us)
    symbols = [decision.entry.entry for decision in decisions if decision.entry]
    expected = collections.Counter(symbols[i] for i in order)
    for symbol in symbols:
        if len(times[symbol]) != rounds * expected[symbol]:
            counts = {name: len(found) for name, found in times.items()}
            raise RuntimeError(f"CUPTI requires {rounds * expected[symbol]} launches of {symbol}, got {counts}")
    return [_median_of_late(times[symbol], expected[symbol]) for symbol in symbols]


def _median_of_late(times_us: list[float], in_a_row: int) -> float:
    return statistics.median(us for i, us in enumerate(times_us) if i % in_a_row >= in_a_row // 2)


def num_copies(problem: Problem, l2_bytes: int) -> int:
    """Of the operands, to go round: twice the L2 cache, so that no kernel finds its operands there."""
    return max(1, min(MAX_ROTATION, math.ceil(2 * l2_bytes / problem.min_bytes)))


def launch_order(num_kernels: int, copies: int, in_a_row: int) -> list[int]:
    """Which kernel each launch of one call is of: each so often in a row, the last as much oftener as lets every copy
    of the operands come up equally often."""
    launches = copies * math.ceil(num_kernels * in_a_row / copies)
    return [min(i // in_a_row, num_kernels - 1) for i in range(launches)]


def program(
    problem: Problem, decisions: Sequence[Decision], copies: int, in_a_row: int
) -> Callable[..., list[jax.Array]]:
    """A function of `operands` that launches the kernels in turn, each launch on the next copy of a and b.

    It ends with the last copy, so that in the next call too a copy that comes up again is gone from the L2 cache. No
    launch starts before the one before it ends (`pdl`), for its time would begin there too. All results are returned:
    else one memory would be written again and again, in the L2 cache, which takes less than a user's program
    (`kernel_times.OWN_US`).
    """
    result = jax.ShapeDtypeStruct((problem.batch, problem.m, problem.n), jnp.dtype(problem.out_dtype))

    def launch(decision: Decision, values: Sequence[Forms], rest: Sequence[jax.Array]) -> jax.Array:
        assert decision.plan is not None and decision.entry is not None  # a kernel at hand was planned
        made = request(decision.plan, decision.entry)
        results = [result, *(jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in made.results[1:])]
        call = jax.ffi.ffi_call(ffi.TARGET_NAME, results, has_side_effect=True)  # else two of one copy would be one
        forms = zip(values, made.operands[: len(values)], strict=True)
        given = [next(x for x in own if x.shape == asked.shape) for own, asked in forms]
        launched: Sequence[jax.Array] = call(*given, *rest, **ffi.as_hlo(made.attributes))
        return launched[0]

    def launch_all(a: Sequence[Forms], b: Sequence[Forms], rest: Sequence[jax.Array]) -> list[jax.Array]:
        found: list[jax.Array] = []
        for i, kernel in enumerate(launch_order(len(decisions), copies, in_a_row)):
            decision, given = decisions[kernel], (a[i % copies], *b[i % copies :: copies])
            own = decision.plan
            assert own is not None and own.tile is not None  # a kernel at hand was planned
            given = given[::-1] if own.swapped else given[:1] if own.tile.symmetric else given
            if found:  # else XLA would have what reads one copy run one after the other
                given, found[-1] = jax.lax.optimization_barrier((given, found[-1]))
            found.append(launch(dataclasses.replace(decision, plan=dataclasses.replace(own, pdl=False)), given, rest))
        return found

    return launch_all


def operands(problem: Problem, copies: int) -> tuple[list[Forms], list[Forms], list[jax.Array]]:
    """`copies` of a and of b as stored, padded as TMA requires and, where that is another shape, as they are; behind
    all of a gated product's b the other one's; and what the epilogue adds.

    Made on the host: a program that draws random numbers would have to be compiled for each shape. Copied while no
    other process measures, whose kernels would take longer.
    """
    a = [_forms(problem, "a", problem.a_dtype, 2 * i) for i in range(copies)]
    b = [_forms(problem, "b", problem.b_dtype, 2 * i + 1) for i in range(copies * problem.num_bs)]
    extras = [_random(extra.shape, extra.dtype, 0) for extra in problem.extras]
    with timing.turn():
        placed: tuple[list[Forms], list[Forms], list[jax.Array]] = jax.block_until_ready(jax.device_put((a, b, extras)))
    return placed


def _forms(problem: Problem, operand: str, dtype: str, seed: int) -> tuple[np.ndarray, ...]:
    *rows, row = padded_shape(problem, operand)
    shapes = dict.fromkeys(((*rows, row), (*rows, contiguous(problem, operand))))
    return tuple(_random(shape, dtype, seed) for shape in shapes)


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.resize(_pool(dtype)[seed * 997 :], shape)


@functools.cache
def _pool(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        info = jnp.iinfo(jnp.dtype(dtype))
        return rng.integers(info.min, int(info.max) + 1, POOL).astype(dtype)
    return rng.standard_normal(POOL, np.float32).astype(jnp.dtype(dtype))
