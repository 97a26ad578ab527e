"""Products on a mesh that XLA partitions: the CUDA rule, lowered and partitioned for 8 CPU devices.

The fallback on a CPU is XLA's own dot, which partitions by itself and so shows nothing. Here the rule for CUDA runs:
its collectives are read off the compiled program, its values come from local products that XLA computes, and its
kernels' shapes from what is lowered for an H200.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import collectives, partitioned
from meshed import BF16, F32, H200, arrays, compiled, grad, mesh_of, shapes_of

import jax_bwgemm
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.ops import lowering, partition
from jax_bwgemm.ops.partition import divide
from jax_bwgemm.planner import sooner
from tests.fuzz import fuzz, rounds

ours = functools.partial(jax_bwgemm.matmul, **H200)


@pytest.fixture(autouse=True)
def _cuda_rule(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU, planned for an H200."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])


def mlp(matmul: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, up, down: matmul(jax.nn.relu(matmul(x, up)), down)


A, B, X = (64, 32), (32, 48), (4, 16, 32)
PRODUCT, GRADIENT, BATCHED = "product", "gradient", "batched"
PLACEMENTS: dict[str, tuple[Any, Sequence[tuple[int, ...]], Sequence[P], list[str]]] = {
    "m": (lambda f: f, (A, B), (P("x"), P()), []),
    "n": (lambda f: f, (A, B), (P(), P(None, "x")), []),
    "m and n": (lambda f: f, (A, B), (P("x"), P(None, "y")), []),
    "m over two axes": (lambda f: f, (A, B), (P(("x", "y")), P()), []),
    "k": (lambda f: f, (A, B), (P(None, "x"), P("x")), ["all-reduce"]),
    "k over two axes": (lambda f: f, (A, B), (P(None, ("x", "y")), P(("x", "y"))), ["all-reduce"]),
    "m and k": (lambda f: f, (A, B), (P("y", "x"), P("x")), ["all-reduce"]),
    "k of a alone": (lambda f: f, (A, B), (P(None, "x"), P()), ["all-gather"]),
    "m and n on one axis": (lambda f: f, (A, B), (P("x"), P(None, "x")), ["all-gather"]),
    "FSDP": (lambda f: f, (A, B), (P("x"), P("x")), ["all-gather"]),
    "a dense layer": (lambda f: f, (X, B), (P("x", "y"), P()), []),
    "batch": (lambda f: f, ((8, 16, 32), (8, 32, 16)), (P("x"), P("x")), []),
    "transposed": (lambda f: lambda a, b: f(a, b.T), (A, B[::-1]), (P(), P("x")), []),
    "vmap": (lambda f: jax.vmap(f, (0, None)), (X, B), (P(None, "x"), P()), []),
    "vector": (lambda f: f, (A, (32,)), (P("x"), P()), []),
    "a shared": (lambda f: f, (A, (8, 32, 16)), (P(), P("x")), []),
    "gradient, m": (grad, (A, B), (P("x"), P()), ["all-reduce"]),
    "gradient, n": (grad, (A, B), (P(), P(None, "x")), ["all-reduce"]),
    "gradient, k": (grad, (A, B), (P(None, "x"), P("x")), ["all-reduce"]),
    "gradient, batch": (grad, ((8, 16, 32), (8, 32, 16)), (P("x"), P("x")), []),
    "MLP": (mlp, (X, (32, 64), (64, 32)), (P("x"), P(None, "y"), P("y")), ["all-reduce"]),
    "gradient, MLP": (
        lambda f: grad(mlp(f), 3),
        (X, (32, 64), (64, 32)),
        (P("x"), P(None, "y"), P("y")),
        ["all-reduce"] * 3,
    ),
    "gradient, MLP by FSDP": (
        lambda f: grad(mlp(f), 3),
        (X, (32, 64), (64, 32)),
        (P("x"), P("x"), P("x")),
        ["all-gather"] * 2 + ["all-reduce"],
    ),
    "scan": (
        lambda f: lambda x, w: jax.lax.scan(lambda x, w: (jnp.clip(f(x, w), -2, 2), None), x, w)[0],
        ((16, 32), (3, 32, 32)),
        (P("x"), P(None, None, "y")),
        ["all-gather"],
    ),
    "checkpoint": (lambda f: grad(jax.checkpoint(f)), (A, B), (P("x"), P()), ["all-reduce"]),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_collectives_are_jnps(name: str) -> None:
    """And so are values and shardings; none of the products is computed twice."""
    of, shapes, specs, want = PLACEMENTS[name]
    mesh = mesh_of(AxisType.Auto)
    operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays(*shapes), specs, strict=True)]
    assert "CustomSPMDPartitioning" in jax.jit(of(ours)).lower(*operands).as_text()
    got, found = compiled(of(ours), operands)
    theirs, their_collectives = compiled(of(jnp.matmul), operands)
    assert found == want == their_collectives
    assert shapes_of(got) == shapes_of(theirs)
    jax.tree.map(np.testing.assert_array_equal, got, theirs)


def test_a_batch_invariant_sum_is_of_gathered_operands() -> None:
    """Of no partial products, whose number is the devices'."""
    mesh = mesh_of(AxisType.Auto)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays((64, 128), (128, 96)), (P(None, "x"), P("x")), strict=True)
    ]
    out, found = compiled(lambda a, b: ours(a, b, deterministic="batch"), placed)
    assert set(found) == {"all-gather"}
    np.testing.assert_array_equal(out, np.asarray(placed[0], np.float32) @ np.asarray(placed[1], np.float32))


def test_a_gradient_of_two_sharded_sums_is_one_reduction() -> None:
    """Of b and s, in that of a dense layer's weight: jnp reduces over either axis."""
    mesh = mesh_of(AxisType.Auto)
    x, w = (jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(X, B), (P("x", "y"), P()), strict=True))
    got, found = compiled(grad(ours), [x, w])
    want, theirs = compiled(grad(jnp.matmul), [x, w])
    assert (found, theirs) == (["all-reduce"], ["all-reduce"] * 2)
    assert shapes_of(got) == shapes_of(want)
    np.testing.assert_allclose(*(np.asarray(z[1], np.float64) for z in (got, want)), rtol=2.0**-6)


@pytest.mark.parametrize("out", [P("x"), P(None, "x")], ids=["m", "n"])
def test_a_result_wanted_on_ks_axis_is_scattered(out: P) -> None:
    """Not two gathers; where jnp reduces and slices, of which XLA makes the same on GPUs."""
    mesh = mesh_of(AxisType.Auto)
    placed = (P(None, "x"), P("x"))
    operands = [jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), placed, strict=True)]
    got, found = compiled(ours, operands, out_shardings=NamedSharding(mesh, out))
    assert found == ["reduce-scatter"] and got.sharding.spec == out
    np.testing.assert_array_equal(got, operands[0] @ operands[1])


def test_a_result_that_is_to_be_gathered_is_so_afterwards() -> None:
    mesh = mesh_of(AxisType.Auto)
    operands = [jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), (P("x"), P()), strict=True)]
    for f in (ours, jnp.matmul):
        got, found = compiled(f, operands, out_shardings=NamedSharding(mesh, P()))
        assert found == ["all-gather"] and got.sharding.is_fully_replicated


FUSED: dict[str, tuple[Sequence[P], list[str]]] = {
    "rows and columns": ((P("x"), P(None, "y"), P("y"), P("x", "y")), []),
    "k": ((P(None, "x"), P("x"), P(), P()), ["all-reduce"]),
    "m and k": ((P("y", "x"), P("x"), P(), P("y")), ["all-reduce"]),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("of", [lambda f: f, lambda f: grad(f, 4)], ids=["forward", "gradient"])
def test_an_epilogue_is_behind_the_sum(name: str, of: Any) -> None:
    """Its operands are taken with the sharding that they need; one reduction, before it."""
    mesh = mesh_of(AxisType.Auto)
    specs, want = FUSED[name]
    shapes = (A, B, (48,), (64, 48))
    operands = [jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(*shapes), specs, strict=True)]

    def fused(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return ours(a, b, bias=bias, activation="relu", residual=residual)

    def plain(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return jax.nn.relu(jnp.matmul(a, b) + bias) + residual

    got, found = compiled(of(fused), operands)
    theirs, their_collectives = compiled(of(plain), operands)
    assert found == their_collectives and (found == want or of(fused) is not fused)
    assert shapes_of(got) == shapes_of(theirs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(x, F32), np.asarray(y, F32), rtol=2.0**-6, atol=2.0)


@pytest.mark.parametrize("dtype", ["result", "float32"])
def test_the_dtype_of_partial_sums(dtype: str) -> None:
    mesh = mesh_of(AxisType.Auto)
    specs = (P(None, "x"), P("x"))
    operands = [jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), specs, strict=True)]
    reductions: list[str] = []
    with jax_bwgemm.config(partial_sums=dtype):
        compiled(ours, operands, reductions)
    # XLA:CPU adds bfloat16 as float32 by itself: what it was asked for is told by its name.
    assert len(reductions) == 1 and ("promoted" in reductions[0]) == (dtype == "result")
    with (
        pytest.raises(ValueError, match="`partial_sums` requires one of result, float32, got 'f16'"),
        jax_bwgemm.config(partial_sums="f16"),
    ):
        pass


EXPLICIT: dict[str, tuple[Any, Sequence[tuple[int, ...]], Sequence[P]]] = {
    "m": (lambda f: f, (A, B), (P("x"), P())),
    "n": (lambda f: f, (A, B), (P(), P(None, "x"))),
    "m and n": (lambda f: f, (A, B), (P("x"), P(None, "y"))),
    "k of a alone": (lambda f: f, (A, B), (P(None, "x"), P())),
    "a dense layer": (lambda f: f, (X, B), (P("x", "y"), P())),
    "tensor parallel": (lambda f: f, (X, B), (P("x"), P(None, "y"))),
    "vector": (lambda f: f, (A, (32,)), (P("x"), P())),
    "a shared": (lambda f: f, (A, (8, 32, 16)), (P(), P("x"))),
    "vmap": (lambda f: jax.vmap(f, (0, None)), (X, B), (P("x"), P())),
    "k, replicated": (lambda f: functools.partial(f, out_sharding=P()), (A, B), (P(None, "x"), P("x"))),
    "k, and m by another": (lambda f: functools.partial(f, out_sharding=P("y")), (A, B), (P("y", "x"), P("x"))),
}


@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("of", [lambda f: f, grad], ids=["forward", "gradient"])
def test_explicit_axes(name: str, of: Any) -> None:
    """Values, types with their shardings, and collectives are jnp's; where these differ there are fewer."""
    made, shapes, specs = EXPLICIT[name]
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = [jax.device_put(z, s) for z, s in zip(arrays(*shapes), specs, strict=True)]
        got, found = compiled(of(made(ours)), operands)
        want, theirs = compiled(of(made(jnp.matmul)), operands)
    if name != "k of a alone" or of is not grad:  # gathered for both products at once there, one after another here
        assert found == theirs or (len(found) < len(theirs) and set(found) <= set(theirs))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        np.testing.assert_allclose(np.asarray(x, F32), np.asarray(y, F32), rtol=2.0**-6)


@pytest.mark.parametrize("out", [P(), P("y"), P(None, "y"), P("y", None)], ids=str)
@pytest.mark.parametrize("is_cuda", [True, False])
def test_out_sharding_may_leave_out_the_last_dimensions(out: P, is_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For our rule and for the fallback; under vmap, too."""
    if not is_cuda:
        monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cpu"])
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        a, b = (jax.device_put(z, s) for z, s in zip(arrays(A, B), (P(None, "x"), P("x")), strict=True))
        stack = jax.device_put(arrays((3, *A))[0], P(None, None, "x"))
        for f, x in ((lambda f: f, a), (lambda f: jax.vmap(f, (0, None)), stack)):
            got, _ = compiled(f(functools.partial(ours, out_sharding=out)), [x, b])
            want = jax.jit(f(functools.partial(jnp.matmul, out_sharding=out)))(x, b)
            assert jax.typeof(got) == jax.typeof(want)
            np.testing.assert_array_equal(got, want)


def test_explicit_axes_of_einsum_and_dot_general() -> None:
    dot = functools.partial(jax_bwgemm.dot_general, **H200)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        x, w = (jax.device_put(z, s) for z, s in zip(arrays(X, B), (P("x"), P(None, "y")), strict=True))
        got, found = compiled(lambda x, w: jnp.einsum("bsd,df->bsf", x, w, _dot_general=dot), [x, w])
        want, _ = compiled(lambda x, w: jnp.einsum("bsd,df->bsf", x, w), [x, w])
    assert jax.typeof(got) == jax.typeof(want) and found == []
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("specs", [(P(None, "x"), P("x")), (P("x"), P(None, "x"))], ids=["k by k", "m and n"])
def test_explicit_axes_are_refused_as_jnp_refuses_them(specs: Sequence[P]) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = [jax.device_put(z, s) for z, s in zip(arrays(A, B), specs, strict=True)]
        messages = []
        for f in (ours, jnp.matmul):
            with pytest.raises(Exception, match="sharded") as error:
                jax.jit(f)(*operands)
            messages.append((type(error.value), str(error.value)[:40]))
    assert messages[0] == messages[1]


def test_a_shard_map_of_some_axes_is_xlas_and_says_so() -> None:
    mesh = mesh_of(AxisType.Auto)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        half = jax.shard_map(jax_bwgemm.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
        return half(a, b)

    a, b = (jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), (P("x", "y"), P()), strict=True))
    with pytest.warns(jax_bwgemm.FallbackWarning, match="requires all mesh axes to be manual, and y is left to XLA"):
        got = jax.jit(f)(a, b)
    np.testing.assert_array_equal(got, a @ b)


def test_without_what_it_needs_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's product, which divides as it should, and a warning that names the version."""
    for primitive in (lowering.matmul_p, lowering.fused_matmul_p):
        partition.told_devices.discard(primitive)
    try:
        mesh = mesh_of(AxisType.Auto)
        a, b = (jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), (P("x"), P()), strict=True))
        with pytest.warns(jax_bwgemm.FallbackWarning, match=f"jax {jax.__version__} does not tell the devices"):
            got, found = compiled(jax_bwgemm.matmul, [a, b])
        assert found == [] and got.sharding.spec == P("x")
    finally:
        partition.told_devices.update((lowering.matmul_p, lowering.fused_matmul_p))


def test_without_shardy_it_is_xlas_and_says_so() -> None:
    """XLA aborts the process at our rule then."""
    mesh = mesh_of(AxisType.Auto)
    a, b = (jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip(arrays(A, B), (P("x"), P()), strict=True))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.warns(jax_bwgemm.FallbackWarning, match="the Shardy partitioner, and it is off: set `jax_use_"):
            got, found = compiled(functools.partial(jax_bwgemm.matmul, device="h200"), [a, b])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert found == [] and got.sharding.spec == P("x")
    np.testing.assert_array_equal(got, a @ b)


def kernels(text: str) -> list[str]:
    """(operands) -> result of each, and its tile."""
    pattern = (
        r'= \(?(\S+?)\{.*? custom-call\(.*operand_layout_constraints=\{(.*?)\}\},.*variant = "[^"]*?_(\d+x\d+x\d+)_'
    )
    return [f"{re.sub(r'{[^}]*}?', '', args)} -> {out} {tile}" for out, args, tile in re.findall(pattern, text)]


def test_the_tile_is_for_the_shard(artifacts_dir: Path, tmp_path: Path) -> None:
    """4096 rows over 4 and 4096 columns over 2: kernels of 1024 by 2048, as they lie, and their gradients'."""
    mesh = mesh_of(AxisType.Auto)
    a = jax.ShapeDtypeStruct((4096, 8192), BF16, sharding=NamedSharding(mesh, P("x")))
    b = jax.ShapeDtypeStruct((4096, 8192), BF16, sharding=NamedSharding(mesh, P("y")))  # transposed

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(a, b.T, device="h200", on_fallback="error")

    text = partitioned(f, [a, b], tmp_path)
    (call,) = kernels(text)
    whole = jax_bwgemm.explain(
        jax.ShapeDtypeStruct((1024, 8192), BF16), jax.ShapeDtypeStruct((8192, 2048), BF16), device="h200"
    )
    assert call.startswith("bf16[1,1024,8192], bf16[1,2048,8192] -> bf16[1,1024,2048]")
    assert call.split()[-1] in str(whole.variant)
    assert collectives(text) == [] and " transpose(" not in text


def test_what_trees_expect_of_xla_is_for_the_shard(
    artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA is expected to be done sooner with the whole product's sizes, not with those of a device's part."""
    monkeypatch.setattr(sooner, "xla_us", lambda problem, arch: 1.0 if problem.m == 4096 else None)
    mesh = mesh_of(AxisType.Auto)
    a = jax.ShapeDtypeStruct((4096, 8192), BF16, sharding=NamedSharding(mesh, P("x")))
    b = jax.ShapeDtypeStruct((8192, 4096), BF16, sharding=NamedSharding(mesh, P(None, "y")))
    (call,) = kernels(partitioned(functools.partial(jax_bwgemm.matmul, device="h200"), [a, b], tmp_path))
    assert call.startswith("bf16[1,1024,8192], bf16[1,8192,2048] -> bf16[1,1024,2048]")
    report = jax_bwgemm.explain(lambda a, b: jax_bwgemm.matmul(a, b, device="h200"), a, b)
    assert "a device's part may have another kernel" in str(report) and "XLA is expected to take 1.0 us" in str(report)


def test_a_short_sum_of_xlas_is_no_partition_of_ours(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are short as well."""
    monkeypatch.setattr(sooner, "xla_us", lambda problem, arch: 1.0)
    mesh = mesh_of(AxisType.Auto)
    for k, is_divided in ((64, False), (8192, True)):
        a = jax.ShapeDtypeStruct((4096, k), BF16, sharding=NamedSharding(mesh, P("x")))
        b = jax.ShapeDtypeStruct((k, 4096), BF16, sharding=NamedSharding(mesh, P(None, "y")))
        text = jax.jit(ours).lower(a, b).as_text()
        assert ("CustomSPMDPartitioning" in text) == is_divided


def test_a_repack_is_of_the_shard(repacks_dir: Path, tmp_path: Path) -> None:
    mesh = mesh_of(AxisType.Auto)
    a = jax.ShapeDtypeStruct((4096, 1001), BF16, sharding=NamedSharding(mesh, P("x")))
    b = jax.ShapeDtypeStruct((1001, 4096), BF16, sharding=NamedSharding(mesh, P(None, "y")))
    text = partitioned(functools.partial(jax_bwgemm.matmul, device="h200", on_fallback="error"), [a, b], tmp_path)
    repack = next(line for line in text.splitlines() if "jax_bwgemm_repack_v2" in line)
    assert "bf16[1,1024,1024]" in repack and collectives(text) == []


MESH = {"x": 4, "y": 2}
axes = st.sampled_from([(), ("x",), ("y",), ("x", "y"), ("y", "x")])


@st.composite
def placements(draw: Any) -> tuple[Contraction, dict[str, int], list[dict[str, Any]], dict[str, Any]]:
    contraction = draw(st.sampled_from([Contraction("bmk", "bkn", "bmn"), Contraction("bsd", "df", "bsf")]))
    sizes = {mode: draw(st.sampled_from([1, 6, 8, 64])) for mode in "bmknsdf"}

    def placement(modes: str) -> dict[str, Any]:
        free, found = {"x", "y"}, {}
        for mode in modes:
            chosen = tuple(axis for axis in draw(axes) if axis in free)
            free -= set(chosen)
            found[mode] = chosen
        return found

    return contraction, sizes, [placement(contraction.a), placement(contraction.b)], placement(contraction.out)


@fuzz
@given(placements())
@settings(deadline=None, max_examples=rounds(300))
def test_a_division_is_one(case: Any) -> None:
    """No axis divides two modes of one array; sums are over axes that no result has, but a scattered one; and what is
    summed is divided evenly."""
    contraction, sizes, specs, result = case
    found = divide(contraction, sizes, MESH, specs, result)
    for modes in contraction.operands:
        used = [axis for mode in modes for axis in found.operands[mode]]
        assert len(used) == len(set(used))
    of_result = [axis for mode in contraction.out for axis in found.result[mode]]
    assert len(of_result) == len(set(of_result))
    assert set(found.summed) & set(of_result) == set(found.over) and bool(found.over) == bool(found.scattered)
    for mode in contraction.summed:
        assert sizes[mode] % int(np.prod([MESH[axis] for axis in found.operands[mode]])) == 0
    if found.scattered:
        assert sizes[found.scattered] % int(np.prod([MESH[axis] for axis in found.result[found.scattered]])) == 0


@pytest.mark.parametrize("specs", [(P("x"), P()), (P(None, "x"), P("x")), (P("y", "x"), P())], ids=str)
def test_sizes_that_do_not_divide(specs: Sequence[P]) -> None:
    """An intermediate may be sharded unevenly, its last shard filled up with anything: nothing of that is summed."""
    mesh = mesh_of(AxisType.Auto)
    a, b = arrays((30, 18), (18, 22))

    def f(matmul: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (
            jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, s)) for x, s in zip((a, b), specs, strict=True)
        )
        return jax.lax.with_sharding_constraint(matmul(a, b), NamedSharding(mesh, P()))

    got, _ = compiled(functools.partial(f, ours), [a, b])
    np.testing.assert_array_equal(got, (a + 1) @ (b + 1))


def test_explain_lists_the_whole_products() -> None:
    """Their parts are lowered when XLA compiles, and `explain` compiles nothing."""
    mesh = mesh_of(AxisType.Auto)
    a, b = (
        jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((4096, 1024), P("x")), ((1024, 2048), P(None, "y")))
    )
    jax_bwgemm.stats(reset=True)
    found = jax_bwgemm.explain(grad(jax_bwgemm.matmul), a, b, device="h200")
    assert [product.problem.partition(" ")[0] for product in found.products] == [
        "4096x2048x1024",
        "1024x2048x4096",
        "4096x1024x2048",
    ]
    assert all(product.kernel and "divided over the mesh" in product.notes[0] for product in found.products)
    assert jax_bwgemm.stats() == jax_bwgemm.Stats({}, {})  # nothing runs


def test_an_error_of_a_part_is_its_sentence() -> None:
    """XLA asks for the parts while it compiles; what is raised there comes back as JAX's own error."""
    mesh = mesh_of(AxisType.Auto)
    operands = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays(A, B)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="FallbackError: XLA computes .*: this is a CPU"):
        compiled(lambda a, b: jax_bwgemm.matmul(a, b, device="h200", on_fallback="error"), operands)
