"""A family is a record: another one needs no other line of tile, legality, cost or plan."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import jax_bwgemm
from jax_bwgemm.facts import arch as archs
from jax_bwgemm.facts import resources
from jax_bwgemm.facts.arch import ARCHS, TARGETS, Arch, family_of
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.families import BLACKWELL, FAMILIES, HOPPER
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.shipped import NARROW_TILES, SHIPPED_TILES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.kernels.aot.catalog import ROWS
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.plan import plan

PROBLEM = Problem(5000, 5000, 5000)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
STREAMED = dataclasses.replace(PAIR, stream_k=True)
THIRD = dataclasses.replace(
    BLACKWELL,
    name="third",
    targets=("sm_999a",),
    mma_rows={2: (256,)},
    lacks={"pingpong": "nobody wrote one", "promoted": "sums are float32"},
    held_registers={},
    residual_warps=0,
    residual_buffers=4,
    raster_order="snake",
    lets_results_go=True,
)
PACKAGE = Path(jax_bwgemm.__file__).parent


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> Arch:
    monkeypatch.setitem(archs._FAMILY_OF, "sm_999a", THIRD)
    return dataclasses.replace(ARCHS["b200"], name="third", target="sm_999a")


def test_a_third_family_is_planned(third: Arch) -> None:
    """It has stream-K, which Blackwell lacks, a snake, and hints for results; another name in the lists is all that it
    takes."""
    assert third.family is THIRD and why_not(STREAMED, PROBLEM, ARCHS["b200"]) is not None
    both = plan(PROBLEM, third, among=candidates(PROBLEM, third, {"third": (PAIR, STREAMED)}, {"third": ()}))
    assert {c.tile for c in both.candidates if c.reason is None} == {PAIR, STREAMED}
    chosen = plan(PROBLEM, third, STREAMED)
    assert chosen.stream.tiles > 0 and chosen.raster_order == "snake"
    large = Problem(16384, 8192, 512)
    assert [plan(large, arch, PAIR).c_l2 for arch in (ARCHS["b200"], third)] == ["normal", "evict_first"]


def test_a_third_family_is_judged_by_its_own_limits(third: Arch) -> None:
    refused = {
        Tile(128, 128): "`cta_group` requires 2 on sm_999a (CTA pairs came with Blackwell), got 1",
        dataclasses.replace(PAIR, mma_m=128): "`mma_m` requires one of (256,) on sm_999a, got 128",
        dataclasses.replace(PAIR, pingpong=True): "`pingpong` requires sm_90a: nobody wrote one, got True",
    }
    assert {tile: why_not(tile, PROBLEM, third) for tile in refused} == refused


def test_a_third_family_has_its_own_warps_and_buffers(third: Arch) -> None:
    """A residual's boxes are the result's: no warp and no buffer of their own."""
    assert resources.num_threads(PAIR, "sm_100f", Moves(1)) - resources.num_threads(PAIR, "sm_999a", Moves(1)) == 32
    assert resources.epilogue_bytes(PAIR, "bfloat16", "sm_100f", Moves(1)) == 2 * 4 * 128 * 64
    assert resources.epilogue_bytes(PAIR, "bfloat16", "sm_999a", Moves(1)) == 4 * 128 * 64


def test_a_devices_own_constants() -> None:
    """Of two devices of a family, one that was measured may have others; the family's stay."""
    slow = dataclasses.replace(ARCHS["h200"].constants, l2_read_bytes_per_clk=20.0)
    device = dataclasses.replace(ARCHS["h200"], constants=slow)
    tile = Tile(128, 128)
    assert cost(tile, PROBLEM, device).us > 1.5 * cost(tile, PROBLEM, ARCHS["h200"]).us
    assert ARCHS["h200"].constants == HOPPER.constants


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_complete(family: archs.Family) -> None:
    assert [family_of(target) for target in family.targets] == [family] * len(family.targets)
    assert {target for arch in ARCHS.values() for target in arch.targets} == set(TARGETS) >= set(family.targets)
    assert family.name in SHIPPED_TILES.keys() & NARROW_TILES.keys() & ROWS.keys()
    assert {family.opcodes.half, family.opcodes.quarter, family.opcodes.integer} <= set(family.opcodes.counted)
    assert {*family.opcodes.demanded} <= set(family.opcodes.counted)
    assert family.lacks.keys() <= {field.name for field in dataclasses.fields(Tile)}
    for arch in (arch for arch in ARCHS.values() if arch.family is family):
        assert (arch.tmem_cols > 0) == family.sums_in_tmem


def test_nobody_asks_for_a_familys_name() -> None:
    names = {family.name for family in FAMILIES}
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and names & {side.value for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)}
    }
    assert asking == set()  # `compile` and `catalog` have a table by name
