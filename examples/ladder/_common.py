"""What every rung needs around its kernel: compile it, run it in the emulator, compare, count.

Holds no kernel: a rung is one file, and what happens on the device is all in there. Knows an architecture only by its
name, so that rungs of another one can join.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import tempfile
from collections.abc import Sequence
from typing import Any

import cutlass
import ml_dtypes
import numpy as np
from _bfloat16 import BOUND as BOUND
from _launch import Facts, Map
from cutlass import cute

from jax_bwgemm.emulator import Counters, Launch, Memory, Observer, Schedule, TensorMap, parse, run
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.resources import BARRIER_BYTES, load_box, stage_bytes
from jax_bwgemm.facts.tile import Tile

DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A step of the ladder: its kernel and what a launcher must know of it.

    `launch` is the rung's `@cute.jit` host function of a (m, k), b (n, k) and c (m, n), all row-major bfloat16. Its
    kernel takes the tensor maps of a and b, then c's if there is a `store_box`, else c's address, then m, n and k.
    """

    name: str
    before: str  # the rung that it is compared with; "" for the first
    changes: str
    launch: Any
    kernel: Any
    tile: Tile
    num_stages: int
    num_threads: int
    store_box: tuple[int, int] | None = None  # (columns, rows) of one TMA store
    num_store_boxes: int = 0  # on their way out, in shared memory
    is_persistent: bool = False
    arch: str = "sm_100a"

    @property
    def smem_bytes(self) -> int:
        cols, rows = self.store_box or (0, 0)
        stages = self.num_stages * stage_bytes(self.tile, DTYPE)
        return BARRIER_BYTES + stages + self.num_store_boxes * cols * rows * 2

    @property
    def cluster(self) -> tuple[int, int, int]:
        return self.tile.cluster_m, self.tile.cluster_n, 1

    def facts(self, entry: str = "") -> Facts:
        """For a launcher, which knows neither tiles nor CuTeDSL. `entry`: the compiled kernel's."""
        boxes = load_box(self.tile, "a", "k", DTYPE), load_box(self.tile, "b", "k", DTYPE), self.store_box
        tile = self.tile.cta_m, self.tile.mma_n
        sizes = self.num_threads, self.smem_bytes, self.cluster, tile
        return Facts(self.name, self.arch, entry, *sizes, self.is_persistent, boxes)

    def cta_tiles(self, m: int, n: int) -> tuple[int, int]:
        """CTA tiles along m and n, in whole clusters."""
        return self.facts().cta_tiles(m, n)

    def params(self, shape: Sequence[int], addresses: Sequence[int]) -> list[TensorMap | int]:
        """The kernel's, for a, b and c at these addresses."""
        given = zip(self.facts().params(shape, addresses), "abcmnk", strict=True)
        return [TensorMap(*p[:4], "bf16", p.swizzle, name) if isinstance(p, Map) else p for p, name in given]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What `compile_rung` makes: PTX for the emulator, a cubin for a GPU."""

    ptx: str
    cubin: bytes
    entry: str

    @functools.cached_property
    def module(self) -> Module:
        return parse(self.ptx)


@functools.cache
def compile_rung(rung: Rung) -> Kernel:
    """Cross-compiles, which needs no GPU. In a directory of its own: CuTeDSL reuses file names."""
    rung.kernel.set_name_prefix(rung.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    tensors = (_any_matrix() for _ in "abc")
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch {rung.arch} --keep-ptx --keep-cubin --dump-dir={dump}"
        compiled = cute.compile(rung.launch, *tensors, options=options)
    return Kernel(compiled.artifacts.PTX, compiled.artifacts.CUBIN, next(iter(compiled.kernel_info)))


def _any_matrix() -> Any:
    """A row-major matrix of any size whose rows start at multiples of 16 bytes."""
    shape = tuple(cute.SymInt(width=32, divisibility=8) for _ in range(2))
    return cute.runtime.make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=(1, 0), assumed_align=16)


def operands(kind: str, shape: Sequence[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """a (m, k) and b (n, k) in bfloat16: "integers" in [-2, 2), as published benchmarks have them, or "normal"."""
    rng, (m, n, k) = np.random.default_rng(seed), shape
    draw = rng.standard_normal if kind == "normal" else functools.partial(rng.integers, -2, 2)
    a, b = draw(size=(m, k)), draw(size=(n, k))
    return a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)


def emulate(
    rung: Rung,
    a: np.ndarray,
    b: np.ndarray,
    schedule: Schedule | None = None,
    observer: Observer | None = None,
    max_clusters: int = 2,
    kernel: Kernel | None = None,
) -> tuple[np.ndarray, Counters]:
    """C = A B^T, which starts as NaN, and what the launch counted. `EmulatorError` if the kernel breaks a rule.

    `kernel`: another than the rung's own, with the same parameters.
    """
    shape = a.shape[0], b.shape[0], a.shape[1]
    c = np.full(shape[:2], np.nan, ml_dtypes.bfloat16)
    memory, kernel = Memory(), kernel or compile_rung(rung)
    params = rung.params(shape, [memory.register(array, name) for name, array in zip("abc", (a, b, c), strict=True)])
    grid = rung.facts().grid(*shape[:2], max_clusters)
    launch = Launch(grid, (rung.num_threads, 1, 1), tuple(params), rung.cluster, rung.smem_bytes, kernel.entry)
    return c, run(kernel.module, launch, memory, schedule, observer=observer)


def rung_of(name: str) -> Rung:
    """By the name of its file."""
    rung: Rung = importlib.import_module(name).RUNG
    return rung


def relative_error(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Against float64, in the Frobenius norm."""
    want = a.astype(np.float64) @ b.astype(np.float64).T
    return float(np.linalg.norm(c.astype(np.float64) - want) / (np.linalg.norm(want) or 1.0))
