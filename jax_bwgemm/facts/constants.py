"""The numbers of the cost model: one record a family, which a device's own can replace. Models nothing: that is
`cycles`', `streams`' and `cost`'s.

Each says what it is: published, measured, fitted or assumed. Blackwell's were fitted to ten published figures, which
`python -m jax_bwgemm explain --published` prints with the error of each. Hopper's were fitted to kernel times on an
H200: of random products (`bench/results/regret/h200_fitted.json`), of others with tiles that came later
(`h200_tiles.json`), and of layers of models (a table of measured times that shipped then).
`python -m jax_bwgemm bench --fit` refits them to such files, which `--regret` writes, and prints what the choices lose.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """Cycles are the SMs'; rates are per SM and clock. A field with a default is the same for all families so far.

    Overlaps are exponents of two activities beside each other: the larger, the less they hinder each other. The clock
    falls from `clock_idle_ghz` by `clock_slope_ghz` times the tensor cores' utilisation.
    """

    overlap: float  # tensor cores beside L2 fill
    memory_overlap: float  # SMs beside device memory
    start_cycles: float  # of a CTA: barriers, TMEM
    meeting_cycles: float  # and where it meets a cluster
    l2_read_bytes_per_clk: float  # what one SM gets out of the L2 cache while all of them read
    l2_alone_bytes_per_clk: float  # and while few do
    torn_lines: float  # L2 reads of rows that start off a line, against others
    latency: float  # of loads, against `cycles.LOAD_LATENCY`; `start_cycles` has its part of it
    clock_idle_ghz: float
    clock_slope_ghz: float
    clock_pairs_ghz: float  # what CTA pairs have on top
    thread_store_cycles: float  # per element that a thread, not TMA, stores
    commit_cycles: float  # n MMAs, commit and wait take a*n + this
    commit_pair_cycles: float  # the same of a pair
    issue_cycles: float = 170  # per k step where one warp group both loads and multiplies; fitted, B200
    stream_cycles: float = 3450  # of a tile in parts; fitted, H200
    stream_part: float = 2.9  # and for each part, times reading it from L2; fitted, H200
    stream_start_cycles: float = 300  # of a kernel that may divide tiles, whether it does or not; fitted, H200
    stream_skew: float = 1.05  # a k step of clusters that are at many places of k, against others; assumed
    exchange_cycles: float = 1500  # of a tile that is split along k; fitted, H200
    exchange_cta_cycles: float = 140  # and for each CTA that meets; fitted, H200
    launch_us: float = 2.4  # cuLaunchKernelEx of an empty kernel, measured on an H200, driver 580.159.04
    pass_us: float = 1.4  # of a pass over an operand before a kernel, beside moving it; median of 21 short ones, H200
    store_bytes_per_clk: float = 64  # shared memory to L2 by TMA store: half of shared memory's rate, CUDA C++ guide
    smem_bytes_per_clk: float = 128  # what MMAs read their operands with, CUDA C++ guide; gives published intervals
    special_per_clk: float = 16  # tanh, ex2 and reciprocals of an SM, CUDA C++ guide, arithmetic instructions
    drain_cycles: float = 500  # registers or TMEM through the conversion into shared memory, for one warpgroup's
    # 128x256; assumed
    loop_cycles: float = 0.0  # of a k step's instructions, beside which its MMAs run
    backlog_cycles: float = 0.0  # and where a tile's result leaves during the next one's k steps
    box_cycles: float = 0.0  # and for each box that a warpgroup stores
    torn_bytes: float = 0.0  # of each row of a TMA store that begins and ends within sectors, as if it had so many more
    segment_bytes: float = 0.0  # of each piece of a row that threads store, as if it had so many more
    row_cycles: float = 0.0  # of a CTA's loads, for each row of their boxes, whether it is there or not
    line_cycles: float = 0.0  # of the L2 cache, for each of those that want the same lines at the same time
    turn_cycles: float = 0.0  # from a tile to the next one, where nothing of both is done at the same time
    direct_start_cycles: float = 2830  # of a direct tile, with its first loads' latency; fitted, H200, as the next
    direct_meeting_cycles: float = 2000  # where CTAs divide its k, beside their exchange
    direct_round_cycles: float = 1320  # from a CTA to the one in its place
    direct_step_cycles: float = 234  # of each k tile: its threads meet
    direct_chunk_cycles: float = 21.3  # of a warp's 32 chunks of 16 bytes that are loaded
    direct_raw_cycles: float = 159  # and that are realigned
    direct_element_cycles: float = 12.8  # of an element of each thread that is stored
    thin_start_cycles: float = 5200  # of a thin tile's CTA, with its store; fitted, H200, as the next
    thin_latency_cycles: float = 1450  # of a window's loads
    thin_kib_cycles: float = 23.1  # of a window's instructions, for each KiB of the matrix
    thin_fill_cycles: float = 2440  # of as many terms of the vectors as its threads have on their way at once
    thin_meeting_cycles: float = 1730  # where CTAs divide k
    retained: float = 0.5  # of the L2 cache: an operand that takes more is not found there again a wave later; assumed


HOPPER_CONSTANTS = Constants(
    overlap=4.79,
    memory_overlap=1.5,
    start_cycles=4543,
    meeting_cycles=66.3,
    l2_read_bytes_per_clk=48.9,
    l2_alone_bytes_per_clk=96.1,
    torn_lines=1.48,
    latency=0.142,
    clock_idle_ghz=2.75,
    clock_slope_ghz=1.17,
    clock_pairs_ghz=0.0,
    thread_store_cycles=0.06,  # of our own stores, 16 bytes each
    commit_cycles=0.0,  # wgmmas have none
    commit_pair_cycles=0.0,
    stream_cycles=1212,
    stream_part=2.25,
    stream_start_cycles=1005,
    stream_skew=1.12,
    exchange_cycles=1192,
    exchange_cta_cycles=109,
    store_bytes_per_clk=66.4,
    drain_cycles=1121,
    box_cycles=69.4,
    torn_bytes=20,  # by hand, H100; stores alone of 64 and of 128 bytes say 50
    segment_bytes=40,  # by hand, H100, as the cycles of a thread's store
    row_cycles=1.65,
    line_cycles=0.594,
    turn_cycles=626,
    loop_cycles=98.2,
    backlog_cycles=32.4,
)  # all fitted, H200

BLACKWELL_CONSTANTS = Constants(
    overlap=4.0,  # chosen on an H200 and kept: on the published figures, any is as good
    memory_overlap=1.75,  # fitted
    start_cycles=1000,  # fitted
    meeting_cycles=0,
    l2_read_bytes_per_clk=81.0,  # published TMA microbenchmark, one SM reading; all at once is not published
    l2_alone_bytes_per_clk=81.0,  # the same
    torn_lines=1.0,
    latency=1.0,
    clock_idle_ghz=1.90,
    clock_slope_ghz=0.61,
    clock_pairs_ghz=0.06,  # a published fit, all three
    thread_store_cycles=0.08,  # fitted
    commit_cycles=148,  # published
    commit_pair_cycles=182,  # published
)  # for a B200
