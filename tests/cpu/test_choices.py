"""The planner's choices over what ships, beside those of the golden file `choices.txt`."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from jax_bwgemm.bench.cases import DEFAULT, Case
from jax_bwgemm.cli import explain_choices
from jax_bwgemm.cli.main import main

GOLDEN = Path(__file__).parent / "choices.txt"
REMEDY = f"python -m jax_bwgemm explain --choices > tests/cpu/{GOLDEN.name}"


def difference(found: str) -> str:
    """Lines of the golden file and of `found` that are not in both, as a diff without context."""
    diff = difflib.unified_diff(
        GOLDEN.read_text().splitlines(), found.splitlines(), GOLDEN.name, "now", n=0, lineterm=""
    )
    return "\n".join(line for line in diff if not line.startswith("@@"))


def test_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """A change here is a change of what users run: argue it with a measurement or a published figure."""
    assert main(["explain", "--choices"]) == 0
    changed = difference(capsys.readouterr().out)
    assert not changed, f"the planner chooses otherwise; if it should: {REMEDY}\n{changed}"


def test_a_change_shows_as_its_two_lines() -> None:
    before = next(line for line in GOLDEN.read_text().splitlines() if line.split()[:2] == ["8192x8192x8192", "h200"])
    after = before.replace("128x256x64", "128x192x64")
    assert after != before
    diff = difference(GOLDEN.read_text().replace(before, after)).splitlines()
    assert diff == [f"--- {GOLDEN.name}", "+++ now", f"-{before}", f"+{after}"]


@pytest.mark.long
def test_no_file_of_a_user_or_a_build_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_BWGEMM_TABLES", "JAX_BWGEMM_ARTIFACTS", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "h200.json").write_text("{")  # a broken table is a warning wherever it is read
    assert difference(explain_choices.text()) == ""


def test_what_is_in_the_list() -> None:
    """The benchmark's, and random ones which differ in everything that a kernel is compiled for."""
    cases = explain_choices.cases()
    assert {Case.from_str(text) for text in (*DEFAULT, *explain_choices.UNTUNED)} <= set(cases)
    assert len(cases) == len(set(cases)) > len(DEFAULT) + explain_choices.NUM_RANDOM
    drawn = explain_choices._random_cases()
    assert {case.form for case in drawn} == {"nn", "nt", "tn"} and {case.batch for case in drawn} == {1, 8}
    assert {case.dtype for case in drawn} == {"bfloat16", "float16", "float32", "float8_e4m3fn", "int8"}
    assert len({case.epilogue for case in drawn}) > 5 and all(case.flops >= 10**6 for case in drawn)
    for size in ("m", "n", "k"):
        assert {getattr(case, size) % 8 == 0 for case in drawn} == {True, False}


def test_a_kernel_that_does_not_ship_is_not_chosen() -> None:
    """bfloat16 -> float16 has one tile; a gate of float32's result in float8 has none."""
    one = explain_choices.choice(Case.from_str("8192x8192x8192->f16"), "h200")
    assert str(one.tile) == "128x128x64_cta1_cluster1x1"
    none = explain_choices.choice(Case.from_str("8192x8192x8192:nt:e4m3:silu"), "h200")
    assert none.tile is None and none.reason == "the catalogue lists no such kernel"


def test_measured_times_rule_where_a_table_ships() -> None:
    words = {tuple(line.split()[:2]): line.split()[-1] for line in GOLDEN.read_text().splitlines()[1:]}
    assert words["8192x8192x8192", "h200"] == words["4096x8192x1024:bias+relu", "h200"] == "measured"
    for device in ("h100", "b200"):
        assert words["8192x8192x8192", device] == "model"
