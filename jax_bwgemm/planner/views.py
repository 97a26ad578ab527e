"""How a contraction of arrays of any rank is a product of (l, rows, k) and (l, k, columns) that a kernel can read.

An array is viewed, not moved, wherever the modes that become one dimension lie beside each other, in the same order in
all arrays. Where no view does, the fewest bytes are moved. Knows no JAX, no kernel and no device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem

GUESS = 1024  # for a size that only a run knows

Sizes = Mapping[str, int]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """An array becomes a kernel's: with its modes in `order` (those that it lacks are repeated), reshaped to `shape`.

    `is_given`: it is what the product was given; else what that was before a transpose. `moves`: `order` is not how it
    lies, a pass over it. Modes of size 1 are in no order.
    """

    is_given: bool
    order: str
    shape: Shape
    major: str
    moves: bool = False


@dataclasses.dataclass(frozen=True)
class View:
    """`rows` and `columns`: the ways of the two operands, the first that is taken, the second under the other major if
    that can be had for nothing. `flips`: b has the rows. `out`: the modes of (l, m, n); `row_modes`, `column_modes`:
    those of m and of n. `fuses`: all vectors that the epilogue reads are vectors of m or n, as it says, and its
    reductions go over all of the other."""

    m: int
    n: int
    k: int
    batch: int
    rows: tuple[Way, ...]
    columns: tuple[Way, ...]
    flips: bool
    out: str
    row_modes: str
    column_modes: str
    fuses: bool

    @property
    def moves(self) -> bool:
        """Whether an operand is rewritten because no view of it will do."""
        return self.rows[0].moves or self.columns[0].moves

    @property
    def lead(self) -> str:
        """The modes of l."""
        return self.out[: len(self.out) - len(self.row_modes) - len(self.column_modes)]

    @property
    def has_other(self) -> tuple[bool, bool]:
        return len(self.rows) > 1, len(self.columns) > 1

    def problem(
        self, a_dtype: str, b_dtype: str, out_dtype: str, epilogue: Epilogue, promoted: bool, symmetric: bool = False
    ) -> Problem:
        """Of the kernel's operands, of which the first is b if the view `flips`."""
        dtypes = (b_dtype, a_dtype) if self.flips else (a_dtype, b_dtype)
        a, b = self.rows[0], self.columns[0]
        return Problem(
            self.m, self.n, self.k, self.batch, *dtypes, out_dtype, "k" if a.major == "k" else "m",
            "k" if b.major == "k" else "n", a.shape[0], b.shape[0], epilogue, promoted=promoted,
            symmetric=symmetric,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Split:
    """The result's modes as (l, m, n); `flips`: b has the rows. `is_moved`: it lies in another order."""

    lead: str
    rows: str
    columns: str
    flips: bool
    is_moved: bool = False


@functools.lru_cache(maxsize=4096)
def view(
    contraction: Contraction,
    sizes: tuple[tuple[str, int], ...],
    sources: tuple[str | None, str | None] = (None, None),
    dtypes: tuple[str, str, str] = ("bfloat16",) * 3,
    places: tuple[str, ...] = (),
    reduced: tuple[str, ...] = (),
) -> View:
    """The one that moves the fewest bytes.

    `sizes`: of each mode. `sources`: the modes of a and of b from before a transpose, in the order in which they lie
    there. `places`: where the epilogue has its operands, "one", "m", "n" or "mn", in the order of `contraction.extras`;
    `reduced`: along which it has its reductions.
    """
    known = dict(sizes)
    guess = {mode: size if isinstance(size, int) else GUESS for mode, size in known.items()}
    real = {mode for mode, size in known.items() if not (isinstance(size, int) and size == 1)}

    def kept(modes: str) -> str:
        return "".join(mode for mode in modes if mode in real)

    a, b, out = kept(contraction.a), kept(contraction.b), kept(contraction.out)
    own = Contraction(a, b, out, tuple(map(kept, contraction.extras)), contraction.num_bs, contraction.symmetric)
    vectors = [(modes, place) for modes, place in zip(own.extras, places, strict=True) if place != "mn"]
    kept_by = list(zip(contraction.reduced, reduced, strict=True))
    stored = [
        [modes, *(() if source is None else (kept(source),))] for modes, source in zip((a, b), sources, strict=True)
    ]
    widths = [DTYPE_BYTES.get(dtype, 4) for dtype in dtypes]
    best: tuple[tuple[int, ...], View] | None = None
    for split in _splits(own):
        for summed in _orders(own, stored):
            found = _of_split(own, split, summed, stored, vectors, kept_by, guess, known, widths)
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None  # the canonical order is always one
    return best[1]


def _splits(own: Contraction) -> Iterator[_Split]:
    """All that need not move the result, and the one that always is."""
    out, batch = own.out, set(own.batch)
    for i, j in itertools.combinations_with_replacement(range(len(out) + 1), 2):
        lead, rows, columns = out[:i], out[i:j], out[j:]
        if not batch <= set(lead):
            continue
        ways = (own.free_a, own.free_b), (own.free_b, own.free_a)
        for flips, (x, y) in enumerate(ways[: 1 if own.num_bs > 1 else 2]):  # two b have no common rows
            if set(rows) <= set(x) and set(columns) <= set(y):
                yield _Split(lead, rows, columns, bool(flips))
    free = ["".join(mode for mode in modes if mode in x) for modes, x in ((own.a, own.free_a), (own.b, own.free_b))]
    yield _Split(own.batch, free[0], free[1], False, is_moved=True)


def _orders(own: Contraction, stored: Sequence[Sequence[str]]) -> Iterator[str]:
    """In which the summed modes lie somewhere."""
    summed = set(own.summed)
    yield from dict.fromkeys("".join(m for m in modes if m in summed) for lying in stored for modes in lying)


def _of_split(
    own: Contraction,
    split: _Split,
    summed: str,
    stored: Sequence[Sequence[str]],
    vectors: Sequence[tuple[str, str]],
    reduced: Sequence[tuple[str, str]],
    guess: Sizes,
    known: Sizes,
    widths: Sequence[int],
) -> tuple[tuple[int, ...], View]:
    """Its price, then what decides between equal ones; and the view."""
    first, second = (1, 0) if split.flips else (0, 1)
    rows, rows_bytes = _ways(stored[first], split.lead, split.rows, summed, guess, known, widths[first])
    columns, columns_bytes = _ways(stored[second], split.lead, split.columns, summed, guess, known, widths[second])
    out_elems = _size(own.out, guess)
    spans = {"one": "", "n": split.columns, "m": split.rows}
    fuses = all(set(modes) <= set(spans[place]) for modes, place in vectors)
    sides = {"n": (split.rows, split.columns), "m": (split.columns, split.rows)}
    fuses &= all(_reduces(*sides[place], modes, own) for modes, place in reduced)
    price = rows_bytes + columns_bytes + 2 * out_elems * widths[2] * split.is_moved + 8 * out_elems * (not fuses)
    found = View(
        _size(split.rows, known), _size(split.columns, known), _size(summed, known), _size(split.lead, known),
        rows, columns, split.flips, split.lead + split.rows + split.columns, split.rows, split.columns,
        fuses,
    )  # fmt: skip
    return (price, _size(split.lead, guess), not split.columns, split.flips), found


def _reduces(over: str, left: str, modes: str, own: Contraction) -> bool:
    """Whether a kernel that reduces the modes `over` and has those `left` leaves `modes`, or what XLA reduces to them.
    There is one that it reduces and one that it leaves, where there is any: a batch of single rows would be XLA's to
    reduce, and one of single columns a batch of thin products."""
    leaves = bool(left) or set(modes) <= set(own.batch)
    return not set(over) & set(modes) and leaves and (bool(over) or set(own.out) <= set(modes))


def _ways(
    stored: Sequence[str], lead: str, free: str, summed: str, guess: Sizes, known: Sizes, width: int
) -> tuple[tuple[Way, ...], int]:
    """One for each major that can be had for nothing, else the one that moves what was given; and the bytes of that. A
    vector has the major of its own modes, under which it is one row."""
    has = [mode for mode in lead if mode in stored[0]]
    own = lead if has else ""
    majors = {"k": own + free + summed, "mn": own + summed + free}
    if not (free and summed):
        majors.pop("k" if free else "mn")
    shapes = {
        "k": (_size(own, known), _size(free, known), _size(summed, known)),
        "mn": (_size(own, known), _size(summed, known), _size(free, known)),
    }
    found: dict[str, Way] = {}
    for i, modes in enumerate(stored):
        for major, order in majors.items():
            if modes == order and major not in found and len(found) <= i:
                found[major] = Way(i == 0, order, shapes[major], major)
    if found:
        return tuple(found.values()), 0
    major, order = next(iter(majors.items()))
    moved = Way(True, order, shapes[major], major, moves=True)
    return (moved,), (_size(stored[0], guess) + _size(order, guess)) * width


def _size(modes: str, sizes: Sizes) -> int:
    return math.prod(sizes[mode] for mode in modes)
