"""What a caller may pass by mistake is told in a sentence that names it, and loses nothing without a word."""

from __future__ import annotations

import dataclasses
import itertools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jax_bwgemm
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.legality import why_not, why_not_anyhow
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.runtime.config import Config, resolve

PRESET = jax.lax.DotAlgorithmPreset
X = jnp.ones((64, 64), jnp.bfloat16)
DIMS = (((1,), (0,)), ((), ()))
ILLEGAL = "100x256x64_cta1_cluster2x1"  # no MMA has 100 rows


def matmul(a=X, b=X, **kwargs):
    return jax_bwgemm.matmul(a, b, **{"on_fallback": "ignore"} | kwargs)


def dot_general(a=X, b=X, precision=None, **kwargs):
    return jax_bwgemm.dot_general(a, b, DIMS, precision, **{"on_fallback": "ignore"} | kwargs)


@pytest.mark.parametrize(
    ("alpha", "error", "sentence"),
    [
        (10**400, ValueError, r"`alpha` requires a number of at most 1.8e\+308, which a float holds, got a larger int"),
        (-(10**5000), ValueError, "got a larger int: scale in steps"),  # Python refuses to print it
        (Fraction(10**400), ValueError, "got a larger Fraction: scale in steps"),
        (1j, TypeError, "`alpha` requires a Python number, got 1j"),
        (True, TypeError, "`alpha` requires a Python number, got True"),
    ],
    ids=["int", "unprintable", "fraction", "complex", "bool"],
)
def test_alpha(alpha, error, sentence):
    with pytest.raises(error, match=sentence):
        matmul(alpha=alpha)


@pytest.mark.parametrize("name", ["on_fallback", "device", "emulate", "compile_missing", "partial_sums"])
@pytest.mark.parametrize("value", [0, "", False, "nothing"])
def test_no_setting_passes_for_none(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` requires .*, got {re.escape(repr(value))}"):
        resolve(**{"on_fallback": None, "device": None} | {name: value})
    with pytest.raises(ValueError, match=f"`{name}` requires"), jax_bwgemm.config(**{name: value}):
        pass


def test_none_still_takes_the_default():
    with jax_bwgemm.config(on_fallback="ignore", device="h200", partial_sums="float32"):
        assert resolve(None, None, compile_missing="never") == Config("ignore", "h200", "off", "never", "float32")


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_an_imaginary_part_is_not_lost(name):
    x = jnp.full((64,) if name == "bias" else (64, 64), 1j, jnp.complex64)
    sentence = f"`{name}` requires real numbers for a result of bfloat16, got complex64: pass its real part"
    for given in (x, np.asarray(x)):
        with pytest.raises(ValueError, match=sentence):
            matmul(**{name: given})
    with pytest.raises(ValueError, match=sentence):
        jax_bwgemm.explain(X, X, device="h200", **{name: x})
    complex_x = X.astype(jnp.complex64)
    assert matmul(complex_x, complex_x, **{name: x})[0, 0] == 64 + 1j
    with pytest.raises(TypeError, match=f"`{name}` requires an array, got list"):
        matmul(**{name: x.tolist()})
    with pytest.raises(ValueError, match="`a` requires real numbers for a result of float32, got complex64"):
        matmul(1j * complex_x, complex_x, out_dtype=jnp.float32)
    assert dot_general(1j * complex_x, complex_x, preferred_element_type=jnp.float32).dtype == "float32"  # lax's own


@pytest.mark.parametrize("product", [matmul, dot_general])
def test_a_tile_that_nothing_can_run_is_refused_without_a_gpu(product):
    """Under jit, too; `tile` of a product that is XLA's whatever the tile is XLA's word."""
    for call in (product, jax.jit(product, static_argnames=("tile", "device"))):
        with pytest.raises(
            ValueError, match=rf"`tile` {ILLEGAL} cannot compute 64x64x64 .* on h100, h200: .*; on b200"
        ):
            call(tile=ILLEGAL)
        with pytest.raises(ValueError, match=rf"`tile` {ILLEGAL} cannot compute .* on b200: `mma_m` requires"):
            call(tile=ILLEGAL, device="b200")
    pair = "256x256x64_cta2_cluster2x1"
    assert product(tile=pair)[0, 0] == product(tile=pair, device="b200")[0, 0] == 64
    with pytest.raises(ValueError, match="on h200: `cta_group` requires 1"):
        product(tile=pair, device="h200")


def test_a_tile_that_some_layout_or_epilogue_can_run_passes():
    """As the lowering may find the operands transposed, and leaves an epilogue that has no kernel to XLA."""
    float32, split = jnp.ones((64, 60), jnp.float32), "128x128x64_cta1_cluster1x1x2"
    assert matmul(float32, float32.T, tile="128x128x32_cta1_cluster1x1", device="h200").shape == (64, 64)
    assert matmul(tile=split, residual=X, device="h200")[0, 0] == 65
    assert matmul(X[:0], tile=ILLEGAL).shape == (0, 64)


def test_any_way_is_one_of_those_that_are_legal():
    for problem, tile in itertools.product(
        (Problem(64, 64, 64), Problem(64, 61, 64, 3, *["float32"] * 3), Problem(8, 8, 8, 1, *["int8"] * 2, "int32")),
        (Tile(128, 128), Tile(128, 16, 32), Tile(64, 64, 128), Tile(256, 256, cta_group=2, cluster_m=2)),
    ):
        for arch in ARCHS.values():
            given = [
                Problem(
                    problem.m, problem.n, problem.k, problem.batch, problem.a_dtype, problem.b_dtype,
                    problem.out_dtype, *majors,
                )
                for majors in itertools.product(A_MAJORS, B_MAJORS)
            ]  # fmt: skip
            if any(why_not(tile, way, arch) is None for way in given):
                assert why_not_anyhow(tile, problem, [arch]) is None
            elif reason := why_not_anyhow(tile, problem, [arch]):
                assert reason == f"on {arch.name}: {why_not(tile, problem, arch)}"


@pytest.mark.parametrize("precision", [PRESET.ANY_F8_ANY_F8_F32, PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM])
@pytest.mark.parametrize("dtypes", [*itertools.product(("float8_e5m2", "float8_e4m3fn"), repeat=2)], ids="-".join)
def test_a_float8_algorithm_is_no_error_where_xla_computes(dtypes, precision):
    """JAX refuses these algorithms on a CPU, and XLA:GPU that of two float8_e5m2."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(48, 48)), dtype) for dtype in dtypes)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    for got in (
        matmul(a, b, out_dtype=jnp.float32, precision=precision),
        dot_general(a, b, precision, preferred_element_type=jnp.float32),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_xla_is_asked_for_float32_sums_by_a_precision_that_it_knows():
    """For CUDA, whose fallback of an odd size with no kernel at hand this is."""
    a = jax.ShapeDtypeStruct((64, 64), jnp.float8_e5m2)

    def text(precision):
        f = jax.jit(lambda a, b: matmul(a, b, precision=precision, out_dtype=jnp.float32, device="b300"))
        with jax_bwgemm.config(compile_missing="never"):
            return f.trace(a, a).lower(lowering_platforms=("cuda",)).as_text()

    promoted, fast = text(PRESET.ANY_F8_ANY_F8_F32), text(PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM)
    assert "algorithm" not in promoted + fast
    assert "precision = [HIGHEST, HIGHEST]" in promoted and "HIGHEST" not in fast


def test_out_sharding():
    with pytest.raises(TypeError, match="`out_sharding` requires a `NamedSharding` or a `PartitionSpec`, got 3"):
        matmul(out_sharding=3)
    sentence = r"`out_sharding` requires a current mesh for a `PartitionSpec`, got P\('x',\) and none: call it under"
    with pytest.raises(ValueError, match=sentence):
        matmul(out_sharding=jax.sharding.PartitionSpec("x"))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Tile)])
def test_a_tile_has_the_types_of_its_fields(name):
    """64.0 equals 64 and has its hash: one such tile would be found for all others in every cache."""
    is_flag = isinstance(getattr(Tile(64, 64), name), bool)
    wrong = (1, 0, None, "True", np.True_) if is_flag else (64.0, True, "64", None, 0, -64, np.int64(64), 2.5)
    for value in wrong:
        with pytest.raises(ValueError, match=f"`{name}` of a tile requires .*, got {re.escape(repr(value))}"):
            dataclasses.replace(Tile(64, 64), **{name: value})


def test_no_tile_poisons_another():
    with pytest.raises(ValueError, match="`mma_m` of a tile requires an int of at least 1, got 64.0"):
        jax_bwgemm.explain(X, X, tile=Tile(64.0, 64.0), device="h200")
    text = str(jax_bwgemm.explain(X, X, tile=Tile(64, 64), device="h200"))
    assert "64x64x64_cta1_cluster1x1" in text and "64.0" not in text


@pytest.mark.parametrize(
    ("tile", "error", "sentence"),
    [
        ("128x256x64_cta0_cluster2x1", ValueError, "`cta_group` of a tile requires an int of at least 1, got 0"),
        ("0x256x64_cta1_cluster2x1", ValueError, "`mma_m` of a tile requires an int of at least 1, got 0"),
        ("128x256x64_acc0_cta1_cluster2x1", ValueError, "`num_accs` of a tile requires an int of at least 1, got 0"),
        ("128x256x64_cta1_cluster0x1", ValueError, "`cluster_m` of a tile requires an int of at least 1, got 0"),
        ("128x256x64_cta1_cluster1x1x0", ValueError, "`cluster_k` of a tile requires an int of at least 1, got 0"),
        ("١28x256x64_cta1_cluster2x1", ValueError, "`tile` requires the form '128x256x64_cta1_cluster2x1', got '١28x"),
        ("", ValueError, "`tile` requires the form '128x256x64_cta1_cluster2x1', got ''"),
        (5, TypeError, "`tile` requires a `Tile` or its name, got 5"),
        (0, TypeError, "`tile` requires a `Tile` or its name, got 0"),
        ([Tile(64, 64)], TypeError, r"`tile` requires a `Tile` or its name, got \[Tile\("),
    ],
)
def test_what_is_no_tile(tile, error, sentence):
    calls = (matmul, dot_general, lambda **kw: jax_bwgemm.explain(X, X, **kw))
    for call in calls:
        with pytest.raises(error, match=sentence):
            call(tile=tile, device="h200")
    if not isinstance(tile, str):
        with pytest.raises(TypeError, match=sentence):
            Tile.from_str(tile)


def test_no_text_is_no_tile():
    with pytest.raises(TypeError, match="`tile` requires a `Tile` or its name, got None"):
        Tile.from_str(None)


@pytest.mark.parametrize(
    ("device", "meant"),
    [("H200", "h200"), ("gh200", "h200"), ("gb200", "b200"), ("GB300", "b300"), ("NVIDIA H100 80GB HBM3", "h100"),
     (["h200"], "h200"), ({"h200": 1}, "h200"), ("a100", None), (b"", None), (90, None)],
    ids=str,
)  # fmt: skip
def test_what_is_no_device(device, meant):
    sentence = f"`device` requires one of h100, h200, b200, b300, got {re.escape(repr(device))}"
    for call in (matmul, dot_general, lambda **kw: jax_bwgemm.explain(X, X, **kw)):
        with pytest.raises(ValueError, match=sentence + (f": pass '{meant}'$" if meant else "$")):
            call(device=device)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "mb"),
    [("int16", None, 0.02458), ("complex64", None, 0.0983), ("bool", None, 0.01229), ("float32", "int16", 0.04096),
     ("uint32", None, 0.04915), ("int4", None, 0.01229), ("float8_e4m3b11fnuz", "float16", 0.01638)],
)  # fmt: skip
def test_what_no_kernel_takes_is_explained(dtype, out_dtype, mb):
    x = jax.ShapeDtypeStruct((64, 64), dtype)
    text = str(jax_bwgemm.explain(x, x, out_dtype=out_dtype, device="h200"))
    assert f" {dtype}*{dtype}->{out_dtype or dtype} " in text and f" {mb:.4g} MB)" in text
    assert "runs XLA's dot_general, because" in text
    assert matmul(jnp.ones((4, 4), dtype), jnp.ones((4, 4), dtype), out_dtype=out_dtype).shape == (4, 4)


def test_float64_is_explained():
    x = jax.ShapeDtypeStruct((64, 64), np.dtype("float64"))
    with jax.enable_x64(True):
        assert "float64*float64->float64" in str(jax_bwgemm.explain(x, x, device="h200"))


@pytest.mark.parametrize("bad", [[1.0], "x", None])
def test_explain_of_no_array(bad):
    for a, b in ((bad, X), (X, bad)):
        with pytest.raises(TypeError, match="`[ab]` requires an array, got"):
            jax_bwgemm.explain(a, b, device="h200")
    with pytest.raises(ValueError, match="requires"):
        jax_bwgemm.explain(1.0, X, device="h200")  # a scalar has no k


def test_explain_of_two_arrays_has_no_epilogue():
    with pytest.raises(
        TypeError, match=r"settings out of out_dtype, .*, got epilogue: explain a function, as in explain"
    ):
        jax_bwgemm.explain(X, X, epilogue=jnp.tanh, device="h200")


NO_NUMBERS = {
    "key": lambda: jax.random.split(jax.random.key(0), (64, 64)),
    "object": lambda: np.full((64, 64), None),
    "str": lambda: np.full((64, 64), "1"),
    "datetime": lambda: np.full((64, 64), "2020", "datetime64[s]"),
    "timedelta": lambda: np.full((64, 64), 1, "timedelta64[s]"),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_arrays_of_no_numbers(name):
    x = NO_NUMBERS[name]()
    sentence = rf" requires an array of numbers, got one of {re.escape(str(x.dtype))}"
    for argument in ("a", "b", "bias", "residual"):
        given = {argument: x[0] if argument == "bias" else x}
        with pytest.raises(TypeError, match=f"`{argument}`{sentence}"):
            matmul(**given)
        if argument not in ("a", "b"):
            with pytest.raises(TypeError, match=f"`{argument}`{sentence}"):
                jax_bwgemm.explain(X, X, device="h200", **given)
    with pytest.raises(TypeError, match=rf"`operands\[0\]`{sentence}"):
        matmul(epilogue=jnp.add, operands=(x,))
    with pytest.raises(TypeError, match=f"`lhs`{sentence}"):
        dot_general(x)


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (sparse.BCOO.fromdense(jnp.eye(64)), "BCOO"),
        (
            jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
            r"ShapeDtypeStruct\(.*: `explain` and `jax.eval_shape` take those",
        ),
        ([[1.0]], "list"),
        (((1.0,),), "tuple"),
    ],
    ids=["sparse", "shape", "list", "tuple"],
)
def test_what_is_no_array(x, got):
    for argument in ("a", "b", "residual"):
        with pytest.raises(TypeError, match=f"`{argument}` requires an array, got {got}"):
            matmul(**{argument: x})
    with pytest.raises(TypeError, match=f"`rhs` requires an array, got {got}"):
        dot_general(b=x)


def test_operands_are_a_sequence():
    for operands in (jnp.ones(4), X, 1.0):
        with pytest.raises(TypeError, match=r"`operands` requires a sequence of arrays, got .*: pass \(operand,\)"):
            matmul(epilogue=jnp.add, operands=operands)


@pytest.mark.parametrize("precision", [{}, {"highest"}, [["high"], "high"], ([], [])], ids=str)
def test_a_precision_that_cannot_be_hashed(precision):
    for call in (lambda: matmul(precision=precision), lambda: dot_general(precision=precision)):
        with pytest.raises(ValueError, match="Precision argument must be one of"):
            call()


@pytest.mark.parametrize("dtype", ["object", "U3", "datetime64[s]", "timedelta64[s]", np.longdouble], ids=str)
def test_out_dtypes_that_jax_does_not_have(dtype):
    for call in (matmul, lambda **kw: jax_bwgemm.explain(X, X, device="h200", **kw)):
        with pytest.raises(TypeError, match="`out_dtype` requires a dtype of JAX's numbers, got"):
            call(out_dtype=dtype)


@pytest.mark.parametrize("dtype", [float, "float64", np.float64], ids=str)
def test_a_float64_result_is_float32_where_jax_has_no_other(dtype):
    problem = jax_bwgemm.explain(X, X, out_dtype=dtype, device="h200").problem
    assert problem.out_dtype == "float32"
    assert matmul(out_dtype=dtype).dtype == "float32"
    with jax.enable_x64(True):
        assert matmul(out_dtype=dtype).dtype == "float64"


def test_explain_promotes_weak_types_as_matmul():
    weak = jnp.full((64, 64), 1.0)
    for a in (weak, jax.ShapeDtypeStruct(weak.shape, weak.dtype, weak_type=True)):
        for operands in ((a, X), (X, a)):
            assert "bfloat16*bfloat16->bfloat16" in str(jax_bwgemm.explain(*operands, device="h200"))
    assert "bfloat16*float32->float32" in str(jax_bwgemm.explain(X, jnp.ones((64, 64)), device="h200"))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_of_two_weak_types_the_result_is_weak(wrap):
    """It gives way to what it meets."""
    weak, whole, strong = jnp.full((64, 64), 1.0), jnp.full((64, 64), 2), jnp.ones((64, 64))
    for a, b in itertools.product((weak, whole, strong, X), repeat=2):
        got, want = (wrap(f)(a, b) for f in (matmul, jnp.matmul))
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
        np.testing.assert_array_equal(got, want)
        if a.dtype == b.dtype:
            got, want = (wrap(f)(a, b) for f in (dot_general, lambda a, b: jax.lax.dot_general(a, b, DIMS)))
            assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
    assert (wrap(matmul)(weak, weak) + X).dtype == "bfloat16"
    assert not wrap(lambda x: matmul(x, x, out_dtype=jnp.float32))(weak).weak_type
    assert not wrap(lambda x: matmul(x, x, residual=strong))(weak).weak_type
    assert wrap(lambda x: matmul(x, x, activation="relu"))(weak).weak_type
    assert jax.jvp(wrap(matmul), (weak, weak), (weak, weak))[1][0, 0] == 128
