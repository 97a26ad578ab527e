"""A bias of an m-major result lies along its rows, as a swapped product has it: in forms of every kind, not only those
that ship."""

from __future__ import annotations

import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.epilogue import Run, fragment_row_runs  # noqa: E402 - needs cutlass
from tests.emu.check_variant import case_of, compiled, run_case  # noqa: E402 - needs cutlass

BF16, F32, E4M3 = "bfloat16", "float32", "float8_e4m3fn"


def variant(target: str, tile: Tile, epilogue: str, majors: str = "mk", dtype: str = BF16, **more: str) -> Variant:
    own = Tile(**vars(tile) | {"k_tile": k_tile(dtype)})
    out = more.pop("out", dtype)
    return Variant(
        target, dtype, dtype, out, majors[0], majors[1], own, fused(epilogue, "m"), "m", more.pop("store", "tma")
    )


VARIANTS = [
    variant("sm_90a", Tile(64, 16, stream_k=True), "bias", "kk"),
    variant("sm_90a", Tile(128, 48), "bias_relu", store="threads"),
    variant("sm_90a", Tile(256, 32), "scale_bias_relu"),  # two slabs a warpgroup
    variant("sm_90a", Tile(64, 32, cluster_k=4), "bias_silu"),
    variant("sm_90a", Tile(128, 128, cluster_m=2, pingpong=True), "bias_gelu", "kn"),
    variant("sm_90a", Tile(64, 64, stream_k=True), "bias_residual"),
    variant("sm_90a", Tile(128, 64), "bias", "kk", out=F32),
    variant("sm_90a", Tile(128, 64), "bias_relu", dtype=F32),  # A from registers, in an order of rows of its own
    variant("sm_90a", Tile(128, 64), "bias", dtype=F32, store="threads"),
    variant("sm_90a", Tile(128, 64), "bias_gelu", dtype=E4M3, out=BF16),  # in pairs of rows
    variant("sm_90a", Tile(64, 64), "bias_residual", dtype=E4M3, out=F32),
    variant("sm_100f", Tile(128, 32), "bias_gelu"),
    variant("sm_100f", Tile(128, 64, cluster_k=4), "bias", "kk"),
    variant("sm_100f", Tile(64, 64), "bias_silu"),  # 16 rows in half of a warp's lanes
    variant("sm_100f", Tile(64, 32), "bias", store="threads"),
    variant("sm_100f", Tile(256, 64, cta_group=2, cluster_m=2), "bias_residual"),
    variant("sm_100f", Tile(128, 64, cta_group=2, cluster_m=2), "bias_relu", out=F32),  # two store groups
]


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """More than a tile in a batch of two; few rows, whose bias ends before a thread's second row."""
    (module, facts), odd = compiled(of), int(of.store == "threads")
    m, n, k = of.tile.cluster_m * of.tile.cta_m + 16 - odd, of.tile.mma_n + 16, of.tile.k_tile
    for seed, shape in enumerate([(m, n, 2 * k + 16, 1, 2), (16 + odd, n, 5 * k)]):
        run_case(module, facts, case_of(of, *shape), Schedule.standard(seed)[4 - seed], 1 + seed % 2, seed)


def test_runs() -> None:
    """Lane t of a warp holds columns 2 t and 2 t + 1, every 8, of rows t / 4 and t / 4 + 8 (PTX ISA, wgmma)."""
    columns = (0, 1, 8, 9)
    assert fragment_row_runs(8, 8) == (
        Run(0, 1, ((0,), (1,), (4,), (5,)), columns),
        Run(8, 1, ((2,), (3,), (6,), (7,)), columns),
    )
    assert fragment_row_runs(4, 1, is_paired=True) == (Run(0, 1, ((0,), (2,)), (0, 1)), Run(1, 1, ((1,), (3,)), (0, 1)))
