"""Epilogues as expressions: their texts and names, that all readers know all operations, derivatives, further results;
and that an operation or a result is added by the seams of its rooms alone."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import calls, hlo, struct

import jax_bwgemm
from jax_bwgemm.bench.accuracy import FLOAT64
from jax_bwgemm.bench.accuracy import evaluate as in_float64
from jax_bwgemm.facts import epilogue
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import (
    ACC,
    ACTIVATIONS,
    ALPHA,
    BIAS,
    OPS,
    REDUCED,
    RESIDUAL,
    Apply,
    Epilogue,
    Input,
    Moves,
    Op,
    Reduction,
    chain,
    in_place,
    label,
    parse,
    split,
    steps,
    unfused,
)  # fmt: skip
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, buffers
from jax_bwgemm.ops import reference
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.planner.cycles import gate_cycles
from jax_bwgemm.runtime.config import Config

CHAINS = [
    chain(*fields) for fields in itertools.product((1.0, 2.0), (False, True), (None, *ACTIVATIONS), (False, True))
]
GATED = Apply("mul", (ACC, Apply("sigmoid", (ACC,))))
NEW = [name for name in ACTIVATIONS if name not in ("relu", "gelu", "silu")]


def test_texts() -> None:
    assert str(chain(2.0, True, "relu", True).out) == "add(relu(add(mul(acc, alpha), bias:n)), residual:mn)"
    for node in (*(found.out for found in CHAINS), *(found.transposed.out for found in CHAINS), GATED):
        assert parse(str(node)) == node
    for text in ("", "relu", "relu(", "relu(acc", "relu(acc))", "relu(acc, acc)", "add(acc)", "what(acc)", "acc acc"):
        if text != "relu":  # the name of a scalar
            with pytest.raises(ValueError, match="requires"):
                parse(text)


def test_names() -> None:
    assert [found.kind for found in (Epilogue(), chain(3.0, True), chain(1.0, True, "gelu_exact", True))] == [
        "identity", "scale_bias", "bias_gelu_exact_residual"
    ]  # fmt: skip
    assert len({found.kind for found in CHAINS}) == len(CHAINS)
    assert chain(2.0).kind == chain(3.0).kind != label(Apply("mul", (ACC, Input("beta", "scalar"))))
    digests = {label(node) for node in (GATED, Apply("add", (ACC, Input("shift", "n"))), Apply("add", (ACC, ACC)))}
    assert len(digests) == 3 and all(name.startswith("expr") for name in digests)
    assert chain(1.0, True).transposed.kind == "bias" and chain(1.0, True).transposed != chain(1.0, True)
    assert all(found.transposed.transposed == found for found in CHAINS)


def test_what_an_expression_requires() -> None:
    with pytest.raises(ValueError, match="an operation requires one of add, sub, mul"):
        Apply("cosine", (ACC,))
    with pytest.raises(ValueError, match="with its arguments, got add"):
        Apply("add", (ACC,))
    with pytest.raises(ValueError, match="a place of"):
        Input("bias", "k")
    with pytest.raises(ValueError, match=r"requires values of \['alpha'\], got \(\)"):
        Epilogue(Apply("mul", (ACC, ALPHA)))


def test_steps_and_the_affine_part() -> None:
    whole = chain(2.0, True, "relu", True)
    found = steps(whole.out)
    assert found is not None and [step.op for step in found] == ["mul", "add", "relu", "add"] and steps(GATED) is None
    inner, outer = split(whole)
    assert inner == chain(2.0, True) and outer == Epilogue(Apply("add", (Apply("relu", (ACC,)), RESIDUAL)))
    assert split(Epilogue(GATED)) == (Epilogue(), Epilogue(GATED))


def test_operands_and_results_have_roles() -> None:
    problem = Problem(
        8, 16, 32, 3, epilogue=dataclasses.replace(chain(1.0, True, None, True), seconds=(("sums", ACC),))
    )
    assert [(x.role, x.shape) for x in problem.extras] == [("bias", (16,)), ("residual", (3, 8, 16))]
    assert [(x.role, x.shape) for x in problem.results] == [("out", (3, 8, 16)), ("sums", (3, 8, 16))]
    swapped = problem.transposed
    assert [(x.role, x.shape) for x in swapped.extras] == [("bias", (16,)), ("residual", (3, 8, 16))]
    assert (swapped.m, swapped.n, swapped.c_major) == (16, 8, "m") and swapped.transposed == problem


def test_every_reader_knows_every_operation() -> None:
    assert OPS.keys() == reference.OPS.keys() == FLOAT64.keys()
    pytest.importorskip("cutlass", reason="needs CuTeDSL (the `build` extra)")
    from jax_bwgemm.kernels import epilogue as device
    from jax_bwgemm.kernels.expression import ARITHMETIC

    assert device.OPS.keys() == set(ACTIVATIONS) and device.OPS.keys() | ARITHMETIC.keys() == OPS.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_jax_means_what_float64_says(name: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 4001), [0.0, -0.0, np.inf]])
    got = np.asarray(reference.OPS[name](jnp.asarray(x, jnp.float32)), np.float64)
    np.testing.assert_allclose(got, FLOAT64[name](x), rtol=2e-5, atol=2e-6)
    assert np.isnan(reference.OPS[name](jnp.float32(np.nan)))


@pytest.mark.parametrize("name", NEW)
def test_new_activations_are_matmuls(quiet: None, name: str) -> None:
    """Forward and backward, in the fallback: those of the same JAX functions."""
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((24, 16), (16, 8), (8,)))

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, bias=bias, activation=name, alpha=0.5)

    def plain(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return reference.OPS[name](0.5 * (x @ w) + bias)

    np.testing.assert_allclose(ours(x, w, bias), plain(x, w, bias), rtol=1e-5, atol=1e-5)
    for f in (jax.grad, lambda f, argnums: jax.jacfwd(f, argnums)):
        got, want = (f(lambda *args, g=g: g(*args).sum(), argnums=(0, 1, 2))(x, w, bias) for g in (ours, plain))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)
    mapped = jax.vmap(ours, in_axes=(0, None, None))(x[None], w, bias)
    np.testing.assert_allclose(mapped[0], plain(x, w, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_without_a_kernel_the_product_is_one(artifacts_dir: Path, name: str, device: str) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, activation=name, device=device, on_fallback="error")

    (call,) = calls(hlo(f, struct(512, 256), struct(256, 1024)))
    assert call["variant"].endswith("_identity") and "_f32_" in call["variant"]


SETTINGS = {
    "contraction": Contraction("lmk", "lkn", "lmn"),
    "tile": None,
    "precision": None,
    "out_sharding": None,
    "settings": Config("ignore"),
}


def results(of: Epilogue, *operands: jax.Array, out_dtype: str = "float32") -> tuple[jax.Array, ...]:
    a, b, *extras = operands
    places = {"n": "n", "mn": "lmn"}
    contraction = Contraction("lmk", "lkn", "lmn", tuple(places[x.place] for x in of.operands))
    settings = SETTINGS | {"contraction": contraction, "out_dtype": jnp.dtype(out_dtype)}
    return fused_product(a, b, extras, epilogue=of, **settings)


def test_only_a_second_result() -> None:
    """The pre-activation beside the result: every transformation has both, and on CUDA a kernel the product."""
    affine = chain(0.5, True)
    both = Epilogue(Apply("silu", (affine.out,)), affine.scalars, seconds=(("before", affine.out),))
    rng = np.random.default_rng(0)
    shapes = ((2, 8, 16), (2, 16, 24), (24,))
    a, b, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def plain(a: jax.Array, b: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = 0.5 * (a @ b) + bias
        return jax.nn.silu(before), before

    def ours(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return results(both, *operands)

    def close(got: object, want: object) -> None:
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)

    close(ours(a, b, bias), plain(a, b, bias))
    close(jax.jit(ours)(a, b, bias), plain(a, b, bias))
    for f, g in ((ours, plain), (lambda *x: ours(*x)[1:], lambda *x: plain(*x)[1:])):
        losses = [lambda *x, h=h: sum((y**2).sum() for y in h(*x)) for h in (f, g)]  # type: ignore[misc]
        close(*(jax.grad(loss, argnums=(0, 1, 2))(a, b, bias) for loss in losses))
    close(*(jax.vmap(f, in_axes=(0, None, None))(jnp.stack([a, 2 * a]), b, bias) for f in (ours, plain)))
    close(*(jax.vmap(f, in_axes=(None, None, 0))(a, b, jnp.stack([bias, 2 * bias])) for f in (ours, plain)))
    close(*(jax.jvp(f, (a, b, bias), (a, b, bias)) for f in (ours, plain)))


def test_a_second_result_on_cuda(artifacts_dir: Path) -> None:
    both = Epilogue(Apply("tanh", (ACC,)), seconds=(("before", ACC),))
    how = Config("error", "h200", compile_missing="never")
    settings = SETTINGS | {"settings": how, "out_dtype": jnp.dtype("bfloat16")}

    def f(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return fused_product(a, b, (), epilogue=both, **settings)

    text = hlo(f, struct(1, 512, 256), struct(1, 256, 1024))
    (call,) = calls(text)
    assert call["variant"].endswith("_identity") and call["types"].endswith("xbf16>") and "dot_general" not in text
    assert "-> (tensor<1x512x1024xbf16>" in text and "xf32> -> " not in call["types"]


def test_any_expression_has_derivatives() -> None:
    """Not a chain: the sums twice, and a matrix that multiplies."""
    scaled = Apply("mul", (GATED, Input("gate", "mn")))
    rng = np.random.default_rng(0)
    a, b, gate = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 16), (1, 16, 24), (1, 8, 24))
    )

    def ours(a: jax.Array, b: jax.Array, gate: jax.Array) -> jax.Array:
        return results(Epilogue(scaled), a, b, gate)[0].sum()

    def plain(a: jax.Array, b: jax.Array, gate: jax.Array) -> jax.Array:
        x = a @ b
        return (x * jax.nn.sigmoid(x) * gate).sum()

    for argnums in ((0, 1, 2), (2,), (0,)):
        got, want = (jax.grad(f, argnums=argnums)(a, b, gate) for f in (ours, plain))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


@pytest.fixture
def softsign(monkeypatch: pytest.MonkeyPatch) -> Apply:
    """An operation that only this file knows: an entry in each room."""
    monkeypatch.setitem(epilogue.OPS, "softsign", Op(1, 1, 1))
    monkeypatch.setitem(reference.OPS, "softsign", jax.nn.soft_sign)
    monkeypatch.setitem(FLOAT64, "softsign", lambda x: x / (1 + np.abs(x)))
    return Apply("softsign", (Apply("add", (ACC, BIAS)),))


def test_only_an_operation(softsign: Apply) -> None:
    assert label(softsign) == "bias_softsign" and parse(str(softsign)) == softsign
    rng = np.random.default_rng(0)
    a, b, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 16), (1, 16, 24), (24,)))
    known = {"acc": np.asarray(a, np.float64) @ np.asarray(b, np.float64), "bias": np.asarray(bias, np.float64)}
    got = results(Epilogue(softsign), a, b, bias)[0]
    np.testing.assert_allclose(got, in_float64(softsign, known), rtol=1e-5, atol=1e-6)
    tile, problem = Tile(128, 128), Problem(4096, 4096, 4096, epilogue=Epilogue(softsign))
    assert gate_cycles(tile, problem, ARCHS["h200"]) == 128 * 128 / 16
    variant = Variant("sm_90a", *["bfloat16"] * 3, "k", "n", tile, softsign)
    assert Variant.from_json(variant.to_json()) == variant and variant.name.endswith("_bias_softsign")


def test_reductions_are_part_of_an_epilogue() -> None:
    """Of its inputs, its name, its cost, its transpose and its kernel; a chain in place it is no more."""
    relu, residual = Apply("relu", (ACC,)), Apply("square", (RESIDUAL,))
    sums = Reduction("total", "sum", "n", relu), Reduction("largest", "max", "m", residual)
    found = Epilogue(relu, reductions=sums)
    assert found.operands == (RESIDUAL,) and found.num_matrices == 1 and found.moves == Moves(1, 1, 2)
    label_of = found.kind.removeprefix("relu_sumn_relu_maxm_expr")
    assert len(label_of) == 12 and found.kind != dataclasses.replace(found, reductions=sums[:1]).kind
    assert list(found.ops()) == [OPS["relu"], REDUCED, OPS["square"], REDUCED]
    assert [x.place for x in found.transposed.reductions] == ["m", "n"] and found.transposed.transposed == found
    assert in_place(found) is None and split(found) == (Epilogue(), found) and unfused(found) == (Epilogue(), found)
    variant = Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile(128, 128), relu, reductions=sums)
    assert Variant.from_json(variant.to_json()) == variant and variant.steps == found
    assert [str(x) for x in buffers(variant)[-2:]] == ["total:float32[l,m/16,n]%16", "largest:float32[l,n/32,m]%16"]
    for damaged in ([["total", "sum", "n"]], [["total", "sum", "n", 1]], "total", [["total", "mean", "n", "acc"]]):
        with pytest.raises(ValueError):
            Variant.from_json(variant.to_json() | {"reductions": damaged})


def test_only_an_operation_in_a_kernel(softsign: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="needs CuTeDSL (the `build` extra)")
    from cutlass import cute

    from jax_bwgemm.emulator import Schedule
    from jax_bwgemm.kernels import epilogue as device
    from tests.emu.check_variant import compiled
    from tests.emu.matmul import run_matmul

    def step(is_coarse: bool, is_halved: bool) -> device.Step:
        return device.Each(lambda v: v * cute.arch.rcp_approx(1.0 + cute.arch.fmax(v, -v)))

    monkeypatch.setitem(device.OPS, "softsign", step)
    module, facts = compiled(Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile(64, 32), softsign))
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((1, 60, 40), (1, 40, 24), (24,)))
    got, _ = run_matmul(module, facts, a, b, 1.0, bias, None, 1, 1, 0, Schedule.standard(0)[0])
    known = {"acc": a.astype(np.float64) @ b.astype(np.float64), "bias": bias.astype(np.float64)}
    np.testing.assert_allclose(got.astype(np.float64), in_float64(softsign, known), rtol=2.0**-7, atol=2.0**-10)
