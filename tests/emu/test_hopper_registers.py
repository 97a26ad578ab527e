"""Hopper's kernels of 4-byte and 1-byte operands whose A is m-major and reaches wgmma through registers."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.machine import Warp
from jax_bwgemm.emulator.observe import Observer
from jax_bwgemm.emulator.syntax import Mem, Reg
from jax_bwgemm.facts.recipe import TensorMap
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import fused
from tests.emu.matmul import facts_of, run_matmul
from tests.emu.test_hopper import kernel, shapes

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.aot.sass import disassemble  # noqa: E402 - needs cutlass
from jax_bwgemm.kernels.sm90_fragments import matrix_k  # noqa: E402 - needs cutlass
from tests.emu.check_variant import case_of, run_case  # noqa: E402 - needs cutlass

F32 = "float32"
E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"


@functools.cache
def variant(
    tile: Tile, majors: str = "mkm", out: str = F32, dtypes: tuple[str, str] = (F32, F32), **more: str
) -> Variant:
    node = fused(more.pop("epilogue", "identity"), majors[2])
    return Variant("sm_90a", *dtypes, out, majors[0], majors[1], tile, node, majors[2], **more)


def of_bytes(tile: Tile, majors: str, out: str, a: str = E4M3, b: str = E4M3, **more: str) -> Variant:
    return variant(tile, majors, out, (a, b), **more)


SMALL = variant(Tile(64, 32, 32))
VARIANTS = [
    SMALL,
    variant(Tile(64, 32, 32), "mkn"),
    variant(Tile(128, 96, 32), "mkn", store="threads"),
    variant(Tile(128, 96, 32), "mkm", store="threads"),
    variant(Tile(128, 64, 32, cluster_m=2), "mkn", epilogue="scale_bias_relu"),
    variant(Tile(128, 64, 32, cluster_n=2), "mkm", "bfloat16"),
    variant(Tile(256, 64, 32, cluster_m=2, cluster_n=2), "mkm"),
    variant(Tile(256, 128, 32), "mkn"),
    variant(Tile(64, 32, 32, cluster_k=4), "mkm"),
    variant(Tile(128, 32, 32, cluster_k=2), "mkn", "bfloat16", store="threads"),
    variant(Tile(128, 32, 32, pingpong=True), "mkm"),
    variant(Tile(128, 32, 32, cluster_n=2, stream_k=True), "mkm"),
]
SMALL_BYTES = of_bytes(Tile(64, 32, 128), "mkm", BF16)  # rows of 64 bytes of m
BYTES = [
    SMALL_BYTES,
    of_bytes(Tile(64, 32, 128), "mkn", BF16, store="threads"),
    of_bytes(Tile(128, 64, 128), "mkn", BF16, E5M2, E4M3),
    of_bytes(Tile(128, 64, 128), "mkm", F32, E4M3, E5M2),
    of_bytes(Tile(128, 32, 128), "mkm", E4M3, E5M2, E5M2),
    of_bytes(Tile(128, 64, 128), "mkn", E5M2),
    of_bytes(Tile(128, 96, 128), "mkn", F32, store="threads"),
    of_bytes(Tile(128, 96, 128), "mkm", BF16, store="threads"),
    of_bytes(Tile(128, 64, 128), "mkn", E4M3, store="threads"),
    of_bytes(Tile(128, 64, 128, cluster_m=2), "mkn", BF16, epilogue="scale_bias_relu"),
    of_bytes(Tile(256, 64, 128, cluster_m=2, cluster_n=2), "mkm", BF16),
    of_bytes(Tile(256, 128, 128), "mkn", BF16),
    of_bytes(Tile(64, 32, 128, cluster_k=4), "mkm", F32),
    of_bytes(Tile(128, 32, 128, cluster_k=2), "mkn", BF16, store="threads"),
    of_bytes(Tile(128, 32, 128, pingpong=True), "mkm", BF16),
    of_bytes(Tile(128, 64, 128, pingpong=True), "mkn", BF16, store="threads"),
    of_bytes(Tile(128, 32, 128, cluster_n=2, stream_k=True), "mkm", BF16),
    of_bytes(Tile(128, 128, 128, cluster_m=2, promoted=True), "mkm", BF16, E4M3, E5M2),
    of_bytes(Tile(128, 64, 128, promoted=True), "mkn", F32, store="threads"),
    of_bytes(Tile(128, 64, 128), "mkm", "int32", "int8", "int8"),
    of_bytes(Tile(128, 64, 128), "mkn", "int32", "uint8", "int8"),
    of_bytes(Tile(64, 32, 128, cluster_k=2), "mkn", "int32", "int8", "uint8", store="threads"),
]


@pytest.mark.parametrize("of", VARIANTS + BYTES, ids=lambda of: of.name)
def test_products(of: Variant) -> None:
    """One or two clusters walk all tiles, each shape under another schedule; also of one k tile, and of none in part
    of a split."""
    compiled = kernel(of)
    module, facts = parse(compiled.ptx), facts_of(of, compiled)
    step = of.tile.cluster_m * of.tile.cta_m, of.tile.cluster_n * of.tile.mma_n
    for seed, shape in enumerate([*shapes(of), (*step, 20 if of.a_dtype == F32 else 48), (*step, 7 * of.tile.k_tile)]):
        run_case(module, facts, case_of(of, *shape), Schedule.standard(seed)[4 - seed], 1 + seed % 2, seed)


def test_what_a_is_loaded_with() -> None:
    """The same boxes as any operand's, moved in 16-byte chunks."""
    words = kernel(variant(Tile(256, 64, 32, cluster_m=2, cluster_n=2)))
    assert words.tensor_maps[0] == TensorMap(0, "tf32", (32, 16, 1), 128, 16)
    assert kernel(BYTES[10]).tensor_maps[0] == TensorMap(0, "u8", (128, 64, 1), 128, 16)
    assert kernel(SMALL_BYTES).tensor_maps[0] == TensorMap(0, "u8", (64, 128, 1), 64, 16)


@pytest.mark.parametrize("of", [SMALL, VARIANTS[7], SMALL_BYTES, BYTES[11], BYTES[19]], ids=lambda of: of.name)
def test_nothing_stands_between_the_wgmmas_of_a_half(of: Variant) -> None:
    """Two halves before the main loop and two in it; each is fenced once, and two are waited for in the loop: ptxas
    waits for each wgmma alone where it cannot prove that nobody touches its registers."""
    slabs = of.tile.cta_m // (64 * of.tile.num_consumer_warpgroups)
    half = ["WARPGROUP.ARRIVE", *["GMMA"] * (2 * slabs)]
    assert waits_and_wgmmas(of) == [*half * 2, *(["WARPGROUP.DEPBAR.LE", *half] * 2), "WARPGROUP.DEPBAR.LE"]


def waits_and_wgmmas(of: Variant) -> list[str]:
    (opcodes,) = disassemble([read_cubin(kernel(of).cubin).text], "sm_90a")
    return [re.sub(r"[HQI]GMMA.*", "GMMA", name) for name in opcodes if re.match("WARPGROUP|[HQI]GMMA", name)]


def test_promoted_sums_are_waited_for_once_a_stage() -> None:
    half = ["WARPGROUP.ARRIVE", *["GMMA"] * 2]
    stage = [*half * 2, "WARPGROUP.DEPBAR.LE"]
    assert waits_and_wgmmas(BYTES[17])[: 2 * len(stage)] == stage * 2


class Accesses(Observer):
    """The 32 addresses of every execution of an opcode by a warp of a consumer."""

    def __init__(self, opcode: str) -> None:
        self.opcode, self.addresses = opcode, list[list[int]]()

    def step(self, warp: Warp) -> None:
        instr = warp.program.instrs[warp.split.pc]
        if instr.opcode == self.opcode and warp.index >= 4:
            (mem,) = (operand for operand in instr.operands if isinstance(operand, Mem))
            assert isinstance(mem.base, Reg)
            self.addresses.append((warp.lanes(mem.base.slot).astype(np.int64) + mem.offset).tolist())


def accesses(of: Variant, opcode: str) -> list[list[int]]:
    """In a product of one tile and stage."""
    compiled, case, found = kernel(of), case_of(of, of.tile.cta_m, of.tile.mma_n, of.tile.k_tile), Accesses(opcode)
    a, b, _ = case.inputs(0)
    run_matmul(parse(compiled.ptx), facts_of(of, compiled), a, b, observer=found)
    return found.addresses


@pytest.mark.parametrize("c_major", "nm")
def test_no_two_lanes_of_a_load_meet_in_a_bank(c_major: str) -> None:
    """32 lanes, 32 banks of 4 bytes; and all lanes of all warps together load all of the k tile, 128 x 32, once."""
    found = accesses(variant(Tile(128, 64, 32), f"mk{c_major}"), "ld.shared.b32")
    assert len(found) == 8 * 16
    assert {len({address // 4 % 32 for address in lanes}) for lanes in found} == {32}
    assert len({address for lanes in found for address in lanes}) == 128 * 32


@pytest.mark.parametrize("tile", [Tile(64, 32, 128), Tile(128, 64, 128), Tile(256, 64, 128)], ids=str)
def test_no_two_rows_of_a_matrix_meet_in_a_bank(tile: Tile) -> None:
    """8 rows of 16 bytes are all banks; and all matrices together are all of the k tile, once."""
    found = accesses(of_bytes(tile, "mkm", BF16), "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
    assert len(found) == tile.cta_m // 16 * 4
    assert {len({address // 16 % 8 for address in lanes[i : i + 8]}) for lanes in found for i in (0, 8, 16, 24)} == {8}
    assert len({address for lanes in found for address in lanes}) == tile.cta_m * 128 // 16


def test_the_k_of_matrices() -> None:
    """Lanes 4 g + t have rows 2 t and 2 t + 1 of two matrices, which are four k in a row; the rows of a matrix are
    apart modulo 8."""
    for matrix in range(4):
        assert {matrix_k(matrix, row) % 8 for row in range(8)} == set(range(8))
    for half in range(2):
        for t in range(4):
            found = [matrix_k(2 * half + i, 2 * t + j) for i in range(2) for j in range(2)]
            first = 16 * half + 4 * t
            assert found == [first + i for i in ((0, 1, 2, 3) if t < 2 else (2, 3, 0, 1))]


@pytest.mark.parametrize(("out", "opcode"), [(E4M3, "v2.b8"), (BF16, "b32"), (F32, "v2.b32")])
def test_pairs_of_rows_are_stored_without_bank_conflicts(out: str, opcode: str) -> None:
    """Two lanes of a bank have the same word; 8 bytes a lane are two turns."""
    of = of_bytes(Tile(128, 64, 128), "mkm", out)
    found = accesses(of, f"st.shared.{opcode}")
    assert len(found) == 128 * 64 // 64
    turn = 16 if out == F32 else 32
    for lanes in (lanes[i : i + turn] for lanes in found for i in range(0, 32, turn)):
        words = {address // 4 + i for address in lanes for i in range(1 + (out == F32))}
        assert len({word % 32 for word in words}) == len(words)


DOCTORED = [
    (r"wgmma\.wait_group\.sync\.aligned\s+1;", "register-in-flight overwrite-in-flight"),
    (r"fence\.proxy\.async\.shared::cta;", "missing-proxy-fence"),
    (r"wgmma\.fence\.sync\.aligned;", "missing-wgmma-fence"),
]


@pytest.mark.parametrize("of", [SMALL, SMALL_BYTES], ids=lambda of: of.name)
@pytest.mark.parametrize(("pattern", "rules"), DOCTORED)
def test_doctored(pattern: str, rules: str, of: Variant) -> None:
    """What the emulator says of a kernel without the instructions that the pattern matches, in a product of more
    stages than there are."""
    compiled = kernel(of)
    changed, count = re.subn(pattern, "", compiled.ptx)
    assert count, f"{pattern} is not in the kernel"
    case = case_of(of, 64, 32, of.tile.k_tile * 40)
    for schedule in Schedule.standard(seed=2):
        with pytest.raises(Fault) as fault:
            run_case(parse(changed), facts_of(of, compiled), case, schedule)
        assert fault.value.rule in rules.split(), fault.value
