"""The command that tries many batch-invariant products on a GPU, without one."""

from __future__ import annotations

import pytest

from tests import invariance as cases
from tests.gpu import invariance


def test_cases_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 1 has other bits, 2 breaks; all others are refused: there is no GPU."""
    real = cases.differing

    def differing(case: cases.Case) -> list[str]:
        if case.seed == 2:
            raise ValueError("broken")
        return ["3 rows from 5"] if case.seed == 1 else [] if case.seed == 4 else real(cases.random_case(case.seed, 64))

    monkeypatch.setattr(cases, "differing", differing)
    found = invariance.examine(0)
    assert [what for _, what, _ in found[:5]] == ["refused", "different", "failed", "refused", "same"]
    assert "['3 rows from 5']" in found[1][2] and "ValueError: broken" in found[2][2]
    header, *rows, total = invariance.table(found)
    assert header.split() == ["dtypes", "same", "different", "refused", "failed"]
    assert total.split() == ["all", "1", "1", "7", "1"] and len(rows) == len({kind for kind, _, _ in found})


def test_a_call_ends_in_time_and_says_where_the_next_one_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert invariance.main(["--first", "20", "--count", "40", "--seconds", "0", "--processes", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "cases 20 to 39; go on with --first 40"
    assert said[-1].split() == ["all", "0", "0", "20", "0"]
