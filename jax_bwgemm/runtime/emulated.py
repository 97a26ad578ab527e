"""A chosen kernel on the emulator: the launch's request -> the C++ launch plan -> emulator launch -> result.

The tensor maps and the parameter block are those that the GPU would get; only addresses are made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jax_bwgemm import _files
from jax_bwgemm._files import FileError, Stamp
from jax_bwgemm.emulator import Counters, EmulatorError, Launch, Memory, TensorMap, parse, run
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts import recipe
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.repack import Shape
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.artifacts import Entry, RepackEntry
from jax_bwgemm.runtime.decision import Decision
from jax_bwgemm.runtime.launch import Array, Request, request

_POISON = -0x21524111  # of an integer result, 0xDEADBEEF
_TOKEN = 0x5EED_F1A6_5EED_F1A6  # of raised flags
_NAMES = {"out": "c", "residual": "r"}  # of buffers in counters, timelines and faults; others are called by their role
_records: list[list[Run]] = []


@dataclasses.dataclass(frozen=True)
class Run:
    """One emulated launch: which kernel, and what it did."""

    name: str
    counters: Counters


@contextlib.contextmanager
def recorded() -> Iterator[list[Run]]:
    """Collects every launch that `emulate=` makes in this process while the block lasts.

    JAX runs ahead: wait for a result (`jax.block_until_ready`) before the block ends.

    Example:
      >>> with emulated.recorded() as runs:
      ...     jax_bwgemm.matmul(x, w, emulate="sm_100f").block_until_ready()
      >>> runs[0].counters.mmas
    """
    runs: list[Run] = []
    _records.append(runs)
    try:
        yield runs
    finally:
        _records[:] = [other for other in _records if other is not runs]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel and its launch for one problem, as the kernel sees it: where the plan swaps the operands, the transposed
    one. Call it with the custom call's operands (docs/architecture.md)."""

    entry: Entry
    module: Module
    problem: Problem
    request: Request
    plan: ffi.LaunchPlan

    def __call__(self, *operands: Any) -> tuple[np.ndarray, ...]:
        """The product's results, (l, m, n) or (l, n, m) by `problem.c_major`.

        Operands whose rows TMA cannot step over are padded with zeros, if they do not come so. Raises `EmulatorError`
        if the kernel breaks a rule.
        """
        results, counters = self.run_all(*operands)
        _record(Run(self.entry.name, counters))
        return results[: len(self.problem.results) + len(self.problem.epilogue.reductions)]

    def run(self, *operands: Any, **options: Any) -> tuple[np.ndarray, Counters]:
        """The first result and the counters. Options are `emulator.run`'s."""
        results, counters = self.run_all(*operands, **options)
        return results[0], counters

    def run_all(self, *operands: Any, **options: Any) -> tuple[tuple[np.ndarray, ...], Counters]:
        """All results, a workspace too, which start poisoned, and the counters."""
        rules, asked = self.entry.recipe.operands, self.request.operands
        arrays = [_padded(*operand) for operand in zip(operands, asked, rules, strict=True)]
        results = [_poisoned(array) for array in self.request.results]
        memory = Memory()
        named = zip(map(_name, self.entry.recipe.buffers), (*arrays, *results), strict=True)
        launch = self._launch([memory.register(array, name) for name, array in named])
        counters = run(self.module, launch, memory, **options)
        return tuple(results), counters

    def _launch(self, addresses: list[int]) -> Launch:
        plan, own, block = self.plan, self.entry.recipe, self.plan.param_block
        leaves: dict[int, Any] = {leaf.offset: block[leaf.offset : leaf.offset + leaf.size] for leaf in own.params}
        maps = dict(zip(recipe.map_sources(own.tensor_maps), own.tensor_maps, strict=True))
        for i, (use, address) in enumerate(zip(plan.buffers, addresses, strict=True)):
            if use.pointer_offset >= 0:
                leaves[use.pointer_offset] = address
            name = _name(own.buffers[i])
            if use.map_offset >= 0:
                leaves[use.map_offset] = _tensor_map(use.map, maps[f"tma:{i}"], address, name)
            if use.second_map_offset >= 0:
                leaves[use.second_map_offset] = _tensor_map(use.second_map, maps[f"tma2:{i}"], address, name)
        params = tuple(leaves[offset] for offset in plan.param_offsets)
        grid, threads, cluster = ((x, y, z) for x, y, z in (plan.grid, plan.block, plan.cluster))
        return Launch(grid, threads, params, cluster, plan.smem_bytes, self.entry.entry)


def kernel_of(decision: Decision, problem: Problem, max_clusters: int | None = None) -> Kernel:
    """The kernel that `decision` chose for `problem`.

    Args:
      decision: has an entry and a plan, whose problem is the one that the kernel computes.
      problem: what was asked, sizes of at least 1.
      max_clusters: how many clusters run at once, as the occupancy of a GPU would say; None for one CTA on every SM of
        the planned device.

    Raises:
      ValueError: no PTX, PTX that cannot be read, or a launch that the launcher refuses.
    """
    entry, plan = decision.entry, decision.plan
    if entry is None or plan is None:
        raise ValueError(f"the emulator requires a kernel for {problem}, got none: {decision.reason}")
    path = artifacts.find_ptx(entry.variant)
    if isinstance(path, str):
        raise ValueError(f"the emulator requires the kernel's PTX, got none: {path}")
    clusters = plan.arch.num_sms // entry.variant.tile.cluster_ctas if max_clusters is None else max_clusters
    made = request(plan, entry, clusters)
    operands, results = ([ffi.Buffer.of(x.dtype, x.shape) for x in arrays] for arrays in (made.operands, made.results))
    launch_plan = ffi.launch_plan(made.attributes, operands, results, clusters, _TOKEN)
    return Kernel(entry, _module(path, _files.stamp(path)), plan.problem, made, launch_plan)


def repacked(entry: RepackEntry, sources: Sequence[np.ndarray], out_shapes: Sequence[Shape]) -> list[np.ndarray]:
    """What the repack makes of its sources (l, r, c), in results that start poisoned.

    Raises:
      EmulatorError: the kernel breaks a rule.
      ValueError: no PTX, or PTX that cannot be read.
    """
    repack = entry.repack
    path = artifacts.find_ptx(repack)
    if isinstance(path, str):
        raise ValueError(f"the emulator requires the kernel's PTX, got none: {path}")
    memory, outs, params = Memory(), [], []
    for given, shape in zip(sources, out_shapes, strict=True):
        source = np.ascontiguousarray(given)
        octets = np.full(math.prod(shape) * source.itemsize, _POISON & 0xFF, np.uint8)
        outs.append(octets.view(source.dtype).reshape(shape))
        params += [memory.register(source, "source"), memory.register(outs[-1], "out"), *source.shape, shape[2]]
    ctas = [repack.num_ctas(shape) for shape in out_shapes]
    launch = Launch(
        (sum(ctas), 1, 1),
        (entry.num_threads, 1, 1),
        repack.whole_params(params, ctas[0]),
        smem_bytes=entry.smem_bytes,
        entry=entry.entry,
    )
    _record(Run(entry.name, run(_module(path, _files.stamp(path)), launch, memory)))
    return outs


def _record(made: Run) -> None:
    for runs in _records:
        runs.append(made)


@functools.lru_cache(maxsize=64)
def _module(path: pathlib.Path, stamp: Stamp | None) -> Module:
    try:
        return parse(_files.read_gzip(path, artifacts.MOST_KERNEL_BYTES).decode())
    except (FileError, UnicodeDecodeError, EmulatorError) as error:
        raise ValueError(f"{path} requires PTX that the emulator can read, got {error}; {artifacts.REMEDY}") from error


def _name(buffer: recipe.Buffer) -> str:
    return _NAMES.get(buffer.role, buffer.role)


def _padded(operand: Any, asked: Array, rule: recipe.Buffer) -> np.ndarray:
    """With zeros where the kernel wants them; ValueError if the operand has another shape."""
    array = np.ascontiguousarray(operand)
    more = [want - got for want, got in zip(asked.shape, array.shape, strict=True)]
    if any(rest < 0 or (rest and not dim.endswith("+")) for rest, dim in zip(more, rule.dims, strict=True)):
        raise ValueError(f"`{rule.role}` requires shape {asked.shape}, got {array.shape}")
    return np.pad(array, [(0, rest) for rest in more])


def _poisoned(asked: Array) -> np.ndarray:
    """NaN, or what no integer sum is expected to be; of bytes, what is a quiet NaN in every float32."""
    if asked.dtype == "uint8":
        return np.full(asked.shape, 0xFF, np.uint8)
    return np.full(asked.shape, _POISON if asked.dtype == "int32" else np.nan, asked.dtype)


def _tensor_map(spec: ffi.TensorMapSpec, facts: recipe.TensorMap, address: int, name: str) -> TensorMap:
    return TensorMap(
        address,
        tuple(spec.dims),
        tuple(spec.stride_bytes),
        tuple(spec.box),
        facts.element,
        spec.swizzle_bytes,
        name,
        spec.swizzle_atom_bytes,
    )
