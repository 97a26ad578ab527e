"""Contractions, and how arrays of any rank are viewed as a kernel's: by what a view says, against einsum."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_bwgemm.facts.contraction import Contraction, of_dot_general, of_matmul
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.planner.views import View, Way, view
from tests.fuzz import fuzz, rounds


def contraction(text: str) -> Contraction:
    operands, out = text.split("->")
    a, b, *extras = operands.split(",")
    return Contraction(a, b, out, tuple(extras))


def sized(text: str) -> dict[str, int]:
    """ "b2 m3" -> the sizes of modes."""
    return {mode: int(size) for mode, size in re.findall(r"(\w)(\d+)", text)}


def viewed(text: str, sizes: dict[str, int], sources: Any = (None, None), places: tuple[str, ...] = ()) -> View:
    return view(contraction(text), tuple(sizes.items()), sources, places=places)


@pytest.mark.parametrize(
    "text, sizes, want",
    [
        # l, m, n, k; majors of rows and columns; what is moved
        ("mk,kn->mn", "m4 k5 n6", (1, 4, 6, 5, "k", "mn", "")),
        ("mk,nk->mn", "m4 k5 n6", (1, 4, 6, 5, "k", "k", "")),
        ("km,kn->mn", "m4 k5 n6", (1, 4, 6, 5, "mn", "mn", "")),
        ("bsd,df->bsf", "b2 s3 d4 f5", (1, 6, 5, 4, "k", "mn", "")),  # a dense layer: its rows are one dimension
        ("bsd,bsf->df", "b2 s3 d4 f5", (1, 4, 5, 6, "mn", "mn", "")),  # its gradient: so is what is summed
        ("bmk,bkn->bmn", "b2 m3 k4 n5", (2, 3, 5, 4, "k", "mn", "")),
        ("bkm,kn->bmn", "b2 m3 k4 n5", (2, 3, 5, 4, "mn", "mn", "")),  # b is shared
        ("mk,bkn->bmn", "b2 m3 k4 n5", (2, 3, 5, 4, "k", "mn", "")),  # a is
        ("hgmk,hkn->hgmn", "h2 g3 m4 k5 n6", (2, 12, 6, 5, "k", "mn", "")),  # grouped-query attention
        ("bshk,hkd->bsd", "b2 s3 h4 k5 d6", (1, 6, 6, 20, "k", "mn", "")),
        ("mk,k->m", "m4 k5", (1, 1, 4, 5, "k", "k", "")),  # a vector has the rows
        ("mk,kn->nm", "m4 k5 n6", (1, 6, 4, 5, "mn", "k", "")),  # so has b, where the result has its modes first
        ("mk,kn->mn", "m1 k5 n6", (1, 1, 6, 5, "k", "mn", "")),
        ("amk,akn->amn", "a1 m4 k5 n6", (1, 4, 6, 5, "k", "mn", "")),
        ("bqhd,bkhd->bhqk", "b2 q3 k4 h5 d6", (10, 3, 4, 6, "k", "k", "ab")),
        ("bk,hkn->bhn", "b2 h3 k4 n5", (1, 2, 15, 4, "k", "k", "b")),
    ],
)
def test_views(text: str, sizes: str, want: tuple[Any, ...]) -> None:
    found = viewed(text, sized(sizes))
    rows, columns = found.rows[0], found.columns[0]
    moved = "".join(x for x, way in zip("ba" if found.flips else "ab", (rows, columns), strict=True) if way.moves)
    majors = rows.major, columns.major
    assert (found.batch, found.m, found.n, found.k, *majors, "".join(sorted(moved))) == want
    problem = found.problem("float16", "float32", "bfloat16", Epilogue(), False)
    assert (problem.batch, problem.m, problem.n, problem.k) == want[:4]
    assert problem.a_dtype == ("float32" if found.flips else "float16")


@pytest.mark.parametrize(("sizes", "major"), [("m4 k5 n1", "k"), ("m4 k1 n6", "mn")])
def test_a_vector_has_the_major_of_its_own_modes(sizes: str, major: str) -> None:
    """However it is written, and whatever it was before a transpose: there is no other."""
    for text, source in (("mk,nk->mn", "kn"), ("mk,kn->mn", "nk"), ("mk,nk->mn", None)):
        found = viewed(text, sized(sizes), (None, source))
        assert [way.major for way in found.columns] == [major] and not found.has_other[1] and not found.moves


def test_what_lies_before_a_transpose_is_another_way() -> None:
    """Under the other major; and the only one where what was given is no view."""
    found = viewed("mk,kn->mn", sized("m4 k5 n6"), (None, "nk"))
    assert [(way.is_given, way.major) for way in found.columns] == [(True, "mn"), (False, "k")]
    assert found.has_other == (False, True)
    found = viewed("bhqd,bhkd->bhqk", sized("b2 h3 q4 k5 d6"), ("bqhd", "bhdk"))
    assert [(way.is_given, way.major) for way in found.rows] == [(True, "k")]
    assert [(way.is_given, way.major) for way in found.columns] == [(True, "k"), (False, "mn")]
    found = viewed("qbhd,kbhd->bhqk", sized("b2 h3 q4 k5 d6"), ("bhqd", None))
    assert [(way.is_given, way.moves) for way in found.rows] == [(False, False)] and found.columns[0].moves


@pytest.mark.parametrize(
    "text, fuses",
    [
        ("mk,kn,n->mn", True),
        ("bmk,bkn,n->bmn", True),
        ("mk,kvn,vn->mvn", True),
        ("mk,kvn,n->mvn", True),  # repeated
        ("bmk,bkn,bn->bmn", False),  # a vector for each of a batch is XLA's
        ("mk,kn,m->mn", False),
    ],
)
def test_vectors_of_a_kernel_lie_along_n(text: str, fuses: bool) -> None:
    assert viewed(text, sized("b2 m3 k4 n5 v6"), places=("n",)).fuses == fuses


@pytest.mark.parametrize(
    "text, modes, place, want",
    [
        ("mk,kn->mn", "n", "n", (1, 4, 5)),
        ("mk,kn->mn", "m", "m", (1, 4, 5)),
        ("mk,kn->mn", "", "m", (1, 4, 5)),
        ("bmk,kn->bmn", "bn", "n", (2, 3, 5)),  # rows that are reduced apart are a batch
        ("bmk,kn->bmn", "n", "n", (1, 6, 5)),
        ("bmk,kn->bmn", "bm", "m", (1, 6, 5)),
        ("bmk,bkn->bmn", "n", "n", (2, 3, 5)),  # XLA reduces over the batch
        ("bmk,kn->bmn", "mn", "n", None),  # over a batch alone
        ("mk,kn->mn", "m", "n", None),
        ("mk,kn->nm", "n", "n", (1, 4, 5)),  # XLA turns the result, which is less than another pass over float32
    ],
)
def test_what_a_kernel_reduces(text: str, modes: str, place: str, want: tuple[int, ...] | None) -> None:
    """l, m and n, if it does: all rows or all columns."""
    sizes = sized("b2 m3 k4 n5") if "b" in text else sized("m4 k4 n5")
    of = dataclasses.replace(contraction(text), reduced=("".join(x for x in contraction(text).out if x in modes),))
    found = view(of, tuple(sizes.items()), reduced=(place,))
    assert found.fuses == (want is not None)
    assert want is None or (found.batch, found.m, found.n) == want


def test_one_column_is_a_row_and_its_bias_a_vector() -> None:
    """So that the result is contiguous; the one number is repeated."""
    found = viewed("mk,kn,n->mn", sized("m4 k5 n1"), places=("n",))
    assert (found.flips, found.fuses, found.m, found.n, found.column_modes) == (True, True, 1, 4, "m")


def test_symbolic_sizes_have_a_view() -> None:
    import jax

    m, n = jax.export.symbolic_shape("m, n")
    found = viewed("bmk,kn->bmn", {"b": 2, "m": m, "k": 5, "n": n})
    assert (found.m, found.n) == (2 * m, n)


@st.composite
def contractions(draw: Any) -> tuple[Contraction, dict[str, int], list[str | None]]:
    """Modes of every kind, in any order; and perhaps what an operand was before a transpose."""
    kinds = [draw(st.sampled_from(["a", "b", "ab", "abo"])) for _ in range(draw(st.integers(1, 6)))]
    modes = {chr(ord("a") + i): kind for i, kind in enumerate(kinds)}

    def shuffled(wanted: Any) -> str:
        return "".join(draw(st.permutations([mode for mode, kind in modes.items() if wanted(kind)])))

    found = Contraction(shuffled(lambda x: "a" in x), shuffled(lambda x: "b" in x), shuffled(lambda x: x != "ab"))
    sizes = {mode: draw(st.sampled_from([1, 2, 3])) for mode in modes}
    sources = [draw(st.one_of(st.none(), st.permutations(x).map("".join))) for x in (found.a, found.b)]
    return found, sizes, sources


def arranged(x: np.ndarray, modes: str, way: Way, source: str | None, sizes: dict[str, int]) -> np.ndarray:
    """What `ops.taking` emits for a way, in NumPy."""
    if not way.is_given:
        assert source is not None
        x, modes = x.transpose([modes.index(mode) for mode in source]), source
    kept = [mode for mode in modes if sizes[mode] != 1]
    x = x.reshape([sizes[mode] for mode in kept])
    if not way.moves:
        assert "".join(kept) == way.order
        return x.reshape(way.shape)
    order = [mode for mode in way.order if mode in kept]
    x = x.transpose([kept.index(mode) for mode in order])
    x = x.reshape([sizes[mode] if mode in order else 1 for mode in way.order])
    return np.broadcast_to(x, [sizes[mode] for mode in way.order]).reshape(way.shape)


@fuzz
@given(contractions())
@settings(deadline=None, max_examples=rounds(400))
def test_a_view_computes_the_contraction(case: Any) -> None:
    """Each way of either operand, as rows and columns; the result by its modes."""
    own, sizes, sources = case
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, [sizes[mode] for mode in modes]) for modes in (own.a, own.b))
    found = view(own, tuple(sizes.items()), tuple(sources))
    pairs = [(a, own.a, sources[0]), (b, own.b, sources[1])]
    first, second = pairs[::-1] if found.flips else pairs
    for rows in found.rows:
        for columns in found.columns:
            x = arranged(first[0], first[1], rows, first[2], sizes)
            y = arranged(second[0], second[1], columns, second[2], sizes)
            x = x if rows.major == "k" else x.swapaxes(1, 2)
            y = y.swapaxes(1, 2) if columns.major == "k" else y
            got = np.matmul(x, y)
            assert got.shape == (found.batch, found.m, found.n)
            kept = [mode for mode in own.out if sizes[mode] != 1]
            got = got.reshape([sizes[mode] for mode in found.out])
            got = got.transpose([found.out.index(mode) for mode in kept])
            want = np.einsum(f"{own.a},{own.b}->{own.out}", a, b)
            np.testing.assert_array_equal(got.reshape(want.shape), want)
    assert len({way.major for way in found.rows}) == len(found.rows)


def test_of_matmul() -> None:
    """Dimensions of size 1 that stretch are squeezed, missing ones are free; both of size 1 are a batch."""
    cases = {
        ((4, 5), (5, 6)): ("mk,kn->mn", (), ()),
        ((5,), (5, 6)): ("k,kn->n", (), ()),
        ((4, 5), (5,)): ("mk,k->m", (), ()),
        ((2, 1, 4, 5), (3, 5, 6)): ("amk,bkn->abmn", (1,), ()),
        ((2, 3, 4, 5), (2, 1, 5, 6)): ("abmk,akn->abmn", (), (1,)),
        ((1, 4, 5), (1, 5, 6)): ("amk,akn->amn", (), ()),
        ((1, 4, 5), (5, 6)): ("amk,kn->amn", (), ()),
    }
    for (a, b), (text, squeezed_a, squeezed_b) in cases.items():
        assert of_matmul(a, b) == (contraction(text), squeezed_a, squeezed_b)
        x, y = (np.arange(math.prod(shape)).reshape(shape) for shape in (a, b))
        got = np.einsum(text, np.squeeze(x, squeezed_a), np.squeeze(y, squeezed_b))
        np.testing.assert_array_equal(got, np.matmul(x, y))


def test_of_dot_general_and_back() -> None:
    numbers = (((3, 1), (0, 2)), ((0,), (3,)))
    found = of_dot_general(4, 4, numbers)
    assert (found.a, found.b, found.out) == ("abcd", "deba", "ace")
    assert found.dimension_numbers() == (((1, 3), (2, 0)), ((0,), (3,)))
    assert (found.batch, found.summed, found.free_a, found.free_b, found.dot_out) == ("a", "bd", "c", "e", "ace")


def test_gradients_are_contractions_of_the_same_modes() -> None:
    found = contraction("bmk,kn->bmn")
    assert (str(found.gradient_of_a), str(found.gradient_of_b)) == ("bmn,kn->bmk", "bmk,bmn->kn")


@pytest.mark.parametrize("text", ["mk,kn->m", "mkk,kn->mn", "mk,kn->mnz", "mk,kn,z->mn"])
def test_what_is_no_contraction(text: str) -> None:
    with pytest.raises(ValueError, match="a contraction requires"):
        contraction(text)


def test_letters_run_out() -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert contraction("mk,kn->mn").free_mode() not in "mkn"
    with pytest.raises(ValueError, match="at most 52 modes"):
        Contraction(letters, "", letters).free_mode()
