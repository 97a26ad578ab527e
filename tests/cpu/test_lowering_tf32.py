"""float32 on Hopper, which reads A under either major and B k-major only: what is swapped and what is repacked."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from lowered import calls, hlo, matmul, struct, swizzles

import jax_bwgemm


def array(*shape):
    return struct(*shape, dtype=jnp.float32)


def product_over_rows(x, y):
    dims = (((0,), (0,)), ((), ()))
    return jax_bwgemm.dot_general(x, y, dims, device="h200", on_fallback="error")


def kernels(text: str) -> list[str]:
    """The majors of each kernel's a, b and result."""
    return ["".join(call[f"{x}_major"] for x in "abc") for call in calls(text)]


def transposed(text: str) -> list[str]:
    """The type of what each of our passes transposes."""
    lines = [line for line in text.splitlines() if "@jax_bwgemm_repack_v2" in line]
    assert all('kind = "transpose"' in line for line in lines)
    return [re.search(r": \(tensor<1x(\w+)xf32>\)", line)[1] for line in lines]


@pytest.mark.parametrize(
    "f, shapes, kernel",
    [
        (matmul, [(512, 256), (256, 1024)], "mkm"),
        (lambda x, w: matmul(x, w.T), [(512, 256), (1024, 256)], "kkn"),
        (lambda x, w: matmul(x.T, w.T), [(256, 512), (1024, 256)], "mkn"),
        (lambda x, w: matmul(x, w * 2), [(512, 256), (256, 1024)], "mkm"),
        (matmul, [(8, 256), (256, 1024)], "mkm"),
    ],
)
def test_no_pass_over_an_operand(repacks_dir, f, shapes, kernel):
    text = hlo(f, *map(array, *zip(*shapes, strict=True)))
    assert (kernels(text), transposed(text)) == ([kernel], [])
    assert "dot_general" not in text


def test_the_kernel_gets_the_operands_swapped(repacks_dir):
    (call,) = calls(hlo(matmul, array(512, 256), array(256, 1024)))
    assert call["types"] == "(tensor<1x256x1024xf32>, tensor<1x512x256xf32>) -> tensor<1x512x1024xf32>"
    assert swizzles(call) == [(128, 16)] * 3


@pytest.mark.parametrize("sizes, kernel, source", [((512, 256), "mkn", "64x256"), ((256, 512), "mkm", "64x256")])
def test_a_gradient_transposes_the_smaller_operand(repacks_dir, sizes, kernel, source):
    """x^T dy: x (64, m) and dy (64, n), of which neither is k-major."""
    m, n = sizes
    text = hlo(product_over_rows, array(64, m), array(64, n))
    assert (kernels(text), transposed(text)) == ([kernel], [source])


def test_both_gradients_take_one_pass(repacks_dir):
    def pullback(x, w, ct):
        out, back = jax.vjp(matmul, x, w)
        return out, back(ct)

    text = hlo(pullback, array(512, 256), array(256, 1024), array(512, 1024))
    assert sorted(kernels(text)) == ["kkn", "mkm", "mkm"]
    assert transposed(text) == ["512x256"]
    assert "stablehlo.transpose" not in text and "dot_general" not in text


def test_a_bias_is_xlas_where_no_fused_kernel_ships(repacks_dir):
    """Here neither that of the swapped product nor that of k-major operands does."""
    text = hlo(lambda x, w, b: matmul(x, w, bias=b), array(512, 256), array(256, 1024), array(1024))
    assert (kernels(text), transposed(text)) == (["mkm"], []) and "stablehlo.add" in text


def test_the_users_tile_is_never_swapped(repacks_dir):
    text = hlo(lambda x, w: matmul(x, w, tile="128x128x32_cta1_cluster1x1"), array(512, 256), array(256, 1024))
    assert (kernels(text), transposed(text)) == (["kkn"], ["256x1024"])


def test_without_repacks_what_has_neither_k_major_is_xlas(artifacts_dir):
    with pytest.raises(jax_bwgemm.FallbackError, match="sm_90a requires a k-major b for float32"):
        hlo(product_over_rows, array(64, 512), array(64, 256))


def test_explained(repacks_dir):
    text = str(jax_bwgemm.explain(array(4096, 4096), array(4096, 4096), device="h200"))
    assert re.search(r"runs sm_90a_f32_f32_f32_mkm_\S+_identity, whose cubin", text)
    assert "C^T = B^T A^T: wgmma takes an n-major float32 b as its A only, from registers" in text
    out = [line for line in text.splitlines() if "out:" in line]  # ping-pongs whose registers A has, or odd widths
    reasons = "an accumulator requires at most", "`mma_n` requires 16 or a multiple of 32 for float32"
    assert "first:" not in text and all(any(reason in line for reason in reasons) for line in out)
