"""The ladder of what can compute a product: its prices, what it is kept for, that the lowering and `explain` agree."""

from __future__ import annotations

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry
from few_kernels import BEST, BF16, NARROW, SMALL, entry, with_epilogue
from lowered import W, X, calls, hlo, matmul, struct

import jax_bwgemm
from jax_bwgemm.facts.epilogue import Epilogue, chain, label
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner import parts
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.runtime import attempts, decision, jit_build, rungs
from jax_bwgemm.runtime.attempts import alone, choose, expected, ladder
from jax_bwgemm.runtime.rungs import Asked

PROBLEM = Problem(4096, 4096, 4096)
transpose_us = Route.transpose_us


FEW = Problem(64, 4096, 14400)  # not in the table that ships
FEW_RELU = with_epilogue(FEW, activation="relu")
PRODUCT = (*BF16[:2], "float32")


def test_a_thin_product_reads_its_rows_from_before_a_transpose(have):
    """As given, a has rows that TMA steps over, but only once a pass over 164 MB has made them; before it, it has not,
    and a direct kernel reads those."""
    tile = Tile(64, 16, direct=True)
    have(*(fake_entry(Variant("sm_90a", *BF16, major, "n", tile, Epilogue().out, "n", "threads")) for major in "mk"))
    thin = Problem(6052, 4, 13568)
    chosen = ladder(Asked(thin, "h100", is_transpose=(True, False))).attempts[0]
    assert (chosen.route.from_source, chosen.problem.a_major) == ((True, False), "m")
    assert ladder(Asked(thin, "h100")).attempts[0].problem.a_major == "k"  # a itself: nothing was transposed


@pytest.mark.parametrize("passes, from_source", [(0.0, (False, False)), (1.0, (True, False))])
def test_a_transpose_that_xla_makes_has_its_price(artifacts_dir, monkeypatch, passes, from_source):
    """As given, a needs no padding, but a pass that transposes it; without that pass, which is what is counted
    `passes` times, the kernel of operands as given would be the faster one."""
    problem = Problem(2803, 72, 360)
    monkeypatch.setattr(Route, "transpose_us", lambda route, arch: passes * transpose_us(route, arch))
    chosen = ladder(Asked(problem, "h200", is_transpose=(True, False))).attempts[0]
    assert chosen.route.from_source == from_source
    assert chosen.route.as_given == (not from_source[0], False)
    alone_us = chosen.plan.chosen.cost.us
    assert chosen.us == pytest.approx(alone_us)


def test_rows_of_one_product_are_taken_as_it_is_given(artifacts_dir):
    """Whatever that costs: what is cheaper follows from the number of rows."""
    asked = Asked(Problem(2803, 72, 360), "h200", is_transpose=(True, False), batch_invariant=True)
    assert choose(asked).route.as_given == (True, False)
    for deterministic, passes in (("batch", "a transposed by XLA"), ("run", "a padded")):
        multiply = functools.partial(matmul, deterministic=deterministic)
        told = jax_bwgemm.explain(lambda x, w, f=multiply: f(x.T, w), struct(360, 2803), struct(360, 72))
        assert str(told).endswith(f"; {passes}")


def test_a_fused_kernel_wins_where_it_is_as_fast(have):
    have(entry(BEST, "relu"), entry(BEST, dtypes=PRODUCT))
    chosen = choose(Asked(with_epilogue(PROBLEM, activation="relu"), "h200"))
    assert chosen.is_fused and label(chosen.entry.variant.epilogue) == "relu" and chosen.reason is None
    assert chosen.us == chosen.plan.chosen.measured_us > 0  # the product's own time, which ships
    unmeasured = choose(Asked(with_epilogue(Problem(4096, 4096, 4104), activation="relu"), "h200"))
    assert unmeasured.us == unmeasured.plan.chosen.cost.us


def test_a_slow_fused_kernel_loses_to_the_product_and_xlas_epilogue(have, monkeypatch):
    """64 rows of long k: two waves of a 128x128 tile without a split against a stream of k tiles, and a pass. Parts of
    k, which would be better still, are another test's."""
    monkeypatch.setattr(parts, "counts", lambda *_: ())
    have(entry(SMALL, "relu"), entry(NARROW, dtypes=PRODUCT))
    chosen = choose(Asked(FEW_RELU, "h200"))
    assert not chosen.is_fused and chosen.entry.variant.tile == NARROW
    (only, _) = ladder(Asked(FEW_RELU, "h200", SMALL)).attempts  # of the user's tile nothing is weighed
    assert only.is_fused and chosen.us * rungs.CLEARLY < only.us
    assert re.search(
        r"the kernel that has it takes longer than the product's and XLA's pass over it, \d", chosen.reason
    )


def test_xla_wins_where_all_kernels_at_hand_are_slow_ones(have):
    have(entry(SMALL), entry(SMALL, "relu"))
    for problem in (FEW, FEW_RELU):
        chosen = choose(Asked(problem, "h200"))
        assert chosen.entry is None and "are predicted to take" in chosen.reason and "pass `tile=`" in chosen.reason
        assert choose(Asked(problem, "h200", SMALL)).entry is not None
    assert choose(Asked(PROBLEM, "h200")).entry is not None  # there a 128x128 tile is not far from the best


def test_few_us_are_no_reason_for_xla(have):
    have(entry(SMALL))
    assert choose(Asked(Problem(64, 256, 1024), "h200")).entry is not None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_8_bit_operands_are_not_given_to_xla(have, dtype):
    """It widens them first."""
    out = "int32" if dtype == "int8" else "bfloat16"
    tile = dataclasses.replace(SMALL, k_tile=128)
    have(fake_entry(Variant("sm_90a", dtype, dtype, out, "k", "k", tile)))
    problem = dataclasses.replace(FEW, a_dtype=dtype, b_dtype=dtype, out_dtype=out, b_major="k")
    assert choose(Asked(problem, "h200")).entry is not None


@pytest.mark.parametrize("operand, out", [("bfloat16", "float8_e4m3fn"), ("float32", "bfloat16")])
def test_a_result_dtype_that_no_kernel_has_is_a_float32_product_and_a_cast(artifacts_dir, operand, out):
    x, w = struct(4096, 4096, dtype=operand), struct(4096, 4096, dtype=operand)
    text = hlo(lambda a, b: matmul(a, b.T, out_dtype=out), x, w)
    (call,) = calls(text)
    assert "_f32_" in call["variant"] and call["types"].endswith("xf32>") and "dot_general" not in text
    told = str(jax_bwgemm.explain(x, w, out_dtype=out, device="h200"))
    assert re.search(r"XLA: +the epilogue, identity of a float32 product: no cubin", told) or operand == "float32"


def test_what_xla_can_finish():
    assert alone(PROBLEM) == dataclasses.replace(PROBLEM, out_dtype="float32")
    assert alone(dataclasses.replace(PROBLEM, out_dtype="float32")) is None
    assert alone(dataclasses.replace(PROBLEM, a_dtype="int8", b_dtype="int8", out_dtype="int32")) is None
    scaled = with_epilogue(PROBLEM, alpha=2.0, has_residual=True)
    assert alone(scaled) == dataclasses.replace(PROBLEM, out_dtype="float32")


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """A compiler that makes what it is asked for, or refuses."""
    built: list[Variant] = []

    def build(variant):
        if refusals:
            return refusals[0]
        built.append(variant)
        return fake_entry(variant)

    refusals: list[str] = []
    monkeypatch.setattr(jit_build, "build", build)
    monkeypatch.setattr(jit_build, "why_not_here", lambda: None)
    return built, refusals


@pytest.mark.parametrize("tile", [None, Tile(128, 80)])
@pytest.mark.parametrize("epilogue", [Epilogue(), chain(activation="relu")])
def test_explain_says_what_the_lowering_compiles(have, builder, tile, epilogue):
    """It compiles nothing itself; before, it said that XLA would compute what the lowering compiles."""
    built, _ = builder
    have(entry(BEST, dtypes=PRODUCT))
    asked = Asked(dataclasses.replace(PROBLEM, epilogue=epilogue), "h200", tile, compiles=True)
    told = expected(asked)
    assert told.is_missing and built == []
    assert choose(asked).entry.variant == told.plan.variant == built[0]
    text = str(jax_bwgemm.explain(struct(4096, 4096), struct(4096, 4096), device="h200", tile=tile))
    assert "compiled first" not in text  # where nothing may be
    with jax_bwgemm.config(compile_missing="auto"):
        text = str(jax_bwgemm.explain(struct(4096, 4096), struct(4096, 4096), device="h200", tile=tile))
    assert "which is compiled first" in text


@pytest.mark.parametrize("activation", [None, "relu"])
def test_explain_of_a_function_lists_what_would_be_compiled(have, builder, activation):
    """It compiles nothing itself; before, it had this product left to XLA, and so all that its gradient makes of it."""
    built, _ = builder
    have(entry(NARROW, dtypes=PRODUCT))
    a = struct(4096, 4096)

    def f(a, b):
        return jax_bwgemm.matmul(a, b, activation=activation)

    with jax_bwgemm.config(compile_missing="auto"):
        (product,) = jax_bwgemm.explain(f, a, a, device="h200").products
        assert built == [] and product.notes == ("compiled first, once, in some seconds",) and product.reason is None
        assert product.us > 0 and product.flops == 2 * 4096**3
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        divided = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows)
        (whole,) = jax_bwgemm.explain(f, divided, a, device="h200").products
        assert whole.kernel == product.kernel and whole.notes[1:] == product.notes and built == []
        with jax_bwgemm.config(device="h200"):
            jax.jit(f).trace(a, a).lower(lowering_platforms=("cuda",))
    assert [variant.name for variant in built] == [product.kernel]
    (product,) = jax_bwgemm.explain(f, a, a, device="h200").products  # where nothing may be
    assert product.kernel is None and product.notes == ()


def test_a_refused_fused_kernel_leaves_the_product_alone(have, builder):
    built, refusals = builder
    refusals.append("it spills")
    have(entry(BEST, dtypes=PRODUCT))
    chosen = choose(Asked(with_epilogue(PROBLEM, activation="relu"), "h200", compiles=True))
    assert not chosen.is_fused and chosen.entry.variant.out_dtype == "float32" and "it spills" in chosen.reason


def test_the_remedy_is_one_that_works(no_artifacts, artifacts_dir, monkeypatch):
    """The build only makes what ships, and elsewhere than a variable names; a compiler that is there is not used."""
    monkeypatch.setattr(jit_build.importlib.util, "find_spec", lambda name: None)
    float16 = dataclasses.replace(PROBLEM, a_dtype="float16", b_dtype="float16", out_dtype="float16")
    shipped = choose(Asked(with_epilogue(float16, activation="relu"), "h200"))
    assert shipped.entry is None and shipped.reason.endswith(
        "; run `python -m jax_bwgemm build`, or correct or unset JAX_BWGEMM_ARTIFACTS"
    )
    asked = Asked(dataclasses.replace(PROBLEM, a_dtype="float16", b_dtype="float16"), "h200", Tile(128, 80))
    other = choose(asked)
    assert other.entry is None and "none of those that `python -m jax_bwgemm build` builds; pip install" in other.reason
    monkeypatch.setattr(jit_build.importlib.util, "find_spec", lambda name: True)
    attempts.forget()
    allow = '; `compile_missing="never"` keeps it from being compiled: ask for `compile_missing="auto"`'
    assert choose(asked).reason.endswith(allow)


@pytest.fixture
def judged(monkeypatch):
    """How many products were planned."""
    seen = []
    own = decision.plan

    def counted(problem, *args, **settings):
        seen.append(problem)
        return own(problem, *args, **settings)

    monkeypatch.setattr(decision, "plan", counted)
    return seen


def layers(sizes):
    shapes = [struct(m, n) for m, n in zip(sizes, sizes[1:], strict=False)]

    def f(x, *weights):
        for w in weights:
            x = matmul(x, w)
        return x

    return f, (struct(256, sizes[0]), *shapes)


def test_equal_products_are_judged_once(artifacts_dir, judged):
    f, shapes = layers([1024] * 51)
    assert len(calls(hlo(f, *shapes))) == 50 and len(judged) == 1
    hlo(f, *shapes)
    assert len(judged) == 1
    f, shapes = layers([1024 + 64 * (i % 26) for i in range(51)])
    assert len(calls(hlo(f, *shapes))) == 50 and len(judged) == len(set(judged)) > 20


def test_a_ladder_is_not_kept_beyond_a_build_a_tuning_or_a_library(have, tmp_path, judged, monkeypatch):
    asked = Asked(PROBLEM, "h200")
    have(entry(SMALL))
    assert choose(asked).entry.variant.tile == SMALL
    time.sleep(0.01)  # of another time on a coarse clock
    have(entry(SMALL), entry(BEST))
    assert choose(asked).entry.variant.tile == BEST
    (tmp_path / f"{entry(BEST).name}.cubin").unlink()
    assert choose(asked).entry.variant.tile == SMALL
    before = len(judged)
    choose(asked)
    assert len(judged) == before
    monkeypatch.setattr(attempts, "why_not_launched", lambda is_emulated: "the library is gone")
    choose(asked)
    assert len(judged) > before


def test_weak_types_promote_as_in_jax(quiet):
    weak, strong = jnp.full((4, 4), 1.5), jnp.ones((4, 4), jnp.bfloat16)
    assert weak.weak_type
    for a, b in ((weak, strong), (strong, weak), (weak, weak), (weak, jnp.ones((4, 4), jnp.float16))):
        got, want = jax_bwgemm.matmul(a, b), jnp.matmul(a, b)
        assert got.dtype == want.dtype == jax.jit(jax_bwgemm.matmul)(a, b).dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert jax_bwgemm.matmul(strong, weak, out_dtype=jnp.float32).dtype == jnp.float32


def test_ranks_are_promoted_in_so_many_words(quiet):
    x, w, bias = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.ones(6)

    def loss(x, w, bias):
        return jax_bwgemm.matmul(x, w, bias=bias, activation="silu", alpha=0.5).sum()

    with jax.numpy_rank_promotion("raise"):
        jax.grad(loss, argnums=(0, 1, 2))(x, w, bias)
        jax.vmap(loss, in_axes=(0, None, None))(x[None], w, bias)
        jax.vmap(loss, in_axes=(None, None, 0))(x, w, bias[None])


@pytest.mark.parametrize(
    "a, b", [((4, 8, 4, 128, 64), (4, 8, 1, 64, 96)), ((2, 3, 4, 16, 8), (2, 1, 1, 8, 24)), ((5, 16, 8), (1, 8, 24))]
)
def test_what_a_group_of_heads_shares_is_not_repeated(artifacts_dir, quiet, a, b):
    text = hlo(matmul, struct(*a), struct(*b))
    assert len(calls(text)) == 1 and "broadcast" not in text and "transpose" not in text
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (a, b))
    np.testing.assert_allclose(jax_bwgemm.matmul(x, y), jnp.matmul(x, y), rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_said(no_artifacts):
    with pytest.raises(ValueError, match="requires the last dimension"):
        jax_bwgemm.matmul(jnp.ones((4, 4), jnp.int32), jnp.ones((5, 4), jnp.int32))
    assert (
        hlo(lambda x, w: jax_bwgemm.matmul(x, w, on_fallback="ignore", device="h200"), X, W).count("dot_general") == 1
    )
