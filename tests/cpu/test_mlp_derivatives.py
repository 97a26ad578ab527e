"""Forward mode and second derivatives of gated products and feed-forward blocks, against JAX's own of the same with
`@`, under every transformation; and of how many products they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import Fun, arrays, close, dense, each_layer, gated, gradients
from lowered import BF16

from jax_bwgemm import gated_mlp, mlp

Layer = Callable[[], tuple[Fun, Fun, list[jax.Array]]]


@pytest.fixture(autouse=True)
def precise():
    with jax.default_matmul_precision("highest"):
        yield


def nearly(got: object, want: object) -> None:
    """Of second derivatives, some of which are large."""
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3), got, want)


def directions(operands: list[jax.Array]) -> list[jax.Array]:
    return [jnp.cos(3 * x) for x in operands]


@pytest.mark.long
@each_layer
def test_forward_mode(layer: Layer) -> None:
    """Of all operands, of each alone, linearised, compiled, and of many directions at once."""
    ours, plain, operands = layer()
    dots = directions(operands)
    want = jax.jvp(plain, operands, dots)
    close(jax.jvp(ours, operands, dots), want)
    close(jax.jit(functools.partial(jax.jvp, ours))(operands, dots), want)
    close(jax.linearize(ours, *operands)[1](*dots), want[1])
    for i in range(len(operands)):

        def alone(f: Fun, i: int = i) -> object:
            return jax.jvp(lambda x: f(*operands[:i], x, *operands[i + 1 :]), (operands[i],), (dots[i],))

        close(alone(ours), alone(plain))
    many = [jnp.stack([x, 2 * x]) for x in dots]
    close(*(jax.vmap(lambda dots, f=f: jax.jvp(f, operands, dots)[1])(many) for f in (ours, plain)))


@pytest.mark.long
@each_layer
def test_second_derivatives(layer: Layer) -> None:
    """Forward over reverse, with what is kept computed again too; reverse over forward; reverse over reverse."""
    ours, plain, operands = layer()
    dots = directions(operands)

    def forward(f: Fun) -> object:
        return jax.jit(lambda: jax.jvp(gradients(f, operands), operands, dots))()

    def of_tangent(*args: jax.Array, f: Fun) -> jax.Array:
        return jax.jvp(f, list(args), dots)[1]

    def of_gradient(*args: jax.Array, f: Fun) -> jax.Array:
        return sum(x.sum() for x in gradients(f, operands)(*args))

    want = forward(plain)
    nearly(forward(ours), want)
    nearly(forward(jax.checkpoint(ours)), want)
    for g in (of_tangent, of_gradient):
        nearly(*(jax.jit(gradients(functools.partial(g, f=f), operands))(*operands) for f in (ours, plain)))


@pytest.mark.long
@pytest.mark.parametrize("layer", [dense, gated])
def test_gradients_of_many(layer: Layer) -> None:
    """Of a mapped block, of which some operand is shared; and how these change."""
    ours, plain, operands = layer()
    for i in range(len(operands)):
        axes = tuple(1 if i == j else None for j in range(len(operands)))
        stacked = [jnp.stack([x, 2 * x], 1) if i == j else x for j, x in enumerate(operands)]
        many = [gradients(jax.vmap(f, axes), operands) for f in (ours, plain)]
        close(*(f(*stacked) for f in many))
        if i < 2:
            nearly(*(jax.jit(functools.partial(jax.jvp, f))(stacked, directions(stacked)) for f in many))


def test_a_hessian() -> None:
    ours, plain, (x, *weights) = gated()
    x = x[0, :2]
    hessians = (jax.jit(jax.hessian(lambda x, f=f: jnp.sin(f(x, *weights)).sum()))(x) for f in (ours, plain))
    nearly(*hessians)


def test_in_a_scan() -> None:
    """Layer upon layer, recomputed: its gradient, and how that changes."""
    x, up, gate, down = (y / 4 for y in arrays((8, 16), (3, 16, 24), (3, 16, 24), (3, 24, 16)))

    def model(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array, *, block: Fun) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(lambda x, ws: (block(x, *ws), None)), x, (up, gate, down))[0]

    def plain(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ up) * (x @ gate)) @ down + x

    def ours(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array) -> jax.Array:
        return gated_mlp(x, up, gate, down, residual=x, on_fallback="ignore", precision="highest")

    operands = [x, up, gate, down]
    found = [gradients(functools.partial(model, block=block), operands) for block in (ours, plain)]
    nearly(*(jax.jit(functools.partial(jax.jvp, f))(operands, directions(operands)) for f in found))


def test_in_bfloat16_relu_is_flat_where_nothing_comes_out() -> None:
    """Whatever comes: an infinite tangent, too."""
    x, w = jnp.ones((2, 4), BF16), jnp.ones((4, 4), BF16)
    f = functools.partial(mlp, w_in=-w, w_out=w, activation="relu", on_fallback="ignore")
    assert not jax.jvp(f, (x,), (jnp.full_like(x, jnp.inf),))[1].any()


@pytest.mark.parametrize(("layer", "num"), [(dense, 4), (gated, 6)])
def test_products_of_a_tangent(layer: Layer, num: int) -> None:
    """Two for each weight; of the input's alone, one for each."""
    ours, _, operands = layer()

    def count(f: Fun, *args: object) -> int:
        return str(jax.make_jaxpr(f)(*args)).count("bwgemm_matmul[")

    linear = jax.linearize(ours, *operands)[1]
    found = jax.make_jaxpr(linear)(*operands)
    (eqn,) = [eqn for eqn in found.eqns if eqn.primitive.name == "bwgemm_linear"]
    avals = [x.aval for x in eqn.invars]
    assert count(functools.partial(eqn.primitive.impl, **eqn.params), *avals) == num
