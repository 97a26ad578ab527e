"""`bench --tune`: the times of the kernels that may be fastest for given products, into a table that the planner
follows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jax_bwgemm.bench import finals, machine, pool
from jax_bwgemm.bench.candidates import Clock, Timed, gpu_arch, time_kernels
from jax_bwgemm.bench.cases import DEFAULT, Case
from jax_bwgemm.cli.drawing import progress_bar
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner import measured
from jax_bwgemm.runtime.decision import kernels

RUNS = 3  # of the finals, each by a process of its own, if several work side by side
SLOWEST = 2.0  # times the least that is predicted of a product's kernels: what is to take longer is not timed
HEADINGS = ("product", "kernels", "fastest", "us", "the model's", "us", "loses", "XLA's us")


def main(shapes: Sequence[str] | None, rounds: int, path: Path | None, commit: str = "", num_processes: int = 1) -> int:
    """Times `shapes`, prints what is fastest, merges a table of times into `path` (the user's own by default).

    Exit code 1 if none has a kernel at hand. ValueError without a GPU that has kernels.
    """
    if rounds < 1:
        raise ValueError(f"`--rounds` requires at least 1, got {rounds}")
    pool.share_memory(num_processes)
    cases = map(Case.from_str, shapes or DEFAULT)
    problems = list(dict.fromkeys(problem for case in cases for problem in case.tuned))
    arch = gpu_arch("`bench --tune`")
    path = path or measured.user_path(arch.name)
    with progress_bar("products") as progress:
        facts = machine.describe(commit)
        timed = tune(problems, arch, rounds, path, facts, progress, num_processes=num_processes)
    print(f"{arch.name}: kernel times, medians of {rounds} rounds", aligned(timed), sep="\n")
    print(f"wrote {path}")
    for problem in problems:
        if all(found.problem != problem for found in timed):
            print(f"{problem}: {kernels(problem, arch)[0].reason}")
    return 0 if timed else 1


def tune(
    problems: Iterable[Problem],
    arch: Arch,
    rounds: int,
    path: Path,
    facts: dict[str, str],
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
    clock: Clock | None = None,
    num_processes: int = 1,
) -> list[Timed]:
    """Times the problems that have kernels at hand, of each those that are not predicted to be the slowest, the fastest
    of these in every order of tiles (`finals`), and merges it into `path` at once; in the order of the problems. Of
    several processes, the finals are run by RUNS different ones, and their means merged again after each."""
    runs = RUNS if num_processes > 1 else 1
    asked: dict[int, Problem | finals.Finals] = dict(enumerate(problems))
    measure = functools.partial(_measure, arch=arch, rounds=rounds, clock=clock)
    num_done, num_all = 0, runs * len(asked)
    for _ in range(runs):
        places = list(asked)
        for j, found in pool.each(measure, list(asked.values()), num_processes):  # new processes, all of them
            if found is None:
                del asked[places[j]]
            else:
                asked[places[j]] = found
                record = found.refined.record
                measured.save(measured.Table(arch.name, facts, {record.problem: record}), path)
            num_done += 1 if found else runs
            progress(num_done, num_all)
    return [found.refined for found in asked.values() if isinstance(found, finals.Finals)]


def _measure(asked: Problem | finals.Finals, arch: Arch, rounds: int, clock: Clock | None) -> finals.Finals | None:
    """All kernels of a product, and its finals; or these once more. None where no kernel is at hand."""
    if isinstance(asked, finals.Finals):
        return asked.run(arch, rounds, clock)
    timed = time_kernels(asked, arch, rounds, clock, SLOWEST)
    return None if timed is None else finals.Finals.of(timed).run(arch, rounds, clock)


def aligned(timed: Iterable[Timed]) -> str:
    """A line for each, under HEADINGS; as wide as it gets, for a table of rich would be cut in a log."""
    rows = [HEADINGS, *map(line, timed)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def line(timed: Timed) -> tuple[str, ...]:
    """One table line, under HEADINGS."""
    best, model = timed.fastest, timed.modelled_idx
    return (
        measured.key(timed.problem),
        str(len(timed.times_us)),
        timed.name(best),
        f"{timed.times_us[best]:.1f}",
        timed.name(model) if model != best else "the same",
        f"{timed.times_us[model]:.1f}",
        f"{100 * timed.regret:.1f} %",
        "" if timed.xla_us is None else f"{timed.xla_us:.1f}",
    )
