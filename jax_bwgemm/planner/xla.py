"""What XLA is expected to take for products that are little more than their start and one pass over memory.

Of short sums XLA's kernels start as fast as ours, and of operands whose rows TMA cannot step over they read a few terms
as fast. A formula for each kind of these, fitted to what XLA took, is off in ways that repeat, for XLA chooses anew for
each shape. A forest of regression trees (`python -m jax_bwgemm bench --calibrate-xla`) adds up what it has seen of
products alike. It belongs to a family of GPUs and to the formula that it was fitted beside. Of other products nothing
is expected. Reads a file that ships; chooses nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.padding import contiguous, ends_within_sectors, padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner import trees
from jax_bwgemm.planner.trees import Trees

FORMAT = 1
SHIPPED = Path(__file__).parent / "calibrations"
TILE = 64  # rows and columns of a kernel of XLA's; on all SMs at a time
SHORT = 128  # terms of a sum
SHORTEST = 64  # for more, XLA's default flags choose other kernels than its best ones do
UNEVEN = 1000  # and of operands that have rows off 16 bytes: beyond, XLA pads them, too
THIN, THIN_TERMS = 5, 3200  # rows or columns that XLA multiplies as vectors while it reads the other operand; with more
# terms it is the slower one
VECTOR_BYTES = 2e7  # of a matrix times a vector: larger ones XLA's default flags may give to a slower kernel
LOAD_BYTES, LINE_BYTES = 16, 128  # that a thread loads at most; of the L2 cache


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of products that XLA computes alike: microseconds to start, and of a term, times the waves, or the part of one,
    that its tiles are, of the `least` at least, to a power; and of memory, in times of what the device could move."""

    start_us: float
    term_us: float
    waves: float
    memory: float
    least: float = 0.0


# Fitted to what XLA takes by its default flags, which are what a product that is left to it gets, of 419 random ones of
# an H100 and an H200, of which results/random has 395. The vectors' rows are of results/vectors.
KINDS = {
    "even": Kind(1.34, 0.0166, 0.67, 1.07),
    "torn": Kind(1.42, 0.0059, 0.84, 1.77),
    "longer": Kind(1.84, 0.016, 0.57, 1.15),
    "short": Kind(1.81, 0.0122, 0.41, 1.9),
    "uneven": Kind(2.76, 0.0057, 0.98, 1.92, least=1.0),
    "thin": Kind(1.36, 0.0029, 0.0, 2.45, least=1.0),
    "vector": Kind(1.57, 0.0059, 1.39, 1.15),
    "rows": Kind(2.1, 0.0, 0.0, 1.16),  # of k, times a vector: a reduction of XLA's
}


def xla_us(problem: Problem, arch: Arch) -> float | None:
    """What XLA is expected to take on the device, with its launch; None for products of which that is not known."""
    us = formula_us(problem, arch)
    if us is None:
        return None
    learned = _shipped(arch.family.name) if is_covered(problem) else None
    log = learned.sums(row(problem, arch)[None])[0] if learned else 0.0
    return float(arch.constants.launch_us + us * math.exp(log))


def formula_us(problem: Problem, arch: Arch) -> float | None:
    """By the kind of the product alone, and without the launch."""
    name = kind_of(problem)
    if name is None:
        return None
    kind, moved_us = KINDS[name], problem.min_bytes / (arch.memory_tb_per_s * 1e6)
    waves = _tiles(problem) / arch.num_sms
    us: float = kind.start_us + kind.term_us * problem.k * max(kind.least, waves) ** kind.waves + kind.memory * moved_us
    return us


def kind_of(problem: Problem) -> str | None:
    """One of KINDS; None for products of which nothing is expected."""
    if not any(padding(problem, operand) for operand in "ab"):
        if _is_rows_by_vector(problem):
            return "rows"
        if problem.k > SHORT:
            return None
        if problem.k > SHORTEST:
            return "longer"
        return "torn" if ends_within_sectors(problem) else "even"
    if min(problem.m, problem.n) <= THIN:
        kind = "vector" if min(problem.m, problem.n) == 1 else "thin"
        return kind if problem.k <= THIN_TERMS else None
    if problem.k <= SHORT:
        return "short"
    return "uneven" if problem.k <= UNEVEN else None


def _is_rows_by_vector(problem: Problem) -> bool:
    rows = problem.b_major == "k" if problem.m == 1 else problem.n == 1 and problem.a_major == "k"
    return rows and problem.min_bytes <= VECTOR_BYTES


def _tiles(problem: Problem) -> int:
    return math.ceil(problem.m / TILE) * math.ceil(problem.n / TILE)


def is_covered(problem: Problem) -> bool:
    """Whether products of this kind were measured: of 2 bytes an element."""
    return {DTYPE_BYTES[x] for x in (problem.a_dtype, problem.b_dtype, problem.out_dtype)} == {2}


def row(problem: Problem, arch: Arch) -> np.ndarray:
    """The features of a product that has a kind."""
    return np.fromiter(features(problem, arch).values(), np.float64)


def features(problem: Problem, arch: Arch) -> dict[str, float]:
    """What the time of such a product may depend on beside what the formula says, by name. Steps are how many bytes, or
    terms, begin alike."""
    us, kind = formula_us(problem, arch), kind_of(problem)
    assert us is not None and kind is not None
    row_bytes = {operand: 2 * contiguous(problem, operand) for operand in "ab"}
    return {
        "formula_log": math.log(us),
        "kind": list(KINDS).index(kind),
        "device_log": math.log(arch.memory_tb_per_s),  # tells an H100 from an H200
        "m_log": math.log(problem.m),
        "n_log": math.log(problem.n),
        "k_log": math.log(problem.k),
        "result_log": math.log(problem.m * problem.n),
        "least_log": math.log(min(problem.m, problem.n)),
        "most_log": math.log(max(problem.m, problem.n)),
        "tiles_log": math.log(_tiles(problem)),
        "a_is_k_major": problem.a_major == "k",
        "b_is_k_major": problem.b_major == "k",
        "a_row_step": math.gcd(row_bytes["a"], LOAD_BYTES),
        "b_row_step": math.gcd(row_bytes["b"], LOAD_BYTES),
        "c_row_step": math.gcd(2 * (problem.n if problem.c_major == "n" else problem.m), LINE_BYTES),
        "k_step": math.gcd(problem.k, TILE),
    }


@functools.cache
def names() -> tuple[str, ...]:
    """Of all features, in order."""
    return tuple(features(Problem(64, 64, 64), by_name("h200")))


def formula() -> dict[str, Any]:
    """All that the formula is made of, as a file says it."""
    return {"tile": TILE} | {name: dataclasses.asdict(kind) for name, kind in KINDS.items()}


def load(path: Path) -> Trees:
    """Raises ValueError for what is no file of this version, or was fitted beside another formula."""

    def of(fields: dict[str, Any]) -> Trees:
        if fields["formula"] != formula():
            raise ValueError("another formula")
        return Trees.read(fields, names())

    return trees.load(path, FORMAT, of, "times of XLA's require what `bench --calibrate-xla` writes")


@functools.lru_cache(maxsize=16)
def _shipped(family: str) -> Trees | None:
    path = SHIPPED / f"{family}_xla.json"
    return trees.shipped(path, load, "what XLA takes is expected by its formula alone")
