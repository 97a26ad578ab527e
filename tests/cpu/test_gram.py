"""Symmetric products: their tiles by hand, what computes them, and `gram` and `newton_schulz` against JAX."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, struct

import jax_bwgemm
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import AXPBY, Epilogue, axpby, chain, parse
from jax_bwgemm.facts.geometry import multiplied_flops, num_tiles, num_waves
from jax_bwgemm.facts.legality import why_not
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.recipe import map_sources
from jax_bwgemm.facts.resources import PLAIN, defers_store, moves_of
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, buffers, places, tensor_maps, variant_for, why_not_variant
from jax_bwgemm.kernels.scheduler import tile_order, triangle, triangle_coordinates, triangle_side
from jax_bwgemm.planner.cost import cost
from jax_bwgemm.planner.measured import key
from jax_bwgemm.planner.plan import plan

H200, B200 = ARCHS["h200"], ARCHS["b200"]
LARGE = Tile(128, 256, cluster_m=2, symmetric=True)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2, symmetric=True)
SQUARE = Problem(8192, 8192, 8192, b_major="k", symmetric=True)
gram = functools.partial(jax_bwgemm.gram, on_fallback="ignore")


def changed(**fields):
    return dataclasses.replace(SQUARE, **fields)


@pytest.mark.parametrize("snake", [0, 1])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 30])
def test_the_order_has_each_tile_of_the_triangle_once(group, snake):
    for side in (1, 2, 7, 8, 13):
        order, count = tile_order(side, side, group, 0, snake), triangle(side)
        found = [triangle_coordinates(i, order) for i in range(2 * count)]
        assert [x[:2] for x in found[:count]] == [x[:2] for x in found[count:]]
        assert sorted(found) == [(m, n, l_idx) for m, n, l_idx in sorted(found) if n <= m < side]
        assert len(set(found)) == 2 * count == side * (side + 1)
        assert {x[2] for x in found[:count]} == {0} and {x[2] for x in found[count:]} == {1}


def test_a_group_is_walked_rows_first_and_a_snake_turns_round():
    # Rows 2 and 3 follow rows 0 and 1, two at a time; what is beyond column 2 of them is one tile.
    order = [triangle_coordinates(i, tile_order(4, 4, 2, 0))[:2] for i in range(10)]
    assert order == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)]
    snake = [triangle_coordinates(i, tile_order(4, 4, 2, 0, 1))[:2] for i in range(10)]
    assert snake == [*order[:3], *order[:2:-1]]


def test_the_side_of_a_triangle_is_exact():
    assert [triangle_side(i) for i in range(11)] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    for side in (2, 46340, 46341, 65534, 65535):
        count = side * (side + 1) // 2
        assert (triangle(side), triangle_side(count), triangle_side(count - 1)) == (count, side, side - 1)
    assert triangle_side(2**31 - 1) == 65535


def test_counts_by_hand():
    # 8192 rows are 32 cluster tiles of 256: 32 * 33 / 2 of 1024 pairs, on 66 clusters of two SMs in 8 waves, not 16.
    plain = dataclasses.replace(LARGE, symmetric=False)
    assert (num_tiles(LARGE, SQUARE), num_tiles(plain, SQUARE)) == (528, 1024)
    assert (num_waves(LARGE, SQUARE, H200), num_waves(plain, SQUARE, H200)) == (8, 16)
    assert num_tiles(LARGE, changed(m=8200, n=8200, batch=3)) == 3 * 33 * 34 // 2
    assert SQUARE.flops == 8192 * 8193 * 8192  # of a triangle, as for BLAS's syrk
    assert multiplied_flops(LARGE, SQUARE) == 2 * 8192**3 * 528 / 1024
    assert SQUARE.min_bytes == 2 * 2 * 8192**2  # a once, and the result
    assert moves_of(LARGE, PLAIN) == (0, 2, 0) and moves_of(LARGE, chain(has_residual=True).moves) == (1, 2, 0)
    assert defers_store(LARGE, "bfloat16", "tma", "sm_90a", moves=moves_of(LARGE, PLAIN))


def test_a_variant_has_one_operand_and_two_maps_of_it():
    variant = variant_for(changed(epilogue=axpby(2.0, 3.0, True)), LARGE, "sm_90a")
    assert variant.name == "sm_90a_bf16_bf16_bf16_kkn_128x256x64_cta1_cluster2x1_symmetric_axpby"
    assert [buffer.role for buffer in buffers(variant)] == ["a", "residual", "out"]
    assert places(variant) == {"a": 0, "b": 0, "residual": 1, "out": 2}
    maps = tensor_maps(variant)
    assert map_sources(maps) == ("tma:0", "tma2:0", "tma:1", "tma:2", "tma2:2")
    # A CTA's 128 rows of a, and half of 256 columns of b, which its cluster shares; boxes of 64 rows and 32 columns,
    # and their images, whose 64 rows lie beside each other.
    assert [facts.box for facts in maps] == [(64, 128, 1), (64, 128, 1), (32, 64, 1), (32, 64, 1), (64, 32, 1)]
    assert [facts.swizzle_bytes for facts in maps] == [128, 128, 64, 64, 128]
    assert Variant.from_json(variant.to_json()) == variant and Tile.from_str(str(LARGE)) == LARGE
    assert parse(str(AXPBY)) == AXPBY and axpby(2.0) == chain(2.0) and axpby() == Epilogue()


@pytest.mark.parametrize("arch, tile", [(H200, LARGE), (B200, PAIR)])
def test_legal(arch, tile):
    for problem in (SQUARE, changed(a_major="m", b_major="n"), changed(m=8, n=8), changed(epilogue=axpby(2, 2, True))):
        assert why_not(tile, problem, arch) is None
    for name in ("bfloat16", "float32"):
        assert why_not_variant(Variant(arch.target, "bfloat16", "bfloat16", name, "k", "k", tile)) is None


@pytest.mark.parametrize(
    "tile, problem, sentence",
    [
        (LARGE, changed(symmetric=False), "`symmetric` requires a product of a matrix and its own transpose, got"),
        (Tile(128, 256, symmetric=True), SQUARE, "requires cluster tiles as tall as they are wide, got 128x256 in"),
        (
            Tile(64, 64, cluster_k=2, symmetric=True),
            SQUARE,
            "`symmetric` requires no split along k, one b and no promoted sums, got 64x64x64_cta1_cluster1x1x2_symm",
        ),
        (
            LARGE,
            changed(b_major="n"),
            "`symmetric` requires a and its transpose as they lie, for an n-major result, got",
        ),
        (
            LARGE,
            changed(c_major="m"),
            "`symmetric` requires a and its transpose as they lie, for an n-major result, got",
        ),
        (
            LARGE,
            changed(epilogue=chain(has_bias=True)),
            "`symmetric` requires an epilogue of scalars and matrices with one result, got bias",
        ),
        (LARGE, changed(m=8191, n=8191), "a mirrored result requires rows that TMA can step over and no split along k"),
        (
            Tile(128, 256, cluster_m=2, stream_k=True),
            SQUARE,
            "a symmetric result requires one order of summation, and `stream_k` has several, got",
        ),
    ],
)
def test_why_not(tile, problem, sentence):
    assert sentence in why_not(tile, problem, H200)


def test_the_planner_halves_large_products():
    for arch, tile in ((H200, LARGE), (B200, PAIR)):
        chosen = plan(SQUARE, arch)
        assert chosen.tile == tile and not chosen.swapped
        whole = plan(changed(symmetric=False), arch)
        assert not whole.tile.symmetric and all(not c.tile.symmetric for c in whole.candidates)
        assert chosen.chosen.cost.us < 0.6 * whole.chosen.cost.us
    few = plan(changed(m=64, n=64), H200)  # one tile: nothing to halve, and k to divide
    assert few.tile.cluster_k > 1 and not few.tile.symmetric
    # 2048 rows are 136 tiles of 128, of which 132 SMs take equal parts.
    middle = plan(changed(m=2048, n=2048, k=2048), H200)
    assert middle.tile == Tile(128, 128, stream_k=True, symmetric=True) and middle.stream.tiles == 136
    assert key(SQUARE).endswith(" identity symmetric") and " symmetric" in str(SQUARE)


def test_padding_is_of_one_operand():
    padded = changed(k=8190)
    assert cost(LARGE, padded, H200).padding_us * 2 == cost(Tile(128, 256), padded, H200).padding_us


A = struct(4096, 2048)


@pytest.mark.parametrize("transpose_a", [False, True])
def test_lowered_with_one_operand(artifacts_dir, transpose_a):
    text = hlo(lambda a: gram(a, transpose_a=transpose_a, device="h200"), A)
    (found,) = lines_of_calls(text)
    m, name = (2048, "mnn") if transpose_a else (4096, "kkn")
    assert re.search(rf"\(tensor<1x4096x2048xbf16>\) -> \(?tensor<1x{m}x{m}xbf16>", found)
    assert f"sm_90a_bf16_bf16_bf16_{name}_" in found and "_symmetric_identity" in found


def test_odd_rows_are_a_plain_kernels_and_k_is_padded_once(repacks_dir):
    (call,) = calls(hlo(lambda a: gram(a, device="h200"), struct(4095, 2048)))
    assert "symmetric" not in call["variant"] and call["variant"].endswith("threads")
    text = hlo(lambda a: gram(a, device="h200"), struct(4096, 2047))
    assert text.count("@jax_bwgemm_repack_v2") == 1 and "_symmetric_" in text


def test_the_gradient_is_one_product_of_ours(artifacts_dir):
    """(g + g^T) a; of a batch, too."""
    for a in (A, struct(2, 2048, 1024)):
        text = hlo(jax.grad(lambda a: gram(a, device="h200").astype(jnp.float32).sum()), a)
        assert len(calls(text)) == 1 and "symmetric" not in text


def test_vmap_is_a_batch(artifacts_dir):
    (call,) = lines_of_calls(hlo(jax.vmap(lambda a: gram(a, device="h200")), struct(3, 2048, 1024)))
    assert re.search(r"\(tensor<3x2048x1024xbf16>\) -> \(?tensor<3x2048x2048xbf16>", call) and "_symmetric_" in call


def lines_of_calls(text):
    return [line for line in text.splitlines() if "@jax_bwgemm_matmul_v2" in line]


def test_a_dtype_without_symmetric_kernels_has_plain_ones(tmp_path, monkeypatch):
    """Though a symmetric tile is predicted to take half their time: XLA has none."""
    own = Tile(128, 256, 32, cluster_m=2)
    write_fake_artifacts(tmp_path, [fake_entry(Variant("sm_90a", *["float32"] * 3, "k", "k", own))])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    text = hlo(lambda a: jax_bwgemm.gram(a, device="h200", on_fallback="error"), struct(4096, 4096, dtype="float32"))
    (call,) = calls(text)
    assert call["variant"] == f"sm_90a_f32_f32_f32_kkn_{own}_identity"


def arrays(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), BF16)


def plain(a, residual=None, alpha=1.0, beta=1.0, transpose_a=False):
    a = a.astype(jnp.float32)
    out = alpha * (jnp.swapaxes(a, -1, -2) @ a if transpose_a else a @ jnp.swapaxes(a, -1, -2))
    return (out if residual is None else out + beta * residual.astype(jnp.float32)).astype(BF16)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("shape", [(24, 16), (3, 24, 16), (2, 1, 8, 5)])
def test_values_and_gradients_are_jnps(shape, transpose_a):
    a = arrays(*shape)
    r = plain(arrays(*shape, seed=1), transpose_a=transpose_a)
    weights = np.random.default_rng(2).integers(-2, 3, r.shape)
    for options in ({}, {"alpha": 0.5}, {"residual": r}, {"residual": r, "alpha": 2.0, "beta": -1.5}):

        def ours(f, a, r, options=options):
            given = options | ({"residual": r} if "residual" in options else {})
            return f(a, transpose_a=transpose_a, **given)

        def total(f, *x, ours=ours):
            return (ours(f, *x).astype(jnp.float32) * weights).sum()

        np.testing.assert_array_equal(ours(gram, a, r), ours(plain, a, r))
        got, want = (jax.grad(functools.partial(total, f), (0, 1))(a, r) for f in (gram, plain))
        jax.tree.map(np.testing.assert_array_equal, got, want)
        tangents = jax.jvp(functools.partial(ours, gram), (a, r), (arrays(*shape, seed=3), r))
        want = jax.jvp(functools.partial(ours, plain), (a, r), (arrays(*shape, seed=3), r))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-6, atol=0.5), tangents, want)


def test_vmap_jit_and_checkpoint():
    a, r = arrays(3, 24, 16), plain(arrays(3, 24, 16, seed=1))
    for dims in ((0, 0), (0, None), (None, 0)):
        args = a if dims[0] == 0 else a[0], r if dims[1] == 0 else r[0]
        got, want = (
            jax.jit(jax.vmap(lambda a, r, f=f: f(a, residual=r, beta=2.0), dims))(*args) for f in (gram, plain)
        )
        np.testing.assert_array_equal(got, want)
    found = jax.grad(jax.checkpoint(lambda a: gram(a).astype(jnp.float32).sum()))(a[0])
    np.testing.assert_array_equal(found, jax.grad(lambda a: plain(a).astype(jnp.float32).sum())(a[0]))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "int32"])
def test_other_dtypes(dtype):
    with jax.enable_x64(True):
        a = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (6, 5)), dtype)
        out_dtype = "int32" if dtype == "int8" else None
        np.testing.assert_array_equal(
            gram(a, out_dtype=out_dtype), (a.astype(out_dtype or dtype) @ a.T.astype(out_dtype or dtype))
        )


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"a": arrays(8)}, ValueError, r"`gram` requires a matrix `a`, got shape \(8,\)"),
        ({"a": [[1.0]]}, TypeError, "`a` requires an array, got list"),
        ({"alpha": jnp.ones(())}, TypeError, "`alpha` requires a Python number"),
        ({"beta": "1", "residual": arrays(8, 8)}, TypeError, "`beta` requires a Python number"),
        ({"beta": 2.0}, ValueError, "`beta` requires a `residual`, which it scales, got 2.0 without one"),
        ({"residual": arrays(8)}, ValueError, r"`residual` requires the result's shape \(8, 8\), got \(8,\)"),
        ({"tile": "128x256x64_cta1_cluster1x1_symmetric"}, ValueError, "cluster tiles as tall as they are wide"),
        ({"tile": "64x64x64_cta1_cluster1x1_streamk"}, ValueError, "requires one order of summation"),
    ],
)
def test_errors(options, error, words):
    given = {"a": arrays(8, 16)} | options
    with pytest.raises(error, match=words):
        gram(given.pop("a"), **given)


def test_a_symmetric_tile_is_no_matmuls():
    with pytest.raises(ValueError, match="`symmetric` requires a product of a matrix and its own transpose"):
        jax_bwgemm.matmul(arrays(8, 16), arrays(16, 8), tile=LARGE, on_fallback="ignore")


def orthogonality(x):
    """Singular values of x, in float64."""
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (3, 40, 64)])
def test_newton_schulz_makes_singular_values_one(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    options = {"on_fallback": "ignore"}
    found = jax.jit(functools.partial(jax_bwgemm.newton_schulz, **options))(x)
    assert found.shape == x.shape and found.dtype == x.dtype
    values = orthogonality(found)
    assert values.min() > 0.6 and values.max() < 1.3  # Muon's, which do not converge
    cubic = jax_bwgemm.newton_schulz(x, steps=15, coefficients=(1.5, -0.5, 0.0), dtype=jnp.float32, **options)
    u, _, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    np.testing.assert_allclose(cubic, u @ v, atol=2e-3)


def test_newton_schulz_is_the_published_iteration():
    """In float32, in which a scale of X that is kept apart rounds nothing that matters; other coefficients a step."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((24, 40)), jnp.float32)
    triples = [(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]
    want = np.asarray(x, np.float64) / (np.linalg.norm(x) + 1e-7)
    for a, b, c in triples:
        square = want @ want.T
        want = a * want + (b * square + c * square @ square) @ want
    found = jax_bwgemm.newton_schulz(
        x, steps=3, coefficients=triples, dtype=jnp.float32, precision="highest", on_fallback="ignore"
    )
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": -1}, "`steps` requires an int of at least 0, got -1"),
        ({"coefficients": (1.0, 2.0)}, r"`coefficients` requires \(a, b, c\) with a not 0, or 5 of them"),
        ({"coefficients": (0.0, 1.0, 2.0)}, r"`coefficients` requires \(a, b, c\) with a not 0"),
        ({"coefficients": [(1.0, 1.0, 2.0)] * 4}, r"`coefficients` requires \(a, b, c\) with a not 0, or 5 of them"),
        ({"x": arrays(8)}, r"`newton_schulz` requires a matrix `x` of floats, got bfloat16\[8\]"),
        ({"x": jnp.ones((4, 4), jnp.int32)}, "requires a matrix `x` of floats, got int32"),
    ],
)
def test_newton_schulz_errors(options, words):
    given = {"x": arrays(8, 16)} | options
    with pytest.raises(ValueError, match=words):
        jax_bwgemm.newton_schulz(given.pop("x"), on_fallback="ignore", **given)


def test_newton_schulz_is_made_of_symmetric_kernels(artifacts_dir):
    text = hlo(lambda x: jax_bwgemm.newton_schulz(x, steps=2, device="h200"), struct(4096, 8192))
    names = [call.split("variant = ")[1].split('"')[1] for call in lines_of_calls(text)]
    assert ["_symmetric_" in name for name in names] == [True, True, False] * 2


@pytest.mark.parametrize("spec, symmetric", [(P(), True), (P(None, "x"), True), (P("x"), False)])
def test_meshes(artifacts_dir, tmp_path, monkeypatch, spec, symmetric):
    """Where the rows are sharded, a device's part is no symmetric product."""
    from test_partition import compiled

    from jax_bwgemm.ops import choices, lowering

    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a = jax.device_put(arrays(64, 32), NamedSharding(mesh, spec))
    asked = []
    own = choices.asked_of
    for room in (choices, lowering):
        monkeypatch.setattr(room, "asked_of", lambda *args: asked.append(found := own(*args)) or found)
    for f in (lambda f: f, lambda f: jax.grad(lambda a: (f(a).astype(jnp.float32) ** 2).sum())):
        got, _ = compiled(f(lambda a: jax_bwgemm.gram(a, device="h200", on_fallback="ignore")), [a])
        np.testing.assert_array_equal(got, f(plain)(a))
    local = [found[1].problem for found in asked if found[1].problem.k in (32, 8) and found[1].problem.n == 64]
    assert {problem.symmetric for problem in local if problem.m == (64 if symmetric else 16)} == {symmetric}


def test_explicit_axes(artifacts_dir):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        a = jax.device_put(arrays(64, 32), NamedSharding(mesh, P("x")))
        f = functools.partial(gram, out_sharding=P("x", None))
        out = jax.jit(f)(a)
        assert jax.typeof(out).sharding.spec == P("x", None)
        found = jax.jit(jax.grad(lambda a: f(a).astype(jnp.float32).sum()))(a)
    np.testing.assert_array_equal(out, plain(np.asarray(a)))
    np.testing.assert_array_equal(
        found, jax.grad(lambda a: plain(a).astype(jnp.float32).sum())(jnp.asarray(np.asarray(a)))
    )
