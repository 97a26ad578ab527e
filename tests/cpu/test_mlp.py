"""`gated_matmul`, `mlp` and `gated_mlp`: the values and gradients of the same written with `@`, under every
transformation; what they lower to on CUDA; and what they refuse."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import D, F, Fun, N, T, arrays, close, dense, each_layer, gate, gated, gradients
from fake_artifacts import fake_entry, write_fake_artifacts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, CUDA, calls, hlo, struct

import jax_bwgemm
from jax_bwgemm import gated_matmul, gated_mlp, mlp
from jax_bwgemm.facts.epilogue import Epilogue, chain
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import kept, pullback, unit
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.ops.reference import OPS


@each_layer
def test_values_and_gradients(layer: Callable[[], tuple[Fun, Fun, list[jax.Array]]]) -> None:
    ours, plain, operands = layer()
    with jax.default_matmul_precision("highest"):
        close(ours(*operands), plain(*operands))
        want = gradients(plain, operands)(*operands)
        close(gradients(ours, operands)(*operands), want)
        close(jax.jit(gradients(ours, operands))(*operands), want)
        close(gradients(jax.checkpoint(ours), operands)(*operands), want)


@each_layer
def test_vmap(layer: Callable[[], tuple[Fun, Fun, list[jax.Array]]]) -> None:
    """Over tokens, over weights, and over each operand alone, also of gradients."""
    ours, plain, operands = layer()
    with jax.default_matmul_precision("highest"):
        for i in range(len(operands)):
            axes = tuple(0 if i == j else None for j in range(len(operands)))
            stacked = [jnp.stack([x, 2 * x]) if i == j else x for j, x in enumerate(operands)]
            close(*(jax.vmap(f, axes)(*stacked) for f in (ours, plain)))
            if i < 3:
                close(*(jax.vmap(gradients(f, operands), axes)(*stacked) for f in (ours, plain)))


@pytest.mark.parametrize("activation", sorted(set(OPS) & {"relu", "gelu_exact", "tanh", "squared_relu", "sigmoid"}))
@pytest.mark.parametrize("layer", [gate, dense, gated])
def test_other_activations(layer: Callable[[str], tuple[Fun, Fun, list[jax.Array]]], activation: str) -> None:
    ours, plain, operands = layer(activation)
    with jax.default_matmul_precision("highest"):
        close(*(gradients(f, operands)(*operands) for f in (ours, plain)))


@each_layer
def test_on_meshes(layer: Callable[[], tuple[Fun, Fun, list[jax.Array]]]) -> None:
    """Tokens divided by XLA, and in a shard_map; weights divided by XLA."""
    ours, plain, operands = layer()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.default_matmul_precision("highest"):
        want = gradients(plain, operands)(*operands)
        tokens = [NamedSharding(mesh, P(None, "x") if x.ndim == 3 else P()) for x in operands]
        close(jax.jit(gradients(ours, operands))(*map(jax.device_put, operands, tokens)), want)
        hidden = {(D, F): P(None, "x"), (F, N): P("x"), (F,): P("x")}
        weights = [NamedSharding(mesh, hidden.get(x.shape, P())) for x in operands]
        close(jax.jit(gradients(ours, operands))(*map(jax.device_put, operands, weights)), want)
        specs = tuple(sharding.spec for sharding in tokens)
        sharded = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
        close(jax.jit(gradients(sharded, operands))(*operands), want)


def test_what_a_gradient_keeps() -> None:
    """Of a gated block, three arrays of hidden values beside the operands; of relu's, one."""
    for layer, wanted in ((gated, 3), (functools.partial(dense, "relu"), 1), (dense, 2)):
        ours, _, operands = layer()
        kept_arrays = jax.tree.leaves(jax.vjp(ours, *operands)[1])
        assert sum(np.shape(x) == (2, T, F) for x in kept_arrays) == wanted


LARGE, GATED = Tile(128, 256, cluster_m=2), Tile(128, 256, cluster_m=2, gated=True)
SHAPES = struct(8192, 4096), struct(4096, 8192), struct(4096, 8192), struct(8192, 4096)


@pytest.fixture
def kernels_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tile each: products with and without a sum, gated products, and their gradients'."""
    one, both, back = unit("silu", True), kept("silu", True), pullback("silu", True)
    wanted = [(GATED, epilogue, majors) for epilogue in (one, both) for majors in ("kn", "kk")]
    wanted += [(LARGE, epilogue, majors) for epilogue in (back, chain(has_residual=True)) for majors in ("kn", "kk")]
    wanted += [(LARGE, Epilogue(), majors) for majors in ("kn", "kk", "mn", "mk")]
    write_fake_artifacts(tmp_path, [fake_entry(variant_of(*fields)) for fields in wanted])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))


def variant_of(tile: Tile, epilogue: Epilogue, majors: str, target: str = "sm_90a") -> Variant:
    dtypes = ["bfloat16"] * 3
    return Variant(target, *dtypes, majors[0], majors[1], tile, epilogue.out, seconds=epilogue.seconds)


def test_kernels_of_a_gated_block(kernels_of_layers: None) -> None:
    """Forward two calls; with all gradients eight: gated, down, its two gradients, and two by two of the first layer,
    whose input's second adds the first. No transpose, no elementwise pass over hidden values."""

    def run(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        return gated_mlp(x, w, u, v, **CUDA)

    names = [call["variant"] for call in calls(hlo(run, *SHAPES))]
    assert names == [f"sm_90a_bf16_bf16_bf16_knn_{GATED}_silu_gate", f"sm_90a_bf16_bf16_bf16_knn_{LARGE}_identity"]
    grad = jax.value_and_grad(lambda *args: run(*args).astype(jnp.float32).sum(), (0, 1, 2, 3))
    text = hlo(grad, *SHAPES)
    found = calls(text)
    assert len(found) == 8 and "dot_general" not in text and "stablehlo.exponential" not in text
    assert [call["variant"].count("_gated_") for call in found] == [1] + [0] * 7
    assert sum(call["variant"].endswith("_residual") for call in found) == 1
    first = found[0]
    assert first["buffers"].startswith("a:bfloat16[l?,m,k+]%16 b:bfloat16[l?,k,n+]%16 up:bfloat16[l?,k,n+]%16 ->")
    assert first["types"].count("tensor<1x8192x8192xbf16>") == 3  # the result and both products
    back = next(call for call in found if "before:" in call["buffers"].partition("->")[0])
    assert back["types"].count("tensor<1x8192x8192xbf16>") == 4  # two in, two out


def test_a_gated_product_without_a_kernel_is_two(artifacts_dir) -> None:
    """And what follows them is XLA's: no fallback."""
    text = hlo(lambda x, w, v: gated_matmul(x, w, v, **CUDA), *SHAPES[:3])
    assert [call["variant"].rsplit("_", 1)[1] for call in calls(text)] == ["identity"] * 2
    assert "stablehlo.exponential" in text and "dot_general" not in text


def test_weights_as_transposes(kernels_of_layers: None) -> None:
    """Both are read from before them; where only one is a transpose, both as they are given."""
    x, w, v = struct(8192, 4096), struct(8192, 4096), struct(4096, 8192)
    (call,) = calls(hlo(lambda x, w, v: gated_matmul(x, w.T, v.T, **CUDA), x, w, w))
    assert call["b_major"] == "k" and call["types"].count("tensor<1x8192x4096xbf16>") == 3
    text = hlo(lambda x, w, v: gated_matmul(x, w.T, v, **CUDA), x, w, v)
    (call,) = calls(text)
    assert call["b_major"] == "n" and text.count("stablehlo.transpose") == 1


def test_explain_says_what_a_block_runs(kernels_of_layers: None) -> None:
    with jax_bwgemm.config(device="h200"):
        said = str(jax_bwgemm.explain(gated_mlp, *SHAPES))
    assert f"{GATED}_silu_gate" in said


@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_ships_is_what_layers_ask(target: str, activation: str) -> None:
    """For each epilogue of a block, forward and back, and weights of either major."""
    names = {variant.name for variant in catalogue([target])}
    is_hopper, gated_small = target == "sm_90a", Tile(128, 128, gated=True)
    small = Tile(128, 128, cluster_m=1 + is_hopper, pingpong=is_hopper)
    wanted = [(gated_small, f(activation, True)) for f in (unit, kept)] + [(small, pullback(activation, True))]
    wanted += [(small, f(activation)) for f in (unit, kept, pullback)]
    for (tile, epilogue), majors in itertools.product(wanted, ("kn", "kk")):
        assert variant_of(tile, epilogue, majors, target).name in names


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, w, v: gated_matmul(x, w, v[:, :-1]), "`w_gate` and `w_up` require one shape and dtype"),
        (lambda x, w, v: gated_matmul(x, w, v.astype(jnp.float16)), "require one shape and dtype"),
        (lambda x, w, v: gated_matmul(x, w, v, bias_up=v[0]), "both biases or none, got only `bias_up`"),
        (lambda x, w, v: gated_matmul(x, w, v, activation="swish2"), "`activation` requires one of relu, gelu, silu"),
        (lambda x, w, v: gated_matmul(x, w, v, tile="128x256x64_cta1_cluster2x1"), "`gated` requires True"),
        (lambda x, w, v: gated_matmul(x, w, v, bias_gate=v[:, 0], bias_up=v[:, 0]), "`bias` requires the shape"),
        (lambda x, w, v: gated_matmul(x[:, 1:], w, v), "the last dimension of `a`"),
        (lambda x, w, v: mlp(x, w, v), "`matmul` requires the last dimension of `a`"),
        (lambda x, w, v: mlp(x, w, v.T.astype(jnp.float16)), "`mlp` requires operands of one dtype"),
        (lambda x, w, v: mlp(x, w[None], v.T), "`mlp` requires an array of rank 1 or more and matrices"),
        (lambda x, w, v: mlp(x, w, v.T, residual=w), "`residual` requires the result's shape"),
        (lambda x, w, v: mlp(x, w, v.T, activation="no"), "`activation` requires one of"),
        (lambda x, w, v: mlp(*(y.astype(jnp.int8) for y in (x, w, v.T))), "of one dtype, bfloat16, float16"),
        (lambda x, w, v: mlp(*(y.astype(jnp.float8_e4m3fn) for y in (x, w, v.T))), "of one dtype, bfloat16, float16"),
        (lambda x, w, v: gated_mlp(x, w, v, v.T, bias_gate=v[0]), "both biases or none, got only `bias_gate`"),
        (lambda x, w, v: gated_matmul(x, w, v, tile=Tile(128, 128)), "`gated` requires True"),
    ],
)
def test_what_is_refused(call: Callable[..., jax.Array], sentence: str) -> None:
    x, w, v = (y.astype(BF16) for y in arrays((T, D), (D, F), (D, F)))
    with pytest.raises(ValueError, match=sentence):
        call(x, w, v)
