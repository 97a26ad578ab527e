"""In which order tiles run, and which matrices the L2 cache keeps for them. Knows no cost.

Both follow from the bytes that concurrent tiles share; what a family makes of them is in its record.
"""

from __future__ import annotations

import math

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import (
    ceil_div,
    cluster_tiles,
    concurrent_clusters,
    num_waves,
    operand_bytes,
    result_bytes,
)
from jax_bwgemm.facts.padding import is_tma_storable
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile

L2_HINTS = ("normal", "evict_first", "evict_last")
RASTER_ORDERS = ("groups", "snake")
STORE = 12  # times its operands' bytes: what takes as long as its result's store
ROUND_US, MOST_ROUNDS = 80.0, 4  # of a persistent kernel that is launched in rounds: what one takes at least
UNEQUAL = 8  # times the other operand's bytes: a stream from memory, beside which the other one is soon in the L2 cache


def raster(tile: Tile, problem: Problem, arch: Arch) -> tuple[int, int]:
    """(raster_group, raster_along_n): the order of tiles under which the concurrent ones share most of the L2 cache.

    A wave of W cluster tiles over g tile rows reads g tile rows of A and W/g tile columns of B: least where both are
    equally many bytes. Groups of rows read A once, and B once each, unless it stays in `retained` of the cache; groups
    of columns the other way round. Where both read as much, the groups span the longer side. On an H200, rows were
    faster than columns for 4096x128256x4096 and 8192x14336x4096, and columns than rows for 8192x50264x768.

    On Hopper, where all tiles run at once and one operand is much the larger, those that share its parts start one
    after the other: 192x11008x4096 by 256x64 takes 27.9 us on an H200 and not 38.8, by 192x96 28.3 and not 30.0
    (docs/hopper.md). Clusters that share the smaller one take as long in either order.

    A result that does not fit into the L2 cache, beside operands that are a small part of it, is written as it lies:
    1 to 8 % faster there (8192x8192x64:nt, 4696x11976x8, 16384x4096x128), and 2 % slower where it is no more than
    six times its operands (4096x14336x512).
    """
    if _is_store(problem, arch):
        return 1, int(problem.c_major == "m")
    a, b = operand_bytes(problem)
    is_stream = num_waves(tile, problem, arch) == 1 and max(a, b) >= UNEQUAL * min(a, b)
    if is_stream and arch.family.neighbours_share:
        return 1, int(b > a)
    longer = int(problem.n > problem.m)
    choices = {along_n: _group(tile, problem, arch, along_n) for along_n in (longer, 1 - longer)}
    along_n = min(choices, key=lambda along_n: _bytes_read(tile, problem, arch, along_n, choices[along_n]))
    return choices[along_n], along_n


def _is_store(problem: Problem, arch: Arch) -> bool:
    read = sum(operand_bytes(problem))
    return problem.min_bytes - read > max(arch.l2_bytes, STORE * read)


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
    """(a_l2, b_l2): what to keep in the L2 cache, and what to let go first.

    Where all of it fits, the cache's own order is right: whoever reads the result, or the operands again, finds them.
    Else an operand that no second tile reads is let go first, so that it does not push out what others read again;
    and so is one larger than the cache that concurrent tiles do not share, for it will be gone before it is read
    again. An operand that is read again and fits (in `retained` of the cache) is kept last beside such a stream.
    Two operands that are both shared by concurrent tiles need no hint: the tile order keeps what they share.
    """
    if not arch.family.takes_l2_hints or problem.min_bytes <= arch.constants.retained * arch.l2_bytes:
        return "normal", "normal"
    streams = _is_stream("a", tile, problem, arch), _is_stream("b", tile, problem, arch)
    sizes = operand_bytes(problem)
    a, b = (_hint(*facts, arch) for facts in zip(sizes, streams, streams[::-1], strict=True))
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


def _hint(size: int, is_stream: bool, is_other_stream: bool, arch: Arch) -> str:
    if is_stream:
        return "evict_first"
    return "evict_last" if is_other_stream and size <= arch.constants.retained * arch.l2_bytes else "normal"


def _is_stream(operand: str, tile: Tile, problem: Problem, arch: Arch) -> bool:
    """Whether one tile reads each part of it, or several whose reads lie too far apart: not where all run at once."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    is_a = operand == "a"
    own_batch = (problem.a_batch if is_a else problem.b_batch) > 1
    reads = (tiles_n if is_a else tiles_m) * (1 if own_batch else problem.batch)
    if reads == 1 or num_waves(tile, problem, arch) == 1:
        return reads == 1
    group, along_n = raster(tile, problem, arch)
    across = ceil_div(concurrent_clusters(tile, arch), group)
    sharing = min(reads, (group if along_n else across) if is_a else (across if along_n else group))
    return sharing == 1 and operand_bytes(problem)[0 if is_a else 1] > arch.l2_bytes
