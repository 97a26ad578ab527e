"""Brings together what only a process knows: the device, its cubins, the library. One product -> kernel, or why not."""

from __future__ import annotations

import dataclasses

import jax

from jax_bwgemm import artifacts, ffi
from jax_bwgemm.arch import Arch, by_name, detect
from jax_bwgemm.artifacts import Entry
from jax_bwgemm.plan import Plan, plan
from jax_bwgemm.problem import Problem
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant


@dataclasses.dataclass(frozen=True)
class Decision:
    """`entry` is the cubin to launch; None if XLA takes over, and `reason` says why. No device: no `plan`."""

    plan: Plan | None = None
    entry: Entry | None = None
    reason: str | None = None


def decide(problem: Problem, device: str | None, tile: Tile | None, is_emulated: bool = False) -> Decision:
    """What runs `problem` on `device` (None: the first CUDA device of this process), or in the emulator as there."""
    arch = target_arch(device)
    if isinstance(arch, str):
        return Decision(reason=arch)
    if problem.is_empty:
        return Decision(reason="there is nothing to multiply")
    chosen = plan(problem, arch, tile, _missing_ptx if is_emulated else _missing)
    if chosen.variant is None:
        return Decision(chosen, reason=chosen.reason)
    if reason := ffi.status() if is_emulated else _why_not_launch():
        return Decision(chosen, reason=reason)
    entry = artifacts.find(chosen.variant)
    return Decision(chosen, reason=entry) if isinstance(entry, str) else Decision(chosen, entry)


def target_arch(device: str | None) -> Arch | str:
    """The record of `device` or of this process's first CUDA device, else one sentence why there is none."""
    if device is not None:
        return by_name(device)
    devices = _cuda_devices()
    if not devices:
        return "no CUDA device here; to plan for one, pass `device=` or set JAX_BWGEMM_DEVICE, for example to h200"
    first = devices[0]
    return detect(first.device_kind, first.compute_capability, getattr(first, "core_count", None))


def _missing(variant: Variant) -> str | None:
    found = artifacts.find(variant)
    return found if isinstance(found, str) else None


def _missing_ptx(variant: Variant) -> str | None:
    found = artifacts.find_ptx(variant)
    return found if isinstance(found, str) else None


def _why_not_launch() -> str | None:
    """Why the launcher cannot serve this process; None on a machine without a GPU, which only lowers for another."""
    if not _cuda_devices():
        return None
    reason = ffi.status()
    if reason is None:
        ffi.register(artifacts.artifact_dirs())
    return reason


def _cuda_devices() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:  # how JAX says that there is no such backend
        return []
