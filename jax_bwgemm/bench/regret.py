"""`bench --regret`: what the planner's choices lose against the fastest kernel, over random products.

The table of measured times is ignored. The result file has every time, for whoever fits the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from jax_bwgemm.bench import kernel_times, machine, pool
from jax_bwgemm.bench.candidates import Clock, Timed, gpu_arch, time_kernels
from jax_bwgemm.bench.cases import LAYERS, Case, random_cases
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.bench.tune import aligned
from jax_bwgemm.cli.drawing import progress_bar
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.padding import why_not_padded
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import FEW
from jax_bwgemm.planner import measured, parts
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.order import SHORT_SUM
from jax_bwgemm.runtime.decision import kernels

LARGEST = 16384
FEW_ROWS_SHARE = 0.25  # products whose transposes are candidates
UNALIGNED_SHARE = 0.25  # sizes that are no multiples of 8
MAX_ROOFLINE_US = 2000.0  # of the roofline, so that a product takes some 3 ms at most
SLOWEST = 1.6  # times the least that is predicted of a product's kernels: what is to take longer is not timed
ROWS = tuple(sorted({2**i for i in range(14)} | {3 * 2**i for i in range(12)} | {5 * 2**i for i in range(3, 11)}))
MAX_LAYER_US = 150.0  # of the roofline of a layer's product: the planner loses least of those that take longest
GRADIENT_ROWS = 256  # of a layer's operands, at least, where the product is the gradient of its weights
FUSED = ("bias", "bias+relu", "bias+gelu", "bias+silu", "residual", "bias+residual", "bias+silu+residual")
MOST_OF_PARTS = 4096  # rows and columns of a product whose k is in parts
TALL, MAX_TALL_US = 4096, 60.0  # rows, and the roofline: of longer ones few would be timed
FORMS = (("k", "n"), ("k", "k"), ("m", "n"))  # nn, nt, tn
DTYPES = (
    ("bfloat16", "bfloat16", 0.8),
    ("bfloat16", "float32", 0.1),
    ("float16", "float16", 0.1),
)  # operands, result, share
WORST = 10


def main(
    num: int, seed: int, rounds: int, out: Path | None, commit: str = "", of: str = "all", num_processes: int = 1
) -> int:
    """Times `num` random products, prints the statistics, writes all times to `out` if given, as they come. `of`: one
    of SAMPLES."""
    pool.share_memory(num_processes)
    for flag, value in (("--regret", num), ("--rounds", rounds)):
        if value < 1:
            raise ValueError(f"`{flag}` requires at least 1, got {value}")
    arch = gpu_arch("`bench --regret`")
    facts = {"arch": arch.name, "seed": seed, "rounds": rounds, "results": kernel_times.OWN}
    facts["machine"] = machine.describe(commit)
    problems = SAMPLES[of](num, seed, arch)
    with progress_bar("products") as progress:
        timed = measure(
            problems,
            arch,
            rounds,
            progress,
            keep=lambda timed: kernel_times.save(map(saved, timed), out, facts) if out else None,
            num_processes=num_processes,
        )
    if not timed:
        raise ValueError(f"`bench --regret` requires kernels, got none: {kernels(problems[0], arch)[0].reason}")
    print(text(timed, num))
    worst = sorted(timed, key=lambda found: -found.regret)[:WORST]
    print(f"{arch.name}: where the planner loses most", aligned(worst), sep="\n")
    if out:
        print(f"wrote {out}")
    return 0


def sample(num: int, seed: int, arch: Arch) -> list[Problem]:
    """`num` problems with sizes log-uniform in 1..LARGEST, none longer than MAX_ROOFLINE_US by the roofline, and none
    that is XLA's (`why_not_padded`)."""
    rng = np.random.default_rng(seed)
    problems: list[Problem] = []
    while len(problems) < num:
        problem = _random_problem(rng)
        if roofline_us(problem, arch) <= MAX_ROOFLINE_US and why_not_padded(problem) is None:
            problems.append(problem)
    return problems


def sample_of_layers(num: int, seed: int, arch: Arch) -> list[Problem]:
    """At most `num` different bfloat16 products of models' layers, forward and back, and squares: their rows are a
    power of two, or three or five times one. None that the shipped table has times of: those stay what nothing learns
    from."""
    rng = np.random.default_rng(seed)
    problems: dict[Problem, None] = {}
    for _ in range(100 * num):
        problem = _layer(rng)
        if roofline_us(problem, arch) <= MAX_LAYER_US and measured.shipped(arch.name, problem) is None:
            problems[problem] = None
        if len(problems) == num:
            break
    return list(problems)


def sample_of_fused(num: int, seed: int, arch: Arch) -> list[Problem]:
    """At most `num` different bfloat16 products of models' layers, forward, each with an epilogue of FUSED. None that
    the shipped table has times of."""
    rng = np.random.default_rng(seed)
    problems: dict[Problem, None] = {}
    for _ in range(100 * num):
        (k, n), form = LAYERS[rng.integers(len(LAYERS))], rng.choice(("nn", "nt"))
        problem = Case.from_str(f"{rng.choice(ROWS)}x{n}x{k}:{form}:{rng.choice(FUSED)}").fused
        if roofline_us(problem, arch) <= MAX_LAYER_US and measured.shipped(arch.name, problem) is None:
            problems[problem] = None
        if len(problems) == num:
            break
    return list(problems)


def sample_of_parts(num: int, seed: int, arch: Arch) -> list[Problem]:
    """`num` problems of few tiles and long sums in bfloat16, each in one of the numbers of parts of k that would be
    looked at (`parts.counts`)."""
    rng = np.random.default_rng(seed)
    problems: list[Problem] = []
    while len(problems) < num:
        m, n = (round(2 ** rng.uniform(3, np.log2(MOST_OF_PARTS))) for _ in range(2))
        k = round(2 ** rng.uniform(9, np.log2(LARGEST)))
        if rng.random() >= UNALIGNED_SHARE:
            m, n, k = map(_multiple_of_8, (m, n, k))
        a_major, b_major = FORMS[rng.integers(len(FORMS))]
        problem = Problem(m, n, k, a_major=a_major, b_major=b_major)
        found = parts.counts(problem, arch, MAX_ROOFLINE_US)
        if found and why_not_padded(problem) is None:
            problems.append(parts.divided(problem, int(rng.choice(found))))
    return problems


def sample_of_tall(num: int, seed: int, arch: Arch) -> list[Problem]:
    """`num` problems of more rows than TALL in bfloat16, whose transposes are candidates, too."""
    rng = np.random.default_rng(seed)
    problems: list[Problem] = []
    while len(problems) < num:
        m, n, k = (round(2 ** rng.uniform(np.log2(least), np.log2(LARGEST))) for least in (TALL, 8, SHORT_SUM))
        if rng.random() >= UNALIGNED_SHARE:
            m, n, k = map(_multiple_of_8, (m, n, k))
        a_major, b_major = FORMS[rng.integers(len(FORMS))]
        problem = Problem(m, n, k, a_major=a_major, b_major=b_major)
        if roofline_us(problem, arch) <= MAX_TALL_US and why_not_padded(problem) is None:
            problems.append(problem)
    return problems


def sample_of_cases(num: int, seed: int, arch: Arch) -> list[Problem]:
    """At most `num` of the first of those that `bench --random` draws, without longer ones than MAX_LAYER_US."""
    problems = [case.fused for case in random_cases(2 * num, seed)]
    return [x for x in problems if roofline_us(x, arch) < MAX_LAYER_US and why_not_padded(x) is None][:num]


SAMPLES = {
    "all": sample,
    "cases": sample_of_cases,
    "layers": sample_of_layers,
    "fused": sample_of_fused,
    "parts": sample_of_parts,
    "tall": sample_of_tall,
}


def measure(
    problems: Iterable[Problem],
    arch: Arch,
    rounds: int,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
    clock: Clock | None = None,
    keep: Callable[[list[Timed]], None] = lambda timed: None,
    num_processes: int = 1,
) -> list[Timed]:
    """The times of the problems that have a kernel at hand, in their order; `keep` gets those so far after each."""
    asked, found = list(problems), dict[int, Timed]()
    time = functools.partial(time_kernels, arch=arch, rounds=rounds, clock=clock, slowest=SLOWEST)
    for num_done, (i, timed) in enumerate(pool.each(time, asked, num_processes)):
        if timed is not None:
            found[i] = timed
            keep([found[i] for i in sorted(found)])
        progress(num_done + 1, len(asked))
    return [found[i] for i in sorted(found)]


def statistics(regrets: Sequence[float]) -> dict[str, float]:
    """Fractions of the fastest kernel's time."""
    mean, median, p90, most = np.mean(regrets), *np.percentile(regrets, (50, 90, 100))
    return {"mean": float(mean), "median": float(median), "90th percentile": float(p90), "max": float(most)}


def lost(timed: Sequence[Timed]) -> float:
    """The same of all products' time together, which the long ones rule."""
    chosen_us = sum(found.wholes_us[found.modelled_idx] for found in timed)
    return chosen_us / sum(min(found.wholes_us) for found in timed) - 1


def text(timed: Sequence[Timed], num: int) -> str:
    """The statistics as one sentence."""
    parts = [f"{name} {100 * value:.1f} %" for name, value in statistics([found.regret for found in timed]).items()]
    num_best = sum(found.fastest == found.modelled_idx for found in timed)
    return (
        f"the planner's choices lose, against the fastest kernel: {', '.join(parts)}; all products together "
        f"{100 * lost(timed):.1f} % of their time; "
        f"fastest itself in {num_best} of {len(timed)} products ({num - len(timed)} without a kernel)"
    )


def saved(timed: Timed) -> Measured:
    """As a file has it."""
    plans = [decision.plan for decision in timed.decisions]
    names = [(plan.tile, plan.swapped) for plan in plans if plan and plan.tile]
    return Measured(timed.problem, dict(zip(names, timed.times_us, strict=True)), timed.modelled_idx)


def _random_problem(rng: np.random.Generator) -> Problem:
    def size(largest: int) -> int:
        return round(2 ** rng.uniform(0, np.log2(largest)))

    has_few_rows, is_unaligned = rng.random() < FEW_ROWS_SHARE, rng.random() < UNALIGNED_SHARE
    m, n, k = size(FEW if has_few_rows else LARGEST), size(LARGEST), size(LARGEST)
    if not is_unaligned:
        m, n, k = m if has_few_rows else _multiple_of_8(m), _multiple_of_8(n), _multiple_of_8(k)
    operand, result, _ = DTYPES[rng.choice(len(DTYPES), p=[share for _, _, share in DTYPES])]
    a_major, b_major = FORMS[rng.integers(len(FORMS))]
    return Problem(m, n, k, 1, operand, operand, result, a_major, b_major)


def _layer(rng: np.random.Generator) -> Problem:
    """A forward product, the gradient of its operand, that of its weights, or a square."""
    rows, (k, n) = int(rng.choice(ROWS)), LAYERS[rng.integers(len(LAYERS))]
    kind = rng.choice(("forward", "transposed weights", "operand", "weights", "square"), p=(0.4, 0.15, 0.1, 0.2, 0.15))
    m, n, k, a_major, b_major = {
        "forward": (rows, n, k, "k", "n"),
        "transposed weights": (rows, n, k, "k", "k"),
        "operand": (rows, k, n, "k", "k"),
        "weights": (k, n, max(rows, GRADIENT_ROWS), "m", "n"),
        "square": (max(rows, GRADIENT_ROWS),) * 3 + FORMS[rng.integers(len(FORMS))],
    }[str(kind)]
    return Problem(m, n, k, 1, "bfloat16", "bfloat16", "bfloat16", a_major, b_major)


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8
