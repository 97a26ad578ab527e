"""A chosen kernel on the emulator: manifest entry and problem -> the C++ launch plan -> emulator launch -> result.

The tensor maps and the parameter block are those that the GPU would get; only addresses are made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_bwgemm import artifacts, ffi
from jax_bwgemm.artifacts import PARAM_KINDS, Entry
from jax_bwgemm.decision import Decision
from jax_bwgemm.emulator import Counters, EmulatorError, Launch, Memory, TensorMap, parse, run
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.problem import DTYPE_SHORT, Problem

_ELEMENTS = {ffi.DTYPE_CODES[name]: short for name, short in DTYPE_SHORT.items()}
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
      ...     jax_bwgemm.matmul(x, w, emulate="sm_100a").block_until_ready()
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
    """A kernel and its launch for one problem; call it with operands as docs/architecture.md has them."""

    entry: Entry
    module: Module
    problem: Problem
    plan: ffi.LaunchPlan

    def __call__(self, *operands: Any) -> np.ndarray:
        """The result (l, m, n) of a, b and perhaps a bias. Raises `EmulatorError` if the kernel breaks a rule."""
        out, counters = self.run(*operands)
        for runs in _records:
            runs.append(Run(self.entry.name, counters))
        return out

    def run(self, *operands: Any, **options: Any) -> tuple[np.ndarray, Counters]:
        """The result, which starts as NaN, and the counters. Options are `emulator.run`'s."""
        a, b, *bias = map(np.ascontiguousarray, operands)
        out = np.full((self.problem.batch, self.problem.m, self.problem.n), np.nan, self.problem.out_dtype)
        memory = Memory()
        addresses = [memory.register(array, name) for name, array in zip("abc", (a, b, out), strict=True)]
        bias_address = memory.register(bias[0], "bias") if bias else 0
        counters = run(self.module, self._launch(addresses, bias_address), memory, **options)
        return out, counters

    def _launch(self, addresses: list[int], bias_address: int) -> Launch:
        plan, block = self.plan, self.plan.param_block
        leaves: dict[int, Any] = {p.offset: block[p.offset : p.offset + p.size] for p in self.entry.params}
        for name, address, spec in zip("abc", addresses, plan.tensor_maps, strict=True):
            leaves[spec.param_offset] = _tensor_map(spec, address, name)
        if plan.bias_offset >= 0:
            leaves[plan.bias_offset] = bias_address
        params = tuple(leaves[offset] for offset in plan.param_offsets[: plan.num_params])
        grid, threads, cluster = ((x, y, z) for x, y, z in (plan.grid, plan.block, plan.cluster))
        return Launch(grid, threads, params, cluster, plan.smem_bytes, self.entry.entry)


def kernel_of(decision: Decision, problem: Problem, max_clusters: int | None = None) -> Kernel:
    """The kernel that `decision` chose for `problem`.

    Args:
      decision: has an entry and a plan.
      problem: sizes of at least 1.
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
    tile = entry.variant.tile
    clusters = plan.arch.num_sms // (tile.cluster_m * tile.cluster_n) if max_clusters is None else max_clusters
    request = _request(problem, entry, plan.raster_group, plan.raster_along_n, clusters)
    return Kernel(entry, _module(path, path.stat().st_mtime_ns), problem, ffi.launch_plan(request))


@functools.lru_cache(maxsize=64)
def _module(path: pathlib.Path, mtime_ns: int) -> Module:
    try:
        return parse(gzip.decompress(path.read_bytes()).decode())
    except (OSError, EOFError, UnicodeDecodeError, EmulatorError) as error:
        raise ValueError(f"{path} requires PTX that the emulator can read, got {error}; {artifacts.REMEDY}") from error


def _request(problem: Problem, entry: Entry, group: int, along_n: int, max_clusters: int) -> ffi.LaunchRequest:
    """What the custom call's attributes and buffers say to the launcher."""
    p, variant, tile = problem, entry.variant, entry.variant.tile
    a_shape = (p.a_batch, p.m, p.k) if p.a_major == "k" else (p.a_batch, p.k, p.m)
    b_shape = (p.b_batch, p.k, p.n) if p.b_major == "n" else (p.b_batch, p.n, p.k)
    request = ffi.LaunchRequest(
        a=ffi.Buffer.of(p.a_dtype, a_shape),
        b=ffi.Buffer.of(p.b_dtype, b_shape),
        out=ffi.Buffer.of(p.out_dtype, (p.batch, p.m, p.n)),
        bias=ffi.Buffer.of(p.out_dtype, (p.n,)) if p.epilogue.has_bias else ffi.Buffer.none(),
        a_major=ord(variant.a_major),
        b_major=ord(variant.b_major),
        **{name: getattr(tile, name) for name in ("cta_m", "mma_n", "cluster_m", "cluster_n")},
        **{name: getattr(entry, name) for name in ("num_threads", "smem_bytes", "param_bytes")},
        raster_group=group,
        raster_along_n=along_n,
        alpha=p.epilogue.alpha,
        swizzle_bytes=tuple(entry.tma[x].swizzle_bytes for x in "abc"),
        num_params=len(entry.params),
        max_active_clusters=max_clusters,
    )
    for box, x in zip(request.box, "abc", strict=True):
        box[:] = entry.tma[x].box
    for i, leaf in enumerate(entry.params):
        request.params[i] = ffi.Param(PARAM_KINDS.index(leaf.kind), leaf.offset, leaf.size)
    return request


def _tensor_map(spec: ffi.TensorMapSpec, address: int, name: str) -> TensorMap:
    element = _ELEMENTS[spec.dtype]
    return TensorMap(
        address, tuple(spec.dims), tuple(spec.stride_bytes), tuple(spec.box), element, spec.swizzle_bytes, name
    )
