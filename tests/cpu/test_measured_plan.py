"""The planner with measured times, which of them `decision` hands it, and what `explain` says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_bwgemm
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.planner import measured
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.measured import CUBIN_DIGITS, Record, Table, Time
from jax_bwgemm.planner.order import raster
from jax_bwgemm.planner.plan import Plan, plan
from jax_bwgemm.runtime import artifacts
from jax_bwgemm.runtime.decision import decide, kernels, measurements

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PROBLEM, FEW_ROWS = Problem(4096, 4096, 4096), Problem(16, 4096, 4096)
TILES = {"hopper": (Tile(128, 256, cluster_m=2), Tile(128, 128), Tile(64, 128))}
NARROW = {"hopper": (Tile(128, 16), Tile(64, 16))}
BEST, MIDDLE, LAST = (str(tile) for tile in TILES["hopper"])  # as the model orders them for PROBLEM
DATE = "2026-01-01T00:00:00Z"
Saved = Callable[..., Record]  # of a problem, its times and, if not the user's, the table's path


def record(*times: tuple[str, float], problem: Problem = PROBLEM, swapped: bool = False) -> Record:
    return Record(measured.key(problem), DATE, tuple(Time(tile, swapped, us, "") for tile, us in times))


def planned(problem: Problem = PROBLEM, **settings: Any) -> Plan:
    return plan(problem, H200, among=candidates(problem, H200, TILES, NARROW, {"hopper": ()}), **settings)


def order(found: Plan) -> list[str]:
    return [str(candidate.tile) for candidate in found.candidates]


def test_without_times_the_model_chooses() -> None:
    for found in (planned(), planned(record=None), planned(record=record(("256x64x64_cta1_cluster1x1", 1.0)))):
        assert (str(found.tile), found.source, found.record) == (BEST, "model", None)
        assert all(candidate.measured_us is None for candidate in found.candidates)


def test_the_fastest_measured_wins_and_the_rest_follows() -> None:
    found = planned(record=record((MIDDLE, 5.0), (LAST, 3.0)))
    assert (str(found.tile), found.source) == (LAST, "measured")
    assert order(found) == [LAST, MIDDLE, BEST]
    assert [candidate.measured_us for candidate in found.candidates] == [3.0, 5.0, None]
    by_tile = plan(PROBLEM, H200, Tile.from_str(LAST))
    assert (found.raster_group, found.raster_along_n) == (by_tile.raster_group, by_tile.raster_along_n)


def test_a_measured_order_is_that_of_the_kernel_that_has_it() -> None:
    times = Time(LAST, False, 3.0, "", (32, 1)), Time(MIDDLE, False, 5.0, "", (16, 0))
    found = planned(record=Record(measured.key(PROBLEM), DATE, times))
    assert (str(found.tile), found.raster_group, found.raster_along_n) == (LAST, 32, 1)
    found = planned(record=Record(measured.key(PROBLEM), DATE, times), missing=lambda v: str(v.tile) == LAST or None)
    assert (str(found.tile), found.raster_group, found.raster_along_n) == (MIDDLE, 16, 0)
    other = plan(PROBLEM, H200, Tile.from_str(LAST), record=Record(measured.key(PROBLEM), DATE, times))
    assert (other.raster_group, other.raster_along_n) == raster(Tile.from_str(LAST), PROBLEM, H200) != (32, 1)


def test_a_tile_that_is_missing_or_illegal_does_not_win() -> None:
    def missing(variant: Variant) -> str | None:
        return "not built" if str(variant.tile) == LAST else None

    found = planned(record=record((LAST, 3.0), (MIDDLE, 5.0)), missing=missing)
    assert (str(found.tile), found.source) == (MIDDLE, "measured")
    assert planned(record=record((LAST, 3.0)), missing=missing).source == "model"
    small = dataclasses.replace(H200, smem_bytes=96 * 1024)
    among = candidates(PROBLEM, small, TILES, NARROW)
    found = plan(PROBLEM, small, among=among, record=record((BEST, 3.0), (LAST, 5.0)))
    assert str(found.tile) == LAST


def test_a_swapped_time_is_of_the_transposed_product() -> None:
    name = str(NARROW["hopper"][1])
    found = planned(FEW_ROWS, record=record((name, 1.0), problem=FEW_ROWS, swapped=True))
    assert (str(found.tile), found.swapped, found.source) == (name, True, "measured")
    found = planned(FEW_ROWS, record=record((name, 1.0), problem=FEW_ROWS, swapped=False))
    assert found.source == "model"


def test_the_users_tile_wins() -> None:
    found = plan(PROBLEM, H200, Tile.from_str(MIDDLE), record=record((LAST, 3.0)))
    assert (str(found.tile), found.source) == (MIDDLE, "model")


def times_of(problem: Problem, *tiles: Tile, swapped: bool = False) -> tuple[Time, ...]:
    """1, 2, ... us of the cubins at hand."""
    times = []
    for i, tile in enumerate(tiles):
        entry = artifacts.find(variant_for(problem.transposed if swapped else problem, tile, "sm_90a"))
        assert isinstance(entry, artifacts.Entry), entry
        times.append(Time(str(tile), swapped, 1.0 + i, entry.cubin_sha256[:CUBIN_DIGITS]))
    return tuple(times)


@pytest.fixture
def saved(artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Saves times as the user's, and returns what was saved."""
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path))
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")

    def save(
        problem: Problem, times: tuple[Time, ...], path: Path | None = None, xla_us: float | None = None
    ) -> Record:
        found = Record(measured.key(problem), DATE, times, xla_us)
        measured.save(Table("h200", {}, {found.problem: found}), path or measured.user_path("h200"))
        return found

    return save


WANTED = (Tile(64, 128), Tile(128, 128))


def test_a_decision_follows_the_table(saved: Saved) -> None:
    before = decide(PROBLEM, "h200", None)
    assert before.plan is not None and before.plan.source == "model" and before.plan.tile != WANTED[0]
    found = saved(PROBLEM, times_of(PROBLEM, *WANTED))
    after = decide(PROBLEM, "h200", None).plan
    assert after is not None and (after.tile, after.source, after.record) == (WANTED[0], "measured", found)
    for other in (decide(PROBLEM, "h100", None), decide(dataclasses.replace(PROBLEM, k=4104), "h200", None)):
        assert other.plan is not None and other.plan.source == "model"
    chosen = decide(PROBLEM, "h200", WANTED[1]).plan
    assert chosen is not None and chosen.tile == WANTED[1]


def test_lowering_emits_the_measured_kernel(saved: Saved) -> None:
    saved(PROBLEM, times_of(PROBLEM, *WANTED))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    lowered = jax.jit(lambda a, b: jax_bwgemm.matmul(a, b, device="h200")).trace(x, x)
    assert f"_{WANTED[0]}_identity" in lowered.lower(lowering_platforms=("cuda",)).as_text()


def test_times_of_another_build_are_ignored(saved: Saved) -> None:
    """All of them: what is left of them would not be a comparison."""
    first, second = times_of(PROBLEM, *WANTED)
    saved(PROBLEM, (first, dataclasses.replace(second, cubin="0" * CUBIN_DIGITS)))
    assert measurements(PROBLEM, H200) is None
    shipped = saved(PROBLEM, (first, second), measured.shipped_path("h200"))
    assert measurements(PROBLEM, H200) == shipped


def test_times_of_a_tile_that_has_no_name_any_more_are_ignored(saved: Saved) -> None:
    saved(PROBLEM, (*times_of(PROBLEM, *WANTED), Time("128x128_retired", False, 9.0, "")))
    assert measurements(PROBLEM, H200) is None


def test_a_kernel_that_is_gone_spoils_no_times(saved: Saved) -> None:
    gone = Time(str(Tile(128, 144)), False, 0.5, "0" * CUBIN_DIGITS)
    found = saved(PROBLEM, (gone, *times_of(PROBLEM, *WANTED)))
    assert measurements(PROBLEM, H200) == found
    decided = decide(PROBLEM, "h200", None).plan
    assert decided is not None and decided.tile == WANTED[0]


@pytest.mark.parametrize("epilogue", [chain(2.0), chain(1.0, True, "relu"), chain(2.0, True)])
def test_an_epilogue_borrows_the_products_times(saved: Saved, epilogue: Epilogue) -> None:
    fused = dataclasses.replace(PROBLEM, epilogue=epilogue)
    alone = saved(PROBLEM, times_of(PROBLEM, *WANTED))
    assert measurements(fused, H200) == alone
    assert measurements(fused, H200, borrows=False) is None


def test_its_own_times_come_first_and_a_residual_or_a_gate_borrows_none(saved: Saved) -> None:
    fused = dataclasses.replace(PROBLEM, epilogue=chain(1.0, True, "relu"))
    saved(PROBLEM, times_of(PROBLEM, *WANTED))
    own = saved(fused, times_of(fused, *WANTED[::-1]))
    assert measurements(fused, H200) == own
    for epilogue in (chain(has_residual=True), chain(1.0, True, "gelu"), chain(activation="silu")):
        assert measurements(dataclasses.replace(PROBLEM, epilogue=epilogue), H200) is None


def test_explain_prints_what_was_measured(saved: Saved) -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    assert "measured" not in str(jax_bwgemm.explain(x, x, device="h200"))
    saved(PROBLEM, times_of(PROBLEM, *WANTED))
    lines = str(jax_bwgemm.explain(x, x, device="h200")).splitlines()
    assert lines[1].split() == ["on", "h200", "measured", "predicted", "of", "peak", "waves", "bound", "by"]
    assert lines[2].startswith(f"-> {WANTED[0]}") and "1.0 us" in lines[2]
    assert lines[3].startswith(f"   {WANTED[1]}") and "2.0 us" in lines[3]
    assert lines[4].count(" us ") == 1  # predicted only, in the same column
    assert lines[4].index(" us ") == lines[3].rindex(" us ")
    why = next(line for line in lines if line.startswith("  tile:"))
    assert f"measured to be the fastest, 1.0 us before {WANTED[1]} ({DATE}, {measured.key(PROBLEM)})" in why
    assert "the only candidate" in str(jax_bwgemm.explain(x, x, device="h200", tile=WANTED[1]))
    saved(PROBLEM, times_of(PROBLEM, *WANTED), xla_us=1.1)
    assert f"us before {WANTED[1]}; XLA took 1.1 us ({DATE}, " in str(jax_bwgemm.explain(x, x, device="h200"))


def test_explain_says_that_an_order_was_measured(saved: Saved) -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    first, second = times_of(PROBLEM, *WANTED)
    saved(PROBLEM, (dataclasses.replace(first, order=(32, 1)), second))
    order = "  order:  groups of 32 columns of cluster tiles, measured to be faster than the planner's; every second"
    assert order in str(jax_bwgemm.explain(x, x, device="h200"))
    other = str(jax_bwgemm.explain(x, x, device="h200", tile=WANTED[0]))
    assert "of cluster tiles, so that concurrent ones share the L2 cache" in other


def test_explain_names_the_product_whose_times_were_borrowed(saved: Saved) -> None:
    x, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (4096,)))
    saved(PROBLEM, times_of(PROBLEM, WANTED[0]))
    text = str(jax_bwgemm.explain(x, x, bias=bias, activation="relu", device="h200"))
    assert f"the only one that was measured ({DATE}, {measured.key(PROBLEM)})" in text


def test_kernels_are_the_candidates_with_a_cubin_and_ignore_the_table(saved: Saved) -> None:
    saved(PROBLEM, times_of(PROBLEM, *WANTED))
    modelled, decisions = kernels(PROBLEM, H200)
    assert modelled.source == "model" and modelled.tile != WANTED[0]
    launchable = [(c.tile, c.swapped) for c in modelled.candidates if c.reason is None]
    assert [(d.plan.tile, d.plan.swapped) for d in decisions if d.plan] == launchable and len(launchable) > 10
    assert all(d.entry and d.plan and d.entry.variant == d.plan.variant for d in decisions)
    assert kernels(Problem(4096, 4096, 4096, a_dtype="int8"), H200)[1] == []
