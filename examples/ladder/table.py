"""Prints the table of docs/two_cta.md, counted in the emulator: `python examples/ladder/table.py`."""

from __future__ import annotations

from _cli import EMULATED, counts
from _common import emulate, operands, relative_error, rung_of

from jax_bwgemm.emulator import Schedule

RUNGS = ("one_cta", "two_cta", "two_cta_multicast", "one_cta_multicast", "tma_store", "persistent")


def row(name: str) -> list[str]:
    """What one rung moved and issued; its integers must come out exactly."""
    rung = rung_of(name)
    a, b = operands("integers", EMULATED)
    c, counters = emulate(rung, a, b, Schedule.standard()[0])
    if relative_error(c, a, b) != 0.0:
        raise SystemExit(f"{name}: the product of small integers requires an error of 0")
    found = counts(rung, EMULATED, counters)
    tile = f"{rung.tile.mma_m}x{rung.tile.mma_n}"
    cluster = f"{rung.tile.cluster_m}x{rung.tile.cluster_n}"
    both = found["bytes of A"] + found["bytes of B"]
    sizes = [f"{size:,}" for size in (found["bytes of A"], found["bytes of B"], both)]
    return [f"`{name}`", tile, cluster, *sizes, f"{found['MMA instructions']}", f"{found['barrier waits']}"]


def table() -> str:
    """Markdown."""
    headings = ["rung", "MMA tile", "cluster", "bytes of A", "bytes of B", "A and B", "MMAs", "barrier waits"]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *map(row, RUNGS)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table())
