"""Products whose sums are sharded over several axes of a mesh, or not alike in both operands; and what keeps divided
products apart in JAX's persistent compilation cache."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshed import BF16, F32, H200, arrays, compiled, mesh_of, shapes_of

import jax_bwgemm
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.ops import lowering, takeover
from jax_bwgemm.ops.partition import divide

ours = functools.partial(jax_bwgemm.matmul, **H200)
BOTH = P(("x", "y"))


@pytest.fixture(autouse=True)
def _cuda_rule(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU, planned for an H200."""
    for room in (lowering, takeover):
        monkeypatch.setattr(room, "platforms_of", lambda ctx: ["cuda"])


def placed(shapes: Sequence[tuple[int, ...]], specs: Sequence[P]) -> list[jax.Array]:
    mesh = mesh_of(AxisType.Auto)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(*shapes), specs, strict=True)]


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("column", [False, True], ids=["m", "n"])
def test_a_result_wanted_on_all_of_ks_axes_is_scattered_once(axes: tuple[str, str], column: bool) -> None:
    """Of which every device has the part that its place on both axes says."""
    operands = placed(((64, 32), (32, 48)), (P(None, ("x", "y")), BOTH))
    spec = P(None, axes) if column else P(axes)
    got, found = compiled(ours, operands, out_shardings=NamedSharding(operands[0].sharding.mesh, spec))
    assert found == ["reduce-scatter"] and got.sharding.spec == spec
    np.testing.assert_array_equal(got, np.asarray(operands[0], np.float32) @ np.asarray(operands[1], np.float32))


@pytest.mark.parametrize("form", ["matmul", "gated"])
@pytest.mark.parametrize(
    ("specs", "elements"),
    [
        ((P("x"), P(None, "y")), 2 * 32 * 48),
        ((P("x"), P(None, "y", "x")), 2 * 32 * 48),
        ((P("x"), P(None, ("y", "x"))), 2 * 32 * 48),
        ((P(None, None, "y"), P("x")), 2 * 64 * 32),
        ((P(None, None, "y"), P("x", "y")), 0),
    ],
)
def test_an_operand_is_cut_before_it_is_gathered(form: str, specs: tuple[P, P], elements: int) -> None:
    """Matrices of experts over x, whose rows or columns are over y: what is gathered is one device's experts' alone, as
    XLA does it. It was all of them."""
    operands, lines = placed(((8, 64, 32), (8, 32, 48)), specs), list[str]()

    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_bwgemm.gated_matmul(x, w, 2 * w, activation="relu", **H200)

    got, found = compiled(gated if form == "gated" else ours, operands, gathers=lines)
    sizes = [re.findall(r"= \(?\w+\[([\d,]+)\]", line)[0] for line in lines]
    elements *= 2 if form == "gated" and specs[1] != P("x") else 1
    assert sum(math.prod(map(int, size.split(","))) for size in sizes) == elements, found
    x, w = (np.asarray(operand, np.float32) for operand in operands)
    want = np.maximum(x @ w, 0) * (x @ (2 * w)) if form == "gated" else x @ w
    np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(BF16).astype(np.float32))


@pytest.mark.parametrize("rows", [64, 512])
def test_fsdp_over_two_axes_moves_weights_and_gradients_alone(rows: int) -> None:
    """No more of it with more tokens; jnp's sum is one all-reduce, which moves twice as much."""
    operands = placed(((32, 48), (rows, 32)), (BOTH, BOTH))

    def step(f: Callable[..., Any]) -> Callable[..., Any]:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return (f(x, w).astype(F32) * jnp.arange(1.0, 49.0)).sum()

        return lambda w, x: jax.grad(loss)(w, x)

    out = operands[0].sharding
    got, found = compiled(step(ours), operands, out_shardings=out)
    want, _ = compiled(step(jnp.matmul), operands, out_shardings=out)
    assert found == ["reduce-scatter"] and shapes_of(got) == shapes_of(want)
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2.0**-6)


UNLIKE = {
    "in another order": ((P(None, ("y", "x")), BOTH), ["all-reduce", "collective-permute"], True),
    "one of them further": ((P(None, "x"), BOTH), ["all-reduce"], False),
    "one of them further, on rows' axis": ((P("y", "x"), BOTH), ["all-gather", "all-reduce"], True),
}  # and whether jnp has the same collectives: it gathers both operands of the second


@pytest.mark.parametrize("name", UNLIKE)
def test_a_sum_that_operands_have_sharded_unlike_is_of_partial_products(name: str) -> None:
    """And not of gathered operands, of which each device would compute the same."""
    specs, want, is_jnps = UNLIKE[name]
    operands = placed(((64, 32), (32, 48)), specs)
    got, found = compiled(ours, operands)
    theirs, their_collectives = compiled(jnp.matmul, operands)
    assert sorted(found) == want and (sorted(their_collectives) == want) == is_jnps
    assert shapes_of(got) == shapes_of(theirs)
    np.testing.assert_array_equal(got, theirs)


@pytest.mark.parametrize("k, summed", [(64, ()), (4096, ("x",))])
def test_a_sum_of_one_operands_is_gathered_where_that_takes_less_time(k: int, summed: tuple[str, ...]) -> None:
    """What all devices compute again counts beside what is moved: little, of a short sum."""
    sizes, specs = {"m": 4096, "k": k, "n": 4096}, ({"m": (), "k": ("x",)}, {"k": (), "n": ()})
    found = divide(Contraction("mk", "kn", "mn"), sizes, {"x": 8}, specs, {"m": (), "n": ()})
    assert found.summed == summed


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("said", ["matmul", "installed"])
def test_operands_that_the_program_places_are_divided_over_the_current_mesh(kind: AxisType, said: str) -> None:
    """JAX tells a lowering no mesh then. Devices in an order of their own."""
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 4, 6, 5]].reshape(4, 2)
    x, w = (np.asarray(x) for x in arrays((64, 32), (32, 48)))
    with jax.set_mesh(jax.sharding.Mesh(devices, ("x", "y"), axis_types=(kind,) * 2)):
        place = jax.lax.with_sharding_constraint if kind is AxisType.Auto else jax.sharding.reshard
        product = ours if said == "matmul" else jnp.matmul

        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return product(place(x, P("x")), place(w, P(None, "y")))

        with jax_bwgemm.installed(), jax_bwgemm.config(**H200):
            text = jax.jit(layer).lower(x, w).as_text()
            got, found = compiled(layer, [x, w])
    assert text.count("CustomSPMDPartitioning") == 1 and found == []
    assert got.sharding.shard_shape(got.shape) == (16, 24)
    np.testing.assert_array_equal(got, x.astype(np.float32) @ w.astype(np.float32))


def test_a_symmetric_tile_is_left_out_where_rows_are_sharded() -> None:
    """There a device's part is no symmetric product; its kernel is another one, which XLA then misses on a CPU."""
    (a,) = placed(((4096, 1024),), (P("x"),))
    tile = "128x256x64_cta1_cluster2x1_symmetric"
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for jax_bwgemm_matmul"):
        jax.jit(lambda a: jax_bwgemm.gram(a, tile=tile, **H200)).lower(a).compile()


def test_the_program_tells_products_of_the_same_shapes_apart() -> None:
    """`jax_remove_custom_partitioning_ptr_from_cache_key` leaves the callback out of the cache's key."""
    operands = placed(((64, 32), (32, 48)), (P("x"), P()))

    def digest(**options: Any) -> str:
        text = jax.jit(lambda a, b: ours(a, b, **options)).lower(*operands).as_text()
        (found,) = set(re.findall(r'jax_bwgemm = "(\w+)"', text))
        return found

    options: list[dict[str, Any]] = [{}, {"activation": "relu"}, {"activation": "silu"}, {"alpha": 2.0}]
    options += [{"alpha": 3.0}, {"tile": "128x128x64_cta1_cluster1x1"}, {"out_dtype": BF16, "precision": "highest"}]
    found = [digest(**own) for own in options]
    assert len(set(found)) == len(options) and found == [digest(**own) for own in options]
