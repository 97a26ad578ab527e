"""A result of the benchmark that no machine measured: shared by the tests of the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_bwgemm.bench import report
from jax_bwgemm.facts.arch import ARCHS

ROOT = Path(__file__).parent.parent.parent
H200 = ARCHS["h200"]


def times(us: float, error: float = 1e-3, **fields: Any) -> report.Times:
    return report.Times(us, us - 1, us + 1, error, **fields)


def row(shape: str, us: float, default: float, **fields: Any) -> report.Row:
    flags = {"default": times(default), "cublaslt": times(default + 5), "no-triton": times(default + 10)}
    known = {"variant": "v", "fallback": "", "rotation": 1, "rounds": 15, "limit_us": 80.0, "unavailable": {}}
    return report.Row(shape, **known | {"ours": times(us), "peers": flags, "temperature_c": 45.0} | fields)


LARGE = row("2048x2048x2048", 100.0, 110.0, ours=times(100.0, 2e-3))
THIN = row("8x4096x4096", 20.0, 22.0, peers={"default": times(22.0), "no-triton": times(19.0)}, rounds=40)
FALLEN = row("512x512x512:f32", 50.0, 50.0, variant="", fallback="because")
LOADS = (
    report.Load("2048x2048x2048", "ours", 30.01, 712.34, 1655.2, 699.6, 71.0, 28),
    report.Load("2048x2048x2048", "default", 30.02, 701.26, 0.0, 0.0, 0.0, 0),
    report.Load("4096x4096x4096", "ours", 30.03, 700.0, 1700.4, 698.0, 70.0, 30),
    report.Load("4096x4096x4096", "default", 30.03, 800.0, 1700.4, 698.0, 70.0, 30),
)
MACHINE = {"name": "NVIDIA H200", "driver_version": "580.1", "date": "2026-01-01", "commit": "abc"}
HANDLER = {"own_us": 0.5, "total_us": 4.0, "calls": 10000.0}
RESULT = report.Result("h200", "CUPTI kernel time", 5, MACHINE, HANDLER, (LARGE, THIN, FALLEN), {"9x9x9": "no memory"})
