"""Sizes that are symbols of `jax.export`: what they may be, and tiles that are right, and good, for all of that."""

from __future__ import annotations

import itertools
import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.symbols import PART_ENDS, Symbol, Symbols, sized, why_not_all, why_not_positive
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.scheduler import tile_coordinates, tile_order
from jax_bwgemm.ops.dimensions import stand_in
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.plan import plan
from tests.fuzz import fuzz, rounds

UP_TO_8192 = Symbols(m=Symbol("m", 1, 8192))


def asked(text: str, *constraints: str) -> Symbol:
    """What is known of the rows of a product."""
    (dim,) = jax.export.symbolic_shape(text, constraints=constraints)
    _, symbols = stand_in(Problem(dim, 1024, 512))
    assert symbols is not None and symbols.m is not None
    return symbols.m


@pytest.mark.parametrize(
    ("text", "constraints", "least", "most", "step"),
    [
        ("m", (), 1, None, 1),
        ("m", ("m <= 8192",), 1, 8192, 1),
        ("m", ("m >= 100", "m <= 300", "mod(m, 128) == 0"), 128, 256, 128),
        ("8*m", ("m <= 10",), 8, 80, 8),
        ("m", ("mod(m, 384) == 0",), 384, None, 384),
        ("2*m + 6", (), 8, None, 2),
        ("m - 1", ("m <= 5",), 0, 4, 1),
    ],
)
def test_what_is_known_of_a_symbol(text: str, constraints: tuple[str, ...], least: int, most: int, step: int) -> None:
    found = asked(text, *constraints)
    assert (found.least, found.most, found.step) == (least, most, step)


def test_a_product_of_symbols() -> None:
    b, s = jax.export.symbolic_shape("b, 8*s", constraints=["b <= 64", "8*s <= 2048"])
    known, symbols = stand_in(Problem(b * s, 1024, 512, batch=b, a_batch=b))
    assert symbols is not None and symbols.m is not None and symbols.batch is not None
    assert (symbols.m.most, symbols.m.step, symbols.batch.most) == (64 * 2048, 8, 64)
    assert known.is_static and known.m % 8 == 0 and known.a_batch == known.batch > 1 == known.b_batch


def test_known_sizes_stay() -> None:
    problem = Problem(128, 256, 512)
    assert stand_in(problem) == (problem, None)


@fuzz
@settings(max_examples=rounds(100))
@given(st.integers(1, 10**6), st.none() | st.integers(0, 10**4), st.integers(0, 9).map(lambda i: 2**i))
def test_parts_are_the_range(least: int, more: int | None, step: int) -> None:
    least = -(-least // step) * step
    symbol = Symbol("m", least, None if more is None else least + more * step, step)
    parts = [part.m for part in Symbols(m=symbol).parts]
    assert parts[0].least == least and parts[-1].most == symbol.most
    for part, later in itertools.pairwise(parts):
        assert part.most in PART_ENDS and later.least == part.most + 1
    for part in parts:
        sizes = [part.at(share) for share in (0, 0.5, 1)]
        assert sizes == sorted(sizes) and all(size % step == 0 for size in sizes)
        assert part.least <= sizes[0] and (part.most is None or sizes[-1] <= part.most)
    assert Symbols(m=parts[0]).up_to(Symbols(m=parts[-1])) == Symbols(m=symbol)


@pytest.mark.parametrize(("symbol", "rule"), [(Symbol("m", 0, 9), "got m for m, which may be 0"), (Symbol("m"), None)])
def test_nothing_to_multiply(symbol: Symbol, rule: str | None) -> None:
    reason = why_not_positive(Symbols(m=symbol))
    assert reason is None if rule is None else reason and rule in reason


@pytest.mark.parametrize(
    ("problem", "symbols", "rule"),
    [
        ({}, {"m": Symbol("t")}, None),
        ({"a_major": "m"}, {"m": Symbol("t", step=8)}, None),
        ({"a_major": "m"}, {"m": Symbol("t", step=4)}, r"a multiple of 8 .* got t for a: .* `mod\(t, 8\) == 0`"),
        ({"a_major": "m", "b_major": "n"}, {"k": Symbol("t")}, None),
        ({"b_major": "n"}, {"k": Symbol("t")}, "got t for a"),
        ({"b_major": "k", "a_major": "m"}, {"k": Symbol("t")}, "got t for b"),
        ({"b_major": "k"}, {"n": Symbol("t")}, "got t for the result"),
        ({"b_major": "k", "out_dtype": "float32"}, {"n": Symbol("t", step=4)}, None),
        ({}, {"m": Symbol("t", most=2**31 - 1)}, "`m` requires 1..2147483"),
        ({}, {"m": Symbol("t", most=2**28), "batch": Symbol("b", most=2**12)}, "at most .* cluster tiles"),
    ],
)
def test_a_tile_is_right_for_all_sizes(problem: dict, symbols: dict, rule: str | None) -> None:
    reason = why_not_all(Tile(128, 256, cluster_m=2), Problem(1024, 1024, 1024, **problem), Symbols(**symbols))
    assert reason is None if rule is None else re.search(rule, reason or "")


@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 1024)])
def test_what_is_chosen_for_a_range_is_nearly_the_best_for_each_size(device: str, shape: tuple[int, int]) -> None:
    arch, (n, k) = ARCHS[device], shape
    for part in UP_TO_8192.parts:
        made = plan(sized(Problem(1, n, k), part.middle), arch, symbols=part)
        assert made.tile is not None and part.m is not None and part.m.most is not None
        problem = Problem(3 * part.m.least // 2, n, k)  # at none of the sizes that it was judged by
        own = problem.transposed if made.swapped else problem
        assert why_not(made.tile, own, arch) is None
        least = min(c.cost.us for c in plan(problem, arch).candidates if c.cost)
        assert cost(made.tile, own, arch).us < 1.25 * least


def test_a_range_has_no_stream_and_no_measured_time() -> None:
    made = plan(sized(Problem(1, 4096, 4096), UP_TO_8192.middle), ARCHS["h200"], symbols=UP_TO_8192)
    assert made.candidates and not any(candidate.tile.stream_k for candidate in made.candidates)
    assert made.record is None


@fuzz
@settings(max_examples=rounds(50), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 64), st.booleans(), st.booleans())
def test_any_order_of_tiles_has_each_of_them_once(m: int, n: int, group: int, along_n: bool, is_snake: bool) -> None:
    """Attributes that were chosen for other sizes: a group may span more tiles than there are."""
    order = tile_order(m, n, group, int(along_n), int(is_snake))
    found = [tile_coordinates(idx, order) for idx in range(2 * m * n)]
    assert sorted(found) == sorted(itertools.product(range(m), range(n), range(2)))
