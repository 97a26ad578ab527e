"""What a benchmark computes with our kernels: what it asks of them, and which it finds in the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.bench import products, programs
from jax_bwgemm.bench.cases import Case


@pytest.mark.parametrize(
    ("epilogue", "taken"),
    [
        ("", {}),
        ("bias+gelu", {"bias": True, "activation": "gelu"}),
        ("relu+residual", {"activation": "relu", "residual": True}),
        ("bias+silu+residual", {"bias": True, "activation": "silu", "residual": True}),
    ],
)
def test_ours_fuses_what_kernels_take(epilogue: str, taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def matmul(a: Any, b: Any, *, out_dtype: Any, on_fallback: str, **fused: Any) -> Any:
        assert (out_dtype, on_fallback) == (jnp.float32, "error")
        calls.append({name: x if name == "activation" else True for name, x in fused.items() if x is not None})
        return jnp.zeros((8, 8), out_dtype)

    monkeypatch.setattr(jax_bwgemm, "matmul", matmul)
    case = Case(8, 8, 8, out_dtype="float32", epilogue=epilogue)
    products.ours(case, "error")(**programs.make_operands(case, 1)[0])
    assert calls == [taken]


def test_ours_has_one_product_of_two_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax_bwgemm, "gated_matmul", lambda *operands, **settings: calls.append((*operands, settings)))
    case = Case(8, 16, 24, form="nt", epilogue="swiglu")
    (operands,) = programs.make_operands(case, 1)
    products.ours(case, "error")(**operands)
    ((a, gate, up, settings),) = calls
    for got, want in ((a, operands["a"]), (gate, operands["b"].T), (up, operands["up"].T)):
        np.testing.assert_array_equal(got, want)
    assert settings == {"activation": "silu", "out_dtype": jnp.bfloat16, "on_fallback": "error"}


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "kernels"),
    [
        ("bfloat16", "", ["bf16_bf16_bf16_knn"]),
        ("float32", "", ["f32_f32_f32_mkm"]),
        ("int8", "int32", ["s8_s8_s32_mkm"]),
        ("int8", "", []),
    ],
)
def test_our_kernels_are_seen_in_the_lowered_program(
    dtype: str, out_dtype: str, kernels: list[str], artifacts_dir: Path
) -> None:
    case = Case(512, 1024, 256, dtype=dtype, out_dtype=out_dtype)
    operands = [{name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in case.operands.items()}] * 2
    with jax_bwgemm.config(device="h200"):
        traced = jax.jit(programs._each(products.ours(case, "ignore"))).trace(operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = programs.variants(text)
    assert re.findall(r"sm_90a_(\w+?_[kmn]{3})_", " ".join(found)) == kernels
