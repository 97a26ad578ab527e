"""Which operands are repacked, and by what: sizes and grids, StableHLO for CUDA, what `explain` says."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from fake_artifacts import fake_repack
from lowered import calls, hlo, majors, matmul, swizzles
from lowered import struct as array

import jax_bwgemm
from jax_bwgemm.facts.repack import INT32_MAX, Repack

FP8, TILE = "float8_e4m3fn", "128x128x128_cta1_cluster1x1"
PAD, FLIP = Repack("sm_90a", "pad", 2), Repack("sm_90a", "transpose", 1)


def repacks(text: str) -> list[dict[str, str]]:
    """The attributes of our repacks, as text, with the operand and result types under "types"."""
    found = []
    for line in text.splitlines():
        if "@jax_bwgemm_repack_v2" in line:
            fields = dict(re.findall(r'(\w+) = ("[^"]*"|[^,{}]+)', line)) | {"types": line.rsplit(" : ", 1)[1]}
            found.append({name: value.strip('"') for name, value in fields.items()})
    return found


def num_pads(text: str) -> tuple[int, int]:
    """(ours, XLA's)."""
    return len(repacks(text)), text.count("stablehlo.pad")


@pytest.mark.parametrize(
    "kind, element_bytes, out, num_ctas",
    [
        ("pad", 1, (2, 3, 32), 1),
        ("pad", 2, (1, 4095, 4096), 4095),
        ("pad", 2, (1, 2, 8 * 256), 1),
        ("pad", 2, (1, 2, 8 * 257), 2),
        ("pad", 4, (1, 1, 4), 1),
        ("transpose", 1, (3, 257, 144), 3 * 2 * 3),
        ("transpose", 2, (1, 64, 128), 1),
        ("transpose", 2, (1, 64, 136), 2),
        ("transpose", 4, (1, 65, 128), 3),
    ],
)
def test_grids(kind, element_bytes, out, num_ctas):
    repack = Repack("sm_90a", kind, element_bytes)
    assert (repack.why_not(out), repack.num_ctas(out)) == (None, num_ctas)


@pytest.mark.parametrize("shape", [(0, 1, 8), (1, 1, INT32_MAX), (2**16, 2**16, 8), (1, INT32_MAX - 128, 16)])
def test_what_a_repack_cannot_count(shape):
    assert re.search(r"requires sizes of 1\.\.\d+ and at most \d+ chunks of 16 bytes, got ", PAD.why_not(shape))


def test_attributes(repacks_dir):
    text = hlo(lambda a, b: matmul(a, b, tile="128x256x64_cta1_cluster2x1"), array(512, 250), array(250, 1001))
    (both,) = repacks(text)
    entry = fake_repack(PAD)
    want = {
        "variant": "sm_90a_pad_16bit",
        "entry": "repack_symbol",
        "target": "sm_90a",
        "cubin_sha256": entry.cubin_sha256,
        "kind": "pad",
        "element_bytes": "2 : i32",
        "num_ctas": "95 : i32",
        "first_ctas": "32 : i32",
        "num_threads": "256 : i32",
        "smem_bytes": "0 : i32",
        "pdl": calls(text)[0]["pdl"],
    }
    assert {name: both.get(name) for name in want} == want
    config = next(line for line in text.splitlines() if "@jax_bwgemm_repack_v2" in line)
    assert set(re.findall(r"(\w+) = ", re.search(r"mhlo.backend_config = \{(.*?)\}", config)[1])) == set(want)
    padded = "tensor<1x512x256xbf16>, tensor<1x250x1024xbf16>"
    assert both["types"] == f"(tensor<1x512x250xbf16>, tensor<1x250x1001xbf16>) -> ({padded})"
    assert calls(text)[0]["types"].startswith("(tensor<1x512x256xbf16>, tensor<1x250x1024xbf16>)")
    assert "stablehlo.pad" not in text


X, W, SQUARE = array(512, 250), array(250, 1024), array(250, 250)


def looped(x, w):
    return jax.lax.scan(lambda c, v: (matmul(c, v), None), x, w)[0]


@pytest.mark.parametrize(
    "f, shapes, ours, xlas",
    [
        (matmul, (X, W), 1, 0),
        (lambda x, w: matmul(x[None], w)[0], (X, W), 1, 0),
        (lambda x, w: matmul(x * 2, w), (X, W), 0, 1),
        (lambda x, w: matmul(x.astype(jnp.bfloat16), w), (array(512, 250, dtype="float32"), W), 0, 1),
        (lambda x, w: matmul(jax.nn.relu(x), w), (X, W), 0, 1),  # a function of its own
        (lambda x, w: matmul(jax.jit(lambda x: x)(x), w), (X, W), 1, 0),  # of which nothing but the name is known
        (lambda x, w: matmul(matmul(x, x.T)[:, :250] + 1, w), (X, W), 1, 1),
        (lambda x, w: matmul(jnp.dot(x, jnp.ones((250, 250), x.dtype)), w), (X, W), 1, 0),
        (lambda x, w: matmul(x[3:300], w), (X, W), 1, 0),  # rows that lie together
        (lambda x, w: matmul(x[:, 3:33], w[:30]), (X, W), 0, 1),
        (lambda x, w: matmul(x[::2], w), (X, W), 0, 1),
        (lambda x, w: matmul(jnp.ones_like(x), w), (X, W), 0, 1),
        (lambda x, w: matmul(jnp.concatenate([x, x]), w), (X, W), 0, 1),
        (looped, (X, array(6, 250, 250)), 2, 0),
    ],
)
def test_who_pads(repacks_dir, f, shapes, ours, xlas):
    """We do what lies in memory, XLA what it can make with its zeros."""
    assert num_pads(hlo(f, *shapes)) == (ours, xlas)


def test_an_unaligned_slice_is_repacked_from_where_it_is(repacks_dir):
    flat = array(250 * 66)
    text = hlo(lambda x, p: matmul(x, p[3 : 3 + 250 * 65].reshape(250, 65)), array(80, 250), flat)
    assert num_pads(text) == (1, 0) and "optimization_barrier" not in text


def gated(x, w):
    return jax_bwgemm.gated_matmul(x, w, w, activation="silu", on_fallback="error", device="h200")


def apart(x, w):
    return jax.lax.scan(lambda c, v: (matmul(c, w), None), x, length=6)[0]


@pytest.mark.parametrize(
    "f, shapes, launches",
    [
        (matmul, (X, array(250, 1001)), 1),
        (lambda x, w: matmul(x + 1, w), (X, array(250, 1001)), 1),  # XLA pads what it makes
        (apart, (X, SQUARE), 2),  # XLA may pad the weights once, before the loop
        (matmul, (array(4001, 1001), array(1001, 37)), 1),  # 8.3 MB in all: 2^23 bytes are 8.4 million
        (matmul, (array(4001, 1051), array(1051, 37)), 2),
        (gated, (X, array(250, 1001)), 2),
    ],
)
def test_who_is_padded_together(repacks_dir, f, shapes, launches):
    """Both operands of a small product outside of loops; of a gated one a and the first b."""
    assert len(repacks(hlo(f, *shapes))) == launches


def test_without_repacks_xla_pads(artifacts_dir):
    assert num_pads(hlo(matmul, X, W)) == (0, 1)


def test_what_a_repack_cannot_count_is_xlas(repacks_dir):
    f = functools.partial(matmul, out_dtype=jnp.float32, tile="128x128x64_cta1_cluster1x1")
    text = hlo(f, array(1, 2**31 - 66), array(2**31 - 66, 8))
    assert num_pads(text) == (0, 1) and len(calls(text)) == 1


def fp8(*shape):
    return array(*shape, dtype=FP8)


def fp8_matmul(a, b, **options):
    return matmul(a, b, out_dtype=jnp.bfloat16, **options)


@pytest.mark.parametrize("dtype, out", [(FP8, "bfloat16"), ("int8", "int32")])
def test_hopper_gets_bytes_k_major_where_they_are_padded_anyway(repacks_dir, dtype, out):
    """Threads would store the transposed result. Also with the tile of the user, who need not know."""
    for tile in (None, TILE):
        f = functools.partial(matmul, out_dtype=out, tile=tile)
        text = hlo(f, array(512, 250, dtype=dtype), array(250, 1001, dtype=dtype))
        pad, flip = repacks(text)
        element = {FP8: "f8E4M3FN", "int8": "i8"}[dtype]
        assert (pad["kind"], flip["kind"], flip["smem_bytes"]) == ("pad", "transpose", "16384 : i32")
        assert flip["types"] == f"(tensor<1x250x1001x{element}>) -> tensor<1x1001x256x{element}>"
        assert flip["num_ctas"] == "16 : i32"
        assert majors(text) == ["kk"] and "stablehlo.transpose" not in text and "dot_general" not in text


def product_over_rows(x, y):
    options = {"device": "h200", "on_fallback": "error", "preferred_element_type": jnp.bfloat16}
    return jax_bwgemm.dot_general(x, y, (((0,), (0,)), ((), ())), **options)


@pytest.mark.parametrize(
    "f, shapes, kernel, flipped",
    [
        (lambda x, w: fp8_matmul(x, w.T), (fp8(512, 256), fp8(1024, 256)), "kkn", []),
        (fp8_matmul, (fp8(512, 256), fp8(256, 1024)), "mkm", []),
        (lambda x, w: fp8_matmul(x.T, w.T), (fp8(256, 512), fp8(1024, 256)), "mkn", []),
        (lambda x, w: fp8_matmul(x, (w * 2).astype(FP8)), (fp8(512, 256), fp8(256, 1024)), "mkm", []),
        (fp8_matmul, (fp8(8, 256), fp8(256, 1024)), "mkm", []),
        (fp8_matmul, (fp8(512, 250), fp8(250, 1024)), "mkm", []),  # x is padded
        (product_over_rows, (fp8(64, 512), fp8(64, 256)), "mkn", ["64x256"]),
        (product_over_rows, (fp8(64, 256), fp8(64, 512)), "mkm", ["64x256"]),
        (product_over_rows, (fp8(64, 256), fp8(64, 513)), "mkn", ["64x513"]),  # must be padded anyway
        (lambda x, w: fp8_matmul(x, w, tile=TILE), (fp8(512, 256), fp8(256, 1024)), "kkn", ["256x1024"]),
    ],
)
def test_no_more_is_transposed_than_must_be(repacks_dir, f, shapes, kernel, flipped):
    text = hlo(f, *shapes)
    (call,) = calls(text)
    assert "".join(call[f"{x}_major"] for x in "abc") == kernel
    transposes = [repack["types"] for repack in repacks(text) if repack["kind"] == "transpose"]
    assert [re.match(r"\(tensor<1x(\w+)xf8E4M3FN>\)", types)[1] for types in transposes] == flipped
    assert "dot_general" not in text


def test_the_kernel_gets_the_operands_swapped(repacks_dir):
    """Of mixed dtypes, and with sums in float32."""
    options = {"out_dtype": jnp.float32, "precision": jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32}
    x, w = array(512, 256, dtype="float8_e5m2"), fp8(256, 1024)
    (call,) = calls(hlo(functools.partial(matmul, **options), x, w))
    assert call["types"] == "(tensor<1x256x1024xf8E4M3FN>, tensor<1x512x256xf8E5M2>) -> tensor<1x512x1024xf32>"
    assert call["variant"].startswith("sm_90a_e4m3_e5m2_f32_mkm_") and "_promoted_" in call["variant"]
    assert [span for span, _ in swizzles(call)] == [128, 128, 128]


def test_blackwell_reads_any_major(repacks_dir):
    f = functools.partial(jax_bwgemm.matmul, out_dtype=jnp.bfloat16, device="b200", on_fallback="error")
    assert repacks(hlo(f, fp8(512, 256), fp8(256, 1024))) == []
    pads = repacks(hlo(f, fp8(512, 256), fp8(256, 1001)))
    assert [(repack["variant"], repack["types"]) for repack in pads] == [
        ("sm_100f_pad_8bit", "(tensor<1x256x1001xf8E4M3FN>) -> tensor<1x256x1024xf8E4M3FN>")
    ]


def test_without_repacks_bytes_of_which_none_are_k_major_are_xlas(artifacts_dir):
    with pytest.raises(jax_bwgemm.FallbackError, match="sm_90a requires a k-major b for float8_e4m3fn"):
        hlo(product_over_rows, fp8(64, 512), fp8(64, 256))


def test_gradients_of_float8(repacks_dir):
    """The forward product's x is repacked; those of the gradients have two bytes, widened, which XLA pads as it does
    so."""

    def pullback(x, w, ct):
        out, back = jax.vjp(fp8_matmul, x, w)
        return out, back(ct)

    text = hlo(pullback, fp8(512, 250), fp8(250, 1024), array(512, 1024))
    assert [repack["kind"] for repack in repacks(text)] == ["pad"]
    assert sorted(majors(text)) == ["kk", "mk", "mn"] and "dot_general" not in text
    assert num_pads(text)[1] == 1


def test_an_epilogue_that_is_xlas(repacks_dir):
    w, residual = array(256, 1024, dtype="float8_e5m2"), array(512, 1024)
    text = hlo(lambda x, w, r: fp8_matmul(x, w, residual=r), fp8(512, 256), w, residual)
    assert [repack["kind"] for repack in repacks(text)] == ["transpose"] and majors(text) == ["kk"]
    assert calls(text)[0]["types"].endswith("tensor<1x512x1024xf32>") and "stablehlo.add" in text
    told = str(jax_bwgemm.explain(fp8(512, 256), w, device="h200", out_dtype=jnp.bfloat16, residual=residual))
    assert "XLA:   the epilogue, residual of a float32 product: no cubin sm_90a_e4m3_e5m2_bf16_kkn_" in told
    assert "first: b from n-major to k-major by sm_90a_transpose_8bit" in told


def test_under_vmap_and_in_shard_map(repacks_dir):
    text = hlo(jax.vmap(fp8_matmul), fp8(3, 512, 256), fp8(3, 256, 1024))
    assert repacks(text) == [] and "tensor<3x256x1024xf8E4M3FN>, tensor<3x512x256" in calls(text)[0]["types"]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (jax.P("x"), jax.P(None, "y")), "out_specs": jax.P("x", "y")}
    text = hlo(jax.shard_map(fp8_matmul, mesh=mesh, **specs), fp8(64, 30), fp8(30, 66))
    assert [repack["types"] for repack in repacks(text)] == [
        "(tensor<1x32x30xf8E4M3FN>) -> tensor<1x32x32xf8E4M3FN>",
        "(tensor<1x30x33xf8E4M3FN>) -> tensor<1x33x32xf8E4M3FN>",
    ]


def test_explained(repacks_dir):
    text = str(jax_bwgemm.explain(X, W, device="h200"))
    assert "first: a padded by sm_90a_pad_16bit, or by XLA together with what makes it" in text
    both = str(jax_bwgemm.explain(X, array(250, 1001), device="h200"))
    for x in "ab":
        assert f"{x} padded by sm_90a_pad_16bit in one launch with the other operand, or by XLA" in both
    text = str(jax_bwgemm.explain(fp8(4096, 4096), fp8(4096, 8190), device="h200", out_dtype="bfloat16"))
    assert re.search(r"runs sm_90a_e4m3_e4m3_bf16_kkn_\S+_identity_threads, whose cubin", text)
    assert re.search(r"first: b from n-major to k-major by sm_90a_transpose_8bit, predicted as \d+\.\d us on top", text)
    assert "XLA:" not in text
    assert "first:" not in str(jax_bwgemm.explain(fp8(64, 64), fp8(64, 64), device="b200", out_dtype="bfloat16"))


def test_explained_without_repacks(artifacts_dir):
    assert "first: a padded by XLA\n" in f"{jax_bwgemm.explain(X, W, device='h200')}\n"
    text = str(jax_bwgemm.explain(fp8(64, 64), fp8(64, 64), device="h200", out_dtype="bfloat16"))
    assert "C^T = B^T A^T: wgmma takes an n-major float8_e4m3fn b as its A only, from registers" in text
    text = str(jax_bwgemm.explain(fp8(65, 64), fp8(64, 65), device="h200", out_dtype="bfloat16"))
    assert "runs XLA's dot_general, because sm_90a requires a k-major b for float8_e4m3fn" in text
