"""`accelerate` of what models write in other ways, and of what only looks like an operation of an epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, struct

from jax_bwgemm import accelerate, config, explain
from jax_bwgemm.runtime import jit_build

F32 = jnp.float32
pytestmark = pytest.mark.usefixtures("layers_on_h200")
X, W, U, V, B, C = (8192, 4096), (4096, 14336), (4096, 14336), (14336, 4096), (14336,), (14336,)


@pytest.fixture(autouse=True)
def _any_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that do not ship would be compiled on demand."""
    monkeypatch.setattr(jit_build, "why_not_here", lambda: None)
    with config(compile_missing="auto"):
        yield


def products(f: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = BF16) -> Any:
    return accelerate(f).report(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).products


def values(*shapes: tuple[int, ...], dtype: Any = BF16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape) / 8, dtype) for shape in shapes]


def mesh_of(axis_type: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


def agree(f: Callable[..., Any], operands: list[jax.Array], num: int) -> None:
    """Values and gradients, with what is fused computed by XLA."""

    def loss(f: Callable[..., Any], *args: Any) -> Any:
        return (f(*args).astype(F32) ** 2).sum()

    with config(on_fallback="ignore"):
        for g in (f, jax.grad(lambda *x: loss(f, *x), range(num))):
            own = jax.grad(lambda *x: loss(accelerate(f), *x), range(num)) if g is not f else accelerate(f)
            for found, want in zip(
                jax.tree.leaves(jax.jit(own)(*operands)), jax.tree.leaves(jax.jit(g)(*operands)), strict=True
            ):
                assert found.dtype == want.dtype and found.weak_type == want.weak_type
                np.testing.assert_allclose(
                    np.asarray(found, np.float64), np.asarray(want, np.float64), atol=2e-2, rtol=6e-2
                )


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


straight_through.defjvp(lambda primals, tangents: (jnp.maximum(primals[0], 0), tangents[0]))


def test_a_derivative_of_ones_own_is_kept() -> None:
    """The values are a relu's, but not its derivative."""
    (product,) = products(lambda x, w: straight_through(x @ w), X, W)
    assert product.epilogue is None and "with a derivative of its own" in product.reason
    for f in (lambda x, w, v: straight_through(x @ w), lambda x, w, v: straight_through(x @ w) @ v):
        agree(f, values((64, 32), (32, 64), (64, 32)), 3)
    assert products(lambda x, w: jax.nn.relu(x @ w), X, W)[0].epilogue == "relu"


def gelu_new(y: Any) -> Any:
    return 0.5 * y * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * jnp.power(y, 3))))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (gelu_new, "gelu"),
        (lambda y: 0.5 * y * (1 + jnp.tanh(0.7978845608 * (y + 0.044715 * y**3))), "gelu"),
        (lambda y: jax.nn.relu(y) ** 2, "squared_relu"),
        (lambda y: jnp.square(jax.nn.relu(y)), "squared_relu"),
        (lambda y: y * jax.nn.sigmoid(y), "silu"),
    ],
)
def test_activations_written_out(activation: Callable[..., Any], name: str) -> None:
    (product,) = products(lambda x, w: activation(x @ w), X, W)
    assert product.epilogue == name
    agree(lambda x, w: activation(x @ w), values((64, 32), (32, 64)), 2)


GATED = {
    "gate first": lambda x, w, u, v, b, c: (jax.nn.silu(x @ w) * (x @ u)) @ v,
    "up first": lambda x, w, u, v, b, c: ((x @ u) * jax.nn.silu(x @ w)) @ v,
    "biases": lambda x, w, u, v, b, c: (jax.nn.silu(x @ w + b) * (x @ u + c)) @ v,
    "biases before": lambda x, w, u, v, b, c: (jax.nn.silu(b + x @ w) * (c + x @ u)) @ v,
    "up and biases first": lambda x, w, u, v, b, c: ((c + x @ u) * jax.nn.silu(b + x @ w)) @ v,
}


@pytest.mark.parametrize("name", GATED)
def test_gated_blocks(name: str) -> None:
    found = products(GATED[name], X, W, U, V, B, C)
    assert [product.is_in_block for product in found] == [True, True]
    agree(GATED[name], values((64, 32), (32, 48), (32, 48), (48, 32), (48,), (48,)), 6)


def test_layers_that_cast_their_input_each() -> None:
    """As Flax's do, whose norms return float32."""

    def block(x: Any, w: Any, u: Any, v: Any) -> Any:
        gate, up = x.astype(BF16) @ w, x.astype(BF16) @ u
        return (jax.nn.silu(gate) * up) @ v

    args = jax.ShapeDtypeStruct(X, F32), struct(*W), struct(*U), struct(*V)
    assert [product.is_in_block for product in accelerate(block).report(*args).products] == [True, True]
    (x,), rest = values((64, 32), dtype=F32), values((32, 48), (32, 48), (48, 32))
    agree(block, [x, *rest], 4)


def test_what_reads_a_product_is_named() -> None:
    """Not by the name of a primitive of ours."""
    _, second = products(lambda x, w: (jax.nn.relu(x @ w) * 2) @ (x @ w).T, (512, 512), (512, 512))[:2]
    assert "bwgemm" not in str(second)


@pytest.mark.parametrize("second", ["td,vd->tv", "td,dv->tv"])
def test_a_second_layer_by_einsum(second: str) -> None:
    shape = (32000, 1024) if second == "td,vd->tv" else (1024, 32000)

    def f(x: Any, w: Any, b: Any, e: Any) -> Any:
        return jnp.einsum(second, jax.nn.gelu(x @ w + b), e)

    found = products(f, (4096, 1024), (1024, 1024), (1024,), shape)
    assert found[0].epilogue == "bias_gelu" and found[1].is_in_block is (second == "td,dv->tv")
    small = (96, 64) if second == "td,vd->tv" else (64, 96)
    agree(f, values((32, 64), (64, 64), (64,), small), 4)


@pytest.mark.parametrize("cast", ["bfloat16", "float32 made bfloat16", "bool"])
def test_a_scalar_operand_is_float32(cast: str) -> None:
    """Whatever it was: kernels have it as a parameter of four bytes."""
    flag = jnp.asarray(True)
    scalars = {"bfloat16": jnp.asarray(0.3, BF16), "float32 made bfloat16": jnp.asarray(0.3, F32), "bool": flag}

    def f(x: Any, w: Any, s: Any) -> Any:
        y = x @ w
        return jnp.where(s, jax.nn.relu(y), y * 2) if cast == "bool" else jax.nn.relu(y) * s.astype(BF16)

    x, w = values((256, 128), (128, 256))
    jaxpr = jax.make_jaxpr(accelerate(f))(struct(8192, 4096), struct(4096, 14336), scalars[cast])
    (own,) = [eqn for eqn in jaxpr.eqns if "bwgemm" in eqn.primitive.name]
    assert [str(v.aval.dtype) for v in own.invars if v.aval.ndim == 0] == ["float32"]
    with config(on_fallback="ignore"):
        found = jax.jit(accelerate(f))(x, w, scalars[cast])
    np.testing.assert_allclose(np.asarray(found, F32), np.asarray(f(x, w, scalars[cast]), F32), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["relu", "silu gated", "gelu", "scaled"])
def test_inside_a_shard_map(name: str, axis_type: AxisType) -> None:
    """There, constants vary over the mesh, too."""
    bodies = {
        "relu": lambda x, w, v: jax.nn.relu(x @ w) @ v + x,
        "silu gated": lambda x, w, v: (jax.nn.silu(x @ w) * (x @ (w * 2))) @ v,
        "gelu": lambda x, w, v: jax.nn.gelu(x @ w),
        "scaled": lambda x, w, v: jax.nn.relu(x @ w * 0.5),
    }
    mesh = mesh_of(axis_type)
    f = jax.shard_map(bodies[name], mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    with jax.set_mesh(mesh):
        specs = (P("x"), P(), P()) if axis_type == AxisType.Explicit else (None,) * 3
        shapes = (4 * 8192, 4096), (4096, 14336), (14336, 4096)
        args = [jax.ShapeDtypeStruct(own, BF16, sharding=spec) for own, spec in zip(shapes, specs, strict=True)]
        inside = accelerate(f).report(*args).products
    alone = products(bodies[name], (8192, 4096), (4096, 14336), (14336, 4096))
    assert [x.epilogue for x in inside] == [x.epilogue for x in alone] and inside[0].epilogue
    assert [x.is_in_block for x in inside] == [x.is_in_block for x in alone]
    if axis_type == AxisType.Auto:
        agree(f, values((64, 32), (32, 64), (64, 32)), 3)


def test_explicit_axes_stay_what_they_were() -> None:
    """What follows a product may shard what it does not."""
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        shapes = ((8192, 4096), P("x")), ((4096, 14336), P()), ((14336,), P("y")), ((8192, 14336), P("x", "y"))
        x, w, b, q = (jax.ShapeDtypeStruct(shape, BF16, sharding=spec) for shape, spec in shapes)
        for f in (
            lambda x, w, b, q: jax.nn.relu(x @ w + b),
            lambda x, w, b, q: x @ w + q,
            lambda x, w, b, q: jax.nn.relu(jnp.matmul(x, w, out_sharding=P("x", None)) + b),
            lambda x, w, b, q: jnp.matmul(x, w, out_sharding=P("x", None)) + q,
            lambda x, w, b, q: jnp.stack([jax.nn.relu(x @ w + b), q]),
            jax.grad(lambda x, w, b, q: (jax.nn.relu(x @ w + b) * q).astype(F32).sum(), (0, 1, 2)),
        ):
            found, want = (jax.tree.leaves(jax.eval_shape(g, x, w, b, q)) for g in (accelerate(f), f))
            assert [y.sharding.spec for y in found] == [y.sharding.spec for y in want]
        assert accelerate(lambda x, w, b: jax.nn.relu(x @ w + b)).report(x, w, b).num_fused == 1


@pytest.mark.parametrize("to, of", [(jnp.float16, F32), (BF16, F32), (jnp.float16, BF16)], ids=str)
def test_an_operand_that_is_rounded_is_no_repetition(to: Any, of: Any) -> None:
    """What is added is what a narrower dtype has of it: infinite here, or with fewer digits."""

    def f(x: jax.Array, w: jax.Array, r: jax.Array) -> jax.Array:
        return x @ w + r.astype(to).astype(of)

    x, w = values((64, 32), (32, 64), dtype=of)
    r = jnp.full((64, 64), 100003.0, of)
    with config(on_fallback="ignore"):
        np.testing.assert_array_equal(jax.jit(accelerate(f))(x, w, r), jax.jit(f)(x, w, r))
    (product,) = products(lambda x, w, r: x @ w + r.astype(F32), (512, 256), (256, 1024), (512, 1024), dtype=F32)
    assert product.epilogue is not None


def test_shardings_of_a_jitted_function_are_kept() -> None:
    mesh = mesh_of(AxisType.Auto)
    placed = jax.jit(jax.nn.relu, out_shardings=NamedSharding(mesh, P("x")))
    (product,) = products(lambda x, w: placed(x @ w), X, W)
    assert product.epilogue is None and "with shardings of its own" in product.reason


def test_a_weak_type_is_kept() -> None:
    weak = jnp.full((8192, 4096), 0.1).astype(BF16)

    def f(x: Any) -> Any:
        return jax.nn.relu(x @ x)

    x = jnp.full((128, 128), 0.1)
    assert x.weak_type and not weak.weak_type
    with config(on_fallback="ignore"):
        assert (accelerate(f)(x) * jnp.ones((128, 128), BF16)).dtype == (f(x) * jnp.ones((128, 128), BF16)).dtype


def test_arguments_that_are_no_arrays() -> None:
    for dtype in (np.float32, np.float16, jnp.bfloat16, np.dtype("float32")):
        assert accelerate(lambda x, dtype: x.astype(dtype))(jnp.ones((2, 2)), dtype=dtype).dtype == dtype


def test_constant_results_are_arrays() -> None:
    zero, flag, two = accelerate(lambda x: (jnp.zeros(()), jnp.array(False), 2.0))(jnp.ones(3))
    assert isinstance(zero, jax.Array) and isinstance(flag, jax.Array) and flag.dtype == jnp.bool_
    assert two == 2.0 and (jnp.ones((), BF16) * two).dtype == BF16


def test_products_of_a_block_are_on_the_users_line() -> None:
    def loss(x: Any, w: Any, v: Any) -> Any:
        return accelerate(lambda x, w, v: jax.nn.relu(x @ w) @ v)(x, w, v).astype(F32).sum()

    operands = struct(*X), struct(*W), struct(*V)
    found = explain(jax.grad(loss, (0, 1, 2)), *operands, device="h200").products
    assert len(found) >= 5 and all(product.where.startswith("test_accelerate_models.py:") for product in found)


def test_a_method_has_a_report() -> None:
    class Layer:
        w = jnp.ones((8, 8))

        @accelerate
        def __call__(self, x: Any) -> Any:
            return jax.nn.relu(x @ self.w)

        @accelerate
        def named(self, x: Any) -> Any:
            """What it does."""
            return jax.nn.relu(x @ self.w)

    layer = Layer()
    assert len(layer.named.report(jnp.ones((8, 8))).products) == 1
    assert layer.named.__doc__ == "What it does." and layer(jnp.ones((2, 8))).shape == (2, 8)


def test_sums_that_are_put_off_stay_jaxs() -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        x = jax.ShapeDtypeStruct((8192, 4096), BF16, sharding=P("x"))
        w = jax.ShapeDtypeStruct((4096, 14336), BF16)

        def f(x: Any, w: Any) -> Any:
            return jax.nn.relu(x @ jax.sharding.reshard(w, P(None, None, reduced={"x"})))

        (product,) = accelerate(f).report(x, w).products
        assert product.epilogue is None and "put off" in product.reason
        assert jax.eval_shape(accelerate(f), x, w).sharding == jax.eval_shape(f, x, w).sharding
