"""Hopper's own features: ping-pong, splits along k, widths between powers of two, every dtype, ways out of a CTA."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, why_not_variant
from tests.cases import fused
from tests.emu.matmul import facts_of

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels import pipelines  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.aot.compile import Compiled, compile_variant  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.sm90 import load_registers, multiply_registers  # noqa: E402 - needs cutlass
from tests.emu.check_variant import case_of, run_case  # noqa: E402 - needs cutlass

BF16 = ("bfloat16", "bfloat16", "bfloat16")
PINGPONG = Tile(64, 256, pingpong=True)
SPLIT = Tile(128, 64, cluster_k=2)


def variant(tile: Tile, dtypes: tuple[str, str, str] = BF16, majors: str = "knn", **more: str) -> Variant:
    node = fused(more.pop("epilogue", "identity"), majors[2])
    return Variant("sm_90a", *dtypes, majors[0], majors[1], tile, node, majors[2], **more)


VARIANTS = [
    variant(PINGPONG),
    variant(Tile(128, 64, cluster_m=2, pingpong=True), ("float16", "float16", "float32"), "mkm"),
    variant(Tile(64, 96, 128, cluster_n=2, pingpong=True), ("int8", "uint8", "int32"), "kkn", store="threads"),
    variant(SPLIT),
    variant(Tile(256, 32, cluster_k=2), ("bfloat16", "bfloat16", "float32"), "mnn", epilogue="scale_bias_relu"),
    variant(Tile(64, 48, cluster_k=8), majors="kkm", store="threads"),
    variant(Tile(64, 64, 128, cluster_k=4), ("uint8", "int8", "int32"), "kkm"),
    variant(Tile(64, 144), epilogue="bias", store="threads"),
    variant(Tile(64, 80), ("float16", "float16", "bfloat16"), "mnm"),
    variant(Tile(64, 176, cluster_m=2), majors="mnn"),
    variant(Tile(128, 64, 128), ("float8_e4m3fn", "float8_e5m2", "float8_e5m2"), "kkn"),
    variant(Tile(64, 64, 128), ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fn"), "kkm"),
    variant(Tile(128, 128, 128, cluster_m=2, promoted=True), ("float8_e4m3fn", "float8_e5m2", "bfloat16"), "kkn"),
    variant(Tile(64, 48, 128, promoted=True), ("float8_e4m3fn", "float8_e4m3fn", "float32"), "kkm"),
    variant(Tile(64, 16, cluster_k=16), majors="kkm"),  # more CTAs than boxes
    variant(Tile(64, 64, cluster_k=8)),
]


def shapes(of: Variant) -> list[tuple[int, ...]]:
    """A little more than a tile in a batch of two; one row, or few, and a part of a k tile; for a split, a long k."""
    m, n, k = of.tile.cta_m + 16, of.tile.mma_n + 16, of.tile.k_tile
    odd = int(of.store == "threads")
    found: list[tuple[int, ...]] = [(m - odd, n - odd, 2 * k + 16, 1, 2), (1 if of.c_major == "n" else 16, n - odd, 32)]
    return [*found, (48 + odd, 32 + odd, 16 * k + 16)] if of.tile.cluster_k > 1 else found


@functools.cache
def kernel(of: Variant) -> Compiled:
    assert why_not_variant(of) is None, why_not_variant(of)
    with tempfile.TemporaryDirectory() as dump:
        return compile_variant(of, Path(dump))


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """One or two clusters walk all tiles, each shape under another schedule."""
    compiled = kernel(of)
    module, facts = parse(compiled.ptx), facts_of(of, compiled)
    for seed, shape in enumerate(shapes(of)):
        run_case(module, facts, case_of(of, *shape), Schedule.standard(seed)[4 - seed], 1 + seed % 2, seed)


@pytest.mark.parametrize("num_tiles", [1, 2, 3])
def test_ping_pong_with_few_tiles(num_tiles: int) -> None:
    """One warpgroup has nothing to do, both have one tile, or one of them has another."""
    compiled = kernel(VARIANTS[0])
    for schedule in Schedule.standard(seed=num_tiles):
        case = case_of(VARIANTS[0], 64, 256 * num_tiles, 72)
        run_case(parse(compiled.ptx), facts_of(VARIANTS[0], compiled), case, schedule)


DOCTORED = [
    (PINGPONG, r"(bar|barrier\.cta)\.arrive\b[^;]*;", "deadlock"),  # a turn is never passed
    (SPLIT, r"(bar|barrier\.cta)\.sync\s+5, 256;", "race overwrite-in-flight"),  # a part over a stage being read
    (SPLIT, r"fence\.acq_rel\.cluster;", "race missing-cluster-scope exit-in-flight"),
    (SPLIT, r"mbarrier\.arrive\.\w+\.cluster\.shared::cluster\.b64[^;]*;", "deadlock"),
]


@pytest.mark.parametrize(("tile", "pattern", "rules"), DOCTORED)
def test_doctored(tile: Tile, pattern: str, rules: str) -> None:
    """What the emulator says of a kernel without the instructions that the pattern matches."""
    compiled = kernel(variant(tile))
    changed, count = re.subn(pattern, "", compiled.ptx)
    assert count, f"{pattern} is not in the kernel"
    with pytest.raises(Fault) as fault:
        case = case_of(variant(tile), 72, 264, 264)
        run_case(parse(changed), facts_of(variant(tile), compiled), case, Schedule.standard(seed=2)[4])
    assert fault.value.rule in rules.split(), fault.value


@pytest.mark.parametrize("of", [VARIANTS[0], VARIANTS[3], VARIANTS[8], variant(Tile(192, 192))], ids=lambda of: of.name)
def test_registers(of: Variant) -> None:
    """What setmaxnreg asks for is what a launch gives the CTA, and the legal sum."""
    tile = of.tile
    found = read_cubin(kernel(of).cubin)
    load, multiply = (ask(tile.num_consumer_warpgroups) for ask in (load_registers, multiply_registers))
    total = 128 * (load + tile.num_consumer_warpgroups * multiply)
    assert total <= min(65536, found.registers * kernel(of).num_threads)
    assert multiply % 8 == load % 8 == 0
    assert multiply <= 240
    assert found.stack_bytes == 0
    assert f"setmaxnreg.inc.sync.aligned.u32 {multiply};" in re.sub(r"\s+", " ", kernel(of).ptx)


def test_register_budgets() -> None:
    """65536 for 128 threads of each warpgroup: 40 + 240 <= 512, 40 + 2 * 232 <= 512, 32 + 3 * 160 = 512."""
    assert [(load_registers(w), multiply_registers(w)) for w in (1, 2, 3)] == [(40, 240), (40, 232), (32, 160)]


def test_empty_arrivals() -> None:
    """4 warps for each warpgroup that reads a stage, in every CTA that shares it."""
    assert pipelines.hopper_empty_arrivals(PINGPONG) == 4
    assert pipelines.hopper_empty_arrivals(Tile(64, 256)) == 4
    assert pipelines.hopper_empty_arrivals(Tile(128, 256, cluster_m=2)) == 16
    assert pipelines.hopper_empty_arrivals(Tile(128, 128, cluster_m=2, cluster_n=2, pingpong=True)) == 12


def test_who_waits_for_the_last_arrivals() -> None:
    """A CTA whose stages others free, and one whose stages commits free."""
    assert not pipelines.arrivals_outlive_readers(Tile(128, 256, cluster_k=2), "sm_90a")
    assert pipelines.arrivals_outlive_readers(Tile(128, 256, cluster_m=2), "sm_90a")
    assert pipelines.arrivals_outlive_readers(Tile(128, 256), "sm_100f")
