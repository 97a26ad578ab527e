"""Process-wide defaults: what to do when XLA takes over, the device to plan for, what to emulate, whether to compile.

Knows no problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Iterator

import jax

from jax_bwgemm.facts.arch import ARCHS, by_name, device_of
from jax_bwgemm.runtime import record

POLICIES = ("warn", "ignore", "error")
EMULATED_DEVICES = {"sm_90a": "h200", "sm_100f": "b200", "sm_100a": "b200"}  # what a target is planned as by default
EMULATE = ("off", *EMULATED_DEVICES)
COMPILE_MISSING = ("auto", "never")
PARTIAL_SUMS = ("result", "float32")
DETERMINISTIC = ("run", "batch")


class FallbackWarning(UserWarning):
    """XLA computes a product that was asked of this package; the message says which one and why."""


class FallbackError(RuntimeError):
    """As `FallbackWarning`, under `on_fallback="error"`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """`on_fallback`: "warn" (once per problem), "ignore" or "error". `device`: a key of `ARCHS`, None to detect it.

    `emulate`: the target whose kernels run in the emulator on platforms other than CUDA, or "off". `compile_missing`:
    "auto" compiles a kernel that is asked for and missing, where CuTeDSL is installed; "never" leaves it to XLA.
    `partial_sums`: the dtype in which devices add their parts of a product whose k is sharded, the result's or float32.
    `deterministic`: what a row's bits do not depend on: which "run" it is, or the "batch" that it is computed in, too.
    """

    on_fallback: str = "warn"
    device: str | None = None
    emulate: str = "off"
    compile_missing: str = "auto"
    partial_sums: str = "result"
    deterministic: str = "run"

    def __post_init__(self) -> None:
        if self.on_fallback not in POLICIES:
            raise ValueError(f"`on_fallback` requires one of {', '.join(POLICIES)}, got {self.on_fallback!r}")
        if self.device is not None:
            by_name(self.device)
        if self.emulate not in EMULATE:
            meant = device_of(str(self.emulate))
            hint = f": pass {meant.target!r} and `device` {meant.name!r}" if meant else ""
            raise ValueError(f"`emulate` requires one of {', '.join(EMULATE)}, got {self.emulate!r}{hint}")
        if self.compile_missing not in COMPILE_MISSING:
            rule = f"`compile_missing` requires one of {', '.join(COMPILE_MISSING)}"
            raise ValueError(f"{rule}, got {self.compile_missing!r}")
        if self.partial_sums not in PARTIAL_SUMS:
            rule = f"`partial_sums` requires one of {', '.join(PARTIAL_SUMS)}"
            raise ValueError(f"{rule}, got {self.partial_sums!r}")
        if self.deterministic not in DETERMINISTIC:
            rule = f"`deterministic` requires one of {', '.join(DETERMINISTIC)}"
            raise ValueError(f"{rule}, got {self.deterministic!r}")
        legal = [arch.name for arch in ARCHS.values() if self.emulate in arch.targets]
        if self.is_emulated and self.planned_device not in legal:
            names = ", ".join(legal)
            raise ValueError(f"`emulate` {self.emulate!r} requires the `device` {names}, got {self.device!r}")

    @property
    def is_emulated(self) -> bool:
        return self.emulate != "off"

    @property
    def is_batch_invariant(self) -> bool:
        return self.deterministic == "batch"

    def why_aloud(self, reason: str) -> str:
        """Why XLA computes a product, and what that breaks."""
        if not self.is_batch_invariant:
            return reason
        return f'{reason}; XLA\'s sums depend on the batch, so `deterministic="batch"` does not hold here'

    @property
    def planned_device(self) -> str | None:
        """What to plan for: `device`, else the one that stands for the emulated target, else None (to be detected)."""
        return self.device or EMULATED_DEVICES.get(self.emulate)


_INNER = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), jax.__file__))
_override = jax.make_user_context(None)  # part of the key of jit caches: a block traces anew
_reported: set[tuple[str, str]] = set()


def current() -> Config:
    """What holds here: the innermost `config` block, else `JAX_BWGEMM_ON_FALLBACK` and the variables like it."""
    override: Config | None = _override.value
    return override or _from_environment()


def resolve(
    on_fallback: str | None,
    device: str | None,
    emulate: str | None = None,
    compile_missing: str | None = None,
    partial_sums: str | None = None,
    deterministic: str | None = None,
) -> Config:
    """An argument that is None takes its default from `current`."""
    default, given = current(), (on_fallback, device, emulate, compile_missing, partial_sums, deterministic)
    if all(value is None for value in given):
        return default
    defaults = (getattr(default, field.name) for field in dataclasses.fields(Config))
    return Config(*(other if value is None else value for value, other in zip(given, defaults, strict=True)))


@contextlib.contextmanager
def config(
    *,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
    compile_missing: str | None = None,
    partial_sums: str | None = None,
    deterministic: str | None = None,
) -> Iterator[Config]:
    """Defaults for the calls made inside the block, by this thread; a `jax.jit` traces anew for other defaults.

    Args:
      on_fallback: "warn", "ignore" or "error"; None keeps what holds outside.
      device: "h100", "h200", "b200" or "b300"; None keeps what holds outside.
      emulate: "sm_90a", "sm_100f", "sm_100a" or "off"; None keeps what holds outside.
      compile_missing: "auto": a product whose `tile` was given, or that no kernel at hand can do, has its kernel
        compiled (some seconds, once) into the user's cache directory if CuTeDSL is installed; "never"; None keeps what
        holds outside.
      partial_sums: "result": where k is sharded over devices of a mesh that XLA partitions, and in
        `matmul_reduce_scatter`, they add their parts in the result's dtype, as XLA does it; "float32": in float32,
        twice the bytes for a result of two; None keeps what holds outside.
      deterministic: "run": the same call has the same bits every time; "batch": a row's bits depend neither on how many
        rows or matrices are computed with it nor on how a mesh divides them (batch invariance, `docs/numerics.md`), for
        which kernels that split k are left out; None keeps what holds outside.

    Example: `with jax_bwgemm.config(on_fallback="error"): y = jax_bwgemm.matmul(x, w)`
    """
    with _override(resolve(on_fallback, device, emulate, compile_missing, partial_sums, deterministic)):
        yield current()


def report_fallback(
    policy: str, what: str, reason: str, where: tuple[str, int] | None = None, is_everywhere: bool = False
) -> None:
    """Warns once per product and reason, raises `FallbackError`, or stays silent, as `policy` says; silent also while
    products are only listed.

    `where`: file and line of the user's, else those of the first caller outside of this package and JAX. What
    `is_everywhere`, such as a process without CUDA, is said of the first product alone.
    """
    if record.is_listed():
        return  # who asks is told, and nothing runs
    message = f"XLA computes {what}: {reason}"
    if policy == "error":
        raise FallbackError(message)
    key = ("" if is_everywhere else what, reason)
    if policy == "warn" and key not in _reported:
        rest = "; so it does all others here" if is_everywhere else ""
        text = f'{message}{rest} (on_fallback="ignore" silences this)'
        warnings.warn_explicit(text, FallbackWarning, *(where or caller()))
        _reported.add(key)  # not where the warning is an error, which is raised each time


def caller() -> tuple[str, int]:
    """File and line of the first one outside of this package and JAX."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_users(filename: str) -> bool:
    """Whether a source file is neither this package's nor JAX's."""
    return not filename.startswith(_INNER)


def forget_reported() -> None:
    """Lets `report_fallback` warn again of what it has warned of."""
    _reported.clear()


def variable(name: str) -> str:
    """Of the environment, which has the default of the field `name` of a `Config`."""
    return f"JAX_BWGEMM_{name.upper()}"


_VARIABLES = tuple(variable(field.name) for field in dataclasses.fields(Config))


def _from_environment() -> Config:
    return _of_variables(tuple(map(os.environ.get, _VARIABLES)))


@functools.lru_cache(maxsize=64)
def _of_variables(values: tuple[str | None, ...]) -> Config:
    fields = (field.name for field in dataclasses.fields(Config))
    given = {name: value for name, value in zip(fields, values, strict=True) if value}
    for names in (*((name,) for name in given), ("emulate", "device")):  # each alone, and those that must agree
        try:
            Config(**{name: given[name] for name in names if name in given})
        except ValueError as error:
            raise ValueError(f"{error}, from {' and '.join(map(variable, names))}") from None
    return Config(**given)
