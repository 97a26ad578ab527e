"""In which order tiles run, and which matrices the L2 cache keeps for them. Knows no cost.

Both follow from the bytes that concurrent tiles share; what a family makes of them is in its record.
"""

from __future__ import annotations

import math

import numpy as np

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import (
    ceil_div,
    cluster_tiles,
    concurrent_clusters,
    num_tiles,
    num_waves,
    operand_bytes,
    result_bytes,
)
from jax_bwgemm.facts.padding import is_tma_storable
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile

L2_HINTS = ("normal", "evict_first", "evict_last")
RASTER_ORDERS = ("groups", "snake")
STORE, SHORT_SUM = 12, 128  # times its operands' bytes, and terms at most: what takes as long as its result's store
FEW_WAVES, SPREAD_CTAS = 2, 4  # of tiles, and CTAs of a cluster, at most: where it gains to ask which GPC a tile is in
GPC_SMS = 16  # of an H100 and an H200, or 18
GROUPS = (1, 2, 4, 8, 16, 32)
HELD_GROUP = 2  # beside an operand that the L2 cache holds
ROUND_US, MOST_ROUNDS = 80.0, 4  # of a persistent kernel that is launched in rounds: what one takes at least
STREAM = 0.8  # of all bytes: an operand that memory is read for, while the L2 cache has the rest


def raster(tile: Tile, problem: Problem, arch: Arch) -> tuple[int, int]:
    """(raster_group, raster_along_n): the order of tiles under which the concurrent ones share most.

    Of few waves, on Hopper, that is what the tiles of one GPC read alike, for it crosses to them once (`_gpc_bytes`;
    docs/hopper.md).

    A longer walk has it from the L2 cache: a wave of W cluster tiles over g tile rows reads g tile rows of A and W/g
    tile columns of B, least where both are equally many bytes. Groups of rows read A once, and B once each, unless it
    stays in `retained` of the cache; groups of columns the other way round. Where both read as much, the groups span
    the longer side. On an H200, rows were faster than columns for 4096x128256x4096 and 8192x14336x4096, and columns
    than rows for 8192x50264x768. Beside an operand that the cache retains, groups of two were faster than wider ones.

    A result that does not fit into the L2 cache, beside operands that are a small part of it, is written as it lies,
    where its store takes longer than its MMAs: 1 to 8 % faster there (8192x8192x64:nt, 4696x11976x8, 16384x4096x128),
    2 % slower where it is no more than six times its operands (4096x14336x512), and 11 % for longer sums
    (8192x28672x256:tn).
    """
    if _is_store(problem, arch):
        return 1, int(problem.c_major == "m")
    longer = int(problem.n > problem.m)
    shares = arch.family.neighbours_share and not (tile.direct or tile.symmetric)  # these were not measured
    is_short = num_waves(tile, problem, arch) <= FEW_WAVES
    if shares and is_short and tile.cluster_ctas <= SPREAD_CTAS:
        sides = cluster_tiles(tile, problem)
        orders = [(group, side) for side in (longer, 1 - longer) for group in GROUPS if group <= sides[side]]
        return min(orders, key=lambda order: _gpc_bytes(tile, problem, arch, *order))
    choices = {along_n: _group(tile, problem, arch, along_n) for along_n in (longer, 1 - longer)}
    along_n = min(choices, key=lambda along_n: _bytes_read(tile, problem, arch, along_n, choices[along_n]))
    is_held = problem.batch == 1 and operand_bytes(problem)[1 - along_n] <= arch.constants.retained * arch.l2_bytes
    return min(choices[along_n], HELD_GROUP) if shares and is_held and not is_short else choices[along_n], along_n


def _is_store(problem: Problem, arch: Arch) -> bool:
    read = sum(operand_bytes(problem))
    return problem.k <= SHORT_SUM and problem.min_bytes - read > max(arch.l2_bytes, STORE * read)


def walked(tile: Tile, problem: Problem, arch: Arch, group: int, along_n: int) -> tuple[np.ndarray, np.ndarray]:
    """(m, n) of the first tiles, as many as FEW_WAVES have, in cluster tiles; those of another matrix of the batch are
    others. As `kernels/scheduler` walks."""
    rows, cols = cluster_tiles(tile, problem)
    grouped, across = (cols, rows) if along_n else (rows, cols)
    tiles = np.arange(min(num_tiles(tile, problem), FEW_WAVES * concurrent_clusters(tile, arch)))
    matrix, rest = np.divmod(tiles, rows * cols)
    group_idx, rest = np.divmod(rest, group * across)
    far, near = np.divmod(rest, np.minimum(group, grouped - group_idx * group))
    near = near + group_idx * group
    if arch.family.raster_order == "snake":
        far = np.where(group_idx % 2, across - 1 - far, far)
    m, n = (far, near) if along_n else (near, far)
    own_a, own_b = problem.a_batch > 1, problem.b_batch > 1
    return m + rows * matrix * own_a, n + cols * matrix * own_b


def _gpc_bytes(tile: Tile, problem: Problem, arch: Arch, group: int, along_n: int) -> int:
    """Of both operands, a term of k, that cross to all GPCs, where a GPC's CTAs read each part together.

    CTAs that are clusters of their own come to an H200's GPCs one GPC after the other; clusters of several go round
    them, wherever they begin.
    """
    m, n = walked(tile, problem, arch, group, along_n)
    wave, place = np.divmod(np.arange(len(m)), concurrent_clusters(tile, arch))
    num_gpcs = max(1, arch.num_sms // GPC_SMS)
    gpc = place // GPC_SMS if tile.cluster_ctas == 1 else place % num_gpcs
    reader = (wave * arch.num_sms + gpc) * num_tiles(tile, problem)
    sizes = tile.cluster_m * tile.cta_m, problem.num_bs * tile.cluster_n * tile.out_n
    return sum(size * len(np.unique(reader + part)) for size, part in zip(sizes, (m, n), strict=True))


def _group(tile: Tile, problem: Problem, arch: Arch, along_n: int) -> int:
    rows, cols = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.out_n
    ratio = rows / cols if along_n else cols / rows
    ideal: int = 2 ** round(math.log2(math.sqrt(concurrent_clusters(tile, arch) * ratio)))
    return max(1, min(ideal, cluster_tiles(tile, problem)[along_n]))


def _bytes_read(tile: Tile, problem: Problem, arch: Arch, along_n: int, group: int) -> int:
    """From device memory, of both operands."""
    grouped, other = operand_bytes(problem)[:: -1 if along_n else 1]
    groups = ceil_div(cluster_tiles(tile, problem)[along_n], group)
    return grouped + other * (1 if other <= arch.constants.retained * arch.l2_bytes else groups)


def l2_hints(tile: Tile, problem: Problem, arch: Arch) -> tuple[str, str]:
    """(a_l2, b_l2): an operand that is most of all bytes is a stream, which the L2 cache lets go first.

    Tiles that share a part of it read that at about the same time, and what the cache keeps longer is the rest. On an
    H200 seven such products take 0.6 to 7 % less so; where the result is a larger part of the bytes, it may cost as
    much (docs/hopper.md).

    Where all of it fits into what is `retained`, the cache's own order is right: whoever reads the result, or the
    operands again, finds them. Threads that load, as those of direct tiles do, say nothing to the cache.
    """
    if tile.direct or problem.min_bytes <= arch.constants.retained * arch.l2_bytes:
        return "normal", "normal"
    a, b = ("evict_first" if x > STREAM * problem.min_bytes else "normal" for x in operand_bytes(problem))
    return a, b


def result_hint(tile: Tile, problem: Problem, arch: Arch) -> str:
    """c_l2: a result that does not fit into the L2 cache is let go first, for its reader finds little of it there.

    The cache then writes lines out nearly in the order in which they were stored: on an H100 128*2048x2048x128:nt takes
    467 to 507 us and not 527 to 604, and what multiplies all the time takes as long as before (docs/hopper.md). Smaller
    ones stay, for the next kernel. So do those of direct tiles whose rows or columns do not begin on 16 bytes: tiles
    side by side share lines, and write them at different times.
    """
    fits = result_bytes(problem) <= arch.l2_bytes
    if not arch.family.lets_results_go or fits or (tile.direct and not is_tma_storable(problem)):
        return "normal"
    return "evict_first"


def rounds(tile: Tile, us: float) -> int:
    """Of how many rounds of clusters a kernel of `us` is launched, where those of other kernels want SMs beside it.

    A persistent CTA stays until all tiles are done, so NCCL's, launched behind it, find no SM before that, and where
    they are there first, the CTAs that found none start when the others end. Each new round costs a start, some 3 us:
    of 4096x4096x4096 on an H100, 173 us in one round, 2 % in two and 5 % in four. The gradient of such a layer, its
    batch divided over two H100s, takes 717 us, 660 and 643: the sum of one gradient runs beside the next product.
    Not where clusters share tiles, and may wait for each other.
    """
    return 1 if tile.stream_k or tile.direct else max(1, min(MOST_ROUNDS, int(us / ROUND_US)))
