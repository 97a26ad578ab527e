"""A snippet: a few lines of PTX for sm_90a with inputs and results, for the emulator and for a Hopper GPU alike.

Parameters, in order: a pointer to each result, a pointer to each input, the tensor maps.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jax_bwgemm.emulator import Launch, Memory, Schedule, TensorMap, parse, run
from tests.emu.snippet import module_text

Dim = tuple[int, int, int]
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two machines may be apart: NaN and infinities agree, else `relative` to the value or `absolute`."""

    kind: str = "f32"
    relative: float = 0.0
    absolute: float = 0.0

    def excess(self, got: np.ndarray, want: np.ndarray) -> float:
        """The largest difference in units of the bound."""
        g, w = (x.reshape(-1).view(FLOATS[self.kind]).astype(np.float64) for x in (got, want))
        same = (g == w) | (np.isnan(g) & np.isnan(w))
        with np.errstate(all="ignore"):
            over = np.abs(g - w) / np.maximum(self.relative * np.abs(w), self.absolute)
        over = np.where(np.isfinite(g) & np.isfinite(w), over, np.inf)
        return float(np.max(np.where(same, 0.0, over)))


@dataclasses.dataclass(frozen=True)
class Result:
    """`start`: the array before the kernel. `expected`: raw bits by a formula of the test's own, or None."""

    label: str
    start: np.ndarray
    expected: np.ndarray | None = None
    tolerance: Tolerance | None = None

    def mismatch(self, got: np.ndarray, want: np.ndarray) -> str | None:
        """One line on how `got` differs from `want`; None if they agree."""
        got, want = got.reshape(-1), want.reshape(-1)
        if self.tolerance is not None:
            excess = self.tolerance.excess(got, want)
            return None if excess <= 1 else f"{self.label}: {excess:.3g} times the bound"
        bad = np.flatnonzero(got != want)
        if not len(bad):
            return None
        pairs = ", ".join(f"[{i}] {int(got[i]):#x} for {int(want[i]):#x}" for i in bad[:6])
        return f"{self.label}: {len(bad)} of {len(got)} differ: {pairs}"


@dataclasses.dataclass(frozen=True)
class MapOf:
    """A tensor map over the array of parameter `array`; the rest as in `TensorMap`."""

    array: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: str = "u16"
    swizzle: int = 0

    def at(self, addresses: tuple[int, ...]) -> TensorMap:
        return TensorMap(addresses[self.array], self.dims, self.strides, self.box, self.element, self.swizzle)


@dataclasses.dataclass(frozen=True)
class Snippet:
    name: str
    body: str
    results: tuple[Result, ...]
    inputs: tuple[np.ndarray, ...] = ()
    maps: tuple[MapOf, ...] = ()
    threads: int = 32
    grid: Dim = (1, 1, 1)
    cluster: Dim = (1, 1, 1)
    smem_bytes: int = 1 << 14
    target: str = "sm_90a"

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Fresh copies of what the kernel may write, and the inputs."""
        return (*(r.start.copy() for r in self.results), *self.inputs)

    def text(self) -> str:
        count = len(self.results) + len(self.inputs)
        addresses = tuple(0x1000 * (i + 1) for i in range(count))
        return module_text(self.body, (*addresses, *(m.at(addresses) for m in self.maps)), self.threads, self.target)

    def mismatches(self, got: tuple[np.ndarray, ...], want: tuple[np.ndarray | None, ...]) -> list[str]:
        """One line for each result that differs."""
        lines = [r.mismatch(g, w) for r, g, w in zip(self.results, got, want, strict=True) if w is not None]
        return [line for line in lines if line]


def emulate(snippet: Snippet, schedule: Schedule | None = None) -> tuple[np.ndarray, ...]:
    """The results, by the emulator."""
    memory, arrays = Memory(), snippet.arrays()
    addresses = tuple(memory.register(array, f"p{i}") for i, array in enumerate(arrays))
    params = (*addresses, *(m.at(addresses) for m in snippet.maps))
    launch = Launch(snippet.grid, (snippet.threads, 1, 1), params, snippet.cluster, snippet.smem_bytes)
    run(parse(snippet.text()), launch, memory, schedule)
    return arrays[: len(snippet.results)]


BEGIN = "mov.u32 %r1, %tid.x; mov.b32 %r10, smem; mov.u32 %r30, %cluster_ctarank;\n"


def copy_in(param: int, at: int, size: int, threads: int) -> str:
    """The CTA's `size` bytes of an input go to shared memory, 16 bytes a thread and turn."""
    return _copy(
        param,
        at,
        size,
        threads,
        "ld.global.v2.b64 {{%d42, %d43}}, [%d41+{o}]; {g}st.shared.v2.b64 [%r402+{s}], {{%d42, %d43}};",
    )


def copy_out(param: int, at: int, size: int, threads: int) -> str:
    """The other way: shared memory to the CTA's part of a result."""
    return _copy(
        param,
        at,
        size,
        threads,
        "ld.shared.v2.b64 {{%d42, %d43}}, [%r402+{s}]; {g}st.global.v2.b64 [%d41+{o}], {{%d42, %d43}};",
    )


def _copy(param: int, at: int, size: int, threads: int, form: str) -> str:
    lines = [
        f"ld.param.b64 %d40, [p{param}]; shl.b32 %r401, %r1, 4; add.s32 %r402, %r10, %r401;",
        f"mad.lo.s32 %r403, %r30, {size}, %r401; cvt.u64.u32 %d41, %r403; add.s64 %d41, %d40, %d41;",
    ]
    for offset in range(0, size, 16 * threads):
        whole = offset + 16 * threads <= size
        guard = "" if whole else "@%p30 "
        if not whole:
            lines.append(f"setp.lt.u32 %p30, %r401, {size - offset};")
        lines.append(guard + form.format(o=offset, s=at + offset, g=guard))
    return "\n".join(lines) + "\n"


def wait(barrier: str, parity: int | str, label: str) -> str:
    return (
        f"{label}: mbarrier.try_wait.parity.shared.b64 %p29, [{barrier}], {parity};"
        f" @%p29 bra {label}_DONE; bra {label}; {label}_DONE:\n"
    )
