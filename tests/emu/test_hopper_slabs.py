"""Hopper's 192 rows, a slab of 64 for each of three consumer warpgroups, and two warpgroups of more than 128 sums a
thread."""

from __future__ import annotations

import re

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.facts.resources import defers_store
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.emu.matmul import facts_of

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import case_of, run_case  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel, variant  # noqa: E402 - needs cutlass
from tests.emu.test_stream_k_kernels import kernel as stream_kernel  # noqa: E402 - needs cutlass
from tests.emu.test_stream_k_kernels import run_stream  # noqa: E402 - needs cutlass

HALF = ("bfloat16", "bfloat16")
BF16, F32 = (*HALF, "bfloat16"), (*HALF, "float32")
E4M3, TF32, S32 = ("float8_e4m3fn",) * 2, ("float32",) * 3, ("int8", "uint8", "int32")
THREE, SPLIT = Tile(192, 96), Tile(192, 32, cluster_k=2)
VARIANTS = [
    variant(THREE),
    variant(Tile(192, 128, cluster_m=2), majors="mnn"),
    variant(Tile(192, 16), majors="kkm"),
    variant(Tile(192, 48, cluster_n=2), F32, "mkm"),
    variant(Tile(192, 160), ("float16",) * 3, "mnm"),  # whose store is not deferred
    variant(Tile(192, 160), epilogue="scale_bias_relu"),
    variant(Tile(192, 192)),
    variant(SPLIT, F32, epilogue="bias"),
    variant(Tile(192, 64), epilogue="bias_gelu_residual"),
    variant(Tile(192, 96), majors="kkm", epilogue="residual"),
    variant(Tile(192, 80), store="threads"),
    variant(Tile(192, 48), majors="mkm", store="threads"),
    variant(Tile(192, 64, 128), (*E4M3, "bfloat16"), "kkn"),
    variant(Tile(192, 64, 128), (*E4M3, "bfloat16"), "mkn"),  # from registers: rows of 64 bytes of m
    variant(Tile(192, 32, 128), (*E4M3, "float32"), "mkm"),
    variant(Tile(192, 64, 128, promoted=True), (*E4M3, "bfloat16"), "mkn"),
    variant(Tile(192, 64, 32), TF32, "mkm"),
    variant(Tile(192, 32, 32), TF32, "mkn", store="threads"),
    variant(Tile(192, 96, 128), S32, "kkn"),
    variant(Tile(256, 144)),
    variant(Tile(256, 160), majors="mnm"),
    variant(Tile(256, 176), majors="kkn"),
    variant(Tile(256, 192, cluster_n=2), majors="mkn"),
    variant(Tile(256, 192), F32, "mkm"),
    variant(Tile(128, 192, pingpong=True)),
]


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """Partial edges in a batch of two; less than a k tile; tiles enough for a second one of each cluster."""
    compiled = kernel(of)
    module, facts = parse(compiled.ptx), facts_of(of, compiled)
    tile, odd = of.tile, int(of.store == "threads")
    m, n, k = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n, tile.k_tile
    shapes = ((m + 16 - odd, n + 16 - odd, 2 * k + 16, 1, 2), (80 - odd, 16 - odd, 32), (2 * m, n, 5 * k))
    for seed, shape in enumerate(shapes):
        run_case(module, facts, case_of(of, *shape), Schedule.standard(seed)[4 - seed], 1 + seed % 2, seed)


@pytest.mark.parametrize("tile", [Tile(192, 32, stream_k=True), Tile(192, 64, cluster_m=2, stream_k=True)], ids=str)
def test_streams(tile: Tile) -> None:
    """A flag for each of three warpgroups."""
    of = stream_kernel(tile)
    m, n = tile.cluster_m * tile.cta_m, tile.mma_n
    for seed, (clusters, stream) in enumerate(((4, (4, 4)), (4, (2, 4)), (7, (5, 7)))):
        case = case_of(of[0], m + 8, n - 8, 200 + 64 * seed, 3 if seed % 2 else 1, 3)
        run_stream(of, case, clusters, stream, Schedule.standard(seed)[4 - seed], seed)


@pytest.mark.parametrize(
    ("tile", "pattern", "rules"),
    [
        (SPLIT, r"(bar|barrier\.cta)\.sync\s+5, 384;", "race overwrite-in-flight"),  # of all three warpgroups
        (THREE, r"cp\.async\.bulk\.wait_group\.read\s+\d+;", "overwrite-in-flight exit-in-flight"),
    ],
)
def test_doctored(tile: Tile, pattern: str, rules: str) -> None:
    """What the emulator says of a kernel without the instructions that the pattern matches."""
    of = variant(tile)
    compiled = kernel(of)
    changed, count = re.subn(pattern, "", compiled.ptx)
    assert count, f"{pattern} is not in the kernel"
    with pytest.raises(Fault) as fault:
        run_case(parse(changed), facts_of(of, compiled), case_of(of, 392, 264, 264), Schedule.standard(seed=2)[4])
    assert fault.value.rule in rules.split(), fault.value


def test_which_of_them_defer() -> None:
    assert [defers_store(of.tile, of.out_dtype, of.store, of.target) for of in VARIANTS[:7]] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
