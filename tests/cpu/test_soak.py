"""The long runs, in short ones without a GPU: what they write, and what they would find."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_bwgemm.bench import soak, soak_legs
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.soak_legs import Load, Tally

pytestmark = pytest.mark.usefixtures("quiet")
LOAD = Load(threads=2, largest=64)


@pytest.mark.long
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "ROUNDS", 2)
    monkeypatch.setattr(soak, "HOST_SLACK_BYTES", 1 << 30)  # of a process that is still being warmed up
    path = tmp_path / "results" / "soak.json"
    assert soak.main(0.02, 6, path, "", LOAD) == 0
    content = json.loads(path.read_text())
    assert content["findings"] == [] and content["products"]["programs"] == 6
    assert [len(content[name]["rounds"]) for name in ("ours", "xla")] == [2, 2]
    assert all(content[name]["executions"] > 0 for name in ("ours", "xla"))
    said = content["faults"]["exceptions"]
    assert (
        "RESOURCE_EXHAUSTED" in said["out of memory"]
        and said["a kernel that the driver refuses"] == "not on this machine"
    )
    assert content["faults"]["programs"] == 2 and content["machine"]["jax"]
    assert "host MB" in capfd.readouterr().out


def test_products_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table of them last; another seed has others."""
    kinds = []
    for seed in (0, 1):
        assert soak.main(0, 6, tmp_path / "soak.json", "", Load(threads=2, largest=64, seed=seed)) == 0
        lines = capfd.readouterr().out.splitlines()
        assert lines[-1] == "nothing grew, nothing was wrong, nothing ended"
        assert any(re.fullmatch(r"all +6 +0 +0\.\d+", line) for line in lines[-20:-1])
        content = json.loads((tmp_path / "soak.json").read_text())
        assert content.keys().isdisjoint({"faults", "ours", "xla"})
        assert sum(num for num, _, _ in content["products"]["kinds"].values()) == 6
        kinds.append(content["products"]["kinds"])
    assert kinds[0] != kinds[1]


@pytest.mark.long
def test_minutes_without_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another process that has them."""
    monkeypatch.setattr(soak, "ROUNDS", 2)
    monkeypatch.setattr(soak, "HOST_SLACK_BYTES", 1 << 30)
    path = tmp_path / "soak.json"
    assert soak.main(0.02, 0, path, "", LOAD) == 0
    assert json.loads(path.read_text()).keys() == {"machine", "minutes", "faults", "ours", "xla", "findings"}


@pytest.mark.parametrize(("minutes", "products"), [(0, 0), (-1, 5), (1, -5)])
def test_nothing_to_do_is_said(minutes: float, products: int) -> None:
    with pytest.raises(ValueError, match="`--soak` requires minutes or `--products`, got"):
        soak.main(minutes, products, None, "", LOAD)


def a_round(programs: int, host: int, device: int) -> dict[str, Any]:
    return {"seconds": 1.0, "programs": programs, "executions": 3, "kernels": 0, "host_bytes": host,
            "device_bytes": device, "device_peak_bytes": device}  # fmt: skip


def a_leg(rounds: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"rounds": rounds, "programs": 1000, "wrong": 0, "errors": 0, "said": []} | fields


FLAT = [a_round(i, 1 << 30, 1 << 20) for i in range(4)]
GOOD = {"products": a_leg([]), "faults": a_leg([]), "ours": a_leg(FLAT), "xla": a_leg(FLAT)}


def test_nothing_is_found_where_nothing_is() -> None:
    assert soak.findings(GOOD) == []


@pytest.mark.parametrize(
    ("where", "change", "finding"),
    [
        (
            "ours",
            {"wrong": 1, "said": ["a case"]},
            "ours requires no wrong product and no error, got 1 and 0: ['a case']",
        ),
        ("products", {"errors": 2}, "products requires no wrong product and no error, got 0 and 2"),
        ("xla", {"ended": -9}, "xla requires a process that ends with 0, got -9"),
        (
            "ours",
            {"rounds": [*FLAT, a_round(9, 1 << 30, 1 << 22)]},
            "device memory of ours requires to stay, got 3145728",
        ),
        (
            "ours",
            {"rounds": [*FLAT, a_round(9, 1 << 31, 1 << 20)]},
            "host memory of ours requires at most 67108864 bytes",
        ),
    ],
)
def test_what_is_found(where: str, change: dict[str, Any], finding: str) -> None:
    content = copy.deepcopy(GOOD)
    content[where] |= change
    assert any(found.startswith(finding) for found in soak.findings(content)), soak.findings(content)


def test_host_memory_may_grow_as_xlas_does() -> None:
    """By program: what XLA keeps for one."""
    content = copy.deepcopy(GOOD)
    for name in ("ours", "xla"):
        content[name]["rounds"] = [*FLAT, a_round(9, 1 << 32, 1 << 20)]
    assert soak.findings(content) == []
    content["xla"]["rounds"][-1]["programs"] *= 2
    assert "host memory of ours" in soak.findings(content)[0]


def test_host_memory_may_grow_by_kernels_that_are_loaded() -> None:
    content = copy.deepcopy(GOOD)
    content["ours"]["rounds"] = [*FLAT, a_round(9, (1 << 30) + (1 << 28), 1 << 20)]
    assert "host memory of ours" in soak.findings(content)[0]
    content["ours"]["rounds"][-1]["kernels"] = 400
    assert soak.findings(content) == []


def test_a_process_that_ends_is_a_finding() -> None:
    assert soak.run("nothing", [LOAD])[0]["ended"] != 0


def test_a_wrong_product_and_an_exception_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    monkeypatch.setattr(
        soak_legs, "function", lambda case, peer: lambda a, b, **rest: soak_legs.plain(case)(a, b, **rest) + 1
    )
    for seed in range(3):
        soak_legs.once(LOAD, tally, seed, soak_legs.jax.devices()[0], {})
    assert (tally.num_wrong, tally.num_errors) == (3, 0) and "times its bound" in tally.said[0]
    monkeypatch.setattr(soak_legs, "function", lambda case, peer: lambda **given: 1 / 0)
    soak_legs.once(LOAD, tally, 0, soak_legs.jax.devices()[0], {})
    assert tally.num_errors == 1 and "ZeroDivisionError" in tally.said[-1]


def test_random_cases_are_of_all_kinds() -> None:
    cases = [soak_legs.random_case(random.Random(i), 512) for i in range(2000)]
    assert {c.form for c in cases} == {"nn", "nt", "tn"} and len({c.epilogue for c in cases}) == 16
    assert len({(c.dtype, c.out_dtype) for c in cases}) == 5 and max(c.m for c in cases) == 512
    assert all(Case.from_str(str(case)) == case for case in cases)


def test_an_error_is_relative_to_the_result_or_to_the_sums() -> None:
    """A single silu of -4 is 0.07: what the sum's rounding to bfloat16 moves is as large a part of it as of the sum."""
    case = Case(1, 1, 1, epilogue="silu")
    given = {"a": np.full((1, 1), -4.0), "b": np.ones((1, 1))}
    exact = np.full((1, 1), -4.0 / (1.0 + np.exp(4.0)))
    assert soak_legs.share(case, "ours", given, exact) < 1e-9
    assert (
        0.1
        < soak_legs.share(case, "ours", given, exact * 1.01)
        < 1
        < soak_legs.share(case, "ours", given, exact + 0.01)
    )
    many = Case(4, 8, 1)
    given = {"a": np.full((4, 1), 100.0), "b": np.ones((1, 8))}
    assert soak_legs.share(many, "ours", given, np.full((4, 8), 100.5)) > 1  # of the norm, which is larger
