"""`accelerate`: which chains of a function's jaxpr become one kernel, what stays, and that values and gradients do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, struct

import jax_bwgemm
from jax_bwgemm import accelerate, config
from jax_bwgemm.facts.units import unit

F32 = jnp.float32
M, N, K = 4096, 4096, 1024
X, W, BIAS, MATRIX, SCALAR = struct(M, K), struct(K, N), struct(N), struct(M, N), struct()
pytestmark = pytest.mark.usefixtures("layers_on_h200")


def fused(f: Callable[..., Any], *args: Any) -> list[str | None]:
    """The epilogue of each product."""
    return [product.epilogue for product in accelerate(f).report(*args).products]


def reasons(f: Callable[..., Any], *args: Any) -> list[str | None]:
    return [product.reason for product in accelerate(f).report(*args).products]


def close(got: Any, want: Any, tolerance: float = 0.02) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        atol = tolerance * float(jnp.abs(w).max() + 1e-3)
        np.testing.assert_allclose(g.astype(F32), w.astype(F32), rtol=0, atol=atol)


def values(*structs: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x.shape) / 8, x.dtype) for x in structs]


CHAINS = {
    "bias": (lambda x, w, b: x @ w + b, "bias"),
    "bias first": (lambda x, w, b: b + x @ w, "bias"),
    "bias reshaped": (lambda x, w, b: x @ w + jnp.reshape(b, (1, -1)), "bias"),
    "bias broadcast": (lambda x, w, b: x @ w + jnp.broadcast_to(b, (M, N)), "bias"),
    "bias in float32": (
        lambda x, w, b: (jnp.dot(x, w, preferred_element_type=F32) + b.astype(F32)).astype(BF16),
        "bias",
    ),
    "bias of a row": (lambda x, w, b: x @ w + lax.optimization_barrier(b[None]), "bias"),
    "bias of m": (lambda x, w, b: x @ w + b[:, None], "bias"),  # as the transposed product's
    "relu": (lambda x, w, b: jax.nn.relu(x @ w + b), "bias_relu"),
    "gelu": (lambda x, w, b: jax.nn.gelu(x @ w + b), "bias_gelu"),
    "jitted": (lambda x, w, b: jax.jit(jax.nn.gelu)(x @ w + b), "bias_gelu"),
    "gelu in float32": (lambda x, w, b: jax.nn.gelu((x @ w + b).astype(F32)).astype(BF16), "bias_gelu"),
    "silu": (lambda x, w, b: jax.nn.silu(x @ w + b), "bias_silu"),
    "silu in so many words": (lambda x, w, b: (y := x @ w + b) * jax.nn.sigmoid(y), "bias_silu"),
    "swish": (lambda x, w, b: jax.nn.swish(x @ w), "silu"),
    "einsum": (lambda x, w, b: jax.nn.relu(jnp.einsum("mk,kn->mn", x, w) + b), "bias_relu"),
    "transposed weight": (
        lambda x, w, b: jax.nn.relu(lax.dot_general(x, w, (((1,), (0,)), ((), ()))) + b),
        "bias_relu",
    ),
}
MATRICES = {
    "residual": (lambda x, w, b, r: x @ w + b + r, "bias_residual"),
    "residual first": (lambda x, w, b, r: r + (x @ w + b), "bias_residual"),
    "all": (lambda x, w, b, r: r + jax.nn.silu(x @ w + b), "bias_silu_residual"),
}


@pytest.mark.parametrize("f, epilogue", [*CHAINS.values(), *MATRICES.values()], ids=[*CHAINS, *MATRICES])
def test_chains(f: Any, epilogue: str) -> None:
    args = (X, W, BIAS, MATRIX)[: f.__code__.co_argcount]
    assert fused(f, *args) == [epilogue]
    text = hlo(accelerate(f), *args)
    (call,) = calls(text)
    assert call["variant"].endswith(f"_{epilogue}") and "dot_general" not in text
    assert "stablehlo.add" not in text and "stablehlo.maximum" not in text


def test_dimensions_of_layers() -> None:
    """(batch, length, width) @ (width, heads, size), with a bias of (heads, size)."""

    def f(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(jnp.einsum("bsd,dhk->bshk", x, w) + b)

    assert fused(f, struct(4, 1024, K), struct(K, 64, 64), struct(64, 64)) == ["bias_relu"]


LEFT = {
    "another activation": (lambda x, w, b: jnp.sin(x @ w), "`sin` is no operation of an epilogue"),
    "maximum, half as steep at 0": (lambda x, w, b: jnp.maximum(x @ w, 0), "no cubin"),
    "a derivative of its own": (lambda x, w, b: straight(x @ w), "`custom_jvp`"),
    "a scalar of the device": (lambda x, w, b: (x @ w) * b[0], "no cubin"),
    "no chain": (lambda x, w, b: x @ w, "nothing follows it"),
    "sums": (lambda x, w, b: (x @ w).sum(), "nothing follows it"),
    "int8": (lambda x, w, b: jax.nn.relu(lax.dot(x, w, preferred_element_type=jnp.int32)), "nothing follows|is no"),
    "float64": (lambda x, w, b: jax.nn.relu(x @ w), "nothing follows|float64"),
    "float32 as such": (lambda x, w, b: jax.nn.relu(jnp.dot(x, w, precision="highest")), "got highest"),
    "no kernel": (lambda x, w, b: (jnp.tanh(x @ w) * 2 + b) * 3, "no cubin"),
}


@jax.custom_jvp
def straight(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


straight.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0]))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    f, reason = LEFT[name]
    dtype = {"int8": "int8", "float64": "float64", "float32 as such": "float32"}.get(name, "bfloat16")
    with jax.enable_x64(dtype == "float64"):
        args = [struct(*x.shape, dtype=dtype) for x in (X, W, BIAS)]
        assert fused(f, *args) == [None]
        (found,) = reasons(f, *args)
        assert re.search(reason, found), found
        assert str(jax.make_jaxpr(accelerate(f))(*args)) == str(jax.make_jaxpr(f)(*args))


def test_where_no_gpu_is_planned_for_nothing_changes() -> None:
    f = CHAINS["gelu"][0]
    with config(device="b200"):  # whose kernels are not here
        assert fused(f, X, W, BIAS) == [None]
        assert "bwgemm" not in str(jax.make_jaxpr(accelerate(f))(X, W, BIAS))


def test_a_chain_ends_where_a_value_is_read_elsewhere() -> None:
    def f(x: Any, w: Any, b: Any, r: Any) -> Any:
        y = x @ w + b
        return jax.nn.relu(y), jnp.cumsum(y, 0)

    def g(x: Any, w: Any, b: Any, r: Any) -> Any:
        y = jax.nn.relu(x @ w + b)
        return y + r, y

    def h(x: Any, w: Any, b: Any, r: Any) -> Any:
        y = x @ w
        return jax.nn.relu(y + b), y

    args = X, W, BIAS, MATRIX
    assert (fused(f, *args), fused(g, *args), fused(h, *args)) == (["bias"], ["bias_relu"], [None])
    assert "read elsewhere" in reasons(h, *args)[0]
    assert len(calls(hlo(accelerate(g), *args))) == 1


def test_what_xla_passes_over_anyway_is_left() -> None:
    """A bias in the kernel saves nothing before a function that no kernel has."""

    def f(x: Any, w: Any, b: Any) -> Any:
        return jnp.sin(x @ w + b)

    assert fused(f, X, W, BIAS) == [None]


def test_a_residual_before_a_norm() -> None:
    """The sum is read twice, for the norm and by it, so that it lies in memory anyway."""

    def f(x: Any, w: Any, v: Any) -> Any:
        y = x + x @ w
        wide = y.astype(F32)
        z = (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True))).astype(y.dtype)
        return y + z @ v

    args = struct(M, K), struct(K, K), struct(K, K)
    assert fused(f, *args) == ["residual", "residual"]
    own = values(struct(64, 32), struct(32, 32), struct(32, 32))
    close(accelerate(f)(*own), f(*own))


def test_two_products_that_are_added() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return x @ w + b + x @ w

    found = fused(f, X, W, BIAS)
    assert sorted(found, key=str) == [None, "bias_residual"]
    x, w, b = values(struct(64, 32), struct(32, 128), struct(128))
    close(accelerate(f)(x, w, b), f(x, w, b))


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


def up_first(x: Any, gate: Any, up: Any) -> Any:
    y = x @ up
    return y * jax.nn.silu(x @ gate)


@pytest.mark.parametrize("f", [swiglu, up_first])
def test_gated(f: Any) -> None:
    """Both products are one kernel's, whichever comes first."""
    args = X, W, W
    assert fused(f, *args) == [unit("silu", is_gated=True).kind]
    text = hlo(accelerate(f), *args)
    (call,) = calls(text)
    assert "gated" in call["variant"] and "dot_general" not in text and "stablehlo.multiply" not in text
    own = values(struct(64, 32), struct(32, 128), struct(32, 128))
    own[2] = own[2] * 2
    close(accelerate(f)(*own), f(*own))

    def loss(f: Any) -> Any:
        return jax.grad(lambda *x: (f(*x).astype(F32) ** 2).sum(), range(3))

    close(loss(accelerate(f))(*own), loss(f)(*own), 0.05)


def test_gated_of_other_arrays_or_read_elsewhere() -> None:
    def of_two(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(x @ gate) * ((2 * x) @ up)

    def read_twice(x: Any, gate: Any, up: Any) -> Any:
        y = x @ up
        return jax.nn.silu(x @ gate) * y, y

    for f in (of_two, read_twice):
        assert unit("silu", is_gated=True).kind not in fused(f, X, W, W)
        assert len(fused(f, X, W, W)) == 2


def mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2 + x


MLP = X, W, BIAS, struct(N, K), struct(K)


def scanned(x: Any, *weights: Any) -> Any:
    return lax.scan(lambda c, _: (mlp(c, *weights), None), x, length=3)[0]


def looped(x: Any, *weights: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, mlp(c[1], *weights)), (0, x))[1]


def branched(x: Any, *weights: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda: mlp(x, *weights), lambda: x)


def rematerialised(x: Any, *weights: Any) -> Any:
    return jax.checkpoint(mlp)(x, *weights)


def jitted(x: Any, *weights: Any) -> Any:
    f = jax.jit(mlp)
    return f(f(x, *weights), *weights)


@jax.custom_vjp
def with_rule(x: Any, *weights: Any) -> Any:
    return mlp(x, *weights)


with_rule.defvjp(lambda *x: (mlp(*x), x), lambda x, ct: (ct, *(jnp.ones_like(y) for y in x[1:])))


@pytest.mark.parametrize("f", [mlp, scanned, looped, branched, rematerialised, jitted, with_rule])
def test_inside_of(f: Any) -> None:
    assert fused(f, *MLP) == ["bias_gelu", "bias_residual"]
    assert len({call["variant"] for call in calls(hlo(accelerate(f), *MLP))}) == 2
    args = values(struct(64, 32), struct(32, 128), struct(128), struct(128, 32), struct(32))
    close(jax.jit(accelerate(f))(*args), f(*args), 0.05)
    close(accelerate(f)(*args), f(*args), 0.05)
    if f is looped:  # JAX has no reverse of it
        return

    def loss(f: Any) -> Any:
        return jax.grad(lambda *x: (f(*x).astype(F32) ** 2).sum(), range(5))

    want = loss(f)(*args)
    close(loss(accelerate(f))(*args), want, 0.1)
    close(accelerate(loss(f))(*args), want, 0.1)


def test_what_is_shared_stays_shared() -> None:
    """A function that is jitted inside and called twice is rewritten, and lowered, once."""
    assert str(jax.make_jaxpr(accelerate(jitted))(*MLP)).count("bwgemm_fused_matmul") <= 4
    assert hlo(accelerate(jitted), *MLP).count("@jax_bwgemm_matmul_v2") == 2


def test_gradients_keep_what_they_keep() -> None:
    """accelerate(grad(f)): the argument of gelu is read twice; a sum of cotangents is a residual."""
    found = accelerate(jax.grad(lambda *x: (mlp(*x).astype(F32) ** 2).sum(), range(5))).report(*MLP)
    assert [x.epilogue for x in found.products].count("residual") == 1
    assert len(found.products) == 6 and found.products[0].epilogue is None
    assert "products: 6" in str(found) and "left alone (" in str(found) and "test_accelerate.py:" in str(found)


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"])
def test_policies_know_our_products(policy: str) -> None:
    """The products forward are computed once under a policy that keeps them."""

    def loss(f: Any) -> Any:
        own = jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, policy))
        return lambda *x: (own(*x).astype(F32) ** 2).sum()

    assert fused(loss(mlp), *MLP) == ["bias_gelu", "bias_residual"]
    text = hlo(jax.grad(accelerate(loss(mlp)), range(5)), *MLP)
    assert text.count("dot_general") + len(calls(text)) == (7 if policy == "nothing_saveable" else 6)


def test_an_unknown_policy_is_left_its_products() -> None:
    policy = jax.checkpoint_policies.save_any_names_but_these("x")
    f = jax.checkpoint(mlp, policy=policy)
    assert fused(f, *MLP) == [None, None]
    assert "a policy of `jax.checkpoint`" in reasons(f, *MLP)[0]


def test_a_function_under_a_policy_and_without_one() -> None:
    """What is left for the policy is not left elsewhere, and the other way round."""
    inner = jax.jit(mlp)
    policy = jax.checkpoint_policies.save_any_names_but_these("x")

    def f(x: Any, *weights: Any) -> Any:
        return inner(jax.checkpoint(inner, policy=policy)(inner(x, *weights), *weights), *weights)

    assert fused(f, *MLP).count(None) == 2
    assert str(jax.make_jaxpr(accelerate(f))(*MLP)).count("dot_general[") == 2


def test_vmap() -> None:
    args = values(struct(3, 64, 32), struct(32, 128), struct(128))
    f, axes = CHAINS["relu"][0], (0, None, None)
    close(jax.vmap(accelerate(f), axes)(*args), jax.vmap(f, axes)(*args))
    close(accelerate(jax.vmap(f, axes))(*args), jax.vmap(f, axes)(*args))
    assert fused(jax.vmap(f, axes), struct(4, 1024, K), W, BIAS) == ["bias_relu"]


def test_shard_map() -> None:
    """Rows are sharded, and the bias is cast to vary as they do; its gradient is summed over the devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def f(x: Any, w: Any, b: Any) -> Any:
        return jax.shard_map(CHAINS["relu"][0], mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))(x, w, b)

    assert fused(f, struct(4 * M, K), W, BIAS) == ["bias_relu"]
    args = values(struct(64, 32), struct(32, 128), struct(128))
    close(jax.jit(accelerate(f))(*args), f(*args))

    def loss(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (f(*x).astype(F32) ** 2).sum(), range(3)))

    close(loss(accelerate(f))(*args), loss(f)(*args))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    args = values(struct(64, 32), struct(32, 128), struct(128))
    want = CHAINS["relu"][0](*args)
    with jax.set_mesh(mesh):
        specs = P("x"), P(None, "y"), P("y")
        own = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        f = accelerate(CHAINS["relu"][0])
        assert [x.epilogue for x in f.report(*own).products] == ["bias_relu"]
        got = jax.jit(f)(*own)
    assert got.sharding.spec == P("x", "y")
    close(np.asarray(got), np.asarray(want))


def test_install_has_the_products_that_are_left() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return jnp.sin(jnp.cumsum(jax.nn.relu(x @ w + b), 0) @ w.T)

    assert len(calls(hlo(accelerate(f), X, W, BIAS))) == 1
    with jax_bwgemm.installed():
        assert len(calls(hlo(accelerate(f), X, W, BIAS))) == 2


def test_arguments() -> None:
    """Pytrees, keywords, and such as are no arrays; results of any structure."""

    def f(params: Any, x: Any, *, activation: str, scale: float = 1.0, rest: Any = None) -> Any:
        y = getattr(jax.nn, activation)(x @ params["w"] + params["b"])
        return {"y": y, "none": rest, "scale": scale}

    x, w, b = values(struct(64, 32), struct(32, 128), struct(128))
    got = accelerate(f)({"w": w, "b": b}, x, activation="relu", scale=2.0)
    assert got["none"] is None and got["scale"] == 2.0
    close(got["y"], jax.nn.relu(x @ w + b))
    assert accelerate(f).__name__ == "f" and accelerate(f).__wrapped__ is f
    with pytest.raises(TypeError, match="`accelerate` requires a function, got int"):
        accelerate(3)


def test_methods() -> None:
    class Layer:
        w, b = values(struct(32, 128), struct(128))

        @accelerate
        def __call__(self, x: Any) -> Any:
            return jax.nn.relu(x @ self.w + self.b)

    (x,) = values(struct(64, 32))
    close(Layer()(x), jax.nn.relu(x @ Layer.w + Layer.b))
    assert Layer.__call__.report(Layer(), x).num_fused == 1


def test_weak_types_and_closures() -> None:
    x, w, b = values(struct(64, 32), struct(32, 128), struct(128))
    f = accelerate(lambda x: jax.nn.relu(x @ w + b) * 2.0)
    close(f(x), jax.nn.relu(x @ w + b) * 2.0)
    assert accelerate(lambda x: x * 2)(jnp.asarray(1.0)) == 2.0


def test_flaxs_layers() -> None:
    nnx = pytest.importorskip("flax.nnx")
    layers = [nnx.Linear(K, N, rngs=nnx.Rngs(0), dtype=BF16, param_dtype=BF16)]
    layers.append(nnx.Linear(N, K, rngs=nnx.Rngs(0), dtype=BF16, param_dtype=BF16))
    graphdef, state = nnx.split(nnx.List(layers))

    def f(state: Any, x: Any) -> Any:
        up, down = nnx.merge(graphdef, state)
        return down(nnx.gelu(up(x))) + x

    found = accelerate(f).report(state, X).products
    assert [(x.epilogue, x.is_in_block) for x in found] == [("bias_gelu", True), ("bias_residual", True)]
