"""The script that runs kernels under compute-sanitizer, with a sanitizer that is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jax_bwgemm.facts.padding import TMA_ALIGN_BYTES
from jax_bwgemm.facts.problem import DTYPE_BYTES
from jax_bwgemm.kernels.aot.catalog import catalogue
from tests.gpu import sanitize, test_variants

CLEAN = "ran x\nran y\n========= ERROR SUMMARY: 0 errors\n"
RACE = "ran x\nran y\n========= Error: Race reported\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)\n"
BLAMED = """ran x
ran y
========= Potential invalid __shared__ read of size 16 bytes
=========     at sm_90a_bf16_bf16_bf16_knm_64x16x64_cta1_cluster1x1x8_identity_0+0x2c50
=========     by thread (224,0,0) in block (0,0,0)
=========     Address 0x1000e00 is located in a block that might have already exited
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""  # as it said of a kernel that waits at barriers that it does not follow


def test_a_sample_is_the_same_in_any_order() -> None:
    names = [f"k{i}" for i in range(100)]
    assert sanitize.sample(names, 7, 0) == sanitize.sample(names[::-1], 7, 0) != sanitize.sample(names, 7, 1)
    assert sanitize.sample(names[:3], 7, 0) == names[:3]


@pytest.mark.parametrize(
    ("text", "code", "clean"),
    [(CLEAN, 0, True), (CLEAN, 9, False), (RACE, 9, False), ("ran x\n", 0, False),
     (CLEAN.replace("ran y\n", ""), 0, False), (CLEAN.replace("0 errors", "3 errors"), 0, False),
     (BLAMED, 9, True), (BLAMED.replace("1x1x8", "2x1"), 9, False), (BLAMED, 1, False),
     (BLAMED.replace("might have already exited", "is not shared"), 9, False),
     (BLAMED.replace("1 hazard ", "2 hazards "), 9, False)],
)  # fmt: skip
def test_verdicts(text: str, code: int, clean: bool) -> None:
    assert sanitize.is_clean(sanitize.verdict(text, code), 2) is clean


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitize, "PLACES", ())
    assert sanitize.main([]) == 2
    assert "requires NVIDIA's compute-sanitizer in PATH, got none" in capsys.readouterr().out


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One tool is content, the other finds a race."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\ncase "$2" in racecheck) printf "{RACE}"; exit 9;; esac\nprintf "{CLEAN}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(test_variants, "ALL", [Entry("x"), Entry("y")])
    out = tmp_path / "out.json"
    assert sanitize.main(["--tools", "memcheck", "--json", str(out)]) == 0
    assert sanitize.main(["--tools", "memcheck", "racecheck", "--json", str(out)]) == 1
    tools = json.loads(out.read_text())["tools"]
    assert (tools["memcheck"]["errors"], tools["racecheck"]["errors"]) == (0, 2)
    assert "========= Error: Race reported" in tools["racecheck"]["report"]
    assert "racecheck: 2 of 2 kernels ran, 2 errors" in capsys.readouterr().out


def test_a_tool_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has said is kept."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho ran x\necho ========= slow\nexec sleep 30\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(test_variants, "ALL", [type("Entry", (), {"name": "x"})()])
    out = tmp_path / "out.json"
    assert sanitize.main(["--tools", "memcheck", "--limit", "1", "--json", str(out)]) == 1
    found = json.loads(out.read_text())["tools"]["memcheck"]
    assert found["ran"] == 1 and found["report"] == ["no end within 1 s", "========= slow"]


def test_kernels_that_tma_stores_have_rows_that_it_can_step_over() -> None:
    for variant in catalogue():
        m, n, _, _ = sanitize.shape_of(variant)
        contiguous = n if variant.c_major == "n" else m
        assert contiguous * DTYPE_BYTES[variant.out_dtype] % TMA_ALIGN_BYTES == 0, variant.name
