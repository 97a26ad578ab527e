"""Analytic cost of a tile: cycles of its main loop, its waves and its memory traffic. States no preference.

The model orders tiles; it does not promise a time. From the inside out:

    k step   the tensor cores beside the L2 cache that fills a stage; at least a load's latency over the stages
    tile     its k steps (divided by `cluster_k`), and what of commit, exchange and epilogue no main loop hides
    launch   as many waves of cluster tiles as the SMs need, or whole waves and a stream of k tiles that all clusters
             share (stream-K); beside the traffic to device memory
    around   passes over operands whose rows TMA cannot step over

The SMs' clock falls as the tensor cores' utilisation rises (published for Blackwell, fitted for Hopper), which takes a
fixed point; L2 and device memory are taken to keep their own clock. That is an assumption, as `retained` is.

The numbers are the arch's `constants`: another record is another model, and no module changes. What they are worth is
measured: `python -m jax_bwgemm bench --regret 200` prints what the model's choices lose on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.geometry import cluster_tiles, k_steps, l2_bytes, multiplied_flops, num_waves, wave_shape
from jax_bwgemm.facts.padding import is_padded_together, padded_shape, padding, store_of
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.resources import (
    acc_stages,
    defers_store,
    moves_of,
    num_stages,
    reads_a_from_registers,
    store_boxes,
    store_buffers,
)
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cycles import (
    box_cycles,
    commit_cycles,
    epilogue_cycles,
    exchange_cycles,
    fill_cycles,
    fill_rate,
    gate_cycles,
    load_latency,
    loaded_clock,
    mma_cycles,
    mma_interval,
    overlapped,
    store_rate,
)
from jax_bwgemm.planner.direct import direct_cycles, launch_stages
from jax_bwgemm.planner.one_pass import thin_cycles
from jax_bwgemm.planner.streams import NO_STREAM, Stream, best_stream, waves_and_rest

CLOCK_TOLERANCE_GHZ, CLOCK_STEPS = 1e-4, 32  # of the fixed point: a contraction, since slope * utilisation < clock


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
    """What `tile` takes for `problem` on `arch`, by its `constants`. Meaningful only where `legality.why_not` has no
    objection."""
    schedule = schedule or shipped_schedule(tile, problem, arch)
    memory_us = memory_bytes(tile, problem, arch, schedule.is_grouped) / (arch.memory_tb_per_s * 1e6)
    clock, flops = arch.clock_ghz, multiplied_flops(tile, problem)
    for _ in range(CLOCK_STEPS):
        compute_us = _launch_cycles(tile, problem, arch, schedule, clock) / (clock * 1e3)
        us = overlapped(compute_us, memory_us, arch.constants.memory_overlap)
        at_clock = flops / (us * 1e3 * clock * arch.num_sms * arch.flops_per_clk(problem.a_dtype))
        before, clock = clock, loaded_clock(tile, arch, at_clock)
        if abs(clock - before) < CLOCK_TOLERANCE_GHZ:
            break
    bound = "memory" if memory_us > compute_us else _step_bound(tile, problem, arch, schedule, clock)
    padding_us = 0.0 if tile.direct else _padding_us(problem, arch, "a" if tile.symmetric else "ab")
    us += arch.constants.launch_us + padding_us
    utilisation = problem.flops / (us * 1e6 * peak_tflops(problem, arch))
    waves, rate = num_waves(tile, problem, arch), fill_rate(tile, DTYPE_BYTES[problem.a_dtype], arch)
    read, interval = l2_bytes(tile, problem), mma_interval(tile, arch)
    return Cost(us, utilisation, waves, bound, read, clock, padding_us, interval, rate)


def peak_tflops(problem: Problem, arch: Arch) -> float:
    """Dense, for the problem's dtypes, at the device's highest clock."""
    return arch.num_sms * arch.clock_ghz * arch.flops_per_clk(problem.a_dtype) / 1e3


def roofline_us(problem: Problem, arch: Arch) -> float:
    """No kernel takes less: the tensor cores at the highest clock, or each byte moved once."""
    return max(problem.flops / (peak_tflops(problem, arch) * 1e6), problem.min_bytes / (arch.memory_tb_per_s * 1e6))


@functools.lru_cache(maxsize=1024)  # for a tile's cost, and for the features of that
def shipped_schedule(tile: Tile, problem: Problem, arch: Arch) -> Schedule:
    """What our kernels do with a tile."""
    store = store_of(tile, problem)
    if tile.direct:
        own = num_stages(tile, problem.a_dtype, problem.out_dtype, arch)
        return Schedule(launch_stages(tile, problem, arch) or own, store=store)
    return Schedule(
        num_stages(tile, problem.a_dtype, problem.out_dtype, arch, moves_of(tile, problem.epilogue.moves)),
        acc_stages(tile, arch.tmem_cols),
        store=store,
        defers_store=_leaves_later(tile, problem, arch, store),
        stream=best_stream(tile, problem, arch),
    )


def _leaves_later(tile: Tile, problem: Problem, arch: Arch, store: str) -> bool:
    """From registers, or where matrices have been, from store buffers for a whole tile."""
    moves = moves_of(tile, problem.epilogue.moves)
    if moves.matrices:
        buffers = store_buffers(tile, problem.out_dtype, arch.target, moves)
        return arch.family.residual_buffers > 0 and buffers == store_boxes(tile, problem.out_dtype)
    a_in_registers = reads_a_from_registers(problem.a_dtype, problem.a_major, arch.target)
    return defers_store(tile, problem.out_dtype, store, arch.target, a_in_registers, moves)


def memory_bytes(tile: Tile, problem: Problem, arch: Arch, is_grouped: bool = True) -> float:
    """Device memory traffic: an operand that does not stay in L2 is read again for each block of concurrent tiles."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    rows, cols = wave_shape(tile, problem, arch, is_grouped)
    in_bytes, retained = DTYPE_BYTES[problem.a_dtype], arch.constants.retained * arch.l2_bytes
    moved = float(problem.min_bytes)
    columns = problem.n * problem.num_bs
    operands = (problem.m, problem.a_batch, tiles_n / cols), (columns, problem.b_batch, tiles_m / rows)
    for extent, batch, blocks in operands:
        matrix = extent * problem.k * in_bytes
        if matrix > retained:
            moved += batch * matrix * (problem.batch // batch * blocks - 1)
    return moved


def _launch_cycles(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> float:
    if tile.is_thin:
        return thin_cycles(tile, problem, arch)
    if tile.direct:
        return direct_cycles(tile, problem, arch) + gate_cycles(tile, problem, arch)
    c, in_bytes = arch.constants, DTYPE_BYTES[problem.a_dtype]
    moves = moves_of(tile, problem.epilogue.moves)
    out_bytes = DTYPE_BYTES[problem.out_dtype] * (moves.matrices + moves.results)  # matrices come as results go
    latency = load_latency(tile, in_bytes, arch) * clock / arch.clock_ghz
    start = c.start_cycles + latency + (c.meeting_cycles if tile.cluster_ctas > 1 else 0)
    start += c.stream_start_cycles if tile.stream_k else 0
    step = _step_cycles(tile, problem, arch, schedule, clock)
    main = k_steps(tile, problem) * step
    rate, gate = store_rate(tile, problem, arch, schedule.store), gate_cycles(tile, problem, arch)
    epilogue = commit_cycles(tile, arch)
    epilogue += epilogue_cycles(tile, out_bytes, arch, schedule.store, rate) + gate
    epilogue += box_cycles(tile, problem, arch) if schedule.store == "tma" else 0
    epilogue += exchange_cycles(tile, arch)
    waves = num_waves(tile, problem, arch)
    if not schedule.is_persistent:
        return waves * (start + main + epilogue)
    if schedule.acc_stages == 2:
        return start + main + (waves - 1) * max(main, epilogue) + epilogue
    if tile.pingpong:  # two tiles at a time: one's epilogue beside the other's main loop, both through one way out
        way_out = tile.cta_m * tile.out_n * out_bytes / rate
        return start + main + (waves - 1) * max(main, (main + epilogue) / 2, way_out) + epilogue
    waves, last = waves_and_rest(tile, problem, arch, step, schedule.stream)
    if schedule.defers_store:
        shown = epilogue_cycles(tile, 0, arch) + gate  # the rounding
        return start + waves * (max(main + shown, epilogue) + c.turn_cycles) + last + epilogue
    refill = 0.0 if schedule.loads_run_ahead else latency
    return start + waves * (main + epilogue + refill + c.turn_cycles) + last + epilogue


def _step_cycles(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> float:
    mma, fill, hidden = _step_parts(tile, problem, arch, schedule, clock)
    c = arch.constants
    issued = c.loop_cycles + (c.backlog_cycles if schedule.defers_store else 0)
    return max(overlapped(mma, fill, c.overlap), hidden, issued)


def _step_parts(
    tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float
) -> tuple[float, float, float]:
    """SM cycles of a step if only the tensor cores, the L2 cache or the loads' latency counted."""
    own_clock, in_bytes = clock / arch.clock_ghz, DTYPE_BYTES[problem.a_dtype]
    mma = mma_cycles(tile, in_bytes, arch)
    mma += 0 if schedule.has_load_warp else arch.constants.issue_cycles
    latency = load_latency(tile, in_bytes, arch) * own_clock
    fill = fill_cycles(tile, problem, arch, schedule.stream.clusters) * own_clock
    return mma, fill, (latency + mma) / schedule.stages


def repack_us(problem: Problem, operand: str, arch: Arch) -> float:
    """One pass over operand "a" or "b": it is read and, with its padding, written."""
    batch, rows, row = padded_shape(problem, operand)
    return pass_us(batch * rows * (2 * row - padding(problem, operand)) * DTYPE_BYTES[problem.a_dtype], arch)


def pass_us(size: int, arch: Arch) -> float:
    """A kernel that does nothing but move `size` bytes of device memory."""
    return arch.constants.pass_us + size / (arch.memory_tb_per_s * 1e6)


def _padding_us(problem: Problem, arch: Arch, operands: str) -> float:
    """A pass over each of the operands whose rows TMA cannot step over, or one over both."""
    passes = [repack_us(problem, x, arch) for x in operands if padding(problem, x)]
    saved = arch.constants.pass_us if len(passes) > 1 and is_padded_together(problem) else 0.0
    return sum(passes) - saved


def _step_bound(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule, clock: float) -> str:
    mma, fill, hidden = _step_parts(tile, problem, arch, schedule, clock)
    if hidden > max(mma, fill):
        return "latency"
    return "L2" if fill > mma else "tensor cores"
