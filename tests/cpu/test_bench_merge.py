"""Several runs of the benchmark as one: medians over processes."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench_results import FALLEN, LARGE, LOADS, RESULT, THIN

from jax_bwgemm.bench import merge, render, report
from jax_bwgemm.bench import run as bench
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.cli.main import main


def _with(row: report.Row, ours_us: float, best_us: float, **changes: Any) -> report.Row:
    """A row of other times, within a tenth of which the middle half of the rounds is."""

    def times(old: report.Times, us: float) -> report.Times:
        return dataclasses.replace(old, us=us, low=0.9 * us, high=1.1 * us, config=f"took {us:g}")

    peers = row.peers | {"no-triton": times(row.peers["no-triton"], best_us)}
    return dataclasses.replace(row, ours=times(row.ours, ours_us), peers=peers, **changes)


def _of(*rows: report.Row, **changes: Any) -> report.Result:
    return dataclasses.replace(RESULT, rows=rows, **changes)


def test_times_are_medians_over_processes() -> None:
    runs = [_of(_with(LARGE, *us)) for us in ((100.0, 90.0), (130.0, 99.0), (110.0, 80.0))]
    (row,) = merge.merge(runs).rows
    assert row.processes == 3 and row.rounds == 3 * LARGE.rounds and row.variant == LARGE.variant
    assert (row.ours.us, row.ours.low, row.ours.high, row.ours.config) == (
        110.0,
        99.0,
        pytest.approx(121.0),
        "took 110",
    )
    assert row.peers["no-triton"].us == 90.0 and row.peers["default"] == LARGE.peers["default"]
    again = merge.merge([_of(row), runs[0]]).rows[0]
    assert again.processes == 4
    text = render.markdown(_of(row))
    assert f"median of {row.rounds} alternating rounds in 3 processes, standard normal" in text
    assert "processes" not in render.markdown(RESULT)


def test_the_worst_of_each_process_is_kept() -> None:
    hot = dataclasses.replace(LARGE, temperature_c=80.0)
    wrong = dataclasses.replace(hot, ours=dataclasses.replace(hot.ours, error=0.5), temperature_c=0.0)
    (row,) = merge.merge([_of(hot), _of(wrong), _of(hot)]).rows
    assert row.ours.error == 0.5 and row.temperature_c == 80.0


def test_rows_of_one_run_alone_are_kept_as_they_are() -> None:
    """So that a run that was cut off is finished by another."""
    parts = [_of(THIN, LARGE), _of(LARGE, FALLEN, skipped={}, sustained=LOADS)]
    merged = merge.merge(parts)
    assert [row.shape for row in merged.rows] == [THIN.shape, LARGE.shape, FALLEN.shape]
    assert [row.processes for row in merged.rows] == [1, 2, 1] and merged.rows[0] == THIN
    assert merged.skipped == {"9x9x9": "no memory"} and merged.sustained == LOADS


def test_a_row_that_another_run_has_is_not_skipped() -> None:
    assert merge.merge([_of(LARGE), _of(THIN, skipped={LARGE.shape: "no memory"})]).skipped == RESULT.skipped


def test_a_peer_counts_where_every_process_has_it() -> None:
    lacking = dataclasses.replace(LARGE, peers={"default": LARGE.default}, unavailable={"no-triton": "a flag is gone"})
    (row,) = merge.merge([_of(LARGE), _of(lacking)]).rows
    assert set(row.peers) == {"default"} and row.unavailable["no-triton"] == "a flag is gone"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (dataclasses.replace(RESULT, arch="h100"), "got arch h200, h100"),
        (dataclasses.replace(RESULT, pause=0), "got pause 5, 0"),
        (dataclasses.replace(RESULT, machine=RESULT.machine | {"commit": "abcdef"}), "got commit .*, abcdef"),
        (_of(dataclasses.replace(LARGE, variant="another")), "the same kernels for .*, got .* and another"),
    ],
)
def test_what_is_not_alike_is_a_sentence(other: report.Result, said: str) -> None:
    with pytest.raises(ValueError, match=f"`--merge` requires .*{said}"):
        merge.merge([RESULT, other])


def test_the_date_may_differ() -> None:
    merge.merge([RESULT, dataclasses.replace(RESULT, machine=RESULT.machine | {"date": "2031-01-01"})])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{i}.json") for i in range(2)]
    for path, us in zip(paths, (100.0, 120.0), strict=True):
        report.save(_of(_with(LARGE, us, us), skipped={}), Path(path))
    out = tmp_path / "both.json"
    assert main(["bench", "--merge", *paths]) == 2
    assert "pass --json OUT" in capsys.readouterr().err
    assert main(["bench", "--merge", *paths, "--json", str(out)]) == 0
    assert report.load(out).rows[0].ours.us == 110.0 and LARGE.shape in capsys.readouterr().out


def _measured(settings: bench.Settings, keep: Any) -> report.Result:
    result = _of(LARGE, skipped={})
    keep(result)
    return result


def test_each_process_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "ProcessPoolExecutor", lambda *args: ThreadPoolExecutor(1))
    monkeypatch.setattr(bench, "measure", _measured)
    out = tmp_path / "r.json"
    assert main(["bench", "--shapes", "8x8x8", "--processes", "3", "--json", str(out)]) == 0
    assert report.load(out).rows[0].processes == 3
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]  # parts are gone, since the whole is there


def test_a_process_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real one, to which all is pickled, and which finds no GPU here."""
    assert main(["bench", "--shapes", "8x8x8", "--processes", "2", "--json", str(tmp_path / "r.json")]) == 2
    assert "`bench` requires a Hopper or Blackwell GPU, got none" in capsys.readouterr().err
    with pytest.raises(ValueError, match="requires a Hopper or Blackwell GPU"):
        bench.measure(bench.Settings([Case(8, 8, 8)]))


def test_no_process_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "8x8x8", "--processes", "0"]) == 2
    assert "`--processes` requires at least 1, got 0" in capsys.readouterr().err
