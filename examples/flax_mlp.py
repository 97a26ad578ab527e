"""Trains a small bfloat16 MLP whose dense layers multiply through `jax_bwgemm.dot_general`, in linen and in nnx.

The layers, parameters and checkpoints stay Flax's own; only the product inside them changes. Each run is compared with
the same training on plain Flax. `pip install flax optax`, then `python examples/flax_mlp.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_bwgemm

NUM_STEPS, BATCH, FEATURES, HIDDEN = 40, 256, 64, 128
TOLERANCE = 0.02  # relative difference of the losses: bfloat16 products, rounded at other places
DotGeneral = Callable[..., jax.Array]


def batches() -> list[tuple[jax.Array, jax.Array]]:
    """Random inputs and what a random two-layer teacher makes of them."""
    rng = np.random.default_rng(0)
    inner, outer = rng.standard_normal((FEATURES, 32)) / 8, rng.standard_normal((32, 8)) / 6
    xs = rng.standard_normal((NUM_STEPS, BATCH, FEATURES))
    return [(jnp.asarray(x, jnp.bfloat16), jnp.asarray(np.tanh(x @ inner) @ outer, jnp.float32)) for x in xs]


def mse(got: jax.Array, want: jax.Array) -> jax.Array:
    return ((got.astype(jnp.float32) - want) ** 2).mean()


def train_linen(dot_general: DotGeneral) -> list[float]:
    dense = [nn.Dense(n, dtype=jnp.bfloat16, dot_general=dot_general) for n in (HIDDEN, HIDDEN, 8)]
    model = nn.Sequential([dense[0], nn.relu, dense[1], nn.relu, dense[2]])
    data, optimiser = batches(), optax.adam(3e-3)
    params = model.init(jax.random.key(0), data[0][0])

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: mse(model.apply(p, x), y))(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses, state = [], optimiser.init(params)
    for x, y in data:
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses


class Mlp(nnx.Module):
    def __init__(self, dot_general: DotGeneral, rngs: nnx.Rngs) -> None:
        sizes = [(FEATURES, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 8)]
        layers = [nnx.Linear(*size, dtype=jnp.bfloat16, dot_general=dot_general, rngs=rngs) for size in sizes]
        self.first, self.second, self.last = layers

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def train_nnx(dot_general: DotGeneral) -> list[float]:
    model = Mlp(dot_general, nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Mlp, optimiser: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: mse(m(x), y))(model)
        optimiser.update(model, grads)
        return loss

    return [float(step(model, optimiser, x, y)) for x, y in batches()]


def main() -> None:
    for name, train in (("linen", train_linen), ("nnx", train_nnx)):
        ours, plain = train(jax_bwgemm.dot_general), train(jax.lax.dot_general)
        difference = max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))
        print(
            f"{name:5}: loss {ours[0]:.4f} -> {ours[-1]:.4f}, plain Flax {plain[-1]:.4f}, differing by {difference:.1e}"
        )
        if ours[-1] > ours[0] / 2 or difference > TOLERANCE:
            raise SystemExit(f"{name}: training through jax_bwgemm went elsewhere")


if __name__ == "__main__":
    main()
