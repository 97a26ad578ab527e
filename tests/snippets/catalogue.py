"""All snippets, by name."""

from __future__ import annotations

from tests.snippets import barriers, exchange, floats, integers, lanes, matrices, mma_sync, tma, wgmma
from tests.snippets.kit import Snippet

ALL: list[Snippet] = [
    snippet
    for room in (integers, floats, lanes, matrices, barriers, exchange, tma, wgmma, mma_sync)
    for snippet in room.snippets()
]
