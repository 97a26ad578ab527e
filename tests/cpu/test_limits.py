"""What the planner accepts, the launcher launches: of any sizes, up to those that only int32 and 40 bits end."""

from __future__ import annotations

import dataclasses

import fake_machine
import pytest
from fake_artifacts import fake_entry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import B200, H200

from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.geometry import cluster_tiles, concurrent_clusters, num_tiles
from jax_bwgemm.facts.legality import MAX_CLUSTER_TILES, MAX_MATRIX_BYTES, why_not
from jax_bwgemm.facts.padding import padded_shape
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, DTYPE_BYTES, Problem
from jax_bwgemm.facts.recipe import leaf_bytes
from jax_bwgemm.facts.tile import INT32_MAX, Tile, k_tile
from jax_bwgemm.kernels.aot.refusals import lay_out
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.plan import Plan, plan
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.launch import request
from tests.fuzz import fuzz, rounds

pytestmark = fake_machine.needs
NEAR = st.builds(lambda exponent, more: max(1, 2**exponent + more), st.integers(0, 31), st.integers(-300, 300))
SIZES = st.one_of(st.integers(1, 300), NEAR)
DTYPES = st.sampled_from(
    [("bfloat16",) * 3, ("float16", "float16", "float32"), ("float32",) * 3, ("int8", "uint8", "int32"),
     ("float8_e4m3fn", "float8_e5m2", "bfloat16")]
)  # fmt: skip
EPILOGUES = st.builds(chain, st.sampled_from([1.0, 0.5]), st.booleans(), st.sampled_from([None, "relu"]), st.booleans())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of any sizes, and often one that one more or less takes over a limit: of tiles, or of an operand's bytes."""
    a_dtype, b_dtype, out_dtype = draw(DTYPES)
    m, n, k, batch = (draw(SIZES) for _ in range(4))
    width, more = DTYPE_BYTES[a_dtype], draw(st.integers(-300, 300))
    kind = draw(st.sampled_from(["any", "any", "tiles", "a", "b", "out"]))
    if kind == "tiles":
        batch = MAX_CLUSTER_TILES // (-(-m // 256) * -(-n // 256)) + more
    elif kind == "a":
        m = MAX_MATRIX_BYTES // (k * width) + more
    elif kind == "b":
        n = MAX_MATRIX_BYTES // (k * width) + more
    elif kind == "out":
        m = MAX_MATRIX_BYTES // (n * DTYPE_BYTES[out_dtype]) + more
    m, n, batch = (max(1, size) for size in (m, n, batch))
    shared = [1 if draw(st.booleans()) else batch for _ in range(2)]
    epilogue = chain() if out_dtype == "int32" else draw(EPILOGUES)
    majors = draw(st.sampled_from(A_MAJORS)), draw(st.sampled_from(B_MAJORS))
    return Problem(m, n, k, batch, a_dtype, b_dtype, out_dtype, *majors, *shared, epilogue)


def entry_of(found: Plan) -> Entry:
    """With the leaves of a real kernel, whose ranges the launcher checks."""
    variant = found.variant
    assert variant is not None
    entry = fake_entry(variant)
    sources = [leaf.source for leaf in entry.recipe.params] + ["step:0", "step:1", "int:raster_group[1..]"]
    sources += ["int:raster_along_n[0..1]", "int:raster_order[0..1]", "l2:a_l2", "l2:b_l2", "l2:c_l2"]
    sources += ["int:stream_tiles", "int:stream_clusters", "token"] if variant.tile.stream_k else []
    sources += [f"float:{role}" for role, _ in found.problem.epilogue.scalars]
    leaves = lay_out(tuple((source, leaf_bytes(source)) for source in sources))
    return dataclasses.replace(entry, recipe=dataclasses.replace(entry.recipe, params=leaves))


def launch(found: Plan) -> ffi.LaunchPlan:
    assert found.tile is not None
    made = request(found, entry_of(found))
    operands, results = ([ffi.Buffer.of(x.dtype, x.shape) for x in arrays] for arrays in (made.operands, made.results))
    return ffi.launch_plan(made.attributes, operands, results, concurrent_clusters(found.tile, found.arch))


@fuzz
@settings(max_examples=rounds(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), arch=st.sampled_from(list(ARCHS.values())))
def test_what_the_planner_accepts_is_launched(problem: Problem, arch: Arch) -> None:
    """Every candidate that is legal, not only the one that would be chosen."""
    for candidate in candidates(problem, arch):
        if why_not(candidate.tile, candidate.problem, arch) is not None:
            continue
        found = plan(problem, arch, among=(candidate,))
        if found.tile is None:  # XLA is sooner done
            continue
        launched = launch(found)
        assert launched.num_cluster_tiles == num_tiles(found.tile, found.problem)
        for tiles, span, size in zip(
            cluster_tiles(found.tile, found.problem),
            (found.tile.cluster_m * found.tile.cta_m, found.tile.cluster_n * found.tile.mma_n),
            (found.problem.m, found.problem.n),
            strict=True,
        ):
            assert size <= tiles * span <= INT32_MAX  # as a kernel counts its tiles, in int32


POWERS = st.sampled_from([1, 1, 1, 2, 4, 8, 16])
TILES = st.builds(
    Tile,
    st.sampled_from([64, 128, 192, 256]),
    st.integers(1, 16).map(lambda n: 16 * n),
    st.sampled_from([32, 64, 128]),
    cta_group=st.sampled_from([1, 2]),
    cluster_m=POWERS,
    cluster_n=POWERS,
    cluster_k=POWERS,
    num_accs=st.sampled_from([1, 1, 2]),
    pingpong=st.booleans(),
    stream_k=st.booleans(),
)
DIRECT = st.builds(Tile, st.sampled_from([64, 128, 256]), st.sampled_from([16, 32, 64, 128]), direct=st.just(True))
BY_ROWS = st.builds(Tile, st.sampled_from([64, 128, 256]), st.sampled_from([64, 128, 256]), by_rows=st.just(True))


@fuzz
@settings(max_examples=rounds(2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), arch=st.sampled_from(list(ARCHS.values())), tile=st.one_of(TILES, DIRECT, BY_ROWS))
def test_so_is_any_tile_of_the_users(problem: Problem, arch: Arch, tile: Tile) -> None:
    tile = dataclasses.replace(tile, k_tile=k_tile(problem.a_dtype))
    if why_not(tile, problem, arch) is None:
        assert launch(plan(problem, arch, tile)).num_cluster_tiles == num_tiles(tile, problem)


FP8 = ("float8_e4m3fn",) * 2


@pytest.mark.parametrize(
    ("problem", "tile", "sentence"),
    [
        (Problem(128, 256, 64, MAX_CLUSTER_TILES), Tile(128, 256), None),
        (
            Problem(128, 256, 64, MAX_CLUSTER_TILES + 1),
            Tile(128, 256),
            "a launch requires at most 2147418112 cluster tiles, got 1 x 1 x 2147418113: split the batch",
        ),
        (
            Problem(2**30, 8, 2**9 + 8),
            Tile(128, 128),
            r"TMA requires a matrix of less than 2\^40 bytes, got 1073741824 rows of 1040 bytes for `a`: split it",
        ),
        (Problem(2**30 - 128, 8, 2**9), Tile(128, 128), None),
        (Problem(2**30, 8, 2**9), Tile(128, 128), "less than 2.40 bytes, got 1073741824 rows of 1024 bytes for `a`"),
        (Problem(2**9, 2**30, 8, b_major="k"), Tile(128, 128), "rows of 2147483648 bytes for the result: split it"),
        (Problem(8, 2**30, 2**9, b_major="k"), Tile(128, 128), "rows of 1024 bytes for `b`: split it"),
        (Problem(8, 2**21, 2**18), Tile(128, 128), "got 262144 rows of 4194304 bytes for `b`: split it"),
        (Problem(2**31 - 1, 8, 8), Tile(128, 128), r"`m` requires 1..2147483520, got 2147483647"),
        (Problem(2**31 - 128, 8, 8), Tile(128, 128), None),
        (Problem(8, 8, 2**31 - 1, b_major="k"), Tile(128, 128), r"`k` requires 1..2147483584, got 2147483647"),
        (Problem(8, 2**31 - 1, 8), Tile(128, 256, cluster_m=2), r"`n` requires 1..2147483392, got 2147483647"),
        (
            Problem(2**31 - 65, 8, 128, 1, *FP8, "bfloat16", "m", "k"),
            Tile(64, 128, 128),
            r"padding requires rows of at most 2147483647 elements, got 2147483648 for `a`",
        ),
    ],
)  # fmt: skip
def test_a_limit(problem: Problem, tile: Tile, sentence: str | None) -> None:
    """One below it is launched; at it, the planner says so, with what there is to do."""
    reason = why_not(tile, problem, H200)
    if sentence is None:
        assert reason is None and launch(plan(problem, H200, tile)).num_cluster_tiles > 0
    else:
        pytest.raises(ValueError, plan, problem, H200, tile).match(sentence)


def test_xla_takes_what_no_launch_can_count() -> None:
    for arch in (H200, B200):
        assert "cluster tiles" in (plan(Problem(8, 8, 8, 2**31 - 1), arch).reason or "")


def test_padding_is_part_of_an_operands_bytes() -> None:
    problem = Problem(2**21, 8, 2**18 - 3)
    assert padded_shape(problem, "a")[2] == 2**18
    assert "rows of 524288 bytes for `a`" in (why_not(Tile(128, 128), problem, H200) or "")
