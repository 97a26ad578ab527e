"""The cost model against figures that others published for a B200. `pytest -s` prints every one with its error.

Ten figures, four fitted constants (the table names them): the bounds say how well that fit is, not that it predicts.
What no fitted constant enters is bounded by what is published: exactly, or to the digits there are.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from jax_bwgemm.cli.explain_published import B200, Figure, gains, kernels, ladder, microbenchmarks, table
from jax_bwgemm.cli.main import main


@pytest.mark.parametrize("figure", kernels() + ladder(), ids=lambda figure: figure.name)
def test_fitted_figures(figure: Figure) -> None:
    """Largest: 3.1 %, of the ladder's third rung."""
    assert abs(figure.error) < 0.035


def test_root_mean_square_of_the_fit() -> None:
    errors = [figure.error for figure in kernels() + ladder()]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.018  # 1.7 %


@pytest.mark.parametrize("figure", gains(), ids=lambda figure: figure.name)
def test_gains_have_the_published_sign_and_size(figure: Figure) -> None:
    """Each step of the story helps, and by the published factor to 3.6 %."""
    assert figure.published > 1 and figure.predicted > 1
    assert abs(figure.error) < 0.036


def test_pairs_gain_what_others_measured() -> None:
    """+5.8 to +11 % by CTA pairs."""
    pairs = [figure.predicted for figure in gains() if figure.name.startswith(("2-CTA 256x256 /", "3 CTA pairs"))]
    assert len(pairs) == 2 and all(1.058 <= gain <= 1.11 for gain in pairs)


@pytest.mark.parametrize("figure", microbenchmarks(), ids=lambda figure: figure.name)
def test_microbenchmarks(figure: Figure) -> None:
    digits = 0.025 if figure.name.startswith("latency") else 1e-9  # 1500 and 3000 are rounded
    assert abs(figure.error) < digits
    assert not figure.fits


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("start_cycles", 0),
        ("issue_cycles", 0),
        ("thread_store_cycles", 0),
        ("retained", 1.0),
        ("overlap", 20.0),
    ],
)
def test_the_figures_would_notice(constant: str, value: float) -> None:
    """No constant is idle: without it (or with a sharp maximum) some figure moves by a hundredth or more."""
    before = [figure.predicted for figure in kernels() + ladder()]
    other = dataclasses.replace(B200, constants=dataclasses.replace(B200.constants, **{constant: value}))
    after = [figure.predicted for figure in kernels(other) + ladder(other)]
    assert max(abs(a / b - 1) for a, b in zip(after, before, strict=True)) > 0.01


def test_table_has_every_figure() -> None:
    text = table()
    print(f"\n{text}")
    for figure in kernels() + ladder() + gains() + microbenchmarks():
        assert any(figure.name in line and f"{100 * figure.error:+.1f}%" in line for line in text.splitlines())
    assert "four constants" in text and "Assumed" in text


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--published"]) == 0
    assert capsys.readouterr().out == table() + "\n"
