"""Which L2 policy a kernel's loads and stores have: of each the launch's own, which a policy of no meaning tells."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.emu.matmul import case_of, run_matmul

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

BF16 = ("bfloat16",) * 3
RESIDUAL = chain(has_residual=True).out
STORED = {
    "TMA": Variant("sm_90a", *BF16, "k", "n", Tile(64, 32)),
    "TMA on Blackwell": Variant("sm_100f", *BF16, "k", "n", Tile(64, 32)),
    "behind a residual": Variant("sm_90a", *BF16, "k", "n", Tile(64, 32), RESIDUAL),
    "rows": Variant("sm_90a", *BF16, "k", "n", Tile(64, 32), store="threads"),
    "rows of a direct tile": Variant("sm_90a", *BF16, "k", "n", Tile(64, 64, direct=True), store="threads"),
    "columns of a direct tile": Variant(
        "sm_90a", *BF16, "m", "k", Tile(64, 64, direct=True), c_major="m", store="threads"
    ),
}
STORES = r"cp\.async\.bulk\.tensor\S*\.global\.shared|st\.global\S*\.v4"
LOADS = r"cp\.async\.bulk\.tensor\S*\.shared::\w+\.global"
NO_POLICY = 1 << 40


def fault(variant: Variant, matrix: str) -> Fault:
    module, facts = compiled(variant)
    case = case_of(variant, 64, 64, 64)
    a, b, bias = case.inputs(0)
    others = {"residual": case.residual(0)} if "residual" in str(variant.epilogue) else {}
    with pytest.raises(Fault) as error:
        run_matmul(module, facts, a, b, 1.0, bias, policies={matrix: NO_POLICY}, **others)
    return error.value


@pytest.mark.parametrize("way", STORED)
def test_stores_have_the_results(way: str) -> None:
    found = fault(STORED[way], "c")
    assert found.rule == "cache-policy" and re.search(STORES, str(found))


@pytest.mark.parametrize("matrix", ["a", "b"])
def test_loads_have_their_operands(matrix: str) -> None:
    found = fault(STORED["TMA"], matrix)
    assert found.rule == "cache-policy" and re.search(LOADS, str(found))


def test_a_result_that_is_let_go_is_the_same() -> None:
    module, facts = compiled(STORED["rows"])
    case = case_of(STORED["rows"], 67, 61, 72)
    a, b, _ = case.inputs(1)
    outs = [run_matmul(module, facts, a, b, policies=own)[0] for own in ({}, {"c": 0x12F0000000000000})]
    np.testing.assert_array_equal(*outs)
