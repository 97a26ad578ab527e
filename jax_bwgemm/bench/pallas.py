"""Pallas' matmul for Hopper, which comes with jax: what it can do, and a few of its configurations. Knows no clock."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax_bwgemm.arch import Arch
from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.products import Product

TILE_K, STAGES, GRID_WIDTH = 64, 4, 8


@dataclasses.dataclass(frozen=True)
class Config:
    """A warpgroup's tile; two warpgroups lie along `wg_along`, two CTAs of a cluster along `cluster_along`."""

    tile_m: int
    tile_n: int
    wg_along: str
    cluster_along: str | None = None

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}_wg{self.wg_along}_cluster{self.cluster_along or 1}"

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of which m and n must be multiples."""
        m, n = ((1 + (self.wg_along == x)) * (1 + (self.cluster_along == x)) for x in "MN")
        return self.tile_m * m, self.tile_n * n

    def fits(self, case: Case) -> bool:
        m, n = self.cluster_tile
        return case.m % m == case.n % n == case.k % TILE_K == 0


CONFIGS = (
    Config(128, 128, "N", "M"),
    Config(128, 128, "N"),
    Config(128, 128, "M", "N"),
    Config(64, 128, "M"),
    Config(64, 64, "N"),
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


def dot(config: Config) -> Product:
    """(a, b) -> a @ b. ImportError where this jax, or what it needs for Pallas, is not there."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as pallas

    dimensions: dict[str | None, Any] = {"M": pallas.MatmulDimension.M, "N": pallas.MatmulDimension.N, None: None}
    tuning = pallas.TuningConfig(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        tile_k=TILE_K,
        max_concurrent_steps=STAGES,
        grid_tile_width=GRID_WIDTH,
        wg_dimension=dimensions[config.wg_along],
        cluster_dimension=dimensions[config.cluster_along],
    )
    return functools.partial(_matmul, pallas.matmul, tuning)


def _matmul(matmul: Any, tuning: Any, a: Any, b: Any) -> Any:
    return matmul(a, b, None, tuning)
