"""Results whose rows TMA cannot step over: every alignment of a row, and the buffer in which a warp turns its rows."""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.problem import DTYPE_BYTES
from jax_bwgemm.facts.resources import segments
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused
from tests.emu.matmul import Facts, case_of, facts_of

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.row_store import Segments  # noqa: E402 - needs cutlass
from tests.emu.check_variant import compiled, run_case  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass

BF16 = ("bfloat16", "bfloat16", "bfloat16")
BF16_F32 = ("bfloat16", "bfloat16", "float32")
FP8 = ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn")


def variant(target: str, tile: Tile, dtypes: tuple[str, str, str] = BF16, a_major: str = "k", **more: str) -> Variant:
    node = fused(more.pop("epilogue", "identity"), more.get("c_major", "n"))
    return Variant(target, *dtypes, a_major, "k", tile, node, store="threads", **more)


VARIANTS = [
    variant("sm_90a", Tile(64, 256)),  # 8 rows of 512 bytes
    variant("sm_90a", Tile(128, 128, pingpong=True)),  # 16 of 256, two slabs
    variant("sm_90a", Tile(64, 128), BF16_F32, epilogue="bias"),
    variant("sm_90a", Tile(64, 96, 128), FP8),  # 32 bytes
    variant("sm_90a", Tile(64, 64, cluster_k=2)),  # box by box
    variant("sm_90a", Tile(64, 256, 128), (*FP8[:2], "bfloat16"), "m"),  # 8 rows that are every second
    variant("sm_90a", Tile(64, 96, 128), FP8, "m"),  # 16 of which every second comes first
    variant("sm_100f", Tile(128, 64), BF16_F32),
    variant("sm_100f", Tile(256, 128, cta_group=2, cluster_m=2), epilogue="bias"),
    variant("sm_100f", Tile(128, 128, cta_group=2, cluster_m=2)),  # two store groups
    variant("sm_100f", Tile(64, 64, 128), FP8),
    variant("sm_100a", Tile(64, 32, 128, cluster_k=4), ("int8", "int8", "int32")),
]


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


@pytest.mark.parametrize("rest", range(1, 9))
@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_every_alignment(of: Variant, rest: int) -> None:
    """A row begins `rest` elements (a second matrix others) behind the one before; it ends in a tile's first columns,
    amid a segment or in the last chunk of one."""
    chunk = 16 // DTYPE_BYTES[of.out_dtype]
    n = of.tile.mma_n + (rest, of.tile.mma_n // 2 + rest, rest - chunk)[rest % 3]
    case = case_of(of, of.tile.cta_m + 5, n, of.tile.k_tile + 16, 1, 2)
    run_case(*kernel(of), case, Schedule.standard(rest)[rest % 5], seed=rest)


@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 17, 31])
@pytest.mark.parametrize("of", [VARIANTS[0], VARIANTS[5], VARIANTS[7], VARIANTS[10]], ids=lambda of: of.name)
def test_few_columns(of: Variant, n: int) -> None:
    """Rows of less than a chunk, of one, or a little more."""
    run_case(*kernel(of), case_of(of, of.tile.cta_m - 1, n, 16), Schedule.standard(n)[n % 5], seed=n)


WHOLE = [of for of in VARIANTS if of.target == "sm_90a" and DTYPE_BYTES[of.out_dtype] > 1]


@pytest.mark.parametrize("of", WHOLE, ids=lambda of: of.name)
def test_rows_that_begin_on_16_bytes(of: Variant) -> None:
    """They are not turned, and end with a chunk: within a tile's first columns, amid it, or with it."""
    chunk = 16 // DTYPE_BYTES[of.out_dtype]
    for seed, n in enumerate((chunk, of.tile.mma_n // 2 + chunk, of.tile.mma_n, of.tile.mma_n + 3 * chunk)):
        case = case_of(of, of.tile.cta_m + 5, n, of.tile.k_tile + 16, 1, 2)
        run_case(*kernel(of), case, Schedule.standard(seed)[seed % 5], seed=seed)


@pytest.mark.parametrize("which", [0, 1], ids=["has been read", "has been written"])
def test_a_whole_row_waits_for_its_warp(which: int) -> None:
    """Before its buffer is written again, and before it is read: the last rows' syncs of a kernel in which rows of 512
    bytes leave eight at a time."""
    of = VARIANTS[0]
    found = compiled_kernel(of)
    reads = [m.start() for m in re.finditer(r"stmatrix", found.ptx)]
    syncs = [m for m in re.finditer(r"bar\.warp\.sync[^;]*;", found.ptx)]
    before, behind = ([m for m in syncs if (m.start() > reads[-1]) == is_behind] for is_behind in (False, True))
    sync = behind[0] if which else before[-1]
    changed = parse(found.ptx[: sync.start()] + found.ptx[sync.end() :])
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(changed, facts_of(of, found), case_of(of, 64, 256, 64), schedule)
        assert fault.value.rule == "race"


@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [8, 16])
def test_no_banks_conflict_of_matrices(rows: int, row_bytes: int) -> None:
    """A matrix is 16 bytes of eight rows one below the other: in all banks."""
    seg = Segments(rows, row_bytes // 2, 2)
    for first, byte in itertools.product(range(0, rows, 8), range(0, row_bytes, 16)):
        assert sorted(seg.at(first + row, byte) // 16 % 8 for row in range(8)) == list(range(8))


@pytest.mark.parametrize("elem_bytes", [1, 2, 4])
@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [8, 16])
def test_no_banks_conflict(rows: int, row_bytes: int, elem_bytes: int) -> None:
    """Every byte has a place of its own; 8 lanes' 16 bytes lie in all banks, and so do 4 pairs of each of 8 rows (of 4
    rows, where they are 8 bytes), whatever group or part of it they are; pairs of 2 bytes fill half of the banks."""
    seg = Segments(rows, row_bytes // elem_bytes, elem_bytes)
    places = [seg.at(row, byte) for row in range(rows) for byte in range(row_bytes)]
    assert sorted(places) == list(range(seg.bytes))
    for lane in range(0, rows * seg.chunks, 8):
        chunks = [seg.at(i // seg.chunks, i % seg.chunks * 16) // 16 % 8 for i in range(lane, lane + 8)]
        assert sorted(chunks) == list(range(8))
    for group in range(0, row_bytes, seg.group_bytes):
        for first in range(0, rows, 4 if elem_bytes == 4 else 8):
            written = [
                seg.at(row, group + byte) // 4 % 32
                for row in range(first, first + (4 if elem_bytes == 4 else 8))
                for byte in range(0, seg.group_bytes, 4)
            ]
            assert len(set(written)) == len(written) == (16 if elem_bytes == 1 else 32)


@pytest.mark.parametrize("of", VARIANTS, ids=lambda of: of.name)
def test_segments_fill_whole_warps(of: Variant) -> None:
    rows, cols = segments(of.tile, of.out_dtype, of.target)
    assert rows in (8, 16) and of.tile.mma_n % cols == 0
    assert rows * cols * DTYPE_BYTES[of.out_dtype] % (32 * 16) == 0
