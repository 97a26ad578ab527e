"""Brings together what only a process knows: the device, its cubins, the library. One product -> kernel, or why not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from jax_bwgemm.facts.arch import Arch, by_name, detect
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.repack import Repack, Shape
from jax_bwgemm.facts.symbols import Symbols, why_not_positive
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, variant_for
from jax_bwgemm.planner import measured
from jax_bwgemm.planner.measured import Record, Time
from jax_bwgemm.planner.plan import Plan, plan
from jax_bwgemm.runtime import artifacts, ffi
from jax_bwgemm.runtime.artifacts import Entry, RepackEntry


@dataclasses.dataclass(frozen=True)
class Decision:
    """`entry` is the cubin to launch; None if XLA takes over, and `reason` says why. No device: no `plan`."""

    plan: Plan | None = None
    entry: Entry | None = None
    reason: str | None = None


def decide(
    problem: Problem,
    device: str | None,
    tile: Tile | None,
    is_emulated: bool = False,
    batch_invariant: bool = False,
    symbols: Symbols | None = None,
    shares_device: bool = False,
) -> Decision:
    """What runs `problem` on `device` (None: the first CUDA device of this process), or in the emulator as there.

    `shares_device` as `plan` takes it. Of a product in parts of k nothing that was measured counts, for it was of other
    operands. ValueError if `tile` cannot compute `problem`, or not as `plan` takes `batch_invariant` and `symbols`.
    """
    arch = target_arch(device)
    if isinstance(arch, str):
        return Decision(reason=arch)
    if reason := why_not_asked(problem, symbols):
        return Decision(reason=reason)
    suffix = artifacts.PTX if is_emulated else artifacts.CUBIN
    missing = _missing(artifacts.state(), suffix)
    known = None if symbols or problem.whole_k else measurements(problem, arch)
    chosen = plan(
        problem,
        arch,
        tile,
        missing,
        record=known,
        batch_invariant=batch_invariant,
        symbols=symbols,
        shares_device=shares_device,
    )
    blocked = why_not_launched(is_emulated)
    if chosen.variant is None or blocked:
        return Decision(chosen, reason=chosen.reason or blocked)
    entry = artifacts.ready(chosen.variant, suffix)
    return Decision(chosen, reason=entry) if isinstance(entry, str) else Decision(chosen, entry)


def why_not_asked(problem: Problem, symbols: Symbols | None = None) -> str | None:
    """Why no kernel is looked for."""
    if not problem.is_static:
        return "the emulator requires sizes known at trace time, and these are symbolic"
    if symbols and (reason := why_not_positive(symbols)):
        return reason
    return "there is nothing to multiply" if problem.is_empty else None


def why_not_launched(is_emulated: bool) -> str | None:
    """Why this process can launch, or emulate, no kernel at all; None also where it only plans for a device."""
    return ffi.status() if is_emulated or _cuda_devices() else None


def register(is_emulated: bool) -> None:
    """Before a kernel is launched from here: XLA knows the handler, and that where cubins are."""
    if _cuda_devices() and not is_emulated:
        ffi.register(artifacts.launch_dirs())


def kernels(problem: Problem, arch: Arch) -> tuple[Plan, list[Decision]]:
    """The cost model's own plan, whatever was measured; and each candidate that has a cubin, planned by itself."""
    missing = _missing(artifacts.state(), artifacts.CUBIN)
    modelled = plan(problem, arch, missing=missing)
    decisions = []
    for candidate in modelled.candidates:
        own = plan(problem, arch, missing=missing, among=(candidate,)) if candidate.reason is None else None
        entry = artifacts.ready(own.variant) if own and own.variant else None
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


def find_repack(
    kind: str, element_bytes: int, out_shape: Shape, device: str | None, is_emulated: bool = False
) -> RepackEntry | None:
    """The kernel that repacks an array into `out_shape` on `device`, or in the emulator as there; None if there is
    none."""
    arch = target_arch(device)
    if isinstance(arch, str):
        return None
    repack = Repack(arch.target, kind, element_bytes)
    if repack.why_not(out_shape):
        return None
    entry = artifacts.ready(repack, artifacts.PTX if is_emulated else artifacts.CUBIN)
    return None if isinstance(entry, str) else entry


def target_arch(device: str | None) -> Arch | str:
    """The record of `device` or of this process's first CUDA device, else one sentence why there is none."""
    if device is not None:
        return by_name(device)
    devices = _cuda_devices()
    if not devices:
        return "no CUDA device here; to plan for one, pass `device=` or set JAX_BWGEMM_DEVICE, for example to h200"
    first = devices[0]
    return detect(first.device_kind, first.compute_capability, getattr(first, "core_count", None))


def _is_stale(time: Time, problem: Problem, arch: Arch) -> bool:
    """Whether the kernel at hand is another than the one that was timed; not where there is none."""
    try:
        seen, tile = problem.transposed if time.swapped else problem, Tile.from_str(time.tile)
    except ValueError:  # a tile of another version of this package
        return True
    entry = artifacts.find(variant_for(seen, tile, arch.target_of(seen.a_dtype)))
    return isinstance(entry, Entry) and not entry.cubin_sha256.startswith(time.cubin)


@functools.lru_cache(maxsize=8)
def _missing(seen: artifacts.State, suffix: str) -> Callable[[Variant], str | None]:
    """Why a variant's file cannot be had, or None, as `plan` asks it of a hundred a product: kept for as long as the
    artifacts stay as they were `seen`."""

    @functools.cache
    def missing(variant: Variant) -> str | None:
        found = artifacts.find(variant, suffix)
        return found if isinstance(found, str) else None

    return missing


def _cuda_devices() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:  # how JAX says that there is no such backend
        return []
