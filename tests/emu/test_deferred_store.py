"""Hopper's deferred store: a tile's rounded boxes leave during the next tile's main loop, or after it."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.resources import boxes_a_store, defers_store, store_box_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import check_case, fused
from tests.emu.matmul import Facts, case_of, facts_of, run_matmul

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass

BF16, F32, E4M3 = "bfloat16", "float32", "float8_e4m3fn"


def variant(tile: Tile, out: str = BF16, epilogue: str = "identity", c_major: str = "n") -> Variant:
    return Variant("sm_90a", BF16, BF16, out, "k", "n", tile, fused(epilogue, c_major), c_major)


FORMS = {  # and the boxes of a warpgroup's tile
    variant(Tile(64, 256)): 8,
    variant(Tile(128, 128), F32, "scale_bias_relu"): 8,
    variant(Tile(256, 64, cluster_n=2)): 4,
    variant(Tile(128, 96, cluster_m=2), E4M3): 3,
    variant(Tile(128, 64), c_major="m"): 2,
}


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


@pytest.mark.parametrize("k_tiles", [1, 4, 9, 14])
@pytest.mark.parametrize("of", FORMS, ids=lambda of: of.name)
def test_stages_and_boxes(of: Variant, k_tiles: int) -> None:
    """A main loop of fewer stages than boxes, as many, and more; one tile, or several with partial edges; the bits do
    not depend on what a cluster did before."""
    assert defers_store(of.tile, of.out_dtype, of.store, of.target)
    module, facts = kernel(of)
    m, n = of.tile.cluster_m * of.tile.cta_m, of.tile.cluster_n * of.tile.mma_n
    for seed, (rows, cols, batch) in enumerate(((m, n, 1), (2 * m + 16, n - 16, 2))):
        case = case_of(of, rows, cols, 64 * k_tiles - 8 * seed, batch, batch)
        a, b, bias = case.inputs(k_tiles)
        results = [
            run_matmul(module, facts, a, b, case.alpha, bias, max_clusters=clusters, schedule=schedule)
            for clusters, schedule in zip((1, 2, None), Schedule.standard(k_tiles)[:: 1 + seed], strict=False)
        ]
        check_case(results[0][0], case.reference(a, b, bias), case)
        assert all(np.array_equal(results[0][0], out) for out, _ in results[1:])
        stored = sum(results[0][1].tma_store_bytes.values())
        tiles = batch * -(-rows // m) * -(-cols // n)
        boxes = tiles * of.tile.cluster_ctas * FORMS[of]
        assert stored == boxes * store_box_bytes(of.tile, of.out_dtype, of.target)


READ = r"cp\.async\.bulk\.wait_group\.read"
MEET = r"bar\.sync\s+%r\d+, 128;"


@pytest.mark.parametrize(("pattern", "instead", "rules"), [
    (READ + r"\s+\d+;", "", "overwrite-in-flight"),
    (READ + r"\s+1;", "cp.async.bulk.wait_group.read 2;", "overwrite-in-flight"),  # of two buffers of a store
    (rf"({READ}\s+1;\s*\$\w+:[^$]*?){MEET}", r"\1", "overwrite-in-flight"),  # before a store's first box
    (rf"(fence\.proxy\.async\S*;\s*){MEET}", r"\1", "race uninitialised-read"),  # behind its last
    (r"fence\.proxy\.async\S*;", "", "missing-proxy-fence"),
    (r"wgmma\.wait_group\.sync\.aligned\s+1;", "", "overwrite-in-flight"),
])  # fmt: skip
def test_doctored(pattern: str, instead: str, rules: str) -> None:
    """Boxes that leave beside wgmmas are held to the same rules."""
    of = variant(Tile(64, 256))
    assert boxes_a_store(of.tile, of.out_dtype, of.c_major, of.target) == 2
    changed, count = re.subn(pattern, instead, compiled_kernel(of).ptx)
    assert count, f"{pattern} is not in the kernel"
    a, b, _ = case_of(of, 192, 256, 64 * 12).inputs()
    with pytest.raises(Fault) as fault:
        run_matmul(parse(changed), facts_of(of, compiled_kernel(of)), a, b, max_clusters=1, schedule=Schedule())
    assert fault.value.rule in rules.split(), fault.value
