"""The benchmark's pure parts, and all of it once on a CPU with another product for ours. No time is judged."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.arch import ARCHS
from jax_bwgemm.bench import accuracy, machine, report, timing
from jax_bwgemm.bench import run as bench
from jax_bwgemm.bench.cases import DEFAULT, MAX_ROTATION, Case, rotation
from jax_bwgemm.cli.main import main
from jax_bwgemm.problem import Problem

ROW = report.Row("8x8x8", "v", 1, 100.0, 99.0, 101.0, 110.0, 109.0, 111.0, 80.0, 700.0, 1e-3, 2e-3, {"clocks.sm": "1"})
MACHINE = {"name": "NVIDIA H200", "driver_version": "580.1", "date": "2026-01-01"}
HANDLER = {"own_us": 0.5, "total_us": 4.0, "calls": 10000.0}
RESULT = report.Result("h200", "CUPTI kernel time", 21, MACHINE, HANDLER, (ROW,), {"9x9x9": "no kernel"})


@pytest.mark.parametrize("text", [*DEFAULT, "3*8x16x32:tn"])
def test_a_case_is_its_text(text: str) -> None:
    assert str(Case.from_str(text)) == text


@pytest.mark.parametrize("text", ["", "8x8", "8x8x8x8", "0x8x8", "8x8x8:tt", "0*8x8x8", "-1x8x8"])
def test_a_bad_case_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="a shape requires the form"):
        Case.from_str(text)


def test_forms_store_an_operand_transposed() -> None:
    case = Case(2, 3, 5, batch=7, form="tn")
    assert (case.a_shape, case.b_shape) == ((7, 5, 2), (7, 5, 3))
    assert (case.problem.a_major, case.problem.b_major) == ("m", "n")
    case = Case(2, 3, 5, form="nt")
    assert (case.a_shape, case.b_shape) == ((2, 5), (3, 5))
    assert (case.problem.a_major, case.problem.b_major) == ("k", "k")


def test_rotation_leaves_the_cache_behind() -> None:
    l2_bytes = 60 * 2**20
    assert rotation(Case(8192, 8192, 8192), l2_bytes) == 1
    assert rotation(Case(1024, 1024, 1024), l2_bytes) == 20  # 6 MiB each
    assert rotation(Case(64, 64, 64), l2_bytes) == MAX_ROTATION


def test_limit_is_compute_or_memory() -> None:
    arch = ARCHS["h200"]
    large, thin = Problem(8192, 8192, 8192), Problem(1, 8192, 8192)
    assert report.limit_us(large, arch) == pytest.approx(2 * 8192**3 / (132 * 1.98e3 * 4096))
    assert report.limit_us(thin, arch) == pytest.approx(thin.min_bytes / (arch.memory_tb_per_s * 1e6))


def test_summary_is_median_and_middle_half() -> None:
    assert timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0]) == timing.Sample(3.0, 2.0, 4.0)


def test_rounds_alternate_and_swap_who_goes_first() -> None:
    order: list[str] = []

    def measure(name: str) -> timing.Measure:
        return lambda: order.append(name) or float(len(order))  # type: ignore[func-returns-value]

    samples = timing.alternate({"ours": measure("ours"), "peer": measure("peer")}, 15)
    assert order[:4] == ["peer", "ours", "ours", "peer"]
    assert order.count("ours") == order.count("peer") == 15
    assert set(samples) == {"ours", "peer"}


def test_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="`--rounds` requires at least 15, got 14"):
        timing.alternate({}, 14)


def test_error_is_relative_and_of_the_last_matrix() -> None:
    case = Case(4, 6, 8, batch=2, form="nt")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(case.a_shape), rng.standard_normal(case.b_shape)
    rows, expected = accuracy.reference_rows(case, a, b)
    assert sorted(rows) == [0, 1, 2, 3]
    product = a @ b.swapaxes(1, 2)
    np.testing.assert_allclose(expected, product[1][rows])
    assert accuracy.relative_error(case, 1.01 * product, rows, expected) == pytest.approx(0.01)


def test_a_result_file_is_what_was_measured(tmp_path: Path) -> None:
    report.save(RESULT, tmp_path / "new" / "h200.json")
    assert report.load(tmp_path / "new" / "h200.json") == RESULT


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: fields.update(format=99),
        lambda fields: fields.update(unknown=1),
        lambda fields: fields.pop("rows"),
        lambda fields: fields["rows"][0].pop("ours_us"),
        lambda fields: fields["rows"][0].update(unknown=1),
    ],
)
def test_an_unknown_or_missing_key_is_an_error(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    report.save(RESULT, path)
    fields = json.loads(path.read_text())
    damage(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="a result file requires what this version of `bench` writes"):
        report.load(path)


def test_committed_results_can_be_read() -> None:
    for path in bench.RESULTS.glob("*.json"):
        result = report.load(path)
        assert result.rows and result.arch in ARCHS


def test_markdown_shows_every_row_and_the_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.save(RESULT, tmp_path / "h200.json")
    assert main(["bench", "--render", str(tmp_path / "h200.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| " + " | ".join(report.HEADINGS) + " |"
    assert lines[2] == "| 8x8x8 | 100.0 | 110.0 | 1.100 | 700 | 80 % | 1.00e-03 / 2.00e-03 |"
    assert lines[4].startswith("NVIDIA H200, driver_version 580.1, date 2026-01-01. CUPTI kernel time, median of 21 ")
    assert lines[4].endswith("Launch handler over 10000 calls: median 4.00 us, 0.50 us without cuLaunchKernelEx.")
    assert lines[5] == "Not measured: 9x9x9: no kernel"


def test_machine_facts_do_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = machine.describe()
    assert "driver_version" not in facts and "commit" not in facts
    assert facts["date"] and facts["jax"]


def test_nvidia_smi_is_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", lambda command: "1980 MHz, 690.12 W, 55")
    assert machine.query(machine.NOW) == {"clocks.sm": "1980 MHz", "power.draw": "690.12 W", "temperature.gpu": "55"}


def test_the_whole_pass_with_another_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ours", jnp.matmul)
    monkeypatch.setattr(bench, "measure_handler", lambda: {})
    monkeypatch.setattr(timing, "choose_clock", lambda: ("host", timing._host_clock))
    cases = [Case(32, 16, 64, batch=2, form="nt"), Case(16, 32, 8, form="tn")]
    result = bench.measure_all(cases, dataclasses.replace(ARCHS["h200"], l2_bytes=2**10), 15)
    assert [row.shape for row in result.rows] == ["2*32x16x64:nt", "16x32x8:tn"]
    for row in result.rows:
        assert row.ours_error == row.peer_error < 0.01
        assert row.ours_low_us <= row.ours_us <= row.ours_high_us
    assert "Launch handler" not in report.markdown(result)


def test_a_machine_without_a_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "128x128x128"]) == 2
    assert "`bench` requires a Hopper or Blackwell GPU, got none" in capsys.readouterr().err


def test_without_cupti_the_host_clock_is_named_and_used() -> None:
    method, clock = timing.choose_clock()
    assert method.startswith("host time of 20 calls, launches included")
    assert clock is timing._host_clock


def test_cupti_times_are_summed_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [("gemm", 0.25), ("reduce", 0.05), ("gemm", 0.26), ("reduce", 0.04)]
    profiler = types.ModuleType("profiler")
    profiler.measure = lambda function, aggregate: lambda *args: (None, kernels)  # type: ignore[attr-defined]
    package = types.ModuleType("gpu")
    package.profiler = profiler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax.experimental.mosaic.gpu", package)
    assert timing._kernel_clock(None, 2)() == pytest.approx(300.0)
    with pytest.raises(RuntimeError, match="CUPTI requires a kernel for each of 5 products, got 4"):
        timing._kernel_clock(None, 5)()
