"""What the benchmark writes: result files, tables, plots, and what they say of the machine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_results import LARGE, LOADS, RESULT, ROOT, THIN, times

from jax_bwgemm.bench import machine, render, report
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.arch import ARCHS


def test_a_result_file_is_what_was_measured(tmp_path: Path) -> None:
    path, result = tmp_path / "new" / "h200.json", dataclasses.replace(RESULT, sustained=LOADS)
    report.save(result, path)
    assert report.load(path) == result
    fields = json.loads(path.read_text())
    assert fields["format"] == 3 and fields["pause"] == 5 and fields["summary"]["rows"] == 3
    assert fields["rows"][0]["peers"]["no-triton"]["us"] == 120.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: fields.update(format=2),
        lambda fields: fields.update(unknown=1),
        lambda fields: fields.pop("rows"),
        lambda fields: fields.pop("pause"),
        lambda fields: fields.pop("summary"),
        lambda fields: fields["rows"][0].pop("ours"),
        lambda fields: fields["rows"][0].update(unknown=1),
        lambda fields: fields["rows"][0].update(shape="8x8"),
        lambda fields: fields["rows"][0]["ours"].pop("error"),
        lambda fields: fields["rows"][0]["peers"].pop("default"),
        lambda fields: fields["rows"][0]["peers"]["default"].update(unknown=1),
        lambda fields: fields["sustained"][0].pop("tflops"),
    ],
)
def test_an_unknown_or_missing_key_is_an_error(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    report.save(dataclasses.replace(RESULT, sustained=LOADS), path)
    fields = json.loads(path.read_text())
    damage(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="a result file requires what this version of `bench` writes"):
        report.load(path)


def test_committed_results_can_be_read() -> None:
    for path in machine.RESULTS.glob("*.json"):
        result = report.load(path)
        assert result.rows and result.arch in ARCHS


def test_best_is_the_fastest_set_of_flags_and_never_pallas() -> None:
    fast = dataclasses.replace(LARGE, peers=LARGE.peers | {"pallas": times(1.0)})
    assert fast.best == ("default", LARGE.peers["default"])
    assert THIN.best == ("no-triton", THIN.peers["no-triton"])
    assert (THIN.to_default, THIN.to_best) == (1.1, 0.95)


def test_summary_counts_every_row() -> None:
    found = report.summary(RESULT.rows)
    assert (found.rows, found.behind_best) == (3, 1)
    assert found.to_default == pytest.approx((1.1 * 1.1 * 1.0) ** (1 / 3))
    assert found.to_best == pytest.approx((1.1 * 0.95 * 1.0) ** (1 / 3))


def test_markdown_shows_every_row_and_the_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.save(RESULT, tmp_path / "h200.json")
    assert main(["bench", "--render", str(tmp_path / "h200.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "shape m x n x k | ours us | XLA us | best flags us | ratio to default | ratio to best | rate | of limit"
    assert lines[0] == f"| {head} |"
    assert lines[2] == "| 2048x2048x2048 | 100.0 | 110.0 | 110.0 | 1.100 | 1.100 | 172 TFLOP/s | 80 % |"
    assert lines[3] == "| 8x4096x4096 | 20.0 | 22.0 | 19.0 (no-triton) | 1.100 | 0.950 | 1.68 TB/s | 400 % |"
    assert lines[4].startswith("| 512x512x512:f32 | 50.0 (XLA) | 50.0 | 50.0 | 1.000 | 1.000 |")
    assert lines[6].startswith("NVIDIA H200, driver_version 580.1, date 2026-01-01, commit abc. CUPTI kernel time in ")
    assert "in bursts, each followed by a rest 5 times as long, median of 15 to 40 alternating rounds, " in lines[6]
    assert "(XLA): left to XLA, so both are XLA's: 512x512x512:f32." in lines[6]
    assert lines[6].endswith("Launch handler over 10000 calls: median 4.00 us, 0.50 us without cuLaunchKernelEx.")
    assert lines[8].endswith("at most 2.000 times jnp.dot's (2048x2048x2048: 2.00e-03 and 1.00e-03).")
    assert lines[10] == "Not measured: 9x9x9: no memory"
    least = "the least 0.950 (8x4096x4096)."
    assert lines[12] == f"Geometric mean of 3 rows: 1.066 to default, 1.015 to best; 1 below 0.97 to best, {least}"
    assert len(lines) == 13


def test_markdown_shows_what_was_asked_for() -> None:
    some = dataclasses.replace(LARGE, peers=LARGE.peers | {"pallas": times(123.4)})
    odd = dataclasses.replace(THIN, unavailable={"pallas": "m", "cublaslt": "No such option"})
    text = render.markdown(dataclasses.replace(RESULT, rows=(some, odd, odd), handler={}, sustained=LOADS))
    assert "| best flags us | Pallas us | ratio to default | ratio to best | ratio to Pallas | rate |" in text
    assert "| 110.0 | 123.4 | 1.100 | 1.100 | 1.234 |" in text
    assert "| 19.0 (no-triton) | - | 1.100 | 0.950 | - |" in text
    means, least = "1.100 to default, 0.998 to best, 1.234 to Pallas (of 1)", "the least 0.950 (8x4096x4096)."
    assert text.endswith(f"{means}; 2 below 0.97 to best, {least}")
    assert "cublaslt not available: No such option (rows: 2)." in text and "pallas not available" not in text
    assert "| 2048x2048x2048 | ours | 171.8 | 1.100 | 712.3 | 1.016 | 30 | 1655 | 700 | 71 |" in text
    assert "| 2048x2048x2048 | default | 156.2 | 1.000 | 701.3 | 1.000 | 30 | - | - | - |" in text
    assert "| 4096x4096x4096 | ours | - | - | 700.0 | 0.875 | 30 | 1700 | 698 | 70 |" in text
    assert "Launch handler" not in text


def test_no_set_of_flags_is_the_best_of_one() -> None:
    only = dataclasses.replace(LARGE, peers={"default": times(110.0), "pallas": times(123.4)})
    text = render.markdown(dataclasses.replace(RESULT, rows=(only, only)))
    assert text.startswith(
        "| shape m x n x k | ours us | XLA us | Pallas us | ratio to default | ratio to Pallas | rate |"
    )
    assert text.endswith("Geometric mean of 2 rows: 1.100 to default, 1.234 to Pallas.")


def test_a_result_without_rests_does_not_speak_of_bursts() -> None:
    text = render.markdown(dataclasses.replace(RESULT, pause=0))
    assert "CUPTI kernel time, median of 15 to 40 alternating rounds" in text and "burst" not in text


def test_plots_are_drawn_and_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report.save(RESULT, tmp_path / "h200.json")
    for name in ("one", "two"):
        assert main(["bench", "--render", str(tmp_path / "h200.json"), "--plots", str(tmp_path / name)]) == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["ratios.png", "ratios.svg", "roofline.png", "roofline.svg"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    drawn = (tmp_path / "one" / "ratios.svg").read_text()
    assert "512x512x512:f32 (ours: XLA)" in drawn and "best flags (mean 1.015)" in drawn
    drawn = (tmp_path / "one" / "roofline.svg").read_text()
    assert "bf16: 1071 TFLOP/s" in drawn and "f32: 535 TFLOP/s" in drawn and "4.3 TB/s" in drawn


def test_plots_without_matplotlib_are_one_sentence(tmp_path: Path) -> None:
    report.save(RESULT, tmp_path / "h200.json")
    code = "import sys; sys.modules['matplotlib'] = None\n"
    code += "from jax_bwgemm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["bench", "--render", str(tmp_path / "h200.json"), "--plots", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("which is not installed: pip install matplotlib\n")
    assert done.stderr.count("\n") == 1


def test_machine_facts_do_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = machine.describe()
    assert "driver_version" not in facts and facts["commit"] == "unknown"
    assert facts["date"] and facts["jax"]


def git(top: Path | None, revision: str, changed: str = "") -> Any:
    """A stand-in for git in the checkout `top`; None: outside of one."""

    def output(command: list[str]) -> str:
        if top is None:
            return ""
        return changed if "status" in command else f"{top}\n{revision}"

    return output


def test_the_commit_is_the_checkouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", git(ROOT, "0123456789abcdef"))
    assert machine.commit() == machine.commit("0123456") == "0123456789ab"
    with pytest.raises(ValueError, match="`--commit` requires this checkout's, 0123456789ab, got fedcba: leave it out"):
        machine.commit("fedcba")
    monkeypatch.setattr(machine, "_output", git(ROOT, "0123456789abcdef", " M README.md"))
    assert machine.commit() == "0123456789ab+"


@pytest.mark.parametrize("top", [None, Path("/somewhere/else")])
def test_the_commit_is_given_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, top: Path | None) -> None:
    monkeypatch.setattr(machine, "_output", git(top, "0123456789abcdef"))
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    assert (machine.commit(), machine.commit("fedcba")) == ("unknown", "fedcba")
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abcdef")
    assert (machine.commit(), machine.commit("fedcba")) == ("abcdef", "fedcba")


def test_nvidia_smi_is_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", lambda command: "1980 MHz, 690.12 W, 55")
    assert machine.query(machine.NOW) == {"clocks.sm": "1980 MHz", "power.draw": "690.12 W", "temperature.gpu": "55"}
    assert [machine.number(text) for text in ("1980 MHz", "690.12 W", "55", "[N/A]", "")] == [1980.0, 690.12, 55, 0, 0]
