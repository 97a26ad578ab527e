"""Which tiles the clusters of a stream-K kernel share, and what its waves and its stream take. Knows no epilogue."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import ceil_div, concurrent_clusters, fill_bytes, k_steps, num_tiles, wave_shape
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import INT32_MAX, Tile
from jax_bwgemm.planner.cycles import memory_bytes_per_clk, step_cycles

MAX_PARTS = 16  # of a tile, at most; assumed


@dataclasses.dataclass(frozen=True)
class Stream:
    """The last `tiles` cluster tiles are divided along k between `clusters` clusters; none by default."""

    tiles: int = 0
    clusters: int = 1


NO_STREAM = Stream()


@functools.lru_cache(maxsize=1024)  # its cost, the features of that, and the plan ask for it
def best_stream(tile: Tile, problem: Problem, arch: Arch) -> Stream:
    """Which tiles are best divided between all clusters. More clusters have less to multiply each, but one of them adds
    up what the others have of its tile."""
    if not tile.stream_k:
        return NO_STREAM
    return min(_streams(tile, problem, arch), key=lambda stream: _alone_cycles(tile, problem, arch, stream))


def idle(tile: Tile, problem: Problem, arch: Arch) -> Tile | None:
    """Of a stream-K tile of which nothing is best divided, the tile without, which does the same with less: in 1,879
    pairs of times of an H100 and an H200 (h100_wide.json and h200_odd.json of results/regret) it is the faster one in
    three of four, by 2 % in half."""
    if tile.stream_k and best_stream(tile, problem, arch) == NO_STREAM:
        return dataclasses.replace(tile, stream_k=False)
    return None


def waves_and_rest(tile: Tile, problem: Problem, arch: Arch, step: float, stream: Stream) -> tuple[int, float]:
    """Waves of whole tiles before the last one or the stream; main loop and exchange of that, if a k step takes
    `step` cycles."""
    clusters, k_tiles = concurrent_clusters(tile, arch), k_steps(tile, problem)
    whole = ceil_div(num_tiles(tile, problem) - stream.tiles, clusters)
    if stream.tiles == 0:
        return whole - 1, k_tiles * step
    c, is_even = arch.constants, stream.clusters % stream.tiles == 0
    step = max(step * (1.0 if is_even else c.stream_skew), _memory_cycles(tile, problem, arch, stream))
    parts = ceil_div(stream.clusters, stream.tiles) - is_even
    part = c.stream_part * 4 * tile.cta_m * tile.mma_n / c.l2_read_bytes_per_clk
    exchange = c.stream_cycles + part * max(1, parts)
    return whole, ceil_div(stream.tiles * k_tiles, stream.clusters) * step + exchange


def _streams(tile: Tile, problem: Problem, arch: Arch) -> Iterator[Stream]:
    """None; the tiles that fill no wave, in equal parts or between all clusters; and these with a wave before them."""
    yield NO_STREAM
    clusters, tiles, k_tiles = concurrent_clusters(tile, arch), num_tiles(tile, problem), k_steps(tile, problem)
    rest = tiles % clusters
    if rest == 0 or (rest + clusters) * k_tiles > INT32_MAX:
        return
    yield from (Stream(rest, rest * parts) for parts in range(2, min(clusters // rest, k_tiles, MAX_PARTS) + 1))
    if rest * k_tiles >= clusters:
        yield Stream(rest, clusters)
    if tiles > clusters:
        yield Stream(rest + clusters, clusters)


def _alone_cycles(tile: Tile, problem: Problem, arch: Arch, stream: Stream) -> float:
    """Of all waves and the stream, at the device's highest clock and without a store."""
    step = step_cycles(tile, problem, arch, stream.clusters)
    waves, last = waves_and_rest(tile, problem, arch, step, stream)
    return waves * k_steps(tile, problem) * step + last


def _memory_cycles(tile: Tile, problem: Problem, arch: Arch, stream: Stream) -> float:
    """What device memory takes for a k step of all clusters that share tiles.

    They are at `phases` places of k at the same time. What lies too far apart for the L2 cache to keep is read at each
    of these places for the fewer tiles that are there: square blocks of them read sqrt(phases) times as much, but no
    more than without any sharing.
    """
    rows, cols = wave_shape(tile, problem, arch)
    phases = stream.clusters // math.gcd(stream.clusters, stream.tiles)
    in_bytes, retained = DTYPE_BYTES[problem.a_dtype], arch.constants.retained * arch.l2_bytes
    between = k_steps(tile, problem) / phases * stream.clusters * fill_bytes(tile, in_bytes) * tile.cluster_ctas
    more = 1.0 if between <= retained else math.sqrt(phases)
    a, b = rows * tile.cluster_m * tile.cta_m * min(more, cols), cols * tile.cluster_n * tile.out_n * min(more, rows)
    kept = retained / (problem.k * in_bytes)  # rows of an operand that stay in the L2 cache
    moved = (a if problem.m > kept else 0) + (b if problem.n > kept else 0)
    return moved * tile.k_tile * in_bytes / memory_bytes_per_clk(arch)
