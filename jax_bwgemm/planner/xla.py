"""What XLA is expected to take for a product.

A formula for each kind of products says what it should take, and is off, for XLA chooses a kernel anew for each shape.
A forest of regression trees, fitted to what XLA took of some thousand (`python -m jax_bwgemm bench --calibrate-xla`),
adds up what it has seen of products alike. It belongs to a family of GPUs and to the formula that it was fitted beside.
Without it, something is expected of short and uneven products alone, which are little more than their start and one
pass over memory. Reads a file that ships; chooses nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.padding import LINE_BYTES, contiguous, ends_within_sectors, padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.planner import trees
from jax_bwgemm.planner.cost import roofline_us
from jax_bwgemm.planner.trees import Trees

FORMAT = 1
SHIPPED = Path(__file__).parent / "calibrations"
TILE = 64  # rows and columns of a kernel of XLA's; on all SMs at a time
SHORT = 128  # terms of a sum, which XLA's kernels start as fast as ours
SHORTEST = 64  # for more, XLA's default flags choose other kernels than its best ones do
UNEVEN = 1000  # and of operands that have rows off 16 bytes, which XLA's kernels read as fast: beyond, it pads them
THIN, THIN_TERMS = 5, 3200  # rows or columns that XLA multiplies as vectors while it reads the other operand; with more
# terms it is the slower one, but of one vector and a small matrix ("columns")
VECTOR_BYTES = 2e7  # of a matrix times a vector: larger ones XLA's default flags may give to a slower kernel
LOAD_BYTES = 16  # that a thread loads at most


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of products that XLA computes alike: microseconds to start, and of a term, times the waves, or the part of one,
    that its tiles are, of the `least` at least, to a power; and in times of the least that any kernel takes. `alone`:
    whether that is worth something without trees; `learned`: whether it is better with them."""

    start_us: float
    term_us: float
    waves: float
    limit: float
    least: float = 0.0
    alone: bool = True
    learned: bool = True


# Fitted to what XLA takes by its default flags, which are what a product that is left to it gets, of 3,439 short and
# uneven ones of H100s and H200s of results/random and results/xla; those of rows times a vector to results/vectors.
KINDS = {
    "even": Kind(1.4, 0.0106, 0.63, 1.27),
    "torn": Kind(1.43, 0.0048, 0.64, 1.91),
    "longer": Kind(1.97, 0.0097, 0.68, 1.02),
    "short": Kind(1.76, 0.011, 0.57, 1.95),
    "uneven": Kind(4.32, 0.0124, 0.82, 0.32, least=0.2),
    "thin": Kind(1.36, 0.0029, 0.0, 2.45, least=1.0),
    "vector": Kind(1.57, 0.0045, 1.0, 1.0, least=0.15),
    # Of k, times a vector: a reduction of XLA's. Trees have seen few of them, and are further off.
    "rows": Kind(2.1, 0.0, 0.0, 1.16, learned=False),
    "other": Kind(3.0, 0.004, 0.0, 1.2, least=1.0, alone=False),  # of which XLA may have any of hundreds of kernels
    # Of n, and of many terms, times a vector: another reduction. Ten were measured; trees, which see them among larger
    # ones, expected up to 2.6 times as long of those of few columns (by hand).
    "columns": Kind(3.4, 0.0, 0.0, 1.9, learned=False),
}


def xla_us(problem: Problem, arch: Arch) -> float | None:
    """What XLA is expected to take on the device, with its launch; None for products of which that is not known."""
    kind = KINDS[kind_of(problem)]
    learned = _shipped(arch.family.name) if kind.learned and is_covered(problem) else None
    if learned is None and not kind.alone:
        return None
    log = learned.sums(row(problem, arch)[None])[0] if learned else 0.0
    return float(arch.constants.launch_us + formula_us(problem, arch) * math.exp(log))


def formula_us(problem: Problem, arch: Arch) -> float:
    """By the kind of the product alone, and without the launch."""
    kind, waves = KINDS[kind_of(problem)], _tiles(problem) / arch.num_sms
    terms_us = kind.term_us * problem.k * max(kind.least, waves) ** kind.waves
    return float(kind.start_us + terms_us + kind.limit * roofline_us(problem, arch))


def kind_of(problem: Problem) -> str:
    """One of KINDS."""
    is_padded = any(padding(problem, operand) for operand in "ab")
    if _is_rows_by_vector(problem) and not (is_padded and problem.k <= THIN_TERMS):
        return "rows"
    if min(problem.m, problem.n) == 1 and problem.k > THIN_TERMS and problem.min_bytes <= VECTOR_BYTES:
        return "columns"
    if not is_padded:
        if problem.k > SHORT:
            return "other"
        if problem.k > SHORTEST:
            return "longer"
        return "torn" if ends_within_sectors(problem) else "even"
    if min(problem.m, problem.n) <= THIN:
        kind = "vector" if min(problem.m, problem.n) == 1 else "thin"
        return kind if problem.k <= THIN_TERMS else "other"
    if problem.k <= SHORT:
        return "short"
    return "uneven" if problem.k <= UNEVEN else "other"


def _is_rows_by_vector(problem: Problem) -> bool:
    rows = problem.b_major == "k" if problem.m == 1 else problem.n == 1 and problem.a_major == "k"
    return rows and problem.min_bytes <= VECTOR_BYTES


def _tiles(problem: Problem) -> int:
    return math.ceil(problem.m / TILE) * math.ceil(problem.n / TILE)


def is_covered(problem: Problem) -> bool:
    """Whether products like this were measured: a plain one of 2 bytes an element. A symmetric one, which XLA computes
    all of and not bitwise symmetric, is none."""
    is_plain = problem.batch == 1 and problem.epilogue.is_identity and not problem.symmetric
    return is_plain and {DTYPE_BYTES[x] for x in (problem.a_dtype, problem.b_dtype, problem.out_dtype)} == {2}


def row(problem: Problem, arch: Arch) -> np.ndarray:
    """The features of a product that `is_covered`."""
    return np.fromiter(features(problem, arch).values(), np.float64)


def features(problem: Problem, arch: Arch) -> dict[str, float]:
    """What XLA's time may depend on beside what the formula says, by name. Steps are how many bytes, or terms, begin
    alike."""
    row_bytes = {operand: 2 * contiguous(problem, operand) for operand in "ab"}
    return {
        "formula_log": math.log(formula_us(problem, arch)),
        "kind": list(KINDS).index(kind_of(problem)),
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
