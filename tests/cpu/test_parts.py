"""k in parts: which products are worth it, at which price, what they are lowered to, and what never is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, collectives, hlo, matmul, partitioned, struct
from plan_cases import B200, H200

import jax_bwgemm
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.geometry import concurrent_clusters, num_tiles
from jax_bwgemm.facts.padding import padded_shape, padding
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import unit
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.ops import lowering
from jax_bwgemm.planner import parts
from jax_bwgemm.planner.cost import pass_us
from jax_bwgemm.planner.measured import Record, Time
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import attempts, decision, rungs
from jax_bwgemm.runtime.attempts import choose
from jax_bwgemm.runtime.rungs import Asked

LONG = 1e9  # microseconds: no bound is in the way
GRADIENT = Problem(1608, 80, 5656, a_major="m")  # of a narrow layer's weights
SAID = "k in {} parts, which XLA adds up in {} us, is predicted to take .* us, and one kernel .*"
DEEP = Problem(128, 128, 65536, b_major="k")
NAMED = [
    (Problem(32, 1248, 6040, a_major="m"), (3, 6, 7, 12)),
    (Problem(144, 264, 14312, b_major="k"), (2, 3, 6, 7, 8, 10, 15, 16, 32)),
    (Problem(328, 2104, 11744, b_major="k"), (2, 3)),
    (GRADIENT, (2, 3, 4, 5, 7)),
    (Problem(368, 544, 8528, a_major="m"), (2, 3, 5, 7, 11)),
    (Problem(1000, 104, 13127), (3, 4, 7, 8, 11)),  # rows that TMA cannot step over, and a prime
    (DEEP, (7, 8, 15, 30, 32)),
]
NEVER = [
    Problem(4096, 4096, 4096),
    Problem(8192, 16, 64, a_major="m"),
    Problem(512, 512, 240),  # parts of 120
    dataclasses.replace(GRADIENT, batch=2, a_batch=2, b_batch=2),
    dataclasses.replace(GRADIENT, a_dtype="float32", b_dtype="float32"),
    dataclasses.replace(GRADIENT, a_dtype="int8", b_dtype="int8", out_dtype="int32"),
    dataclasses.replace(GRADIENT, out_dtype="float8_e4m3fn"),
    dataclasses.replace(DEEP, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn"),
    dataclasses.replace(DEEP, symmetric=True),
    dataclasses.replace(GRADIENT, epilogue=unit("silu", True)),
]


@pytest.mark.parametrize(("problem", "want"), NAMED, ids=str)
def test_numbers_of_parts_fill_the_device_with_tiles(problem: Problem, want: tuple[int, ...]) -> None:
    assert parts.counts(problem, H200, LONG) == want
    for count in want:
        own = parts.divided(problem, count)
        assert any(num_tiles(tile, own) <= concurrent_clusters(tile, H200) for tile in parts.TILES)
        assert own.k % 64 == 0 and own.k >= parts.LEAST_TERMS and (count - 1) * own.k < problem.k <= count * own.k


@pytest.mark.parametrize("problem", NEVER, ids=str)
def test_what_is_never_in_parts(problem: Problem) -> None:
    assert parts.counts(problem, H200, LONG) == ()


def test_neither_is_what_no_bound_promises_to_gain_nor_where_nothing_was_measured() -> None:
    decode = Problem(8, 4096, 14336)
    assert parts.counts(decode, H200, 31.0) == ()  # memory's time, a launch and a pass
    assert parts.counts(GRADIENT, H200, 8.0) == ()
    assert parts.counts(GRADIENT, B200, LONG) == ()
    assert parts.counts(GRADIENT, dataclasses.replace(H200, l2_bytes=2**20), LONG) == ()  # parts that do not stay there


def test_parts_are_a_batch_of_float32_results() -> None:
    asked = dataclasses.replace(GRADIENT, epilogue=chain(activation="relu", has_residual=True))
    divided = parts.divided(asked, 4)
    assert divided == Problem(
        1608, 80, 1472, 4, out_dtype="float32", a_major="m", a_batch=4, b_batch=4, whole_k=5656
    )  # 89 k tiles: 23 of each part but the last
    assert padded_shape(divided, "a") == (1, 5656, 1608) and padded_shape(divided, "b") == (1, 5656, 80)
    odd = parts.divided(Problem(1000, 104, 13127), 8)
    assert (odd.k, padded_shape(odd, "a"), padding(odd, "b")) == (1664, (1, 1000, 13184), 0)
    assert parts.whole(divided) == dataclasses.replace(GRADIENT, out_dtype="float32")
    elements = 1608 * 80
    assert parts.sum_us(GRADIENT, 4, H200) == pytest.approx(pass_us(elements * (4 * 4 + 2), H200))
    assert parts.sum_us(asked, 4, H200) == pytest.approx(pass_us(elements * (4 * 4 + 2 + 2), H200))


def test_what_is_missing_is_not_priced() -> None:
    """Else each look at a number of parts would be one at the compiler."""
    priced = [plan(x, H200, missing=lambda variant: "none").candidates[0].cost for x in (parts.divided(DEEP, 4), DEEP)]
    assert priced[0] is None and priced[1] is not None


def entry(tile: Tile, majors: str = "mn", out: str = "bfloat16", dtype: str = "bfloat16", store: str = "tma"):
    return fake_entry(Variant("sm_90a", dtype, dtype, out, *majors, tile, store=store))


PINGPONG = Tile(64, 128, cluster_m=4, pingpong=True)
KERNELS = [
    entry(tile, majors, out)
    for majors in ("mn", "kn", "kk")
    for out, tiles in {
        "bfloat16": (Tile(64, 64, cluster_m=4, cluster_n=2, pingpong=True), Tile(64, 64, stream_k=True)),
        "float32": (PINGPONG, Tile(64, 64)),
    }.items()
    for tile in tiles
]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    write_fake_artifacts(tmp_path / "kernels", KERNELS)
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "kernels"))


@pytest.fixture
def eager(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four parts wherever the rules have nothing against parts, at no price."""
    own = parts.counts
    monkeypatch.setattr(parts, "counts", lambda problem, arch, us: (4,) if own(problem, arch, LONG) else ())
    monkeypatch.setattr(parts, "sum_us", lambda *_: -LONG)
    attempts.forget()
    yield
    attempts.forget()


def test_the_planner_takes_parts_where_they_are_clearly_faster(kernels: None) -> None:
    chosen = choose(Asked(GRADIENT, "h200"))
    assert (chosen.parts, chosen.entry.variant.tile, chosen.entry.variant.out_dtype) == (3, PINGPONG, "float32")
    assert chosen.problem == dataclasses.replace(GRADIENT, out_dtype="float32") and not chosen.is_fused
    assert chosen.plan.problem.whole_k == 5656
    assert chosen.us == chosen.plan.chosen.cost.us + parts.sum_us(GRADIENT, 3, H200)
    whole = choose(Asked(GRADIENT, "h200", Tile(64, 64, cluster_m=4, cluster_n=2, pingpong=True)))
    assert rungs.CLEARLY * chosen.us < whole.us and whole.parts == 1
    assert re.fullmatch(SAID.format(3, "1.."), chosen.reason)
    assert choose(Asked(DEEP, "h200")).parts == 32


@pytest.mark.parametrize(
    "problem", [Problem(4096, 4096, 4096), Problem(8192, 16, 64, a_major="m"), Problem(8, 4096, 14336)]
)
def test_it_takes_none_for_large_short_and_thin_products(kernels: None, problem: Problem) -> None:
    assert choose(Asked(problem, "h200")).parts == 1


@pytest.mark.parametrize("how", [{"batch_invariant": True}, {"tile": Tile(64, 64, stream_k=True)}])
def test_who_asks_for_an_order_or_a_tile_has_no_parts(eager: None, how: dict) -> None:
    assert choose(Asked(GRADIENT, "h200")).parts == 4
    chosen = choose(Asked(GRADIENT, "h200", **how))
    assert chosen.parts == 1 and chosen.entry is not None


def test_measured_times_of_one_kernel_give_way_to_no_prediction(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(str(Tile(64, 64, stream_k=True)), False, 12.0, "")
    monkeypatch.setattr(decision, "measurements", lambda *_: Record("", "", (time,)))
    assert choose(Asked(GRADIENT, "h200")).parts == 1


def body(text: str) -> list[str]:
    """The operations of the main function."""
    return re.findall(
        r"^ *%\S+ = (?:stablehlo\.)?(\w+)", text.partition("@main")[2].partition("func.func private")[0], re.MULTILINE
    )


def test_a_weights_gradient_is_one_call_and_one_chain_of_sums(kernels: None) -> None:
    """Operands are reshaped, which moves nothing; the transpose is read by nobody."""
    text = hlo(lambda x, g: matmul(x.T, g), struct(5656, 1608), struct(5656, 80))
    (call,) = calls(text)
    assert call["types"] == "(tensor<1x5656x1608xbf16>, tensor<1x5656x80xbf16>) -> tensor<3x1608x80xf32>"
    assert "a:bfloat16[l?,k,m+]%16 b:bfloat16[l?,k,n+]%16 -> out:float32[l,m,n]%16" in text
    made = body(text)
    assert made.count("add") == 2 and made.count("slice") == 3 and made.count("transpose") == 1
    assert set(made) == {"transpose", "reshape", "custom_call", "optimization_barrier", "slice", "add", "convert"}
    assert re.search(r"custom_call @jax_bwgemm_matmul_v2\(%(\d+), %(\d+)\)", text)
    assert "reshape %arg0" in text and "reshape %arg1" in text


def test_parts_of_k_major_operands_lie_as_they_are(kernels: None) -> None:
    text = hlo(lambda x, w: matmul(x, w.T), struct(128, 65536), struct(128, 65536))
    (call,) = calls(text)
    assert call["types"] == "(tensor<1x128x65536xbf16>, tensor<1x128x65536xbf16>) -> tensor<32x128x128xf32>"
    assert "a:bfloat16[l?,m,k+]%16 b:bfloat16[l?,n,k+]%16 -> out:float32[l,m,n]%16" in text
    assert call["parts"].startswith("32 ")
    assert "reshape %arg0" in text and "reshape %arg1" in text


def test_what_follows_is_one_pass_with_the_sum(kernels: None) -> None:
    args = struct(5656, 1608), struct(5656, 80), struct(80), struct(1608, 80)
    text = hlo(lambda x, g, b, r: matmul(x.T, g, alpha=0.5, bias=b, activation="relu", residual=r), *args)
    (call,) = calls(text)
    assert call["variant"].startswith("sm_90a_bf16_bf16_f32_mnn_") and call["variant"].endswith("_identity")
    assert "3x1608x80xf32" in call["types"] and "dot_general" not in text


def test_a_float32_result_is_not_rounded(kernels: None) -> None:
    text = hlo(lambda x, g: matmul(x.T, g, out_dtype=jnp.float32), struct(5656, 1608), struct(5656, 80))
    assert "3x1608x80xf32" in calls(text)[0]["types"] and "convert" not in body(text)


def test_the_same_again_is_emitted_alike(kernels: None) -> None:
    def f(x: jax.Array, y: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return matmul(x.T, g), matmul(y.T, g)

    first, second = calls(hlo(f, struct(5656, 1608), struct(5656, 1608), struct(5656, 80)))
    assert (
        first["types"] == second["types"]
        and first["variant"] == second["variant"]
        and "3x1608x80xf32" in first["types"]
    )


def test_batches_gates_and_symbols_are_whole(eager: None) -> None:
    x, g = struct(5656, 1608), struct(5656, 80)
    assert "tensor<4x1608x80xf32>" in calls(hlo(lambda x, g: matmul(x.T, g), x, g))[0]["types"]
    stacked = struct(2, 5656, 1608), struct(2, 5656, 80)
    (call,) = calls(hlo(jax.vmap(lambda x, g: matmul(x.T, g)), *stacked))
    assert call["types"].startswith("(tensor<2x5656x1608xbf16>")
    (size,) = jax.export.symbolic_shape("8*b", constraints=["b <= 1000", "b >= 600"])
    checks = [*jax_bwgemm.export.disabled_checks(), jax.export.DisabledSafetyCheck.platform()]
    f = jax.jit(lambda x, g: matmul(x.T, g))
    text = jax.export.export(f, platforms=("cuda",), disabled_checks=checks)(
        jax.ShapeDtypeStruct((size, 1608), BF16), jax.ShapeDtypeStruct((size, 80), BF16)
    ).mlir_module()
    assert "jax_bwgemm_matmul_v2" in text and "[l?,k,m+]" in text and "stablehlo.slice" not in text


def test_odd_rows_are_padded_before_they_are_divided(kernels: None, eager: None, tmp_path: Path, monkeypatch) -> None:
    """By XLA, where there is no repack."""
    text = hlo(lambda x, g: matmul(x.T, g), struct(5636, 1605), struct(5636, 80))
    (call,) = calls(text)
    assert call["types"].startswith("(tensor<1x5636x1664xbf16>, tensor<1x5636x80xbf16>)")


def test_explain_and_stats_say_so(kernels: None) -> None:
    told = jax_bwgemm.explain(struct(128, 65536), struct(65536, 128), device="h200")
    assert told.parts == 32 and "_f32_" in told.variant
    assert re.search(r"\n  parts:  " + SAID.format(32, ".*"), str(told))
    assert jax_bwgemm.explain(struct(512, 512), struct(512, 512), device="h200").parts == 1
    function = jax_bwgemm.explain(
        lambda x, g: jax_bwgemm.matmul(x.T, g), struct(5656, 1608), struct(5656, 80), device="h200"
    )
    (product,) = function.products
    assert product.reason is None and product.problem.startswith("1608x80x5656 ") and product.flops == GRADIENT.flops
    assert any(note.startswith("k in 3 parts, which XLA adds up") for note in product.notes)
    jax_bwgemm.stats(reset=True)
    hlo(lambda x, g: matmul(x.T, g), struct(5656, 1608), struct(5656, 80))
    (name,) = jax_bwgemm.stats().kernels
    assert name == product.kernel


def test_accelerate_takes_the_epilogue_along(kernels: None) -> None:
    def f(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.nn.relu(jnp.einsum("km,kn->mn", x, g))

    with jax_bwgemm.config(device="h200"):
        text = hlo(jax_bwgemm.accelerate(f), struct(5656, 1608), struct(5656, 80))
    assert "3x1608x80xf32" in calls(text)[0]["types"]


def test_over_a_mesh_the_part_of_a_device_is_divided(
    kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12864 rows over 8 devices are 1608 of each, whose tiles are few. For all of them one kernel is at hand, too, so
    that they are not left to XLA."""
    whole = entry(Tile(128, 96, cluster_m=4, pingpong=True), "mn", "bfloat16")
    (tmp_path / "more").mkdir()
    write_fake_artifacts(tmp_path / "more", [*KERNELS, whole])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "more"))
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((5656, 12864), BF16, sharding=NamedSharding(mesh, P(None, "x")))
    g = jax.ShapeDtypeStruct((5656, 80), BF16, sharding=NamedSharding(mesh, P()))

    def f(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x.T, g, device="h200", on_fallback="error")

    (tmp_path / "dump").mkdir()
    text = partitioned(f, [x, g], tmp_path / "dump")
    assert re.search(r"f32\[3,1608,80\]\S* custom-call\(", text) and collectives(text) == []


def test_a_fallback_has_the_same_values() -> None:
    """XLA's own product, off CUDA."""
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal(shape), BF16) for shape in ((1024, 40), (1024, 24)))
    got = jax_bwgemm.matmul(x.T, g, on_fallback="ignore")
    want = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= 2**-8 * np.abs(want).max()


def test_an_epilogue_with_more_results_is_whole(eager: None) -> None:
    two = Epilogue(GRADIENT.epilogue.out, seconds=(("pre", GRADIENT.epilogue.out),))
    assert parts.counts(dataclasses.replace(GRADIENT, epilogue=two), H200, LONG) == ()
