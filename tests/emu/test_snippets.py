"""The snippets in the emulator, against formulas of the tests' own; tests/gpu runs the same ones on hardware."""

from __future__ import annotations

import pytest

from jax_bwgemm.emulator import Schedule
from tests.snippets import barriers, exchange
from tests.snippets.catalogue import ALL
from tests.snippets.kit import Snippet, emulate

WAITING = {snippet.name for room in (barriers, exchange) for snippet in room.snippets()}  # where who comes first counts


def test_names_are_unique() -> None:
    assert len({snippet.name for snippet in ALL}) == len(ALL)


@pytest.mark.parametrize("snippet", ALL, ids=lambda s: s.name)
def test_snippet(snippet: Snippet) -> None:
    """Lazy is the slowest legal hardware, eager the fastest."""
    schedules = Schedule.standard()[:2] if snippet.maps or snippet.smem_bytes > 1 << 14 else (Schedule(),)
    for schedule in (*schedules, *(Schedule.randoms(8) if snippet.name in WAITING else ())):
        got = emulate(snippet, schedule)
        assert not snippet.mismatches(got, tuple(r.expected for r in snippet.results))
