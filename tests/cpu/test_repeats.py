"""A product that a module has had before is emitted as it was then, and only where it would be."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from lowered import BF16, calls, hlo, majors, matmul, operand_barriers, struct

import jax_bwgemm
from jax_bwgemm.bench import lowerings
from jax_bwgemm.ops import choices
from jax_bwgemm.runtime import record

X = struct(256, 512)


@pytest.fixture
def chosen(monkeypatch, artifacts_dir):
    """The problems that a kernel was chosen for."""
    problems = []

    def choose(asked, *args):
        problems.append(asked.problem)
        return original(asked, *args)

    original = choices.choose
    monkeypatch.setattr(choices, "choose", choose)
    return problems


def emitted(text: str) -> list[str]:
    """Our calls but their locations and values: attributes and types."""
    return [re.sub(r"%\w+|#\d+", "", line) for line in text.splitlines() if "@jax_bwgemm_matmul_v2" in line]


def operands_of(text: str) -> list[tuple[str, ...]]:
    """The arguments of each of our calls, before they are reshaped."""
    reshaped = dict(re.findall(r"(%\d+) = stablehlo.reshape (%\w+) ", text))
    pairs = re.findall(r"custom_call @jax_bwgemm_matmul_v2\((%\w+), (%\w+)\)", text)
    return [tuple(reshaped.get(x, x) for x in pair) for pair in pairs]


def test_equal_products_are_chosen_for_once(chosen):
    text = hlo(lambda x, *ws: [matmul(x, w) for w in ws], X, *[struct(512, 256)] * 3)
    assert len(chosen) == 1
    once = emitted(hlo(matmul, X, struct(512, 256)))
    assert emitted(text) == once * 3
    values = [re.findall(r"custom_call @\w+\((.*?)\)", line)[0] for line in text.splitlines() if "@jax_bw" in line]
    assert len(set(values)) == 3


@pytest.mark.parametrize("settings", [{"tile": "64x64x64_cta1_cluster1x1"}, {"out_dtype": jnp.float32}, {"alpha": 0.5}])
def test_other_settings_are_another_product(chosen, settings):
    w = struct(512, 256)
    text = hlo(lambda x, w: [matmul(x, w), matmul(x, w, **settings)], X, w)
    assert len(chosen) == 2
    assert emitted(text) == [*emitted(hlo(matmul, X, w)), *emitted(hlo(lambda x, w: matmul(x, w, **settings), X, w))]


def test_other_majors_are_another_product(chosen):
    text = hlo(lambda x, w, v: [matmul(x, w), matmul(x, v.T), matmul(x, w), matmul(x, v.T)], X, *[struct(512, 512)] * 2)
    assert majors(text) == ["kn", "kk", "kn", "kk"] and len(chosen) == 2


def test_a_misaligned_slice_is_copied_and_others_are_not(chosen):
    """The second and the last start between two 16-byte units."""
    sliced = [(0, 512), (1, 513), (8, 520), (3, 515)]

    def f(x, ws):
        return [matmul(x, w[first:last].reshape(512, 8)) for w, (first, last) in zip(ws, sliced, strict=True)]

    assert operand_barriers(hlo(f, X, [struct(600, 8)] * 4)) == 0  # rows of 16 bytes
    flat = [(0, 512 * 8), (1, 512 * 8 + 1), (8, 512 * 8 + 8), (3, 512 * 8 + 3)]

    def g(x, ws):
        return [matmul(x, w[first:last].reshape(512, 8)) for w, (first, last) in zip(ws, flat, strict=True)]

    assert operand_barriers(hlo(g, X, [struct(5000)] * 4)) == 2


def test_a_loop_is_another_place(chosen):
    """What a scan stacks may be written where it lies; outside, a result is barred from that."""
    x = struct(512, 512)

    def f(x, w):
        y = matmul(matmul(x, w), w)
        return jax.lax.scan(lambda c, _: (matmul(c, w), None), y, None, length=3)[0]

    text = hlo(f, x, x)
    assert len(chosen) == 2 and len(calls(text)) == 3
    inside = text.partition("func.func private @closed_call")[2] or text.partition("stablehlo.while")[2]
    assert inside and "optimization_barrier" not in inside and text.count("optimization_barrier") == 2


def test_an_epilogue_of_xlas_is_emitted_again(chosen):
    """No kernel has a tanh with a residual: float32, then XLA."""
    w, r = struct(512, 256), struct(256, 256)

    def f(x, w, r):
        return [matmul(x, w, activation="tanh", residual=r) for _ in range(2)]

    with jax_bwgemm.config(compile_missing="never"):
        text = hlo(f, X, w, r)
    assert len(chosen) == 1 and len(calls(text)) == 2 and text.count("stablehlo.tanh") == 2


def test_each_is_listed_at_its_line(chosen):
    def f(x, w):
        y = jax_bwgemm.matmul(x, w, device="h200")
        return y + jax_bwgemm.matmul(x, w, device="h200")

    with record.listed() as products:
        hlo(f, X, struct(512, 256))
    first, second = products
    assert first.kernel == second.kernel and first.where != second.where


def test_what_xla_takes_over_is_said_each_time(artifacts_dir):
    jax_bwgemm.stats(reset=True)
    integers = struct(256, 256, dtype=jnp.int16)
    with jax_bwgemm.config(on_fallback="ignore"):
        hlo(lambda x: [jax_bwgemm.matmul(x, x, device="h200") for _ in range(2)], integers)
    assert sum(jax_bwgemm.stats().fallbacks.values()) == 2


def test_values(artifacts_dir):
    """Of what is emitted again, each result is its own product's: by the order of the operands."""
    text = hlo(lambda a, b, c: [matmul(a, b), matmul(c, b), matmul(a, c)], *[struct(256, 256, dtype=BF16)] * 3)
    assert operands_of(text) == [("%arg0", "%arg1"), ("%arg2", "%arg1"), ("%arg0", "%arg2")]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (3, 0, 1, 2)])
def test_one_array_twice_is_another_product(artifacts_dir, order):
    """Of x @ x, x.T @ x and the like, it cannot be told which operand a value was."""
    products = [lambda x, y: (x, x), lambda x, y: (x, y), lambda x, y: (y, y), lambda x, y: (y, x)]
    text = hlo(lambda *xy: [matmul(*products[i](*xy)) for i in order], *[struct(256, 256)] * 2)
    want = [("%arg0", "%arg0"), ("%arg0", "%arg1"), ("%arg1", "%arg1"), ("%arg1", "%arg0")]
    assert operands_of(text) == [want[i] for i in order]


def test_the_benchmark_prints_each_row(artifacts_dir, capsys):
    assert lowerings.main(rounds=1, num_products=3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(re.search(r"ours .* us  jnp .* us  [\d.]+ times$", line) for line in lines)
