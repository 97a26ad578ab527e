"""Process-wide defaults: what to do when XLA takes over, the device to plan for, what to emulate. Knows no problem."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator

import jax

from jax_bwgemm.arch import ARCHS, by_name

POLICIES = ("warn", "ignore", "error")
EMULATED_DEVICES = {"sm_90a": "h200", "sm_100a": "b200", "sm_103a": "b300"}  # what a target is planned as by default
EMULATE = ("off", *EMULATED_DEVICES)


class FallbackWarning(UserWarning):
    """XLA computes a product that was asked of this package; the message says which one and why."""


class FallbackError(RuntimeError):
    """As `FallbackWarning`, under `on_fallback="error"`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """`on_fallback`: "warn" (once per problem), "ignore" or "error". `device`: a key of `ARCHS`, None to detect it.

    `emulate`: the target whose kernels run in the emulator on platforms other than CUDA, or "off".
    """

    on_fallback: str = "warn"
    device: str | None = None
    emulate: str = "off"

    def __post_init__(self) -> None:
        if self.on_fallback not in POLICIES:
            raise ValueError(f"`on_fallback` requires one of {', '.join(POLICIES)}, got {self.on_fallback!r}")
        if self.device is not None:
            by_name(self.device)
        if self.emulate not in EMULATE:
            raise ValueError(f"`emulate` requires one of {', '.join(EMULATE)}, got {self.emulate!r}")
        legal = [arch.name for arch in ARCHS.values() if arch.target == self.emulate]
        if self.is_emulated and self.planned_device not in legal:
            names = ", ".join(legal)
            raise ValueError(f"`emulate` {self.emulate!r} requires the `device` {names}, got {self.device!r}")

    @property
    def is_emulated(self) -> bool:
        return self.emulate != "off"

    @property
    def planned_device(self) -> str | None:
        """What to plan for: `device`, else the one that stands for the emulated target, else None (to be detected)."""
        return self.device or EMULATED_DEVICES.get(self.emulate)


_override = jax.make_user_context(None)  # part of the key of jit caches: a block traces anew
_reported: set[tuple[str, str]] = set()


def current() -> Config:
    """What holds here: the innermost `config` block, else `JAX_BWGEMM_ON_FALLBACK`, `_DEVICE` and `_EMULATE`."""
    override: Config | None = _override.value
    return override or _from_environment()


def resolve(on_fallback: str | None, device: str | None, emulate: str | None = None) -> Config:
    """An argument that is None takes its default from `current`."""
    default = current()
    return Config(on_fallback or default.on_fallback, device or default.device, emulate or default.emulate)


@contextlib.contextmanager
def config(
    *, on_fallback: str | None = None, device: str | None = None, emulate: str | None = None
) -> Iterator[Config]:
    """Defaults for the calls made inside the block, by this thread; a `jax.jit` traces anew for other defaults.

    Args:
      on_fallback: "warn", "ignore" or "error"; None keeps what holds outside.
      device: "h100", "h200", "b200" or "b300"; None keeps what holds outside.
      emulate: "sm_90a", "sm_100a", "sm_103a" or "off"; None keeps what holds outside.

    Example: `with jax_bwgemm.config(on_fallback="error"): y = jax_bwgemm.matmul(x, w)`
    """
    with _override(resolve(on_fallback, device, emulate)):
        yield current()


def report_fallback(policy: str, what: str, reason: str) -> None:
    """Warns once per product and reason, raises `FallbackError`, or stays silent, as `policy` says."""
    message = f"XLA computes {what}: {reason}"
    if policy == "error":
        raise FallbackError(message)
    if policy == "warn" and (what, reason) not in _reported:
        _reported.add((what, reason))
        warnings.warn(f'{message} (on_fallback="ignore" silences this)', FallbackWarning, stacklevel=2)


def forget_reported() -> None:
    """Lets `report_fallback` warn again of what it has warned of."""
    _reported.clear()


def _from_environment() -> Config:
    on_fallback = os.environ.get("JAX_BWGEMM_ON_FALLBACK") or "warn"
    device = os.environ.get("JAX_BWGEMM_DEVICE") or None
    emulate = os.environ.get("JAX_BWGEMM_EMULATE") or "off"
    try:
        return Config(on_fallback, device, emulate)
    except ValueError as error:
        names = "JAX_BWGEMM_ON_FALLBACK, JAX_BWGEMM_DEVICE or JAX_BWGEMM_EMULATE"
        raise ValueError(f"{error}, from {names}") from None
