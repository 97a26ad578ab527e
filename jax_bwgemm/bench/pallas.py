"""Pallas' matmul for Hopper, which comes with jax: what it can do, and a few of its configurations. Knows no clock."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.products import Product
from jax_bwgemm.facts.arch import Arch

TILE_K, MAX_STAGES, GRID_WIDTH = 64, 8, 8
ELEM_BYTES = 2  # `why_not` lets no other through
OUT_BYTES = 2 * 2 * 64 * 64 * ELEM_BYTES  # of shared memory: two buffers for each warpgroup
BARRIER_BYTES = 1024  # at most


@dataclasses.dataclass(frozen=True)
class Config:
    """A warpgroup's tile; two warpgroups lie along `wg_along`, two CTAs of a cluster along `cluster_along`. Groups of
    GRID_WIDTH cluster tiles along `grid_minor` are walked in a snake."""

    tile_m: int
    tile_n: int
    wg_along: str
    cluster_along: str | None = None
    grid_minor: str = "N"

    def __str__(self) -> str:
        cluster = f"cluster{self.cluster_along or 1}_minor{self.grid_minor}"
        return f"{self.tile_m}x{self.tile_n}_wg{self.wg_along}_{cluster}"

    @property
    def cta_tile(self) -> tuple[int, int]:
        return self.tile_m * (1 + (self.wg_along == "M")), self.tile_n * (1 + (self.wg_along == "N"))

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of which m and n must be multiples."""
        m, n = self.cta_tile
        return m * (1 + (self.cluster_along == "M")), n * (1 + (self.cluster_along == "N"))

    def stages(self, smem_bytes: int) -> int:
        """As many as shared memory holds beside the result's buffers: it refuses one more."""
        stage_bytes = sum(self.cta_tile) * TILE_K * ELEM_BYTES
        return min(MAX_STAGES, (smem_bytes - OUT_BYTES - BARRIER_BYTES) // stage_bytes)

    def fits(self, case: Case) -> bool:
        m, n = self.cluster_tile
        return case.m % m == case.n % n == case.k % TILE_K == 0


CONFIGS = (
    Config(128, 128, "N", "M"),
    Config(128, 128, "N", "M", "M"),
    Config(128, 128, "N"),
    Config(128, 128, "M", "N"),
    Config(64, 256, "M", "M"),
    Config(128, 64, "N", "M"),
    Config(64, 128, "M"),
    Config(64, 128, "N"),
    Config(64, 64, "N"),
    Config(64, 64, "M"),
)


def why_not(case: Case, arch: Arch) -> str | None:
    """None if some configuration computes `case` on `arch`."""
    if arch.target != "sm_90a":
        return f"it requires Hopper, got {arch.name}"
    if case.form != "nn" or case.batch > 1:
        return "it requires two row-major matrices, got stacks or a transposed operand"
    if case.dtype not in ("bfloat16", "float16") or case.out_dtype != case.dtype:
        return f"it requires 16-bit operands and their dtype for the result, got {case.dtype} -> {case.out_dtype}"
    if not any(config.fits(case) for config in CONFIGS):
        return f"it requires m, n and k to be multiples of its tile's, got {case.m}, {case.n} and {case.k}"
    return None


def dot(config: Config, arch: Arch) -> Product:
    """(a, b) -> a @ b. ImportError where this jax, or what it needs for Pallas (absl), is not there.

    Jitted, so that a program of many products traces and lowers the kernel once.
    """
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as pallas

    dimensions: dict[str | None, Any] = {"M": pallas.MatmulDimension.M, "N": pallas.MatmulDimension.N, None: None}
    tuning = pallas.TuningConfig(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        tile_k=TILE_K,
        max_concurrent_steps=config.stages(arch.smem_bytes),
        grid_minor_dim=dimensions[config.grid_minor],
        grid_tile_width=GRID_WIDTH,
        wg_dimension=dimensions[config.wg_along],
        cluster_dimension=dimensions[config.cluster_along],
    )
    return jax.jit(functools.partial(_matmul, pallas.matmul, tuning))


def _matmul(matmul: Any, tuning: Any, a: Any, b: Any) -> Any:
    return matmul(a, b, None, tuning)
