"""A chosen kernel on the emulator: manifest entry and problem -> the C++ launch plan -> emulator launch -> result.

The tensor maps and the parameter block are those that the GPU would get; only addresses are made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_bwgemm import artifacts, ffi
from jax_bwgemm.artifacts import PARAM_KINDS, Entry, RepackEntry
from jax_bwgemm.decision import Decision
from jax_bwgemm.emulator import Counters, EmulatorError, Launch, Memory, TensorMap, parse, run
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.padding import padded_shape
from jax_bwgemm.plan import Plan
from jax_bwgemm.problem import Problem
from jax_bwgemm.repack import Shape
from jax_bwgemm.tile import workspace_bytes

_ELEMENTS = {0: "u8", 3: "s32", 6: "f16", 7: "f32", 9: "bf16", 11: "tf32"}  # CUtensorMapDataType
_POISON = -0x21524111  # of an integer result, 0xDEADBEEF; others start as NaN
_TOKEN = 0x5EED_F1A6_5EED_F1A6  # of raised flags
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
    """A kernel and its launch for one problem, as the kernel sees it: where the plan swaps the operands, the transposed
    one. Call it with the custom call's operands (docs/architecture.md)."""

    entry: Entry
    module: Module
    problem: Problem
    plan: ffi.LaunchPlan
    workspace_bytes: int = 0

    def __call__(self, *operands: Any) -> np.ndarray:
        """The result, (l, m, n) or (l, n, m) by `problem.c_major`, of a, b and, if there are any, bias and residual.

        Operands whose rows TMA cannot step over are padded with zeros, if they do not come so. Raises `EmulatorError`
        if the kernel breaks a rule.
        """
        out, counters = self.run(*operands)
        _record(Run(self.entry.name, counters))
        return out

    def run(self, *operands: Any, **options: Any) -> tuple[np.ndarray, Counters]:
        """The result, which starts poisoned, and the counters. Options are `emulator.run`'s."""
        epilogue, dtype = self.problem.epilogue, self.problem.out_dtype
        names = ["a", "b", *["bias"] * epilogue.has_bias, *["r"] * epilogue.has_residual]
        arrays = {name: np.ascontiguousarray(x) for name, x in zip(names, operands, strict=True)}
        for name, spec in zip("ab", self.plan.tensor_maps[:2], strict=True):
            arrays[name] = _padded(arrays[name], spec)
        out = np.full(_shapes(self.problem)["out"], _POISON if dtype == "int32" else np.nan, dtype)
        arrays["workspace"] = np.full(self.workspace_bytes, 0xFF, np.uint8)  # a quiet NaN in every float32
        memory = Memory()
        addresses = {name: memory.register(array, name) for name, array in (arrays | {"c": out}).items()}
        counters = run(self.module, self._launch(addresses), memory, **options)
        return out, counters

    def _launch(self, addresses: dict[str, int]) -> Launch:
        plan, block = self.plan, self.plan.param_block
        leaves: dict[int, Any] = {p.offset: block[p.offset : p.offset + p.size] for p in self.entry.params}
        for name, spec in zip("abcr", plan.tensor_maps, strict=True):
            if spec.param_offset >= 0:
                leaves[spec.param_offset] = _tensor_map(spec, addresses[name], name)
        pointers = {plan.c_offset: "c", plan.bias_offset: "bias", plan.workspace_offset: "workspace"}
        leaves |= {offset: addresses.get(name, 0) for offset, name in pointers.items()}  # -1 is nobody's offset
        params = tuple(leaves[offset] for offset in plan.param_offsets[: plan.num_params])
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
    launch_plan = ffi.launch_plan(_request(plan, entry, clusters))
    workspace = workspace_bytes(entry.variant.tile, clusters)
    return Kernel(entry, _module(path, path.stat().st_mtime_ns), plan.problem, launch_plan, workspace)


def repacked(entry: RepackEntry, source: np.ndarray, out_shape: Shape) -> np.ndarray:
    """What the repack makes of `source` (l, r, c), in a result that starts poisoned.

    Raises:
      EmulatorError: the kernel breaks a rule.
      ValueError: no PTX, or PTX that cannot be read.
    """
    repack, source = entry.repack, np.ascontiguousarray(source)
    path = artifacts.find_ptx(repack)
    if isinstance(path, str):
        raise ValueError(f"the emulator requires the kernel's PTX, got none: {path}")
    octets = np.full(math.prod(out_shape) * source.itemsize, _POISON & 0xFF, np.uint8)
    out = octets.view(source.dtype).reshape(out_shape)
    memory = Memory()
    params = memory.register(source, "source"), memory.register(out, "out"), *source.shape, out_shape[2]
    grid, block = (repack.num_ctas(out_shape), 1, 1), (entry.num_threads, 1, 1)
    launch = Launch(grid, block, params, smem_bytes=entry.smem_bytes, entry=entry.entry)
    _record(Run(entry.name, run(_module(path, path.stat().st_mtime_ns), launch, memory)))
    return out


def _record(made: Run) -> None:
    for runs in _records:
        runs.append(made)


@functools.lru_cache(maxsize=64)
def _module(path: pathlib.Path, mtime_ns: int) -> Module:
    try:
        return parse(gzip.decompress(path.read_bytes()).decode())
    except (OSError, EOFError, UnicodeDecodeError, EmulatorError) as error:
        raise ValueError(f"{path} requires PTX that the emulator can read, got {error}; {artifacts.REMEDY}") from error


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The buffers of the custom call, padded as the lowering pads them."""
    p = problem
    out = (p.batch, p.m, p.n) if p.c_major == "n" else (p.batch, p.n, p.m)
    return {"a": padded_shape(p, "a"), "b": padded_shape(p, "b"), "out": out}


def _padded(operand: np.ndarray, spec: ffi.TensorMapSpec) -> np.ndarray:
    """ValueError if the operand is larger than its tensor map."""
    return np.pad(operand, [(0, want - got) for want, got in zip(spec.dims[::-1], operand.shape, strict=True)])


def _request(plan: Plan, entry: Entry, max_clusters: int) -> ffi.LaunchRequest:
    """What the custom call's attributes and buffers say to the launcher."""
    p, variant, tile = plan.problem, entry.variant, entry.variant.tile
    dtypes, shapes = {"a": p.a_dtype, "b": p.b_dtype, "out": p.out_dtype}, _shapes(p)
    extras: dict[str, tuple[int, ...]] = {"bias": shapes["out"][2:]} if p.epilogue.has_bias else {}
    extras |= {"residual": shapes["out"]} if p.epilogue.has_residual else {}
    if size := workspace_bytes(tile, max_clusters):
        extras["workspace"] = (size,)
    request = ffi.LaunchRequest(
        **{name: ffi.Buffer.of(dtypes[name], shape) for name, shape in shapes.items()},
        **{
            name: ffi.Buffer.of("uint8" if name == "workspace" else p.out_dtype, shape)
            for name, shape in extras.items()
        },
        **{name: ord(getattr(variant, name)) for name in ("a_major", "b_major", "c_major")},
        **{name: getattr(tile, name) for name in ("cta_m", "mma_n", "cluster_m", "cluster_n", "cluster_k")},
        **{name: getattr(entry, name) for name in ("num_threads", "smem_bytes", "param_bytes")},
        **{name: getattr(plan, name) for name in ("raster_group", "raster_along_n")},
        raster_order=ffi.RASTER_CODES[plan.raster_order],
        stream_tiles=plan.stream.tiles,
        stream_clusters=plan.stream.clusters,
        a_l2=ffi.L2_CODES[plan.a_l2],
        b_l2=ffi.L2_CODES[plan.b_l2],
        alpha=p.epilogue.alpha,
        num_params=len(entry.params),
        token=_TOKEN,
        max_active_clusters=max_clusters,
    )
    for i, facts in enumerate(map(entry.tma.get, "abc")):
        if facts is not None:
            request.box[i][:] = facts.box
            request.swizzle_bytes[i], request.swizzle_atom_bytes[i] = facts.swizzle_bytes, facts.swizzle_atom_bytes
    for i, leaf in enumerate(entry.params):
        request.params[i] = ffi.Param(PARAM_KINDS.index(leaf.kind), leaf.offset, leaf.size)
    return request


def _tensor_map(spec: ffi.TensorMapSpec, address: int, name: str) -> TensorMap:
    return TensorMap(
        address,
        tuple(spec.dims),
        tuple(spec.stride_bytes),
        tuple(spec.box),
        _ELEMENTS[spec.data_type],
        spec.swizzle_bytes,
        name,
        spec.swizzle_atom_bytes,
    )
