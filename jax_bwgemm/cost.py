"""Analytic cost of a tile: cycles of its main loop, its waves and its memory traffic. States no preference.

The model orders tiles; it does not promise a time. From the inside out:

    k step   the tensor cores beside the L2 cache that fills a stage; at least a load's latency over the stages
    tile     its k steps (divided by `cluster_k`), and what of commit, exchange and epilogue no main loop hides
    launch   as many waves of cluster tiles as the SMs need, or whole waves and a stream of k tiles that all clusters
             share (stream-K); beside the traffic to device memory
    around   passes over operands whose rows TMA cannot step over

The SMs' clock falls as the tensor cores' utilisation rises (published for Blackwell, fitted for Hopper), which takes a
fixed point; L2 and device memory are taken to keep their own clock. That is an assumption, as `RETAINED` is.

The constants of the first group below say what they are: published, measured or assumed. Those of the second are
fitted: Blackwell's to ten figures, which `python -m jax_bwgemm explain --published` prints with the error of each;
Hopper's to the kernel times of 120 random products and of the benchmark's on an H200. What they are worth is measured:
`python -m jax_bwgemm bench --regret 200` prints what the model's choices lose on a GPU, and `bench --fit` refits
Hopper's constants to what it wrote.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jax_bwgemm.arch import Arch, family
from jax_bwgemm.padding import is_torn, padded_shape, padding
from jax_bwgemm.problem import COARSE_DTYPES, DTYPE_BYTES, GATES, Problem
from jax_bwgemm.tile import (
    INT32_MAX,
    Tile,
    acc_stages,
    defers_store,
    is_tma_storable,
    num_stages,
    num_threads,
    reads_a_from_registers,
    store_boxes,
    store_buffers,
)

MMA_K_BYTES = 32  # the k extent of one wgmma or tcgen05.mma, PTX ISA
COMMIT_CYCLES = {1: 148, 2: 182}  # by cta_group: n MMAs, commit and wait take a*n + this; published, B200
LOAD_LATENCY = ((512, 900), (65536, 2700))  # (bytes, cycles) of a TMA round trip; published, B200; linear between
LAUNCH_US = 2.4  # cuLaunchKernelEx of an empty kernel, measured on an H200, driver 580.159.04
STORE_BYTES_PER_CLK = 64  # shared memory to L2 by TMA store: half of shared memory's 128 B/clk, CUDA C++ guide
SMEM_BYTES_PER_CLK = 128  # what MMAs read their operands with, CUDA C++ guide; gives the published intervals
SPECIAL_PER_CLK = 16  # tanh, ex2 and reciprocals of an SM, CUDA C++ guide, arithmetic instructions
DRAIN_CYCLES = 500  # registers or TMEM through the conversion into shared memory, for one warpgroup's 128x256; assumed
RETAINED = 0.5  # of the L2 cache: an operand that takes more is not found there again a wave later; assumed
CLOCK = (1.90, 0.61, 0.06)  # GHz: first - second * utilisation, plus third for CTA pairs; published fit, B200
CLOCK_TOLERANCE_GHZ, CLOCK_STEPS = 1e-4, 32  # of the fixed point: a contraction, since slope * utilisation < clock

OVERLAP = {"hopper": 6.5, "blackwell": 4.0}  # exponent, tensor cores beside L2 fill; on the published, any is as good
MEMORY_OVERLAP = {"hopper": 1.17, "blackwell": 1.75}  # exponent, SMs beside device memory
START_CYCLES = {"hopper": 4300, "blackwell": 1000}  # of a CTA: barriers, TMEM
MEETING_CYCLES = {"hopper": 1170, "blackwell": 0}  # and where it meets a cluster
L2_ALONE_BYTES_PER_CLK = {"hopper": 70.0, "blackwell": 81.0}  # what a CTA reads when few do; published for a B200
TORN_LINES = {"hopper": 1.31, "blackwell": 1.0}  # L2 reads of rows that start off a line, against others
LATENCY = {"hopper": 0.3, "blackwell": 1.0}  # of loads, against LOAD_LATENCY; START_CYCLES has its part of it
HOPPER_CLOCK = 2.91, 1.37  # GHz: first - second * utilisation, at most the highest clock
ISSUE_CYCLES = 170  # per k step where one warp group both loads and multiplies
THREAD_STORE_CYCLES = 0.08  # per element that a thread, not TMA, stores
HOPPER_THREAD_STORE_CYCLES = 0.061  # the same of our own stores, 16 bytes each
STREAM_CYCLES, STREAM_PART = 3450, 2.9  # of a tile in parts; and for each part, times reading it from L2
STREAM_START_CYCLES = 300  # of a kernel that may divide tiles, whether it does or not: its share of them
STREAM_SKEW = 1.05  # a k step of clusters that are at many places of k, against others; assumed
MAX_PARTS = 16  # of a tile, at most; assumed
EXCHANGE_CYCLES = 1500, 140  # of a tile that is split along k, and for each CTA that meets


@dataclasses.dataclass(frozen=True)
class Stream:
    """The last `tiles` cluster tiles are divided along k between `clusters` clusters; none by default."""

    tiles: int = 0
    clusters: int = 1


NO_STREAM = Stream()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a kernel goes about its tiles. The defaults are the shipped kernels'; the rest is there to model others'.

    `has_load_warp`: loads and MMAs are issued by different warps. `loads_run_ahead` into the next tile.
    `is_grouped`: concurrent tiles form a square, not a row. `store`: "tma" or "threads". `defers_store`: a result
    leaves during the next tile's main loop. `stream`: which tiles the clusters share.
    """

    stages: int
    acc_stages: int = 1
    is_persistent: bool = True
    has_load_warp: bool = True
    loads_run_ahead: bool = True
    is_grouped: bool = True
    store: str = "tma"
    defers_store: bool = False
    stream: Stream = NO_STREAM


@dataclasses.dataclass(frozen=True)
class Cost:
    """`us` on the device, `utilisation` of its dense peak for these dtypes, `waves` of cluster tiles, what `bound` the
    time, how many `l2_bytes` all CTAs read, the SMs' `clock_ghz`, and what of `us` went into padding operands.

    `mma_interval`: cycles of one MMA; `fill_rate`: bytes a clock that a CTA must read from L2 to keep up with them.
    """

    us: float
    utilisation: float
    waves: int
    bound: str
    l2_bytes: float
    clock_ghz: float
    padding_us: float
    mma_interval: float
    fill_rate: float


def cost(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule | None = None) -> Cost:
    """What `tile` takes for `problem` on `arch`. Meaningful only where `legality.why_not` has no objection."""
    schedule = schedule or shipped_schedule(tile, problem, arch)
    memory_us = memory_bytes(tile, problem, arch, schedule.is_grouped) / (arch.memory_tb_per_s * 1e6)
    clock = arch.clock_ghz
    for _ in range(CLOCK_STEPS):
        compute_us = _launch_cycles(tile, problem, arch, schedule, clock) / (clock * 1e3)
        us = _overlapped(compute_us, memory_us, MEMORY_OVERLAP[family(arch.target)])
        at_clock = problem.flops / (us * 1e3 * clock * arch.num_sms * arch.flops_per_clk(problem.a_dtype))
        before, clock = clock, loaded_clock(tile, arch, at_clock)
        if abs(clock - before) < CLOCK_TOLERANCE_GHZ:
            break
    bound = "memory" if memory_us > compute_us else _step_bound(tile, problem, arch, schedule, clock)
    padding_us = _padding_us(problem, arch)
    us += LAUNCH_US + padding_us
    utilisation = problem.flops / (us * 1e6 * peak_tflops(problem, arch))
    waves, rate = num_waves(tile, problem, arch), fill_rate(tile, DTYPE_BYTES[problem.a_dtype], arch)
    l2_bytes, interval = _l2_bytes(tile, problem), mma_interval(tile, arch)
    return Cost(us, utilisation, waves, bound, l2_bytes, clock, padding_us, interval, rate)


def peak_tflops(problem: Problem, arch: Arch) -> float:
    """Dense, for the problem's dtypes, at the device's highest clock."""
    return arch.num_sms * arch.clock_ghz * arch.flops_per_clk(problem.a_dtype) / 1e3


def roofline_us(problem: Problem, arch: Arch) -> float:
    """No kernel takes less: the tensor cores at the highest clock, or each byte moved once."""
    return max(problem.flops / (peak_tflops(problem, arch) * 1e6), problem.min_bytes / (arch.memory_tb_per_s * 1e6))


def shipped_schedule(tile: Tile, problem: Problem, arch: Arch) -> Schedule:
    """What our kernels do with a tile."""
    is_blackwell = family(arch.target) == "blackwell"
    store = "tma" if is_tma_storable(problem) else "threads"
    has_residual = problem.epilogue.has_residual
    return Schedule(
        num_stages(tile, problem.a_dtype, problem.out_dtype, arch, has_residual),
        acc_stages(tile, arch.tmem_cols) if is_blackwell else 1,
        store=store,
        defers_store=_leaves_later(tile, problem, arch, store),
        stream=best_stream(tile, problem, arch),
    )


def _leaves_later(tile: Tile, problem: Problem, arch: Arch, store: str) -> bool:
    """Hopper: from registers, or where a residual has been, from store buffers for a whole tile."""
    if problem.epilogue.has_residual and family(arch.target) == "hopper":
        buffers = store_buffers(tile, problem.out_dtype, arch.target, has_residual=True)
        return buffers == store_boxes(tile, problem.out_dtype)
    a_in_registers = reads_a_from_registers(problem.a_dtype, problem.a_major, arch.target)
    return defers_store(tile, problem.out_dtype, store, arch.target, a_in_registers)


def loaded_clock(tile: Tile, arch: Arch, utilisation: float) -> float:
    """GHz of the SMs while their tensor cores are busy for this fraction of the time."""
    if family(arch.target) == "hopper":
        return min(arch.clock_ghz, HOPPER_CLOCK[0] - HOPPER_CLOCK[1] * utilisation)
    idle, slope, pairs = CLOCK
    return min(arch.clock_ghz, idle - slope * utilisation + pairs * (tile.cta_group - 1))


def num_waves(tile: Tile, problem: Problem, arch: Arch) -> int:
    """Rounds of cluster tiles, one CTA a SM."""
    return _ceil_div(num_tiles(tile, problem), concurrent_clusters(tile, arch))


def num_tiles(tile: Tile, problem: Problem) -> int:
    """Cluster tiles, those of all matrices of the batch."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    return tiles_m * tiles_n * problem.batch


def best_stream(tile: Tile, problem: Problem, arch: Arch) -> Stream:
    """Which tiles are best divided between all clusters. More clusters have less to multiply each, but one of them adds
    up what the others have of its tile."""
    if not tile.stream_k:
        return NO_STREAM
    return min(_streams(tile, problem, arch), key=lambda stream: _alone_cycles(tile, problem, arch, stream))


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
    mma, fill = mma_cycles(tile, DTYPE_BYTES[problem.a_dtype], arch), fill_cycles(tile, problem, arch, stream)
    step = _overlapped(mma, fill, OVERLAP[family(arch.target)])
    waves, last = _waves(tile, problem, arch, step, stream)
    return waves * k_steps(tile, problem) * step + last


def _waves(tile: Tile, problem: Problem, arch: Arch, step: float, stream: Stream) -> tuple[int, float]:
    """Waves of whole tiles before the last one or the stream; main loop and exchange of that."""
    clusters, k_tiles = concurrent_clusters(tile, arch), k_steps(tile, problem)
    whole = _ceil_div(num_tiles(tile, problem) - stream.tiles, clusters)
    if stream.tiles == 0:
        return whole - 1, k_tiles * step
    is_even = stream.clusters % stream.tiles == 0
    step = max(step * (1.0 if is_even else STREAM_SKEW), _stream_memory_cycles(tile, problem, arch, stream))
    parts = _ceil_div(stream.clusters, stream.tiles) - is_even
    part = STREAM_PART * 4 * tile.cta_m * tile.mma_n / arch.l2_read_bytes_per_clk
    exchange = STREAM_CYCLES + part * max(1, parts)
    return whole, _ceil_div(stream.tiles * k_tiles, stream.clusters) * step + exchange


def _stream_memory_cycles(tile: Tile, problem: Problem, arch: Arch, stream: Stream) -> float:
    """What device memory takes for a k step of all clusters that share tiles.

    They are at `phases` places of k at the same time. What lies too far apart for the L2 cache to keep is read at each
    of these places for the fewer tiles that are there: square blocks of them read sqrt(phases) times as much, but no
    more than without any sharing.
    """
    rows, cols = _wave_shape(tile, problem, arch)
    phases = stream.clusters // math.gcd(stream.clusters, stream.tiles)
    in_bytes = DTYPE_BYTES[problem.a_dtype]
    between = k_steps(tile, problem) / phases * stream.clusters * fill_bytes(tile, in_bytes) * tile.cluster_ctas
    more = 1.0 if between <= RETAINED * arch.l2_bytes else math.sqrt(phases)
    a, b = rows * tile.cluster_m * tile.cta_m * min(more, cols), cols * tile.cluster_n * tile.mma_n * min(more, rows)
    kept = RETAINED * arch.l2_bytes / (problem.k * in_bytes)  # rows of an operand that stay in the L2 cache
    moved = (a if problem.m > kept else 0) + (b if problem.n > kept else 0)
    return moved * tile.k_tile * in_bytes / memory_bytes_per_clk(arch)


def memory_bytes_per_clk(arch: Arch) -> float:
    """Of all device memory, in clocks of the SMs' highest."""
    return arch.memory_tb_per_s * 1e3 / arch.clock_ghz


def concurrent_clusters(tile: Tile, arch: Arch) -> int:
    """Those of four CTAs and more leave SMs idle, where a GPC has SMs for no more of them: of 132, 120 are at work."""
    return arch.max_clusters(tile.cluster_ctas)


def cluster_tiles(tile: Tile, problem: Problem) -> tuple[int, int]:
    """Cluster tiles along m and n of one matrix of the batch."""
    return _ceil_div(problem.m, tile.cluster_m * tile.cta_m), _ceil_div(problem.n, tile.cluster_n * tile.mma_n)


def k_steps(tile: Tile, problem: Problem) -> int:
    """Stages that one CTA goes through for a tile."""
    return _ceil_div(_ceil_div(problem.k, tile.k_tile), tile.cluster_k)


def mma_interval(tile: Tile, arch: Arch) -> float:
    """Tensor core cycles of one MMA, which covers 32 bytes of k: the multiplier's rate, or reading the operands.

    The rates: wgmma m64nN takes N/2 cycles (measured on an H200); tcgen05.mma N/2, but N/4 with 128 rows over a pair
    (published, B200). A CTA's tensor cores read its rows of A and its columns of B at SMEM_BYTES_PER_CLK, which gives
    the published 32 + N/4 (1-CTA), 32 + N/8 and 16 + N/8 (2-CTA), and the H200's knee at N = 64. For 64 rows on one
    Blackwell CTA only N/2 is published; the operands' term is below it from N = 64 on.
    """
    if family(arch.target) == "hopper":
        warpgroup_mmas = tile.mma_m // 64
        return warpgroup_mmas * max(tile.mma_n / 2, (64 + tile.mma_n) * MMA_K_BYTES / SMEM_BYTES_PER_CLK)
    is_half = tile.cta_group == 2 and tile.mma_m == 128
    rows = tile.mma_m // tile.cta_group
    operands = (rows + tile.load_n) * MMA_K_BYTES / SMEM_BYTES_PER_CLK
    return max(tile.mma_n / (4 if is_half else 2), operands)


def mma_cycles(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Tensor core cycles of one k step of one CTA (or CTA pair)."""
    return tile.num_accs * mma_interval(tile, arch) * tile.k_tile * in_bytes / MMA_K_BYTES


def fill_cycles(tile: Tile, problem: Problem, arch: Arch, stream: Stream = NO_STREAM) -> float:
    """L2 cycles of one k step of one CTA, at the device's highest clock.

    The CTAs at work share what all SMs get out of the L2 cache, until one has all that it can take. A row of a load
    that does not start on a line of 128 bytes lies in one more.
    """
    kind, clusters = family(arch.target), max(num_tiles(tile, problem), stream.clusters)
    ctas = min(concurrent_clusters(tile, arch), clusters) * tile.cluster_ctas
    rate = min(L2_ALONE_BYTES_PER_CLK[kind], arch.l2_read_bytes_per_clk * arch.num_sms / ctas)
    a, b = fill_parts(tile, DTYPE_BYTES[problem.a_dtype])
    torn_a, torn_b = (TORN_LINES[kind] if is_torn(problem, x) else 1.0 for x in "ab")
    return (a * torn_a + b * torn_b) / rate


def fill_parts(tile: Tile, in_bytes: int) -> tuple[float, float]:
    """Bytes of a and b that one k step of one CTA reads from L2: a multicast operand counts once for the CTAs that
    share it."""
    a_rows = tile.cta_m / tile.cluster_n
    b_rows = tile.load_n / (tile.cluster_m / tile.cta_group)
    return a_rows * tile.k_tile * in_bytes, b_rows * tile.k_tile * in_bytes


def fill_bytes(tile: Tile, in_bytes: int) -> float:
    return sum(fill_parts(tile, in_bytes))


def fill_rate(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Bytes a clock that one CTA must read from L2 while its tensor cores never wait."""
    return fill_bytes(tile, in_bytes) / mma_cycles(tile, in_bytes, arch)


def load_latency(tile: Tile, in_bytes: int, arch: Arch) -> float:
    """Cycles from issuing the larger operand's load to its arrival, at the highest clock."""
    (small, least), (large, most) = LOAD_LATENCY
    size = max(tile.cta_m // tile.num_accs, tile.load_n) * tile.k_tile * in_bytes
    return LATENCY[family(arch.target)] * (least + (most - least) * (size - small) / (large - small))


def epilogue_cycles(
    tile: Tile, out_bytes: int, arch: Arch, store: str = "tma", store_bytes_per_clk: float = STORE_BYTES_PER_CLK
) -> float:
    """Conversion and store of one CTA's part of the result."""
    elems = tile.cta_m * tile.mma_n / tile.cluster_k
    if store == "threads":
        each = HOPPER_THREAD_STORE_CYCLES if family(arch.target) == "hopper" else THREAD_STORE_CYCLES
        return elems * max(each, out_bytes / store_bytes_per_clk)
    is_shared = family(arch.target) == "hopper" and not tile.pingpong
    warpgroups = num_threads(tile, arch.target) // 128 - 1 if is_shared else 1
    return DRAIN_CYCLES * elems / (128 * 256 * warpgroups) + elems * out_bytes / store_bytes_per_clk


def gate_cycles(tile: Tile, problem: Problem) -> float:
    """The special functions of one CTA's part of the result: tanh, or where that is too coarse ex2 and a reciprocal."""
    if problem.epilogue.activation not in GATES:
        return 0.0
    each = 1 if problem.out_dtype in COARSE_DTYPES else 2
    return tile.cta_m * tile.mma_n / tile.cluster_k * each / SPECIAL_PER_CLK


def store_rate(tile: Tile, problem: Problem, arch: Arch) -> float:
    """Bytes a clock at which a CTA stores: shared memory's rate, or its share of device memory's where all CTAs store
    and the L2 cache cannot take it (Hopper, whose cooperative warpgroups load nothing meanwhile)."""
    out_bytes = problem.batch * problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    if family(arch.target) == "blackwell" or out_bytes <= RETAINED * arch.l2_bytes:
        return STORE_BYTES_PER_CLK
    return memory_bytes_per_clk(arch) / (concurrent_clusters(tile, arch) * tile.cluster_ctas)


def exchange_cycles(tile: Tile, arch: Arch) -> float:
    """Split-K: each CTA reads its part of the accumulators of the others, through distributed shared memory.

    Assumed to be as fast as L2; what the CTAs' meetings cost is fitted.
    """
    if tile.cluster_k == 1:
        return 0.0
    others = 4 * tile.cta_m * tile.mma_n * (tile.cluster_k - 1) / tile.cluster_k
    return EXCHANGE_CYCLES[0] + EXCHANGE_CYCLES[1] * tile.cluster_k + others / arch.l2_read_bytes_per_clk


def memory_bytes(tile: Tile, problem: Problem, arch: Arch, is_grouped: bool = True) -> float:
    """Device memory traffic: an operand that does not stay in L2 is read again for each block of concurrent tiles."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    rows, cols = _wave_shape(tile, problem, arch, is_grouped)
    in_bytes, retained = DTYPE_BYTES[problem.a_dtype], RETAINED * arch.l2_bytes
    moved = float(problem.min_bytes)
    operands = (problem.m, problem.a_batch, tiles_n / cols), (problem.n, problem.b_batch, tiles_m / rows)
    for extent, batch, blocks in operands:
        matrix = extent * problem.k * in_bytes
        if matrix > retained:
            moved += batch * matrix * (problem.batch // batch * blocks - 1)
    return moved


def _wave_shape(tile: Tile, problem: Problem, arch: Arch, is_grouped: bool = True) -> tuple[float, float]:
    """Cluster tiles along m and n that run at the same time."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    wave = concurrent_clusters(tile, arch)
    ideal = math.sqrt(wave * tile.cluster_n * tile.mma_n / (tile.cluster_m * tile.cta_m))
    rows = max(1.0, min(tiles_m, ideal if is_grouped else wave / tiles_n))
    return rows, max(1.0, min(tiles_n, wave / rows))


def _launch_cycles(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> float:
    waves, in_bytes = num_waves(tile, problem, arch), DTYPE_BYTES[problem.a_dtype]
    out_bytes = DTYPE_BYTES[problem.out_dtype] * (1 + problem.epilogue.has_residual)  # which comes as a result goes
    kind = family(arch.target)
    latency = load_latency(tile, in_bytes, arch) * clock / arch.clock_ghz
    start = START_CYCLES[kind] + latency + (MEETING_CYCLES[kind] if tile.cluster_ctas > 1 else 0)
    start += STREAM_START_CYCLES if tile.stream_k else 0
    step = _step_cycles(tile, problem, arch, schedule, clock)
    main = k_steps(tile, problem) * step
    epilogue = COMMIT_CYCLES[tile.cta_group] if kind == "blackwell" else 0.0
    rate = store_rate(tile, problem, arch)
    gate = gate_cycles(tile, problem)
    epilogue += epilogue_cycles(tile, out_bytes, arch, schedule.store, rate) + gate
    epilogue += exchange_cycles(tile, arch)
    if not schedule.is_persistent:
        return waves * (start + main + epilogue)
    if schedule.acc_stages == 2:
        return start + main + (waves - 1) * max(main, epilogue) + epilogue
    if tile.pingpong:  # two tiles at a time: one's epilogue beside the other's main loop, both through one way out
        way_out = tile.cta_m * tile.mma_n * out_bytes / rate
        return start + main + (waves - 1) * max(main, (main + epilogue) / 2, way_out) + epilogue
    waves, last = _waves(tile, problem, arch, step, schedule.stream)
    if schedule.defers_store:
        shown = epilogue_cycles(tile, 0, arch) + gate  # the rounding
        return start + waves * max(main + shown, epilogue) + last + epilogue
    refill = 0.0 if schedule.loads_run_ahead else latency
    return start + waves * (main + epilogue + refill) + last + epilogue


def _step_cycles(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> float:
    mma, fill, hidden = _step_parts(tile, problem, arch, schedule, clock)
    return max(_overlapped(mma, fill, OVERLAP[family(arch.target)]), hidden)


def _step_parts(
    tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float
) -> tuple[float, float, float]:
    """SM cycles of a step if only the tensor cores, the L2 cache or the loads' latency counted."""
    own_clock, in_bytes = clock / arch.clock_ghz, DTYPE_BYTES[problem.a_dtype]
    mma = mma_cycles(tile, in_bytes, arch) + (0 if schedule.has_load_warp else ISSUE_CYCLES)
    latency = load_latency(tile, in_bytes, arch) * own_clock
    return mma, fill_cycles(tile, problem, arch, schedule.stream) * own_clock, (latency + mma) / schedule.stages


def _overlapped(x: float, y: float, exponent: float) -> float:
    """Two activities beside each other: the longer one, and more the closer they are, for neither is smooth."""
    return (x**exponent + y**exponent) ** (1 / exponent)


def repack_us(problem: Problem, operand: str, arch: Arch) -> float:
    """One pass over operand "a" or "b": it is read and, with its padding, written."""
    batch, rows, row = padded_shape(problem, operand)
    return pass_us(batch * rows * (2 * row - padding(problem, operand)) * DTYPE_BYTES[problem.a_dtype], arch)


def pass_us(size: int, arch: Arch) -> float:
    """A kernel that does nothing but move `size` bytes of device memory."""
    return LAUNCH_US + size / (arch.memory_tb_per_s * 1e6)


def _padding_us(problem: Problem, arch: Arch) -> float:
    """A pass over each operand whose rows TMA cannot step over."""
    return sum(repack_us(problem, x, arch) for x in "ab" if padding(problem, x))


def _l2_bytes(tile: Tile, problem: Problem) -> float:
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    steps = tiles_m * tiles_n * problem.batch * tile.cluster_ctas * k_steps(tile, problem)
    return steps * fill_bytes(tile, DTYPE_BYTES[problem.a_dtype])


def _step_bound(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> str:
    mma, fill, hidden = _step_parts(tile, problem, arch, schedule, clock)
    if hidden > max(mma, fill):
        return "latency"
    return "L2" if fill > mma else "tensor cores"


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
