"""Products in a `shard_map` and over explicit axes, and their gradients, against the same of `jnp`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from transforms import BF16, F32, arrays, close

import jax_bwgemm
from tests.cases import GATES

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(
    "specs, out_spec",
    [((P("x"), P()), P("x")), ((P(), P(None, "x")), P(None, "x")), ((P("x"), P("y")), P("x", "y"))],
    ids=["rows", "columns", "both"],
)
def test_shard_map(specs, out_spec):
    """Values and gradients; an operand that devices share gets the sum of their gradients."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto)
    a, b = arrays((8, 16), (16, 8))
    f_b = (lambda f: lambda a, b: f(a, b.mT)) if specs[1] == P("y") else (lambda f: f)
    b = b.mT if specs[1] == P("y") else b

    def loss(f, a, b):
        out = jax.shard_map(f_b(f), mesh=mesh, in_specs=specs, out_specs=out_spec)(a, b)
        return (out.astype(F32) ** 2).sum()

    def value_and_grad(f):
        return jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1)))(a, b)

    close(value_and_grad(jax_bwgemm.matmul), value_and_grad(jnp.matmul), 2.0**-6)


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_shard_map_of_fused_and_vmap(activation):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b, bias = arrays((8, 4, 16), (16, 8), (8,))

    def layer(a, b, bias):
        return jax.vmap(lambda a: jax_bwgemm.matmul(a, b, bias=bias, activation=activation))(a)

    def loss(f, *args):
        return f(*args).astype(F32).sum()

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    grads = [jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(a, b, bias) for f in (sharded, layer)]
    close(*grads, 2.0**-6)


def test_explicit_sharding():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    a, b = arrays((8, 16), (16, 8))
    with jax.set_mesh(mesh):
        a, b = jax.device_put(a, P("x")), jax.device_put(b, P(None, "y"))
        out = jax.jit(jax_bwgemm.matmul)(a, b)
        assert jax.typeof(out).sharding.spec == jax.typeof(a @ b).sharding.spec
        close(out, a @ b)


@pytest.mark.parametrize("activation", ["relu", *GATES])
def test_explicit_sharding_of_a_gradient(activation):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    a, b = arrays((8, 16), (16, 8))

    def gradient(f, a, b):
        return jax.jit(jax.grad(lambda a, b: f(a, b).astype(F32).sum()))(a, b)

    def theirs(a, b):
        return getattr(jax.nn, activation)(jnp.matmul(a, b, preferred_element_type=F32)).astype(BF16)

    want = gradient(theirs, a, b)
    with jax.set_mesh(mesh):
        got = gradient(functools.partial(jax_bwgemm.matmul, activation=activation), jax.device_put(a, P("x")), b)
    assert jax.typeof(got).sharding.spec == P("x", None)
    close(got, want, 2.0**-6)
