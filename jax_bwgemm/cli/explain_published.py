"""The cost model beside figures that others published for a B200, with the error of each. Knows no GPU.

Sources: microbenchmarks of tcgen05.mma and TMA; a public CuTeDSL tutorial's three kernels; the tutorial "Writing
high-performance matrix multiplication kernels for Blackwell" of JAX's documentation, its tiles and stages from JAX's
tests (tests/pallas/mgpu_examples_test.py), its utilisation of 2250 TFLOP/s.
"""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cost import Schedule, cost
from jax_bwgemm.planner.cycles import commit_cycles, fill_rate, mma_cycles, mma_interval

B200 = ARCHS["b200"]
BF16_BYTES = 2
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
LADDER_PEAK_TFLOPS = 2250
_ONE_TILE_A_CTA = Schedule(6, is_persistent=False, loads_run_ahead=False, is_grouped=False)  # rungs 0 to 3
_DIRECT = dataclasses.replace(_ONE_TILE_A_CTA, stages=4, store="threads")  # the three kernels
_SERIAL = dataclasses.replace(_ONE_TILE_A_CTA, is_persistent=True)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What was published and what the model predicts, in the same `unit`. `fits`: fitted constants enter."""

    name: str
    unit: str
    published: float
    predicted: float
    fits: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def kernels(arch: Arch = B200) -> list[Figure]:
    """Three kernels at 8192^3, bf16: 4 stages, one accumulator, direct stores, a tile a CTA."""
    problem = Problem(8192, 8192, 8192, b_major="k")
    many = dataclasses.replace(PAIR, cluster_m=4, cluster_n=4)
    listed = {
        "1-CTA 128x256": (1323, Tile(128, 256)),
        "2-CTA 256x256": (1400, PAIR),
        "2-CTA 256x256, multicast, cluster 4x4": (1396, many),
    }
    return [
        Figure(name, "TFLOP/s", published, _tflops(problem, {tile: _DIRECT}, arch), fits=True)
        for name, (published, tile) in listed.items()
    ]


def ladder(arch: Arch = B200) -> list[Figure]:
    """JAX's tutorial at 4096x8192x4096, float16; each rung with the best of the tiles that it was tuned over."""
    problem = Problem(4096, 8192, 4096, 1, *("float16",) * 3)
    square, wide = Tile(128, 128), Tile(128, 256)
    one_group = dataclasses.replace(_ONE_TILE_A_CTA, has_load_warp=False)
    own_warps = Schedule(6, 2, is_grouped=False)
    tuned = {square: _ONE_TILE_A_CTA, wide: dataclasses.replace(_ONE_TILE_A_CTA, stages=4)}
    rungs = {
        "0 basic": (37.62, {square: one_group}),  # the whole 128x256 result does not fit beside four stages
        "1 own warps for loads and MMAs": (45.47, {square: _ONE_TILE_A_CTA}),
        "2 tiled epilogue (and room for 128x256)": (55.82, tuned),
        "3 CTA pairs": (59.41, {PAIR: _ONE_TILE_A_CTA}),
        "4 persistent": (61.46, {PAIR: _SERIAL}),
        "5 own warps for the epilogue": (63.38, {PAIR: own_warps}),
        "6 grid tiling": (69.44, {PAIR: dataclasses.replace(own_warps, is_grouped=True)}),
    }
    return [
        Figure(name, "% of 2250", published, 100 * _tflops(problem, tiles, arch) / LADDER_PEAK_TFLOPS, fits=True)
        for name, (published, tiles) in rungs.items()
    ]


def gains() -> list[Figure]:
    """What each step was worth: ratios of the figures above, so nothing new, but what the planner's choices rest on."""
    one, pair, many = kernels()
    steps = [(one, pair), (one, many)]
    rungs = ladder()
    steps += zip(rungs, rungs[1:], strict=False)
    return [
        Figure(
            f"{after.name} / {before.name.split()[0]}",
            "ratio",
            after.published / before.published,
            after.predicted / before.predicted,
            fits=True,
        )
        for before, after in steps
    ]


def microbenchmarks() -> list[Figure]:
    """No fitted constant enters these: intervals, commits, bytes and the latency that stages hide."""
    found = []
    for name, tile, published in _intervals():
        found.append(Figure(f"MMA interval, {name}", "cycles", published, mma_interval(tile, B200)))
    for tile in (Tile(128, 256), PAIR):
        published = 4 * 128 + {1: 148, 2: 182}[tile.cta_group]
        predicted = mma_cycles(tile, BF16_BYTES, B200) + commit_cycles(tile, B200)
        found.append(Figure(f"4 MMAs, commit, wait, {tile.cta_group}-CTA", "cycles", published, predicted))
    doubled = dataclasses.replace(PAIR, num_accs=2)
    for tile, published in ((Tile(128, 128), 128), (Tile(128, 256), 96), (PAIR, 64), (doubled, 48)):
        found.append(Figure(f"fill at full rate, {tile}", "B/clk", published, fill_rate(tile, BF16_BYTES, B200)))
    for tile, stages, published in ((Tile(128, 256), 4, 1500), (PAIR, 7, 3000)):
        hidden = (stages - 1) * mma_cycles(tile, BF16_BYTES, B200)
        found.append(Figure(f"latency that {stages} stages hide, {tile.cta_group}-CTA", "cycles", published, hidden))
    return found


def _intervals() -> list[tuple[str, Tile, float]]:
    """The published formulas, as published."""
    found: list[tuple[str, Tile, float]] = []
    for n in (64, 128, 256):
        found += [
            (f"1-CTA M=128 N={n}", Tile(128, n), max(n / 2, 32 + n / 4)),
            (f"2-CTA M=256 N={n}", dataclasses.replace(PAIR, mma_n=n), max(n / 2, 32 + n / 8)),
            (f"2-CTA M=128 N={n}", dataclasses.replace(PAIR, mma_m=128, mma_n=n), max(n / 4, 16 + n / 8)),
            (f"1-CTA M=64 N={n}", Tile(64, n), n / 2),
        ]
    return found


def table() -> str:
    """All figures as text, and which constants were fitted to how many of them."""
    groups = {
        "kernels at 8192x8192x8192, bfloat16": kernels(),
        "JAX's ladder at 4096x8192x4096, float16": ladder(),
        "gains: ratios of the ten figures above": gains(),
        "microbenchmarks: no fitted constant enters": microbenchmarks(),
    }
    lines = [f"{'B200':<58} {'':<10} {'published':>10} {'predicted':>10} {'error':>8}"]
    for title, figures in groups.items():
        worst = max(abs(figure.error) for figure in figures)
        lines += ["", f"{title} (largest error {100 * worst:.1f} %)", *map(_line, figures)]
    return "\n".join([*lines, "", *_constants()])


def _line(figure: Figure) -> str:
    numbers = f"{figure.published:>10.4g} {figure.predicted:>10.4g} {100 * figure.error:>+7.1f}%"
    return f"  {figure.name:<56} {figure.unit:<10} {numbers}"


def _constants() -> list[str]:
    c = B200.constants
    return [
        "Fitted to the ten figures of the first two groups, four constants:",
        f"  memory_overlap {c.memory_overlap:g}, start_cycles {c.start_cycles:g}, issue_cycles {c.issue_cycles:g}, "
        f"thread_store_cycles {c.thread_store_cycles:g}",
        f"Chosen on an H200 and kept: overlap {c.overlap:g}.",
        "Assumed, and kept because the figures fit better with them: the L2 cache keeps its clock while the SMs slow",
        f"  down; an operand above {c.retained:g} of the cache is read again for each block of concurrent tiles.",
        "Published: MMA intervals, commit, load latency, L2 bytes a clock, the clock under load. Others: constants.py.",
    ]


def _tflops(problem: Problem, tiles: dict[Tile, Schedule], arch: Arch) -> float:
    us = min(cost(tile, problem, arch, schedule).us for tile, schedule in tiles.items())
    return problem.flops / us / 1e6
