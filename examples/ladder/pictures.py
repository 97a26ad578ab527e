"""Draws the pictures of docs/two_cta.md from the code: `python examples/ladder/pictures.py [DIRECTORY]`.

Who holds what comes from CuTeDSL's layouts of the MMA, the masks from the package, the timelines from emulated runs.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import _layouts
import _sharing
from _common import Rung, emulate, operands, rung_of
from _svg import COLOURS, PALE, Picture
from cutlass import cute

from jax_bwgemm.emulator import Schedule, Timeline
from jax_bwgemm.facts.tile import Tile

IMAGES = Path(__file__).parents[2] / "docs" / "images"
# m, n, k, and what completes when: all as late as it may, or loads at once, so that the roles run ahead of each other.
TIMELINES = {"two_cta": ((256, 256, 512), "lazy"), "persistent": ((256, 768, 256), "loads-eager")}
LANES = {"warp": "warp", "load": "TMA loads", "mma": "tensor core", "commit": "commits", "store": "TMA stores"}


def tv_layouts(tile: Tile) -> dict[str, tuple[list[int], list[int], int]]:
    """{operand: (shape, stride, rows)} of (CTA, (row, column)) -> row + rows * column, as CuTeDSL has it for an MMA."""
    found: dict[str, str] = {}

    @cute.jit
    def trace() -> None:
        mma = _layouts.tiled_mma(tile)
        for operand in "ABC":
            found[operand] = str(getattr(mma, f"tv_layout_{operand}_tiled"))

    cute.compile(trace, options="--gpu-arch sm_100a")
    rows = {"A": tile.mma_m, "B": tile.mma_n, "C": tile.mma_m}
    parsed = {}
    for operand, text in found.items():
        shape, stride = ([int(x) for x in re.findall(r"\d+", part)[:3]] for part in text.split(":"))
        parsed[operand] = (shape, stride, rows[operand])
    return parsed


def held_rows(layout: tuple[list[int], list[int], int], cta: int) -> range:
    """Rows of the operand that one CTA holds; all of these layouts hold whole rows."""
    (_, rows, _), (cta_step, row_step, _), all_rows = layout
    first = cta * cta_step % all_rows
    return range(first, first + rows * row_step, row_step)


def tiles(path: Path) -> None:
    """A, B and C of one MMA tile, coloured by the CTA that holds each row."""
    picture, scale, k = Picture(690, 310), 0.75, 48.0
    for i, name in enumerate(("one_cta", "two_cta")):
        tile, left, top = rung_of(name).tile, 20 + 350 * i, 90.0
        layouts = tv_layouts(tile)
        height, width = tile.mma_m * scale, tile.mma_n * scale
        picture.text(left, 22, f"{name}: {tile.mma_m}x{tile.mma_n}, cta_group {tile.cta_group}", 14)
        for cta in range(tile.cta_group):
            a, b, c = (held_rows(layouts[operand], cta) for operand in "ABC")
            colour, words = COLOURS[cta], f"CTA {cta}"
            picture.box(left, top + a[0] * scale, k, len(a) * scale, colour, f"A, rows {a[0]} to {a[-1]}: {words}")
            picture.box(left + k + 12 + b[0] * scale, top - 12 - k, len(b) * scale, k, colour, f"B: {words}")
            picture.box(left + k + 12, top + c[0] * scale, width, len(c) * scale, colour, f"C: {words}")
            middle = left + k + 12 + width / 2
            where = f"{words}: rows {c[0]} to {c[-1]}"
            picture.text(middle, top + (c[0] + len(c) / 2) * scale, where, 12, "middle", "white")
            half = left + k + 12 + (b[0] + len(b) / 2) * scale
            picture.text(half, top - 12 - k / 2 + 4, f"{b[0]} to {b[-1]}", 12, "middle", "white")
        picture.text(left + k / 2, top + height + 18, "A", 12, "middle")
        picture.text(left + k + 24 + width, top - 8 - k / 2, "B", 12)
        picture.text(left + k + 12 + width / 2, top + height + 18, "C", 12, "middle")
    picture.write(path)


def masks(path: Path) -> None:
    """The CTAs that the loads and commits of CTA 0 reach, in clusters of 4x4."""
    picture = Picture(660, 430)
    for row, name in enumerate(("two_cta_multicast", "one_cta_multicast")):
        tile = rung_of(name).tile
        sharing = _sharing.computed(tile)
        top = 30 + 205 * row
        picture.text(20, top - 8, f"{name}: CTA 0, {sharing.arrivals} arrivals empty a stage", 14)
        shown = {"A": sharing.a_mask, "B": sharing.b_mask, "commit": sharing.commit_mask}
        for column, (what, mask) in enumerate(shown.items()):
            left = 20 + 215 * column
            picture.text(left, top + 18, f"{what} {mask:#06x}", 12)
            for rank in range(tile.cluster_ctas):
                x, y = left + 34 * (rank // tile.cluster_m), top + 26 + 34 * (rank % tile.cluster_m)
                reached = mask >> rank & 1
                picture.box(x, y, 32, 32, COLOURS[column] if reached else PALE, f"CTA {rank}")
                picture.text(x + 16, y + 21, str(rank), 12, "middle", "white" if reached else "#777777")
    picture.text(20, 422, "down: m, across: n; a square is a CTA, with its rank in the cluster", 11)
    picture.write(path)


def timeline(rung: Rung, path: Path) -> None:
    """Warps, loads, MMAs and stores of both CTAs of one cluster."""
    observer, (shape, name) = Timeline(), TIMELINES[rung.name]
    schedule = next(each for each in Schedule.standard() if each.name == name)
    emulate(rung, *operands("integers", shape), schedule, observer, max_clusters=1)
    events = [event for event in observer.events() if event["ph"] == "X"]
    lanes = sorted({(event["pid"], list(LANES).index(event["cat"]), event["tid"]) for event in events})
    start = min(event["ts"] for event in events if event["cat"] == "load")
    end = max(event["ts"] + event["dur"] for event in events)
    scale, left, pitch = 900 / (end - start), 130, 11
    picture = Picture(left + 920, 60 + pitch * len(lanes) + 24)
    size = "x".join(map(str, shape))
    picture.text(
        10, 20, f"{rung.name}, {size}, one cluster, schedule {name}; across: the emulator's rounds, no time", 14
    )
    rows = {lane: 40 + pitch * i + 14 * lane[0] for i, lane in enumerate(lanes)}
    _label(picture, rows)
    for event in events:
        first, last = max(event["ts"], start), event["ts"] + event["dur"]
        if last > start and event["name"] != "wait":
            y = rows[event["pid"], list(LANES).index(event["cat"]), event["tid"]]
            colour = COLOURS[list(LANES).index(event["cat"])]
            picture.box(left + (first - start) * scale, y, (last - first) * scale, pitch - 2, colour, event["name"])
    picture.write(path)


def _label(picture: Picture, rows: dict[tuple[int, int, int], float]) -> None:
    """The first lane of each kind by its name, warps by their numbers."""
    seen: set[Any] = set()
    for (cta, kind, thread), y in rows.items():
        name = list(LANES.values())[kind]
        words = f"CTA {cta} {name} {thread}" if name == "warp" else f"CTA {cta} {name}"
        if words not in seen:
            picture.text(10, y + 8, words, 9)
        seen.add(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=IMAGES)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    tiles(directory / "tiles.svg")
    masks(directory / "masks.svg")
    for name in TIMELINES:
        timeline(rung_of(name), directory / f"timeline_{name}.svg")


if __name__ == "__main__":
    main()
