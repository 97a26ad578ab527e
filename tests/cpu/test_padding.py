"""The rule of padding: its edges, what it promises for every size, and that the launcher takes what it makes."""

from __future__ import annotations

import itertools
import math
import re

import ffi_cases
import pytest

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.padding import is_torn, padded_shape, padding, why_not_padded
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import ffi

H200 = ARCHS["h200"]
DTYPES = ("float8_e4m3fn", "bfloat16", "float32")


def of_k(k: int, dtype: str = "bfloat16") -> Problem:
    """Of which a has rows of `k`."""
    return Problem(64, 64, k, a_dtype=dtype, b_dtype=dtype)


@pytest.mark.parametrize(
    "k, dtype, row",
    [
        (8, "bfloat16", 8),
        (4096, "bfloat16", 4096),
        (4104, "bfloat16", 4104),  # starts off a line, but TMA can step over it: no pass for that
        (4093, "bfloat16", 4096),
        (4097, "bfloat16", 4160),
        (50257, "bfloat16", 50304),
        (9, "bfloat16", 16),  # a line were seven times as long
        (57, "bfloat16", 64),
        (455, "bfloat16", 456),  # 512 is 57 more, an eighth 56.9
        (457, "bfloat16", 512),
        (911, "float8_e4m3fn", 1024),
        (910, "float8_e4m3fn", 912),
        (227, "float32", 228),
        (229, "float32", 256),
        (1, "float8_e4m3fn", 16),
    ],
)
def test_rows(k: int, dtype: str, row: int) -> None:
    assert k + padding(of_k(k, dtype), "a") == row


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_every_size_can_count_on(dtype: str) -> None:
    """Nothing where TMA can step over the rows; else its 16 bytes, whole lines wherever they cost at most an eighth."""
    size = DTYPE_BYTES[dtype]
    for k in range(1, 3000):
        row, got = k * size, (k + padding(of_k(k, dtype), "a")) * size
        line = math.ceil(row / 128) * 128
        assert got % 16 == 0 and row <= got <= line
        if row % 16 == 0:
            assert got == row
        elif line / row <= 1.125:
            assert got == line
        else:
            assert got - row < 16
        assert is_torn(of_k(k, dtype), "a") == (got % 128 > 0)


@pytest.mark.parametrize(
    "majors, a, b",
    [
        ("kn", (3, 1001, 4160), (1, 4097, 152)),
        ("kk", (3, 1001, 4160), (1, 150, 4160)),
        ("mn", (3, 4097, 1024), (1, 4097, 152)),
        ("mk", (3, 4097, 1024), (1, 150, 4160)),
    ],
)
def test_shapes(majors: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    problem = Problem(1001, 150, 4097, 3, a_major=majors[0], b_major=majors[1], a_batch=3)
    assert (padded_shape(problem, "a"), padded_shape(problem, "b")) == (a, b)


@pytest.mark.parametrize(
    "problem, why",
    [
        (Problem(16, 50257, 768), "with 16 rows, .* padded b, whose rows of 100514 bytes"),
        (Problem(64, 50257, 768), "with 64 rows"),
        (Problem(65, 50257, 768), None),
        (Problem(16, 50257, 768, b_major="k"), None),  # rows of b have 768 elements
        (Problem(16, 4096, 4093, b_major="k"), None),  # a is padded as well, where XLA is slow
        (Problem(4097, 16, 4096, a_major="m"), "with 16 columns, .* padded a, whose rows of 8194 bytes"),
        (Problem(4097, 16, 4096), None),
        (Problem(16, 4096, 4097, 1, "int8", "int8", "int32", b_major="k"), None),  # not measured
    ],
    ids=str,
)
def test_where_padding_is_not_worth_it(problem: Problem, why: str | None) -> None:
    reason = why_not_padded(problem)
    assert reason is None if why is None else reason is not None and re.search(why, reason)
    found = plan(problem, H200)
    if reason is None:
        assert found.reason is None
    else:  # else XLA's, but direct tiles read rows as they lie
        assert found.tile is not None and found.tile.direct
        padding_alone = [c for c in found.candidates if not c.tile.direct]
        assert plan(problem, H200, among=padding_alone).reason == reason
    own = Tile(128, 128, k_tile=k_tile(problem.a_dtype))
    assert plan(problem, H200, own).tile == own, "a user's tile runs"


@pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
def test_the_launcher_takes_what_the_rule_makes(majors: str, dtype: str) -> None:
    """And k is the operands' own, but where both are padded along it."""
    for size, step in itertools.product(range(1, 1200, 7), (0, 3)):
        m, n, k = size, size + step, size + 2 * step
        problem = Problem(m, n, k, 2, dtype, dtype, "float32", majors[0], majors[1], a_batch=2, b_batch=1)
        request = ffi_cases.request(m, n, k, 2, 2, 1, majors, (dtype, dtype, "float32"), store="threads")
        request.a.dims[:], request.b.dims[:] = padded_shape(problem, "a"), padded_shape(problem, "b")
        plan = request.plan()
        assert [tuple(use.map.dims) for use in plan.buffers[:2]] == [padded_shape(problem, x)[::-1] for x in "ab"]
        at = plan.param_offsets[3]
        want = m, n, k + padding(problem, "a") if majors == "kk" else k
        assert tuple(int.from_bytes(plan.param_block[at + i : at + i + 4], "little") for i in (0, 4, 8)) == want
