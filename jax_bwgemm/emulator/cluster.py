"""CTAs and clusters: their memories, barriers, warps, and the scheduler's round."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import SHARED_BASE, Program
from jax_bwgemm.emulator.engine import AsyncOp, Engine, Schedule, Waitable
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.machine import Warp
from jax_bwgemm.emulator.observe import ObservedEngine, ObservedWarp
from jax_bwgemm.emulator.races import ARRIVED, GRANULE, KNOWN, Clock, Shadow, Tracker
from jax_bwgemm.emulator.tmem import Meeting, Tmem
from jax_bwgemm.emulator.values import LANES, UINT

Dim = tuple[int, int, int]
REGISTER_FILE = 65536  # 32-bit registers of an SM (CUDA C++ programming guide, technical specifications)
STARVED_ROUNDS = 200  # a warp that polls without end must not keep lazy operations from completing


class NamedBarrier(Waitable):
    """`bar.sync id`: generations of `count` threads."""

    def __init__(self, num_warps: int) -> None:
        super().__init__()
        self.count = 0
        self.arrived = 0
        self.generation = 0
        self.gathering, self.clock = Clock(num_warps), Clock(num_warps)

    def complete(self) -> None:
        self.clock, self.gathering = self.gathering, Clock(self.gathering.rows.shape[1])
        self.arrived, self.generation = 0, self.generation + 1
        self.wake()


class RegisterPool(Waitable):
    """What setmaxnreg moves between the warps of a CTA: at launch each thread has its share of one SM's registers, as
    ptxas gives it to a kernel of one CTA a SM (65536 for 384 threads: 168)."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.at_launch = min(REGISTER_FILE // threads // 8 * 8, 256)
        self.held: dict[int, int] = {}  # warp -> registers a thread
        self.free = 0

    def resize(self, warp: int, count: int) -> bool:
        """False while there are too few free registers."""
        need = 32 * (count - self.held.get(warp, self.at_launch))
        if need > self.free:
            return False
        self.held[warp] = count
        self.free -= need
        self.wake()
        return True


class Cta:
    """One CTA of a cluster. Shared memory starts as all ones (NaN)."""

    def __init__(self, cluster: Cluster, rank: int, coords: Dim) -> None:
        self.cluster, self.rank, self.coords = cluster, rank, coords
        grid = cluster.grid
        self.rank_in_grid = coords[0] + grid[0] * (coords[1] + grid[1] * coords[2])
        size = -(-(cluster.program.dynamic_offset + cluster.smem_bytes) // GRANULE) * GRANULE
        self.limit = cluster.program.dynamic_offset + cluster.smem_bytes
        self.smem = np.full(size, 0xFF, np.uint8)
        self.words = {bits: self.smem.view(UINT[bits]) for bits in (8, 16, 32, 64)}
        self.chunks = self.smem.view(np.complex128)  # 16-byte units: one item a chunk, copied bit for bit
        self.shadow = Shadow((size // GRANULE,), f"shared memory of CTA {self.rank_in_grid}")
        self.barriers: dict[int, Any] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.registers = RegisterPool(cluster.block[0] * cluster.block[1] * cluster.block[2])
        self.tmem = Tmem(self)
        self.warps: list[Warp] = []
        self.ops = 0  # operations that touch this CTA's memory or barriers
        self.accesses: dict[int, int] = {}  # last epoch at which a warp of another CTA read or wrote here
        self.arrivals: dict[int, int] = {}  # how often it had arrived anywhere, when it last did here
        self.grid_waits = 0  # bits of the griddepcontrol.wait that its warps have executed
        self.exited = False
        self.version = 0  # counts changes of shared memory, for caches of decoded operands
        self.operand_cache: dict[Any, Any] = {}

    def named_barrier(self, number: int) -> NamedBarrier:
        if number not in self.named:
            self.named[number] = NamedBarrier(self.cluster.tracker.num_warps)
        return self.named[number]


class Cluster:
    """CTAs that run together. The grid's clusters run one after the other."""

    def __init__(
        self, program: Program, grid: Dim, shape: Dim, block: Dim, base: Dim, smem_bytes: int, machine: Any
    ) -> None:
        self.program, self.grid, self.shape, self.block, self.base = program, grid, shape, block, base
        self.smem_bytes, self.machine = smem_bytes, machine
        threads = block[0] * block[1] * block[2]
        per_cta, self.num_ctas = -(-threads // 32), shape[0] * shape[1] * shape[2]
        self.tracker = Tracker(per_cta * self.num_ctas, machine.checks, per_cta)
        schedule: Schedule = machine.schedule
        observer = machine.observer
        self.engine = Engine(schedule) if observer is None else ObservedEngine(schedule, observer)
        self.rng = random.Random(schedule.seed)
        self.barrier = NamedBarrier(self.tracker.num_warps)
        self.meetings: dict[tuple[str, int], Meeting] = {}
        self.ctas = [Cta(self, rank, self._coords(rank)) for rank in range(self.num_ctas)]
        self.warps = [self._warp(cta, i, per_cta, threads) for cta in self.ctas for i in range(per_cta)]
        self.budget = machine.max_instructions
        self.refused = 0  # bits of the requests to cancel a cluster that were refused

    def _coords(self, rank: int) -> Dim:
        x, rest = rank % self.shape[0], rank // self.shape[0]
        y, z = rest % self.shape[1], rest // self.shape[1]
        return self.base[0] + x, self.base[1] + y, self.base[2] + z

    def _warp(self, cta: Cta, index: int, per_cta: int, threads: int) -> Warp:
        gid = cta.rank * per_cta + index
        make = Warp if self.machine.observer is None else ObservedWarp
        warp = make(self.program, cta, index, gid, self.tracker.num_warps, min(32, threads - 32 * index))
        for name, slot in self.program.specials.items():
            warp.regs[slot] = self._special(name, cta, index)
        cta.warps.append(warp)
        return warp

    def _special(self, name: str, cta: Cta, index: int) -> Any:
        """The value of a special register or of a shared variable's address."""
        if name in self.program.shared_at:
            return cta.rank << 24 | self.program.shared_at[name]
        stem, _, axis = name.partition(".")
        if stem == "%tid":
            return self._tid(index, axis)
        cluster_id = tuple(c // s for c, s in zip(cta.coords, self.shape, strict=True))
        triples: dict[str, tuple[int, ...]] = {
            "%ntid": self.block,
            "%ctaid": cta.coords,
            "%nctaid": self.grid,
            "%cluster_ctaid": tuple(c % s for c, s in zip(cta.coords, self.shape, strict=True)),
            "%cluster_nctaid": self.shape,
            "%clusterid": cluster_id,
            "%nclusterid": tuple(g // s for g, s in zip(self.grid, self.shape, strict=True)),
        }
        singles: dict[str, Any] = {
            "%laneid": LANES.copy(),
            "%warpid": index,
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": self.num_ctas,
            "%smid": cta.rank_in_grid,
            "%clock": 0,
            "%clock64": 0,
            "%globaltimer": 0,
            "%dynamic_smem_size": self.smem_bytes,
            "%is_explicit_cluster": self.num_ctas > 1,
        }
        return triples[stem]["xyz".index(axis)] if stem in triples else singles[name]

    def _tid(self, index: int, axis: str) -> Any:
        flat = LANES + np.uint32(32 * index)
        x, rest = flat % self.block[0], flat // self.block[0]
        values = {"x": x, "y": rest % self.block[1], "z": rest // self.block[1]}[axis]
        return int(values[0]) if (values == values[0]).all() else values.astype(np.uint32)

    # memory

    def cta_of(self, address: int, warp: Warp) -> tuple[Cta, int]:
        """The CTA and the offset of a 32-bit shared address (a generic one is accepted too)."""
        address = address - SHARED_BASE if address >= SHARED_BASE else address
        rank, offset = address >> 24, address & 0xFFFFFF
        if not 0 <= rank < len(self.ctas):
            message = f"shared address {address:#x} names CTA {rank} of a cluster of {len(self.ctas)}"
            raise warp.fault("out-of-bounds", message)
        return self.ctas[rank], offset

    # scheduling

    def new_op(self, warp: Warp, kind: str, finish: Any, ctas: Any = (), label: str = "") -> AsyncOp:
        """An asynchronous operation issued by `warp` now."""
        op = AsyncOp(kind, self.tracker.new_op(warp.where()), warp.handed(), warp.where(), finish)
        op.label = label
        for cta in ctas:
            cta.ops |= 1 << op.bit
        return op

    def run(self) -> None:
        """Runs every warp to its end."""
        alive = list(self.warps)
        starved = 0
        while alive:
            movers = [w for w in alive if w.runnable]
            if not movers:
                if not self.engine.force():
                    raise self._deadlock(alive)
                continue
            self._round(movers)
            self.engine.tick()
            starved += 1
            if starved > STARVED_ROUNDS:
                starved = 0
                self.engine.force()
            if any(w.exited for w in movers):
                alive = [w for w in alive if not w.exited]
                self._retire()
        self.engine.drain()

    def dispose(self) -> None:
        """Breaks the reference cycles, so that the memories go at once."""
        self.ctas, self.warps, self.meetings = [], [], {}

    def _round(self, movers: list[Warp]) -> None:
        seed, observer = self.machine.schedule.seed, self.machine.observer
        watched = observer.quantum if observer is not None else None
        if seed:
            self.rng.shuffle(movers)
        for warp in movers:
            before = warp.executed
            warp.run(watched or (self.rng.choice((1, 4, 16, 64, 256)) if seed else 256))
            self.budget -= warp.executed - before
        if self.budget < 0:
            raise movers[0].fault(
                "instruction-budget", f"more than {self.machine.max_instructions} instructions executed"
            )

    def _retire(self) -> None:
        """CTAs whose last warp has ended; a cluster barrier does not wait for warps that have."""
        self.settle_barrier()
        for cta in self.ctas:
            if not cta.exited and all(w.exited for w in cta.warps):
                cta.exited = True
                self._check_exit(cta)

    def settle_barrier(self) -> None:
        """The cluster barrier completes when all warps that still run have arrived."""
        generation = self.barrier.generation
        arrived = [w.cluster_generation == generation for w in self.warps if not w.exited]
        self.barrier.arrived = sum(arrived)
        if arrived and all(arrived):
            self.barrier.complete()

    def _check_exit(self, cta: Cta) -> None:
        where = cta.warps[-1].where()
        if self.tracker.enabled:
            self._check_in_flight(cta, where)
        cta.tmem.check_exit(where)
        for barrier in cta.barriers.values():
            if barrier.tx:
                raise Fault("wrong-bytes", f"{barrier} ends with {barrier.tx} bytes still expected", where)

    def _check_in_flight(self, cta: Cta, where: Any) -> None:
        """What may still touch the CTA must be known complete to one of its warps."""
        known = Clock(self.tracker.num_warps)
        for warp in cta.warps:
            known.join(warp.clock)
        in_flight = cta.ops & ~known.ops
        if in_flight:
            culprit = self.tracker.op_places[(in_flight & -in_flight).bit_length() - 1]
            raise Fault(
                "exit-in-flight",
                f"CTA {cta.rank_in_grid} ends while an asynchronous operation that touches it "
                f"may be in flight, issued at {culprit}",
                where,
            )
        for row, what, last in ((ARRIVED, "arrival", cta.arrivals), (KNOWN, "access", cta.accesses)):
            for gid, number in last.items():
                if known.rows[row, gid] < number:
                    message = (
                        f"CTA {cta.rank_in_grid} ends while an {what} from warp {gid} of the cluster may be under way"
                    )
                    raise Fault("exit-in-flight", message, where)

    def _deadlock(self, alive: list[Warp]) -> Fault:
        lines = []
        for warp in alive:
            for split in warp.splits:
                warp.split = split
                lines.append(f"  {warp.where()}\n    waits for {split.blocked}")
        message = f"no warp can move and nothing is in flight; {len(alive)} warps wait:\n" + "\n".join(lines)
        # Lanes whose others wait for something else may meet yet: what never comes is that.
        apart = [w for w in alive if all("whole warp" in (split.blocked or "") for split in w.splits)]
        return Fault("divergent-aligned" if apart else "deadlock", message)
