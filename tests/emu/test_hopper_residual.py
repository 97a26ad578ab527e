"""A residual on Hopper: a warp for each consumer warpgroup carries its boxes in, and what they become out."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jax_bwgemm.emulator import Fault, Schedule, parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.resources import store_box_bytes, store_boxes, store_buffers
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import check_case, fused
from tests.emu import sites
from tests.emu.edits import At, Edit, drop, move, mutated, number
from tests.emu.matmul import Facts, case_of, facts_of, run_matmul
from tests.emu.mutant import no_wait, other_parity
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass
from tests.emu.test_hopper import kernel as compiled_kernel  # noqa: E402 - needs cutlass

BF16, F16, F32, E4M3 = "bfloat16", "float16", "float32", "float8_e4m3fn"
PINGPONG = Tile(128, 128, cluster_m=2, pingpong=True)


def variant(tile: Tile, out: str = BF16, epilogue: str = "residual", majors: str = "knn", dtype: str = BF16) -> Variant:
    own = Tile.from_str(str(tile).replace("x64_", f"x{k_tile(dtype)}_"))
    return Variant("sm_90a", dtype, dtype, out, majors[0], majors[1], own, fused(epilogue, majors[2]), majors[2])


FORMS = {  # and the boxes of a warpgroup's tile, and how many of them it has buffers for
    variant(Tile(128, 256), epilogue="bias_silu_residual"): (8, 8),
    variant(Tile(128, 128), F16, "scale_bias_relu_residual", dtype=F16): (4, 4),
    variant(PINGPONG, epilogue="bias_gelu_residual"): (8, 8),
    variant(PINGPONG, F32): (16, 8),
    variant(Tile(64, 64, pingpong=True), epilogue="bias_residual"): (2, 2),
    variant(Tile(64, 192), F32, "bias_silu_residual"): (12, 6),
    variant(Tile(256, 64, cluster_n=2), epilogue="relu_residual"): (4, 4),
    variant(Tile(64, 128), F32, majors="kkm"): (8, 8),
    variant(Tile(128, 16), majors="mkm"): (1, 1),
    variant(Tile(128, 96), epilogue="silu_residual", majors="mnm"): (3, 3),
    variant(Tile(128, 64), BF16, "residual", "mkm", F32): (2, 2),  # from registers: of words, rows in another order,
    variant(Tile(128, 64), F32, "residual", "mkm", F32): (4, 4),
    variant(Tile(64, 64), BF16, "residual", "mkm", E4M3): (2, 2),  # of bytes, stored by pairs of rows,
    variant(Tile(64, 128), BF16, "bias_residual", "mkn", E4M3): (4, 4),  # and not
    variant(Tile(64, 128), E4M3, "gelu_residual", "kkn", E4M3): (2, 2),
    variant(Tile(128, 64, promoted=True), BF16, "bias_residual", "kkn", E4M3): (2, 2),
}


@functools.cache
def kernel(of: Variant) -> tuple[Module, Facts]:
    return compiled(of)


def test_boxes_and_buffers() -> None:
    one = Moves(1)
    found = {
        of: (store_boxes(of.tile, of.out_dtype), store_buffers(of.tile, of.out_dtype, of.target, one)) for of in FORMS
    }
    assert found == FORMS


@pytest.mark.parametrize("of", FORMS, ids=lambda of: of.name)
def test_tiles_and_edges(of: Variant) -> None:
    """Next to nothing; one tile; several with partial edges and matrices, on two in turn of one cluster, two, or
    as many as there are tiles. The bits do not depend on what a cluster did before; every box is moved once."""
    module, facts = kernel(of)
    m, n, k = of.tile.cluster_m * of.tile.cta_m, of.tile.cluster_n * of.tile.mma_n, of.tile.k_tile
    shapes = ((16, 16, 16, 1), (m, n, 3 * k, 1), (m + 16, n + 16, k + 16, 2), (2 * m - 16, 2 * n + 32, 2 * k, 1))
    for seed, (rows, cols, depth, batch) in enumerate(shapes):
        case = case_of(of, rows, cols, depth, batch, batch)
        a, b, bias = case.inputs(seed)
        runs = list(zip((1, 2, None), Schedule.standard(seed)[:: 1 + seed % 2], strict=False))
        kept = [run for _, run in in_turn(runs, list(FORMS).index(of) + seed, 2)]
        results = [
            run_matmul(
                module, facts, a, b, case.alpha, bias, case.residual(seed), clusters, schedule=schedule,
            )
            for clusters, schedule in kept
        ]  # fmt: skip
        check_case(results[0][0], case.reference(a, b, bias, case.residual(seed)), case)
        assert all(np.array_equal(results[0][0], out) for out, _ in results[1:])
        boxes = batch * -(-rows // m) * -(-cols // n) * of.tile.cluster_ctas * FORMS[of][0]
        warpgroups = 1 if of.tile.pingpong else of.tile.num_consumer_warpgroups
        box_bytes = store_box_bytes(of.tile, of.out_dtype, of.target) // of.tile.num_consumer_warpgroups
        moved = boxes * warpgroups * box_bytes
        for _, counters in results:
            assert sum(counters.tma_store_bytes.values()) == moved
            assert sum(size for (name, _), size in counters.tma_load_bytes.items() if name == "residual") == moved


@pytest.mark.parametrize("of", list(FORMS)[3:8], ids=lambda of: of.name)
def test_many_orders(of: Variant) -> None:
    """Random orders of warps and completions, over several tiles of a cluster."""
    case = case_of(of, 2 * of.tile.cluster_m * of.tile.cta_m, of.tile.mma_n + 16, of.tile.k_tile, 2, 1)
    for seed in range(6):
        a, b, bias = case.inputs(seed)
        schedule = Schedule.standard(seed)[-1]
        out, _ = run_matmul(*kernel(of), a, b, case.alpha, bias, case.residual(seed), 1, schedule=schedule)
        check_case(out, case.reference(a, b, bias, case.residual(seed)), case)


READ_BOX, ARRIVE = r"ldmatrix", r"mbarrier\.arrive\.(release\.cta\.)?shared"
BROKEN: dict[str, tuple[Edit, str]] = {
    "the residual is read before it is there": (
        no_wait(At(sites.WAIT, before=READ_BOX)),
        "read-before-completion uninitialised-read",
    ),
    "the residual is waited for in the other parity": (
        other_parity(At(sites.WAIT, before=READ_BOX)),
        "deadlock read-before-completion uninitialised-read",
    ),
    "a box is stored before it is summed": (
        no_wait(At(sites.WAIT, before=sites.STORE)),
        "race missing-proxy-fence read-before-completion overwrite-in-flight uninitialised-read",
    ),
    "a residual overwrites what a store still reads": (
        drop(At(sites.WAIT_GROUP)),
        "overwrite-in-flight exit-in-flight",
    ),
    "no fence.proxy.async": (drop(At(sites.FENCE)), "missing-proxy-fence"),
    "the fence comes before the box": (
        move(At(sites.FENCE, after=READ_BOX), At(sites.WRITE_BOX, after=READ_BOX)),
        "missing-proxy-fence",
    ),
    "too few bytes are expected": (
        number(At(r"mov\.b32", before=sites.EXPECT, last=True), lambda n: n // 2),
        "deadlock read-before-completion uninitialised-read",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_doctored(name: str) -> None:
    """Each of these is reported, under every schedule, by a rule that fits its cause."""
    of = variant(Tile(64, 64))
    edit, rules = BROKEN[name]
    built = compiled_kernel(of)
    module = parse(mutated(built.ptx, edit))
    case = case_of(of, 192, 128, 64)
    a, b, _ = case.inputs()
    for schedule in (Schedule(), Schedule.standard(0)[0], Schedule.standard(1)[4]):
        with pytest.raises(Fault) as fault:
            run_matmul(
                module, facts_of(of, built), a, b, residual=case.residual(), max_clusters=1, schedule=schedule,
                max_instructions=10**6,
            )  # fmt: skip
        assert fault.value.rule in rules.split(), fault.value
