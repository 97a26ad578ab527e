"""`jax_bwgemm.flax.replace`: which layers of a model become ours, and that all else stays."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import BF16, calls, hlo, struct

import jax_bwgemm

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
ours = pytest.importorskip("jax_bwgemm.flax")

pytestmark = pytest.mark.usefixtures("quiet")
F32 = jnp.float32
NORMAL = {"bias_init": jax.nn.initializers.normal(1.0)}


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), BF16)


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g.astype(F32), w.astype(F32), rtol=0, atol=0.03 * float(jnp.abs(w).max() + 1e-3))


def own_product(*args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.dot_general(*args, **kwargs)


class Special(nnx.Linear):
    pass


class Model(nnx.Module):
    """Layers in attributes, in a list, shared, in attention; and such as stay."""

    def __init__(self, rngs: Any, **options: Any) -> None:
        options |= {"rngs": rngs, "dtype": BF16, **NORMAL}
        self.first = nnx.Linear(16, 32, **options)
        self.shared = self.first
        self.more = nnx.List([nnx.Linear(32, 32, **options), nnx.LinearGeneral(32, (4, 8), **options)])
        self.einsum = nnx.Einsum("bhd,hdk->bk", (4, 8, 16), (16,), **options)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, **options)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.special = Special(16, 16, **options)
        self.own = nnx.Linear(16, 16, dot_general=own_product, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.first(x))
        y = self.einsum(self.more[1](nnx.gelu(self.more[0](y))))
        return self.own(self.special(self.norm(y + self.attention(x))))


@pytest.mark.long
def test_nnx() -> None:
    model, x = Model(nnx.Rngs(0)), random(4, 16)
    kernel, want, structure = model.first.kernel, model(x), nnx.graphdef(model)
    result = ours.replace(model)
    assert result.model is model and model.shared is model.first and model.first.kernel is kernel
    names = [f"attention.{name}" for name in ("key", "out", "query", "value")]
    assert set(result.replaced) == {"first", "more.0", "more.1", "einsum", *names}
    assert result.replaced["more.1"] == "LinearGeneral"
    assert result.kept == {
        "norm": "LayerNorm is no dense layer",
        "own": "it has a product of its own, own_product",
        "special": "Special is a subclass of Linear",
    }
    assert "first: Linear" in str(result) and "own: kept, it has a product" in str(result)
    assert isinstance(model.first, nnx.Linear) and type(model.first) is ours.nnx.Linear
    close(model(x), want)
    close(nnx.jit(model)(x), want)
    assert ours.replace(model).replaced == {}
    assert result.undo() is model and result.undo() is model
    assert nnx.graphdef(model) == structure
    np.testing.assert_array_equal(model(x), want)


def test_a_layer_of_nnx_is_a_model() -> None:
    layer, x = nnx.Linear(16, 24, rngs=nnx.Rngs(0)), jnp.ones((4, 16))
    want = layer(x)
    result = ours.replace(layer)
    assert result.replaced == {"": "Linear"} and type(layer) is ours.nnx.Linear
    close(layer(x), want)
    assert type(result.undo()) is nnx.Linear


def test_layers_with_our_product_have_the_bias_too() -> None:
    layer = nnx.Linear(16, 24, dot_general=jax_bwgemm.dot_general, rngs=nnx.Rngs(0))
    assert ours.replace(layer).replaced == {"": "Linear"}
    model = nn.Dense(24, dot_general=jax_bwgemm.dot_general)
    result = ours.replace(model)
    result.model.init(jax.random.key(0), jnp.ones((4, 16)))
    assert result.replaced == {"": "Dense"}


@pytest.mark.long
def test_training_goes_on_where_a_model_is_changed() -> None:
    """An optimiser made before follows."""
    optax = pytest.importorskip("optax")
    x, losses = random(4, 16), []
    for replaces in (False, True):
        model = Model(nnx.Rngs(0))
        optimiser = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimiser: Any) -> jax.Array:
            loss, grads = nnx.value_and_grad(lambda m: (m(x).astype(F32) ** 2).mean())(model)
            optimiser.update(model, grads)
            return loss

        first = step(model, optimiser)
        if replaces:
            ours.replace(model)
        losses.append([float(first), *(float(step(model, optimiser)) for _ in range(5))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[1][-1] < losses[1][0] / 2


class LinenSpecial(nn.Dense):
    pass


class Linen(nn.Module):
    features: int = 32

    def setup(self) -> None:
        self.encoder = nn.Dense(self.features, dtype=BF16, **NORMAL)
        self.attention = nn.MultiHeadDotProductAttention(2, dtype=BF16, **NORMAL)
        self.special = LinenSpecial(16, dtype=BF16)
        self.own = nn.Dense(16, dtype=BF16, dot_general=own_product)
        self.norm = nn.LayerNorm()

    def encode(self, x: jax.Array) -> jax.Array:
        return nn.relu(self.encoder(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.own(self.special(self.attention(self.encode(x)))))


def test_linen() -> None:
    model, x = Linen(), random(2, 4, 16)
    variables = model.init(jax.random.key(0), x)
    result = ours.replace(model)
    assert result.replaced == {} and "no layers" in str(result)  # nothing is known before a call
    got = result.model.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, got, variables)
    names = [f"attention/{name}" for name in ("key", "out", "query", "value")]
    assert set(result.replaced) == {"encoder", *names} and result.replaced["encoder"] == "Dense"
    assert result.kept == {
        "norm": "LayerNorm is no dense layer",
        "own": "it has a product of its own, own_product",
        "special": "LinenSpecial is a subclass of Dense",
    }
    close(result.model.apply(variables, x), model.apply(variables, x))
    close(jax.jit(result.model.apply)(variables, x), model.apply(variables, x))
    close(result.model.apply(variables, x, method="encode"), model.apply(variables, x, method=model.encode))
    close(result.model.bind(variables)(x), model.apply(variables, x))
    assert result.model.features == 32 and isinstance(result.model, Linen)
    assert result.undo() is model


class Private(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(8)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def _hidden(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


METHODS: dict[str, Any] = {
    "none": None,
    "a name": "encode",
    "of the class": Private.encode,
    "private": "_hidden",
    "a function": lambda module, x: module.dense(x),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_any_way_to_call_linen(method: Any) -> None:
    model, x = Private(), random(4, 16)
    variables = model.init(jax.random.key(0), x)
    calls: list[Any] = [
        lambda module: module.apply(variables, x, method=method),
        lambda module: module.init(jax.random.key(0), x, method=method),
        lambda module: jax.jit(lambda v: module.apply(v, x, method=method))(variables),
    ]
    for call in calls:
        result = ours.replace(model)
        close(call(result.model), call(model))
        assert result.replaced == {"dense": "Dense"}


def test_a_copy_of_linen_is_pickled_and_replaced_again() -> None:
    model, x = Private(), random(4, 16)
    first = ours.replace(model)
    variables = first.model.init(jax.random.key(0), x)
    loaded = pickle.loads(pickle.dumps(first.model))
    assert isinstance(loaded, Private) and type(loaded) is not Private
    np.testing.assert_array_equal(loaded.apply(variables, x), first.model.apply(variables, x))
    second = ours.replace(first.model)
    close(second.model.apply(variables, x), model.apply(variables, x))
    assert second.replaced == {"dense": "Dense"} and second.undo() is first.model


def test_what_nothing_is_done_to_is_said() -> None:
    layer = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    ours.replace(layer)
    assert str(ours.replace(layer)) == ": kept, it is ours already"
    bridged = nnx.bridge.ToNNX(nn.Dense(8), rngs=nnx.Rngs(0)).lazy_init(random(4, 16))
    assert ours.replace(bridged).kept == {"": "it holds a linen module: replace that one before"}


def test_a_layer_of_linen_is_a_model() -> None:
    layer, x = nn.Dense(24, **NORMAL), jnp.ones((4, 16))
    result = ours.replace(layer)
    variables = result.model.init(jax.random.key(0), x)
    assert result.replaced == {"": "Dense"}
    close(result.model.apply(variables, x), layer.apply(variables, x))


@pytest.mark.long
def test_linen_inside_a_module() -> None:
    """The copy is a module like the other: named as it is, of another's fields, under remat and scan."""
    x = random(4, 16).astype(F32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
            return x + nn.Dense(16, **NORMAL)(x), None

    class Stack(nn.Module):
        inner: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            own = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
            return self.inner(own(x)[0])

    sequence = nn.Sequential([nn.Dense(32, **NORMAL), nn.relu, nn.Dense(8)])
    result, inner = ours.replace(Stack(sequence)), ours.replace(sequence)
    variables = Stack(sequence).init(jax.random.key(0), x)
    want = Stack(sequence).apply(variables, x)
    for model in (result.model, Stack(inner.model)):
        jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), x), variables)
        close(model.apply(variables, x), want)
    assert sorted(path.rpartition("/")[2] for path in result.replaced) == ["Dense_0", "layers_0", "layers_2"]
    assert len(inner.replaced) == 2

    def loss(model: Any) -> Any:
        return jax.grad(lambda v: (model.apply(v, x).astype(F32) ** 2).sum())(variables)

    close(loss(result.model), loss(Stack(sequence)))


def test_intermediates() -> None:
    x = random(4, 16)
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    variables = model.init(jax.random.key(0), x)
    got, want = (m.apply(variables, x, capture_intermediates=True)[1] for m in (ours.replace(model).model, model))
    close(got, want)


@pytest.mark.usefixtures("layers_on_h200")
def test_kernels() -> None:
    x, options = struct(4096, 1024), {"dtype": BF16, "param_dtype": BF16}
    model = nn.Sequential([nn.Dense(4096, **options), nn.relu, nn.Dense(1024, **options)])
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert not calls(hlo(model.apply, variables, x))
    found = calls(hlo(ours.replace(model).model.apply, variables, x))
    assert len(found) == 2 and all(call["variant"].endswith("_bias") for call in found)


def test_errors() -> None:
    with pytest.raises(TypeError, match="`model` requires an `nnx.Module` or a `flax.linen.Module`, got int"):
        ours.replace(3)
    layer = nn.Dense(24)
    bound = layer.bind(layer.init(jax.random.key(0), jnp.ones((4, 16))))
    with pytest.raises(ValueError, match="`model` requires an unbound module, got a bound one"):
        ours.replace(bound)
