"""`accelerate`: two products that are a feed-forward block are one function, with a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry, layers, write_fake_artifacts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, struct

from jax_bwgemm import accelerate
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import kept, pullback
from jax_bwgemm.facts.variant import Variant

F32 = jnp.float32
pytestmark = pytest.mark.usefixtures("layers_on_h200")
ROWS, K, HIDDEN = 8192, 4096, 14336
SIZES = {
    "x": (ROWS, K),
    "w": (K, HIDDEN),
    "u": (K, HIDDEN),
    "b": (HIDDEN,),
    "v": (HIDDEN, K),
    "c": (K,),
    "r": (ROWS, K),
}
SMALL = {"x": (64, 32), "w": (32, 48), "u": (32, 48), "b": (48,), "v": (48, 32), "c": (32,), "r": (64, 32)}


def gated(x: Any, w: Any, u: Any, v: Any) -> Any:
    return (jax.nn.silu(x @ w) * (x @ u)) @ v


def gated_residual(x: Any, w: Any, u: Any, v: Any) -> Any:
    return x + (jax.nn.silu(x @ w) * (x @ u)) @ v


def biased(x: Any, w: Any, b: Any, v: Any, c: Any, r: Any) -> Any:
    return jax.nn.relu(x @ w + b) @ v + c + r


def plain(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.relu(x @ w) @ v


def with_einsum(x: Any, w: Any, v: Any) -> Any:
    return jnp.einsum("...f,fk->...k", jax.nn.relu(jnp.einsum("...k,kf->...f", x, w)), v)


FORMS = [gated, gated_residual, biased, plain, with_einsum]


def of(f: Callable[..., Any], sizes: dict[str, tuple[int, ...]]) -> list[jax.ShapeDtypeStruct]:
    return [struct(*sizes[name]) for name in f.__code__.co_varnames[: f.__code__.co_argcount]]


def values(f: Callable[..., Any], dtype: Any = F32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x.shape) / 4, dtype) for x in of(f, SMALL)]


def in_blocks(f: Callable[..., Any], *args: Any) -> list[bool]:
    return [product.is_in_block for product in accelerate(f).report(*args).products]


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """Of a loss that no kernel takes part in, by all operands."""
    return lambda *args: jax.grad(lambda *x: jnp.sin(f(*x).astype(F32)).sum(), range(len(args)))(*args)


def close(got: Any, want: Any, tolerance: float) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        atol = tolerance * float(jnp.abs(w).max())
        np.testing.assert_allclose(g.astype(F32), w.astype(F32), rtol=0, atol=atol)


@pytest.mark.parametrize("f", FORMS)
def test_forms(f: Callable[..., Any]) -> None:
    args = of(f, SIZES)
    assert in_blocks(f, *args) == [True, True]
    assert all("in a block" in str(product) for product in accelerate(f).report(*args).products)
    batched = [struct(4, *x.shape) if x.shape[0] == ROWS else x for x in args]
    assert in_blocks(f, *batched) == [True, True]
    given = values(f)
    close(accelerate(f)(*given), f(*given), 1e-5)
    close(gradients(accelerate(f))(*given), gradients(f)(*given), 1e-5)
    close(accelerate(f)(*values(f, BF16)), f(*given).astype(BF16), 0.03)


@pytest.mark.parametrize(
    ("f", "before", "back"),
    [
        (gated, kept("silu", is_gated=True), pullback("silu", is_gated=True)),
        (gated_residual, kept("silu", is_gated=True), pullback("silu", is_gated=True)),
        (biased, kept("relu", has_bias=True), pullback("relu", has_bias=True)),  # with the gradient of its bias
    ],
)
def test_a_gradient_is_fused_across_both_products(
    f: Callable[..., Any], before: Epilogue, back: Epilogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kernel that makes the cotangent of the hidden values, not in passes of XLA's."""
    tile, forms = Tile(128, 256, stream_k=True), {"seconds": back.seconds, "reductions": back.reductions}
    large = fake_entry(Variant("sm_90a", *["bfloat16"] * 3, "k", "k", tile, back.out, **forms))
    (tmp_path / "kernels").mkdir()
    write_fake_artifacts(tmp_path / "kernels", [*layers(), large])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "kernels"))
    text = hlo(gradients(accelerate(f)), *of(f, SIZES))
    kinds = [call["variant"].split("_cta1_")[1] for call in calls(text)]
    assert [sum(kind.endswith(own.kind) for kind in kinds) for own in (before, back)] == [1, 1]
    assert "stablehlo.logistic" not in text and "stablehlo.compare" not in text


def read_twice(x: Any, w: Any, v: Any) -> Any:
    h = jax.nn.relu(x @ w)
    return h @ v, h


def by_itself(x: Any, w: Any, v: Any) -> Any:
    h = jax.nn.relu(x @ w)
    return h @ h.T


def behind_more(x: Any, w: Any, v: Any) -> Any:
    return jnp.cumsum(jax.nn.relu(x @ w), 0) @ v


def in_float32(x: Any, w: Any, v: Any) -> Any:
    return jnp.dot(jax.nn.relu(x @ w), v, preferred_element_type=F32)


def exactly(x: Any, w: Any, v: Any) -> Any:
    return jnp.dot(jax.nn.relu(x @ w), v, precision="highest")


def as_the_second_factor(x: Any, w: Any, v: Any) -> Any:
    return v.T @ jax.nn.relu(x @ w).T


def activated(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.relu(jax.nn.relu(x @ w) @ v)


@pytest.mark.parametrize(
    "f", [read_twice, by_itself, behind_more, in_float32, exactly, as_the_second_factor, activated]
)
def test_what_is_none(f: Callable[..., Any]) -> None:
    args = of(f, SIZES)
    assert not any(in_blocks(f, *args))
    given = values(f)
    close(accelerate(f)(*given), f(*given), 1e-5)


def test_a_third_product_makes_a_block_of_the_last_two() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        return jax.nn.relu(jax.nn.relu(x @ w) @ v) @ w

    assert in_blocks(f, *of(plain, SIZES)) == [False, True, True]


def test_transformations() -> None:
    args, own = values(biased), accelerate(biased)
    tangents = [x + 1 for x in args]
    close(jax.jvp(own, args, tangents), jax.jvp(biased, args, tangents), 1e-5)
    stacked = [jnp.stack([x, -x]) for x in args]
    close(jax.vmap(gradients(own))(*stacked), jax.vmap(gradients(biased))(*stacked), 1e-5)
    remat = jax.checkpoint(own, policy=jax.checkpoint_policies.nothing_saveable)
    close(gradients(remat)(*args), gradients(biased)(*args), 1e-5)
    given, small = values(gated), accelerate(gated)

    def twice(f: Callable[..., Any]) -> Any:
        return jax.grad(lambda x: (gradients(f)(x, *given[1:])[1] ** 2).sum())(given[0])

    close(twice(small), twice(gated), 1e-4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    args = values(gated_residual)
    places = [P("x"), P(None, "x"), P(None, "x"), P("x")]  # tensor-parallel hidden values, of sharded rows
    for own in ([P("x"), P(), P(), P()], [P(), *places[1:]]):
        with jax.set_mesh(mesh):
            given = [jax.device_put(x, NamedSharding(mesh, place)) for x, place in zip(args, own, strict=True)]
            if own[0] == P() and axis_type is AxisType.Explicit:
                continue  # JAX refuses the product itself
            found = jax.jit(gradients(accelerate(gated_residual)))(*given)
            close(found, gradients(gated_residual)(*args), 1e-5)
