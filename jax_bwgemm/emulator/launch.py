"""What a caller does: parse, describe a launch, run it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_bwgemm.emulator import (
    alu,
    async_copies,
    barriers,
    cancel,
    control,
    cvt,
    floats,
    matrices,
    mbarrier,
    memory,
    mma_sync,
    moves,
    tcgen05,
    tcgen05_copy,
    tma,
    tmem_access,
    wgmma,
)
from jax_bwgemm.emulator.buffers import Memory
from jax_bwgemm.emulator.cluster import Cluster, Dim
from jax_bwgemm.emulator.counters import Counters
from jax_bwgemm.emulator.decode import SHARED_OFFSET, decode
from jax_bwgemm.emulator.engine import Schedule
from jax_bwgemm.emulator.errors import Fault, LaunchError
from jax_bwgemm.emulator.global_order import GlobalOrder
from jax_bwgemm.emulator.observe import Observer
from jax_bwgemm.emulator.parser import MAX_SHARED_BYTES
from jax_bwgemm.emulator.syntax import Entry, Module
from jax_bwgemm.emulator.tensormap import MAP_BYTES, TensorMap

HANDLER_MODULES = (
    alu,
    async_copies,
    barriers,
    cancel,
    control,
    cvt,
    floats,
    matrices,
    mbarrier,
    memory,
    mma_sync,
    moves,
    tcgen05,
    tcgen05_copy,
    tma,
    tmem_access,
    wgmma,
)
Parameter = bytes | TensorMap | int
# CUDA programming guide, technical specifications; clusters of more than 8 CTAs are not portable.
MAX_GRID, MAX_BLOCK, MAX_THREADS, MAX_CLUSTER = ((1 << 31) - 1, 65535, 65535), (1024, 1024, 64), 1024, 16


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. `params`: one item a kernel parameter: its bytes, a `TensorMap`, or an address (as an int).

    `params` may also be the whole parameter block as bytes; 128-byte parameters are then decoded when they are used
    as tensor maps.
    """

    grid: Dim
    block: Dim
    params: tuple[Parameter, ...] | bytes
    cluster: Dim = (1, 1, 1)
    smem_bytes: int = 0
    entry: str | None = None


class Machine:
    """What all clusters of a launch share."""

    def __init__(
        self,
        global_memory: Memory,
        schedule: Schedule,
        checks: bool,
        max_instructions: int,
        tmem_scoreboard: bool,
        observer: Observer | None,
        demand_grid_wait: bool,
    ) -> None:
        self.memory, self.schedule, self.checks = global_memory, schedule, checks
        self.order = GlobalOrder(checks, schedule.loads)
        self.max_instructions = max_instructions
        self.tmem_scoreboard = tmem_scoreboard
        self.observer = observer
        self.demand_grid_wait = demand_grid_wait
        self.counters = Counters()
        self.waiting: Iterator[Dim] = iter(())  # clusters that have not started
        self.maps: dict[int, TensorMap] = {}
        self.map_bytes: dict[int, tuple[bytes, str]] = {}
        self.views: dict[int, np.ndarray] = {}
        self.cta_group: int | None = None
        self.written: dict[tuple[str, tuple[int, ...]], tuple[Dim | None, str]] = {}  # by whom, and how

    def tensor_map(self, offset: int, w: Any) -> tuple[TensorMap, np.ndarray]:
        """The map in the parameter at `offset`, and the tensor."""
        if offset not in self.maps and offset in self.map_bytes:
            self.maps[offset] = TensorMap.decode(*self.map_bytes[offset])
        if offset not in self.maps:
            raise w.fault("tensor-map", f"no tensor map at parameter offset {offset}")
        if offset not in self.views:
            self.views[offset] = self.maps[offset].view(self.memory)
        return self.maps[offset], self.views[offset]

    def note_global_write(
        self, tensor_map: TensorMap, coords: tuple[int, ...], cluster: Cluster, w: Any, operation: str = "store"
    ) -> None:
        """Two clusters must not store the same box: nothing orders them. They may both reduce it in the same way."""
        key = tensor_map.name, coords
        owner, before = self.written.get(key, (cluster.base, operation))
        together = operation == before and operation not in ("store", "mixed")
        if owner != cluster.base and not together:
            how = "store" if operation == before == "store" else "store or differently reduce"
            raise w.fault("race", f"two clusters {how} box {coords} of `{tensor_map.name}`")
        self.written[key] = (
            cluster.base if owner == cluster.base else None,
            operation if operation == before else "mixed",
        )


def run(
    module: Module,
    launch: Launch,
    global_memory: Memory,
    schedule: Schedule | None = None,
    checks: bool = True,
    max_instructions: int = 200_000_000,
    tmem_scoreboard: bool = False,
    observer: Observer | None = None,
    demand_grid_wait: bool = False,
) -> Counters:
    """Executes a launch on `global_memory`, in place. Raises `Fault` at the first rule that the kernel breaks.

    `checks=False` leaves the happens-before tracking out. `max_instructions` (warp instructions of one cluster) ends
    endless kernels. Registers that a tcgen05.ld fills have no value until tcgen05.wait::ld; with `tmem_scoreboard` they
    have it at once, as in the machine code that ptxas makes, which waits on the load's scoreboard before it reads them.
    `observer` watches: a `Trace`, a `Timeline`. Where a kernel has a griddepcontrol.wait, no warp may touch global
    memory before it knows of one of its CTA; `demand_grid_wait` holds kernels without any to that rule as well.
    """
    entry = module.entries[launch.entry] if launch.entry else module.entry
    _check_launch(entry, launch)
    schedule = schedule or Schedule()
    machine = Machine(global_memory, schedule, checks, max_instructions, tmem_scoreboard, observer, demand_grid_wait)
    program = decode(entry, _parameter_block(entry, launch, machine), module.target)
    shared = program.dynamic_offset - SHARED_OFFSET + launch.smem_bytes
    if launch.smem_bytes < 0 or shared > MAX_SHARED_BYTES:
        raise LaunchError(f"`{entry.name}` requires at most {MAX_SHARED_BYTES} bytes of shared memory, got {shared}")
    grid = launch.cluster if schedule.one_cluster else launch.grid
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        machine.waiting = _cluster_bases(grid, launch.cluster)
        for base in machine.waiting:
            cluster = Cluster(program, grid, launch.cluster, launch.block, base, launch.smem_bytes, machine)
            cluster.run()
            machine.counters.instructions += sum(w.executed for w in cluster.warps)
            cluster.dispose()
    return machine.counters


def _cluster_bases(grid: Dim, cluster: Dim) -> Iterator[Dim]:
    """The first CTA of each cluster, in the order in which they run."""
    for z in range(0, grid[2], cluster[2]):
        for y in range(0, grid[1], cluster[1]):
            for x in range(0, grid[0], cluster[0]):
                yield x, y, z


def _check_launch(entry: Entry, launch: Launch) -> None:
    if entry.block and entry.block != launch.block:
        raise LaunchError(f"`{entry.name}` requires a block of {entry.block} (.reqntid), got {launch.block}")
    for what, value, most in (("grid", launch.grid, MAX_GRID), ("block", launch.block, MAX_BLOCK)):
        if not all(1 <= size <= limit for size, limit in zip(value, most, strict=True)):
            raise LaunchError(f"a {what} requires 1 to {most} along x, y and z, got {value}")
    threads, ctas = math.prod(launch.block), math.prod(launch.cluster)
    if threads > MAX_THREADS:
        raise LaunchError(f"a block requires at most {MAX_THREADS} threads, got {threads}")
    if not 1 <= ctas <= MAX_CLUSTER:
        raise LaunchError(f"a cluster requires 1 to {MAX_CLUSTER} CTAs, got {launch.cluster}")
    if entry.max_threads and threads > entry.max_threads:
        raise LaunchError(f"`{entry.name}` requires at most {entry.max_threads} threads (.maxntid), got {threads}")
    for g, c in zip(launch.grid, launch.cluster, strict=True):
        if c < 1 or g < 1 or g % c:
            raise LaunchError(
                f"a grid requires positive multiples of the cluster, got {launch.grid} and {launch.cluster}"
            )


def _to_bytes(value: int, index: int, size: int) -> bytes:
    if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise LaunchError(f"parameter {index} requires {size} bytes, got {value}")
    return value.to_bytes(size, "little", signed=value < 0)


def _parameter_block(entry: Entry, launch: Launch, machine: Machine) -> bytes:
    """The parameter bytes; maps are registered under their offsets."""
    if isinstance(launch.params, bytes):
        for param in entry.params:
            if param.size == MAP_BYTES:
                piece = launch.params[param.offset : param.offset + MAP_BYTES]
                machine.map_bytes[param.offset] = (piece, f"param {param.offset}")
        return launch.params
    if len(launch.params) != len(entry.params):
        raise LaunchError(f"`{entry.name}` requires {len(entry.params)} parameters, got {len(launch.params)}")
    block = bytearray(max((p.offset + p.size for p in entry.params), default=0))
    for i, (param, value) in enumerate(zip(entry.params, launch.params, strict=True)):
        if isinstance(value, TensorMap):
            machine.maps[param.offset] = value
            value = bytes(MAP_BYTES)
        elif isinstance(value, int):
            value = _to_bytes(value, i, param.size)
        if len(value) != param.size:
            raise LaunchError(f"parameter {i} requires {param.size} bytes, got {len(value)}")
        block[param.offset : param.offset + param.size] = value
    return bytes(block)


__all__ = ["Counters", "Fault", "Launch", "Parameter", "run"]
