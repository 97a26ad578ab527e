"""The benchmark end to end on small rows: what was measured is what the row says. No time is judged."""

from __future__ import annotations

import math

import pytest

from jax_bwgemm.bench import peers, timing
from jax_bwgemm.bench import run as bench
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.programs import compile_peer, make_operands
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import ffi


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("512x256x512", 3e-3),
        ("2*256x128x64:nt", 3e-3),
        ("512x264x1024:tn->f32", 1e-5),
        ("255x257x253", 3e-3),
        ("512x512x512:nt:e4m3->bf16", 5e-3),
        ("256x256x256:f32", 2e-3),
        ("512x512x256:bias+gelu", 1e-2),
        ("512x512x256:bias+silu+residual", 1e-2),
        ("512x512x256:swiglu", 1e-2),
    ],
)
def test_a_row(text: str, bound: float, arch: Arch) -> None:
    case = Case.from_str(text)
    settings = bench.Settings([case], peers.PEERS)
    before = ffi.execute_count()
    row = bench.measure_case(case, arch, settings, timing.choose_clock()[1])
    assert (ffi.execute_count() > before) == bool(row.variant) == (row.fallback == "")
    assert row.variant or (case.dtype == "float32" and arch.target == "sm_90a")
    assert row.peers.keys() | row.unavailable.keys() == set(peers.PEERS) and set(peers.FLAG_SETS) <= set(row.peers)
    for times in (row.ours, *row.peers.values()):
        assert 0 < times.low <= times.us <= times.high and math.isfinite(times.us)
        assert 0 < times.error < bound


def test_cupti_is_the_clock(arch: Arch) -> None:
    assert timing.choose_clock()[0] == "CUPTI kernel time"


def test_every_pallas_configuration_runs(arch: Arch) -> None:
    if arch.target != "sm_90a":
        pytest.skip("Pallas' Hopper kernel")
    case = Case(512, 512, 512)
    found = peers.candidates("pallas", case, arch)
    assert len(compile_peer("pallas", case, arch, make_operands(case, 2))) == len(found) > 0


def test_load_is_sampled(arch: Arch) -> None:
    loads = bench.measure_load(Case(2048, 2048, 2048), arch, 5.0)
    assert [load.product for load in loads] == ["ours", "default"]
    assert all(load.samples > 0 and load.tflops > 0 and load.clock_mhz > 0 and load.power_w > 0 for load in loads)
