"""The legality rule, one case a clause."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import B200, BEST_H200, FP8, H200, INT8, PAIR, PROBLEM, TF32, changed

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import ACC, Apply, Epilogue, chain, parse
from jax_bwgemm.facts.legality import is_read_swapped, why_not, why_not_tile
from jax_bwgemm.facts.shipped import SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import unit
from jax_bwgemm.planner.candidates import candidates

PAIRS = {"cta_group": 2, "cluster_m": 2}
ADDED = chain(has_residual=True)
GATED = Tile(128, 256, cluster_m=2, gated=True)
GATE = dataclasses.replace(PROBLEM, epilogue=unit("silu", is_gated=True))


@pytest.mark.parametrize(
    "tile, problem, arch",
    [
        (BEST_H200, PROBLEM, H200),
        (PAIR, PROBLEM, B200),
        (Tile(128, 144), PROBLEM, H200),
        (Tile(64, 16), PROBLEM, H200),
        (Tile(64, 256, pingpong=True), PROBLEM, H200),
        (Tile(128, 256, cluster_m=4, cluster_n=4), PROBLEM, B200),
        (Tile(128, 128, **PAIRS), PROBLEM, B200),
        (Tile(256, 256, **PAIRS, num_accs=2), PROBLEM, B200),
        (Tile(128, 128, cluster_k=4), PROBLEM, B200),
        (Tile(128, 256, k_tile=32), changed(**TF32), B200),
        (Tile(256, 256, k_tile=128, **PAIRS), changed(**INT8), B200),
        (BEST_H200, changed(k=4095), H200),
        (BEST_H200, changed(a_major="m", m=4095), H200),
        (BEST_H200, changed(n=4095), H200),
        (BEST_H200, changed(out_dtype="float32", epilogue=ADDED), H200),
        (Tile(128, 128, cluster_m=2, pingpong=True), changed(c_major="m", epilogue=ADDED), H200),
        (Tile(64, 16, stream_k=True), changed(c_major="m", epilogue=ADDED), H200),
        (PAIR, changed(epilogue=ADDED), B200),
    ],
)
def test_legal(tile, problem, arch):
    assert why_not(tile, problem, arch) is None


@pytest.mark.parametrize(
    "tile, problem, arch, sentence",
    [
        (
            Tile(128, 256, k_tile=32),
            PROBLEM,
            H200,
            "`k_tile` requires 64 elements (128 bytes), got 32",
        ),
        (
            Tile(128, 128, cluster_k=4),
            changed(epilogue=ADDED),
            H200,
            "a matrix that is read requires rows that TMA can step over and no split along k, got 4096x4096x4096 "
            "bfloat16*bfloat16->bfloat16 a:k-major b:n-major residual in 128x128x64_cta1_cluster1x1x4",
        ),
        (
            BEST_H200,
            changed(n=4095, epilogue=ADDED),
            H200,
            "a matrix that is read requires rows that TMA can step over and no split along k, got 4096x4095x4096 "
            f"bfloat16*bfloat16->bfloat16 a:k-major b:n-major residual in {BEST_H200}",
        ),
        (
            Tile(128, 256, cluster_m=3),
            PROBLEM,
            H200,
            "a cluster requires powers of two and at most 16 CTAs, got 3x1x1",
        ),
        (
            Tile(128, 256, cluster_m=8, cluster_n=4),
            PROBLEM,
            H200,
            "a cluster requires powers of two and at most 16 CTAs, got 8x4x1",
        ),
        (
            Tile(128, 128, cluster_m=2, cluster_k=2),
            PROBLEM,
            H200,
            "`cluster_k` above 1 requires cluster 1x1 and one accumulator, got 128x128x64_cta1_cluster2x1x2",
        ),
        (
            PAIR,
            PROBLEM,
            H200,
            "`cta_group` requires 1 on sm_90a (CTA pairs came with Blackwell), got 2",
        ),
        (
            Tile(96, 256),
            PROBLEM,
            H200,
            "`mma_m` requires one of (64, 128, 192, 256) on sm_90a, got 96",
        ),
        (
            Tile(128, 100),
            PROBLEM,
            H200,
            "`mma_n` requires a multiple of 16 in 16..256 on sm_90a, got 100",
        ),
        (
            Tile(128, 48, 32),
            changed(a_dtype="float32", b_dtype="float32", out_dtype="float32", b_major="k"),
            H200,
            "`mma_n` requires 16 or a multiple of 32 for float32 on sm_90a, got 48",
        ),
        (
            Tile(256, 256),
            PROBLEM,
            H200,
            "an accumulator requires at most 128 registers a thread, got 256 for 256x256",
        ),
        (
            Tile(128, 256, pingpong=True),
            PROBLEM,
            H200,
            "an accumulator requires at most 128 registers a thread, got 256 for 128x256",
        ),
        (
            Tile(256, 64, pingpong=True),
            PROBLEM,
            H200,
            "`mma_m` requires one of (64, 128) on sm_90a, got 256",
        ),
        (
            Tile(192, 208),
            PROBLEM,
            H200,
            "an accumulator requires at most 80 registers a thread, got 104 for 192x208",
        ),
        (
            Tile(192, 96, pingpong=True),
            PROBLEM,
            H200,
            "`mma_m` requires one of (64, 128) on sm_90a, got 192",
        ),
        (
            Tile(256, 192, stream_k=True),
            PROBLEM,
            H200,
            "an accumulator requires at most 128 registers a thread (192 in a kernel that only multiplies), "
            "got 192 for 256x192",
        ),
        (
            Tile(256, 176),
            changed(n=4095),
            H200,
            "an accumulator requires at most 128 registers a thread (192 in a kernel that only multiplies), "
            "got 176 for 256x176",
        ),
        (
            Tile(256, 208),
            PROBLEM,
            H200,
            "an accumulator requires at most 128 registers a thread, got 208 for 256x208",
        ),
        (
            Tile(128, 128, num_accs=2),
            PROBLEM,
            H200,
            "`num_accs` requires 1 on sm_90a (its accumulators are registers), got 2",
        ),
        (
            Tile(128, 256, pingpong=True),
            PROBLEM,
            B200,
            "`pingpong` requires sm_90a: a Blackwell epilogue overlaps through TMEM, got True",
        ),
        (
            Tile(128, 256, cta_group=3),
            PROBLEM,
            B200,
            "`cluster_m` requires a multiple of cta_group 3, got 1",
        ),
        (
            Tile(256, 256),
            PROBLEM,
            B200,
            "`mma_m` requires one of (64, 128) for cta_group 1, got 256",
        ),
        (
            Tile(64, 256, **PAIRS),
            PROBLEM,
            B200,
            "`mma_m` requires one of (128, 256) for cta_group 2, got 64",
        ),
        (
            Tile(128, 512),
            PROBLEM,
            B200,
            "`mma_n` requires a multiple of 16 in 16..256 for cta_group 1, got 512",
        ),
        (
            Tile(256, 208, **PAIRS),
            PROBLEM,
            B200,
            "`mma_n` requires a multiple of 32 in 32..256 for cta_group 2, got 208",
        ),
        (
            Tile(256, 256, cta_group=2),
            PROBLEM,
            B200,
            "`cluster_m` requires a multiple of cta_group 2, got 1",
        ),
        (
            Tile(64, 128, num_accs=2),
            PROBLEM,
            B200,
            "`num_accs` requires 1, or 2 where an MMA fills the 128 TMEM lanes, got 2 for mma_m 64",
        ),
        (
            Tile(128, 256, num_accs=3),
            PROBLEM,
            B200,
            "`num_accs` requires 1, or 2 where an MMA fills the 128 TMEM lanes, got 3 for mma_m 128",
        ),
        (
            BEST_H200,
            changed(a_dtype="float32"),
            H200,
            (
                "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16,"
                " float16 or float32, both the same, got float32 and bfloat16"
            ),
        ),
        (
            BEST_H200,
            changed(b_dtype="float16"),
            H200,
            (
                "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16,"
                " float16 or float32, both the same, got bfloat16 and float16"
            ),
        ),
        (
            BEST_H200,
            changed(out_dtype="int8"),
            H200,
            (
                "the result of bfloat16 and bfloat16 requires bfloat16 or float16 or float32 or float8_e4m3"
                "fn or float8_e5m2, got int8"
            ),
        ),
        (
            PAIR,
            changed(**INT8 | {"out_dtype": "bfloat16"}),
            B200,
            "the result of int8 and uint8 requires int32, got bfloat16",
        ),
        (
            BEST_H200,
            changed(a_major="n"),
            H200,
            "majors require a in ('k', 'm'), b in ('n', 'k') and the result in ('n', 'm'), got 'n', 'n' and 'n'",
        ),
        (
            BEST_H200,
            changed(**TF32),
            H200,
            "sm_90a requires a k-major b for float32 (PTX ISA, wgmma.mma_async; an m-major a goes through registers), "
            "got 'n'",
        ),
        (
            Tile(128, 256, k_tile=128),
            changed(**FP8 | {"b_major": "n"}),
            H200,
            "sm_90a requires a k-major b for float8_e4m3fn (PTX ISA, wgmma.mma_async; an m-major a goes through "
            "registers), got 'n'",
        ),
        (
            PAIR,
            changed(**INT8),
            ARCHS["b300"],
            "sm_100f has no tensor core instruction for int8",
        ),
        (
            BEST_H200,
            changed(m=0),
            H200,
            "`m` requires 1..2147483392, got 0",
        ),
        (
            BEST_H200,
            changed(k=2**31),
            H200,
            "`k` requires 1..2147483584, got 2147483648",
        ),
        (BEST_H200, changed(c_major="m", epilogue=chain(1.0, True).transposed), H200, None),
        (BEST_H200, changed(c_major="m", epilogue=chain(1.0, True)), H200, None),  # a vector across the rows
        (BEST_H200, changed(epilogue=Epilogue(Apply("mul", (ACC, Apply("sigmoid", (ACC,)))))), H200, None),
        (BEST_H200, changed(epilogue=Epilogue(seconds=(("before", ACC),))), H200, None),
        (
            BEST_H200,
            changed(epilogue=Epilogue(parse("add(add(acc, x:mn), add(y:mn, z:mn))"))),
            H200,
            "an epilogue requires at most 2 matrices to read, got 3",
        ),
        (
            BEST_H200,
            changed(epilogue=Epilogue(seconds=tuple((role, ACC) for role in "xyz"))),
            H200,
            "an epilogue requires at most 3 results, got 4",
        ),
        (
            Tile(128, 128, cluster_k=4),
            changed(epilogue=Epilogue(seconds=(("before", ACC),))),
            H200,
            "a second result requires rows that TMA can step over and no split along k, got 4096x4096x4096 "
            "bfloat16*bfloat16->bfloat16 a:k-major b:n-major identity_before_identity in "
            "128x128x64_cta1_cluster1x1x4",
        ),
        (GATED, GATE, H200, None),
        (dataclasses.replace(GATED, stream_k=True), GATE, H200, None),
        (
            BEST_H200,
            GATE,
            H200,
            "`gated` requires True for 4096x4096x4096 bfloat16*bfloat16->bfloat16 a:k-major b:n-major silu_gate, got "
            "128x256x64_cta1_cluster2x1",
        ),
        (
            GATED,
            PROBLEM,
            H200,
            f"`gated` requires False for {PROBLEM}, got 128x256x64_cta1_cluster2x1_gated",
        ),
        (
            dataclasses.replace(GATED, mma_n=192),
            GATE,
            H200,
            "`gated` requires 128 or 256 columns, no split along k and no promoted sums, got "
            "128x192x64_cta1_cluster2x1_gated",
        ),
        (
            GATED,
            GATE.transposed,
            H200,
            "a gated product requires one a and two b, got two a: it is not computed as its transpose",
        ),
        (
            dataclasses.replace(PAIR, mma_m=128, gated=True),
            GATE,
            B200,
            "`gated` requires a pair with mma_m 256, whose threads have all columns of their rows, got "
            "128x256x64_cta2_cluster2x1_gated",
        ),
    ],
)
def test_why_not(tile, problem, arch, sentence):
    assert why_not(tile, problem, arch) == sentence


def test_pipeline_needs_three_stages():
    small = dataclasses.replace(H200, smem_bytes=96 * 1024)
    sentence = "a pipeline requires 3 stages in 98304 bytes of shared memory, got 1"
    assert why_not_tile(BEST_H200, PROBLEM, small) == sentence


def test_tmem_is_limited():
    small = dataclasses.replace(B200, tmem_cols=128)
    assert why_not_tile(PAIR, PROBLEM, small) == "accumulators require at most 128 TMEM columns, got 256"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_every_shipped_tile_is_legal(arch):
    for candidate in candidates(PROBLEM, arch):
        assert why_not(candidate.tile, candidate.problem, arch) is None
        assert Tile.from_str(str(candidate.tile)) == candidate.tile


def test_shipped_tiles_are_distinct():
    for tiles in SHIPPED_TILES.values():
        assert len(set(tiles)) == len(tiles)


@pytest.mark.parametrize(
    "problem, swaps",
    [
        (changed(**FP8 | {"b_major": "n"}), True),
        (changed(**FP8), False),  # as they lie
        (changed(**FP8 | {"a_major": "m"}), False),
        (changed(**FP8 | {"a_major": "m", "b_major": "n"}), False),  # not even swapped
        (changed(**FP8 | {"b_major": "n", "n": 4104}), True),  # b is padded, the result is not
        (changed(**FP8 | {"b_major": "n", "n": 4097}), False),  # threads would store it
        (changed(**INT8 | {"b_major": "n"}), True),
        (changed(**INT8 | {"b_major": "n", "n": 4098}), False),
        (changed(**TF32, n=4097), True),
        (changed(**FP8 | {"b_major": "n"}, epilogue=chain(1.0, True)), True),
    ],
)
def test_is_read_swapped(problem, swaps):
    assert is_read_swapped(problem, H200) == swaps
    assert not is_read_swapped(problem, ARCHS["b200"])
