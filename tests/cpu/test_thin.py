"""Thin tiles: what a CTA has, by hand; where they are legal; and which products they are looked at for."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from pages import DOCS

from jax_bwgemm.bench import kernel_times
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.machine import RESULTS
from jax_bwgemm.facts import thin
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.resources import num_stages, num_threads, smem_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.cost import cost, roofline_us
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime.launch import request
from tests.cpu.fake_artifacts import fake_entry

H200, B200 = by_name("h200"), by_name("b200")
ROWS, COLUMNS = Tile(128, 8, direct=True), Tile(120, 8, direct=True)


@pytest.mark.parametrize(
    ("tile", "terms", "chunks", "stages", "size"),
    [
        (ROWS, 64, 4, 4, 65536 + 34304),  # 8 vectors of 2048 + 96 elements
        (COLUMNS, 128, 8, 3, 98304 + 10240),  # of each warp 8 of 64 + 16
    ],
)
def test_a_cta(tile: Tile, terms: int, chunks: int, stages: int, size: int) -> None:
    """A window of 128 rows by 64 terms has 1024 chunks of 8, for 256 threads 4 each; of 16 KiB 4 are 64 KiB."""
    major = thin.a_major_of(tile)
    assert (thin.window_terms(major), thin.window_chunks(major)) == (terms, chunks)
    assert num_stages(tile, "bfloat16", "bfloat16", H200) == stages
    assert smem_bytes(tile, "bfloat16", "bfloat16", H200) == size
    assert num_threads(tile, "sm_90a") == 256
    assert thin.CTAS * (size + 1024) <= 233472  # shared memory of an SM, CUDA C++ programming guide, 9.0
    sums = thin.WARPS if major == "m" else 1
    assert 4 * 8 * thin.SUMS * (sums + (major == "m")) <= thin.RING_BYTES[major]  # of all warps, and of them added


def test_places_of_chunks() -> None:
    """All of a block, each another. 8 lanes that write have a line's chunks; of those that read, with 4 lanes beside
    each other, rows g and g + 1 of a k-major matrix and chunks t, or t + 4; or lines 4t + i of an m-major one, and
    chunks g and g + 1: of 16 bytes in 8 banks' places, one each."""
    slots = {(line, chunk): thin.chunk_slot(line, chunk) for line in range(16) for chunk in range(8)}
    assert sorted(slots.values()) == list(range(128))
    written = [[(line, chunk) for chunk in range(8)] for line in range(16)]
    rows = [[(g + i, t + half) for i in (0, 1) for t in range(4)] for g in range(0, 16, 2) for half in (0, 4)]
    lines = [[(4 * t + i, g + j) for j in (0, 1) for t in range(4)] for g in range(0, 8, 2) for i in range(4)]
    for of_lanes in written + rows + lines:
        assert {slots[place] % 8 for place in of_lanes} == {*range(8)}


def test_places_of_sums() -> None:
    """All of 128, each another; what lanes store, 8 rows that are 8 apart by 4 pairs of columns, and what they read, 32
    rows, lies in 32 banks."""
    places = [thin.place_of_sum(row) for row in range(128)]
    assert len(set(places)) == 128 and max(places) < thin.SUMS
    assert {(2 * t * thin.SUMS + thin.place_of_sum(3 + 8 * g)) % 32 for t in range(4) for g in range(8)} == {*range(32)}
    assert {places[row] % 32 for row in range(32, 64)} == {*range(32)}


@pytest.mark.parametrize("major", ["k", "m"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_vectors_lie_in_different_banks(major: str, count: int) -> None:
    """Of what is read at a time: 16 bytes of 8 lanes, of 2 columns; or 8 of 16 lanes, of 4."""
    pitch, lanes, size = (thin.vector_pitch(major, thin.TERMS[major] // count), *((2, 16) if major == "k" else (4, 8)))
    found = {
        (g % count * pitch * 2 + t * size + byte) // 4 % 32
        for g in range(lanes)
        for t in range(4)
        for byte in range(size)
    }
    assert len(found) == min(count, lanes) * 4 * size // 4
    lines = 1 if major == "k" else 8
    assert 2 * lines * count * pitch <= thin.vector_bytes(major)
    assert pitch % 8 == 0 if major == "k" else pitch % 4 == 0  # of elements, that are read as 16 bytes or 8


PLAIN = Problem(4201, 1, 9543, a_major="m")


@pytest.mark.parametrize(
    ("tile", "problem", "what"),
    [
        (ROWS, PLAIN, "8 columns require 120 rows of a matrix that is m-major"),
        (COLUMNS, dataclasses.replace(PLAIN, a_major="k"), "8 columns require 128 rows of a matrix that is k-major"),
        (Tile(64, 8, direct=True), PLAIN, "8 columns require 120 rows"),
        (dataclasses.replace(COLUMNS, cluster_k=16), PLAIN, "requires a divisor of 120 rows"),
        (COLUMNS, dataclasses.replace(PLAIN, epilogue=chain(has_bias=True)), "no epilogue and all of k"),
        (dataclasses.replace(COLUMNS, cluster_m=2), PLAIN, "`direct` requires a cluster of one or along k"),
        (
            ROWS,
            Problem(4201, 1, 9543, a_dtype="float32", b_dtype="float32", b_major="k"),
            "`k_tile` requires 32 elements",
        ),
        (Tile(128, 8), PLAIN, "`mma_n` requires a multiple of 16"),
    ],
)
def test_what_is_not_legal(tile: Tile, problem: Problem, what: str) -> None:
    assert what in str(why_not(tile, problem, H200))


def test_another_family_has_none() -> None:
    assert "the Blackwell kernel loads by TMA" in str(why_not(COLUMNS, PLAIN, B200))


@pytest.mark.parametrize(
    ("problem", "arch", "found"),
    [
        (PLAIN, H200, {False}),
        (Problem(2, 8001, 12345), H200, {True}),  # of a transpose, its columns are few
        (Problem(7, 8001, 12345, b_major="k"), H200, {True}),
        (Problem(4201, 9, 9543, a_major="m"), H200, set()),  # more vectors than an MMA has
        (Problem(4200, 1, 9543, a_major="m"), H200, set()),  # TMA steps over its lines
        (Problem(4201, 1, 9544), H200, set()),
        (Problem(1001, 1, 1001), H200, {False}),
        (Problem(301, 1, 301), H200, set()),  # 0.2 MB: soon done
        (Problem(20001, 1, 119), H200, set()),  # little but the start and the store
        (dataclasses.replace(PLAIN, epilogue=chain(has_bias=True)), H200, set()),
        (dataclasses.replace(PLAIN, a_dtype="float32", b_dtype="float32", out_dtype="float32"), H200, set()),
        (PLAIN, B200, set()),
    ],
)
def test_where_thin_tiles_are_considered(problem: Problem, arch, found: set[bool]) -> None:
    assert {own.swapped for own in candidates(problem, arch) if own.tile.is_thin} == found


def test_a_short_sum_is_not_divided() -> None:
    found = candidates(Problem(40001, 1, 257), H200)
    assert {own.tile.cluster_k for own in found if own.tile.is_thin} == {1, 4}


@pytest.mark.parametrize(
    "problem", [PLAIN, Problem(11549, 1, 6291, b_major="k"), Problem(2, 8001, 12345), Problem(9770, 7, 15482)]
)
def test_large_matrices_have_one(problem: Problem) -> None:
    """Predicted within twice what moving the matrix takes; a launch has all stages."""
    found = plan(problem, H200)
    assert found.tile is not None and found.tile.is_thin and found.stages == 0
    assert found.chosen is not None and found.chosen.cost is not None
    assert roofline_us(problem, H200) < found.chosen.cost.us < 2 * roofline_us(problem, H200)
    entry = fake_entry(found.variant)
    attributes = request(found, entry).attributes
    assert attributes["smem_bytes"] == entry.smem_bytes and attributes["mma_n"] == 8
    assert attributes["tile_grid"] == (2 if found.variant.c_major == "n" else 1)


def test_more_ctas_than_there_is_room_for_take_turns() -> None:
    """132 SMs have room for 264; for clusters of 8 there are SMs for 30, as an H200 says of clusters on 4 SMs."""
    one, two = (cost(ROWS, Problem(m, 1, 641), H200).us for m in (264 * 128, 265 * 128))
    assert two > 1.2 * one
    divided = dataclasses.replace(ROWS, cluster_k=8)
    one, two = (cost(divided, Problem(m, 1, 6401), H200).us for m in (30 * 128, 31 * 128))
    assert two > 1.2 * one


def test_times_are_predicted() -> None:
    """All thin kernels that were timed on an H200 while these were made, and the constants fitted: half of the times
    within 6 %, nine tenths within 15, and none by more than half, but for a launch, which they do not have."""
    arch, timed = load(RESULTS / "regret/h200_thin.json")
    errors = sorted(
        abs(math.log((cost(tile, seen, arch).us - arch.constants.launch_us) / us))
        for product in timed
        for (tile, is_swapped), us in product.times_us.items()
        if tile.is_thin
        for seen in [product.problem.transposed if is_swapped else product.problem]
    )
    assert len(errors) > 150
    assert errors[len(errors) // 2] < 0.06 and errors[len(errors) * 9 // 10] < 0.15 and errors[-1] < 0.4


def test_choices_lose_little() -> None:
    """Of these products: to the fastest kernel, with what pads its operands."""
    arch, timed = load(RESULTS / "regret/h200_thin.json")
    lost = []
    for product in timed:
        found = plan(product.problem, arch)
        wholes = {
            key: us + cost(key[0], product.problem.transposed if key[1] else product.problem, arch).padding_us
            for key, us in product.times_us.items()
        }
        assert found.tile is not None
        if (own := wholes.get((found.tile, found.swapped))) is not None:
            lost.append(own / min(wholes.values()) - 1)
    assert len(lost) >= 70 and statistics.mean(lost) < 0.02


@pytest.mark.parametrize("form", [(11549, 1, 6291, "k", "k"), (10965, 2, 11981, "m", "n"), (7383, 6, 12772, "k", "k")])
def test_what_the_page_says_of_them(form: tuple[int, int, int, str, str]) -> None:
    _, timed = kernel_times.load(RESULTS / "regret/h200_thin.json")
    m, n, k, *majors = form
    problem = Problem(m, n, k, a_major=majors[0], b_major=majors[1])
    (times,) = [product.times_us for product in timed if product.problem == problem]
    thins, directs = (
        [us for (tile, _), us in times.items() if tile.direct and tile.is_thin == x] for x in (True, False)
    )
    name = f"{m}x{n}x{k}:{'nt' if majors[0] == 'k' else 'tn'}"
    assert f"| {name} | {min(thins):.1f} | {min(directs):.1f} |" in (DOCS / "hopper.md").read_text()
