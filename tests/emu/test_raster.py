"""In which order our kernels compute their tiles: one cluster, whose stores tell."""

from __future__ import annotations

import functools

import pytest

from jax_bwgemm.emulator import Observer, Schedule
from jax_bwgemm.emulator.machine import Warp
from jax_bwgemm.emulator.syntax import Imm, Mem, Module, Reg
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import check_case
from tests.emu.matmul import Facts, case_of, run_matmul

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

TILES_M, TILES_N, BATCH = 5, 3, 2
VARIANTS = [  # a tile is one store box of the CTA
    Variant("sm_90a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(64, 32)),
    Variant("sm_100f", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(64, 32)),
    Variant("sm_90a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(64, 32, cluster_m=2, cluster_n=2)),
]


@functools.cache
def kernel(variant: Variant) -> tuple[Module, Facts]:
    return compiled(variant)


class Stores(Observer):
    """(m, n, l) of every box that the first CTA stores."""

    def __init__(self) -> None:
        self.boxes: list[tuple[int, ...]] = []

    def step(self, warp: Warp) -> None:
        instr = warp.program.instrs[warp.split.pc]
        if "bulk_group" in instr.opcode and "tensor" in instr.opcode and warp.cta.rank_in_grid == 0:
            mem = instr.operands[0]
            assert isinstance(mem, Mem)
            n, m, batch = (int(x.value if isinstance(x, Imm) else warp.lanes(x.slot)[0]) for x in _regs(mem))
            self.boxes.append((m, n, batch))


def _regs(mem: Mem) -> list[Reg | Imm]:
    return [x for x in mem.coords if isinstance(x, Reg | Imm)]


def walked(rows: int, cols: int, group: int, along_n: bool, is_snake: bool) -> list[tuple[int, int]]:
    """Written out: groups of rows (or columns), each from its first column (or row) to the last, or in turn back."""
    grouped, other = (cols, rows) if along_n else (rows, cols)
    places = []
    for i, first in enumerate(range(0, grouped, group)):
        members = range(first, min(first + group, grouped))
        steps = range(other)[::-1] if is_snake and i % 2 else range(other)
        places += [(across, along) if along_n else (along, across) for across in steps for along in members]
    return places


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("along_n", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_order_of_tiles(variant: Variant, along_n: int, order: int) -> None:
    tile, (module, facts) = variant.tile, kernel(variant)
    m, n = tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n
    case = case_of(variant, TILES_M * m - 8, TILES_N * n - 8, 72, BATCH, BATCH)
    a, b, _ = case.inputs(along_n)
    stores = Stores()
    out, _ = run_matmul(
        module, facts, a, b, max_clusters=1, raster_group=2, raster_along_n=along_n, raster_order=order,
        schedule=Schedule(), observer=stores,
    )  # fmt: skip
    check_case(out, case.reference(a, b, None), case)
    places = walked(TILES_M, TILES_N, 2, bool(along_n), bool(order))
    assert stores.boxes == [(row * m, col * n, batch) for batch in range(BATCH) for row, col in places]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_snake_of_several_clusters(variant: Variant) -> None:
    """The same bits as the groups', however many clusters there are: an order moves tiles, not sums."""
    tile, (module, facts) = variant.tile, kernel(variant)
    case = case_of(variant, 5 * tile.cluster_m * tile.cta_m - 16, 4 * tile.cluster_n * tile.mma_n - 8, 200, 1, 2)
    a, b, _ = case.inputs(7)
    results = [
        run_matmul(
            module, facts, a, b, max_clusters=clusters, raster_group=group, raster_order=order, schedule=schedule
        )[0]
        for order, clusters, group, schedule in zip(
            (0, 1, 1, 1, 1), (1, 2, 3, 7, None), (2, 1, 2, 3, 8), Schedule.standard(3), strict=True
        )
    ]
    check_case(results[0], case.reference(a, b, None), case)
    assert all((other == results[0]).all() for other in results[1:])
