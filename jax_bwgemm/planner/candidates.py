"""Which tiles are looked at for a product: what ships for its dtypes, its transpose, its few rows. Prices none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.legality import is_read_swapped, needs_promotion
from jax_bwgemm.facts.padding import ends_within_sectors, is_tma_storable, padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.shipped import (
    DIRECT_TILES,
    NARROW_TILES,
    ROW_TILES,
    SHIPPED_TILES,
    SWAPPED_DIRECT_TILES,
    SWAPPED_TILES,
    THIN_TILES,
)
from jax_bwgemm.facts.symbols import Symbols, sized
from jax_bwgemm.facts.tile import FEW, Tile, k_tile
from jax_bwgemm.planner.cost import Cost
from jax_bwgemm.planner.one_pass import is_plain_half, thin_tiles

DIRECT_FLOPS, DIRECT_BYTES = 2e9, 16e6  # of a product, assumed: some 10 us of our other kernels
DIRECT_TERMS = 128  # of a sum, assumed: its loads are a small part of what it stores
SWAPPED_ROWS, SWAPPED_ROWS_OF_FEW = 16384, 512  # at most so many rows were tried as columns of the transposed product
# (H200); the second where an epilogue, or operands of other than 2 bytes, have few such kernels

TileLists = Mapping[str, tuple[Tile, ...]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tile for a problem (or for its transpose, if `swapped`) with its predicted cost, if it is legal, its measured
    time, if there is one, and the `order` (raster_group, raster_along_n) of that, if it is not `raster`'s, and the
    reason why it cannot be launched, if it cannot. `for_few_rows`: it is none for more rows."""

    tile: Tile
    problem: Problem
    swapped: bool = False
    cost: Cost | None = None
    reason: str | None = None
    measured_us: float | None = None
    order: tuple[int, int] | None = None
    for_few_rows: bool = False


def candidates(
    problem: Problem,
    arch: Arch,
    shipped: TileLists = SHIPPED_TILES,
    narrow: TileLists = NARROW_TILES,
    swapped: TileLists = SWAPPED_TILES,
    direct: TileLists = DIRECT_TILES,
    swapped_direct: TileLists = SWAPPED_DIRECT_TILES,
    rows: TileLists = ROW_TILES,
    thin: TileLists = THIN_TILES,
) -> tuple[Candidate, ...]:
    """The tiles that ship, for the problem's dtype, or for its transpose where only that can be read; narrow ones for
    its few columns; if it `is_swappable`, for its transpose, narrow ones for few rows and others for more; direct ones,
    if it `is_small` or `is_raw`, with few rows for its transpose, too; and of a result that TMA would write in parts of
    sectors, those that store `by_rows`; and thin ones for one pass over a large matrix (`thin_tiles`)."""
    family, swaps = arch.family.name, is_read_swapped(problem, arch)
    asked = needs_promotion(problem, arch), problem.epilogue.is_gated
    fitting = (x for x in shipped[family] if (x.promoted, x.gated) == asked and x.symmetric <= problem.symmetric)
    tiles = [(tile, swaps and not tile.symmetric) for tile in fitting]
    if problem.n <= FEW and not swaps:
        tiles += [(tile, False) for tile in narrow[family] if tile not in shipped[family]]
    found = [_candidate(problem, tile, flips) for tile, flips in tiles]
    few = narrow if problem.m <= FEW else swapped
    if is_swappable(problem):
        found += [_candidate(problem, tile, True, True) for tile in few.get(family, ())]
    if is_small(problem, arch) or is_raw(problem, arch):
        own = [(tile, False) for tile in direct[family]]
        own += [(tile, True) for tile in swapped_direct[family]] if problem.m <= FEW else []
        for tile, flips in own:
            if tile.cluster_k == 1 or problem.k > tile.cluster_k * tile.k_tile:  # else some have nothing to multiply
                found.append(_candidate(problem, tile, flips, flips))
    for flips, seen in ((False, problem), (True, problem.transposed)) if is_plain_half(problem) else ():
        found += [_candidate(problem, tile, flips, flips) for tile in thin_tiles(seen, thin.get(family, ()))]
    if _is_worth_rows(problem):
        found += [_candidate(problem, tile, False) for tile in rows.get(family, ())]
    return tuple(found)


def candidates_for_all(problem: Problem, arch: Arch, symbols: Symbols) -> tuple[Candidate, ...]:
    """Those of all sizes that stand for the range. No stream-K: which tiles it shares is best for one size alone."""
    found: dict[tuple[Tile, bool], Candidate] = {}
    for sizes in symbols.samples:
        for candidate in candidates(sized(problem, sizes), arch):
            own = dataclasses.replace(candidate, problem=problem.transposed if candidate.swapped else problem)
            found.setdefault((own.tile, own.swapped), own)
    return tuple(candidate for candidate in found.values() if not candidate.tile.stream_k)


def _candidate(problem: Problem, tile: Tile, flips: bool, for_few_rows: bool = False) -> Candidate:
    own = dataclasses.replace(tile, k_tile=k_tile(problem.a_dtype))
    return Candidate(own, problem.transposed if flips else problem, flips, for_few_rows=for_few_rows)


def is_swappable(problem: Problem) -> bool:
    """Whether C^T = B^T A^T is worth a look, with the rows as an MMA's columns. An n-major b whose result TMA cannot
    store has to be padded or transposed anyhow."""
    has_many = problem.epilogue.is_identity and DTYPE_BYTES[problem.a_dtype] == 2
    return (
        problem.m <= (SWAPPED_ROWS if has_many else SWAPPED_ROWS_OF_FEW)
        and not problem.epilogue.is_gated
        and (is_tma_storable(problem) or problem.b_major == "k")
    )


def is_small(problem: Problem, arch: Arch) -> bool:
    """Whether direct tiles, which read rows of any pitch, are worth a look: more work hides the latencies they save,
    but of short sums, which are little but their store."""
    halves = DTYPE_BYTES[problem.a_dtype] == 2 and not problem.epilogue.is_gated
    is_little = problem.flops <= DIRECT_FLOPS and problem.min_bytes <= DIRECT_BYTES
    return halves and (is_little or problem.k <= DIRECT_TERMS) and "direct" not in arch.family.lacks


def is_raw(problem: Problem, arch: Arch) -> bool:
    """Whether direct tiles, which read rows of any pitch, spare a product that is little but one pass over its larger
    operand two more, which would pad that."""
    halves = DTYPE_BYTES[problem.a_dtype] == 2 and not problem.epilogue.is_gated
    is_thin = min(problem.m, problem.n) <= FEW and (padding(problem, "a") > 0 or padding(problem, "b") > 0)
    return halves and is_thin and "direct" not in arch.family.lacks


def _is_worth_rows(problem: Problem) -> bool:
    is_torn = problem.c_major == "n" and is_tma_storable(problem) and ends_within_sectors(problem)
    return is_torn and DTYPE_BYTES[problem.a_dtype] == 2 and problem.epilogue.is_identity


def why_not_invariant(candidate: Candidate) -> str | None:
    """One sentence if a row that is computed by it does not have the bits that it has among any number of rows.

    Every tile adds an element's products in the order of k, one MMA of 32 bytes after the other, but where CTAs divide
    k: how many do, and where, follows from the number of rows. What is transposed for few rows, and a direct tile, has
    other kernels, whose epilogues may be compiled to other instructions, or be missing.
    """
    if candidate.tile.cluster_k > 1 or candidate.tile.stream_k:
        return 'it divides k, and `deterministic="batch"` has one order of summation'
    if candidate.for_few_rows or candidate.tile.direct:
        return 'it is for few rows or small products, and `deterministic="batch"` has one list of tiles'
    return None
