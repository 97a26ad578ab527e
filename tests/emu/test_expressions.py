"""Kernels of any expression, of several matrices and results, and of two b: compiled for it, against float64."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.epilogue import ACC, ACTIVATIONS, OPS, UP, Apply, Const, Epilogue, Input, Node, parse
from jax_bwgemm.facts.tile import Tile, k_tile
from jax_bwgemm.facts.variant import Variant

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass
from tests.emu.expressions import check_expression  # noqa: E402 - needs cutlass
from tests.emu.matmul import run_matmul  # noqa: E402 - needs cutlass

BF16, F16, F32 = "bfloat16", "float16", "float32"
SLOPE = parse("mul(residual:mn, mul(sigmoid(acc), add(1.0, mul(acc, sub(1.0, sigmoid(acc))))))")
SCALED = parse("mul(mul(acc, mul(alpha, rows:m)), columns:n)")
DSWIGLU = Epilogue(
    parse("mul(acc, silu(gate:mn))"),
    seconds=(("dgate", parse("mul(mul(acc, left:mn), sigmoid(gate:mn))")), ("again", parse("silu(gate:mn)"))),
)


def run_expression(
    target: str, tile: Tile, epilogue: Epilogue, dtype: str = BF16, out: str = BF16, majors: str = "kkn",
    store: str = "tma", shape: tuple[int, int, int] = (136, 144, 96), seed: int = 0, schedule: int = 0,
    stream: tuple[int, int] = (0, 1),
) -> None:  # fmt: skip
    """Of a kernel that is compiled for it."""
    own = dataclasses.replace(tile, k_tile=k_tile(dtype))
    variant = Variant(target, dtype, dtype, out, *majors[:2], own, epilogue.out, majors[2], store, epilogue.seconds)
    module, facts = compiled(variant)
    order = Schedule.standard(seed)[schedule]
    check_expression(variant, module, facts, shape, order, seed, stream, dict(epilogue.scalars))


PAIR = Tile(256, 128, cta_group=2, cluster_m=2)


@pytest.mark.parametrize("majors", ["kkn", "mnn", "kkm"])
@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize("target, tile", [("sm_90a", Tile(128, 64)), ("sm_90a", Tile(64, 96)), ("sm_100f", PAIR)])
def test_a_slope_of_the_sums_times_a_matrix(target: str, tile: Tile, out: str, majors: str) -> None:
    run_expression(target, tile, Epilogue(SLOPE), out=out, majors=majors)


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize("majors", ["kkn", "mnn", "kkm"])
@pytest.mark.parametrize("target, tile", [("sm_90a", Tile(128, 64)), ("sm_90a", Tile(64, 96)), ("sm_100f", PAIR)])
def test_numbers_on_the_device(target: str, tile: Tile, majors: str, out: str) -> None:
    """Float32, whatever the result's dtype is; beside a vector."""
    scaled = parse("add(mul(mul(acc, factor:one), factor_up:one), columns:n)")
    run_expression(target, tile, Epilogue(scaled), out=out, majors=majors)


@pytest.mark.parametrize("store", ["tma", "threads"])
@pytest.mark.parametrize("majors", ["kkn", "kkm"])
@pytest.mark.parametrize("target, tile", [("sm_90a", Tile(128, 64)), ("sm_100f", PAIR), ("sm_100f", Tile(64, 64))])
def test_vectors_along_both(target: str, tile: Tile, majors: str, store: str) -> None:
    shape = (136, 144, 96) if store == "tma" else (135, 141, 96)
    run_expression(target, tile, Epilogue(SCALED, (("alpha", 0.75),)), majors=majors, store=store, shape=shape)


@pytest.mark.parametrize("majors", ["kkn", "mkm"])
@pytest.mark.parametrize("tile", [Tile(128, 64), Tile(64, 64, pingpong=True), Tile(128, 128, cluster_m=2)])
def test_a_second_result(tile: Tile, majors: str) -> None:
    found = Epilogue(parse("silu(add(acc, bias:n))"), seconds=(("before", parse("add(acc, bias:n)")),))
    run_expression("sm_90a", tile, found if majors[2] == "n" else found.transposed, majors=majors)
    if tile == Tile(128, 64):
        run_expression("sm_100f", PAIR, found if majors[2] == "n" else found.transposed, majors=majors)


@pytest.mark.parametrize("schedule", range(3))
@pytest.mark.parametrize("target, tile", [("sm_90a", Tile(128, 64)), ("sm_90a", Tile(64, 128)), ("sm_100f", PAIR)])
def test_two_matrices_and_three_results(target: str, tile: Tile, schedule: int) -> None:
    run_expression(target, tile, DSWIGLU, schedule=schedule, shape=(264, 200, 64))


@pytest.mark.parametrize("majors", ["kkn", "knn", "mnn"])
@pytest.mark.parametrize(
    "target, tile",
    [
        ("sm_90a", Tile(128, 128, gated=True)),
        ("sm_90a", Tile(128, 256, cluster_m=2, gated=True)),
        ("sm_90a", Tile(64, 256, cluster_n=2, gated=True)),
        ("sm_90a", Tile(64, 128, pingpong=True, gated=True)),
        ("sm_100f", Tile(128, 128, gated=True)),
        ("sm_100f", Tile(64, 256, cluster_m=2, gated=True)),
        ("sm_100f", Tile(256, 256, cta_group=2, cluster_m=2, gated=True)),
        ("sm_100f", Tile(256, 128, cta_group=2, cluster_m=4, cluster_n=2, gated=True)),
    ],
)
def test_a_gated_product(target: str, tile: Tile, majors: str) -> None:
    run_expression(target, tile, Epilogue(Apply("mul", (Apply("silu", (ACC,)), UP))), majors=majors)


def test_a_gated_product_that_keeps_what_its_gradient_needs() -> None:
    gated = Epilogue(parse("mul(silu(acc), up)"), seconds=(("gate_sums", ACC), ("up_sums", UP)))
    run_expression("sm_90a", Tile(128, 128, gated=True), gated, dtype=F16, out=F16)


@pytest.mark.parametrize("schedule", range(3))
def test_a_gated_product_whose_tiles_are_shared(schedule: int) -> None:
    """Each part has the sums of both b."""
    gated = Epilogue(parse("mul(silu(acc), up)"), seconds=(("gate_sums", ACC), ("up_sums", UP)))
    tile = Tile(64, 128, stream_k=True, gated=True)
    run_expression("sm_90a", tile, gated, shape=(136, 144, 320), schedule=schedule, stream=(5, 2))


def test_every_operation() -> None:
    """Of which each sees all values: in one kernel, one sum of all of them."""
    positive: Node = Apply("add", (Apply("abs", (ACC,)), Const(0.5)))
    terms: list[Node] = [Apply(name, (ACC,)) for name in ACTIVATIONS]
    terms += [Apply(name, (positive,)) for name in ("log", "sqrt", "rsqrt", "neg", "abs", "square", "erf")]
    terms += [Apply("exp", (Apply("neg", (positive,)),))]
    matrix = Input("residual", "mn")
    terms += [Apply(name, (ACC, matrix)) for name in ("add", "sub", "mul", "max", "min", "gt", "ge", "eq")]
    terms += [Apply("div", (matrix, positive)), Apply("where", (Apply("gt", (ACC, matrix)), ACC, Const(-1.5)))]
    assert {term.op for term in terms if isinstance(term, Apply)} == set(OPS)
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        total = Apply("add", (total, Apply("mul", (term, Const(0.25 + i / 64)))))
    for target, tile in (("sm_90a", Tile(64, 64)), ("sm_100f", Tile(128, 64))):
        run_expression(target, tile, Epilogue(total), out=F32)


def test_a_number_that_is_no_number() -> None:
    nan = Epilogue(parse("where(gt(acc, 1e+30), nan, -inf)"))
    module, facts = compiled(Variant("sm_90a", BF16, BF16, BF16, "k", "k", Tile(64, 64), nan.out))
    a = np.ones((1, 16, 16), ml_dtypes.bfloat16)
    out, _ = run_matmul(module, facts, a, a, schedule=Schedule.standard(0)[0])
    assert (out.astype(np.float32) == -np.inf).all()
