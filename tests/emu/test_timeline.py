"""The Chrome trace and the instruction trace: what they hold, and that watching changes nothing."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule, Timeline, Trace
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.decision import decide
from jax_bwgemm.runtime.emulated import Kernel, kernel_of
from tests.emu.shipped import why_missing

PROBLEM = Problem(256, 264, 136)
KERNELS = {"b200": Tile(256, 256, cta_group=2, cluster_m=2), "h200": Tile(128, 256, cluster_m=2)}
TARGETS = {"b200": "sm_100f", "h200": "sm_90a"}
MISSING = (why_missing(variant_for(PROBLEM, tile, TARGETS[device])) for device, tile in KERNELS.items())
WHY_NOT = ffi.status() or next(filter(None, MISSING), None)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def kernel(device: str) -> Kernel:
    return kernel_of(decide(PROBLEM, device, KERNELS[device], is_emulated=True), PROBLEM, max_clusters=2)


def operands() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((1, 256, 136), (1, 136, 264))]


def spans(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """{(CTA, lane): sorted (start, end, name)}."""
    lanes = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {lane: sorted(found) for lane, found in lanes.items()}


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("schedule", Schedule.standard(seed=3), ids=lambda schedule: schedule.name)
def test_timeline(device: str, schedule: Schedule, tmp_path: pathlib.Path) -> None:
    """Valid JSON, lanes of every kind with names, and in no lane two events at once."""
    timeline = Timeline()
    out, counters = kernel(device).run(*operands(), schedule=schedule, observer=timeline)
    timeline.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = spans(events)
    assert all(start < end for found in lanes.values() for start, end, _ in found)
    for found in lanes.values():
        assert all(before[1] <= after[0] for before, after in zip(found, found[1:], strict=False))
    seen = collections.Counter(name for found in lanes.values() for _, _, name in found)
    assert {"run", "wait", "load a", "load b", "store c", "mma"} <= set(seen)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(named) == set(lanes)
    assert {name.rstrip("0123456789 ") for name in named.values()} >= {"warp", "TMA loads", "TMA stores", "tensor core"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"CTA {i}" for i in range(4)}
    assert sum(e["args"].get("instructions", 0) for e in events) == counters.instructions
    unwatched, _ = kernel(device).run(*operands(), schedule=schedule)
    np.testing.assert_array_equal(out, unwatched)


def test_a_warp_waits_between_its_runs_and_says_for_what() -> None:
    timeline = Timeline()
    kernel("b200").run(*operands(), schedule=Schedule(), observer=timeline)
    own = [e for e in timeline.events() if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 4)]
    own.sort(key=lambda event: event["ts"])
    assert [event["name"] for event in own[:3]] == ["run", "wait", "run"] and own[-1]["name"] == "run"
    assert all(before["ts"] + before["dur"] == after["ts"] for before, after in zip(own, own[1:], strict=False))
    assert any("mbarrier" in event["args"].get("for", "") for event in own)


def test_trace_holds_every_instruction_of_the_chosen_warp() -> None:
    """The MMA warp of the pair's first CTA issues, the second's does not."""
    traces: dict[int, list[str]] = {0: [], 1: []}
    for cta, lines in traces.items():
        _, counters = kernel("b200").run(*operands(), observer=Trace(cta, 4, lines.append))
    issued = [[line for line in lines if "tcgen05.mma" in line] for lines in traces.values()]
    assert issued[0] and not issued[1]
    assert all(" 1 lanes" in line for line in issued[0])
    assert traces[0][-1].split()[-1] == "ret" and counters.instructions > len(traces[0])
