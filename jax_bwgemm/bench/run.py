"""The benchmark itself: for each case, ours and its peers in one process, alternately, on the same inputs."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

import jax_bwgemm
from jax_bwgemm.bench import accuracy, machine, render, report, timing
from jax_bwgemm.bench.candidates import gpu_arch
from jax_bwgemm.bench.cases import Case, rotation
from jax_bwgemm.bench.peers import FLAG_SETS, Unavailable
from jax_bwgemm.bench.programs import Operands, Program, compile_ours, compile_peer, make_operands
from jax_bwgemm.bench.sustained import sustain
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import ffi

HANDLER_CALLS = 10_000
HANDLER_SIZE = 256
TRIALS = 3  # of each of a peer's configurations, before the rounds, to choose one
TEMPERATURE = "temperature.gpu"
Clock = Callable[..., timing.Measure]


@dataclasses.dataclass(frozen=True)
class Settings:
    """`rounds` at least, and more until a case has taken `seconds`. `sustained` is seconds of load, 0 for none."""

    cases: Sequence[Case]
    peers: Sequence[str] = tuple(FLAG_SETS)
    rounds: int = timing.MIN_ROUNDS
    seconds: float = 0.0
    commit: str = ""
    sustained: float = 0.0
    sustained_cases: Sequence[Case] = ()


def measure(settings: Settings, keep: Callable[[report.Result], object] = lambda result: None) -> report.Result:
    """All of `settings` on this machine's GPU. `keep` gets what there is after every row, so that an interrupt loses
    one row only. ValueError without a GPU that has kernels."""
    result = measure_all(settings, gpu_arch("`bench`"), keep)
    if not result.rows:
        raise ValueError(f"`bench` requires a shape that can be measured, got none: {result.skipped}")
    return result


def measure_all(
    settings: Settings, arch: Arch, keep: Callable[[report.Result], object] = lambda result: None
) -> report.Result:
    facts = machine.describe(settings.commit)  # first: it may refuse the commit
    handler = measure_handler()  # before CUPTI, which, once attached, makes every driver call slower
    method, clock = timing.choose_clock()
    table = render.columns(arch.name, settings.peers)
    print(*(heading for heading, _ in table), sep="  ")
    result = report.Result(arch.name, method, timing.PAUSE, facts, handler, (), {}, ())
    for case in settings.cases:
        try:
            row = measure_case(case, arch, settings, clock)
            print(*render.cells(row, table), sep="  ", flush=True)
            result = dataclasses.replace(result, rows=(*result.rows, row))
        except (jax.errors.JaxRuntimeError, Unavailable) as error:  # such as too little memory: the other rows count
            reason = str(error).partition("\n")[0]
            result = dataclasses.replace(result, skipped=result.skipped | {str(case): reason})
        keep(result)
    loads = [load for case in settings.sustained_cases for load in measure_load(case, arch, settings.sustained)]
    return dataclasses.replace(result, sustained=tuple(loads))


def measure_case(case: Case, arch: Arch, settings: Settings, clock: Clock) -> report.Row:
    operands = make_operands(case, rotation(case, arch.l2_bytes))
    programs, unavailable = {"ours": compile_ours(case, operands)}, {}
    for peer in settings.peers:
        try:
            programs[peer] = _fastest(compile_peer(peer, case, arch, operands), operands, clock)
        except Unavailable as error:
            if peer == "default":
                raise
            unavailable[peer] = str(error)
    errors = _errors(case, programs, operands)
    measures = {name: clock(program.run, len(operands), operands) for name, program in programs.items()}
    samples = timing.alternate(measures, settings.rounds, settings.seconds)
    times = {name: _times(samples[name], errors[name], program) for name, program in programs.items()}
    return report.Row(
        shape=str(case),
        variant=", ".join(programs["ours"].variants),
        fallback=programs["ours"].fallback,
        rotation=len(operands),
        rounds=samples["ours"].rounds,
        limit_us=max(report.limits_us(case, arch)),
        ours=times.pop("ours"),
        peers=times,
        unavailable=unavailable,
        temperature_c=machine.number(machine.query((TEMPERATURE,)).get(TEMPERATURE, "")),
    )


def measure_load(case: Case, arch: Arch, seconds: float) -> list[report.Load]:
    """Ours and XLA's default, each for `seconds`."""
    operands = make_operands(case, rotation(case, arch.l2_bytes))
    (default,) = compile_peer("default", case, arch, operands)
    runs = {"ours": compile_ours(case, operands).run, "default": default.run}
    calls = {name: functools.partial(run, operands) for name, run in runs.items()}
    return sustain(case, calls, len(operands), seconds)


def measure_handler() -> dict[str, float]:
    """What our handler takes of a call, by its own clock: all of Execute, and Execute without cuLaunchKernelEx."""
    (operands,) = make_operands(Case(HANDLER_SIZE, HANDLER_SIZE, HANDLER_SIZE), 1)
    function = jax.jit(functools.partial(jax_bwgemm.matmul, on_fallback="error", deterministic="batch"))  # never XLA's
    jax.block_until_ready(function(**operands))
    ffi.timing_start(HANDLER_CALLS)
    for _ in range(HANDLER_CALLS):
        result = function(**operands)
    jax.block_until_ready(result)
    times_ns = ffi.timing_read(HANDLER_CALLS)
    own, total = (statistics.median(times) / 1e3 for times in zip(*times_ns, strict=True))
    return {"own_us": own, "total_us": total, "calls": float(len(times_ns))}


def _fastest(programs: Sequence[Program], operands: Sequence[Operands], clock: Clock) -> Program:
    if len(programs) == 1:
        return programs[0]
    measures = [clock(program.run, len(operands), operands) for program in programs]
    medians = [statistics.median(measure() for _ in range(TRIALS)) for measure in measures]
    return programs[medians.index(min(medians))]


def _errors(case: Case, programs: Mapping[str, Program], operands: Sequence[Operands]) -> dict[str, float]:
    sample = accuracy.sample(case, {name: np.asarray(x) for name, x in operands[0].items()})
    return {name: sample.error(np.asarray(program.run(operands)[0])) for name, program in programs.items()}


def _times(sample: timing.Sample, error: float, program: Program) -> report.Times:
    return report.Times(sample.median_us, sample.low_us, sample.high_us, error, program.config, program.calls)
