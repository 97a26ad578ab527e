"""For programs that are lowered in one process and run in another: `jax.export`, and compiled programs that are kept.

A lowered program names its kernels. A process that only runs it must make their launcher known to XLA and have their
cubins, and neither the functions nor the choices that it was made with.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

from jax_bwgemm.runtime import artifacts, decision, ffi

_VARIANT, _SHA = r'\bvariant = "([^"]+)"', r'\bcubin_sha256 = "([^"]+)"'


@dataclasses.dataclass(frozen=True, order=True)
class Kernel:
    """What an exported program launches: a cubin by its name and its sha256."""

    name: str
    cubin_sha256: str

    def why_not(self) -> str | None:
        """None if the cubin is at hand, else one sentence with the remedy."""
        found = artifacts.sha256_of(self.name)
        if found == self.cubin_sha256:
            return None
        remedy = f"python -m jax_bwgemm build --only '{self.name}'"
        if found is None:
            where = ", ".join(map(str, artifacts.artifact_dirs()))
            return f"{self.name} is in none of {where}: run {remedy}, or name its directory in JAX_BWGEMM_ARTIFACTS"
        return (
            f"{self.name} is here in another build, {found[:12]}, than the {self.cubin_sha256[:12]} of the program: "
            "export it again, or name the directory of those cubins in JAX_BWGEMM_ARTIFACTS"
        )


def disabled_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """What `jax.export.export(..., disabled_checks=)` needs for our custom calls, whose form JAX does not vouch for.

    We do: a custom call keeps its form for as long as its name, `jax_bwgemm_matmul_v2`, stands; another version of this
    package that cannot run it says so (`register`).

    Example:
      >>> checks = jax_bwgemm.export.disabled_checks()
      >>> exported = jax.export.export(f, platforms=("cuda",), disabled_checks=checks)(x, w)
      >>> blob = exported.serialize()
    """
    return tuple(map(jax.export.DisabledSafetyCheck.custom_call, (ffi.TARGET_NAME, ffi.REPACK_NAME)))


def kernels(exported: Any) -> tuple[Kernel, ...]:
    """The kernels that a `jax.export.Exported` needs, each once, by name; also of a `jax.stages.Lowered`.

    Raises:
      TypeError: neither of these.
    """
    if not isinstance(exported, jax.export.Exported | jax.stages.Lowered):
        rule = "a `jax.export.Exported` or a `jax.stages.Lowered`"
        raise TypeError(f"`exported` requires {rule}, got {type(exported).__name__}; of bytes `deserialize` makes one")
    text = exported.mlir_module() if isinstance(exported, jax.export.Exported) else exported.as_text()
    targets = (ffi.TARGET_NAME, ffi.REPACK_NAME)
    calls = (line for line in text.splitlines() if any(f"@{target}" in line for target in targets))
    found = ((re.search(_VARIANT, line), re.search(_SHA, line)) for line in calls)
    return tuple(sorted({Kernel(name[1], sha[1]) for name, sha in found if name and sha}))


def register(exported: Any = None) -> None:
    """Makes our custom calls known to XLA in a process that only runs programs, and checks the kernels of one.

    Without a CUDA device nothing can be launched: the library is not asked for then.

    Args:
      exported: what is about to be called, as `kernels` takes it, or None.

    Raises:
      RuntimeError: there is a CUDA device, but no usable library; the message says why.
      ValueError: a kernel of the program is not at hand, or is another build's; the message says which, and what to do.
      TypeError: `exported` is no such program.

    Example:
      >>> exported = jax.export.deserialize(blob)
      >>> jax_bwgemm.export.register(exported)
      >>> y = exported.call(x, w)
    """
    named = () if exported is None else kernels(exported)
    if missing := [reason for kernel in named if (reason := kernel.why_not())]:
        others = f" (and {len(missing) - 1} others)" if missing[1:] else ""
        raise ValueError(f"a program requires the kernels that it names: {missing[0]}{others}")
    if (reason := decision.why_not_launched(is_emulated=False)) is not None:
        raise RuntimeError(reason)
    decision.register(is_emulated=False)
