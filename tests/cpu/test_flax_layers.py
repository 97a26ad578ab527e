"""The layers of `jax_bwgemm.flax`: Flax's parameters and values, JAX's transformations, one kernel a layer."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, struct

from jax_bwgemm import FallbackWarning
from jax_bwgemm.facts.units import pullback, unit

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
serialization = pytest.importorskip("flax.serialization")
ours = pytest.importorskip("jax_bwgemm.flax")

pytestmark = pytest.mark.usefixtures("quiet")
F32 = jnp.float32


def random(*shape: int, dtype: Any = BF16, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def close(got: Any, want: Any, tolerance: float) -> None:
    """Of trees: relative to the largest value of each array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        atol = tolerance * max(float(jnp.abs(w).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=0, atol=atol)


TOLERANCE = {F32: 1e-5, BF16: 0.02}  # Flax rounds a bfloat16 product, its sum with the bias, and the activation
NORMAL = {"bias_init": jax.nn.initializers.normal(1.0)}

LINEN = {
    "dense": (lambda room, **o: room.Dense(24, **o), (4, 16)),
    "vector": (lambda room, **o: room.Dense(24, **o), (16,)),
    "rank 4": (lambda room, **o: room.Dense(24, **o), (2, 3, 4, 16)),
    "no bias": (lambda room, **o: room.Dense(24, use_bias=False, **o), (4, 16)),
    "one feature": (lambda room, **o: room.Dense(1, **o), (4, 16)),
    "heads": (lambda room, **o: room.DenseGeneral((3, 8), **o), (2, 4, 16)),
    "two axes": (lambda room, **o: room.DenseGeneral(24, axis=(-2, -1), **o), (4, 2, 8)),
    "batch dims": (lambda room, **o: room.DenseGeneral(24, batch_dims=(0,), **o), (2, 4, 16)),
    "einsum": (lambda room, **o: room.Einsum((16, 3, 8), "bsd,dhk->bshk", **o), (2, 4, 16)),
    "einsum, moved": (lambda room, **o: room.Einsum((16, 3, 8), "bsd,dhk->bhsk", **o), (2, 4, 16)),
    "einsum, batch": (lambda room, **o: room.Einsum((3, 8, 5), "bhd,hdk->bhk", **o), (2, 3, 8)),
    "einsum, ellipsis": (lambda room, **o: room.Einsum((16, 8), "...d,dk->...k", **o), (2, 4, 16)),
    "einsum, lone sum": (lambda room, **o: room.Einsum((16, 8), "bsd,dk->bk", **o), (2, 4, 16)),
}
NNX = {
    "linear": (lambda room, **o: room.Linear(16, 24, **o), (4, 16)),
    "vector": (lambda room, **o: room.Linear(16, 24, **o), (16,)),
    "rank 4": (lambda room, **o: room.Linear(16, 24, **o), (2, 3, 4, 16)),
    "no bias": (lambda room, **o: room.Linear(16, 24, use_bias=False, **o), (4, 16)),
    "float32 result": (lambda room, **o: room.Linear(16, 24, preferred_element_type=F32, **o), (4, 16)),
    "heads": (lambda room, **o: room.LinearGeneral(16, (3, 8), **o), (2, 4, 16)),
    "two axes": (lambda room, **o: room.LinearGeneral((2, 8), 24, axis=(-2, -1), **o), (4, 2, 8)),
    "batch axis": (lambda room, **o: room.LinearGeneral(16, 24, batch_axis={0: 2}, **o), (2, 4, 16)),
    "einsum": (lambda room, **o: room.Einsum("bsd,dhk->bshk", (16, 3, 8), (3, 8), **o), (2, 4, 16)),
    "einsum, no bias": (lambda room, **o: room.Einsum("bsd,dhk->bhsk", (16, 3, 8), **o), (2, 4, 16)),
    "einsum, repeated": (lambda room, **o: room.Einsum("bss,sk->bk", (16, 8), (8,), **o), (2, 16, 16)),
}


class Mlp(nnx.Module):
    """Plain Flax's, with the names of ours."""

    def __init__(self, is_gated: bool, activation: Any, **options: Any) -> None:
        self.activation = activation
        self.gate_proj = nnx.Linear(16, 32, **options) if is_gated else nnx.data(None)
        self.up_proj = nnx.Linear(16, 32, **options)
        self.down_proj = nnx.Linear(32, 16, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.up_proj(x)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up
        return self.down_proj(hidden)


class LinenMlp(nn.Module):
    is_gated: bool
    activation: Any
    options: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(name: str, n: int) -> Any:
            return nn.Dense(n, name=name, **self.options)

        if self.is_gated:
            hidden = self.activation(dense("gate_proj", 32)(x)) * dense("up_proj", 32)(x)
        else:
            hidden = self.activation(dense("up_proj", 32)(x))
        return dense("down_proj", 16)(hidden)


def linen_loss(layer: Any, x: jax.Array, **kwargs: Any) -> Callable[[Any], jax.Array]:
    return lambda variables: (layer.apply(variables, x, **kwargs).astype(F32) ** 2).sum()


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.long)])
@pytest.mark.parametrize("make, shape", LINEN.values(), ids=LINEN)
def test_linen_is_flaxs(make: Any, shape: Any, dtype: Any) -> None:
    """Parameters bit for bit; values and gradients within rounding, from a checkpoint of either."""
    x, mine, flaxs = random(*shape, dtype=dtype), *(make(room, dtype=dtype, **NORMAL) for room in (ours.linen, nn))
    variables, want = (layer.init(jax.random.key(0), x) for layer in (mine, flaxs))
    assert jax.tree.structure(variables) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, variables, want)
    for source, target in ((mine, flaxs), (flaxs, mine)):
        saved = serialization.to_bytes(source.init(jax.random.key(1), x))
        loaded = serialization.from_bytes(target.init(jax.random.key(2), x), saved)
        close(jax.jit(target.apply)(loaded, x), source.apply(loaded, x), TOLERANCE[dtype])
    close(jax.grad(linen_loss(mine, x))(want), jax.grad(linen_loss(flaxs, x))(want), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("make, shape", NNX.values(), ids=NNX)
def test_nnx_is_flaxs(make: Any, shape: Any, dtype: Any) -> None:
    x = random(*shape, dtype=dtype)
    mine, flaxs = (make(room, dtype=dtype, rngs=nnx.Rngs(0), **NORMAL) for room in (ours.nnx, nnx))
    state, want = (nnx.to_pure_dict(nnx.state(layer)) for layer in (mine, flaxs))
    jax.tree.map(np.testing.assert_array_equal, state, want)
    for source, target in ((mine, flaxs), (flaxs, mine)):
        saved = nnx.to_pure_dict(nnx.state(source))
        loaded = nnx.state(target)
        nnx.replace_by_pure_dict(loaded, jax.tree.map(lambda leaf: leaf + 1, saved))
        nnx.update(target, loaded)
        nnx.update(source, loaded)
        close(nnx.jit(target)(x), source(x), TOLERANCE[dtype])

    def gradient(layer: Any) -> Any:
        grads = nnx.grad(lambda layer: (layer(x).astype(F32) ** 2).sum())(layer)
        return nnx.to_pure_dict(grads)

    close(gradient(mine), gradient(flaxs), 2 * TOLERANCE[dtype])


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": nnx.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "clipped": lambda x: jnp.clip(x, -1, 1),  # traced
    "softplus": jax.nn.softplus,  # XLA's
    "softmax": jax.nn.softmax,
}
NAMELESS = ("clipped", "softplus", "softmax")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activation_and_residual(name: str, dtype: Any) -> None:
    """By name, and as functions: both are the same kernel's."""
    x, residual, activation = random(4, 16, dtype=dtype), random(4, 24, dtype=dtype, seed=1), ACTIVATIONS[name]
    options = {"dtype": dtype, **NORMAL}
    plain = nnx.Linear(16, 24, rngs=nnx.Rngs(0), **options)
    want = activation(plain(x)) + residual
    variables = {"params": nnx.to_pure_dict(nnx.state(plain))}
    found = []
    for given in (activation, name) if name not in NAMELESS else (activation,):
        layer = ours.nnx.Linear(16, 24, activation=given, rngs=nnx.Rngs(0), **options)
        found.append(layer(x, residual=residual))
        found.append(ours.linen.Dense(24, activation=given, **options).apply(variables, x, residual=residual))
    for got in found:
        close(got, want, TOLERANCE[dtype])
        np.testing.assert_array_equal(got, found[0])


@pytest.mark.parametrize("name", ["relu", "gelu", "softplus"])
def test_dtypes_are_those_to_which_jax_promotes(name: str) -> None:
    """A float32 residual of a bfloat16 layer; parameters in bfloat16; no dtype given."""
    x, residual = random(4, 16), random(4, 24, dtype=F32)
    activation = ACTIVATIONS[name]
    for options in ({"dtype": BF16}, {"param_dtype": BF16}, {}):
        plain = nnx.Linear(16, 24, rngs=nnx.Rngs(0), **options)
        layer = ours.nnx.Linear(16, 24, activation=activation, rngs=nnx.Rngs(0), **options)
        close(layer(x, residual=residual), activation(plain(x)) + residual, 0.02)
        close(layer(x), activation(plain(x)), 0.02)
        assert layer.kernel.dtype == plain.kernel.dtype


def test_float64_is_xlas_and_loses_nothing() -> None:
    with jax.enable_x64(True):
        x, residual = random(4, 16, dtype=jnp.float64), random(4, 24, dtype=jnp.float64)
        options = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0), **NORMAL}
        layer = ours.nnx.Linear(16, 24, activation="silu", **options)
        want = jax.nn.silu(x @ layer.kernel[...] + layer.bias[...]) + residual
        close(layer(x, residual=residual), want, 1e-14)


@pytest.mark.parametrize("is_gated", [False, True], ids=["mlp", "gated"])
def test_blocks(is_gated: bool) -> None:
    """Their parameters are those of plain layers of the same names."""
    x, options = random(2, 4, 16), {"dtype": BF16, **NORMAL}
    mine, linens = (room.GatedMLP if is_gated else room.MLP for room in (ours.nnx, ours.linen))
    layer = mine(16, 32, activation=jax.nn.silu, rngs=nnx.Rngs(0), **options)
    plain = Mlp(is_gated, jax.nn.silu, rngs=nnx.Rngs(0), **options)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (layer, plain)))
    close(layer(x, residual=x), plain(x) + x, 0.03)

    linen = linens(32, activation=jax.nn.silu, **options)
    plain = LinenMlp(is_gated, jax.nn.silu, options)
    variables, want = linen.init(jax.random.key(0), x), plain.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables, want)
    close(linen.apply(want, x, residual=x), plain.apply(want, x) + x, 0.03)
    close(jax.grad(linen_loss(linen, x))(want), jax.grad(linen_loss(plain, x))(want), 0.05)


def test_options_of_one_layer_of_a_block() -> None:
    own = {"down_proj": {"kernel_init": nn.initializers.zeros, "use_bias": False}}
    layer = ours.nnx.GatedMLP(16, 32, 8, layers=own, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((4, 16))).shape == (4, 8)
    assert not layer.down_proj.kernel[...].any() and layer.down_proj.bias is None and layer.up_proj.bias is not None
    variables = ours.linen.GatedMLP(32, 8, layers=own).init(jax.random.key(0), jnp.ones((4, 16)))["params"]
    assert not variables["down_proj"]["kernel"].any() and set(variables["down_proj"]) == {"kernel"}
    with pytest.raises(ValueError, match="`layers` requires names of up_proj, down_proj, got gate_proj"):
        ours.nnx.MLP(16, 32, layers={"gate_proj": {}}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`layers` requires names of up_proj, down_proj, got gate_proj"):
        ours.linen.MLP(32, layers={"gate_proj": {}}).init(jax.random.key(0), jnp.ones((4, 16)))


def test_partitioning_metadata_is_flaxs() -> None:
    names = ("embed", "mlp")
    linen = ours.linen.Dense(24, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))
    variables = jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((4, 16)))
    assert nn.get_partition_spec(variables)["params"]["kernel"] == P(*names)
    heads = ours.linen.DenseGeneral((3, 8), kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))
    variables = jax.eval_shape(heads.init, jax.random.key(0), jnp.ones((4, 16)))
    assert nn.get_partition_spec(variables)["params"]["kernel"] == P(*names)
    layer = ours.nnx.Linear(16, 24, rngs=nnx.Rngs(0), kernel_metadata={"meaning": "weights"})
    assert layer.kernel.meaning == "weights"


def test_intermediates_are_flaxs() -> None:
    """A product that waits is nobody's result."""
    x, found = random(4, 16), []
    for room in (ours.linen, nn):
        layers = [room.Dense(32), room.DenseGeneral((4, 8)), room.Einsum((4, 8, 3), "bhd,hdk->bk")]
        model = nn.Sequential(layers)
        variables = model.init(jax.random.key(0), x)
        found.append(model.apply(variables, x, capture_intermediates=True)[1])
    close(*found, 1e-5)
    block = ours.linen.MLP(32)
    found = block.apply(block.init(jax.random.key(0), x), x, capture_intermediates=True)[1]
    assert jax.tree.map(jnp.shape, found) == {"intermediates": {"__call__": ((4, 16),)}}


# --- JAX's transformations and Flax's


def gated() -> Any:
    return ours.nnx.GatedMLP(16, 32, rngs=nnx.Rngs(0), dtype=BF16)


def test_split_and_merge() -> None:
    layer, x = gated(), random(4, 16)
    graphdef, state = nnx.split(layer)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(x), layer(x))

    @jax.jit
    def f(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    close(f(state, x), layer(x), 0.01)


def test_vmap() -> None:
    layer, x = gated(), random(3, 4, 16)
    close(jax.vmap(layer)(x), layer(x), 0.01)
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, x), layer(x), 0.01)

    @nnx.vmap(in_axes=0)
    def experts(key: jax.Array) -> Any:
        return ours.nnx.Linear(16, 24, activation="gelu", rngs=nnx.Rngs(key))

    model = experts(jax.random.split(jax.random.key(0), 3))
    got = nnx.vmap(lambda m, x: m(x))(model, x.astype(F32))
    want = jax.nn.gelu(jnp.einsum("lmk,lkn->lmn", x.astype(F32), model.kernel[...]) + model.bias[...][:, None])
    close(got, want, 1e-4)


@pytest.mark.long
def test_remat_and_scan() -> None:
    x = random(4, 16)

    @nnx.vmap(in_axes=0)
    def make(key: jax.Array) -> Any:
        return ours.nnx.GatedMLP(16, 32, dtype=BF16, rngs=nnx.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 3))

    def loss(layers: Any, wrap: Callable[..., Any]) -> jax.Array:
        step = nnx.scan(wrap(lambda x, layer: layer(x, residual=x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return (step(x, layers).astype(F32) ** 2).sum()

    got, want = (nnx.grad(functools.partial(loss, wrap=wrap))(layers) for wrap in (nnx.remat, lambda f: f))
    close(nnx.to_pure_dict(got), nnx.to_pure_dict(want), 0.02)

    linen = nn.remat(ours.linen.MLP)(32, dtype=BF16)
    variables = linen.init(jax.random.key(0), x)
    plain = ours.linen.MLP(32, dtype=BF16)
    close(jax.grad(linen_loss(linen, x))(variables), jax.grad(linen_loss(plain, x))(variables), 0.02)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axis_type: AxisType) -> None:
    """As Megatron does it: what is between the two layers is sharded over the model's axis."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = random(8, 16)
    up = ours.nnx.Linear(16, 32, activation="relu", rngs=nnx.Rngs(0), dtype=BF16, **NORMAL)
    down = ours.nnx.Linear(32, 16, rngs=nnx.Rngs(1), dtype=BF16, **NORMAL)
    want = down(up(x), residual=x)
    with jax.set_mesh(mesh):
        for layer, kernel, bias in ((up, P(None, "model"), P("model")), (down, P("model"), P())):
            state = nnx.to_pure_dict(nnx.state(layer))
            specs = {"kernel": kernel, "bias": bias}
            placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in state.items()}
            variables = nnx.state(layer)
            nnx.replace_by_pure_dict(variables, placed)
            nnx.update(layer, variables)
        out = P("data") if axis_type is AxisType.Explicit else None
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = nnx.jit(lambda up, down, x: down(up(x), out, residual=x))(up, down, x)
        if out is not None:
            assert jax.typeof(got).sharding.spec == P("data", None)
    close(np.asarray(got), np.asarray(want), 0.02)


def test_in_a_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x = random(8, 16)
    for activation in ("gelu", lambda x: jnp.clip(x, -1, 1)):
        layer = ours.nnx.Linear(16, 24, activation=activation, dtype=BF16, rngs=nnx.Rngs(0), **NORMAL)
        graphdef, state = nnx.split(layer)

        def f(state: Any, x: jax.Array, graphdef: Any = graphdef) -> jax.Array:
            return nnx.merge(graphdef, state)(x)

        got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))(state, x)
        close(np.asarray(got), np.asarray(layer(x)), 0.01)


def test_tabulate() -> None:
    table = ours.linen.GatedMLP(32).tabulate(jax.random.key(0), jnp.ones((4, 16)))
    assert "GatedMLP" in table and "gate_proj" in table


# --- what a GPU gets


def variants(f: Callable[..., Any], *args: Any) -> list[str]:
    """What follows each product in its kernel."""
    text = hlo(f, *args)
    assert "dot_general" not in text
    return [call["variant"].rpartition("_cluster")[2].partition("_")[2] for call in calls(text)]


@pytest.mark.usefixtures("layers_on_h200")
def test_one_kernel_a_layer() -> None:
    x = struct(4096, 1024)
    options = {"dtype": BF16, "param_dtype": BF16, "rngs": nnx.Rngs(0)}

    def of(layer: Any, **kwargs: Any) -> list[str]:
        graphdef, state = nnx.split(layer)
        return variants(lambda state, x: nnx.merge(graphdef, state)(x, **kwargs), state, x)

    for activation, name in ((None, "bias"), (jax.nn.relu, "bias_relu"), ("gelu", "bias_gelu")):
        (found,) = of(ours.nnx.Linear(1024, 4096, activation=activation, **options))
        assert found == name
    layer = ours.nnx.Linear(1024, 4096, activation=lambda x: jax.nn.silu(x), **options)
    assert of(layer) == ["bias_silu"]  # traced
    (found,) = of(ours.nnx.LinearGeneral(1024, (64, 64), activation="silu", **options))
    assert found == "bias_silu"
    (found,) = of(ours.nnx.Einsum("bd,dhk->bhk", (1024, 64, 64), (64, 64), activation="silu", **options))
    assert found == "bias_silu"

    graphdef, state = nnx.split(ours.nnx.MLP(1024, 4096, **options))
    up, down = variants(lambda state, x: nnx.merge(graphdef, state)(x, residual=x), state, x)
    assert (up, down) == ("bias_gelu", "bias_residual")

    linen = ours.linen.Dense(4096, activation="relu", dtype=BF16, param_dtype=BF16)
    variables = jax.eval_shape(linen.init, jax.random.key(0), x)
    (found,) = variants(linen.apply, variables, x)
    assert found == "bias_relu"


@pytest.mark.usefixtures("layers_on_h200")
def test_kernels_of_a_gated_block() -> None:
    layer = ours.nnx.GatedMLP(1024, 4096, use_bias=False, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    found = variants(lambda state, x: nnx.merge(graphdef, state)(x), state, struct(4096, 1024))
    assert found == [f"gated_{unit('silu', True).kind}", "identity"]


@pytest.mark.usefixtures("layers_on_h200")
def test_kernels_of_a_training_step() -> None:
    """Three products a layer, but for the inputs, which nobody differentiates; what follows them is theirs."""
    options = {"dtype": BF16, "param_dtype": BF16, "rngs": nnx.Rngs(0)}
    graphdef, state = nnx.split(ours.nnx.MLP(1024, 4096, activation="relu", **options))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, state)(x).astype(F32) ** 2).sum()

    found = variants(jax.grad(loss), state, struct(4096, 1024))
    assert sorted(found) == sorted(["bias", "bias_relu", pullback("relu", has_bias=True).kind, "identity", "identity"])


# --- errors


def test_errors() -> None:
    x = jnp.ones((4, 16))
    with pytest.raises(ValueError, match="`residual` requires the result's shape .4, 24., got .24,.: broadcast it"):
        ours.nnx.Linear(16, 24, rngs=nnx.Rngs(0))(x, residual=jnp.ones(24))
    with pytest.raises(ValueError, match="`activation` requires None or one of relu, gelu, .*, got 'swish'"):
        ours.nnx.Linear(16, 24, activation="swish", rngs=nnx.Rngs(0))(x)
    own = functools.partial(jax.lax.dot_general, precision=None)
    rule = "requires no `dot_general`, `dot_general_cls` or `einsum_op`, but it has a product of its own"
    for layer in (
        ours.nnx.Linear(16, 24, dot_general=own, rngs=nnx.Rngs(0)),
        ours.nnx.LinearGeneral(16, 24, dot_general_cls=lambda: own, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match=f"`{type(layer).__name__}` of `jax_bwgemm.flax` {rule}"):
            layer(x)
    with pytest.raises(ValueError, match=f"`Dense` of `jax_bwgemm.flax` {rule}"):
        ours.linen.Dense(24, dot_general=own).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="`einsum_str` requires two operands and `->`, .* got 'bd,dk'"):
        ours.linen.Einsum((16, 8), "bd,dk").init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        ours.nnx.Linear(15, 24, rngs=nnx.Rngs(0))(x)


def test_what_is_no_contraction_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "warn")
    layer = ours.linen.Einsum((16, 8), "bsd,dk->bk")
    with pytest.warns(FallbackWarning, match=r"XLA computes the einsum bsd,dk->bk of float32\[2, 4, 16\] and .*free"):
        layer.init(jax.random.key(0), jnp.ones((2, 4, 16)))


def test_without_flax() -> None:
    code = "import sys; sys.modules['flax'] = None; import jax_bwgemm; import jax_bwgemm.flax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "`jax_bwgemm.flax` requires Flax, which is not installed: pip install 'jax_bwgemm[flax]'" in result.stderr
