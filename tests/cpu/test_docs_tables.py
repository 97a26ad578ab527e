"""The tables of what ships, which the documentation is built with, are what the planner finds."""

from __future__ import annotations

import sys

import pytest
from pages import DOCS

from jax_bwgemm.facts.arch import ARCHS, by_name
from jax_bwgemm.facts.problem import DTYPE_SHORT, Problem
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner.plan import plan

sys.path.insert(0, str(DOCS))
import catalogue  # noqa: E402 - a file of the documentation

SHIPPED = frozenset(catalogue.catalogue())
ROWS = catalogue.operands()[1:]


def missing(variant: Variant) -> str | None:
    return None if variant in SHIPPED else "it does not ship"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} to {row[1]}")
def test_a_form_is_listed_if_the_planner_has_a_kernel_for_it(row: tuple[str, ...]) -> None:
    operands, out, *cells = row
    a, _, b = operands.partition(" by ")
    for devices, cell in zip(catalogue.COLUMNS, cells, strict=True):
        arch = by_name(devices.partition(",")[0].lower())
        for majors, form in catalogue.FORMS.items():
            problem = Problem(1024, 1024, 1024, 1, a, b or a, out, *majors)
            assert (plan(problem, arch, missing=missing).variant is not None) == (form in cell.split()), (devices, form)


def test_every_kernel_is_in_a_row() -> None:
    listed = {(a, out) for a, out, *_ in ROWS}
    for variant in SHIPPED:
        a, b, out = catalogue.dtypes(variant)
        assert (a if a == b else f"{a} by {b}", out) in listed
    fused = {dtype for _, *cells in catalogue.epilogues()[1:] for cell in cells for dtype in cell.split(", ")}
    assert {name.partition(" to ")[0] for name in fused - {"none"}} <= set(DTYPE_SHORT.values())
    assert [row[0].strip("`") for row in catalogue.devices()[1:]] == list(ARCHS)
