"""`examples/digits.py`: plain Flax and our layers learn the same, on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Main = Callable[[list[str]], dict[str, dict[str, Any]]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """What it imports takes seconds, which each process of a test run need not spend."""
    for package in ("flax", "matplotlib", "optax", "rich", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    found: Main = importlib.import_module("digits").main
    return found


@pytest.mark.long
def test_both_learn_the_same(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses agree to what bfloat16 rounds at other places, and fall; the picture is there, the table last."""
    runs = main(["--steps", "30", "--batch", "64", "--output", str(tmp_path / "losses.png")])
    assert len(runs) == 2
    for own in runs.values():
        plain, ours = own["plain Flax"], own["ours"]
        assert ours.losses[:3] == pytest.approx(plain.losses[:3], rel=0.02)
        assert ours.losses[-1] == pytest.approx(plain.losses[-1], rel=0.3)
        assert sum(ours.losses[-3:]) < 0.6 * sum(ours.losses[:3]) and ours.accuracy > 0.5
        assert ours.products.fallbacks and not ours.products.kernels
        assert not plain.products.fallbacks  # Flax's own
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.count("No GPU here") == 1 and "plain Flax loads what ours learnt" in said
    assert said.rindex("by XLA: ") < said.rindex("ms a step")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--steps", "0"], "--steps requires 1 or more"),
        (["--steps", "x"], "invalid int value"),
        (["--batch", "1501"], "--batch 1 to 1500, got 200, 0 and 1501"),
        (["--batch", "0"], "--batch 1 to 1500, got 200, 0 and 0"),
        (["--seed", "-1"], "--seed 0 or more"),
        (["--output", "losses.doc"], "--output requires a .png, .svg or .pdf"),
        (["--output", "missing/losses.png"], "in a directory that exists, got missing/losses.png"),
        (["--emulate", "sm_80"], "invalid choice"),
    ],
)
def test_what_is_refused(main: Main, args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert sentence in capsys.readouterr().err
