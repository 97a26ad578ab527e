"""Sums of float8 products that keep float32: asked by an algorithm, needed on Hopper, done by tiles of their own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from lowered import calls, hlo, struct

import jax_bwgemm
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.resources import defers_store
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.ops.precision import canonical, promotes
from jax_bwgemm.planner import measured
from jax_bwgemm.planner.plan import plan

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PRESET = jax.lax.DotAlgorithmPreset
FP8 = {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn", "b_major": "k"}
ASKED = Problem(4096, 4096, 4096, **FP8, promoted=True)
FAST = dataclasses.replace(ASKED, promoted=False)
TILE = Tile(128, 128, 128, promoted=True)


@pytest.mark.parametrize(
    ("precision", "asked"),
    [
        (None, False),
        ("highest", False),
        (PRESET.DEFAULT, False),
        (PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM, False),
        (PRESET.ANY_F8_ANY_F8_F32, True),
    ],
)
def test_what_asks_for_it(precision: object, asked: bool) -> None:
    assert promotes(canonical(precision)) is asked


def test_its_own_tiles_and_no_others() -> None:
    assert Tile.from_str(str(TILE)) == TILE and str(TILE) == "128x128x128_cta1_cluster1x1_promoted"
    for problem in (ASKED, FAST):
        chosen = plan(problem, H200)
        assert chosen.tile is not None and all(c.tile.promoted == problem.promoted for c in chosen.candidates)
    assert not any(c.tile.promoted for c in plan(ASKED, B200).candidates)
    assert measured.key(ASKED) != measured.key(FAST) and str(ASKED) != str(FAST)


@pytest.mark.parametrize(
    ("tile", "problem", "arch", "reason"),
    [
        (
            TILE,
            FAST,
            H200,
            "`promoted` requires float8 operands, sm_90a and the algorithm ANY_F8_ANY_F8_F32, got",
        ),
        (Tile(128, 128, 128), ASKED, H200, "promoted sums require a tile with `promoted`, got 4096x"),
        (dataclasses.replace(TILE, mma_n=256), ASKED, H200, "an accumulator requires at most 64 registers"),
        (dataclasses.replace(TILE, cluster_k=2), ASKED, H200, "`promoted` requires no ping-pong and no split along k"),
        (dataclasses.replace(TILE, stream_k=True), ASKED, H200, "`promoted` requires no ping-pong and no split"),
        (TILE, ASKED, B200, "`promoted` requires sm_90a: Blackwell's tensor cores sum in float32"),
        (dataclasses.replace(TILE, k_tile=64), Problem(64, 64, 64, promoted=True), H200, "`promoted` requires float8"),
    ],
)
def test_why_not(tile: Tile, problem: Problem, arch: Arch, reason: str) -> None:
    assert (why_not(tile, problem, arch) or "").startswith(reason)


def test_two_byte_operands_have_nothing_to_promote() -> None:
    """The flag is about float8: a bfloat16 product has its usual tiles, with it as without."""
    asked = Problem(4096, 4096, 4096, promoted=True)
    assert plan(asked, H200).tile == plan(dataclasses.replace(asked, promoted=False), H200).tile


def test_registers() -> None:
    """64 of sums, twice, and 32 of a rounded bfloat16 result; with a float32 one, 64 more, it is still deferred."""
    assert defers_store(TILE, "bfloat16", "tma", "sm_90a") and defers_store(TILE, "float32", "tma", "sm_90a")


def test_lowering(artifacts_dir) -> None:
    x, w = struct(512, 256, dtype=jnp.float8_e4m3fn), struct(1024, 256, dtype=jnp.float8_e4m3fn)

    def variant(device: str, precision: object) -> str:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            options = {"device": device, "on_fallback": "error", "precision": precision}
            return jax_bwgemm.matmul(x, w.T, out_dtype=jnp.bfloat16, **options)

        (call,) = calls(hlo(product, x, w))
        return call["variant"]

    exact, fast = PRESET.ANY_F8_ANY_F8_F32, PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM
    assert "_promoted_" in variant("h200", exact)
    assert "_promoted_" not in variant("h200", fast) and variant("h200", fast) == variant("h200", None)
    assert variant("b200", exact) == variant("b200", None)


def test_explain_says_so() -> None:
    x, w = struct(512, 256, dtype=jnp.float8_e4m3fn), struct(256, 1024, dtype=jnp.float8_e4m3fn)
    text = str(jax_bwgemm.explain(x, w, device="h200", out_dtype=jnp.bfloat16, precision=PRESET.ANY_F8_ANY_F8_F32))
    assert "identity promoted" in text and "_promoted" in text
