"""Brings together what only a process knows: the device, its cubins, the library. One product -> kernel, or why not."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator

import jax

from jax_bwgemm import artifacts, ffi, jit_build, measured
from jax_bwgemm.arch import Arch, by_name, detect
from jax_bwgemm.artifacts import Entry, RepackEntry
from jax_bwgemm.legality import is_read_swapped, why_not_on
from jax_bwgemm.measured import Record, Time
from jax_bwgemm.padding import padded_shape
from jax_bwgemm.plan import Plan, plan
from jax_bwgemm.problem import DTYPE_BYTES, Epilogue, Problem
from jax_bwgemm.repack import Repack, Shape
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant, variant_for

_asked: contextvars.ContextVar[list[tuple[Problem, Arch]] | None] = contextvars.ContextVar("asked", default=None)


@dataclasses.dataclass(frozen=True)
class Decision:
    """`entry` is the cubin to launch; None if XLA takes over, and `reason` says why. No device: no `plan`."""

    plan: Plan | None = None
    entry: Entry | None = None
    reason: str | None = None


def decide(
    problem: Problem, device: str | None, tile: Tile | None, is_emulated: bool = False, compiles: bool = False
) -> Decision:
    """What runs `problem` on `device` (None: the first CUDA device of this process), or in the emulator as there.

    `compiles`: where no kernel at hand can, the one that the planner would choose of all is compiled. ValueError if
    `tile` cannot compute `problem`.
    """
    arch = target_arch(device)
    if isinstance(arch, str):
        return Decision(reason=arch)
    if problem.is_empty:
        return Decision(reason="there is nothing to multiply")
    if (asked := _asked.get()) is not None and tile is None and not is_emulated:
        asked.append((problem, arch))
    missing = _missing_ptx if is_emulated else _missing
    chosen = plan(problem, arch, tile, missing, record=measurements(problem, arch))
    blocked = ffi.status() if is_emulated or _cuda_devices() else None
    if chosen.variant is None and compiles and blocked is None:
        chosen = _compiled(problem, chosen, tile, missing)
    if chosen.variant is None or blocked:
        return Decision(chosen, reason=chosen.reason or blocked)
    if _cuda_devices() and not is_emulated:
        ffi.register(artifacts.artifact_dirs())
    entry = artifacts.find(chosen.variant)
    return Decision(chosen, reason=entry) if isinstance(entry, str) else Decision(chosen, entry)


@contextlib.contextmanager
def asked_problems() -> Iterator[list[tuple[Problem, Arch]]]:
    """What `decide` is asked in the block, by this thread, and may choose a tile for on a GPU; repeated as asked."""
    problems: list[tuple[Problem, Arch]] = []
    token = _asked.set(problems)
    try:
        yield problems
    finally:
        _asked.reset(token)


def kernels(problem: Problem, arch: Arch) -> tuple[Plan, list[Decision]]:
    """The cost model's own plan, whatever was measured; and each candidate that has a cubin, planned by itself."""
    modelled = plan(problem, arch, missing=_missing)
    decisions = []
    for candidate in modelled.candidates:
        own = plan(problem, arch, missing=_missing, among=(candidate,)) if candidate.reason is None else None
        entry = artifacts.find(own.variant) if own and own.variant else None
        if isinstance(entry, Entry):
            decisions.append(Decision(own, entry))
    return modelled, decisions


def measurements(problem: Problem, arch: Arch, borrows: bool = True) -> Record | None:
    """The measured times of `problem`'s kernels, if none of them is of another cubin than the one at hand.

    With `borrows`, a problem that was not timed takes the times of its `measured.stand_in`.
    """
    for asked in filter(None, (problem, measured.stand_in(problem) if borrows else None)):
        for record in measured.found(arch.name, asked):
            if not any(_is_stale(time, asked, arch) for time in record.times):
                return record
    return None


def without_epilogue(problem: Problem) -> Problem | None:
    """The product that XLA can finish where the epilogue has no kernel: alone, in float32, so that there is one
    rounding as ever. None where there is no epilogue."""
    if problem.epilogue.kind == "identity":
        return None
    return dataclasses.replace(problem, out_dtype="float32", epilogue=Epilogue())


def find_repack(
    kind: str, element_bytes: int, out_shape: Shape, device: str | None, is_emulated: bool = False
) -> RepackEntry | None:
    """The kernel that repacks an array into `out_shape` on `device`, or in the emulator as there; None if there is
    none."""
    arch = target_arch(device)
    if isinstance(arch, str):
        return None
    repack = Repack(arch.target, kind, element_bytes)
    if repack.why_not(out_shape) or (is_emulated and isinstance(artifacts.find_ptx(repack), str)):
        return None
    entry = artifacts.find(repack)
    return None if isinstance(entry, str) else entry


def k_major(problem: Problem, device: str | None, is_emulated: bool = False) -> tuple[Problem, ...]:
    """The same product of operands that `device` can read, where it cannot as they lie: one of them or both are k-major
    instead, which kernels of ours make them first. The fewest bytes to transpose come first."""
    arch = target_arch(device)
    if isinstance(arch, str) or problem.is_empty or not why_not_on(problem, arch):
        return ()
    found = []
    for majors in dict.fromkeys(((problem.a_major, "k"), ("k", problem.b_major), ("k", "k"))):
        other = dataclasses.replace(problem, a_major=majors[0], b_major=majors[1])
        if other == problem or (why_not_on(other, arch) and not is_read_swapped(other, arch)):
            continue
        changed = _changed(problem, other)
        if all(find_repack("transpose", size, shape, device, is_emulated) for shape, size in changed):
            found.append((sum(math.prod(shape) * size for shape, size in changed), other))
    return tuple(other for _, other in sorted(found, key=lambda entry: entry[0]))


def target_arch(device: str | None) -> Arch | str:
    """The record of `device` or of this process's first CUDA device, else one sentence why there is none."""
    if device is not None:
        return by_name(device)
    devices = _cuda_devices()
    if not devices:
        return "no CUDA device here; to plan for one, pass `device=` or set JAX_BWGEMM_DEVICE, for example to h200"
    first = devices[0]
    return detect(first.device_kind, first.compute_capability, getattr(first, "core_count", None))


def _changed(problem: Problem, other: Problem) -> list[tuple[Shape, int]]:
    """(shape, bytes of an element) of the operands of `other` that have another major in `problem`, as kernels get
    them."""
    majors = {"a": (problem.a_major, other.a_major), "b": (problem.b_major, other.b_major)}
    element_bytes = {"a": DTYPE_BYTES[problem.a_dtype], "b": DTYPE_BYTES[problem.b_dtype]}
    return [(padded_shape(other, x), element_bytes[x]) for x, (before, after) in majors.items() if before != after]


def _compiled(problem: Problem, chosen: Plan, tile: Tile | None, missing: Callable[[Variant], str | None]) -> Plan:
    """The plan with the kernel that was wanted and missing, or `chosen`, which then says why it cannot be compiled."""
    wanted = plan(problem, chosen.arch, tile).variant
    if wanted is None:
        return chosen
    entry = jit_build.build(wanted)
    if isinstance(entry, str):
        return dataclasses.replace(chosen, reason=f"{chosen.reason}; {entry}")
    return plan(problem, chosen.arch, tile, missing)


def _is_stale(time: Time, problem: Problem, arch: Arch) -> bool:
    """Whether the kernel at hand is another than the one that was timed; not where there is none."""
    try:
        seen, tile = problem.transposed if time.swapped else problem, Tile.from_str(time.tile)
    except ValueError:  # a tile of another version of this package
        return True
    entry = artifacts.find(variant_for(seen, tile, arch.target))
    return isinstance(entry, Entry) and not entry.cubin_sha256.startswith(time.cubin)


def _missing(variant: Variant) -> str | None:
    found = artifacts.find(variant)
    return found if isinstance(found, str) else None


def _missing_ptx(variant: Variant) -> str | None:
    found = artifacts.find_ptx(variant)
    return found if isinstance(found, str) else None


def _cuda_devices() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:  # how JAX says that there is no such backend
        return []
