"""Reductions in the epilogues of compiled kernels, in the emulator: every part of each, of both families."""

from __future__ import annotations

import dataclasses

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.epilogue import ACC, BIAS, RESIDUAL, UP, Apply, Input, Node, Reduction
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, buffers, why_not_variant
from tests.emu.matmul import poisoned_parts, run_matmul
from tests.fuzz import in_turn

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="kernels are compiled with CuTeDSL")

from tests.emu.check_variant import compiled  # noqa: E402 - needs cutlass

RELU = Apply("relu", (ACC,))
BIASED = Apply("relu", (Apply("add", (ACC, BIAS)),))
SLOPED = Apply("mul", (ACC, RESIDUAL))
GATED = Apply("mul", (RELU, UP))
SUMS = (Reduction("over_m", "sum", "n", RELU), Reduction("over_n", "sum", "m", RELU))
LARGEST = (Reduction("most", "max", "n", Apply("abs", (ACC,))), Reduction("largest", "max", "m", Apply("abs", (ACC,))))


def mixed(node: Node) -> tuple[Reduction, ...]:
    return Reduction("total", "sum", "n", node), Reduction("squares", "sum", "m", Apply("square", (node,)))


def variant(target: str, tile: str, epilogue: Node, reductions: tuple[Reduction, ...], **fields: str) -> Variant:
    given = {"a_dtype": "bfloat16", "b_dtype": "bfloat16", "out_dtype": "bfloat16", "a_major": "k", "b_major": "n"}
    made = Variant(target, *(given | fields).values(), tile=Tile.from_str(tile), epilogue=epilogue)  # type: ignore[arg-type]
    c_major = "m" if epilogue != BIASED and tile.startswith("64") else "n"
    return dataclasses.replace(made, reductions=reductions, c_major=c_major)


VARIANTS = [
    variant("sm_90a", "128x256x64_cta1_cluster2x1", RELU, SUMS),
    variant("sm_90a", "64x64x64_cta1_cluster1x1", RELU, SUMS),
    variant("sm_90a", "64x96x64_cta1_cluster1x1_pingpong", BIASED, LARGEST),
    variant("sm_90a", "128x128x64_cta1_cluster1x1_streamk", BIASED, mixed(BIASED)),
    variant("sm_90a", "128x128x64_cta1_cluster2x1", SLOPED, mixed(SLOPED)),
    variant("sm_90a", "128x128x64_cta1_cluster2x1_gated", GATED, mixed(GATED)),
    variant("sm_90a", "128x64x32_cta1_cluster1x1", RELU, SUMS, a_dtype="float32", b_dtype="float32",
            out_dtype="float32", b_major="k"),
    variant("sm_90a", "128x64x128_cta1_cluster1x1", ACC, LARGEST, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn",
            out_dtype="float8_e4m3fn", b_major="k"),
    variant("sm_100f", "256x256x64_cta2_cluster2x1", RELU, SUMS),
    variant("sm_100f", "128x64x64_cta2_cluster2x1", BIASED, mixed(BIASED)),
    variant("sm_100f", "64x64x64_cta1_cluster1x1", RELU, LARGEST),
    variant("sm_100f", "128x128x64_cta1_cluster1x1", SLOPED, mixed(SLOPED)),
    variant("sm_100f", "128x128x64_cta1_cluster1x1_gated", GATED, mixed(GATED)),
]  # fmt: skip
SHAPES = [(200, 144, 96), (72, 528, 64)]  # edges within a warp's rows and a box's columns, and warps beyond the result


def value(node: Node, known: dict[str, np.ndarray]) -> np.ndarray:
    if isinstance(node, Input):
        return known[node.role]
    assert isinstance(node, Apply)
    args = [value(arg, known) for arg in node.args]
    ops = {"relu": lambda x: np.maximum(x, 0), "abs": np.abs, "square": np.square, "add": np.add, "mul": np.multiply}
    found: np.ndarray = ops[node.op](*args)
    return found


def run(v: Variant, shape: tuple[int, int, int], schedule: Schedule) -> dict[str, np.ndarray]:
    """Parts of the reductions, each whole: XLA's step is NumPy's here. Checks the result, too."""
    (m, n, k), rng = shape, np.random.default_rng(0)

    def integers(*sizes: int, most: int = 2) -> np.ndarray:
        return rng.integers(-most, most + 1, sizes).astype(np.float32)

    a, b = integers(2, m, k, most=1), integers(2, k, n, most=1)
    named = {"up": integers(2, k, n, most=1), "bias": integers(n), "residual": integers(2, m, n)}
    roles = [buffer.role for buffer in buffers(v)]
    others = {role: x for role, x in named.items() if role in roles}
    stored = {role: x.swapaxes(1, 2) if role == "up" and v.b_major == "k" else x for role, x in others.items()}
    if v.c_major == "m" and "residual" in stored:
        stored["residual"] = stored["residual"].swapaxes(1, 2)
    arrays = {role: np.ascontiguousarray(x).astype(v.out_dtype) for role, x in stored.items()}
    arrays |= poisoned_parts(v, 2, m, n)
    given = (a, b if v.b_major == "n" else np.ascontiguousarray(b.swapaxes(1, 2)))
    stream = (2, 2) if v.tile.stream_k else (0, 1)
    out, _ = run_matmul(
        *compiled(v), *(x.astype(v.a_dtype) for x in given), max_clusters=2, schedule=schedule, others=arrays,
        stream=stream,
    )  # fmt: skip
    known = others | {"acc": a @ b} | ({"up": a @ named["up"]} if v.tile.gated else {})
    want = value(v.epilogue, known)
    np.testing.assert_allclose(out.astype(np.float32), want.astype(v.out_dtype).astype(np.float32))
    for x in v.reductions:
        over = 1 if x.place == "n" else 2
        of = value(x.node, known)
        expected = np.sum(of, over, np.float64) if x.reducer == "sum" else np.max(of, over)
        parts = arrays[x.role]  # NaN where no warp has stored
        np.testing.assert_array_equal(parts.sum(1) if x.reducer == "sum" else parts.max(1), expected, str(x))
    return {x.role: arrays[x.role] for x in v.reductions}


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_part(v: Variant, shape: tuple[int, int, int]) -> None:
    """Integers, whose sums are exact in any order; and the same under two schedules, others for each kernel."""
    assert why_not_variant(v) is None
    turns = in_turn(Schedule.standard(0)[:3], VARIANTS.index(v) + SHAPES.index(shape), 2)
    found = [run(v, shape, schedule) for _, schedule in turns]
    for other in found[1:]:
        assert all(np.array_equal(other[role], parts) for role, parts in found[0].items())
