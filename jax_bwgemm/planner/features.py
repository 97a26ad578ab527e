"""What the time of a tile may depend on beside the time that the cost model predicts: numbers that a calibration tells
products and tiles apart by. Predicts nothing itself."""

from __future__ import annotations

import functools
import math

from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.geometry import cluster_tiles, concurrent_clusters, k_steps, num_tiles
from jax_bwgemm.facts.padding import LINE_BYTES, contiguous, is_torn
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.cost import Cost, Schedule, cost, memory_bytes, shipped_schedule
from jax_bwgemm.planner.cycles import (
    commit_cycles,
    epilogue_cycles,
    fill_cycles,
    load_latency,
    memory_bytes_per_clk,
    mma_cycles,
    store_rate,
)

SPAN_COLUMNS = 64  # of 2-byte elements, which one span of 128 bytes holds


@functools.cache
def names() -> tuple[str, ...]:
    """Of all features, in order."""
    tile, problem, arch = Tile(64, 64), Problem(64, 64, 64), by_name("h200")
    return tuple(features(tile, problem, arch, cost(tile, problem, arch)))


def features(tile: Tile, problem: Problem, arch: Arch, found: Cost) -> dict[str, float]:
    """By name. What ends in `_log` is a logarithm."""
    schedule = shipped_schedule(tile, problem, arch)
    return {
        "model_log": kernel_log(found, arch),
        "l2_bytes_log": _log(found.l2_bytes),
        "waves": found.waves,
        "device_log": _log(memory_bytes_per_clk(arch)),  # tells an H100 from an H200
        **_of_problem(problem),
        **_of_tile(tile, schedule),
        **_of_tiles(tile, problem, arch),
        **_of_times(tile, problem, arch, schedule),
    }


def kernel_log(found: Cost, arch: Arch) -> float:
    """The logarithm of what is predicted of the kernel alone: without its launch and passes over its operands."""
    return _log(found.us - found.padding_us - arch.constants.launch_us)


def _of_problem(problem: Problem) -> dict[str, float]:
    return {
        "m_log": _log(problem.m),
        "n_log": _log(problem.n),
        "k_log": _log(problem.k),
        "batch_log": _log(problem.batch),
        "flops_log": _log(problem.flops),
        "min_bytes_log": _log(problem.min_bytes),
        "a_is_k_major": problem.a_major == "k",
        "b_is_n_major": problem.b_major == "n",
        "c_is_n_major": problem.c_major == "n",
        "out_bytes": DTYPE_BYTES[problem.out_dtype],
        "a_is_torn": is_torn(problem, "a"),
        "b_is_torn": is_torn(problem, "b"),
        "a_row_step": _row_step(contiguous(problem, "a") * DTYPE_BYTES[problem.a_dtype]),
        "b_row_step": _row_step(contiguous(problem, "b") * DTYPE_BYTES[problem.b_dtype]),
        "c_row_step": _row_step((problem.n if problem.c_major == "n" else problem.m) * DTYPE_BYTES[problem.out_dtype]),
    }


def _row_step(row_bytes: int) -> int:
    """Where rows of a matrix as the caller has it begin: at all multiples of that many bytes of a line of the L2 cache.
    It says how much one load or store can take at a time, and how many sectors and lines rows share."""
    return math.gcd(row_bytes, LINE_BYTES)


def _of_tile(tile: Tile, schedule: Schedule) -> dict[str, float]:
    return {
        "cta_m": tile.cta_m,
        "mma_m": tile.mma_m,
        "out_n": tile.out_n,
        "columns_beyond_spans": tile.out_n % SPAN_COLUMNS,
        "cluster_m": tile.cluster_m,
        "cluster_n": tile.cluster_n,
        "cluster_k": tile.cluster_k,
        "stream_k": tile.stream_k,
        "pingpong": tile.pingpong,
        "direct": tile.direct,
        "stages": schedule.stages,
        "defers_store": schedule.defers_store,
        "stores_by_tma": schedule.store == "tma",
        "stream_tiles": schedule.stream.tiles,
        "stream_clusters": schedule.stream.clusters,
    }


def _of_tiles(tile: Tile, problem: Problem, arch: Arch) -> dict[str, float]:
    """How the problem falls into them; a cluster's CTAs start together. `_short`: the part of the last tile that lies
    outside."""
    clusters, steps = num_tiles(tile, problem), k_steps(tile, problem)
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    at_once = concurrent_clusters(tile, arch)
    waves = clusters / at_once
    return {
        "clusters_log": _log(clusters),
        "cluster_ctas": tile.cluster_ctas,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "k_steps": steps,
        "k_steps_log": _log(steps),
        "ctas_an_sm_log": _log(clusters * tile.cluster_ctas / arch.num_sms),
        "waves_log": _log(waves),
        "last_wave": waves % 1,
        "waves_full": waves / math.ceil(waves),
        "inside": problem.m * problem.n * problem.batch / (clusters * math.prod(tile.span)),
        "concurrent_ctas": at_once * tile.cluster_ctas,
        "m_short": -problem.m % tile.cta_m / tile.cta_m,
        "n_short": -problem.n % tile.out_n / tile.out_n,
        "k_short": -problem.k % tile.k_tile / tile.k_tile,
    }


def _of_times(tile: Tile, problem: Problem, arch: Arch, schedule: Schedule) -> dict[str, float]:
    """Of a k step's MMAs, and of others beside them; of a direct tile, which the model has another view of, as much as
    MMAs alone say."""
    in_bytes, steps = DTYPE_BYTES[problem.a_dtype], k_steps(tile, problem)
    mma = mma_cycles(tile, in_bytes, arch)
    ctas_an_sm = max(1.0, num_tiles(tile, problem) * tile.cluster_ctas / arch.num_sms)
    memory = memory_bytes(tile, problem, arch) / memory_bytes_per_clk(arch)
    fill = latency = epilogue = 1.0
    if not tile.direct:
        rate = store_rate(tile, problem, arch, schedule.store)
        store = epilogue_cycles(tile, DTYPE_BYTES[problem.out_dtype], arch, schedule.store, rate)
        fill = fill_cycles(tile, problem, arch, schedule.stream.clusters) / mma
        latency = (load_latency(tile, in_bytes, arch) + mma) / schedule.stages / mma
        epilogue = (store + commit_cycles(tile, arch)) / (steps * mma)
    return {
        "mma_log": _log(mma),
        "fill_log": _log(fill),
        "latency_log": _log(latency),
        "epilogue_log": _log(epilogue),
        "memory_log": _log(memory / (steps * mma * ctas_an_sm)),
    }


def _log(x: float) -> float:
    return math.log(max(x, 1e-9))
